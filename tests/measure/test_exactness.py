"""What a tie is: every written token is looked at, and the target's own rounding decides."""

import pytest
import torch
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from eagle31_hf.cache.stock import CACHE_ARGUMENT
from eagle31_hf.measure.exactness import Kind, SampledBy, judge
from eagle31_hf.sampling.logits_processing import DraftWarping
from helpers import random_prompts, seeded, target_of


@pytest.fixture(scope="module")
def greedy():
    model, prompt = target_of("llama"), torch.tensor(random_prompts(1)[0])
    return model, prompt, model.generate(prompt[None], max_new_tokens=10, do_sample=False)[0, len(prompt) :].tolist()


def judged(greedy, answer, model=None):
    return judge(model or greedy[0], greedy[1], answer, greedy[2], blocks=(4,))


def test_equal_answers_need_no_proof(greedy):
    assert judged(greedy, list(greedy[2]), model=object()).kind == Kind.SAME


def test_a_wrong_token_is_found_wherever_it_stands(greedy):
    for place in range(10):
        wrong = list(greedy[2])
        wrong[place] = (wrong[place] + 1) % 96
        verdict = judged(greedy, wrong)
        assert (verdict.kind, verdict.position) == (Kind.DIFFERENT, place)
        assert verdict.logit_gap > 2 * verdict.rounding


def test_an_answer_that_ends_early_is_wrong(greedy):
    assert judged(greedy, greedy[2][:4]).kind == Kind.DIFFERENT


def tied_model(model, ours, theirs):
    """The target with one token as good as another, wherever that is better."""

    class Tied:
        config = model.config

        def __call__(self, **kwargs):
            output = model(**kwargs)
            output.logits[..., ours] = output.logits[..., [ours, theirs]].amax(-1)
            return output

    return Tied()


def test_a_sampled_answer_is_judged_by_its_noise(greedy):
    """Row 1 of 2: another token is wrong, also one that is likelier, and one within rounding is a tie."""
    model, prompt, _ = greedy
    warping = DraftWarping([TemperatureLogitsWarper(0.8)])
    with seeded(5):
        rows = model.generate(prompt.repeat(2, 1), max_new_tokens=10, do_sample=True, temperature=0.8, top_k=0)
    plain = rows[1, len(prompt) :].tolist()
    sampled = SampledBy(5, 1, 2, warping)
    with torch.no_grad():
        logits = model(rows[1:2, :-1]).logits[0, len(prompt) - 1 :]
    assert sampled.scores(logits).argmax(-1).tolist() == plain
    likelier = list(plain)
    likelier[4] = int(logits[4].argmax())
    assert likelier != plain
    verdict = judge(model, prompt, likelier, plain, blocks=(4,), sampled=sampled)
    assert (verdict.kind, verdict.position) == (Kind.DIFFERENT, 4)
    assert verdict.logit_gap > 2 * verdict.rounding


def test_a_tie_is_proven_and_what_follows_it_is_looked_at_too(greedy):
    model, prompt, plain = greedy
    place, other = 3, next(token for token in range(2, 96) if token not in plain)
    tied = tied_model(model, other, plain[place])
    prefix = [*plain[:place], other]
    ids = torch.cat((prompt, torch.tensor(prefix)))[None]
    rest = model.generate(ids, max_new_tokens=6, do_sample=False)[0, ids.shape[1] :].tolist()
    verdict = judged(greedy, prefix + rest, model=tied)
    assert (verdict.kind, verdict.position) == (Kind.TIE, place)
    assert judged(greedy, prefix + rest).kind == Kind.DIFFERENT, "without the tie it is wrong"
    wrong = [*rest[:3], (rest[3] + 1) % 96, *rest[4:]]
    assert judged(greedy, prefix + wrong, model=tied).kind == Kind.DIFFERENT, "behind the tie, too"


def test_rounding_of_what_was_written_before_counts(greedy):
    """Keys and values that were written token by token move the logits where the last block alone does not."""
    model, prompt, plain = greedy
    other = next(token for token in range(2, 96) if token not in plain)

    class Rounding:
        config = model.config

        def __call__(self, **kwargs):
            output, cache = model(**kwargs), kwargs.get(CACHE_ARGUMENT)
            if cache is not None:
                cache.forwards = getattr(cache, "forwards", 0) + 1
            gap = 0.1 if cache is None or cache.forwards < 3 else 0.0
            output.logits[..., other] = output.logits[..., plain[3]] - gap
            return output

    verdict = judge(Rounding(), prompt, [*plain[:3], other], plain[:4], blocks=(4,))
    assert verdict.kind == Kind.TIE
    assert verdict.logit_gap == pytest.approx(0.1, abs=1e-5)


@pytest.mark.parametrize("in_blocks", [True, False])
@pytest.mark.parametrize("cut", ["top-k", "top-p"])
def test_which_tokens_may_be_drawn_is_a_matter_of_rounding_too(greedy, cut, in_blocks):
    """The last token that is kept is drawn, but read at once, or in blocks, it is left out: by a tie, whichever text is
    judged. One that is out of rounding's reach is wrong."""
    model, prompt, _ = greedy
    with torch.no_grad():
        logits = model(prompt[None]).logits[0, -1]
    order, shares = logits.argsort(descending=True), (logits / 0.8).softmax(-1).sort(descending=True).values
    cuts = {"top-k": TopKLogitsWarper(4), "top-p": TopPLogitsWarper(float(shares[:3].sum() + shares[4] / 2))}
    last, beyond = int(order[3]), int(order[12])
    sampled = next(
        by
        for seed in range(999)
        if (by := SampledBy(seed, 0, 1, DraftWarping([TemperatureLogitsWarper(0.8), cuts[cut]])))
        and by.scores(logits[None]).argmax() == last
    )
    without = logits.index_fill(0, torch.tensor([last]), float(logits[order[4]]) - 1e-3)
    second = int(sampled.scores(without[None]).argmax())
    assert second != last

    class Rounding:
        config = model.config

        def __call__(self, **kwargs):
            output = model(**kwargs)
            if (CACHE_ARGUMENT in kwargs) is in_blocks:
                output.logits[..., last] = without[last]
            return output

    def judged_by(answered, answer, reference):
        return judge(answered, prompt, [answer], [reference], blocks=(4,), sampled=sampled).kind

    assert judged_by(Rounding(), last, second) == judged_by(Rounding(), second, last) == Kind.TIE
    assert judged_by(Rounding(), beyond, last) == judged_by(model, second, last) == Kind.DIFFERENT
    assert judged_by(model, last, beyond) == Kind.DIFFERENT


def test_a_tie_of_the_only_tokens_that_are_kept_excuses_no_other_token(greedy):
    """Either of the two best may be the one that top-k of 1 keeps, and a third is wrong."""
    model, prompt, _ = greedy
    with torch.no_grad():
        best, second, third = model(prompt[None]).logits[0, -1].topk(3).indices.tolist()

    class Rounding:
        config = model.config

        def __call__(self, **kwargs):
            output = model(**kwargs)
            output.logits[..., second] = output.logits[..., best] + (1e-4 if CACHE_ARGUMENT in kwargs else -1e-4)
            return output

    sampled = SampledBy(0, 0, 1, DraftWarping([TopKLogitsWarper(1)]))
    kinds = [judge(Rounding(), prompt, [each], [best], blocks=(4,), sampled=sampled).kind for each in (second, third)]
    assert kinds == [Kind.TIE, Kind.DIFFERENT]
