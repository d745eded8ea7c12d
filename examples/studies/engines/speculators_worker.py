"""speculators as a servant: loads a drafter, answers with its logits, saves it again. One JSON line in, one out.

Run by the Python of the engines' environment (`make engines`), which knows nothing of eagle31_hf:

    python speculators_worker.py FD SETTINGS      # FD: where answers go; SETTINGS: {"drafter": folder}
"""

import json
import os
import sys
import time
from importlib.metadata import version

os.environ["TORCHDYNAMO_DISABLE"] = "1"  # one forward pass: compiling it would take longer


def load(folder):
    from speculators import SpeculatorModel
    from speculators.models.eagle3 import Eagle3SpeculatorConfig

    config = Eagle3SpeculatorConfig.from_pretrained(folder)
    config.transformer_layer_config._attn_implementation = "eager"  # by default flex attention, made for training
    return SpeculatorModel.from_pretrained(folder, config=config).eval()


def logits_of(model, request):
    """Logits of every draft step, teacher-forced: `(T, Vd)` each, beside the request's file of inputs."""
    import torch
    from safetensors.torch import load_file, save_file

    inputs, found = load_file(request["inputs"]), []
    handle = model.lm_head.register_forward_hook(lambda _module, _inputs, logits: found.append(logits[0].clone()))
    ids = inputs["input_ids"][None]
    with torch.no_grad():
        model(inputs["aux"][None], ids, document_ids=torch.zeros_like(ids), ttt_steps=request["steps"])
    handle.remove()
    save_file({f"step{step}": logits for step, logits in enumerate(found)}, request["logits"])
    return {"class": type(model).__name__, "steps": len(found)}


def main():
    answers, settings = os.fdopen(int(sys.argv[1]), "w"), json.loads(sys.argv[2])
    started = time.perf_counter()
    model = load(settings["drafter"])
    versions = {name: version(name) for name in ("speculators", "torch", "transformers")}
    print(json.dumps({"versions": versions, "load_s": time.perf_counter() - started}), file=answers, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        answer = logits_of(model, request)
        model.save_pretrained(request["save"])
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
