"""smolagents' `TransformersModel`, which agents ask: whole answers that end at stop strings, and streams."""

import torch
from both_ways import TARGET, compare
from smolagents import TransformersModel

from eagle31_hf.demo import CONVERSATIONS

model = TransformersModel(TARGET, torch_dtype=torch.float32, max_new_tokens=48)
chats = [
    [{"role": turn["role"], "content": [{"type": "text", "text": turn["content"]}]} for turn in messages]
    for messages in CONVERSATIONS
]


def answers() -> list[str]:
    said = []
    for messages in chats:
        said.append(model.generate(messages, stop_sequences=["?", "Observation:"]).content)
        said.append("".join(piece.content for piece in model.generate_stream(messages)))
    return said


compare(model.model, answers)
