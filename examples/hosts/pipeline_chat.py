"""A text-generation pipeline: batches of chats, greedy and drawn."""

import torch
from both_ways import TARGET, compare
from transformers import pipeline

from eagle31_hf.demo import CONVERSATIONS

chat = pipeline("text-generation", model=TARGET, dtype=torch.float32)
chat.tokenizer.padding_side = "left"


def answers() -> list[str]:
    torch.manual_seed(0)
    said = []
    for sampling in ({"do_sample": False}, {"do_sample": True, "temperature": 0.8}):
        for (answer,) in chat(list(CONVERSATIONS), batch_size=3, max_new_tokens=48, **sampling):
            said.append(answer["generated_text"][-1]["content"])
    return said


compare(chat.model, answers)
