"""Steps that cannot be captured: the text must be plain's, the reason told, and the process as it was before."""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, PreTrainedModel
from transformers.utils import is_bitsandbytes_available

from eagle31_hf import Eagle31Drafter

from .embedded import LARGEST_TIES, worst_tie
from .machine import Machine
from .notes import Notes
from .recordings import allow_captures

SIZES: dict[str, Any] = {
    "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 2, "vocab_size": 512, "bos_token_id": None, "eos_token_id": None,
    "max_position_embeddings": 4096,
}  # fmt: skip


def check_failures(machine: Machine, notes: Notes) -> None:
    """Two targets that make the host wait: by a rope that depends on the length, and by LLM.int8."""
    allow_captures(machine, forbid_waits=True)

    def dynamic_rope() -> dict[str, Any]:
        rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
        torch.manual_seed(0)
        target = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES, rope_parameters=rope))
        return after_a_text(machine, target.to(machine.device).eval())

    def int8() -> dict[str, Any]:
        torch.manual_seed(0)
        with tempfile.TemporaryDirectory() as folder:
            AutoModelForCausalLM.from_config(LlamaConfig(**SIZES)).save_pretrained(folder)
            packed = BitsAndBytesConfig(load_in_8bit=True)
            target = AutoModelForCausalLM.from_pretrained(
                folder, quantization_config=packed, device_map={"": machine.device}
            )
        return after_a_text(machine, target.eval())

    checked = {"dynamic rope": dynamic_rope}
    if is_bitsandbytes_available():
        checked["LLM.int8"] = int8
    else:
        notes.put("LLM.int8", "left out: bitsandbytes is not here")
    for name, check in checked.items():
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
    arguments |= {"pad_token_id": 0, "max_new_tokens": machine.size(64, 12)}
    plain = target.generate(**arguments)
    ours = target.generate(**arguments, assistant_model=drafter)
    assert drafter.stats is not None
    reasons = drafter.stats.fallbacks
    gap = worst_tie(target, arguments["attention_mask"], plain, ours)
    found = {
        "the text is plain's": gap <= LARGEST_TIES[torch.bfloat16],
        "gap": gap,
        "a reason is told": bool(reasons),
        "reasons": reasons,
    }
    if machine.is_cuda:
        found["the default stream is current"] = torch.cuda.current_stream() == torch.cuda.default_stream()
        torch.cuda.empty_cache()  # raises where the allocator believes that a capture is under way
        try:
            torch.empty(2**50, dtype=torch.uint8, device="cuda")
        except RuntimeError as error:
            found["running out of memory is seen as that"] = isinstance(error, torch.OutOfMemoryError)
    return found
