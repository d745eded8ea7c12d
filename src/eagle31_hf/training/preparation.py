"""Everything before the first step: texts the target wrote, draft vocabulary, drafter, rows to train on.

With several processes each lets the target write its share of the texts; then all hold the same.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from rich.console import Console
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..checkpoints import read_checkpoint
from ..drafter.drafter import Eagle31Drafter
from ..drafter.loading import load_target as load_pretrained
from ..drafter.loading import packing_config, stored_dtype
from ..errors import TrainingError
from ..memory.cards import best_kind
from ..memory.target_facts import trained_context
from ..texts.conversations import read_conversations, with_unique_ids
from ..texts.rows import Conversation
from .data import Document, Documents, build_vocabulary, count_supervised, coverage, render_documents
from .measure import EvaluationPrompt, evaluation_prompts
from .progress import Counting, say
from .self_prompts import SOURCE, is_new, self_prompt_count, write_prompts
from .settings import SMALL_TARGET_PARAMETERS, TrainingSettings
from .writing import disk_bytes, regenerate

HELD_OUT_ROWS = 64


class Preparation:
    """What a run needs before its first step, for settings that are resolved.

    Args:
        console: where progress is shown.
    """

    def __init__(
        self,
        settings: TrainingSettings,
        target: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        console: Console,
    ):
        self.settings, self.target, self.tokenizer, self.console = settings, target, tokenizer, console
        # Who has written its share waits for the slowest: hours, where a large target writes long answers.
        self.processes = PartialState(cpu=target.device.type == "cpu", timeout=timedelta(days=1))

    def read_texts(self) -> tuple[Documents, list[EvaluationPrompt]]:
        """Documents to train on and prompts to measure on; says what was left out and why."""
        settings = self.settings
        conversations = self._read_prompts()
        if settings.held_out:
            held_out = self._read(settings.held_out)
        else:
            held_out, conversations = _split(conversations, settings.seed)
        prompts = evaluation_prompts(held_out, self.tokenizer)
        written = self._regenerate(conversations)
        documents = render_documents(
            written, self.tokenizer, max_length=settings.max_length, learns_all=is_small(self.target)
        )
        left_out = {
            "truncated": documents.truncated,
            "without anything to learn": documents.unsupervised,
            "with a context too long to answer": len(conversations) - len(written),
        }
        reasons = ", ".join(f"{count:,} {what}" for what, count in left_out.items() if count)
        further = f" and {documents.rewritten:,} turns that the template rewrites later" if documents.rewritten else ""
        count = len(documents.documents) - documents.rewritten
        further += f" ({reasons})" if reasons else ""
        say(self.console, f"text      {count:,} conversations{further}, {len(held_out):,} to measure on")
        return documents, prompts

    def _read_prompts(self) -> list[Conversation]:
        """Rows of files and the Hub, and those that the target writes itself."""
        settings = self.settings
        files = [source for source in settings.prompts if self_prompt_count(source) is None]
        count = sum(self_prompt_count(source) or 0 for source in settings.prompts)
        rows = self._read(files) if files else []
        return with_unique_ids(rows + (self._self_prompts(count) if count else []))

    def _read(self, sources: Sequence[str]) -> list[Conversation]:
        """Conversations of files and the Hub; empty rows are left out, and said."""
        empty: list[str] = []
        rows = read_conversations(sources, limit=self.settings.max_rows, on_empty=empty.append)
        if empty:
            say(self.console, f"rows      {len(empty):,} without any text left out, the first: {empty[0]}")
        return rows

    def _self_prompts(self, count: int) -> list[Conversation]:
        """Each process writes its share; what several wrote alike is kept once."""
        settings, processes = self.settings, self.processes
        rank = processes.process_index
        share = count // processes.num_processes + (rank < count % processes.num_processes)
        path = settings.out / "data" / (f"prompts-{rank}.jsonl" if rank else "prompts.jsonl")
        seed = settings.seed * processes.num_processes + rank
        with Counting(self.console, "the target writes prompts", share, resumes=True) as counting:
            mine = write_prompts(
                self.target, self.tokenizer, path, share, write_rows=settings.write_rows, seed=seed,
                on_progress=counting.advance,
            )  # fmt: skip
        seen: set[tuple[str, ...]] = set()
        written = [row for row in gather_object(mine) if is_new(row.messages[0]["content"], seen)]
        return [replace(row, id=f"{SOURCE}-{number}") for number, row in enumerate(written)]

    def _regenerate(self, conversations: Sequence[Conversation]) -> list[Conversation]:
        settings, processes = self.settings, self.processes
        if settings.regenerate == "none":
            return list(conversations)
        folder, rank = settings.out / "data", processes.process_index
        needed = f"{disk_bytes(conversations, settings) / 1e9:.2f} GB in {folder}"
        say(self.console, f"the target writes its own turns: at most {needed}")
        mine = conversations[rank :: processes.num_processes]
        path = folder / (f"conversations-{rank}.jsonl" if rank else "conversations.jsonl")
        with Counting(self.console, "the target writes answers", len(mine), resumes=True) as counting:
            written = regenerate(mine, self.target, self.tokenizer, path, settings, on_progress=counting.advance)
        by_id = {conversation.id: conversation for conversation in gather_object(written)}
        return [by_id[conversation.id] for conversation in conversations if conversation.id in by_id]

    def make_drafter(self) -> Eagle31Drafter:
        """The drafter named, or a fresh one whose draft vocabulary is still to be set; float32, attached.

        It is made before the target writes for hours: what does not fit shall not cost that.
        """
        settings = self.settings
        if settings.drafter is None:
            drafter = Eagle31Drafter.from_target(self.target, draft_vocab_size=settings.draft_vocab_size)
            drafter.float()
        else:
            checkpoint = read_checkpoint(settings.drafter, dtype=torch.float32)
            drafter = Eagle31Drafter.from_checkpoint(checkpoint)
            drafter.to(device=self.target.get_output_embeddings().weight.device)  # type: ignore[call-arg, union-attr]
            drafter.attach(self.target)
        drafter.requires_grad_(True)
        if drafter.embed_tokens is not None:  # it stays the target's
            drafter.embed_tokens.requires_grad_(False)
        return drafter.train()

    def cover(self, drafter: Eagle31Drafter, documents: list[Document]) -> float:
        """Share of the supervised tokens that can be drafted; a fresh drafter's vocabulary is chosen by them."""
        counts = count_supervised(documents, self.target.config.get_text_config().vocab_size)
        if self.settings.drafter is None:
            set_vocabulary(drafter, self.target, build_vocabulary(counts, self.settings.draft_vocab_size))
        return coverage(counts, drafter.draft_ids)


def _split(conversations: list[Conversation], seed: int) -> tuple[list[Conversation], list[Conversation]]:
    """Some rows to measure on, the rest to train on."""
    order = torch.randperm(len(conversations), generator=torch.Generator().manual_seed(seed)).tolist()
    count = min(HELD_OUT_ROWS, len(conversations) // 5)
    if count == 0:
        raise TrainingError(
            f"{len(conversations)} conversations are too few to keep some for measuring; give 5 or more, or others "
            "to measure on (held_out, --held-out)"
        )
    return [conversations[i] for i in order[:count]], [conversations[i] for i in order[count:]]


# --- target and settings ----------------------------------------------------------------------------------------------


def load_target(settings: TrainingSettings) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The frozen target, quantised as it will be served, and its tokenizer."""
    device = best_kind() if settings.device == "auto" else settings.device
    quantization = None if settings.quantization is None else packing_config(settings.quantization, torch.bfloat16)
    target, tokenizer = load_pretrained(
        settings.target,
        dtype=settings.dtype,
        # With several processes, each takes the card accelerate gives it.
        device_map={"": int(os.environ.get("LOCAL_RANK", "0"))} if device == "cuda" else device,
        quantization_config=quantization,
    )
    return target.requires_grad_(False), tokenizer


def precision_of_result(settings: TrainingSettings, target: PreTrainedModel) -> torch.dtype:
    """What the drafter is saved in: the type its target is stored in, which this machine may have loaded in another."""
    stored = stored_dtype(settings.target) if settings.dtype == "auto" else None
    precision = stored or target.dtype
    return precision if precision.is_floating_point else torch.bfloat16


def is_small(target: PreTrainedModel) -> bool:
    """Whether a run is sized for a small target on a CPU."""
    return target.num_parameters() < SMALL_TARGET_PARAMETERS


def resolve(settings: TrainingSettings, target: PreTrainedModel) -> TrainingSettings:
    """Fill what was left open to suit the target's size."""
    config = target.config.get_text_config()
    small = is_small(target)
    length = 512 if small else 4096
    vocabulary = config.vocab_size
    defaults: dict[str, Any] = {
        "regenerate": "last" if small else "each",
        "max_new_tokens": 128 if small else 256,
        "write_rows": 64 if small else 16,
        "max_length": min(length, trained_context(config) or length),
        "draft_vocab_size": vocabulary // 2 if vocabulary <= 32_000 else min(32_000, vocabulary),
        "accumulate": 1 if small else 4,
        # 3.99 accepted where 4 rows and 8e-3 gave 3.37 for the same tokens (docs/developing/decisions.md, 2026-11-22).
        "batch_rows": 2 if small else 4,
        "learning_rate": 2e-3 if small else 1e-4,
        "eval_steps": 500 if small else 200,
    }
    if not getattr(target.generation_config, "do_sample", False):
        # Whether it will be served greedily or sampled is not known; texts of both kinds made the acceptance length
        # at temperature 1 7 % greater in the one comparison made (docs/developing/decisions.md, 2026-11-21).
        defaults["temperature"] = (0.0, 1.0)
    left_open = {name: value for name, value in defaults.items() if getattr(settings, name) in (None, ())}
    return replace(settings, **left_open)


def set_vocabulary(drafter: Eagle31Drafter, target: PreTrainedModel, draft_ids: Tensor) -> None:
    """Give the head of a fresh drafter the target's own rows for these ids `(Vd,)`."""
    if len(draft_ids) < drafter.config.vocab_size:
        drafter.d2t.copy_(draft_ids - torch.arange(len(draft_ids)))
        drafter._draft_ids = None
    weight: Any = target.get_output_embeddings().weight  # type: ignore[union-attr]
    if drafter.lm_head is not None and weight.is_floating_point():
        with torch.no_grad():
            drafter.lm_head.weight.copy_(weight[draft_ids.to(weight.device)])
