"""An agent against `eagle31 serve`: the model asks for a tool, the loop runs it and hands the result back.

    pip install ".[serve]" openai

The embedded model was never taught tools, so a call is required (a grammar sees to its form) and what it books makes
little sense. With a model that knows tools leave `tool_choice` out.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

from openai import OpenAI

BOOKING = {
    "type": "object",
    "properties": {"people": {"type": "integer", "minimum": 1, "maximum": 9}, "outside": {"type": "boolean"}},
    "required": ["people", "outside"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": "book_table", "parameters": BOOKING}}]
SERVE = [sys.executable, "-c", "from eagle31_hf.cli import main; main()", "serve", "--port", "0"]
SERVE += ["--chat-template", str(Path(__file__).with_name("tools.jinja"))]  # its own has no place for tools


def book_table(people: int, outside: bool) -> str:
    return f"A table for {people} {'outside' if outside else 'inside'} is booked for 7 pm."


def ask(client: OpenAI, messages: list, tool_choice: str):
    reply = client.chat.completions.create(
        model="eagle31-demo", messages=messages, tools=TOOLS, tool_choice=tool_choice, temperature=0, max_tokens=64
    )
    accepted = reply.usage.completion_tokens_details.accepted_prediction_tokens
    print(f"({reply.usage.completion_tokens} tokens, {accepted} of them drafted and accepted)")
    return reply.choices[0].message


server = subprocess.Popen(SERVE, stdout=subprocess.PIPE, text=True)
try:
    address = next(found[0] for line in server.stdout if (found := re.search(r"http://\S+", line)))
    client = OpenAI(base_url=address, api_key="none")
    messages = [{"role": "user", "content": "Please book a table for two, outside if you can."}]
    said = ask(client, messages, "required")
    messages.append(said)
    for call in said.tool_calls:
        result = book_table(**json.loads(call.function.arguments))
        print("tool:", call.function.name, call.function.arguments, "->", result)
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    print("assistant:", ask(client, messages, "none").content)
finally:
    server.terminate()
    server.wait()
