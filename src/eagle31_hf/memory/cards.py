"""Cards people own: how much memory they have, how much of it a process may use, and what lets it use that."""

from __future__ import annotations

import difflib
import platform
import re
from collections.abc import Sequence
from dataclasses import dataclass

import psutil
import torch

from ..errors import MemoryPlanError

MIB, GIB = 2**20, 2**30
# Cards are sold by GB and have as many GiB: an RTX 3060 of 12 GB has 12,288 MiB.
_UNITS = {"b": 1, "kib": 2**10, "mib": MIB, "gib": GIB, "kb": 2**10, "mb": MIB, "gb": GIB}

# Before a CUDA context exists: context, kernels and cuBLAS workspace. Public reports lie between 300 and 800 MiB.
CUDA_CONTEXT_BYTES = 900 * MIB
METAL_CONTEXT_BYTES = 300 * MIB
# Windows drivers spill into system memory without an error, at a tenth of the speed: stay well clear.
_SPILL_MARGIN_BYTES = 3 * GIB // 2


@dataclass(frozen=True)
class Card:
    """One device.

    Attributes:
        name: as in `CARDS`, or as the driver calls it.
        kind: `"cuda"`, `"mps"` or `"cpu"`.
        total_bytes: memory of the device.
        usable_bytes: what a process may have of it, its own context included. For a measured card: what is free now,
            and what this process holds already.
        context_bytes: taken by the runtime itself before the first tensor (0 for a measured card: already taken).
        compute_capability: CUDA only, e.g. `(8, 6)`.
        measured: this machine's, read from its driver.
    """

    name: str
    kind: str
    total_bytes: int
    usable_bytes: int
    context_bytes: int = 0
    compute_capability: tuple[int, int] | None = None
    measured: bool = False

    @property
    def default_margin_bytes(self) -> int:
        """Left free unless told otherwise: 3 %, and 1.5 GiB where the driver spills instead of failing."""
        spills = self.measured and self.kind == "cuda" and driver_spills()
        return max(self.total_bytes * 3 // 100, _SPILL_MARGIN_BYTES if spills else 0)


def _cuda(name: str, total_mib: int, capability: tuple[int, int]) -> Card:
    total = total_mib * MIB
    return Card(name, "cuda", total, total, CUDA_CONTEXT_BYTES, capability)


def _apple(chip: str, gib: int) -> Card:
    total = gib * GIB
    share = 2 / 3 if gib <= 36 else 3 / 4  # of its memory Metal lends a process about so much
    return Card(f"Apple {chip} {gib}GB", "mps", total, int(total * share), METAL_CONTEXT_BYTES)


# MiB as the driver reports them (NVIDIA data sheets and public nvidia-smi listings; some differ by a few MiB between
# board makers). Compute capabilities: developer.nvidia.com/cuda-gpus.
CARDS: dict[str, Card] = {
    card.name: card
    for card in (
        _cuda("RTX 3060", 12288, (8, 6)),
        _cuda("RTX 3060 Ti", 8192, (8, 6)),
        _cuda("RTX 3070", 8192, (8, 6)),
        _cuda("RTX 3080", 10240, (8, 6)),
        _cuda("RTX 3080 12GB", 12288, (8, 6)),
        _cuda("RTX 3080 Ti", 12288, (8, 6)),
        _cuda("RTX 3090", 24576, (8, 6)),
        _cuda("RTX 3090 Ti", 24564, (8, 6)),
        _cuda("RTX 4060", 8188, (8, 9)),
        _cuda("RTX 4060 Ti 16GB", 16380, (8, 9)),
        _cuda("RTX 4070", 12282, (8, 9)),
        _cuda("RTX 4070 Ti Super", 16376, (8, 9)),
        _cuda("RTX 4080", 16376, (8, 9)),
        _cuda("RTX 4090", 24564, (8, 9)),
        _cuda("RTX 5060 Ti 16GB", 16311, (12, 0)),
        _cuda("RTX 5070", 12227, (12, 0)),
        _cuda("RTX 5070 Ti", 16303, (12, 0)),
        _cuda("RTX 5080", 16303, (12, 0)),
        _cuda("RTX 5090", 32607, (12, 0)),
        _cuda("RTX A6000", 49140, (8, 6)),
        _cuda("RTX 6000 Ada", 49140, (8, 9)),
        _cuda("RTX PRO 6000", 97887, (12, 0)),
        _cuda("L4", 23034, (8, 9)),
        _cuda("L40S", 46068, (8, 9)),
        _cuda("T4", 15360, (7, 5)),
        _cuda("A100 40GB", 40960, (8, 0)),
        _cuda("A100 80GB", 81920, (8, 0)),
        _cuda("H100", 81559, (9, 0)),
        _cuda("H200", 143771, (9, 0)),
        *(_apple(chip, gib) for chip in ("M1", "M2") for gib in (8, 16)),
        *(_apple(chip, gib) for chip in ("M3", "M4") for gib in (16, 24)),
        *(_apple(chip, gib) for chip in ("M1 Max", "M2 Max") for gib in (32, 64)),
        *(_apple(chip, gib) for chip in ("M3 Max", "M4 Max") for gib in (36, 48, 64, 128)),
        *(_apple(chip, gib) for chip in ("M1 Ultra", "M2 Ultra") for gib in (64, 128)),
        _apple("M2 Ultra", 192),
        *(_apple("M3 Ultra", gib) for gib in (96, 256, 512)),
    )
}


def one_card(cards: Sequence[str]) -> str | None:
    """The one of `cards` that a plan is for; `None` if none is named.

    Raises:
        MemoryPlanError: there are several; the message says what to do with them.
    """
    if len(cards) > 1:
        raise MemoryPlanError(
            f"got {len(cards)} cards ({', '.join(cards)}); a plan is for one. With several, plan for the smallest "
            "alone; or load without a plan and let transformers spread the target over all of them: --device-map auto"
        )
    return cards[0] if cards else None


def _several(card: str) -> list[str]:
    """`"2x RTX 4090"` and `"RTX 4090, RTX 3090"` are two."""
    if number := re.fullmatch(r"\s*(\d{1,2})\s*[x×*]\s*(\D.*)", card):
        return [number[2].strip()] * int(number[1])
    return [part.strip() for part in re.split(r",(?!\d)|[;+&]|\band\b", card) if part.strip()]


def find_card(card: str | int | Card | None) -> Card:
    """A card by name (`"RTX 4090"`), by size (`24_000_000_000`, `"24GiB"`), or this one (`None`, `"this machine"`).

    `"cpu"` is this machine's main memory. An Apple chip without its memory (`"M3 Ultra"`) is the smallest one sold:
    what fits there fits on all of them.

    Raises:
        MemoryPlanError: no such card (the known ones are listed), several, or a size that makes no sense.
    """
    if card is None or (isinstance(card, str) and _key(card) == "thismachine"):
        return measure_card()
    if isinstance(card, Card):
        return card
    if isinstance(card, str) and _key(card) == "cpu":
        return measure_card(torch.device("cpu"))
    if isinstance(card, int):
        return _card_of_size(card, f"{card / GIB:.1f} GiB card")
    size = re.fullmatch(r"\s*([\d.]+)\s*([kmg]?i?b)\s*", card, re.IGNORECASE)
    if size:
        return _card_of_size(int(float(size[1]) * _UNITS[size[2].lower()]), f"{card.strip()} card")
    by_key = {_key(name): entry for name, entry in CARDS.items()}
    if _key(card) in by_key:
        return by_key[_key(card)]
    sized = re.fullmatch(r"(.*\S)\s+(\d+)\s*gi?b", card.strip(), re.IGNORECASE)  # "RTX 3060 12GB", sold in one size
    if sized and (only := by_key.get(_key(sized[1]))) and round(only.total_bytes / GIB) == int(sized[2]):
        return only
    chips = [entry for key, entry in by_key.items() if entry.kind == "mps" and re.fullmatch(_key(card) + r"\d+gb", key)]
    if chips:
        return min(chips, key=lambda entry: entry.total_bytes)
    one_card(_several(card))
    near = [by_key[key].name for key in difflib.get_close_matches(_key(card), by_key, n=3, cutoff=0.55)]
    if card.strip().isdecimal():  # a size without its unit
        of_that_size = [each.name for each in CARDS.values() if round(each.total_bytes / GIB) == int(card)]
        near = [f"{card.strip()}GB", *of_that_size[:3]]
    names = f"did you mean {' or '.join(near)}?" if near else "names are RTX 4090, H100, M3 Max and the like."
    raise MemoryPlanError(f"got card {card!r}, which is not known; {names} Or give its memory, e.g. '24GiB'")


def _card_of_size(num_bytes: int, name: str) -> Card:
    if not 256 * MIB <= num_bytes <= 2**50:
        raise MemoryPlanError(
            f"got a card of {num_bytes:,} bytes; wanted 256 MiB to 1 PiB: sizes are bytes, or a string such as '24GiB'"
        )
    return Card(name, "cuda", num_bytes, num_bytes, CUDA_CONTEXT_BYTES)


def _key(name: str) -> str:
    """`"NVIDIA GeForce RTX 4090"`, `"rtx4090"` and `"4090"` are one card."""
    bare = re.sub(r"nvidia|geforce|apple|rtx|graphics|\bpcie\b|\bsxm\d?\b|hbm\w*", " ", name.lower())
    return re.sub(r"[^a-z0-9]", "", bare)


def measure_card(device: torch.device | None = None) -> Card:
    """The card `device` is on, or (`None`) this machine's, or its main memory where there is none.

    Creates the CUDA context, so as to count it.
    """
    kind = best_kind() if device is None else device.type
    if kind == "cuda":
        place = torch.device("cuda", torch.cuda.current_device()) if device is None or device.index is None else device
        torch.ones(8, 8, device=place).matmul(torch.ones(8, 8, device=place))  # cuBLAS brings its workspace
        free, total = torch.cuda.mem_get_info(place)
        properties = torch.cuda.get_device_properties(place)
        held = torch.cuda.memory_reserved(place)
        capability = (properties.major, properties.minor)
        return Card(properties.name, "cuda", total, free + held, 0, capability, measured=True)
    memory = psutil.virtual_memory()
    if kind == "mps":
        usable, name = torch.mps.recommended_max_memory(), f"Apple {platform.machine()}"
        return Card(name, "mps", memory.total, usable, METAL_CONTEXT_BYTES, measured=True)
    held = psutil.Process().memory_info().rss
    return Card(f"CPU ({platform.machine()})", "cpu", memory.total, memory.available + held, 0, measured=True)


def best_kind() -> str:
    """Kind of the card to take where nobody asks for one: `"cuda"`, `"mps"` or `"cpu"`."""
    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"


def driver_spills() -> bool:
    """Whether the driver moves to main memory, without an error and ten times slower, instead of running out."""
    return platform.system() == "Windows" or "microsoft" in platform.release().lower()
