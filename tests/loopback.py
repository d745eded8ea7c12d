"""A server on loopback around the embedded pair in float32, and the `openai` client to ask it with."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import httpx2
import openai
import pytest
import torch

from eagle31_hf import Eagle31Drafter
from eagle31_hf.serving.app import HttpServer, make_app
from eagle31_hf.serving.batch import EngineSettings
from eagle31_hf.serving.engine import Engine
from eagle31_hf.texts.chats import encode_chat

MODEL = "demo"
SIZES = EngineSettings(max_rows=4, context=512, max_waiting=32, prefill_chunk=32)
HTTP = httpx2.Client(timeout=60)
"""For requests by hand: making a client takes longer than most answers."""

QUESTION = "What is the weather going to be like in Portland this weekend?"
MESSAGES = [{"role": "user", "content": QUESTION}]

TOOL_TEMPLATE = (
    "{{ bos_token }}{% if tools %}<|system|>Tools: {{ tools | tojson }} Answer <tool_call>{...}</tool_call>.<|end|>"
    "{% endif %}{% for message in messages %}<|{{ 'user' if message['role'] == 'tool' else message['role'] }}|>"
    "{{ message['content'] | trim }}{% for call in message['tool_calls'] or [] %}<tool_call>"
    "{{ call['function'] | tojson }}</tool_call>{% endfor %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


class LoadedPair(NamedTuple):
    target: Any
    drafter: Eagle31Drafter
    tokenizer: Any

    def text(self, prompt: list[int], **settings: Any) -> str:
        """What `generate` of the target alone writes after token ids, greedily."""
        ids = torch.tensor([prompt])
        settings = {"max_new_tokens": 512 - len(prompt), **settings}
        out = self.target.generate(ids, do_sample=False, tokenizer=self.tokenizer, **settings)[0, len(prompt) :]
        return self.tokenizer.decode(out, skip_special_tokens=True)

    def answer(self, content: str, **settings: Any) -> str:
        """The same to a user's message."""
        return self.text(encode_chat(self.tokenizer, [{"role": "user", "content": content}]), **settings)


class Served(NamedTuple):
    engine: Engine
    url: str
    server: HttpServer

    def client(self, key: str = "none", **more: Any) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=60, **more)


@contextmanager
def serving(
    pair: LoadedPair, sizes: EngineSettings = SIZES, *, stopping: Mapping[str, Any] = {"grace_s": 10.0}, **settings: Any
) -> Iterator[Served]:
    """A server of its own, stopped at the end."""
    engine = Engine(pair.drafter, pair.tokenizer, sizes)
    server = HttpServer(make_app(engine, model=MODEL, **settings), engine, port=0, **stopping)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive(), "the server did not start"
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield Served(engine, f"http://127.0.0.1:{port}", server)
    finally:
        server.should_exit = True
        thread.join(timeout=30)
        assert not thread.is_alive()


def chat(client: openai.OpenAI, messages: Any = MESSAGES, **settings: Any) -> Any:
    """What the server answers, greedily."""
    return client.chat.completions.create(model=MODEL, messages=messages, temperature=0, **settings)


def error_of(client: openai.OpenAI, status: int, **settings: Any) -> Any:
    """What it tells of an error with this status."""
    with pytest.raises(openai.APIStatusError) as caught:
        client.chat.completions.create(**{"model": MODEL, "messages": MESSAGES, "temperature": 0, **settings})
    assert caught.value.status_code == status
    assert caught.value.body["message"]
    return caught.value.body
