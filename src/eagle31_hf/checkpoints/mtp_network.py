"""The network of a multi-token-prediction (MTP) head, as DeepSeek-V3 (arXiv 2412.19437, section 2.2) has it.

One pass over position t reads the embedding of token x_{t+1} and a state g_t of width H:

    g = h_t                          first pass: the target's state behind its final norm
    g = feedback                     later draft steps: the head's own previous output
    x = fc([enorm(embedding) ; hnorm(g)])                          (2H wide, embedding first in most families)
    y = layers(x);  z = norm(y);  draft logits = the target's LM head(z);  feedback = z (most families) or y

Layers, norms and rotary tables are of the target's own classes, built from its configuration: no model file is copied.
Which family names its tensors how is in `checkpoints.mtp`; which state is read and fed back, in `MtpConfig`.
"""

from __future__ import annotations

import copy
import inspect
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModel, Cache

from ..cache.grouped_attention import GROUPED
from ..cache.stock import CACHE_ARGUMENT
from ..config import MtpConfig
from .eagle_network import DrafterOutput, Eagle31Network, KeepsBufferDtypes, off_meta


class MtpNetwork(Eagle31Network):
    """The bare head.

    Its modules are made on the meta device, and `load_canonical` puts tensors in their place: names are those of
    `fc`, `enorm`, `hnorm`, `norm` and of the layers as transformers calls them.
    """

    config_class = MtpConfig
    config: MtpConfig  # type: ignore[assignment]

    def _build(self, config: MtpConfig) -> None:  # type: ignore[override]
        block = config.layers_config()
        with torch.device("meta"):
            decoder = AutoModel.from_config(block)
        if decoder._supports_sdpa:  # sinks, which MiMo's has, it does not know
            block._attn_implementation_internal = GROUPED  # keys and values are not copied for every query head
        self.embed_tokens = None
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=config.fc_bias, device="meta")
        self.enorm, self.hnorm = (copy.deepcopy(_final_norm(decoder)) for _ in range(2))
        self.layers = decoder.layers
        self.rotary_emb = _rotary_like(decoder, block)
        self._build_draft_head(config)
        self.norm = _final_norm(decoder)
        by_type = "layer_type" in inspect.signature(self.rotary_emb.forward).parameters
        self._rotary_kwargs = {"layer_type": block.layer_types[0]} if by_type else {}

    def fuse_aux(self, aux: Tensor) -> Tensor:
        """The target's state `(B, T, H)` as it is: `decode` norms it as it norms what is fed back."""
        return aux

    def rotary(self, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and sine tables `(B, T, d)` of the tokens behind `position_ids` `(B, T)`, which are read."""
        behind = position_ids + 1
        if hasattr(self.rotary_emb, "mrope_section"):  # of text the axes of pictures are all alike
            behind = behind.expand(3, -1, -1)
        return self.rotary_emb(self.norm.weight, behind, **self._rotary_kwargs)

    def decode(
        self,
        embeddings: Tensor,
        hidden: Tensor,
        rotary: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        cache: Cache | None = None,
    ) -> DrafterOutput:
        """One pass over `embeddings` and `hidden`, both `(B, T, H)`; arguments as `Eagle31Network.decode`'s."""
        hidden = self.fc(torch.cat((self.enorm(embeddings), self.hnorm(hidden)), dim=-1))
        caching: dict[str, Any] = {CACHE_ARGUMENT: cache, "use_cache": cache is not None}
        for layer in self.layers:
            output = layer(hidden, attention_mask=attention_mask, position_embeddings=rotary, **caching)
            hidden = output if isinstance(output, Tensor) else output[0]
        normed = self.norm(hidden)
        return DrafterOutput(normed=normed, feedback=normed if self.config.norm_output else hidden)


class NoRotation(nn.Module):
    """In the place of rotary tables for layers that know no positions (Nemotron-H)."""

    rope_type = "default"

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Empty tables `(B, T, 0)`."""
        table = x.new_empty((*position_ids.shape, 0))
        return table, table


def _rotary_like(decoder: nn.Module, block: Any) -> nn.Module:
    """The decoder's kind of rotary tables, whose frequencies stay fp32 when the head changes its dtype."""
    stock = type(getattr(decoder, "rotary_emb", None))
    if stock is type(None):
        return NoRotation()
    kind = type(stock.__name__, (KeepsBufferDtypes, stock), {})
    with off_meta():
        return kind(block)


def _final_norm(decoder: nn.Module) -> nn.Module:
    """The decoder's last own module with a norm's name: `norm`, or `norm_f`."""
    return [module for name, module in decoder.named_children() if "norm" in name][-1]
