"""Drafter files as somebody writes them, tiny and random, and what their trainers' formulas draft from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import transformers as hf
from tiny_checkpoints import random_tensors, save, save_shards
from torch import Tensor

from eagle31_hf import Eagle31Config, Eagle31Drafter
from eagle31_hf.checkpoints.eagle_network import expected_shapes
from helpers import GROUPED, random_target, seeded
from reference_drafter import Latent, Reference, plain_frequencies

WIDTH, HEADS, KV_HEADS, HEAD_DIM, INNER, VOCABULARY, DRAFTS, STEPS = 32, 4, 2, 8, 48, 120, 60, 4
LAYERS = 12
DEFAULT_THETA = 1e4
COMMON: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_size": WIDTH,
    "intermediate_size": INNER, "num_hidden_layers": 1, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS,
    "hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 1e6, "max_position_embeddings": 512,
    "vocab_size": VOCABULARY, "draft_vocab_size": DRAFTS, "tie_word_embeddings": False,
}  # fmt: skip
LATENT = Latent(rank=10, plain=6, rotated=4, value=5)
LATENT_FIELDS = {
    "kv_lora_rank": 10, "q_lora_rank": 12, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5,
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A file as somebody writes it.

    Attributes:
        config: entries of its config beside `COMMON`; `...` leaves one out. What is nested below `layer_config` there
            has `COMMON`'s sizes, too.
        means: what they mean to its trainer: fields of `Reference`.
        depth: layers of its target. taps: which hidden states of those it reads.
        prefix, wrapper: of the first layer's tensors, and of all but the head's.
        layers: of the drafter. norms: on query and key heads. aux_norm: on what it taps, `"per_slot"` or
            `"concatenated"`. whole: its head has a row for every token.
        own_head, embeds: whether the file has a head and an embedding, or the target's are meant. fc_bias: a bias on
            `fc`. target_width: of the states it reads.
        renames: names of tensors that this file alone has. dtype, map_dtype: what floats and `d2t` are stored in.
        file: what they lie in, or `"shards"`.
    """

    config: dict[str, Any]
    means: dict[str, Any] = field(default_factory=dict)
    depth: int = LAYERS
    taps: tuple[int, ...] = ()
    prefix: str = "midlayer."
    wrapper: str = ""
    layers: int = 1
    norms: bool = False
    aux_norm: str = ""
    whole: bool = False
    latent: bool = False
    own_head: bool = True
    embeds: bool = True
    fc_bias: bool = False
    target_width: int = WIDTH
    renames: Mapping[str, str] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    map_dtype: torch.dtype = torch.int64
    file: str = "model.safetensors"
    layer_config: str = ""

    @property
    def tapped(self) -> tuple[int, ...]:
        return self.taps or (2, self.depth // 2, self.depth - 3)

    @property
    def layer_fields(self) -> dict[str, Any]:
        own = self.config.get(self.layer_config, {}) if self.layer_config else self.config
        return {key: value for key, value in (COMMON | own).items() if value is not ...}

    @property
    def whole_config(self) -> dict[str, Any]:
        if not self.layer_config:
            return self.layer_fields
        return {**self.config, self.layer_config: self.layer_fields}

    @property
    def head_dim(self) -> int:
        if self.latent:
            return LATENT.rotated
        return self.layer_fields.get("head_dim") or WIDTH // HEADS


def network(case: Case) -> dict[str, Tensor]:
    """Its tensors, those of the first layer without a prefix."""
    latent = {name: case.config.get(name, size) for name, size in LATENT_FIELDS.items()} if case.latent else {}
    config = Eagle31Config(
        hidden_size=WIDTH, intermediate_size=INNER, num_hidden_layers=case.layers, num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS, head_dim=case.head_dim, vocab_size=VOCABULARY,
        draft_vocab_size=None if case.whole else DRAFTS, target_hidden_size=case.target_width,
        num_aux_hidden_states=len(case.tapped), aux_norm=case.aux_norm or "none", qk_norm=case.norms,
        fc_bias=case.fc_bias, own_lm_head=case.own_head, own_embedding=case.embeds, **latent,
    )  # fmt: skip
    shapes = {name.removeprefix("layers.0."): shape for name, shape in expected_shapes(config).items() if name != "d2t"}
    tensors = {name: tensor * 1.5 / tensor.shape[-1] ** 0.5 for name, tensor in random_tensors(shapes).items()}
    with seeded(3):
        tensors |= {name: 1 + 0.2 * torch.randn(shape) for name, shape in shapes.items() if "norm" in name}
        tensors = {name: tensor.to(case.dtype) for name, tensor in tensors.items()}
        if not case.whole:
            ids = torch.randperm(VOCABULARY)[:DRAFTS].sort().values
            tensors["d2t"] = (ids - torch.arange(DRAFTS)).to(case.map_dtype)
    return tensors


def stored(case: Case, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same under the names of the file."""
    named = {}
    for name, tensor in tensors.items():
        in_layer = name.startswith(("self_attn.", "mlp.", "input_layernorm", "hidden_norm", "post_attention"))
        place = case.wrapper + case.prefix if in_layer else case.wrapper
        whole = name if name in ("lm_head.weight", "d2t") else place + name
        named[case.renames.get(whole, whole)] = tensor.contiguous()
    return named


def write(case: Case, tensors: dict[str, Tensor], folder: Path) -> Path:
    if case.file == "shards":
        return save_shards(folder, case.whole_config, stored(case, tensors))
    return save(folder, case.whole_config, stored(case, tensors), case.file)


@cache
def make_target(layers: int, width: int = WIDTH) -> Any:
    """Shared: leave it as it is."""
    sizes = {"vocab_size": VOCABULARY, "hidden_size": width, "num_hidden_layers": layers}
    return random_target(hf.LlamaConfig(**GROUPED | sizes), seed=5)


@torch.no_grad()
def first_logits(eagle: Eagle31Drafter, target: Any, ids: Tensor) -> list[Tensor]:
    """Logits of the first draft of a greedy call."""
    seen: list[Tensor] = []
    draft = Eagle31Drafter.draft_logits

    def watched(self: Eagle31Drafter, normed: Tensor) -> Tensor:
        logits = draft(self, normed)
        seen.append(logits.reshape(-1, logits.shape[-1])[-1].clone())
        return logits

    eagle.generation_config.num_assistant_tokens = STEPS
    eagle.generation_config.num_assistant_tokens_schedule = "constant"
    with mock.patch.object(Eagle31Drafter, "draft_logits", watched):
        target.generate(ids, assistant_model=eagle, do_sample=False, max_new_tokens=STEPS + 2)
    return seen[1 : STEPS + 1]  # behind what was read of the prompt before its first token


@torch.no_grad()
def reference_logits(case: Case, tensors: dict[str, Tensor], target: Any, ids: Tensor) -> list[Tensor]:
    before_norm: list[Tensor] = []
    with target.model.norm.register_forward_pre_hook(lambda _, given: before_norm.append(given[0])):
        out = target(ids, output_hidden_states=True)
    states = (*out.hidden_states[:-1], *before_norm)  # transformers' last one is normed
    aux = torch.cat([states[tap][0] for tap in case.tapped], -1).double()
    following = [*ids[0, 1:].tolist(), int(out.logits[0, -1].argmax())]
    fields = case.layer_fields
    theta = plain_frequencies(fields.get("rope_theta") or DEFAULT_THETA, case.head_dim)
    kwargs = {"frequencies": theta, "eps": fields["rms_norm_eps"], **case.means}
    rows = tensors.get("embed_tokens.weight", target.get_input_embeddings().weight)
    head = target.get_output_embeddings().weight
    if not case.own_head and not case.whole:
        head = head[torch.arange(DRAFTS) + tensors["d2t"]]
    w = {"lm_head.weight": head, **tensors}
    w = {name: tensor.double() if tensor.is_floating_point() else tensor for name, tensor in w.items()}
    reference = Reference(w, HEADS, KV_HEADS, latent=LATENT if case.latent else None, **kwargs)
    return reference.chain(aux, lambda tokens: rows[tokens].double(), following, STEPS)


def prompt() -> Tensor:
    return torch.randint(3, VOCABULARY, (1, 17), generator=torch.Generator().manual_seed(7))


def assert_same_logits(got: list[Tensor], wanted: list[Tensor]) -> None:
    """To a hundred-thousandth of the largest one."""
    for step, (ours, theirs) in enumerate(zip(got, wanted, strict=True)):
        largest = float(theirs.abs().max())
        torch.testing.assert_close(ours.double(), theirs, rtol=0, atol=1e-5 * max(1.0, largest), msg=f"step {step}")
