"""`eagle31 mtp`: the multi-token-prediction head of a target, alone or back in a fine-tune that has lost it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch
from transformers import AutoTokenizer

from ..checkpoints import read_checkpoint, require_head, require_no_checkpoint, write_checkpoint
from ..checkpoints.graft import graft_head
from ..drafter.draft_rows import with_draft_rows, with_rows
from ..errors import ConfigurationError, count
from ..texts.conversations import read_conversations
from ..training.data import build_vocabulary, count_supervised, coverage, render_documents
from .options import argument, command, make_console, option


@command
def mtp(
    base: str = argument("Folder or Hub id of a target that holds a head."),
    out: Path | None = option(None, "Folder to write the head to, alone, as a drafter in bfloat16.", file_okay=False),
    into: Path | None = option(
        None, "Folder of a fine-tune of BASE to put the head back into.", file_okay=False, exists=True
    ),
    draft_vocab: int | None = option(
        None, "With --out: tokens that can be drafted; default: those that pay, when it is loaded.", min=1
    ),
    prompts: list[str] | None = option(
        None, "With --draft-vocab: conversations (JSONL file or Hub data set) whose answers say which."
    ),
    state: Literal["normed", "raw"] | None = option(
        None, "With --out: the target's state that is read, behind its final norm or before it."
    ),
    feedback: Literal["normed", "raw"] | None = option(None, "With --out: the head's own output that is fed back."),
    force: bool = option(False, "With --out: overwrite a checkpoint.", "--force", "-f"),
) -> None:
    """Take the MTP head out of a target, or put it back into a fine-tune that was saved without it."""
    if (out is None) == (into is None):
        raise ConfigurationError(
            "got " + ("neither --out nor --into" if out is None else "both") + "; pass one of them"
        )
    if (draft_vocab is not None and out is None) or (prompts and draft_vocab is None):
        raise ConfigurationError("--prompts goes with --draft-vocab, and --draft-vocab with --out; leave them out")
    if (state or feedback) and out is None:
        raise ConfigurationError("--state and --feedback go with --out; a folder of a target keeps what it says")
    console = make_console()
    if into is not None:
        names = graft_head(base, into)
        console.print(
            f"{count(len(names), 'tensor')} of {base}'s MTP head → {into}; its other files are as they were",
            soft_wrap=True,
        )
        return
    assert out is not None, "checked above"
    if not force:
        require_no_checkpoint(out)
    require_head(base)  # else an EAGLE drafter would be read, too
    head = read_checkpoint(base)
    if prompts:
        assert draft_vocab is not None, "checked above"
        counts = _counted(base, prompts, head.config.vocab_size)
        ids = build_vocabulary(counts, draft_vocab)
        head = with_rows(head, ids)
        console.print(f"{draft_vocab:,} draft tokens, {coverage(counts, ids):.1%} of those in {', '.join(prompts)}")
    elif draft_vocab is not None:
        head = with_draft_rows(head, draft_vocab)
    states = {"normed_state": state, "norm_output": feedback}
    fields = {name: value == "normed" for name, value in states.items() if value is not None}
    if fields:
        head = replace(head, config=type(head.config).from_dict(head.config.to_dict() | fields))
    tensors = {n: t.to(torch.bfloat16) if t.is_floating_point() else t for n, t in head.tensors.items()}
    write_checkpoint(replace(head, tensors=tensors), out, format="mtp")
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    console.print(f"{base}'s MTP head → {out} ({size / 1e6:,.1f} MB); pass this folder as the drafter", soft_wrap=True)


def _counted(base: str, sources: list[str], vocab_size: int) -> torch.Tensor:
    """How often the answers in these conversations have each id, `(vocab_size,)`."""
    from ..drafter.loading import require_tokenizer  # which takes most of a second to import

    require_tokenizer(base)
    tokenizer = AutoTokenizer.from_pretrained(base)
    documents, _ = render_documents(read_conversations(sources), tokenizer, max_length=None)
    return count_supervised(documents, vocab_size)
