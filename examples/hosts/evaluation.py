"""lm-eval's `hf` model: it writes answers to a task's questions with `generate`, and scores them.

One row at a time: lm-eval's stop rule keeps one state for all rows of a batch, so larger batches are written plainly.
"""

import torch
from both_ways import TARGET, compare
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from transformers import AutoModelForCausalLM, AutoTokenizer

from eagle31_hf.demo import CONVERSATIONS

tokenizer = AutoTokenizer.from_pretrained(TARGET)
target = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32)
model = HFLM(pretrained=target, tokenizer=tokenizer, batch_size=1)
prompts = [model.apply_chat_template(messages) for messages in CONVERSATIONS]


def evaluate() -> list:
    settings = [
        {"until": ["\n\n", "?"], "max_gen_toks": 48, "do_sample": False},
        {"until": ["\n\n"], "max_gen_toks": 48, "do_sample": True, "temperature": 0.8},
    ]
    torch.manual_seed(0)
    written = [Instance("generate_until", {}, (p, one), 0) for one in settings for p in prompts]
    scored = [Instance("loglikelihood", {}, (p, " It is sunny."), 0) for p in prompts]
    return [model.generate_until(written), model.loglikelihood(scored)]


compare(target, evaluate)
