"""What `generate` takes as `assistant_model`: something that is attached to a target. With a network that drafts, it is
an `Eagle31Drafter`; without one, it is `NoDrafter`."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ..errors import ConfigurationError, NotAttachedError
from ..memory import MemoryPlan
from ..settings import Eagle31GenerationConfig
from ..stats import LastStats, SpeculationStats
from ..targets.binding import TargetBinding
from ..targets.self_test import probe_tree_verification

if TYPE_CHECKING:
    from typing_extensions import Self  # of typing from Python 3.11 on

DEFAULT_AT = "_eagle31_default"
"""Where a target keeps the assistant that drafts by default, so that it goes with it. A copy of the target has none."""


class NotCopiedDict(dict):
    """Stays behind when what holds it is copied or pickled: the twin has an empty one."""

    def __deepcopy__(self, memo: dict) -> Any:
        return type(self)()

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return type(self), ()


class Assistant(nn.Module):
    """A target's assistant: run-time settings, the target, and figures of the last call.

    Attributes:
        generation_config: run-time settings (`Eagle31GenerationConfig`): draft length, loop, graphs.
        stats: figures of the last `generate` call of this thread that it was the assistant of, of the last of all in a
            thread that made none; `None` before the first.
        binding: the target it is attached to; asking for it without one (`is_attached`) is an error.
        memory_plan: what it was loaded under, `None` if nothing was planned.
        device, dtype: where it computes, and in what precision.
    """

    generation_config: Eagle31GenerationConfig
    memory_plan: MemoryPlan | None
    device: torch.device
    dtype: torch.dtype

    def __init__(self, *network: Any):
        super().__init__(*network)
        self.generation_config = Eagle31GenerationConfig()
        self.memory_plan = None
        self._last_stats = LastStats()
        self._binding: TargetBinding | None = None

    def __getstate__(self) -> dict[str, Any]:
        """A copy is attached to nothing."""
        return {**vars(self), "_binding": None}

    def attach(self, target: PreTrainedModel) -> Assistant:
        """Bind to `target`. Returns `self`."""
        raise NotImplementedError

    def check_settings(self) -> None:
        """Raise a `ConfigurationError` naming settings that contradict each other, or that nothing would follow."""
        self.generation_config.check()

    def detach(self) -> None:
        """Let go of the target: hooks removed, nothing shared any more."""
        if self._binding is None:
            return
        default = vars(self._binding.model).get(DEFAULT_AT, {})
        if default.get("assistant") is self:
            default.clear()
        self._binding.close()
        self._binding = None

    def use_by_default(self: Self) -> Self:
        """From now on every `generate` of the target drafts, whoever calls it: a pipeline, an evaluation, a trainer.

        A call that names an assistant of its own, `assistant_model=None` included, or another way to draft (`use_mtp`,
        prompt lookup) does as it says. A call that cannot be drafted for is written plainly, with the reason in
        `stats`. `detach` undoes it.

        Raises:
            NotAttachedError: there is no target.
        """
        default = vars(self.binding.model).setdefault(DEFAULT_AT, NotCopiedDict())
        if default.get("assistant") not in (None, self):
            warnings.warn("this target had another default assistant, which no longer drafts for it", stacklevel=2)
        default["assistant"] = self
        return self

    def _hold(self, binding: TargetBinding) -> None:
        """Find out what this target can do, and let go of the one before."""
        probe_tree_verification(binding)
        self.detach()
        self._binding = binding

    @property
    def is_attached(self) -> bool:
        """Whether there is a target."""
        return self._binding is not None

    @property
    def binding(self) -> TargetBinding:
        """The attached target.

        Raises:
            NotAttachedError: there is none.
        """
        if self._binding is None:
            raise NotAttachedError(
                "this drafter is not attached to a target; call eagle.attach(target) or pass target= to from_pretrained"
            )
        return self._binding

    @property
    def stats(self) -> SpeculationStats | None:
        """What happened in this thread's last generation with it; `None` before the first one."""
        return self._last_stats.get()

    @stats.setter
    def stats(self, stats: SpeculationStats | None) -> None:
        self._last_stats.set(stats)


class NoDrafter(Assistant):
    """A target without a drafter, to be passed as `model.generate(..., assistant_model=NoDrafter(model))`.

    Our loop writes its text, which is plain `generate`'s, greedy or drawn (in half precision up to rounding). Drafts
    are looked up where the text repeats itself (prompt lookup), for one row and for batches; the target's forwards are
    graphs as `generation_config.acceleration` says. With `num_assistant_tokens_schedule="constant"` nothing is drafted.

    Args:
        target: any decoder-only transformers model with an LM head (a PEFT wrapper is looked through).

    Raises:
        IncompatibleTargetError: the target is of a kind that cannot be served.
    """

    def __init__(self, target: PreTrainedModel):
        super().__init__()
        self.attach(target)

    def attach(self, target: PreTrainedModel) -> NoDrafter:
        """Bind to `target`. Returns `self`.

        Raises:
            IncompatibleTargetError: what cannot be served, named. It stays as it was.
        """
        self._hold(TargetBinding(target, None))
        return self

    def check_settings(self) -> None:
        """Settings of a network that is not there are not silently left out."""
        super().check_settings()
        settings = self.generation_config
        given = {name: getattr(settings, name) for name in ("draft_tree_size", "draft_min_confidence", "draft_window")}
        given["draft_top_k"] = settings.draft_top_k if (settings.draft_top_k or 1) > 1 else None
        if settings.num_assistant_tokens_schedule == "pid":
            given["num_assistant_tokens_schedule"] = settings.num_assistant_tokens_schedule
        asked = [f"{name}={value!r}" for name, value in given.items() if value is not None]
        if asked:
            raise ConfigurationError(
                f"got {', '.join(asked)}, but there is no drafter: what the text repeats is drafted as chains, of up "
                "to num_assistant_tokens; leave it out, or attach a drafter"
            )

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self.binding.head_device

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        return self.binding.compute_dtype
