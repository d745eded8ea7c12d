"""A target, its drafter and its tokenizer, loaded together and asked together. What the command line works with."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from ..demo import Messages, drafter_path, target_path
from ..drafter import Eagle31Drafter
from ..errors import CheckpointNotFoundError, ConfigurationError, IncompatibleTargetError

DTypeName = Literal["auto", "bfloat16", "float16", "float32"]
DeviceName = Literal["auto", "cpu", "cuda", "mps"]


@dataclass(frozen=True)
class Pair:
    """A drafter attached to its target.

    `name` is what people call the target; `uses_embedded_target` tells the shipped demo model from any other.
    """

    name: str
    target: PreTrainedModel
    drafter: Eagle31Drafter
    tokenizer: PreTrainedTokenizerBase
    uses_embedded_target: bool = False


@dataclass(frozen=True)
class DecodingWishes:
    """How to write: at most `max_new_tokens`; `temperature` 0 is greedy, above it samples."""

    max_new_tokens: int = 128
    temperature: float = 0.0

    @property
    def samples(self) -> bool:
        return self.temperature > 0

    def to_generate(self) -> dict[str, Any]:
        """Keyword arguments for `generate`."""
        greedy: dict[str, Any] = {"max_new_tokens": self.max_new_tokens, "do_sample": False}
        return {**greedy, "do_sample": True, "temperature": self.temperature} if self.samples else greedy


@dataclass(frozen=True)
class PairSource:
    """What to load: folders or Hub ids (both `None`: the embedded pair), precision and device."""

    target: str | None = None
    drafter: str | None = None
    dtype: DTypeName = "auto"
    device: DeviceName = "auto"
    drafting: dict[str, Any] = field(default_factory=dict)  # fields of `eagle.generation_config` to set


def load_pair(source: PairSource) -> Pair:
    """Load target, tokenizer and drafter, and attach them.

    Raises:
        ConfigurationError: no drafter named for a target of one's own, or an impossible setting.
        CheckpointNotFoundError: a folder or Hub id is not there, or there is no network to ask.
        CheckpointFormatError, UnsafeCheckpointError: the drafter's files are not usable.
        IncompatibleTargetError: the target is of a kind that cannot be served, or the drafter is not for it.
    """
    if source.target is not None and source.drafter is None:
        raise ConfigurationError(f"no drafter given for {source.target!r}; name one trained for it with --drafter")
    name = source.target or str(target_path())
    device = device_named(source.device)
    target, tokenizer = _load_target(name, source.dtype, device)
    drafter = Eagle31Drafter.from_pretrained(source.drafter or drafter_path(), target=target)
    for wish, value in source.drafting.items():
        setattr(drafter.generation_config, wish, value)
    drafter.generation_config.check()
    return Pair(
        name=source.target or "the embedded target",
        target=target,
        drafter=drafter,
        tokenizer=tokenizer,
        uses_embedded_target=source.target is None,
    )


def encode(pair: Pair, conversation: Messages) -> dict[str, Tensor]:
    """`input_ids` and `attention_mask` `(1, T)` on the target's device, by the chat template if there is one."""
    encoded: Any
    if pair.tokenizer.chat_template:
        encoded = pair.tokenizer.apply_chat_template(
            conversation, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
    else:
        encoded = pair.tokenizer("\n".join(message["content"] for message in conversation), return_tensors="pt")
    device = pair.drafter.require_binding().input_device
    return {key: encoded[key].to(device) for key in ("input_ids", "attention_mask")}


def write(
    pair: Pair, inputs: dict[str, Tensor], wishes: DecodingWishes, *, with_drafter: bool, streamer: Any = None
) -> Tensor:
    """New tokens `(n,)` for one prompt."""
    assistant = {"assistant_model": pair.drafter} if with_drafter else {}
    output = pair.target.generate(**inputs, **wishes.to_generate(), **assistant, streamer=streamer)  # type: ignore[operator]
    return output[0, inputs["input_ids"].shape[1] :]


def _load_target(name: str, dtype: str, device: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    try:
        AutoConfig.from_pretrained(name)  # small, and its absence says more than that of a tokenizer
        tokenizer = AutoTokenizer.from_pretrained(name)
        model = AutoModelForCausalLM.from_pretrained(name, dtype=dtype, device_map=device)
    except OSError as error:
        raise CheckpointNotFoundError(_why_no_target(name, error)) from error
    except ValueError as error:
        raise IncompatibleTargetError(
            f"the target {name!r} cannot be loaded; wanted a decoder-only transformers model with its tokenizer: "
            f"{_first_line(error)}"
        ) from error
    return model.eval(), tokenizer


def _why_no_target(name: str, error: OSError) -> str:
    if os.path.isdir(name):
        return f"the folder {name!r} holds no complete target (config.json, weights, tokenizer): {_first_line(error)}"
    return (
        f"no target at {name!r}: no such folder, and the Hub did not give it ({_first_line(error)}); check the "
        "spelling, your access and the network, or pass a local folder"
    )


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def device_named(wish: DeviceName) -> str:
    """The device a wish means on this machine.

    Raises:
        ConfigurationError: it has no such device.
    """
    if wish == "auto":
        if torch.cuda.is_available():
            return "cuda"
        return "mps" if torch.backends.mps.is_available() else "cpu"
    if (wish == "cuda" and not torch.cuda.is_available()) or (wish == "mps" and not torch.backends.mps.is_available()):
        raise ConfigurationError(f"this machine has no {wish} device; use --device cpu or auto")
    return wish
