"""What the scripts beside this one share: work done without and with a drafter, its results and the target's passes.

Each script takes a target and a drafter, `python pipeline_chat.py TARGET DRAFTER`, or uses the embedded pair.
"""

import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

from transformers import PreTrainedModel

from eagle31_hf import Eagle31Drafter
from eagle31_hf.demo import drafter_path, target_path

TARGET, DRAFTER = sys.argv[1:3] if len(sys.argv) > 2 else (str(target_path()), str(drafter_path()))


def count_passes(target: PreTrainedModel) -> Counter:
    """Counts the target's forwards within `generate`, whoever calls it, as `"passes"`."""
    counts, generate, first_layer = Counter(), target.generate, target.get_decoder().layers[0]

    def counted(*args: Any, **kwargs: Any) -> Any:
        hook = first_layer.register_forward_pre_hook(lambda *_: counts.update(passes=1))
        try:
            return generate(*args, **kwargs)
        finally:
            hook.remove()

    target.generate = counted
    return counts


def compare(target: PreTrainedModel, work: Callable[[], Any]) -> None:
    """Do it without and with the drafter; an error if results differ."""
    counts = count_passes(target)
    without, plain = work(), counts.pop("passes")
    eagle = Eagle31Drafter.from_pretrained(DRAFTER, target=target).use_by_default()
    eagle.generation_config.num_assistant_tokens_schedule = "constant"  # planned drafts, the default, go by the clock
    counts.clear()  # of what tries the pair out
    results = work()
    eagle.detach()
    print(f"results: {'the same' if results == without else 'OTHERS'}")
    print(f"target passes: {plain} without, {counts.total()} with the drafter")
    if results != without:
        sys.exit(f"without: {without}\nwith: {results}")
