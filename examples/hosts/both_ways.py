"""What the scripts beside this one share: work done without and with a drafter, its results and the target's passes.

Each script takes a target and a drafter, `python pipeline_chat.py TARGET DRAFTER`, or uses the embedded pair.
"""

import sys
from collections.abc import Callable
from typing import Any

from transformers import PreTrainedModel

from eagle31_hf import Eagle31Drafter
from eagle31_hf.demo import drafter_path, target_path

TARGET, DRAFTER = sys.argv[1:3] if len(sys.argv) > 2 else (str(target_path()), str(drafter_path()))


class Passes:
    """Counts the target's forwards within `generate`, whoever calls it."""

    def __init__(self, target: PreTrainedModel):
        self.count, self._writes, self._generate = 0, False, target.generate
        target.generate = self._counted
        target.get_decoder().layers[0].register_forward_pre_hook(self._note)

    def _counted(self, *args: Any, **kwargs: Any) -> Any:
        self._writes = True
        try:
            return self._generate(*args, **kwargs)
        finally:
            self._writes = False

    def _note(self, *_: Any) -> None:
        self.count += self._writes


def compare(target: PreTrainedModel, work: Callable[[], Any]) -> None:
    """Do it without and with the drafter; an error if results differ."""
    passes = Passes(target)
    without, plain = work(), passes.count
    eagle = Eagle31Drafter.from_pretrained(DRAFTER, target=target).use_by_default()
    eagle.generation_config.num_assistant_tokens_schedule = "constant"  # planned drafts, the default, go by the clock
    passes.count = 0  # of what tries the pair out
    results = work()
    eagle.detach()
    print(f"results: {'the same' if results == without else 'OTHERS'}")
    print(f"target passes: {plain} without, {passes.count} with the drafter")
    if results != without:
        sys.exit(f"without: {without}\nwith: {results}")
