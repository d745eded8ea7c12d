"""The drafter network: tokens, hidden states and a cache in; hidden states and draft logits out.

The formulas are those of EAGLE-3 (arXiv 2503.01840) with the two changes of EAGLE 3.1 (arXiv 2605.09992): a norm on
each aux state and post-norm feedback. One pass over position t reads the embedding of token x_{t+1} and a state g_t:

    g = fc(pre(aux))                 first pass after a target forward: A target hidden states, side by side
    g = feedback                     later draft steps: the drafter's own previous output
    z = [input_layernorm(embedding) ; hidden_norm(g)]                     (2H wide, embedding first)
    h = r + attention(z),  r = g or hidden_norm(g);   h = h + mlp(post_attention_layernorm(h))
    y = norm(h);  draft logits = lm_head(y);  feedback = h (EAGLE-3) or y (EAGLE 3.1)

Query, key and value are one matrix here (but for latent attention), gate and up another: a draft step is bound by the
number of operations. The split is restored wherever tensors leave this module (`canonical_tensors`). Attention reads
`x` `(B, T, width)`, twice as wide in the first layer, and sees the keys of a cache, which are rotated, and its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, PreTrainedModel
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, rotate_half

from ..cache.grouped_attention import WatchedCache, grouped_attention
from ..config import Eagle31Config
from .checks import check_tensors


def off_meta() -> AbstractContextManager[Any]:
    """Where rotary tables are made: they are computed and not stored, so a network made on meta has real ones."""
    return torch.device("cpu") if torch.get_default_device().type == "meta" else nullcontext()


def expected_shapes(config: Eagle31Config) -> dict[str, tuple[int, ...]]:
    """Published name to shape of every tensor a drafter of this configuration has, `d2t` included."""
    with torch.device("meta"):
        network = Eagle31Network(config)
    return {name: tuple(tensor.shape) for name, tensor in network.canonical_tensors().items()}


class FusedLinear(nn.Linear):
    """Published matrices that read the same rows, as one.

    Args:
        parts: their names and numbers of rows, from the top.
    """

    def __init__(self, inputs: int, parts: Mapping[str, int], bias: bool):
        super().__init__(inputs, sum(parts.values()), bias=bias)
        self.parts = dict(parts)


@dataclass(frozen=True)
class DrafterOutput:
    """One drafter pass. `normed` (B, T, H) goes to the LM head, `feedback` (B, T, H) into the next draft step."""

    normed: Tensor
    feedback: Tensor


class GroupedQueryAttention(nn.Module):
    """Query heads share key and value heads in groups; query, key and value are one matrix."""

    def __init__(self, config: Eagle31Config, layer_idx: int, input_size: int):
        super().__init__()
        self.layer_idx = layer_idx
        self.head_dim = config.head_dim
        self.num_heads, self.num_kv_heads = config.num_attention_heads, config.num_key_value_heads
        query, key = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        parts = {"q_proj": query, "k_proj": key, "v_proj": key}
        self.qkv_proj = FusedLinear(input_size, parts, bias=config.attention_bias)
        self.o_proj = nn.Linear(self.num_heads * self.head_dim, config.hidden_size, bias=config.attention_bias)
        self.q_norm = nn.RMSNorm(self.head_dim, eps=config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = nn.RMSNorm(self.head_dim, eps=config.rms_norm_eps) if config.qk_norm else None

    def forward(
        self, x: Tensor, rotary: tuple[Tensor, Tensor], attention_mask: Tensor | None, cache: Cache | None
    ) -> Tensor:
        batch, length, _ = x.shape
        qkv = self.qkv_proj(x).view(batch, length, -1, self.head_dim).transpose(1, 2)  # (B, n_q + 2 n_kv, T, d)
        heads, value = qkv.split((self.num_heads + self.num_kv_heads, self.num_kv_heads), dim=1)
        if self.q_norm is not None:
            query, key = heads.split((self.num_heads, self.num_kv_heads), dim=1)
            heads = torch.cat((self.q_norm(query), self.k_norm(key)), dim=1)
        heads = _rotate(heads, *rotary)
        query, key = heads.split((self.num_heads, self.num_kv_heads), dim=1)
        out = _attend(query, key, value, attention_mask, cache, self.layer_idx)
        return self.o_proj(out.transpose(1, 2).reshape(batch, length, -1))


class LatentAttention(nn.Module):
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434), up-projections absorbed as its section 2.1.2 says.

    One latent of `kv_lora_rank` elements stands for the keys and values of all heads, beside one rotated key of
    `qk_rope_head_dim`. Instead of making every head's keys of every latent, each query is taken to where latents are
    (`W_key`), and what was read there to the head's values (`W_value`): attention with one key head, which is the
    latent and the rotated key, and one value head, which is the latent. That is all the cache holds of a token.

    Only the matrices that read the input are twice as wide in the first layer. Names are the published ones.
    """

    def __init__(self, config: Eagle31Config, layer_idx: int, input_size: int):
        super().__init__()
        self.layer_idx = layer_idx
        self.num_heads = config.num_attention_heads
        self.rank, self.rotated = config.kv_lora_rank, config.qk_rope_head_dim
        self.plain, self.value_dim = config.qk_nope_head_dim, config.v_head_dim
        eps, query_rows = config.rms_norm_eps, self.num_heads * (self.plain + self.rotated)
        if config.q_lora_rank is None:
            self.q_proj = nn.Linear(input_size, query_rows, bias=False)
        else:
            self.q_a_proj = nn.Linear(input_size, config.q_lora_rank, bias=False)
            self.q_a_layernorm = nn.RMSNorm(config.q_lora_rank, eps=eps)
            self.q_b_proj = nn.Linear(config.q_lora_rank, query_rows, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(input_size, self.rank + self.rotated, bias=False)
        self.kv_a_layernorm = nn.RMSNorm(self.rank, eps=eps)
        self.kv_b_proj = nn.Linear(self.rank, self.num_heads * (self.plain + self.value_dim), bias=False)
        self.o_proj = nn.Linear(self.num_heads * self.value_dim, config.hidden_size, bias=False)
        # What attends divides by the root of the width it sees, which is not that of the heads the scores are of.
        seen, meant = self.rank + self.rotated, self.plain + self.rotated
        self.query_scale = math.sqrt(seen / meant) * _yarn_scale(config.rope_parameters or {}) ** 2

    def forward(
        self, x: Tensor, rotary: tuple[Tensor, Tensor], attention_mask: Tensor | None, cache: Cache | None
    ) -> Tensor:
        batch, length, _ = x.shape
        query = self._query(x).view(batch, length, self.num_heads, -1).transpose(1, 2)
        plain, rotated = query.split((self.plain, self.rotated), dim=-1)  # (B, n, T, plain), (B, n, T, rotated)
        latent, rotated_key = self.kv_a_proj_with_mqa(x)[:, None].split((self.rank, self.rotated), dim=-1)
        latent = self.kv_a_layernorm(latent)  # (B, 1, T, rank)
        rotated, rotated_key = (_rotate(_halves(part), *rotary) for part in (rotated, rotated_key))
        per_head = self.kv_b_proj.weight.view(self.num_heads, -1, self.rank)
        to_key, to_value = per_head.split((self.plain, self.value_dim), dim=1)  # (n, plain, rank), (n, values, rank)
        out = _attend(
            torch.cat((plain @ to_key, rotated), dim=-1) * self.query_scale,
            torch.cat((latent, rotated_key), dim=-1),
            latent,
            attention_mask,
            cache,
            self.layer_idx,
        )  # (B, n, T, rank)
        values = out @ to_value.transpose(1, 2)
        return self.o_proj(values.transpose(1, 2).reshape(batch, length, -1))

    def _query(self, x: Tensor) -> Tensor:
        if hasattr(self, "q_proj"):
            return self.q_proj(x)
        return self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))


def _yarn_scale(rope: Mapping[str, Any]) -> float:
    """DeepSeek's factor on scores under YaRN, `0.1 m ln(factor) + 1`; 1 where `mscale_all_dim` `m` is not stated."""
    weight, factor = rope.get("mscale_all_dim") or 0, rope.get("factor") or 1
    return 0.1 * weight * math.log(factor) + 1 if rope.get("rope_type") == "yarn" and factor > 1 else 1.0


def _attend(
    query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, cache: Cache | None, layer_idx: int
) -> Tensor:
    """Of `query` `(B, n, T, d)` over these keys and values `(B, n_kv, T, d)` and all cached before; `(B, n, T, d)`."""
    if cache is not None:
        key, value = cache.update(key, value, layer_idx)  # (B, n_kv, S, d)
    if isinstance(cache, WatchedCache):
        cache.see(query, key, attention_mask, layer_idx)
    return grouped_attention(query, key, value, attention_mask)


def _rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE on `(B, heads, T, d)` with tables `(B, T, d)`, all heads in one go."""
    return heads * cos[:, None] + rotate_half(heads) * sin[:, None]


def _halves(heads: Tensor) -> Tensor:
    """Pairs (0, 1), (2, 3), ... as DeepSeek rotates them, to the two halves that `_rotate` pairs.

    Queries and keys are reordered alike, which changes no score.
    """
    return heads.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)


class Eagle31MLP(nn.Module):
    """SwiGLU with gate and up in one matrix."""

    def __init__(self, config: Eagle31Config):
        super().__init__()
        parts = dict.fromkeys(("gate_proj", "up_proj"), config.intermediate_size)
        self.gate_up_proj = FusedLinear(config.hidden_size, parts, bias=config.mlp_bias)
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
        cache: Cache | None,
    ) -> Tensor:
        if embeddings is not None:
            normed = self.hidden_norm(hidden)
            attended = torch.cat((self.input_layernorm(embeddings), normed), dim=-1)  # (B, T, 2H)
            residual = normed if self.norm_before_residual else hidden
        else:
            attended, residual = self.input_layernorm(hidden), hidden
        hidden = residual + self.self_attn(attended, rotary, attention_mask, cache)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class KeepsBufferDtypes(nn.Module):
    """Mixed in before a module class: `.to(dtype)` moves its buffers but leaves their dtypes alone."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        before = dict(self._buffers)
        super()._apply(fn, recurse)
        for name, buffer in before.items():
            moved = self._buffers[name]
            if buffer is not None and moved is not None and moved.dtype != buffer.dtype:
                self._buffers[name] = buffer.to(moved.device)
        return self


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
        if config.has_reduced_vocabulary:
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
        cache: Cache | None = None,
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
        """Shapes `(N, K)` of the matrices that may be packed, by name: projections of the layers, and the draft head.

        `fc` reads the target's hidden states, where a few large entries would take all the precision, and is one
        matrix product per accepted token. Latent attention multiplies with parts of `kv_b_proj`'s weight itself, which
        packed numbers do not have. Experts are 3-D.
        """
        return {
            name: (module.out_features, module.in_features)
            for name, module in self.named_modules()
            if isinstance(module, nn.Linear) and ("_proj" in name or name == "lm_head") and "kv_b_proj" not in name
        }

    def canonical_tensors(self) -> dict[str, Tensor]:
        """Parameters and `d2t` under their published names, fused matrices split into views (no copy).

        Of a network that is not packed: packed matrices have no published names.
        """
        tensors: dict[str, Tensor] = {}
        for name, tensor in self.state_dict().items():
            parts = self._published_parts(name) or {name: len(tensor)}
            tensors |= zip(parts, tensor.split([*parts.values()]), strict=True)
        return tensors

    def load_canonical(self, tensors: dict[str, Tensor], *, assign: bool = True) -> None:
        """Take over `tensors` (published names); fused matrices are stacked once.

        Args:
            assign: put them in the place of the parameters; else they are copied into these.

        Raises:
            CheckpointFormatError: tensors are missing, spare or of another shape; nothing was loaded.
        """
        wanted = {name: tuple(tensor.shape) for name, tensor in self.canonical_tensors().items()}
        check_tensors(tensors, wanted)
        state: dict[str, Tensor] = {}
        for name in self.state_dict():
            parts = [tensors[part] for part in self._published_parts(name) or (name,)]
            state[name] = parts[0] if len(parts) == 1 else torch.cat(parts, dim=0)
        self.load_state_dict(state, strict=True, assign=assign)

    def _published_parts(self, name: str) -> dict[str, int]:
        """Published names and rows of what one of our tensors stacks; empty where it stacks nothing."""
        place, _, kind = name.rpartition(".")
        module, inside = self.get_submodule(place), place.rpartition(".")[0]
        parts = module.parts if isinstance(module, FusedLinear) else {}
        return {f"{inside}.{part}.{kind}": rows for part, rows in parts.items()}
