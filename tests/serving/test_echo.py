"""`echo`: completions that repeat their prompt, with its log-probabilities, which evaluations score answers by."""

from __future__ import annotations

import pytest
import torch

from loopback import MODEL

PROMPT = "A shop sells apples at 3 dollars a bag, and the weather in Portland is going to be sunny. " * 3


def ids_of(pair, text=PROMPT):
    return pair.tokenizer(text)["input_ids"]


def ask(client, **settings):
    return client.completions.create(model=MODEL, temperature=0, echo=True, **settings)


@torch.no_grad()
def scores(pair, ids):
    """The target's log-probabilities by one forward: `(n, V)` after each token."""
    return pair.target(torch.tensor([ids])).logits[0].float().log_softmax(-1)


@pytest.mark.parametrize("max_tokens", [0, 1, 5])
def test_a_prompts_log_probabilities_are_the_targets_own(client, pair, max_tokens):
    """Of a prompt longer than what is read at once, also where the server has read it before."""
    ids = ids_of(pair)
    assert len(ids) > 64
    wanted = scores(pair, ids)
    for _ in range(2):
        told = ask(client, prompt=ids, max_tokens=max_tokens, logprobs=3).choices[0]
        values, top = told.logprobs.token_logprobs, told.logprobs.top_logprobs
        assert len(values) == len(top) == len(told.logprobs.tokens) == len(ids) + max_tokens
        assert values[0] is top[0] is None
        own = wanted[range(len(ids) - 1), ids[1:]]
        assert values[1 : len(ids)] == pytest.approx(own.tolist(), abs=1e-4)
        best = wanted[: len(ids) - 1].topk(3).values.tolist()
        for each, likeliest in zip(top[1 : len(ids)], best, strict=True):
            assert max(each.values()) == pytest.approx(likeliest[0], abs=1e-4)
            assert min(each.values()) == pytest.approx(likeliest[len(each) - 1], abs=1e-4)
    assert told.finish_reason == "length"
    greedy = [at for at in range(1, len(ids)) if wanted[at - 1].argmax() == ids[at]]
    assert greedy
    assert all(values[at] == max(top[at].values()) for at in greedy), "equal to the last digit, by which it is known"


def test_what_is_written_after_an_echo_is_as_without(client, pair):
    plain = client.completions.create(model=MODEL, prompt=PROMPT, temperature=0, max_tokens=9, logprobs=1).choices[0]
    for logprobs in (None, 1):
        told = ask(client, prompt=PROMPT, max_tokens=9, logprobs=logprobs).choices[0]
        assert told.text == PROMPT + plain.text
    own = [part[-9:] for part in (told.logprobs.tokens, told.logprobs.text_offset)]
    assert own == [plain.logprobs.tokens, [len(PROMPT) + at for at in plain.logprobs.text_offset]]
    assert told.logprobs.token_logprobs[-9:] == pytest.approx(plain.logprobs.token_logprobs, abs=1e-4)


def test_offsets_find_each_token_in_the_text(client, pair):
    told = ask(client, prompt=PROMPT, max_tokens=4, logprobs=0).choices[0]
    shown = 0
    for text, at in zip(told.logprobs.tokens, told.logprobs.text_offset, strict=True):
        if not text.startswith("<"):  # of a special token that the tokenizer begins texts with there is nothing to see
            assert told.text[at : at + len(text)] == text
            shown += 1
    assert shown >= len(ids_of(pair))


def test_several_prompts_and_choices_are_each_echoed(client, pair):
    prompts = [ids_of(pair, "A shop"), ids_of(pair, "The weather in Portland")]
    told = ask(client, prompt=prompts, max_tokens=2, n=2, logprobs=1).choices
    for index, choice in enumerate(told):
        prompt = prompts[index // 2]
        assert choice.text.startswith(pair.tokenizer.decode(prompt))
        wanted = scores(pair, prompt)[range(len(prompt) - 1), prompt[1:]].tolist()
        assert choice.logprobs.token_logprobs[1 : len(prompt)] == pytest.approx(wanted, abs=1e-4)


def test_a_prompt_of_one_token_follows_nothing(client, pair):
    told = ask(client, prompt=[ids_of(pair)[-1]], max_tokens=0, logprobs=2).choices[0]
    assert (told.logprobs.token_logprobs, told.logprobs.text_offset) == ([None], [0])
