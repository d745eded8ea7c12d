"""Other ways to read a drafter's configuration, and which of them the target's own text speaks for.

Conventions differ between trainers: hidden states are counted from the embedding or from the first layer's output,
flags of the norms were renamed. A checkpoint with the wrong one loads without an error and drafts badly. Each reading
is replayed over the same texts, so the comparison is paired.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from torch import Tensor
from transformers import Cache

from ..config import Eagle31Config, MtpConfig
from ..drafter.drafter import Eagle31Drafter
from ..drafter.replay import TargetText, drafts_along, rows_of_ids

OnStep = Callable[[str, int, int], None]
"""Called between measurements with what is measured, how many of it are done, and of how many."""
STANDARD_ERRORS = 3.0
"""A reading is named if its gain is this many standard errors from none."""


@dataclass(frozen=True)
class Replay:
    """What a drafter would draft from `S` starts of a text that is known, `K` tokens deep.

    Attributes:
        right: `(S, K)` bool; the draft is what the target wrote, and so are all drafts before it.
        log_probs: `(S, K)` log-probability the drafter gave to what the target wrote; NaN where that cannot be drafted.
        feedback_norm: `(S, K)` length of the hidden state that is fed back after each depth.
    """

    right: Tensor
    log_probs: Tensor
    feedback_norm: Tensor


@torch.no_grad()
def replay(drafter: Eagle31Drafter, text: TargetText, *, depth: int, cache: Cache | None = None) -> Replay:
    """Draft `depth` tokens from every start of `text` with an attached `drafter`.

    Args:
        cache: empty, to look at attention.
    """
    starts = text.starts(depth).to(drafter.fc.weight.device)
    row_of = rows_of_ids(drafter)
    right, log_probs, norms = [], [], []
    still_right = torch.ones_like(starts, dtype=torch.bool)
    for draft in drafts_along(drafter, text, starts, depth, cache):
        wanted = row_of[draft.truth]
        scores = draft.logits.float().log_softmax(-1)  # (S, Vd)
        still_right = still_right & (scores.argmax(-1) == wanted)
        right.append(still_right)
        given = scores.gather(1, wanted.clamp(min=0)[:, None]).squeeze(1)
        log_probs.append(torch.where(wanted >= 0, given, torch.nan))
        norms.append(draft.feedback.float().norm(dim=-1))
    return Replay(*(torch.stack(parts, 1).cpu() for parts in (right, log_probs, norms)))


@dataclass(frozen=True)
class Reading:
    """One way to read the configuration: `name` for people, `fields` of `Eagle31Config` that differ."""

    name: str
    fields: dict[str, Any]


@dataclass(frozen=True)
class ReadingScore:
    """How a reading did against the configuration as it is, over the same texts.

    A drafter read a little wrong may accept nearly as much, so readings are told apart by the probability it gives to
    what the target wrote, which is known at every position and depth, and not by counts of accepted drafts.

    Attributes:
        acceptance_length, acceptance_before: mean accepted drafts and the bonus token, of this reading and as it is.
        gain: mean log-probability of the target's token, this reading's less that of the configuration as it is, each
            token of each draft depth counted once.
        standard_error: of `gain`, texts taken as independent.
    """

    reading: Reading
    acceptance_length: float
    acceptance_before: float
    gain: float
    standard_error: float

    @property
    def is_better(self) -> bool:
        """Clearly, not by chance."""
        return self.gain > STANDARD_ERRORS * self.standard_error


def other_readings(config: Eagle31Config, num_target_layers: int) -> list[Reading]:
    """Neighbouring conventions for layers and the flags that change no tensor."""
    if isinstance(config, MtpConfig):
        return _readings_of_head(config)
    layers = config.resolve_aux_layers(num_target_layers)
    default = (2, num_target_layers // 2, num_target_layers - 3)
    shifts = {
        "hidden states counted one layer lower": tuple(layer - 1 for layer in layers),
        "hidden states counted one layer higher": tuple(layer + 1 for layer in layers),
        "the published default layers": default if len(layers) == 3 else layers,
    }
    names = {moved: name for name, moved in reversed(shifts.items())}  # each set of layers once, by its first name
    readings = [
        Reading(f"{name}: {list(moved)} instead of {list(layers)}", {"aux_layers": list(moved)})
        for moved, name in names.items()
        if moved != layers and min(moved) >= 0 and max(moved) <= num_target_layers
    ]
    for flag in ("norm_output", "norm_before_residual"):
        value = not getattr(config, flag)
        readings.append(Reading(f"{flag}={str(value).lower()}", {flag: value}))
    return readings


def _readings_of_head(config: MtpConfig) -> list[Reading]:
    """Before or behind the final norm: the target's state that a head reads, and its own output that it feeds back."""
    names = {True: "normed", False: "raw"}
    return [
        Reading(
            f"the target's {names[normed_state]} states and {names[norm_output]} feedback",
            {"normed_state": normed_state, "norm_output": norm_output},
        )
        for normed_state, norm_output in product((True, False), repeat=2)
        if (normed_state, norm_output) != (config.normed_state, config.norm_output)
    ]


def layers_to_keep(config: Eagle31Config, readings: Sequence[Reading], num_target_layers: int) -> set[int]:
    """`hs` indices that the configuration or any reading wants."""
    configs = [config, *(read_config_as(config, reading.fields) for reading in readings)]
    return {layer for each in configs for layer in each.resolve_aux_layers(num_target_layers)}


def score_readings(
    drafter: Eagle31Drafter,
    texts: Sequence[TargetText],
    readings: Sequence[Reading],
    depth: int,
    on_step: OnStep = lambda what, done, of: None,
) -> list[ReadingScore]:
    """Replay every reading over `texts`; best first."""
    before = [replay(drafter, text, depth=depth) for text in texts]
    scores = []
    for number, reading in enumerate(readings):
        on_step("readings of its configuration", number, len(readings))
        other = read_as(drafter, reading.fields)
        try:
            after = [replay(other, text, depth=depth) for text in texts]
        finally:
            other.detach()
        pairs = zip(after, before, strict=True)
        gain, error = mean_over_tokens([(new.log_probs - old.log_probs).double() for new, old in pairs])
        scores.append(ReadingScore(reading, _acceptance_length(after), _acceptance_length(before), gain, error))
    return sorted(scores, key=lambda score: -score.gain)


def mean_over_tokens(texts: Sequence[Tensor]) -> tuple[float, float]:
    """Mean of a figure that each token of each text has (NaN where it has none), and its standard error.

    Each token counts alike, so short texts do not drown long ones; the error is that of a ratio of sums over texts,
    which are independent while their tokens are not (Cochran, Sampling Techniques, 1977, 6.4).
    """
    known = [text[~text.isnan()] for text in texts]
    sums = torch.tensor([float(text.sum()) for text in known], dtype=torch.float64)
    counts = torch.tensor([len(text) for text in known], dtype=torch.float64)
    used = int((counts > 0).sum())  # a text none of whose tokens can be drafted says nothing
    if not used:
        return 0.0, math.inf
    mean = sums.sum() / counts.sum()
    squares = (sums - mean * counts).square().sum()
    error = float(squares.mul(used / (used - 1)).sqrt() / counts.sum()) if used > 1 else math.inf
    return float(mean), error


def _acceptance_length(replays: Sequence[Replay]) -> float:
    return float(torch.cat([one.right for one in replays]).sum(1).double().mean()) + 1


def read_as(drafter: Eagle31Drafter, fields: Mapping[str, Any]) -> Eagle31Drafter:
    """The same weights under a configuration with these fields, attached to the same target."""
    checkpoint = drafter.to_checkpoint()
    config = read_config_as(checkpoint.config, fields)
    other = Eagle31Drafter.from_checkpoint(replace(checkpoint, config=config)).eval()
    return other.attach(drafter.binding.model)


def read_config_as(config: Eagle31Config, fields: Mapping[str, Any]) -> Eagle31Config:
    """The configuration with these fields."""
    return type(config).from_dict(config.to_dict() | dict(fields))
