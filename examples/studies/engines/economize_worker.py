"""economize as a worker of `compare_with_peers.py`: the pair is loaded once.

Run by the Python of the engines' environment (`make engines`), which knows nothing of eagle31_hf. It captures graphs on
CUDA alone, so that on a CPU it is eager, whatever the settings say.
"""

import time

import economize
import torch
from json_lines import answer_lines
from transformers import AutoModelForCausalLM


def load(settings):
    base = AutoModelForCausalLM.from_pretrained(settings["target"], dtype=getattr(torch, settings["dtype"])).eval()
    base.generation_config.eos_token_id = None
    drafter = settings["drafter"]
    return base if drafter is None else economize.load(base, drafter), settings


def write(loaded, request):
    model, settings = loaded
    texts, cycles = [], []  # of a cycle: drafted, accepted
    decoding = economize.DecodeConfig(
        cycle_length=settings["draft_tokens"] + 1, cuda_graphs=settings["compiled"] and torch.cuda.is_available()
    )
    started = time.perf_counter()
    for prompt in request["prompts"]:
        ids = torch.tensor(prompt)
        if settings["drafter"] is None:
            out = model.generate(ids[None], max_new_tokens=request["new_tokens"], do_sample=False)
            texts.append(out[0, len(prompt) :].tolist())
        else:
            result = model.decode(ids, request["new_tokens"], decoding=decoding)
            texts.append(result.tokens.tolist())
            cycles += list(result.acceptance)
    seconds = time.perf_counter() - started
    drafted, accepted = (
        [sum(cycle[which] > place for cycle in cycles) for place in range(settings["draft_tokens"] * bool(cycles))]
        for which in (0, 1)
    )
    return {"texts": texts, "seconds": seconds, "drafted_at": drafted, "accepted_at": accepted}


if __name__ == "__main__":
    answer_lines(load, write, ("economize", "torch", "transformers"))
