"""An agent's loop over the `openai` client: calls, their results, more calls, an answer.

The embedded model was never taught tools. Each call is required, and what it can be called with comes from the result
of the one before, so that the grammar makes every step the right one: as agents do whose next step needs an id.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from transformers import AutoTokenizer

from eagle31_hf.demo import target_path
from loopback import MODEL, TOOL_TEMPLATE, serving

FORMS = {
    "Hermes JSON": TOOL_TEMPLATE,
    "Qwen XML": TOOL_TEMPLATE.replace("{...}", "<function=f><parameter=x>"),
    "JSON alone": TOOL_TEMPLATE.replace("<tool_call>", "").replace("</tool_call>", ""),
}
TASK = [{"role": "user", "content": "Please book a table for two outside, pay for it, and tell me the receipt."}]
ASKED = {"model": MODEL, "temperature": 0, "max_tokens": 120}


class Restaurant:
    """What can be called; each result names what the next call needs."""

    def __init__(self):
        self.calls: list[str] = []

    def run(self, name: str, arguments: str) -> dict[str, str]:
        self.calls.append(name)
        return getattr(self, name)(**json.loads(arguments))

    def find_table(self, people: int, outside: bool) -> dict[str, str]:
        assert (people, outside) == (2, True)
        return {"table": 'no. 7 "terrace"'}

    def book(self, table: str) -> dict[str, str]:
        assert table == 'no. 7 "terrace"'
        return {"booking": "b-31"}

    def pay(self, booking: str, share: float | None) -> dict[str, str]:
        assert (booking, share) == ("b-31", None)
        return {"receipt": "R<9>"}


def tool(name: str, **values: Any) -> Any:
    """Of a function whose arguments can only be these."""
    parameters = {
        "type": "object",
        "properties": {key: {"enum": [value]} for key, value in values.items()},
        "required": list(values),
        "additionalProperties": False,
    }
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


STEPS = [
    lambda known: {"tools": [tool("find_table", people=2, outside=True)], "tool_choice": "required"},
    lambda known: {
        "tools": [tool("book", table=known["table"]), tool("pay", booking="none", share=None)],
        "tool_choice": {"type": "function", "function": {"name": "book"}},
    },
    lambda known: {"tools": [tool("pay", booking=known["booking"], share=None)], "tool_choice": "required"},
    lambda known: {
        "tools": [tool("pay", booking=known["booking"], share=None)],
        "tool_choice": "none",
        "extra_body": {"structured_outputs": {"choice": [f"Your receipt is {known['receipt']}."]}},
    },
]


def whole(client, **asked):
    return client.chat.completions.create(**asked)


def streamed(client, **asked):
    """Put together by the client's own helper."""
    with client.chat.completions.stream(**asked, stream_options={"include_usage": True}) as stream:
        for _ in stream:
            pass
        return stream.get_final_completion()


@pytest.fixture(scope="module", params=list(FORMS))
def served_form(pair, request):
    pytest.importorskip("llguidance")
    tokenizer = AutoTokenizer.from_pretrained(target_path())
    tokenizer.chat_template = FORMS[request.param]
    with serving(pair._replace(tokenizer=tokenizer)) as made:
        yield made


@pytest.mark.parametrize("ask", [whole, streamed])
def test_four_turns_end_with_the_right_answer(served_form, ask):
    client, restaurant = served_form.client(), Restaurant()
    messages: list[Any] = list(TASK)
    known: dict[str, str] = {}
    ids, usages, finishes = [], [], []
    for step in STEPS:
        answer = ask(client, messages=messages, **ASKED, **step(known))
        choice = answer.choices[0]
        messages.append(choice.message.model_dump(exclude_none=True))
        usages.append(answer.usage)
        finishes.append(choice.finish_reason)
        for call in choice.message.tool_calls or ():
            result = restaurant.run(call.function.name, call.function.arguments)
            known |= result
            ids.append(call.id)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": json.dumps(result)})
    assert restaurant.calls == ["find_table", "book", "pay"]
    assert choice.message.content == "Your receipt is R<9>."
    assert finishes == ["tool_calls"] * 3 + ["stop"]
    assert len(set(ids)) == 3
    read = [usage.prompt_tokens for usage in usages]
    assert read[2] > read[0] + 60, "calls and results come back in the prompt"
    assert sum(usage.completion_tokens_details.accepted_prediction_tokens for usage in usages) > 10
