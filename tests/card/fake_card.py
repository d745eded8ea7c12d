"""A card that is not there: fake tensors on "cuda", and what a real one would be asked to do, counted.

Fake tensors have shapes, strides and devices but no elements, so an 8B at 32k slots takes no memory. Where the host
asks for elements, it waits for a card: that is counted, and answered with something plausible. torch must be a build
for CUDA; no driver is needed.
"""

from __future__ import annotations

import math
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from eagle31_hf.graphs.captured import Recording
from eagle31_hf.memory.dry_run import StorageCounter

CARD = torch.device("cuda", 0)
MULTIPROCESSORS = 128
"""Of an RTX 4090."""

ONE_MODE = FakeTensorMode()
"""Of this process: the package keeps small tensors between calls, and those of two modes do not mix."""

NO_KERNEL = frozenset([
    "_reshape_alias", "_unsafe_view", "alias", "as_strided", "detach", "device", "empty", "empty_like", "empty_strided",
    "expand", "is_pinned", "lift_fresh", "new_empty", "new_empty_strided", "permute", "select", "slice", "split",
    "split_with_sizes", "squeeze", "t", "transpose", "unbind", "unfold", "unsqueeze", "view",
])  # fmt: skip
"""Operations that only look at a tensor otherwise, or reserve memory."""
GATHERS = frozenset({"index_select", "index", "gather"})
"""Operations that read as much as they give."""
FILLS = frozenset({"new_zeros", "new_full", "zeros_like", "full_like", "ones_like"})
"""Operations that take a tensor's form and read none of it."""
FLASH = torch.ops.aten._scaled_dot_product_flash_attention
EFFICIENT = torch.ops.aten._scaled_dot_product_efficient_attention


@dataclass
class Work:
    """What a card and its host did.

    Attributes:
        launches: kernels that the host starts, one for each operation that computes or copies.
        replayed: kernels of each graph that was replayed.
        recorded: kernels of each graph that was recorded.
        waits: how often the host asked for elements.
        blocking_copies: between host and card, without `non_blocking`.
        read: bytes of keys and values that attention and copies read; what is expanded counts once.
        copied: bytes of keys and values written anywhere but into their cache.
        stored: bytes of new keys and values written into the cache.
        names: what the host starts, by operation.
        where: code that waits or copies between host and card.
    """

    launches: int = 0
    replayed: list[int] = field(default_factory=list)
    recorded: list[int] = field(default_factory=list)
    waits: int = 0
    blocking_copies: int = 0
    read: int = 0
    copied: int = 0
    stored: int = 0
    names: Counter[str] = field(default_factory=Counter)
    where: list[str] = field(default_factory=list)


def distinct_bytes(tensor: Tensor) -> int:
    """Of the elements that a kernel reads from memory; expanded dimensions repeat them."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return math.prod(size for size, stride in sizes if stride) * tensor.element_size()


def storage_of(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


class Counting(TorchDispatchMode):
    """Counts operations on the card into `work`."""

    def __init__(self) -> None:
        super().__init__()
        self.work = Work()
        self.kept: dict[int, Tensor] = {}  # keys and values, and copies of them, by storage; alive, so ids stay theirs
        self.caches: frozenset[int] = frozenset()
        self.pool_bytes = 0  # most that a recorded step needs between its kernels, its outputs left out

    def follow(self, buffers: Sequence[Tensor]) -> None:
        """Count what is read and written of these keys and values from now on."""
        self.kept = {storage_of(buffer): buffer for buffer in buffers}
        self.caches = frozenset(self.kept)
        self.work = Work()

    def capture(self, run: Callable[[], Sequence[Tensor]]) -> Recording:
        """In the place of recording a CUDA graph: a replay runs the step again, and its launches are the graph's."""
        run()
        with StorageCounter() as counter:
            outputs = list(self._as_graph(run, self.work.recorded))
        self.pool_bytes = max(self.pool_bytes, counter.peak_bytes - counter.live_bytes)
        return Recording(lambda: self._as_graph(run, self.work.replayed) and None, outputs)

    def _as_graph(self, run: Callable[[], Sequence[Tensor]], graphs: list[int]) -> Sequence[Tensor]:
        work, launches, names = self.work, self.work.launches, self.work.names.copy()
        outputs = run()
        graphs.append(work.launches - launches)
        work.launches, work.names = launches, names
        return outputs

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs, name = kwargs or {}, func.overloadpacket.__name__
        result = func(*args, **kwargs)
        if name in NO_KERNEL:
            return result
        read = [each for each in tree_iter((args, kwargs)) if isinstance(each, Tensor)]
        made = [each for each in tree_iter(result) if isinstance(each, Tensor)]
        if not any(each.device.type == "cuda" for each in (*read, *made)):
            return result
        self.work.launches += 1
        self.work.names[name] += 1
        if self._blocks(name, args, kwargs, read, made):
            self.work.blocking_copies += 1
            self.work.where.append(f"{name} in {_caller()}")
        self._count_states(name, read, made)
        return result

    def _blocks(self, name: str, args: tuple, kwargs: dict, read: list[Tensor], made: list[Tensor]) -> bool:
        """Whether something crosses between host and card and the host waits for it."""
        if kwargs.get("non_blocking") or (name == "copy_" and True in args[2:]):
            return False
        devices = {each.device.type for each in (*read, *made) if each.dim() or name in ("copy_", "_to_copy")}
        return len(devices) > 1

    def _count_states(self, name: str, read: list[Tensor], made: list[Tensor]) -> None:
        states = [each for each in read if storage_of(each) in self.kept]
        if not states:
            return
        changed = next((storage_of(each) for each in made if storage_of(each) in self.kept), None)
        if changed is not None:
            sources = [each for each in read if storage_of(each) != changed]
            moved = max(map(distinct_bytes, sources), default=0)
            self.work.read += moved if any(storage_of(each) in self.kept for each in sources) else 0
            if changed in self.caches:
                self.work.stored += moved
            else:
                self.work.copied += moved
            return
        if name not in FILLS:
            self.work.read += sum(map(distinct_bytes, made if name in GATHERS else states))
        if "attention" not in name and name not in ("bmm", "mm"):
            for each in made:
                self.work.copied += distinct_bytes(each) if name not in FILLS else 0
                self.kept[storage_of(each)] = each


class Host(TorchFunctionMode):
    """Answers what the host asks of a card, and sends attention to the kernels a card has.

    Args:
        counting: where waits are counted.
        answer: elements for a tensor whose list is asked for.
    """

    def __init__(self, counting: Counting, answer: Callable[[Tensor], Any]):
        super().__init__()
        self.counting, self.answer = counting, answer

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if func is F.scaled_dot_product_attention:
            return _attend(*args, **kwargs)
        if name == "data_ptr":
            return storage_of(args[0])
        if name in ("item", "__bool__", "__int__", "__float__", "__index__"):
            return _first(self.listed(args[0]))
        return func(*args, **kwargs)

    def listed(self, tensor: Tensor) -> Any:
        """In the place of `tensor.tolist()`, which asks for one element after the other of fake tensors."""
        if tensor.is_cuda:
            self.counting.work.waits += 1
            self.counting.work.where.append(f"wait in {_caller()}")
        return self.answer(tensor)


def _caller() -> str:
    """The innermost line of the package on the stack."""
    frames = [frame for frame in traceback.extract_stack() if "/eagle31_hf/" in frame.filename]
    return f"{frames[-1].filename.rpartition('eagle31_hf/')[2]}: {frames[-1].line}" if frames else ""


def _first(found: Any) -> Any:
    return _first(found[0]) if isinstance(found, list) else found


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """SDPA as a card with flash attention dispatches it in 16 bits: a mask needs as many key heads as query heads."""
    if attn_mask is None:
        return FLASH(query, key, value, dropout_p, is_causal, scale=scale)[0]
    if query.shape[1] != key.shape[1]:  # the math path copies
        groups = query.shape[1] // key.shape[1]
        key, value = (each.repeat_interleave(groups, 1) for each in (key, value))
    if attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(~attn_mask, float("-inf"))
    if any(stride % 16 for stride in attn_mask.stride()[:-1]):  # SDPA pads such rows
        slots = attn_mask.shape[-1]
        attn_mask = F.pad(attn_mask, (0, -slots % 16))[..., :slots]
    attn_mask = attn_mask.expand(*query.shape[:3], key.shape[2])
    return EFFICIENT(query, key, value, attn_mask, False, dropout_p, is_causal, scale=scale)[0]


@contextmanager
def fake_card(answer: Callable[[Tensor], Any]) -> Iterator[Counting]:
    """Tensors that are made meanwhile are fake; those on "cuda" are counted."""
    facts = SimpleNamespace(multi_processor_count=MULTIPROCESSORS, major=8, minor=9, total_memory=24 << 30)
    with ExitStack() as stack:
        stack.enter_context(ONE_MODE)
        known = {
            "get_device_properties": facts,
            "get_device_capability": (8, 9),
            "get_rng_state": torch.empty(16, dtype=torch.uint8),  # is the host's
            "set_rng_state": None,
        }
        for name, value in known.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, lambda *_, value=value: value))
        counting = stack.enter_context(Counting())
        host = stack.enter_context(Host(counting, answer))
        stack.enter_context(mock.patch.object(FakeTensor, "tolist", lambda tensor: host.listed(tensor)))
        stack.enter_context(torch.no_grad())
        yield counting
