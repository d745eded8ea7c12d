"""economize as a servant of `compare_with_peers.py`: one JSON line in, one JSON line out, the pair loaded once.

Run by the Python of the engines' environment (`make engines`), which knows nothing of eagle31_hf:

    python economize_worker.py FD SETTINGS      # FD: where answers go; SETTINGS: JSON of the fields read below

It captures graphs on CUDA alone, so that on a CPU it is eager, whatever the settings say.
"""

import json
import os
import sys
import time


def load(settings):
    import economize
    import torch
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(settings["target"], dtype=getattr(torch, settings["dtype"])).eval()
    base.generation_config.eos_token_id = None
    if settings["drafter"] is None:
        return base
    return economize.load(base, settings["drafter"])


def write(model, settings, request):
    import economize
    import torch

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
        [sum(cycle[which] > place for cycle in cycles) for place in range(settings["draft_tokens"])] for which in (0, 1)
    )
    counts = {"drafted_at": drafted, "accepted_at": accepted} if cycles else {}
    return {"texts": texts, "seconds": seconds, "counts": counts}


def main():
    answers, settings = os.fdopen(int(sys.argv[1]), "w"), json.loads(sys.argv[2])
    import economize
    import torch
    import transformers

    started = time.perf_counter()
    model = load(settings)
    versions = {
        "economize": economize.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    print(json.dumps({"versions": versions, "load_s": time.perf_counter() - started}), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(write(model, settings, json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main()
