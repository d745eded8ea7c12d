"""vLLM as a worker of `compare_with_peers.py`: the engine is loaded once.

Run by the Python of the engines' environment (`make engines`), which knows nothing of eagle31_hf.
"""

import importlib.util
import os
import sys
import time
import types
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from unittest.mock import MagicMock

from json_lines import answer_lines

COUNTERS = ("vllm:spec_decode_num_drafts", "vllm:spec_decode_num_accepted_tokens_per_pos")


class NoPictures(MetaPathFinder, Loader):
    """Stands in for torchvision, which the modules of targets that see import and which texts never call."""

    def find_spec(self, name, path=None, target=None):
        return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] == "torchvision" else None

    def create_module(self, spec):
        module = types.ModuleType(spec.name)
        module.__getattr__ = lambda name: MagicMock() if not name.startswith("__") else self._refuse(name)
        return module

    def exec_module(self, module):
        module.__version__ = "0"

    @staticmethod
    def _refuse(name):
        raise AttributeError(name)


if importlib.util.find_spec("torchvision") is None:  # in the engine's own process, too, which imports this file
    sys.meta_path.append(NoPictures())


def load(settings):
    from vllm import LLM

    speculative = None
    if settings["drafter"] is not None:
        is_own_head = os.path.realpath(settings["drafter"]) == os.path.realpath(settings["target"])
        speculative = {"method": "mtp"} if is_own_head else {"method": "eagle3", "model": settings["drafter"]}
        speculative["num_speculative_tokens"] = settings["draft_tokens"]
    return LLM(
        model=settings["target"],
        dtype=settings["dtype"],
        max_model_len=settings["max_model_len"],
        max_num_seqs=1,
        enforce_eager=not settings["compiled"],
        enable_prefix_caching=False,  # the same prompts come again in every turn
        disable_log_stats=False,
        speculative_config=speculative,
    )


def counters(llm):
    """Rounds with drafts since the engine started, and the drafts accepted at each position."""
    found = {metric.name: metric for metric in llm.get_metrics() if metric.name in COUNTERS}
    rounds, accepted = map(found.get, COUNTERS)
    return (rounds.value, accepted.values) if found else (0, [])


def write(llm, request):
    from vllm import SamplingParams

    prompts = [{"prompt_token_ids": ids} for ids in request["prompts"]]
    sampling = SamplingParams(temperature=0.0, max_tokens=request["new_tokens"], ignore_eos=True)
    (rounds, accepted), started = counters(llm), time.perf_counter()
    outputs = llm.generate(prompts, sampling, use_tqdm=False)
    seconds = time.perf_counter() - started
    rounds_after, accepted_after = counters(llm)
    accepted_at = [after - before for after, before in zip(accepted_after, accepted, strict=True)]
    return {
        "texts": [list(output.outputs[0].token_ids) for output in outputs],
        "seconds": seconds,
        "drafted_at": [rounds_after - rounds] * len(accepted_at),
        "accepted_at": accepted_at,
    }


if __name__ == "__main__":  # the engine starts a process of its own from this file
    answer_lines(load, write, ("vllm", "torch", "transformers"))
