"""EAGLE 3.1 speculative decoding for Hugging Face transformers: the same text, in half precision up
to rounding, faster.

eagle = Eagle31Drafter.from_pretrained("...", target=model)
model.generate(**inputs, assistant_model=eagle)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .config import Eagle31Config as Eagle31Config
    from .drafter.assistant import NoDrafter as NoDrafter
    from .drafter.drafter import Eagle31Drafter as Eagle31Drafter
    from .errors import Eagle31Error as Eagle31Error
    from .generate.candidates import Eagle31CandidateGenerator as Eagle31CandidateGenerator
    from .memory import MemoryPlan as MemoryPlan
    from .memory import plan_memory as plan_memory
    from .settings import Eagle31GenerationConfig as Eagle31GenerationConfig
    from .stats import SpeculationStats as SpeculationStats

__version__ = "0.2.0"

_MODULES = {
    "Eagle31CandidateGenerator": "generate.candidates",
    "Eagle31Config": "config",
    "Eagle31Drafter": "drafter.drafter",
    "Eagle31Error": "errors",
    "Eagle31GenerationConfig": "settings",
    "MemoryPlan": "memory",
    "NoDrafter": "drafter.assistant",
    "SpeculationStats": "stats",
    "plan_memory": "memory",
}
__all__ = [*_MODULES]

_ASSISTANTS = ("Eagle31CandidateGenerator", "Eagle31Drafter", "NoDrafter")
"""With one of these `generate` and `pipeline` are taught to take assistants of ours, by name, too."""


def __getattr__(name: str) -> Any:
    """Public names are imported when first asked for: torch and transformers take seconds, `eagle31 --help` needs
    neither."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{_MODULES[name]}", __name__), name)
    if name in _ASSISTANTS:
        import_module(".generate.hooks", __name__).install()
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
