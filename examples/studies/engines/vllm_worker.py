"""vLLM as a servant of `compare_with_peers.py`: one JSON line in, one JSON line out, the engine loaded once.

Run by the Python of the engines' environment (`make engines`), which knows nothing of eagle31_hf:

    python vllm_worker.py FD SETTINGS      # FD: where answers go; SETTINGS: JSON of the fields read below
"""

import importlib.util
import json
import os
import sys
import time
import types
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from unittest.mock import MagicMock

COUNTERS = {
    "vllm:spec_decode_num_drafts": "drafts",
    "vllm:spec_decode_num_draft_tokens": "draft_tokens",
    "vllm:spec_decode_num_accepted_tokens": "accepted_tokens",
    "vllm:spec_decode_num_accepted_tokens_per_pos": "accepted_at",
}


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
    """Speculation counters since the engine started."""
    found = {}
    for metric in llm.get_metrics():
        if metric.name in COUNTERS:
            found[COUNTERS[metric.name]] = getattr(metric, "values", None) or getattr(metric, "value", 0)
    return found


def difference(after, before):
    def less(late, early):
        return [a - b for a, b in zip(late, early, strict=True)] if isinstance(late, list) else late - early

    return {name: less(value, before[name]) for name, value in after.items()}


def write(llm, request):
    from vllm import SamplingParams

    prompts = [{"prompt_token_ids": ids} for ids in request["prompts"]]
    sampling = SamplingParams(temperature=0.0, max_tokens=request["new_tokens"], ignore_eos=True)
    before, started = counters(llm), time.perf_counter()
    outputs = llm.generate(prompts, sampling, use_tqdm=False)
    seconds = time.perf_counter() - started
    return {
        "texts": [list(output.outputs[0].token_ids) for output in outputs],
        "seconds": seconds,
        "counts": difference(counters(llm), before),
    }


def main():
    answers, settings = os.fdopen(int(sys.argv[1]), "w"), json.loads(sys.argv[2])
    import torch
    import transformers
    import vllm

    started = time.perf_counter()
    llm = load(settings)
    versions = {"vllm": vllm.__version__, "torch": torch.__version__, "transformers": transformers.__version__}
    print(json.dumps({"versions": versions, "load_s": time.perf_counter() - started}), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(write(llm, json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":  # the engine starts a process of its own from this file
    main()
