"""Does it fit? The bytes of target, drafter, caches and activations, from configurations alone."""

from .plan import MemoryPlan
from .planner import plan_memory

__all__ = ["MemoryPlan", "plan_memory"]
