"""speculators as a worker: loads a drafter (`{"drafter": folder}`), answers with its logits, saves it again.

Run by the Python of the engines' environment (`make engines`), which knows nothing of eagle31_hf.
"""

import os

os.environ["TORCHDYNAMO_DISABLE"] = "1"  # one forward pass: compiling it would take longer

import torch
from json_lines import answer_lines
from safetensors.torch import load_file, save_file


def load(settings):
    from speculators import SpeculatorModel
    from speculators.models.eagle3 import Eagle3SpeculatorConfig

    config = Eagle3SpeculatorConfig.from_pretrained(settings["drafter"])
    config.transformer_layer_config._attn_implementation = "eager"  # by default flex attention, made for training
    return SpeculatorModel.from_pretrained(settings["drafter"], config=config).eval()


@torch.no_grad()
def logits_of(model, request):
    """Logits of every draft step, teacher-forced: `(T, Vd)` each, beside the request's file of inputs."""
    inputs, found = load_file(request["inputs"]), []
    handle = model.lm_head.register_forward_hook(lambda _module, _inputs, logits: found.append(logits[0].clone()))
    ids = inputs["input_ids"][None]
    model(inputs["aux"][None], ids, document_ids=torch.zeros_like(ids), ttt_steps=request["steps"])
    handle.remove()
    save_file({f"step{step}": logits for step, logits in enumerate(found)}, request["logits"])
    model.save_pretrained(request["save"])
    return {"class": type(model).__name__, "steps": len(found)}


if __name__ == "__main__":
    answer_lines(load, logits_of, ("torch", "transformers"))
