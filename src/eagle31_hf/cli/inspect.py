"""`eagle31 inspect`: what a drafter checkpoint is."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ..checkpoints import CheckpointSummary, inspect_checkpoint
from ..config import Eagle31Config, MtpConfig
from ..errors import count
from .options import JSON, argument, command, make_console, option, plain_table, write_json


@command
def inspect(
    path_or_id: str = argument("Folder or Hub id of a drafter, or of a target with an MTP head."),
    revision: str | None = option(None, "Branch, tag or commit of a Hub id."),
    json_path: Path | None = JSON,
) -> None:
    """Tell what a drafter checkpoint is, from its headers alone."""
    summary = inspect_checkpoint(path_or_id, revision=revision)
    console = make_console()
    console.print(plain_table(_facts(summary)))
    console.print()
    shapes = ((name, " × ".join(map(str, shape))) for name, shape in summary.tensors.items())
    console.print(plain_table(shapes, "tensor", "shape"))
    write_json(json_path, summary.to_dict())


def _facts(summary: CheckpointSummary) -> list[tuple[str, str]]:
    c = summary.config
    layers = count(c.num_hidden_layers, "layer") + (f" of {c.family}" if isinstance(c, MtpConfig) else "")
    heads = f"{c.num_attention_heads} heads ({c.num_key_value_heads} key/value) of {c.head_dim}"
    rest = "" if isinstance(c, MtpConfig) else f", MLP {c.intermediate_size}{', query/key norms' if c.qk_norm else ''}"
    rows = c.draft_vocab_size or c.vocab_size
    return [
        ("checkpoint", summary.source),
        ("method", summary.method),
        ("layout", summary.format),
        ("known from", summary.format_title),
        ("weights", f"{summary.parameters:,} parameters, {summary.dtype}, {summary.stored_bytes / 1e6:,.1f} MB"),
        ("network", f"{layers}, hidden {c.hidden_size}, {heads}{rest}"),
        *([("made for", summary.target)] if summary.target else []),
        ("target", f"hidden {c.target_hidden_size}, vocabulary {c.vocab_size:,}"),
        ("draft vocabulary", f"{rows:,} of {c.vocab_size:,}" if rows < c.vocab_size else "the target's"),
        *(_states_of_head(c) if isinstance(c, MtpConfig) else _states(c, summary.aux_layers_as_stored)),
    ]


def _states(c: Eagle31Config, stored: Mapping[str, list[int]]) -> list[tuple[str, str]]:
    norms = {"none": "as they are", "per_slot": "each normed (fc_norm)",
             "concatenated": "normed together (norm_before_fc)"}  # fmt: skip
    ids = "; ".join(f"{ids} at {where}" for where, ids in stored.items())
    read = "2, L/2 and L-3 of the target's L layers (the default: config.json names none)"
    if c.aux_layers:
        read = f"{', '.join(map(str, c.aux_layers))} of the target's layers" + (f", stored as {ids}" if ids else "")
    return [
        ("window", f"{c.sliding_window} tokens" if c.sliding_window else "none: it sees the whole text"),
        ("aux states", f"{c.num_aux_hidden_states}, {norms[c.aux_norm]}"),
        ("read after", read),
        ("feedback", "post-norm (norm_output)" if c.norm_output else "pre-norm"),
        ("embedding", "its own" if c.own_embedding else "the target's"),
        ("LM head", "its own" if c.own_lm_head else "the target's"),
    ]


def _states_of_head(c: MtpConfig) -> list[tuple[str, str]]:
    behind = {True: "behind the final norm", False: "before the final norm"}
    return [
        ("state it reads", f"the target's, {behind[c.normed_state]}"),
        ("feedback", f"its own output, {behind[c.norm_output]}"),
        ("embedding and LM head", "the target's"),
    ]
