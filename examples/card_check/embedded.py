"""The embedded pair on the device: the plain text by every shape of drafts, and what a round of it takes."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase
from transformers import RepetitionPenaltyLogitsProcessor as Penalty

from eagle31_hf import Eagle31Drafter
from eagle31_hf.decoding.pair import Pair
from eagle31_hf.demo import CONVERSATIONS, drafter_path, target_path
from eagle31_hf.generation_config import Eagle31GenerationConfig

from .machine import Machine, to_ms
from .notes import Notes, described
from .recordings import Recordings, allow_captures, launches, waits

SHAPES: dict[str, dict[str, Any]] = {
    "default": {},
    "chain 3": {"num_assistant_tokens": 3},
    "chain 7": {"num_assistant_tokens": 7},
    "tree": {"num_assistant_tokens": 5, "draft_top_k": 2, "draft_tree_size": 16},
}
STOCK = {"speculation_loop": "stock"}
PENALTY = 1.3
CHAIN = {"num_assistant_tokens": 5}

LARGEST_TIES = {torch.float32: 1e-3, torch.bfloat16: 3e-2}
"""Share of the scores' range by which two tokens may differ where two right texts part: a wrong mask makes tenths."""


class EmbeddedPair:
    """Target, drafter and prompts.

    Args:
        dtype: of the target and the drafter.
    """

    def __init__(self, machine: Machine, dtype: torch.dtype):
        self.machine = machine
        self.tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(target_path(), padding_side="left")
        target = AutoModelForCausalLM.from_pretrained(target_path(), dtype=dtype)
        self.target = target.to(machine.device).eval()
        self.drafter = Eagle31Drafter.from_pretrained(drafter_path(), target=self.target)

    def prompts(self, rows: int, first: int = 0) -> dict[str, Tensor]:
        """Ids and mask `(rows, T)` of the conversations from `first` on."""
        texts = [
            self.tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=False)
            for messages in (*CONVERSATIONS[first:], *CONVERSATIONS)[:rows]
        ]
        self.tokenizer.pad_token_id = self.tokenizer.pad_token_id or 0
        made = self.tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
        return {name: made[name].to(self.machine.device) for name in ("input_ids", "attention_mask")}

    def write(self, prompts: dict[str, Tensor], fields: dict[str, Any] | None = None, **generate: Any) -> Tensor:
        """The text, greedy unless told otherwise: plain `generate`'s where `fields` is `None`, else that of a drafter
        with these settings and the default of every other."""
        arguments = {**prompts, "do_sample": False, "pad_token_id": 0, **generate}
        if fields is None:
            return self.target.generate(**arguments)
        length = {} if "num_assistant_tokens" not in fields else {"num_assistant_tokens_schedule": "constant"}
        self.drafter.generation_config = Eagle31GenerationConfig(**length, **fields)
        return self.target.generate(**arguments, assistant_model=self.drafter)

    def complaints(self) -> list[str]:
        """Why the last text was not written as asked."""
        stats = self.drafter.stats
        assert stats is not None
        return [*stats.fallbacks, *([stats.reason] if stats.reason not in ("", "asked for") else [])]


@torch.no_grad()
def worst_tie(target: Any, mask: Tensor, plain: Tensor, ours: Tensor, penalty: float = 1.0) -> float:
    """How far apart, as a share of the scores' range, the two tokens were where two greedy texts `(B, T)` part first;
    the largest of all rows, 0 if none parts.

    Args:
        mask: of the prompts.
        penalty: on tokens that the text has.
    """
    width, largest = min(plain.shape[1], ours.shape[1]), 0.0
    for row in range(len(plain)):
        differs = (plain[row, :width] != ours[row, :width]).nonzero()
        if not len(differs):
            continue
        at = int(differs[0])
        text = plain[row : row + 1, :at]
        seen = torch.cat((mask[row : row + 1], mask.new_ones(1, at - mask.shape[1])), 1)
        places = (seen.cumsum(1) - 1).clamp(min=0)
        logits = target(input_ids=text, attention_mask=seen, position_ids=places).logits[:, -1].float()
        scores = logits if penalty == 1.0 else Penalty(penalty)(text, logits)
        gap = (scores[0, plain[row, at]] - scores[0, ours[row, at]]).abs() / (scores.max() - scores.min())
        largest = max(largest, float(gap))
    return largest


def check_pair(machine: Machine, notes: Notes) -> None:
    """Text for text the plain one; then what rounds take, how much is recorded, and where the host waits."""
    allow_captures(machine)
    dtypes = (torch.float32, torch.bfloat16)
    for dtype in dtypes[: machine.size(2, 1)]:
        pair = EmbeddedPair(machine, dtype)
        check_texts(pair, notes)
        graphs = Pair.of(pair.drafter).graphs
        kinds = sorted({f"{key.kind} x{key.rows}, {key.size}" for key in graphs.keys}) if graphs is not None else []
        notes.put(f"graphs, {dtype}", kinds)
        if not kinds:
            notes.fail(f"graphs, {dtype}", "nothing was captured")
        if dtype == torch.float32:
            notes.attempt("drawn", lambda pair=pair: check_drawn(pair, notes))
        if dtype == dtypes[machine.size(2, 1) - 1]:
            measure_rounds(pair, notes)
        if machine.is_cuda and torch.cuda.current_stream() != torch.cuda.default_stream():
            notes.fail(f"stream, {dtype}", "another one is current than before")
        pair.drafter.detach()
        machine.free()


def cases(machine: Machine) -> Iterator[tuple[int, float, str, str]]:
    """Rows, repetition penalty, name of the shape, and how rounds are computed."""
    for rows, penalty in machine.size([*product((1, 3), (1.0, PENALTY))], [(1, 1.0), (3, PENALTY)]):
        few = machine.tiny or penalty != 1.0
        for shape, acceleration in product(["chain 3", "tree"] if few else SHAPES, ("eager", "auto")):
            yield rows, penalty, shape, acceleration
    yield 1, 1.0, "stock", "eager"


def check_texts(pair: EmbeddedPair, notes: Notes) -> None:
    """Every case's text is plain's, up to a tie, and was written as asked."""
    machine = pair.machine
    right, name = 0, f"texts, {pair.target.dtype}"
    plain: dict[tuple[int, float, int], Tensor] = {}
    for rows, penalty, shape, acceleration in cases(machine):
        for first in range(machine.size(3, 1) if (rows, penalty) == (1, 1.0) else 1):
            prompts = pair.prompts(rows, first)
            how = {"max_new_tokens": machine.size(96, 8), "repetition_penalty": penalty}
            if (rows, penalty, first) not in plain:
                plain[rows, penalty, first] = pair.write(prompts, **how)
            fields = STOCK if shape == "stock" else {"acceleration": acceleration, **SHAPES[shape]}
            case = f"{name}, {shape} x{rows} {acceleration}, penalty {penalty}, prompt {first}"
            try:
                ours = pair.write(prompts, fields, **how)
                gap = worst_tie(pair.target, prompts["attention_mask"], plain[rows, penalty, first], ours, penalty)
            except Exception as error:
                notes.fail(case, described(error))
                continue
            if gap > LARGEST_TIES[pair.target.dtype] or pair.complaints():
                notes.fail(case, {"gap": gap, "complaints": pair.complaints()})
            else:
                right += 1
        notes.put(name, {"right": right})


def check_drawn(pair: EmbeddedPair, notes: Notes) -> dict[str, Any]:
    """Under the same seed drawn texts are plain's, by eager rounds and by captured ones."""
    prompts, found = pair.prompts(1), {}
    how = {"max_new_tokens": pair.machine.size(96, 8), "do_sample": True, "temperature": 0.9, "top_k": 20}
    texts = []
    for seed in range(pair.machine.size(3, 2)):
        torch.manual_seed(seed)
        texts.append(pair.write(prompts, **how))
    for acceleration in ("eager", "auto"):
        alike = 0
        for seed, plain in enumerate(texts):
            torch.manual_seed(seed)
            alike += torch.equal(pair.write(prompts, {"acceleration": acceleration, **CHAIN}, **how), plain)
        found[acceleration] = {"plain's": alike, "of": len(texts), "complaints": pair.complaints()}
        if alike < len(texts) or pair.complaints():
            notes.fail(f"drawn, {acceleration}", found[acceleration])
    return found | {"different": len({str(text.tolist()) for text in texts})}


def measure_rounds(pair: EmbeddedPair, notes: Notes) -> None:
    machine = pair.machine
    new = machine.size(256, 10)
    prompts, how = pair.prompts(1), {"max_new_tokens": new}
    # Not `min_new_tokens`: its processor looks at the text, and rounds would not be captured.
    pair.target.generation_config.eos_token_id = None
    ways = {"eager": {"acceleration": "eager", **CHAIN}, "captured": {"acceleration": "auto", **CHAIN}}

    def generations(name: str, fields: dict[str, Any], count: int) -> None:
        for turn in range(1, count + 1):
            with Recordings(machine) as recordings:
                seconds = machine.seconds(lambda: pair.write(prompts, fields, **how))
            stats = pair.drafter.stats
            found = {
                "ms/token": to_ms(seconds / new),
                "ms/round": to_ms(seconds / max(stats.rounds, 1)),
                "rounds": stats.rounds,
                "acceptance": round(stats.acceptance_length, 2),
                **recordings.to_dict(),
            }
            notes.put(f"{name}, generation {turn}", found)
            if name == "captured" and bool(recordings.seconds) != (turn == 1):
                wanted = "each step once" if turn == 1 else "nothing"
                notes.fail(f"{name}, generation {turn}, recordings", f"{len(recordings.seconds)}; wanted {wanted}")

    notes.attempt("plain, ms/token", lambda: to_ms(machine.seconds(lambda: pair.write(prompts, **how)) / new))
    Pair.of(pair.drafter).graphs = None  # as in a process that has written nothing
    notes.attempt("captured generations", lambda: generations("captured", ways["captured"], 3))
    notes.attempt("eager generations", lambda: generations("eager", ways["eager"], machine.size(3, 1)))
    notes.attempt("default generations", lambda: generations("default", {}, machine.size(3, 1)))
    if machine.tiny:
        return  # `big_bf16` tries the profiler, and waits are a card's
    for name, fields in ways.items():
        notes.attempt(
            f"launches, {name}", lambda fields=fields: launches(machine, lambda: pair.write(prompts, fields, **how))
        )
        if machine.is_cuda:
            notes.attempt(f"waits, {name}", lambda fields=fields: waits(lambda: pair.write(prompts, fields, **how)))
    if machine.is_cuda:
        notes.attempt("held by cuBLAS", lambda: held_by_cublas(pair, ways["captured"]))


def held_by_cublas(pair: EmbeddedPair, fields: dict[str, Any]) -> dict[str, int]:
    """cuBLAS keeps a workspace for each stream it has met; ten more texts should meet no new one."""
    pair.machine.free()
    before = torch.cuda.memory_allocated()
    for extra in range(10):
        pair.write(pair.prompts(1), fields, max_new_tokens=64 + 16 * extra)
    pair.machine.free()
    held = torch.cuda.memory_allocated()
    torch._C._cuda_clearCublasWorkspaces()
    of_cublas = held - torch.cuda.memory_allocated()
    reserved = torch.cuda.memory_reserved()
    return {"grew_mib": (held - before) >> 20, "of_cublas_mib": of_cublas >> 20, "reserved_mib": reserved >> 20}
