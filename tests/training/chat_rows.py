"""A conversation of two turns to train on."""

from __future__ import annotations

from eagle31_hf.texts.conversations import Conversation

CHAT = [
    {"role": "user", "content": "Two apples cost 4 dollars. What do five cost?"},
    {"role": "assistant", "content": "One costs 2 dollars."},
    {"role": "user", "content": "And five?"},
    {"role": "assistant", "content": "10 dollars."},
]


def chat(**fields) -> Conversation:
    return Conversation("row-7", "sums", tuple(CHAT), **fields)
