"""Which states a head inside a target reads and feeds back, told by the target's own text."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle31_hf import Eagle31Drafter
from eagle31_hf.drafter.replay import TargetText, drafts_along, read_text
from eagle31_hf.drafter.session import DraftSession
from eagle31_hf.measure.doctor import DEPTH, reading_findings
from eagle31_hf.measure.readings import read_as
from helpers import random_drafter, target_of
from mtp_targets import FAMILIES, target_with_head

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
