"""Targets of any shape with random weights, and rounds whose drafts are accepted by lot.

What a loop costs depends on shapes and on how many drafts are accepted, not on what the weights say. So its cost can
be measured at sizes whose weights are not at hand: the loop runs every forward it would run, only which drafts count
as accepted is drawn with given probabilities. The text means nothing.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    LogitsProcessorList,
    PreTrainedConfig,
    PreTrainedModel,
)

from ..decoding.decoder import SpeculativeDecoder
from ..decoding.request import DecodingRequest
from ..decoding.round import Accepted, Round, RoundBatch, RoundWrapper
from ..decoding.text import Sequences, StopRules
from ..drafter.drafter import Eagle31Drafter
from ..errors import ConfigurationError, first_line
from ..memory.known_targets import known_targets
from ..sampling.acceptance import Acceptance
from ..sampling.logits_processing import ScoreProcessing
from ..stats import SpeculationStats
from ..target.binding import TargetOutput
from ..trees.draft_tree import DraftTree, ancestors_from_parents
from ..trees.shape import DraftShape

SIZE_NAMES = ("hidden", "layers", "heads", "kv", "intermediate", "vocab")


# --- accepting by lot -------------------------------------------------------------------------------------------------


class SyntheticRound(RoundWrapper):
    """A round whose drafts are accepted by lot. All forwards, and the acceptance rule itself, still run.

    The walk goes down the path to the deepest node and takes its `i`-th node, all before it taken, with probability
    `acceptance[i]`; deeper nodes than there are probabilities get the last one. A drafter with random weights is sure
    of nothing, so its dynamic trees are broad and shallow; their nodes are hung up anew so that one path is as long as
    the draft is deep, which changes no cost.

    Args:
        inner: the round.
        acceptance: probability per position, each 0 to 1.
        seed: of the lot.
    """

    def __init__(self, inner: Round, acceptance: Sequence[float], seed: int):
        super().__init__(inner)
        device = inner.caches.target.device
        self._acceptance = torch.tensor(acceptance, device=device)
        self._lot = torch.Generator(device).manual_seed(seed)

    def draft(self, batch: RoundBatch) -> DraftTree:
        tree = super().draft(batch)
        is_dynamic = batch.plan is not None and batch.plan.shape.is_tree
        return _deepened(tree) if is_dynamic and not tree.is_chain else tree

    def accept(self, tree: DraftTree, verified: TargetOutput, batch: RoundBatch) -> Accepted:
        """Drawn, instead of what the rule says; the bonus, and what a graph went on with, stay the rule's."""
        accepted = super().accept(tree, verified, batch)
        return accepted._replace(acceptance=self._drawn(tree, accepted.acceptance.bonus), for_host=None)

    def _drawn(self, tree: DraftTree, bonus: Tensor) -> Acceptance:
        rows, depth = len(tree.tokens), tree.max_depth
        drawn = torch.rand(rows, depth, generator=self._lot, device=self._acceptance.device)
        positions = torch.arange(depth, device=drawn.device).clamp(max=len(self._acceptance) - 1)
        taken = (drawn < self._acceptance[positions]).to(bonus.device).cumprod(1).sum(1)  # (B,) nodes below the root
        path, nodes = tree.path_to(tree.positions.argmax(1))
        length = torch.minimum(taken + 1, nodes)
        return Acceptance(path=path, length=length, bonus=bonus, best=path.gather(1, length[:, None] - 1).squeeze(1))


def synthetic_decoder(
    drafter: Eagle31Drafter, request: DecodingRequest, *, acceptance: Sequence[float], seed: int
) -> SpeculativeDecoder:
    """Our loop with acceptance drawn by lot: see `SyntheticRound`. Nothing in the request may end a row early."""
    return SpeculativeDecoder(drafter, request, lambda made: SyntheticRound(made, acceptance, seed))


def _deepened(tree: DraftTree) -> DraftTree:
    """The same nodes, the first `max_depth` drafts one below the other and the rest beside the first."""
    parents, ancestors = _comb(tree.size, tree.max_depth, tree.tokens.device)
    batch = tree.tokens.shape[0]
    return replace(
        tree,
        parents=parents.expand(batch, -1),
        ancestors=ancestors.expand(batch, -1, -1),
        depths=(ancestors.sum(2) - 1).expand(batch, -1),
        max_children=max(tree.max_children, tree.size - tree.max_depth),
        valid=None,
    )


@lru_cache(maxsize=64)
def _comb(size: int, depth: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Parents `(1, N)` and ancestors `(1, N, N)`."""
    parents = [max(node - 1, 0) if node <= depth else 0 for node in range(size)]
    parents_tensor = torch.tensor([parents], device=device)
    return parents_tensor, ancestors_from_parents(parents_tensor, depth)


@dataclass(frozen=True)
class SyntheticRequest:
    """What to write by lot: exactly `new_tokens` per row; `samples` draws tokens instead of taking arg-maxes.

    `acceptance` and `seed` are `SyntheticRound`'s, `prefill_chunk` is `DecodingRequest`'s.
    """

    new_tokens: int
    shape: DraftShape
    acceptance: tuple[float, ...]
    seed: int = 0
    samples: bool = False
    prefill_chunk: int | None = None

    def to_decoding(self, prompts: Mapping[str, Tensor]) -> DecodingRequest:
        """The request of our loop, with no end but the length."""
        ids, mask = prompts["input_ids"], prompts["attention_mask"]
        rules = StopRules(ids.shape[1] + self.new_tokens)
        padding = (ids.shape[1] - mask.sum(1)).tolist()
        return DecodingRequest(
            sequences=Sequences(ids, padding, rules, None),
            processing=ScoreProcessing(LogitsProcessorList()),
            shape=self.shape,
            do_sample=self.samples,
            prefill_chunk=self.prefill_chunk,
        )


def write_synthetic(
    drafter: Eagle31Drafter, prompts: Mapping[str, Tensor], request: SyntheticRequest
) -> tuple[Tensor, SpeculationStats]:
    """Meaningless new tokens `(B, n)` after the prompts, and the figures of the call."""
    decoding = request.to_decoding(prompts)
    with torch.no_grad(), drafter.binding.masked_attention():
        ids = synthetic_decoder(drafter, decoding, acceptance=request.acceptance, seed=request.seed).run()
    return ids[:, prompts["input_ids"].shape[1] :], decoding.stats


# --- random targets ---------------------------------------------------------------------------------------------------


def target_config(spec: str) -> PreTrainedConfig:
    """The configuration a word stands for.

    Args:
        spec: a known model ("llama-8b", "qwen3 32b"), the path of a `config.json` (or its folder), or sizes of a
            Llama ("hidden=4096,layers=32,heads=32,kv=8,intermediate=14336,vocab=128256"; hidden and layers suffice).

    Raises:
        ConfigurationError: it stands for nothing, or for several models.
    """
    if "=" in spec and not Path(spec).exists():
        return _config_of_sizes(spec)
    if spec.endswith(".json") or (spec and Path(spec).is_dir()):
        try:
            return AutoConfig.from_pretrained(spec, trust_remote_code=False, local_files_only=True)
        except (OSError, ValueError) as error:
            raise ConfigurationError(f"{spec!r} is no configuration transformers knows: {first_line(error)}") from error
    return _known_config(spec)


def _known_config(spec: str) -> PreTrainedConfig:
    known = known_targets()
    words = [word for word in re.split(r"[\s_-]+", spec.lower()) if word]
    fitting = [name for name in known if words and all(word in name.lower() for word in words)]
    if len(fitting) != 1:
        several = f"is any of {', '.join(fitting)}" if fitting else "names no known model"
        raise ConfigurationError(
            f"{spec!r} {several}; wanted one of {', '.join(known)}, a config.json, or sizes such as "
            "hidden=1024,layers=8"
        )
    return known[fitting[0]].config


def _config_of_sizes(spec: str) -> PreTrainedConfig:
    sizes: dict[str, int] = {}
    for part in spec.split(","):
        name, _, value = (piece.strip() for piece in part.partition("="))
        if name not in SIZE_NAMES or not value.isdecimal() or int(value) < 1:
            raise ConfigurationError(
                f"got {part!r} in the sizes {spec!r}; wanted a positive whole number for each of some of "
                f"{', '.join(SIZE_NAMES)}, e.g. hidden=1024,layers=8"
            )
        sizes[name] = int(value)
    if not {"hidden", "layers"} <= sizes.keys():
        raise ConfigurationError(f"the sizes {spec!r} lack hidden or layers; wanted both, e.g. hidden=1024,layers=8")
    hidden = sizes["hidden"]
    heads = sizes.get("heads", max(1, hidden // 128))
    kv_heads = sizes.get("kv", math.gcd(heads, max(1, heads // 4)))
    if hidden % heads or heads % kv_heads or (hidden // heads) % 2:
        raise ConfigurationError(
            f"the sizes {spec!r} make {heads} heads ({kv_heads} key/value) of hidden {hidden}; wanted heads that "
            "divide hidden into even widths, and kv that divides heads"
        )
    return LlamaConfig(
        hidden_size=hidden,
        num_hidden_layers=sizes["layers"],
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        intermediate_size=sizes.get("intermediate", 7 * hidden // 2),
        vocab_size=sizes.get("vocab", 32000),
        max_position_embeddings=131072,
        bos_token_id=None,
        eos_token_id=None,
        tie_word_embeddings=False,
    )


def random_target(
    config: PreTrainedConfig, *, dtype: torch.dtype, device: torch.device | str, four_bit: bool = False
) -> PreTrainedModel:
    """A causal LM with random weights, made where it shall live: no more memory than its weights is needed.

    Args:
        four_bit: all linear layers but the LM head as bitsandbytes NF4, quantised one by one.

    Raises:
        ConfigurationError: `four_bit` without bitsandbytes.
    """
    device = torch.device(device)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    head = model.get_output_embeddings()
    named = model.named_modules() if four_bit else ()
    linears = {name: each for name, each in named if type(each) is nn.Linear and each is not head}
    _materialise(model, device, leave=set(linears.values()))
    model.init_weights()  # rotary tables too
    spread = getattr(config.get_text_config(), "initializer_range", 0.02)
    for name, linear in linears.items():
        model.set_submodule(name, _quantised(linear, dtype, device, std=float(spread)))
    model.generation_config.eos_token_id = None
    return model.eval().requires_grad_(False)


def _materialise(model: nn.Module, device: torch.device, *, leave: set[nn.Linear]) -> None:
    """Meta tensors become empty ones on `device`, but for those of the modules to `leave`; what is tied stays tied."""
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        if module in leave:
            continue
        for name, parameter in list(module.named_parameters(recurse=False)):
            if id(parameter) not in made:
                made[id(parameter)] = nn.Parameter(torch.empty_like(parameter, device=device), requires_grad=False)
            setattr(module, name, made[id(parameter)])
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, torch.empty_like(buffer, device=device))


def _quantised(linear: nn.Linear, dtype: torch.dtype, device: torch.device, std: float) -> nn.Module:
    """A random NF4 layer of this one's shape."""
    try:
        import bitsandbytes as bnb
    except ImportError as error:
        raise ConfigurationError("4-bit targets need bitsandbytes; pip install bitsandbytes") from error
    packed = bnb.nn.Linear4bit(
        linear.in_features, linear.out_features, linear.bias is not None, compute_dtype=dtype, quant_type="nf4",
        device="meta",
    )  # fmt: skip
    weight = torch.empty(linear.weight.shape, dtype=dtype, device=device).normal_(std=std)
    unpacked: Any = bnb.nn.Params4bit(weight, requires_grad=False, quant_type="nf4")
    packed.weight = unpacked.to(device)  # this is when it is packed
    if linear.bias is not None:
        packed.bias = nn.Parameter(torch.zeros(linear.out_features, dtype=dtype, device=device), requires_grad=False)
    return packed
