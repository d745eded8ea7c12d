"""A pair of some target's shape on the card that is not there, and rounds of a text that it writes or serves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from bitsandbytes import matmul_4bit
from bitsandbytes.functional import quantize_4bit
from fake_card import CARD, Counting, Work, distinct_bytes, fake_card
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LogitsProcessor, LogitsProcessorList, PreTrainedConfig

from eagle31_hf import Eagle31Drafter
from eagle31_hf.checkpoints.mtp import promised_head
from eagle31_hf.drafter import assistant
from eagle31_hf.drafter.drafter import MtpDrafter
from eagle31_hf.drafting.costs import RoundCosts
from eagle31_hf.drafting.planner import Planner
from eagle31_hf.drafting.shape import DraftShape
from eagle31_hf.graphs import captured, seen
from eagle31_hf.graphs.captured import CapturesSteps
from eagle31_hf.loop.decoder import DecodingRequest, SpeculativeDecoder
from eagle31_hf.loop.pair import Pair
from eagle31_hf.loop.text import Sequences, StopRules
from eagle31_hf.sampling.draw import FreshNoise
from eagle31_hf.sampling.logits_processing import ScoreProcessing
from eagle31_hf.serving.batch import Batch, EngineSettings
from eagle31_hf.serving.rows import ServedText
from eagle31_hf.serving.text import Request, Sampling
from eagle31_hf.targets import kernel_tape
from helpers import demo_tokenizer

CHAIN = DraftShape(5)
ACCEPTED = 3
"""Nodes of each round, root included: what the host is told when it asks."""


def answer(tensor: Tensor) -> Any:
    """Elements where there are none: a round's drafts, or what a graph accepts of them; no error, tokens like any."""
    if tensor.dtype == torch.bool:
        return False
    if tensor.dim() == 0:
        return 0.0 if tensor.is_floating_point() else ACCEPTED
    if tensor.dim() == 1:
        return [0.0 if tensor.is_floating_point() else 5] * tensor.shape[0]
    if tensor.dim() == 3:  # of each row what the target chooses after the nodes, their tokens, parents, and no error
        rows, kinds, nodes = tensor.shape
        chosen = [5 if node < min(ACCEPTED, nodes) - 1 else 6 for node in range(nodes)]
        return [[chosen, [5] * nodes, [0, *range(nodes - 1)], [0] * nodes][:kinds]] * rows
    rows, columns = tensor.shape
    nodes = (columns - 3) // 2
    packed = [0, min(ACCEPTED, nodes), 5, *range(columns - 3)]  # all is well, so many, the bonus, the path, the tokens
    return [packed if columns < 200 else [5] * columns] * rows


@dataclass(frozen=True)
class Text:
    """What is written: how long its prompt is and the whole text may get, what is drafted, and how."""

    prompt: int = 32_000
    longest: int = 32_500
    shape: DraftShape = CHAIN
    captured: bool = False
    do_sample: bool = False
    processors: tuple[LogitsProcessor, ...] = ()
    rows: int = 1
    chunk: int | None = None


@dataclass
class Written:
    """Work of each round, bytes of the target's keys and values that its text needs and has room for, graphs' fate."""

    rounds: list[Work] = field(default_factory=list)
    visible_bytes: list[int] = field(default_factory=list)
    kept_bytes: list[int] = field(default_factory=list)
    fallbacks: list[str] = field(default_factory=list)


@contextmanager
def fake_pair(
    config: PreTrainedConfig, *, answers: Callable[[Tensor], Any] = answer, nf4: bool = False, head: bool = False
) -> Iterator[tuple[Counting, Eagle31Drafter]]:
    """A drafter attached to a target of this shape, in bfloat16. The self-test is left out: it compares numbers.

    Args:
        answers: elements for what the host asks for.
        nf4: whether the target's layers are packed, scales too.
        head: the drafter is the MTP head that the target's configuration promises.
    """
    inside = MtpDrafter(promised_head(config)).eval() if head else None  # most of it has no memory yet
    with fake_card(answers) as counting, torch.device(CARD):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
        if nf4:
            pack_nf4(model)
        torch.set_default_dtype(torch.bfloat16)
        try:
            with (
                mock.patch.object(assistant, "probe_tree_verification"),
                mock.patch.object(Eagle31Drafter, "to"),  # fake parameters cannot be moved, and are where they belong
            ):
                if inside is not None:
                    drafter: Eagle31Drafter = put_on_card(inside).attach(model)
                else:
                    drafter = Eagle31Drafter.from_target(model, draft_vocab_size=None).eval()
        finally:
            torch.set_default_dtype(torch.float32)
        # Transformers' own kernels of Mamba 2 round, which their numbers would show.
        with torch.device("cpu"), mock.patch.object(kernel_tape, "_rounds", return_value=True):
            yield counting, drafter
        drafter.detach()


def put_on_card(drafter: Eagle31Drafter) -> Eagle31Drafter:
    """The drafter with tensors of a card, whatever they hold: `to` does not take what has no memory there."""
    for module in drafter.modules():
        for name, weight in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(torch.empty(weight.shape, dtype=torch.bfloat16), requires_grad=False))
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, torch.empty(buffer.shape, dtype=buffer.dtype))
    return drafter


class LinearNf4(nn.Module):
    """Calls what `Linear4bit` of bitsandbytes calls. Its own weight cannot be fake: `Params4bit` is a class of tensors,
    and so is `FakeTensor`."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        packed, self.state = quantize_4bit(linear.weight.data, quant_type="nf4", compress_statistics=True)
        self.weight = nn.Parameter(packed, requires_grad=False)
        self.register_buffer("scales", self.state.absmax)
        self.register_buffer("scales_of_scales", self.state.state2.absmax)

    def forward(self, hidden: Tensor) -> Tensor:
        return matmul_4bit(hidden, self.weight.t(), quant_state=self.state)


def pack_nf4(model: nn.Module) -> None:
    """All matrices but the head's."""
    for module in list(model.modules()):
        for name, part in list(module.named_children()):
            if isinstance(part, nn.Linear) and name != "lm_head":
                setattr(module, name, LinearNf4(part))


def write(counting: Counting, drafter: Eagle31Drafter, text: Text, rounds: int) -> Written:
    """Read a prompt and write so many rounds."""
    ids = torch.zeros(text.rows, text.prompt, dtype=torch.long, device=CARD)
    request = DecodingRequest(
        sequences=Sequences(ids, [0] * text.rows, StopRules(text.longest), None),
        processing=ScoreProcessing(LogitsProcessorList(text.processors)),
        shape=text.shape,
        policy=Planner(text.shape, lambda _rows: RoundCosts(0.0, text.shape.depth), schedule="constant"),
        do_sample=text.do_sample,
        prefill_chunk=text.chunk,
        graphs=Pair.of(drafter).current_graphs().made_by(CapturesSteps(counting.capture)) if text.captured else None,
    )
    written = Written()
    with drafter.binding.masked_attention():
        decoder = SpeculativeDecoder(drafter, request)
        decoder.prefill()
        for _ in range(rounds):
            cache = decoder.caches.target
            counting.follow(buffers_of(cache))
            needed = [length + text.shape.nodes for length in cache.lengths]
            decoder.step()
            buffers = buffers_of(cache)
            written.rounds.append(counting.work)
            written.visible_bytes.append(sum(distinct_bytes(each[:, :, : max(needed)]) for each in buffers))
            written.kept_bytes.append(sum(map(distinct_bytes, buffers)))
    written.fallbacks = request.stats.fallbacks
    return written


def buffers_of(cache: Any) -> list[Tensor]:
    return [buffer for layer in cache.layers for buffer in (layer.keys, layer.values) if layer.is_initialized]


class Writer:
    """Texts that are no text and never end."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.finish, self.remaining = None, 100

    def append(self, tokens: list[int]) -> tuple[int, str]:
        self.tokens += tokens
        return len(tokens), ""


def serve(
    counting: Counting, drafter: Eagle31Drafter, rows: int, rounds: int, sampling: Sampling
) -> tuple[list[Work], list[str]]:
    """Rounds of texts, no two of one length; work of each, and why something was not captured."""
    drafter.generation_config.num_assistant_tokens = CHAIN.depth
    drafter.generation_config.num_assistant_tokens_schedule = "constant"
    with (
        mock.patch.dict(captured.CAPTURES, {"cuda": counting.capture}),
        mock.patch.object(seen, "open_modes", list),  # those that count: graphs would not run another's
        drafter.binding.masked_attention(),
        torch.no_grad(),
    ):
        batch = Batch(drafter, demo_tokenizer(), EngineSettings(max_rows=rows, prefill_chunk=512))
        for row in range(rows):
            read(batch, [5] * (1100 + 10 * row), sampling)
        works = []
        for _ in range(rounds):
            counting.follow(buffers_of(batch.cache))
            batch.round()
            works.append(counting.work)
    # The first token comes with the prompt.
    assert [len(text.writer.tokens) for text in batch.texts] == [1 + ACCEPTED * rounds] * rows
    return works, batch.stats.fallbacks


def read(batch: Batch, prompt: list[int], sampling: Sampling) -> None:
    text: Any = ServedText(Request(tuple(prompt), 100, sampling), lambda event: None)
    batch.begin(text)
    text.writer = Writer()
    text.chooser._noise = FreshNoise(batch.binding.text_config.vocab_size, CARD)  # a card's generators are not there
    while batch.to_read:
        batch.read(min(batch.to_read, 512))
    batch.join()
