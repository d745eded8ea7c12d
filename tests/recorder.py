"""What a card does with captured steps, without the card."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from eagle31_hf.graphs.captured import Recording


class Recorder:
    """Counts what is recorded and replayed. A replay runs the step again on the very tensors it was recorded with, and
    puts the outputs where the recorded ones were."""

    def __init__(self) -> None:
        self.recorded = self.replayed = 0

    def __call__(self, run: Callable[[], Sequence[Tensor]]) -> Recording:
        self.recorded += 1
        run()
        outputs = list(run())

        def replay() -> None:
            self.replayed += 1
            for place, fresh in enumerate(run()):
                if 0 in outputs[place].stride():  # expanded: all its elements share memory
                    outputs[place] = fresh
                else:
                    outputs[place].copy_(fresh)

        return Recording(replay, outputs)


def record_operations(run: Callable[[], Sequence[Tensor]]) -> Recording:
    """As a card does: what was computed then is computed again, whatever the target would do now."""
    with torch.no_grad():
        recorded = make_fx(lambda: tuple(run()), pre_dispatch=False)()
        outputs = [output.clone() for output in recorded()]

    def replay() -> None:
        with torch.no_grad():
            for output, fresh in zip(outputs, recorded(), strict=True):
                output.copy_(fresh)

    return Recording(replay, outputs)
