"""What a forward takes, counted by running it without memory.

The model `transformers` makes of a target's configuration runs on the meta device as the loop runs it: over our cache,
with its masks, and attending as we do; a drafter's network likewise (`drafter_facts`). Every storage is counted.
Nothing is known of families: what a layer of a new one takes is seen. What is alive at one step of a forward grows with
the slots of a row along a straight line, so two runs tell what any number of slots takes. Layers of a target that are
alike take the same, so the first two compute and the others are multiplied.

A `StorageCounter` sees storages as they come and go: what eager PyTorch allocates, to within half a percent of the CPU
allocator's own log. What it cannot see are workspaces inside kernels, among them those that unpack weights, and tensors
that no operation has made (a file mapped into memory).
"""

from __future__ import annotations

import hashlib
import json
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedConfig, PreTrainedModel

from ..cache.grouped_attention import attending_grouped, decoder_of
from ..cache.spans import kinds_from_config
from ..cache.speculative import SpeculativeCache
from ..cache.states import CONVOLUTION, StateLayer
from ..cache.torch_internals import TorchDispatchMode
from ..checkpoints.hub import target_class
from ..errors import IncompatibleTargetError, MemoryPlanError, first_line
from ..targets.binding import cache_argument
from ..targets.mixers import Mixers
from ..targets.self_test import FAILURES
from .weights import Quantization

_MADE_OUTSIDE = (torch.ops.aten.lift_fresh.default,)
"""Operations whose input is new: `torch.tensor([...])` passes its storage through this one first."""


class StorageCounter(TorchDispatchMode):
    """Counts storages born while active: `live_bytes` now, `peak_bytes` at most since the last restart.

    What was there before, weights for instance, is not counted.

    Attributes:
        steps: `live_bytes` behind each storage that was born since the last restart.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live_bytes = self.peak_bytes = 0
        self.steps: list[int] = []
        self._known: set[int] = set()

    def restart_peak(self) -> None:
        self.peak_bytes, self.steps = self.live_bytes, []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # What goes in was there before, or was counted when it was made.
        taken = () if func in _MADE_OUTSIDE else _tensors_in((args, kwargs))
        old = {tensor.untyped_storage()._cdata for tensor in taken}
        out = func(*args, **(kwargs or {}))
        for tensor in _tensors_in(out):
            if tensor.untyped_storage()._cdata not in old:
                self._count(tensor.untyped_storage())
        return out

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, num_bytes = storage._cdata, storage.nbytes()
        if key in self._known:
            return
        self._known.add(key)
        self.live_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        self.steps.append(self.live_bytes)
        weakref.finalize(storage, self._release, key, num_bytes)

    def _release(self, key: int, num_bytes: int) -> None:
        self._known.discard(key)
        self.live_bytes -= num_bytes


def _tensors_in(value: Any) -> Iterator[Tensor]:
    """Of an operation's arguments or outputs."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple, dict)):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _tensors_in(part)


# --- a forward --------------------------------------------------------------------------------------------------------

READ_BEFORE = 2
"""Tokens read before a measured forward: they allocate what a cache holds already."""

LENGTHS_APART = 64
"""Slots between the two lengths that are counted."""


class FusedKernels(TorchFunctionMode):
    """SDPA takes what its fused kernels take; on the meta device it would make all scores. Experts are multiplied in
    any precision, where the meta device knows bf16 alone."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in ("grouped_mm", "_grouped_mm"):
            tokens, experts = args[:2]
            return tokens.new_empty(len(tokens), experts.shape[-1])
        if func is not F.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        query, _key, value = args[:3]
        batch, heads, tokens, _ = query.shape
        _sums = query.new_empty(batch, heads, tokens, dtype=torch.float32)
        return query.new_empty(batch, tokens, heads, value.shape[-1]).transpose(1, 2)


@contextmanager
def counting() -> Iterator[StorageCounter]:
    """While open, what forwards take is counted as eager code takes it on a device."""
    with torch.no_grad(), StorageCounter() as counter, FusedKernels():
        yield counter


@dataclass(frozen=True)
class Forward:
    """A forward over `tokens` of each row, where rows have `slots` with them.

    Attributes:
        block: most tokens between two commits.
        batch: rows. Several are of unlike length, so that each has a mask of its own.
        verifies: the tokens are drafts, all of whose logits are wanted.
        grows: keys and values move to larger buffers meanwhile.
    """

    tokens: int
    slots: int
    block: int
    batch: int = 1
    cache_type: str = "full"
    verifies: bool = False
    grows: bool = True

    @property
    def cache_sizes(self) -> dict[str, Any]:
        """Of our cache over which it runs."""
        sizes = {"batch_size": self.batch, "capacity": self.slots, "block": self.block, "cache_type": self.cache_type}
        return {**sizes, "slab": 1 if self.grows else None, "device": "meta"}


@dataclass(frozen=True)
class ForwardBytes:
    """Bytes of one forward over all rows, and of what it leaves; all layers together.

    Attributes:
        alive: at each step beside the others, logits included.
        cache: keys and values.
        largest_layer: of `cache`, its largest layer's.
        states: one set of recurrent and convolution states.
        recorded: what a chain of drafts leaves of states until it is known how much of it is kept.
        given: of `recorded` and of the states behind a single token, what captured steps hand on.
        rebuilding: what moving states on by that record takes for a moment.
        logits: of one token of each row.
    """

    alive: tuple[int, ...]
    cache: int
    largest_layer: int = 0
    states: int = 0
    recorded: int = 0
    given: int = 0
    rebuilding: int = 0
    logits: int = 0

    @property
    def activations(self) -> int:
        """Most that is alive at once."""
        return max(self.alive)


class CountedForwards:
    """Forwards that are run without memory, each once.

    Args:
        name: of what is run.
        windows: slots that each layer sees back; `None`: all.
        ways: to run a forward; the first that can is taken from then on.
    """

    def __init__(self, name: str, windows: Sequence[int | None], ways: Sequence[Callable[[Forward], ForwardBytes]]):
        self._computed: Sequence[int] = range(len(windows))  # for each layer, the one that computes what it would
        self.windows, self._name, self._ways = tuple(windows), name, list(ways)
        self._turns, self._count = threading.Lock(), lru_cache(maxsize=None)(self._run)

    def count(self, forward: Forward) -> ForwardBytes:
        """What a forward takes, by two of other lengths.

        Raises:
            MemoryPlanError: it does not run without memory.
        """
        tokens, slots = forward.tokens, forward.slots
        windows = [window for window in self.windows if window is not None]
        outgrown = [window for window in windows if window < slots]
        others = [window for window in windows if window >= slots]  # such layers are stored as full ones
        block = max(forward.block if outgrown else tokens, READ_BEFORE)  # elsewhere it changes nothing
        least = max([tokens, *(window + block for window in outgrown)]) + READ_BEFORE
        most = max(min(others, default=least + LENGTHS_APART), tokens)
        first, second = min(least, most), min(least + LENGTHS_APART, most)
        low, high = (self._count(replace(forward, slots=at, block=block)) for at in (first, second))
        if first == second:
            return low
        if len(low.alive) != len(high.alive):  # longer rows take more steps
            low, high = (replace(each, alive=(each.activations,)) for each in (low, high))

        def at_slots(shorter: int, longer: int) -> int:
            return shorter + (longer - shorter) * (slots - first) // (second - first)

        rest = {each.name: at_slots(getattr(low, each.name), getattr(high, each.name)) for each in fields(low)[1:]}
        return ForwardBytes(tuple(map(at_slots, low.alive, high.alive)), **rest)

    def _run(self, forward: Forward) -> ForwardBytes:
        failures: list[Exception] = []
        for way in self._ways:
            try:
                with self._turns:  # what is run is changed meanwhile: it attends and keeps states as in the loop
                    count = way(forward)
            except FAILURES as error:
                failures.append(error)
            else:
                self._ways = [way]
                return count
        raise MemoryPlanError(
            f"what {self._name} takes cannot be counted without running it ({first_line(failures[0])[:160]}); leave "
            "the plan out, generate works without one"
        ) from failures[0]

    def _over(
        self, cache: SpeculativeCache, forward: Forward, read: Callable[[int], Tensor], counter: StorageCounter
    ) -> ForwardBytes:
        """What a forward over `cache` takes, where `read` reads so many tokens; a few before it make all buffers."""
        before = forward.slots - forward.tokens
        if first := min(READ_BEFORE, before):
            cache.place(first)
            read(first)
            cache.commit(first)
            cache.make_room(before)
            cache.placement.set_lengths([before] + [before - 1] * (forward.batch - 1))
        counter.restart_peak()
        cache.place(forward.tokens, is_draft=forward.verifies)
        logits = read(forward.tokens)
        alive = tuple(live - cache.num_bytes for live in counter.steps)
        layers: list[Any] = [cache.layers[index] for index in self._computed]
        kept = [layer.num_bytes for layer in layers]
        with_states: list[StateLayer] = [layer for layer in layers if layer in cache.with_states]
        states = sum(map(_committed_bytes, with_states))
        is_chain = forward.verifies and forward.tokens > 1
        recorded = sum(layer.state_bytes for layer in with_states) - 2 * states if is_chain else 0
        windows = sum(_committed_bytes(layer, CONVOLUTION) for layer in with_states if layer.trace().recorded)
        counter.restart_peak()
        left = counter.live_bytes
        cache.commit(forward.tokens)
        rebuilding = counter.peak_bytes - left if is_chain and with_states else 0
        return ForwardBytes(
            alive=alive,
            cache=sum(kept),
            largest_layer=max(kept, default=0),
            states=states,
            recorded=recorded,
            given=states + (recorded - windows if is_chain else 0),
            rebuilding=rebuilding * len(with_states) // max(1, len({id(layer) for layer in with_states})),
            logits=logits[:, -1].nbytes,
        )


class DryRun(CountedForwards):
    """A target to be run without memory.

    Args:
        model: of the target's configuration, on the meta device.

    Raises:
        MemoryPlanError: it has layers that no draft can be verified on, so that it is decoded plainly.
    """

    def __init__(self, model: PreTrainedModel):
        self.model: Any = model
        self.text: Any = model.config.get_text_config(decoder=True)
        for each in (self.model.config, self.text):
            each.pad_token_id = None  # else some look for pads among ids that have no values
        try:
            kinds = kinds_from_config(self.text)
        except IncompatibleTargetError as error:
            raise MemoryPlanError(str(error)) from error
        mixers = Mixers(self.model)
        unrecorded = mixers.unrecorded
        mixers.let_go()
        if unrecorded:
            raise MemoryPlanError(f"{unrecorded}, so it is decoded plainly; plans are for drafts, leave the plan out")
        self.has_states = any(kind.num_states for kind in kinds.layers)
        ways = [partial(self._run_over_our_cache, masks_by_type=each) for each in (None, True, False)]
        super().__init__(type(model).__name__, [kind.window for kind in kinds.layers], ways)
        self._computed = _skip_layers_alike(self.model, self.text)

    @cached_property
    def fingerprint(self) -> str:
        """Identifies the target's shape: what a plan depends on besides how weights are packed."""
        shapes = [(name, *parameter.shape) for name, parameter in decoder_of(self.model).named_parameters()]
        fields = self.text.model_type, getattr(self.text, "tie_word_embeddings", None), shapes
        return hashlib.sha256(repr(fields).encode()).hexdigest()[:16]

    def _run_over_our_cache(self, forward: Forward, masks_by_type: bool | None) -> ForwardBytes:
        model = self.model
        argument = cache_argument(model)

        def read(tokens: int) -> Tensor:
            return model(
                torch.zeros(forward.batch, tokens, dtype=torch.long, device="meta"),
                attention_mask=cache.attention_mask(dtype=model.dtype),
                position_ids=cache.position_ids(),
                use_cache=True,
                logits_to_keep=0 if forward.verifies else forward.batch,
                **{argument: cache},
            ).logits

        with counting() as counter, attending_grouped(model), ExitStack() as after:
            after.callback(Mixers(model).let_go)  # it keeps states as in the loop
            cache = SpeculativeCache.from_config(self.text, masks_by_type=masks_by_type, **forward.cache_sizes)
            return self._over(cache, forward, read, counter)


def _committed_bytes(layer: StateLayer, kind: str | None = None) -> int:
    return sum(state.nbytes for key, state in layer.committed.items() if kind in (None, key[0]))


def _skip_layers_alike(model: Any, text: Any) -> Sequence[int]:
    """Of layers of one type, with parameters of the same names and shapes, only the first two compute: all take the
    same, and in the second all is alive that is in later ones. None is skipped where layers use what others have made.

    Returns:
        For each layer, the number of the one that computes what it would.
    """
    count = text.num_hidden_layers
    lists = (module for module in model.modules() if isinstance(module, nn.ModuleList))
    layers: Any = next((each for each in lists if len(each) == count), ())
    if getattr(text, "num_kv_shared_layers", None) or not layers:
        return range(count)
    types = getattr(text, "layer_types", None) or [None] * count
    seen: dict[Any, list[int]] = {}
    width: dict[Any, int] = {}  # of the tuple that layers of a kind return; 0: a tensor

    def note(kind: Any, output: Any) -> None:
        width[kind] = 0 if isinstance(output, Tensor) else len(output)

    def skip(kind: Any, hidden_states: Any, *_args: Any, **_others: Any) -> Any:
        return (hidden_states, *[None] * (width[kind] - 1)) if width[kind] else hidden_states

    computed = []
    for index, (layer, layer_type) in enumerate(zip(layers, types, strict=True)):
        kind = layer_type, tuple((name, parameter.shape) for name, parameter in layer.named_parameters())
        alike = seen.setdefault(kind, [])
        if len(alike) == 2:
            layer.forward = partial(skip, kind)
        else:
            alike.append(index)
            layer.register_forward_hook(lambda _layer, _args, output, kind=kind: note(kind, output))
        computed.append(alike[-1])
    return computed


def dry_run_of(config: PreTrainedConfig, packing: Quantization) -> DryRun:
    """That of a configuration, in the scheme's dtype; what it has counted is counted once. It attends by SDPA where it
    can, unless the configuration says `"eager"`.

    Raises:
        MemoryPlanError: transformers makes no model of it, or as of `DryRun`.
    """
    attention = getattr(config.get_text_config(decoder=True), "_attn_implementation", None)
    config_class: Any = type(config)
    # Unlike transformers' own text of the fields this one reads back as it was where one is infinite.
    fields_json = json.dumps(config.to_dict(), default=str)
    return _dry_run(config_class, fields_json, packing.torch_dtype, "eager" if attention == "eager" else None)


@lru_cache(maxsize=16)
def _dry_run(config_class: Any, fields_json: str, dtype: torch.dtype, attention: str | None) -> DryRun:
    # Its dtype would decide the model's, and shapes are those before packing.
    left_out = ("dtype", "torch_dtype", "quantization_config")
    config = config_class.from_dict({k: v for k, v in json.loads(fields_json).items() if k not in left_out})
    chosen = {} if attention is None else {"attn_implementation": attention}
    try:
        with torch.device("meta"):
            model = target_class(config).from_config(config, dtype=dtype, **chosen).eval()
    except Exception as error:  # sizes may be wrong in any way
        raise MemoryPlanError(
            f"transformers makes no causal language model of this {type(config).__name__} "
            f"(model_type={config.model_type!r}): {first_line(error)[:200]}; give the config of a "
            "decoder-only language model"
        ) from error
    return DryRun(model)
