"""The drafter network: tokens, hidden states and a cache in; hidden states and draft logits out.

The formulas are those of EAGLE-3 (arXiv 2503.01840) with the two changes of EAGLE 3.1 (arXiv 2605.09992): a norm on
each aux state and post-norm feedback. One pass over position t reads the embedding of token x_{t+1} and a state g_t:

    g = fc(pre(aux))                 first pass after a target forward: A target hidden states, side by side
    g = feedback                     later draft steps: the drafter's own previous output
    z = [input_layernorm(embedding) ; hidden_norm(g)]                     (2H wide, embedding first)
    h = r + attention(z),  r = g or hidden_norm(g);   h = h + mlp(post_attention_layernorm(h))
    y = norm(h);  draft logits = lm_head(y);  feedback = h (EAGLE-3) or y (EAGLE 3.1)

Query, key and value are one matrix here (but for latent attention, `attention`), gate and up another: a draft step is
bound by the number of operations. The split is restored wherever tensors leave this module (`canonical_tensors`).
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, PreTrainedModel
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from ..checkpoints.layouts import FUSED_PROJECTIONS, packable_shapes
from ..config import Eagle31Config
from ..errors import CheckpointFormatError
from .attention import AttendingCache, GroupedQueryAttention, LatentAttention
from .packed_linear import KeepsBufferDtypes


def off_meta() -> AbstractContextManager[Any]:
    """Where rotary tables are made: they are computed and not stored, so a network made on meta has real ones."""
    return torch.device("cpu") if torch.get_default_device().type == "meta" else nullcontext()


@dataclass(frozen=True)
class DrafterOutput:
    """One drafter pass. `normed` (B, T, H) goes to the LM head, `feedback` (B, T, H) into the next draft step."""

    normed: Tensor
    feedback: Tensor


class Eagle31MLP(nn.Module):
    """SwiGLU with gate and up in one matrix."""

    def __init__(self, config: Eagle31Config):
        super().__init__()
        self.gate_up_proj = nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=config.mlp_bias)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)
        self.act_fn = ACT2FN[config.hidden_act]

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(self.act_fn(gate) * up)


class Eagle31DecoderLayer(nn.Module):
    """Layer 0 joins embedding and hidden state; further layers are ordinary decoder layers."""

    def __init__(self, config: Eagle31Config, layer_idx: int):
        super().__init__()
        joins = layer_idx == 0
        width, eps = config.hidden_size, config.rms_norm_eps
        self.norm_before_residual = config.norm_before_residual
        self.input_layernorm = nn.RMSNorm(width, eps=eps)
        if joins:
            self.hidden_norm = nn.RMSNorm(width, eps=eps)
        attention = LatentAttention if config.is_latent else GroupedQueryAttention
        self.self_attn = attention(config, layer_idx, input_size=2 * width if joins else width)
        self.post_attention_layernorm = nn.RMSNorm(width, eps=eps)
        self.mlp = Eagle31MLP(config)

    def forward(
        self,
        hidden: Tensor,
        embeddings: Tensor | None,
        rotary: tuple[Tensor, Tensor],
        attention_mask: Tensor | None,
        cache: Cache | AttendingCache | None,
    ) -> Tensor:
        if embeddings is not None:
            normed = self.hidden_norm(hidden)
            attended = torch.cat((self.input_layernorm(embeddings), normed), dim=-1)  # (B, T, 2H)
            residual = normed if self.norm_before_residual else hidden
        else:
            attended, residual = self.input_layernorm(hidden), hidden
        hidden = residual + self.self_attn(attended, rotary, attention_mask, cache)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class RotaryTables(KeepsBufferDtypes, LlamaRotaryEmbedding):
    """Stock rotary frequencies, which stay fp32 when the drafter changes its dtype.

    In bf16 they are off by up to 0.4 %: 0.4 radians at position 1,000, and all of the angle at 10,000.
    """


class Eagle31Network(PreTrainedModel):
    """The bare drafter network. Users meet it as `Eagle31Drafter`, which adds the target, files and generation.

    Args:
        config: what the weights are. Submodules exist only for what the config says the checkpoint holds: no
            `embed_tokens` unless `own_embedding`, no `lm_head` unless `own_lm_head`.
    """

    config_class = Eagle31Config
    config: Eagle31Config
    base_model_prefix = ""
    _no_split_modules = ["Eagle31DecoderLayer"]  # noqa: RUF012
    _supports_sdpa = True

    def __init__(self, config: Eagle31Config):
        super().__init__(config)
        self._build(config)
        self.post_init()

    def _build(self, config: Eagle31Config) -> None:
        """Make the modules that the config asks for."""
        width, target_width, count = config.hidden_size, config.target_hidden_size, config.num_aux_hidden_states
        eps = config.rms_norm_eps
        own = config.own_embedding
        self.embed_tokens: nn.Embedding | None = nn.Embedding(config.vocab_size, width) if own else None
        self.fc = nn.Linear(count * target_width, width, bias=config.fc_bias)
        self.fc_norm = (
            nn.ModuleList(nn.RMSNorm(target_width, eps=eps) for _ in range(count))
            if config.aux_norm == "per_slot"
            else None
        )
        self.input_norm = nn.RMSNorm(count * target_width, eps=eps) if config.aux_norm == "concatenated" else None
        self.layers = nn.ModuleList(Eagle31DecoderLayer(config, i) for i in range(config.num_hidden_layers))
        with off_meta():
            self.rotary_emb: nn.Module = RotaryTables(config)
        self._build_draft_head(config)
        self.norm: nn.Module = nn.RMSNorm(width, eps=eps)  # last: quantisers leave the last module alone

    def _build_draft_head(self, config: Eagle31Config) -> None:
        if config.draft_vocab_size < config.vocab_size:
            self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.long))
        self.lm_head = (
            nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False) if config.own_lm_head else None
        )

    def fuse_aux(self, aux: Tensor) -> Tensor:
        """Target hidden states `(B, T, A*Ht)`, low layer first, to the drafter's width `(B, T, H)`."""
        if self.fc_norm is not None:
            slots = aux.chunk(len(self.fc_norm), dim=-1)
            aux = torch.cat([norm(slot) for norm, slot in zip(self.fc_norm, slots, strict=True)], dim=-1)
        elif self.input_norm is not None:
            aux = self.input_norm(aux)
        return self.fc(aux)

    def rotary(self, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and sine tables `(B, T, d)` for `position_ids` `(B, T)`."""
        return self.rotary_emb(self.norm.weight, position_ids)

    def decode(
        self,
        embeddings: Tensor,
        hidden: Tensor,
        rotary: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        cache: Cache | AttendingCache | None = None,
    ) -> DrafterOutput:
        """One pass over `embeddings` and `hidden`, both `(B, T, H)`; see the module docstring.

        Args:
            attention_mask: additive `(B, 1, T, S)`; `None` means causal when nothing is cached, and everything
                visible when `T` is 1.
        """
        for index, layer in enumerate(self.layers):
            hidden = layer(hidden, embeddings if index == 0 else None, rotary, attention_mask, cache)
        normed = self.norm(hidden)
        return DrafterOutput(normed=normed, feedback=normed if self.config.norm_output else hidden)

    def packable(self) -> dict[str, tuple[int, int]]:
        """Shapes `(N, K)` of the matrices that may be packed, by name."""
        return packable_shapes(self.config)

    def canonical_tensors(self) -> dict[str, Tensor]:
        """Parameters and `d2t` under their published names, fused matrices split into views (no copy).

        Of a network that is not packed: packed matrices have no published names.
        """
        tensors: dict[str, Tensor] = {}
        for name, tensor in self.state_dict().items():
            parts = self.published_names(name)
            rows = [tensor] if len(parts) == 1 else tensor.split(self._fused_rows(name), dim=0)
            tensors |= zip(parts, rows, strict=True)
        return tensors

    def load_canonical(self, tensors: dict[str, Tensor]) -> None:
        """Take over `tensors` (published names); fused matrices are stacked once.

        Raises:
            CheckpointFormatError: tensors are missing, spare or of another shape; nothing was loaded.
        """
        wanted = {name: tuple(tensor.shape) for name, tensor in self.canonical_tensors().items()}
        got = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        if wanted != got:
            raise CheckpointFormatError(
                f"tensors do not fit the configuration: missing {sorted(wanted.keys() - got.keys())}, spare "
                f"{sorted(got.keys() - wanted.keys())}, of another shape "
                f"{[f'{n}: got {got[n]}, wanted {wanted[n]}' for n in wanted if n in got and wanted[n] != got[n]]}"
            )
        state: dict[str, Tensor] = {}
        for name in self.state_dict():
            parts = [tensors[part] for part in self.published_names(name)]
            state[name] = parts[0] if len(parts) == 1 else torch.cat(parts, dim=0)
        self.load_state_dict(state, strict=True, assign=True)

    def _fused_rows(self, name: str) -> list[int]:
        config = self.config
        if "gate_up_proj" in name:
            return [config.intermediate_size] * 2
        heads = config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads
        return [count * config.head_dim for count in heads]

    @staticmethod
    def published_names(name: str) -> list[str]:
        """What files call the parts of one of our parameters: several, in order of their rows, where it is fused."""
        for fused, parts in FUSED_PROJECTIONS.items():
            if f".{fused}." in name:
                return [name.replace(fused, part) for part in parts]
        return [name]
