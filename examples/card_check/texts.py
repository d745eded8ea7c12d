"""Texts of the embedded pair are plain's by every shape of drafts; and targets that cannot be captured say so."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from itertools import product
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, PreTrainedModel
from transformers import RepetitionPenaltyLogitsProcessor as Penalty
from transformers.utils import is_bitsandbytes_available

from eagle31_hf import Eagle31Drafter
from eagle31_hf.demo import CONVERSATIONS, drafter_path, target_path
from eagle31_hf.settings import Eagle31GenerationConfig
from random_pair import llama_config

from .machine import Machine, recordings
from .notes import Notes, described

SHAPES: dict[str, dict[str, Any]] = {
    "default": {},
    "chain 3": {"num_assistant_tokens": 3},
    "chain 7": {"num_assistant_tokens": 7},
    "tree": {"num_assistant_tokens": 5, "draft_top_k": 2, "draft_tree_size": 16},
}
PENALTY = 1.3
CHAIN = {"num_assistant_tokens": 5}

LARGEST_TIES = {torch.float32: 1e-3, torch.bfloat16: 3e-2}
"""Share of the scores' range by which two tokens may differ where two right texts part: a wrong mask makes tenths."""


def drafting(fields: dict[str, Any]) -> Eagle31GenerationConfig:
    """These settings and the default of every other; a length that is set is kept."""
    length = {"num_assistant_tokens_schedule": "constant"} if "num_assistant_tokens" in fields else {}
    return Eagle31GenerationConfig(**length, **fields)


def complaints(stats: Any) -> list[str]:
    """Why a text was not written by our own loop without a step down."""
    return [*stats.fallbacks, *filter(None, [stats.reason])]


class EmbeddedPair:
    """Target, drafter and prompts, in one precision."""

    def __init__(self, machine: Machine, dtype: torch.dtype):
        self.machine = machine
        self.tokenizer: Any = AutoTokenizer.from_pretrained(target_path(), padding_side="left")
        self.tokenizer.pad_token_id = self.tokenizer.pad_token_id or 0
        self.target: Any = AutoModelForCausalLM.from_pretrained(target_path(), dtype=dtype).to(machine.device).eval()
        self.drafter = Eagle31Drafter.from_pretrained(drafter_path(), target=self.target)

    def prompts(self, rows: int, first: int = 0) -> dict[str, Tensor]:
        """Ids and mask `(rows, T)` of the conversations from `first` on."""
        chats = [list(messages) for messages in (*CONVERSATIONS[first:], *CONVERSATIONS)[:rows]]
        made = self.tokenizer.apply_chat_template(
            chats, add_generation_prompt=True, return_dict=True, return_tensors="pt", padding=True
        )
        return {name: made[name].to(self.machine.device) for name in ("input_ids", "attention_mask")}

    def write(self, prompts: dict[str, Tensor], fields: dict[str, Any] | None = None, **generate: Any) -> Tensor:
        """The text, greedy by default: plain `generate`'s where `fields` is `None`, else that of a drafter with these
        settings."""
        arguments = {**prompts, "do_sample": False, "pad_token_id": 0, **generate}
        if fields is not None:
            self.drafter.generation_config = drafting(fields)
            arguments["assistant_model"] = self.drafter
        return self.target.generate(**arguments)


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


def check_texts(machine: Machine, notes: Notes) -> None:
    """Text for text the plain one, greedy and drawn, in two precisions; on a card graphs are recorded."""
    notes.put("machine", machine.about())
    for dtype in (torch.float32, torch.bfloat16)[: machine.size(2, 1)]:
        pair = EmbeddedPair(machine, dtype)
        with recordings() as counted:
            check_greedy(pair, notes)
            if dtype == torch.float32:
                notes.attempt("drawn", lambda pair=pair: check_drawn(pair, notes))
        notes.put(f"graphs, {dtype}", counted["recorded"])
        if machine.is_cuda and not counted:
            notes.fail(f"graphs, {dtype}", "nothing was captured")
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


def check_greedy(pair: EmbeddedPair, notes: Notes) -> None:
    """Every case's text is plain's, up to a tie, and was written as it was set."""
    machine, target = pair.machine, pair.target
    right, name = 0, f"texts, {target.dtype}"
    plain: dict[tuple[int, float, int], Tensor] = {}
    for rows, penalty, shape, acceleration in cases(machine):
        for first in range(machine.size(3, 1) if (rows, penalty) == (1, 1.0) else 1):
            prompts, key = pair.prompts(rows, first), (rows, penalty, first)
            how = {"max_new_tokens": machine.size(96, 8), "repetition_penalty": penalty}
            if key not in plain:
                plain[key] = pair.write(prompts, **how)
            case = f"{name}, {shape} x{rows} {acceleration}, penalty {penalty}, prompt {first}"
            try:
                ours = pair.write(prompts, {"acceleration": acceleration, **SHAPES[shape]}, **how)
                gap = worst_tie(target, prompts["attention_mask"], plain[key], ours, penalty)
                wrong = complaints(pair.drafter.stats)
            except Exception as error:
                notes.fail(case, described(error))
                continue
            if gap > LARGEST_TIES[target.dtype] or wrong:
                notes.fail(case, {"gap": gap, "complaints": wrong})
            else:
                right += 1
        notes.put(name, {"right": right})


def check_drawn(pair: EmbeddedPair, notes: Notes) -> dict[str, Any]:
    """Under the same seed drawn texts are plain's, by eager rounds and by captured ones."""
    prompts, seeds = pair.prompts(1), range(pair.machine.size(3, 2))
    how = {"max_new_tokens": pair.machine.size(96, 8), "do_sample": True, "temperature": 0.9, "top_k": 20}

    def drawn(seed: int, fields: dict[str, Any] | None) -> Tensor:
        torch.manual_seed(seed)
        return pair.write(prompts, fields, **how)

    texts = [drawn(seed, None) for seed in seeds]
    found: dict[str, Any] = {"different": len({str(text.tolist()) for text in texts})}
    for acceleration in ("eager", "auto"):
        fields = {"acceleration": acceleration, **CHAIN}
        alike = sum(torch.equal(drawn(seed, fields), texts[seed]) for seed in seeds)
        wrong = complaints(pair.drafter.stats)
        found[acceleration] = {"plain's": alike, "of": len(texts), "complaints": wrong}
        if alike < len(texts) or wrong:
            notes.fail(f"drawn, {acceleration}", found[acceleration])
    return found


# --- steps that cannot be captured ------------------------------------------------------------------------------------


def check_failures(machine: Machine, notes: Notes) -> None:
    """Two targets that make the host wait, by a rope that depends on the length and by LLM.int8: the text is plain's,
    the reason is in the figures, and the process is as it was before."""

    def dynamic_rope() -> dict[str, Any]:
        rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
        target = AutoModelForCausalLM.from_config(llama_config("tiny", rope_parameters=rope))
        return after_a_text(machine, target.to(machine.device).eval())

    def int8() -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as folder:
            AutoModelForCausalLM.from_config(llama_config("tiny")).save_pretrained(folder)
            packed = BitsAndBytesConfig(load_in_8bit=True)
            loaded = {"quantization_config": packed, "device_map": {"": machine.device}}
            target = AutoModelForCausalLM.from_pretrained(folder, **loaded)
        return after_a_text(machine, target.eval())

    checked = {"dynamic rope": dynamic_rope}
    if is_bitsandbytes_available():
        checked["LLM.int8"] = int8
    else:
        notes.put("LLM.int8", "left out: bitsandbytes is not here")
    for name, check in checked.items():
        torch.manual_seed(0)
        notes.attempt(name, check)
        for what, holds in notes.found[name].items():
            if holds is False:
                notes.fail(f"{name}: {what}", "it is not so")


def after_a_text(machine: Machine, target: PreTrainedModel) -> dict[str, Any]:
    """What holds after one text; whatever should and does not is `False`.

    LLM.int8 rounds half precision otherwise over other widths, so texts may part where two tokens are tied.
    """
    drafter = Eagle31Drafter.from_target(target, draft_vocab_size=256).eval()
    drafter.generation_config.num_assistant_tokens = 3
    ids = torch.randint(0, 500, (1, 32), device=machine.device)
    arguments: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "do_sample": False}
    arguments |= {"pad_token_id": 0, "max_new_tokens": machine.size(96, 12)}
    plain = target.generate(**arguments)
    ours = target.generate(**arguments, assistant_model=drafter)
    gap = worst_tie(target, arguments["attention_mask"], plain, ours)
    reasons = complaints(drafter.stats)
    found = {"the text is plain's": gap <= LARGEST_TIES[torch.bfloat16], "gap": gap, "reasons": reasons}
    if machine.is_cuda:
        found["a reason is given"] = bool(reasons)
        found["the default stream is current"] = torch.cuda.current_stream() == torch.cuda.default_stream()
        torch.cuda.empty_cache()  # raises where the allocator believes that a capture is under way
        try:
            torch.empty(2**50, dtype=torch.uint8, device="cuda")
        except RuntimeError as error:
            found["running out of memory is seen as that"] = isinstance(error, torch.OutOfMemoryError)
    return found
