"""`transformers serve` in this process: its server, asked by the `openai` client, whole and streamed."""

import time

import openai
from both_ways import TARGET, compare
from transformers.cli.serve import Serve

from eagle31_hf.demo import CONVERSATIONS

serving = Serve(force_model=TARGET, dtype="float32", port=0, non_blocking=True)
try:
    while not serving.server.started:
        time.sleep(0.05)
    port = serving.server.servers[0].sockets[0].getsockname()[1]
    client = openai.OpenAI(base_url=f"http://localhost:{port}/v1", api_key="none")

    def answers() -> list[str]:
        said = []
        for messages in CONVERSATIONS:
            asked = {"model": TARGET, "messages": messages, "temperature": 0, "max_tokens": 48}
            said.append(client.chat.completions.create(**asked).choices[0].message.content)
            pieces = client.chat.completions.create(**asked, stream=True)
            said.append("".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices))
        return said

    target, _ = serving._model_manager.load_model_and_processor(TARGET)  # the one it has loaded
    compare(target, answers)
finally:
    serving.kill_server()
