"""A tiny target and its drafter with documents to train on; conversations, and runs of the embedded target."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor
from torch.utils.data import default_collate

from eagle31_hf import Eagle31Drafter
from eagle31_hf.demo import target_path
from eagle31_hf.drafter.session import DraftSession
from eagle31_hf.texts.rows import Conversation
from eagle31_hf.training.data import Document, PackedBatch, PackedDocuments
from eagle31_hf.training.objectives import compute_features
from eagle31_hf.training.progress import StopRequest
from eagle31_hf.training.settings import TrainingSettings
from eagle31_hf.training.train import Run
from helpers import CONFIGS, VOCABULARY, random_drafter, random_target

DRAFT_VOCABULARY, ROW = 29, 24


def make_target() -> Any:
    target = random_target(CONFIGS["llama"]()).requires_grad_(False)
    target.lm_head.weight.mul_(20)  # a decided one, whose texts can be learned
    return target


def make_drafter(target: Any, **fields: Any) -> Eagle31Drafter:
    return random_drafter(target, aux_layers=[1, 2, 4], draft_vocab_size=DRAFT_VOCABULARY, **fields)


def make_documents(count: int = 12, seed: int = 3) -> list[Document]:
    generator = torch.Generator().manual_seed(seed)
    documents = []
    for number in range(count):
        length = int(torch.randint(5, ROW, (1,), generator=generator))
        ids = torch.randint(3, VOCABULARY, (length,), generator=generator).tolist()
        mask = (torch.rand(length, generator=generator) < 0.8).tolist()
        documents.append(Document(str(number), ids, [*mask[:-1], True]))
    return documents


def batch_of(documents: list[Document], rows: int = 3) -> PackedBatch:
    data = PackedDocuments(documents, ROW, seed=0)
    return PackedBatch(**default_collate([data[i] for i in range(min(rows, len(data)))]))


def drafted_along(
    drafter: Eagle31Drafter, document: Document, root: int, steps: int
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """A chain along a text from its token `root` on, as it is drafted: of each step the place it answers for, the
    target's logits `(V,)` for it and the drafter's `(1, Vd)`."""
    ids = torch.tensor([document.input_ids])
    features = compute_features(drafter.binding, ids, torch.arange(ids.shape[1])[None])
    session = DraftSession(drafter, batch_size=1, capacity=ids.shape[1] + steps, block=ids.shape[1])
    session.absorb(ids[:, 1 : root + 1], features.aux[:, :root], [root])
    state = session.root
    for step, place in enumerate(range(root + 1, min(root + 1 + steps, ids.shape[1]))):
        yield place, features.logits[0, place - 1], state.logits[0]
        state = session.step(ids[:, place : place + 1], state.feedback, after=step, depth=step)


CHAT = [
    {"role": "user", "content": "Two apples cost 4 dollars. What do five cost?"},
    {"role": "assistant", "content": "One costs 2 dollars."},
    {"role": "user", "content": "And five?"},
    {"role": "assistant", "content": "10 dollars."},
]


def chat(**fields) -> Conversation:
    return Conversation("row-7", "sums", tuple(CHAT), **fields)


def write_rows(folder: Path) -> Path:
    """A file of ten conversations of one turn."""
    rows = folder / "rows.jsonl"
    rows.write_text("\n".join(json.dumps({"id": f"r{i}", "conversations": CHAT[:2]}) for i in range(10)))
    return rows


def training(rows: Path | str, out: Path, **fields: Any) -> TrainingSettings:
    """Settings by which the embedded target trains a small drafter on a CPU."""
    defaults = {"max_length": 48, "draft_vocab_size": 256, "batch_rows": 2, "device": "cpu"}
    return TrainingSettings(str(target_path()), (str(rows),), out, **(defaults | fields))


def writing(**fields: Any) -> TrainingSettings:
    """Settings by which the target writes a few tokens, greedily."""
    defaults = {"regenerate": "each", "temperature": (0.0,), "max_new_tokens": 6, "write_rows": 4, "max_length": 1024}
    return TrainingSettings("target", ("rows.jsonl",), Path("out"), **(defaults | fields))


def run_of(settings: TrainingSettings, target: Any, tokenizer: Any, log: io.StringIO | None = None) -> Run:
    """A run that says what it does to `log`."""
    console = Console(file=log or io.StringIO(), width=200)
    return Run(settings, target, tokenizer, console, StopRequest(console, settings.out))
