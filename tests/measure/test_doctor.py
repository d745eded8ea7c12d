"""Planted faults are named, drafts count while they are right, drift is counted as by hand, and which states a head
inside a target reads and feeds back is told by the target's own text."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor
from torch.nn import functional as F

from eagle31_hf import Eagle31Drafter
from eagle31_hf.demo import drafter_path, target_path
from eagle31_hf.drafter.replay import TargetText, drafts_along, read_text
from eagle31_hf.drafter.session import DraftSession
from eagle31_hf.measure import bench, doctor, drift
from eagle31_hf.measure.bench import Bench
from eagle31_hf.measure.doctor import (
    DEPTH,
    Finding,
    drift_finding,
    examine,
    preflight,
    reading_findings,
    write_both,
)
from eagle31_hf.measure.drift import CONDITIONS, SINK_TOKENS, DriftCurve, ObservedCache, curve_of
from eagle31_hf.measure.exactness import Kind, Verdict
from eagle31_hf.measure.plots import plot_drift
from eagle31_hf.measure.readings import (
    ReadingScore,
    mean_over_tokens,
    other_readings,
    read_as,
    replay,
    score_readings,
)
from eagle31_hf.measure.results import BenchResult, BenchSettings, Task
from eagle31_hf.texts.chats import encode_chat
from eagle31_hf.texts.prompts import Prompt, embedded_prompts, read_prompts
from helpers import CONFIGS, demo_tokenizer, random_drafter, random_target, seeded, target_of, write
from mtp_targets import FAMILIES, target_with_head


@pytest.fixture(scope="module")
def target() -> Any:
    return hf.AutoModelForCausalLM.from_pretrained(target_path(), dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return hf.AutoTokenizer.from_pretrained(target_path())


@pytest.fixture(scope="module")
def tasks(tokenizer: Any) -> list[Task]:
    return tasks_of(tokenizer, embedded_prompts())


@pytest.fixture(scope="module")
def prompts(tasks: list[Task]) -> list[Tensor]:
    return [task.ids for task in tasks]


def tasks_of(tokenizer: Any, prompts: list[Prompt]) -> list[Task]:
    return [Task(prompt, torch.tensor(encode_chat(tokenizer, prompt.messages))) for prompt in prompts]


@pytest.fixture(scope="module")
def texts(target: Any, prompts: list[Tensor]) -> list[TargetText]:
    written = [write(target, ids[None], max_new_tokens=40)[0] for ids in prompts]
    return texts_for(attached(target), written, prompts)


@pytest.fixture(scope="module")
def many(target: Any, tokenizer: Any) -> list[TargetText]:
    """What the doctor reads of the embedded pair unless told otherwise: small differences take that much."""
    tasks = tasks_of(tokenizer, [*embedded_prompts(), *read_prompts([f"many={doctor.PROMPTS}"])])
    prompts = [task.ids for task in tasks]
    drafter = attached(target)
    written = [write(target, ids[None], max_new_tokens=48, assistant_model=drafter)[0] for ids in prompts]
    written += texts_of(write_both(drafter, tasks, once(48, temperature=1.0)))
    return texts_for(drafter, written, prompts * 2)


@pytest.mark.parametrize("has_graphs", [False, True])
def test_the_loop_without_drafts_has_graphs_where_the_drafter_has(
    target: Any, tasks: list[Task], monkeypatch: pytest.MonkeyPatch, has_graphs: bool
) -> None:
    """Else a verdict on drafts would be one on graphs: `demo` keeps those of both, for drafts of another length."""
    drafter, seen, run = attached(target), [], Bench.run
    monkeypatch.setattr(doctor, "has_graphs", lambda *_: has_graphs)
    monkeypatch.setattr(Bench, "run", lambda bench: seen.extend(bench.settings.methods) or run(bench))
    write_both(drafter, tasks[:1], once(4))
    assert [method.by_graphs for method in seen] == [False, None if has_graphs else False, None]


def once(new_tokens: int, **how: Any) -> BenchSettings:
    return BenchSettings(new_tokens=new_tokens, repeats=1, **how)


def texts_of(written: BenchResult) -> list[Tensor]:
    """Prompts with what plain `generate` wrote."""
    return [text for call in written.methods[0].calls for text in call.texts]


def attached(target: Any, **fields: Any) -> Eagle31Drafter:
    """The embedded drafter with these fields of its configuration planted."""
    checkpoint = Eagle31Drafter.from_pretrained(drafter_path(), dtype=torch.float32).to_checkpoint()
    for name, value in fields.items():
        setattr(checkpoint.config, name, value)
    return Eagle31Drafter.from_checkpoint(checkpoint).eval().attach(target)


def texts_for(drafter: Eagle31Drafter, written: list[Tensor], prompts: list[Tensor]) -> list[TargetText]:
    """Those that are long enough to draft from."""
    everything = range(len(drafter.binding.layers) + 1)
    pairs = zip(written, prompts, strict=True)
    texts = [read_text(drafter.binding, ids, len(prompt), everything) for ids, prompt in pairs]
    return [text for text in texts if len(text.starts(DEPTH)) > 0]


def scored(drafter: Eagle31Drafter, texts: list[TargetText]) -> list[ReadingScore]:
    """All other readings, the best first."""
    return score_readings(drafter, texts, other_readings(drafter.config, len(drafter.binding.layers)), depth=DEPTH)


# --- replay -----------------------------------------------------------------------------------------------------------


def test_a_draft_counts_if_all_before_it_are_right(target: Any, texts: list[TargetText]) -> None:
    drafter, text = attached(target), texts[1]
    drafts = drafts_along(drafter, text, text.starts(DEPTH), DEPTH)
    right = torch.stack([drafter.draft_ids[each.logits.argmax(-1)] == each.truth for each in drafts], 1)
    assert torch.equal(replay(drafter, text, depth=DEPTH).right, right.cumprod(1).bool())
    assert (right.cumprod(1) != right).any(), "some are right behind a wrong one"


def test_drift_is_where_the_drafter_looks() -> None:
    """Of a toy pair, by what torch's attention makes of a one for each key."""
    drafter = random_drafter(random_target(CONFIGS["llama"]()), aux_layers=[1, 2, 4], norm_output=False)
    ids = torch.randint(3, 90, (14,), generator=torch.Generator().manual_seed(3))
    text = read_text(drafter.binding, ids, 6, drafter.binding.aux_layers)
    starts, length, looked = text.starts(3), len(ids) - 1, []

    class Watched(ObservedCache):
        def see(self, query: Tensor, key: Tensor, attention_mask: Any, layer_idx: int) -> None:
            ones = torch.eye(key.shape[2]).expand(1, key.shape[1], -1, -1)
            weights = F.scaled_dot_product_attention(query, key, ones, attn_mask=attention_mask, enable_gqa=True)
            looked.append(weights.mean(1)[0])  # (T or S, N)
            super().see(query, key, attention_mask, layer_idx)

    cache = Watched(starts)
    seen = replay(drafter, text, depth=3, cache=cache)
    looked[0] = looked[0][starts]
    shares = [torch.stack((each[:, :SINK_TOKENS].sum(1), each[:, length:].sum(1)), -1) for each in looked]
    torch.testing.assert_close(cache.shares(), torch.stack(shares, 1))
    drafts = list(drafts_along(drafter, text, starts, 3))
    torch.testing.assert_close(seen.feedback_norm, torch.stack([each.feedback.norm(dim=-1) for each in drafts], 1))
    wanted = [each.logits.log_softmax(-1)[range(len(starts)), each.truth] for each in drafts]
    torch.testing.assert_close(seen.log_probs, torch.stack(wanted, 1))
    curve = curve_of([seen], [cache.shares()], condition="toy")
    assert (curve.starts, curve.own[0], curve.feedback_norm[0]) == (len(starts), 0.0, 1.0)
    assert all(0 < sink + own < 1 for sink, own in zip(curve.sink, curve.own, strict=True))


# --- planted faults ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("planted", [{"norm_output": False}, {}], ids=str)
def test_a_large_fault_is_named_by_few_texts(planted: dict[str, Any], target: Any, texts: list[TargetText]) -> None:
    best = scored(attached(target, **planted), texts)[0]
    assert best.is_better == bool(planted)
    assert best.reading.fields == {"norm_output": True} or not planted


@pytest.mark.slow
@pytest.mark.parametrize(
    ("planted", "named"),
    [
        ({"aux_layers": [1, 5, 8]}, {"aux_layers": [2, 6, 9]}),
        ({"norm_before_residual": True}, {"norm_before_residual": False}),
        ({}, None),
    ],
    ids=["layers one low", "residual normed", "right"],
)
@pytest.mark.thorough
def test_a_wrong_configuration_is_named_and_a_right_one_left_alone(
    planted: dict[str, Any], named: dict[str, Any] | None, target: Any, many: list[TargetText]
) -> None:
    best = scored(attached(target, **planted), many)[0]
    assert best.is_better == (named is not None)
    assert named is None or best.reading.fields == named


def test_each_token_counts_alike_and_the_error_is_that_of_texts() -> None:
    """Two texts of 4 and 1 tokens by hand, and one that says nothing."""
    texts = [torch.tensor([[1.0, 3.0], [2.0, 2.0]]), torch.tensor([[7.0, math.nan]]), torch.tensor([[math.nan]])]
    mean, error = mean_over_tokens([text.double() for text in texts])
    assert mean == pytest.approx(15 / 5)
    assert error == pytest.approx(math.sqrt(2 / 1 * ((8 - 12) ** 2 + (7 - 3) ** 2)) / 5)
    assert mean_over_tokens(texts[2:]) == (0.0, math.inf)
    assert mean_over_tokens(texts[:1])[1] == math.inf, "one text tells no error"


@pytest.mark.parametrize("plant", ["shifted", "ids for offsets"])
def test_a_wrong_draft_vocabulary_is_named(plant: str, target: Any, texts: list[TargetText]) -> None:
    drafter = attached(target)
    if plant == "shifted":
        drafter.d2t.copy_(drafter.draft_ids.roll(1) - torch.arange(len(drafter.d2t)))
    else:  # ids that were taken for offsets, as far as they stay inside the vocabulary
        drafter.d2t.copy_((drafter.draft_ids + drafter.d2t).clamp(max=8191) - torch.arange(len(drafter.d2t)))
    drafter._draft_ids = None
    scores, (vocabulary,) = reading_findings(drafter, texts)
    assert (vocabulary.check, vocabulary.level) == ("draft vocabulary", "problem")
    assert not scores, "nothing else is blamed for it"


@pytest.mark.thorough
def test_a_fine_tuned_target_is_named(target: Any, tokenizer: Any, tasks: list[Task], tmp_path: Path) -> None:
    """Acceptance far below the drafter's own training report."""
    report = {"stages": [{"acceptance": {"all": {"acceptance_length": 4.5}}}]}
    (tmp_path / "training_report.json").write_text(json.dumps(report))
    tuned = hf.AutoModelForCausalLM.from_pretrained(target_path(), dtype=torch.float32).eval()
    with seeded(0), torch.no_grad():
        for layer in tuned.model.layers:
            layer.mlp.down_proj.weight.mul_(1 + 0.35 * torch.randn_like(layer.mlp.down_proj.weight))
    for model, level in ((target, "ok"), (tuned, "problem")):
        drafter = attached(model)
        drafter.name_or_path = str(tmp_path)
        seen = examine(drafter, tokenizer, tasks[:3], new_tokens=24)
        assert {finding.check: finding.level for finding in seen.findings}["acceptance"] == level
        assert seen.greedy.is_exact


def test_one_text_is_no_verdict(target: Any, tokenizer: Any, tasks: list[Task]) -> None:
    seen = examine(attached(target), tokenizer, tasks[:1], new_tokens=8)
    assert seen.verdict == "too few texts to tell (1): at least 3 are needed, give more prompts"
    assert {finding.check: finding.level for finding in seen.findings}["acceptance"] == "note"
    late = replace(seen, findings=[*seen.findings, Finding("time", "note", "1 of 3 texts")])
    assert late.verdict.endswith("give more time (--thorough)")


# --- the same text ----------------------------------------------------------------------------------------------------


def parting(monkeypatch: pytest.MonkeyPatch, target: Any) -> None:
    """With a drafter the last token is another one."""
    generate = target.generate

    def other_token(**arguments: Any) -> Tensor:
        out = generate(**arguments)
        if "assistant_model" in arguments:
            out[0, -1] = (out[0, -1] + 1) % target.config.vocab_size
        return out

    monkeypatch.setattr(target, "generate", other_token)


def test_a_text_that_is_not_the_targets_is_a_problem(
    target: Any, tokenizer: Any, tasks: list[Task], monkeypatch: pytest.MonkeyPatch
) -> None:
    parting(monkeypatch, target)
    seen = examine(attached(target), tokenizer, tasks[:1], new_tokens=12)
    levels = {finding.check: (finding.level, finding.text) for finding in seen.findings}
    level, text = levels["same text, greedy"]
    assert level == "problem"
    assert "another text, and not by a tie, in embedded/1 from token 12 on" in text
    assert seen.verdict.startswith("do without until this is understood")
    assert "times plain decoding" not in seen.verdict, "a wrong answer forbids the speedup"
    assert json.loads(json.dumps(seen.to_dict()))["greedy"]["speedup"] is None


def test_texts_that_part_at_ties_are_fine_and_not_called_the_same(
    target: Any, tasks: list[Task], monkeypatch: pytest.MonkeyPatch
) -> None:
    parting(monkeypatch, target)
    tie = Verdict(Kind.TIE, position=11, logit_gap=0.2, rounding=0.125)
    monkeypatch.setattr(bench, "judge", lambda *_, **__: tie)
    finding = doctor._text_finding("same text", write_both(attached(target), tasks[:1], once(12)))
    assert finding.level == "ok"
    assert finding.text.startswith("0 of 1 texts are the same; 1 text differs by a tie")


def test_sampled_texts_are_compared_under_one_seed(
    target: Any, tasks: list[Task], monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter, generate = attached(target), target.generate
    before = torch.get_rng_state()
    honest = write_both(drafter, tasks[:3], once(20, temperature=1.0))
    assert honest.is_exact
    assert honest.methods[-1].verdicts == {Kind.SAME: 3}
    assert honest.methods[-1].tokens_per_pass > 1.3
    greedy = write_both(drafter, tasks[:1], once(20))
    assert not torch.equal(texts_of(honest)[0], texts_of(greedy)[0])
    assert torch.equal(texts_of(greedy)[0][: len(tasks[0].ids)], tasks[0].ids)
    assert torch.equal(torch.get_rng_state(), before)

    def another_draw(**arguments: Any) -> Tensor:
        if "assistant_model" in arguments:
            torch.rand(1)
        return generate(**arguments)

    monkeypatch.setattr(target, "generate", another_draw)
    wrong = write_both(drafter, tasks[:1], once(20, temperature=1.0))
    assert wrong.methods[-1].refusal, "of the same distribution, but not the text of that seed"


# --- the whole --------------------------------------------------------------------------------------------------------


def test_conditions_change_the_prompt_as_they_say() -> None:
    chat = [{"role": "system", "content": "S"}, {"role": "user", "content": "Hello there"}]
    assert [message["role"] for message in CONDITIONS["system prompt removed"](chat)] == ["user"]
    added = CONDITIONS["system prompt added"](chat)
    assert [message["role"] for message in added] == ["system", "user"]
    assert added[0]["content"] != "S"
    assert len(CONDITIONS["long context"](chat)[0]["content"]) > 4000
    assert CONDITIONS["prompts as they are"](chat) == chat


def test_drift_is_shown_under_every_condition(
    target: Any, tokenizer: Any, tasks: list[Task], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drift, "DEPTH", 4)

    def probed(**fields: Any) -> list[DriftCurve]:
        return drift.probe_drift(attached(target, **fields), tokenizer, tasks[:1], new_tokens=12)

    curves, turned = probed(), probed(norm_output=False)
    assert [curve.condition for curve in curves] == [
        "prompts as they are", "system prompt added", "long context", "another template",
    ]  # fmt: skip
    assert turned[0].feedback_norm[-1] > 1.1 > curves[0].feedback_norm[-1], "weights of one form in the other drift"
    assert drift_finding(curves[:1]).level == "ok"
    plot_drift(curves, tmp_path / "drift.png")
    assert (tmp_path / "drift.png").read_bytes().startswith(b"\x89PNG")


def test_what_counts_as_drift() -> None:
    def curve(sink: list[float], norm: list[float]) -> DriftCurve:
        return DriftCurve("condition", sink, [0.0] * 2, norm, [1.0] * 2, starts=1)

    assert curve([0.4, 0.4], [1.0, 1.6]).drifts, "the state grows"
    assert curve([0.4, 0.1], [1.0, 1.0]).drifts, "the sink is left"
    assert not curve([0.4, 0.3], [1.0, 1.1]).drifts
    assert not curve([0.009, 0.003], [1.0, 1.0]).drifts, "there was no sink to leave"


def test_preflight_reads_configurations_alone(target: Any) -> None:
    tokenizer = demo_tokenizer()
    checks = preflight(attached(target), tokenizer)
    assert {check.check for check in checks} >= {"shapes", "vocabulary", "length", "chat template", "precision"}
    assert all(check.level == "ok" for check in checks)


# --- heads inside targets ---------------------------------------------------------------------------------------------

LENGTH = 24


def head_of(family: str, folder: Path, **fields: Any) -> Eagle31Drafter:
    """A head that reads and feeds back as it says, attached."""
    target = target_with_head(family, folder)
    head = Eagle31Drafter.from_pretrained(folder, target=target)
    return read_as(head, fields) if fields else head


EAGLES: dict[str, dict[str, Any]] = {
    "EAGLE 3.1": {}, "two layers": {"num_hidden_layers": 2}, "a window": {"sliding_window": 6},
    "latent": {"kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8},
}  # fmt: skip


@pytest.mark.parametrize("kind", [*FAMILIES, *EAGLES])
@torch.inference_mode()
def test_a_replay_drafts_what_a_session_drafts(kind: str, tmp_path: Path) -> None:
    if kind in EAGLES:
        drafter = random_drafter(target_of("llama"), aux_layers=[1, 2, 4], **EAGLES[kind])
    else:
        drafter = head_of(kind, tmp_path)
    ids = torch.randint(3, 90, (LENGTH,), generator=torch.Generator().manual_seed(1))
    text = read_text(drafter.binding, ids, 5, drafter.binding.aux_layers)
    starts = text.starts(3)
    replayed = [draft.logits for draft in drafts_along(drafter, text, starts, 3)]
    for row, start in enumerate(starts.tolist()):
        for level, logits in enumerate(drafted(drafter, text, start, 3)):
            torch.testing.assert_close(replayed[level][row], logits, atol=1e-5, rtol=1e-4)


def drafted(head: Eagle31Drafter, text: TargetText, start: int, depth: int) -> Iterator[torch.Tensor]:
    """Logits of a chain that begins behind position `start`, as generation drafts it; its tokens are the text's own."""
    session = DraftSession(head, batch_size=1, capacity=64, block=LENGTH)
    aux = torch.cat([text.states[layer] for layer in head.binding.aux_layers], dim=-1)[None, : start + 1]
    session.absorb(text.ids[None, 1 : start + 2], aux, [start + 1])
    state = session.root
    for level in range(depth):
        yield state.logits[0, 0]
        at = start + 2 + level
        state = session.step(text.ids[None, at : at + 1], state.feedback, after=level, depth=level)


@pytest.mark.parametrize("normed_state", [True, False], ids=["normed in", "raw in"])
@pytest.mark.parametrize("norm_output", [True, False], ids=["normed back", "raw back"])
@torch.inference_mode()
def test_the_states_that_a_head_was_made_for_are_named(normed_state: bool, norm_output: bool, tmp_path: Path) -> None:
    """Texts whose states and tokens are what a head of that kind says they will be."""
    fields = {"normed_state": normed_state, "norm_output": norm_output}
    published = head_of("qwen3_5_text", tmp_path)
    texts = [foretold(read_as(published, fields), seed) for seed in range(4)]
    scores, (finding,) = reading_findings(published, texts)
    if normed_state and norm_output:
        assert finding.level == "ok", finding.text
        assert scores[0].acceptance_before == DEPTH + 1
        return
    assert finding.level == "problem"
    assert scores[0].reading.fields == fields
    assert scores[0].acceptance_length == DEPTH + 1
    words = {True: "normed", False: "raw"}
    assert f"--state {words[normed_state]} --feedback {words[norm_output]}" in finding.advice


def foretold(head: Eagle31Drafter, seed: int) -> TargetText:
    """Each next token is the head's first draft, each next state what it feeds back; the other state is its other
    output."""
    dice = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 90, (2,), generator=dice)
    last = len(head.binding.layers)
    own = head.binding.aux_layers[0]
    states = {index: torch.randn(1, head.config.hidden_size, generator=dice) for index in (last, last + 1)}
    for _ in range(LENGTH):
        count = len(ids) - 1
        out = head.decode(head.embed(ids[None, 1:]), states[own][None], head.rotary(torch.arange(count)[None]))
        hidden = out.feedback[0, -1:]
        states = {
            index: torch.cat((each, hidden if index == own else hidden.flip(-1))) for index, each in states.items()
        }
        ids = torch.cat((ids, head.draft_logits(out.normed[0, -1:]).argmax(-1)))
    return TargetText(ids, 2, states)
