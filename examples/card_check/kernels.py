"""The card by itself: its ceilings, cuDNN's plans, and the products and kinds of attention of an 8B."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from eagle31_hf.compiled.cuda_capture import capture_on_cuda
from eagle31_hf.target.attention_in_parts import TRIED, try_on
from eagle31_hf.target.grouped_attention import grouped_attention

from .embedded import CHAIN, EmbeddedPair
from .machine import Machine, to_ms
from .notes import Notes

PACKAGES = (
    "torch", "transformers", "accelerate", "bitsandbytes", "triton", "numpy", "tokenizers", "safetensors", "pytest",
    "hypothesis", "torchao",
)  # fmt: skip


# --- the card ---------------------------------------------------------------------------------------------------------


def check_env(machine: Machine, notes: Notes) -> None:
    """Versions, the card, how fast it copies and multiplies, and what a launch costs."""
    notes.put("versions", {"python": sys.version.split()[0], **{name: version_of(name) for name in PACKAGES}})
    if machine.is_cuda:
        card = torch.cuda.get_device_properties(0)
        about = {"name": card.name, "sm": f"{card.major}.{card.minor}", "processors": card.multi_processor_count}
        about |= {"gib": round(card.total_memory / 2**30, 1), "l2_mib": getattr(card, "L2_cache_size", 0) >> 20}
        notes.put("card", about | {"cudnn": torch.backends.cudnn.version(), "cuda": torch.version.cuda})
        notes.attempt("driver", told_by_the_driver)
    notes.attempt("copies, TB/s", lambda: round(machine.copy_bytes_per_s() / 1e12, 3))
    notes.attempt("bf16 products, TFLOP/s", lambda: bf16_tflops(machine))
    machine.free()
    if machine.is_cuda:
        notes.attempt("launches", lambda: launch_costs(machine))


def version_of(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def told_by_the_driver() -> str:
    fields = "name,driver_version,clocks.sm,clocks.mem,power.limit,temperature.gpu"
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]
    return subprocess.run(command, capture_output=True, text=True, timeout=20).stdout.strip()


def bf16_tflops(machine: Machine) -> float:
    size = machine.size(8192, 64)
    left, right = (torch.randn(size, size, device=machine.device, dtype=torch.bfloat16) for _ in range(2))
    return round(2 * size**3 / (machine.median_ms(lambda: left @ right, 10) + 1e-9) / 1e9, 1)


def launch_costs(machine: Machine) -> dict[str, float]:
    """Microseconds of a small kernel that the host launches, and of one that a graph does."""
    small = torch.zeros(8, device="cuda")

    def many() -> list[Tensor]:
        for _ in range(1000):
            small.add_(1)
        return [small]

    many()
    machine.sync()
    started = time.perf_counter()
    many()
    host_s = time.perf_counter() - started
    machine.sync()
    replay = capture_on_cuda(many).replay
    return {
        "eager_us": round(machine.median_ms(many, 5), 2),  # ms of a thousand are us of one
        "of_the_host_us": round(1e3 * host_s, 2),
        "in_a_graph_us": round(machine.median_ms(replay, 5), 2),
        "tolist_us": round(1e3 * machine.median_ms(small.tolist, 50), 1),
    }


# --- cuDNN's plans ----------------------------------------------------------------------------------------------------


def check_cudnn(machine: Machine, notes: Notes) -> None:
    """What torch's own choice of kernel for masked attention costs where every round has keys of another length, and
    that eager rounds of ours do not pay it."""
    os.environ.pop("TORCH_CUDNN_SDPA_DEPRIORITIZED", None)  # as users have it; it is read at the first call
    heads, width = machine.size((32, 128), (2, 16))

    def first_calls() -> list[float]:
        query, times = torch.randn(1, heads, 8, width, device=machine.device, dtype=torch.bfloat16), []
        for length in (300, 301, 302, 303, 304, 304, 304):
            key = torch.randn(1, heads, length, width, device=machine.device, dtype=torch.bfloat16)
            mask = torch.zeros(1, 1, 8, length, device=machine.device, dtype=torch.bfloat16)
            times.append(
                machine.seconds(lambda k=key, m=mask: F.scaled_dot_product_attention(query, k, k, attn_mask=m))
            )
        return [to_ms(seconds) for seconds in times]

    def eager_rounds() -> dict[str, float]:
        pair, new = EmbeddedPair(machine, torch.bfloat16), machine.size(24, 4)
        fields = {"acceleration": "eager", **CHAIN}
        seconds = machine.seconds(lambda: pair.write(pair.prompts(1), fields, max_new_tokens=new))
        assert pair.drafter.stats is not None
        return {"s": round(seconds, 2), "rounds": pair.drafter.stats.rounds}

    notes.attempt("ms at 300 to 304 keys, then again, by torch's choice", first_calls)
    notes.attempt("eager rounds", eager_rounds)
    if machine.is_cuda:
        torch.backends.cuda.enable_cudnn_sdp(False)
        notes.attempt("ms at 300 to 304 keys, then again, without cuDNN", first_calls)


# --- attention --------------------------------------------------------------------------------------------------------


class AttentionCase:
    """One layer's attention over a past, several times over: more than a card's cache holds.

    Args:
        slots, queries: keys and queries `S`, `T`.
    """

    def __init__(self, machine: Machine, slots: int, queries: int):
        self.heads, self.kv_heads, self.width = machine.size((32, 8, 128), (4, 2, 16))
        self.repeats, self.queries, self.slots = self.heads // self.kv_heads, queries, slots
        kind: dict[str, Any] = {"device": machine.device, "dtype": torch.bfloat16}
        copies = max(2, min(16, 2**28 // (slots * self.kv_heads * self.width * 4) + 1))
        self.past = [torch.randn(2, 1, self.kv_heads, slots, self.width, **kind) for _ in range(copies)]
        self.query = torch.randn(1, self.heads, queries, self.width, **kind)
        self.mask = torch.zeros(1, 1, queries, slots, **kind)
        self.folded_query = self.query.view(1, self.kv_heads, self.repeats * queries, self.width)
        self.folded_mask = self.mask.repeat(1, 1, self.repeats, 1)

    @property
    def least_us(self) -> float:
        """To read keys and values once, at 3 TB/s."""
        return round(self.past[0].nbytes / 3e6, 2)

    def packaged(self, keys: Tensor, values: Tensor) -> Tensor:
        return grouped_attention(self.query, keys, values, self.mask)

    def repeated(self, keys: Tensor, values: Tensor) -> Tensor:
        shape = (1, self.kv_heads, self.repeats, self.slots, self.width)
        keys, values = (each[:, :, None].expand(shape).flatten(1, 2) for each in (keys, values))
        return F.scaled_dot_product_attention(self.query, keys, values, attn_mask=self.mask)

    def grouped(self, keys: Tensor, values: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(self.query, keys, values, attn_mask=self.mask, enable_gqa=True)

    def folded(self, keys: Tensor, values: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(self.folded_query, keys, values, attn_mask=self.folded_mask)

    def two_products(self, keys: Tensor, values: Tensor) -> Tensor:
        scores = torch.matmul(self.folded_query, keys.transpose(2, 3)) * self.width**-0.5 + self.folded_mask
        return torch.matmul(scores.softmax(-1, dtype=torch.float32).to(values.dtype), values)

    def lower_right(self, keys: Tensor, values: Tensor) -> Tensor:
        causal = causal_lower_right(self.queries, self.slots)
        return F.scaled_dot_product_attention(self.query, keys, values, attn_mask=causal, enable_gqa=True)

    def unmasked(self, keys: Tensor, values: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(self.query, keys, values, enable_gqa=True)

    def ways(self) -> dict[str, tuple[Callable[[Tensor, Tensor], Tensor], str]]:
        """By name: how to attend, and the backend of SDPA, if it is SDPA."""
        return {
            "the package's": (self.packaged, ""),
            "repeated, efficient": (self.repeated, "EFFICIENT_ATTENTION"),
            "repeated, cuDNN": (self.repeated, "CUDNN_ATTENTION"),
            "grouped, cuDNN": (self.grouped, "CUDNN_ATTENTION"),
            "grouped, efficient": (self.grouped, "EFFICIENT_ATTENTION"),
            "folded, efficient": (self.folded, "EFFICIENT_ATTENTION"),
            "two products": (self.two_products, ""),
            "lower right, flash": (self.lower_right, "FLASH_ATTENTION"),
            "no mask, flash": (self.unmasked, "FLASH_ATTENTION"),
        }


def check_attention(machine: Machine, notes: Notes) -> None:
    """Microseconds of one layer's attention of an 8B, by everything that could serve it; a kernel that does not take a
    case is told by its error."""
    table: dict[str, Any] = {}
    device = torch.empty(0, device=machine.device).device  # with its number
    try_on(device)
    notes.put("keys are shared out among multiprocessors", TRIED.get(device, False))
    for slots in machine.size((512, 2048, 8192, 32768), (64,)):
        for queries in machine.size((1, 4, 8, 16), (4,)):
            case = AttentionCase(machine, slots, queries)
            row: dict[str, Any] = {"least": case.least_us}
            for name, (way, backend) in case.ways().items():
                calls = [lambda past=past, way=way: way(*past) for past in case.past]
                row[name] = timed_or_refused(machine, calls, backend)
            table[f"{slots} slots, {queries} queries"] = row
            notes.put("us", table)


def timed_or_refused(machine: Machine, calls: Sequence[Callable[[], Any]], backend: str = "") -> float | str:
    """Microseconds of a call, or the error by which it is refused; on a CPU every error is raised."""
    chosen: AbstractContextManager[Any] = nullcontext()
    if backend and machine.is_cuda:
        chosen = sdpa_kernel(getattr(SDPBackend, backend))
    try:
        with chosen:
            return machine.kernel_us(calls)
    except Exception as error:
        if not machine.is_cuda:
            raise
        machine.free()
        return type(error).__name__


# --- products ---------------------------------------------------------------------------------------------------------

BYTES = {"bf16": 2.0, "nf4": 0.5625, "int4": 0.53125}
"""Of one weight, scales included."""


def check_linears(machine: Machine, notes: Notes) -> None:
    """Products of an 8B over few rows, by bf16, bitsandbytes' nf4 and torch's int4; GB/s of weights as they lie."""
    sizes = {"q, k, v": (6144, 4096), "o": (4096, 4096), "gate and up": (28672, 4096), "down": (4096, 14336)}
    sizes |= {"k or v": (1024, 4096), "head of 32k": (32000, 4096)}
    table: dict[str, Any] = {}
    for name, (rows, columns) in machine.size(sizes, {"tiny": (128, 128)}).items():
        copies = max(2, min(24, 2**28 // (rows * columns) + 1))
        kind: dict[str, Any] = {"device": machine.device, "dtype": torch.bfloat16}
        dense = [torch.randn(rows, columns, **kind) * 0.02 for _ in range(copies)]
        kinds = {"bf16": [lambda x, weight=weight: F.linear(x, weight) for weight in dense]}
        for packing, pack in {"nf4": nf4_products, "int4": int4_products}.items():
            try:
                kinds[packing] = pack(dense)
            except (ImportError, AttributeError, NotImplementedError, RuntimeError) as error:
                notes.put(packing, f"left out: {type(error).__name__}: {str(error)[:120]}")
        for width in machine.size((1, 2, 4, 5, 6, 7, 8, 9, 12, 16, 32), (1, 8)):
            x, row = torch.randn(width, columns, **kind), {}
            for packing, products in kinds.items():
                calls = [lambda x=x, product=product: product(x) for product in products]
                row[f"{packing} us"] = us = timed_or_refused(machine, calls)
                if isinstance(us, float) and us:
                    row[f"{packing} GB/s"] = round(BYTES[packing] * rows * columns / us / 1e3)
            table[f"{name} {rows}x{columns}, width {width}"] = row
        notes.put("products", table)
        machine.free()


Products = list[Callable[[Tensor], Tensor]]


def nf4_products(dense: Sequence[Tensor]) -> Products:
    from bitsandbytes import functional as bnb

    packed = [bnb.quantize_4bit(weight, blocksize=64, quant_type="nf4") for weight in dense]
    multiply = torch.ops.bitsandbytes.gemm_4bit.default
    return [
        lambda x, weight=weight, state=state: multiply(x, weight.view(-1, 1), dense[0].shape, state.absmax, 64, "nf4")
        for weight, state in packed
    ]


def int4_products(dense: Sequence[Tensor]) -> Products:
    if not dense[0].is_cuda:
        raise NotImplementedError("of CUDA devices")
    rows, columns = dense[0].shape
    raw = torch.randint(0, 255, (rows, columns // 2), dtype=torch.uint8, device="cuda")
    scales = torch.ones(columns // 128, rows, 2, device="cuda", dtype=torch.bfloat16)
    packed = [torch._convert_weight_to_int4pack(raw, 8) for _ in dense]
    return [lambda x, weight=weight: torch._weight_int4pack_mm(x, weight, 128, scales) for weight in packed]
