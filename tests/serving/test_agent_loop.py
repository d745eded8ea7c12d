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
from loopback import TOOL_TEMPLATE, chat, serving

FORMS = {
    "Hermes JSON": TOOL_TEMPLATE,
    "Qwen XML": TOOL_TEMPLATE.replace("{...}", "<function=f><parameter=x>"),
    "JSON alone": TOOL_TEMPLATE.replace("<tool_call>", "").replace("</tool_call>", ""),
}
TASK = [{"role": "user", "content": "Please book a table for two outside, pay for it, and tell me the receipt."}]
RESTAURANT = {  # calls that are right, and what comes of them
    ("find_table", '{"people": 2, "outside": true}'): {"table": 'no. 7 "terrace"'},
    ("book", '{"table": "no. 7 \\"terrace\\""}'): {"booking": "b-31"},
    ("pay", '{"booking": "b-31", "share": null}'): {"receipt": "R<9>"},
}


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


def streamed(client, messages, **asked):
    """Put together by the client's own helper."""
    asked |= {"model": "demo", "temperature": 0, "stream_options": {"include_usage": True}}
    with client.chat.completions.stream(messages=messages, **asked) as stream:
        return stream.get_final_completion()


@pytest.fixture(scope="module", params=list(FORMS))
def client(pair, request):
    pytest.importorskip("llguidance")
    tokenizer = AutoTokenizer.from_pretrained(target_path())
    tokenizer.chat_template = FORMS[request.param]
    with serving(pair._replace(tokenizer=tokenizer)) as made:
        yield made.client()


@pytest.mark.parametrize("ask", [chat, streamed])
def test_four_turns_end_with_the_right_answer(client, ask):
    messages, known, ids, answers = list[Any](TASK), dict[str, str](), set[str](), []
    for step in STEPS:
        answers.append(ask(client, messages, max_tokens=120, **step(known)))
        message = answers[-1].choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls or ():
            result = RESTAURANT[call.function.name, json.dumps(json.loads(call.function.arguments))]
            known |= result
            ids.add(call.id)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": json.dumps(result)})
    assert message.content == "Your receipt is R<9>."
    assert [answer.choices[0].finish_reason for answer in answers] == ["tool_calls"] * 3 + ["stop"]
    assert len(ids) == 3
    usages = [answer.usage for answer in answers]
    assert usages[2].prompt_tokens > usages[0].prompt_tokens + 60, "calls and results come back in the prompt"
    assert sum(usage.completion_tokens_details.accepted_prediction_tokens for usage in usages) > 10
