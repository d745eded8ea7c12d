"""What clients of OpenAI's API send, and what they make of the answers.

    python examples/studies/record_clients.py --out tests/serving/recorded
    python examples/studies/record_clients.py --server http://127.0.0.1:8000/v1 --model eagle31-demo

The first has the clients that are installed ask a stand-in, which answers in OpenAI's shape, and writes the requests
that they made to a file each; `tests/serving/test_recorded.py` replays them. The second has them ask a server, and
prints what they made of its answers. Packages, in an environment of their own:

    langchain-openai llama-index-llms-openai-like "pydantic-ai-slim[openai]" litellm openai smolagents
    aider-chat (in another one: it pins litellm)
    npm install ai @ai-sdk/openai-compatible zod opencode-ai (--node FOLDER)
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import ClassVar, Literal

SYSTEM = "Answer briefly."
QUESTION = "How is the weather in Bonn?"
BOTH = "How is the weather in Bonn, and in Ulm?"
RESULT = "Sunny in {}."
SETTINGS = {"temperature": 0, "max_tokens": 96}
JOB = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 9}, "days": {"enum": [1, 2]}},
       "required": ["city", "days"], "additionalProperties": False}  # fmt: skip
HOME = "client-home-"
KEPT_HEADERS = ("accept", "content-type", "user-agent")


# --- the stand-in -----------------------------------------------------------------------------------------------------


def sample(schema: dict) -> object:
    """A value that a schema of the clients here allows."""
    if options := schema.get("enum"):
        return options[0]
    if schema.get("type") == "object":
        return {name: sample(part) for name, part in schema.get("properties", {}).items()}
    return {"integer": 1, "number": 1.0, "boolean": True, "array": []}.get(schema.get("type"), "Bonn")


def calls_for(body: dict) -> list[dict]:
    """Calls of the tools: one for each city that was asked about; after a result, only one that ends the work."""
    tools = {tool["function"]["name"]: tool["function"] for tool in body.get("tools") or []}
    asked = next(str(m["content"]) for m in body["messages"] if m["role"] == "user")
    ends = [name for name in tools if name.startswith("final")]
    last = body["messages"][-1]
    answered = last["role"] == "tool" or "Sunny" in str(last["content"])
    if not tools or (answered and not ends):
        return []
    if answered or len(tools) == len(ends):
        return [{"name": ends[0], "arguments": sample(tools[ends[0]]["parameters"])}]
    name = next(iter(tools))
    cities = [city for city in ("Bonn", "Ulm") if city in asked]
    return [{"name": name, "arguments": sample(tools[name]["parameters"]) | {"city": city}} for city in cities]


def message_for(body: dict) -> dict:
    wanted = body.get("response_format") or {}
    content = "It is sunny."
    if wanted.get("type") == "json_schema":
        content = json.dumps(sample(wanted["json_schema"]["schema"]))
    elif wanted.get("type") == "json_object":
        content = json.dumps(sample(JOB))
    calls = [
        {"id": f"call_{n}", "type": "function", "function": {**call, "arguments": json.dumps(call["arguments"])}}
        for n, call in enumerate(calls_for(body))
    ]
    said = {"content": None, "tool_calls": calls} if calls else {"content": content}
    return {"role": "assistant", "reasoning_content": "Let me look.", **said}


def pieces_of(message: dict) -> Iterator[dict]:
    yield {"role": "assistant", "content": ""}
    yield {"reasoning_content": message["reasoning_content"]}
    for index, call in enumerate(message.get("tool_calls", [])):
        yield {"tool_calls": [{"index": index, **call}]}
    for word in (message["content"] or "").split(" "):
        yield {"content": word + " "}


class StandIn(BaseHTTPRequestHandler):
    requests: ClassVar[list[dict]] = []

    def do_GET(self) -> None:
        self.keep(None)
        self.tell({"object": "list", "data": [{"id": "demo", "object": "model", "created": 1, "owned_by": "here"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.keep(body)
        answer = {"id": "chatcmpl-1", "created": 1, "model": "demo"}
        usage = {"prompt_tokens": 9, "completion_tokens": 5, "total_tokens": 14}
        if "prompt" in body:
            choice = {"index": 0, "text": " is sunny.", "finish_reason": "stop", "logprobs": None}
            self.tell({**answer, "object": "text_completion", "choices": [choice], "usage": usage})
            return
        message = message_for(body)
        finish = "tool_calls" if message.get("tool_calls") else "stop"
        if not body.get("stream"):
            choices = [{"index": n, "message": message, "finish_reason": finish} for n in range(body.get("n") or 1)]
            self.tell({**answer, "object": "chat.completion", "choices": choices, "usage": usage})
            return
        self.begin("text/event-stream")
        choices = [{"index": 0, "delta": piece, "finish_reason": None} for piece in pieces_of(message)]
        for choice in [*choices, {"index": 0, "delta": {}, "finish_reason": finish}]:
            self.event({**answer, "object": "chat.completion.chunk", "choices": [choice]})
        if (body.get("stream_options") or {}).get("include_usage"):
            self.event({**answer, "object": "chat.completion.chunk", "choices": [], "usage": usage})
        self.wfile.write(b"data: [DONE]\n\n")

    def keep(self, body: dict | None) -> None:
        headers = {name: self.headers[name] for name in KEPT_HEADERS if name in self.headers}
        told = {"method": self.command, "path": self.path, "headers": headers}
        self.requests.append(told if body is None else {**told, "body": body})

    def begin(self, kind: str) -> None:
        self.send_response(200)
        self.send_header("content-type", kind)
        self.send_header("connection", "close")
        self.end_headers()

    def tell(self, answer: dict) -> None:
        self.begin("application/json")
        self.wfile.write(json.dumps(answer).encode())

    def event(self, piece: dict) -> None:
        self.wfile.write(f"data: {json.dumps(piece)}\n\n".encode())

    def log_message(self, *args: object) -> None:
        pass


# --- clients: each yields what it was asked for, and what it made of the answer ---------------------------------------


def weather(city: Literal["Bonn", "Ulm"]) -> str:
    """The weather in a city.

    Args:
        city: its name.
    """
    return RESULT.format(city)


TOOL = {"type": "function", "function": {"name": "weather", "description": "The weather in a city.", "parameters": {
    "type": "object", "properties": {"city": {"enum": ["Bonn", "Ulm"]}}, "required": ["city"]}}}  # fmt: skip


def openai_client(url: str, model: str) -> Iterator[tuple[str, object]]:
    import openai

    client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
    yield "models", [each.id for each in client.models.list()]
    create = client.chat.completions.create
    asked = {"model": model, **SETTINGS}
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": QUESTION}]
    answer = create(messages=messages, **asked)
    yield "chat", (answer.choices[0].message.content, answer.usage)
    with client.chat.completions.stream(messages=messages, stream_options={"include_usage": True}, **asked) as stream:
        kinds = {event.type for event in stream}
        last = stream.get_final_completion()
    yield "stream", (last.choices[0].message.content, last.usage, kinds)
    for question in (QUESTION, BOTH):
        turns = [{"role": "user", "content": question}]
        message = create(messages=turns, tools=[TOOL], tool_choice="required", **asked).choices[0].message
        yield "calls", message.tool_calls
        turns.append(message)
        for call in message.tool_calls:
            result = weather(**json.loads(call.function.arguments))
            turns.append({"role": "tool", "tool_call_id": call.id, "content": result})
        yield "results", create(messages=turns, tools=[TOOL], tool_choice="none", **asked).choices[0].message.content
    wanted = {"type": "json_schema", "json_schema": {"name": "job", "schema": JOB, "strict": True}}
    yield "structured", create(messages=messages, response_format=wanted, **asked).choices[0].message.content
    habits = {
        "user": "me", "store": True, "metadata": {"a": "b"}, "service_tier": "auto", "reasoning_effort": "low",
        "seed": 1, "verbosity": "low", "prompt_cache_key": "x", "safety_identifier": "x", "n": 2, "logprobs": True,
        "stop": ["#"], "prediction": {"type": "content", "content": "x"}, "parallel_tool_calls": True,
        "logit_bias": {"5": -1},
    }  # fmt: skip
    told = create(messages=messages, **asked, **habits, tools=[TOOL])
    yield "settings", [choice.message.content for choice in told.choices]
    told = client.completions.create(model=model, prompt="The weather in Bonn", max_tokens=5)
    yield "completion", told.choices[0].text


def job_model() -> type:
    """What structured answers are read into."""
    from pydantic import BaseModel, ConfigDict, Field

    class Job(BaseModel):
        """A city, and how many days to stay."""

        model_config = ConfigDict(extra="forbid")
        city: str = Field(max_length=9)
        days: Literal[1, 2]

    return Job


def langchain(url: str, model: str) -> Iterator[tuple[str, object]]:
    from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI

    chat = ChatOpenAI(base_url=url, api_key="none", model=model, max_retries=0, stream_usage=True, **SETTINGS)
    messages = [SystemMessage(SYSTEM), HumanMessage(QUESTION)]
    answer = chat.invoke(messages)
    yield "chat", (answer.content, answer.usage_metadata, answer.response_metadata.get("finish_reason"))
    pieces = list(chat.stream(messages))
    whole = sum(pieces[1:], pieces[0])
    yield "stream", (len(pieces), whole.content, whole.usage_metadata)
    calls = chat.bind_tools([tool(weather)], tool_choice="any")
    for question in (QUESTION, BOTH):
        answer = calls.invoke([HumanMessage(question)])
        yield "calls", answer.tool_calls
        results = [ToolMessage(weather(**call["args"]), tool_call_id=call["id"]) for call in answer.tool_calls]
        turns = [HumanMessage(question), answer, *results]
        yield "results", chat.bind_tools([tool(weather)]).invoke(turns).content
    pieces = list(calls.stream([HumanMessage(QUESTION)]))
    yield "streamed calls", sum(pieces[1:], pieces[0]).tool_calls
    for method in ("json_schema", "function_calling"):
        yield "structured", chat.with_structured_output(job_model(), method=method).invoke(messages)
    habits = {
        "reasoning_effort": "low", "service_tier": "auto", "store": True, "metadata": {"a": "b"}, "seed": 1, "n": 2,
        "top_p": 0.9, "stop": ["#"], "logprobs": True, "verbosity": "low", "extra_body": {"top_k": 5},
    }  # fmt: skip
    yield "settings", chat.model_copy(update=habits).invoke(messages).content


def llama_index(url: str, model: str) -> Iterator[tuple[str, object]]:
    from llama_index.core.llms import ChatMessage
    from llama_index.core.tools import FunctionTool
    from llama_index.llms.openai_like import OpenAILike

    chat = OpenAILike(
        model=model, api_base=url, api_key="none", is_chat_model=True, is_function_calling_model=True,
        context_window=2048, max_retries=0, should_use_structured_outputs=True, **SETTINGS,
    )  # fmt: skip
    messages = [ChatMessage(role="system", content=SYSTEM), ChatMessage(role="user", content=QUESTION)]
    answer = chat.chat(messages)
    yield "chat", (answer.message.content, answer.raw.usage)
    pieces = list(chat.stream_chat(messages))
    yield "stream", (len(pieces), pieces[-1].message.content)
    tools = [FunctionTool.from_defaults(weather)]
    for question in (QUESTION, BOTH):
        told = chat.chat_with_tools(tools, question, tool_required=True, allow_parallel_tool_calls=True)
        calls = chat.get_tool_calls_from_response(told)
        yield "calls", calls
        results = [
            ChatMessage(role="tool", content=weather(**c.tool_kwargs), additional_kwargs={"tool_call_id": c.tool_id})
            for c in calls
        ]
        history = [ChatMessage(role="user", content=question), told.message, *results]
        yield "results", chat.chat_with_tools(tools, chat_history=history).message.content
    yield "structured", chat.as_structured_llm(job_model()).chat(messages).raw
    habits = {"reasoning_effort": "low", "user": "me", "service_tier": "auto", "seed": 1, "top_p": 0.9, "stop": ["#"]}
    yield "settings", chat.chat(messages, **habits).message.content


def pydantic_ai(url: str, model: str) -> Iterator[tuple[str, object]]:
    from pydantic_ai import Agent, NativeOutput, PromptedOutput, ToolOutput
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    chat = OpenAIChatModel(model, provider=OpenAIProvider(base_url=url, api_key="none"))
    agent = Agent(chat, instructions=SYSTEM, model_settings=SETTINGS)
    answer = agent.run_sync(QUESTION)
    yield "chat", (answer.output, answer.usage)
    with_tools = Agent(chat, tools=[weather], model_settings={**SETTINGS, "parallel_tool_calls": True})
    for question in (QUESTION, BOTH):
        told = with_tools.run_sync(question)
        yield "calls, results", [part for message in told.all_messages() for part in message.parts]
    for kind in (NativeOutput, ToolOutput, PromptedOutput):
        answer = Agent(chat, output_type=kind(job_model()), model_settings=SETTINGS).run_sync(QUESTION)
        yield "structured", answer.output

    habits = {
        "openai_reasoning_effort": "low", "openai_user": "me", "openai_service_tier": "auto", "openai_store": True,
        "openai_prompt_cache_key": "x", "openai_logprobs": True, "openai_top_logprobs": 1, "seed": 1, "top_p": 0.9,
        "stop_sequences": ["#"], "presence_penalty": 0.5, "logit_bias": {"5": -1}, "thinking": "low",
    }  # fmt: skip
    yield "settings", agent.run_sync(QUESTION, model_settings=habits).output

    async def streamed() -> tuple:
        async with agent.run_stream(QUESTION) as stream:
            pieces = [piece async for piece in stream.stream_text(delta=True)]
            return len(pieces), "".join(pieces), stream.usage

    import asyncio

    yield "stream", asyncio.run(streamed())


def litellm(url: str, model: str) -> Iterator[tuple[str, object]]:
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it asks the network for prices
    from litellm import completion

    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": QUESTION}]
    for provider in ("openai", "hosted_vllm"):
        asked = {"model": f"{provider}/{model}", "api_base": url, "api_key": "none", **SETTINGS}
        answer = completion(messages=messages, **asked)
        yield "chat", (answer.choices[0].message.content, answer.usage)
        pieces = list(completion(messages=messages, stream=True, stream_options={"include_usage": True}, **asked))
        choices = [piece.choices[0] for piece in pieces if piece.choices]
        text = "".join(choice.delta.content or "" for choice in choices)
        yield "stream", (len(pieces), text, choices[-1].finish_reason, getattr(pieces[-1], "usage", None))
        for question in (QUESTION, BOTH):
            turns = [{"role": "user", "content": question}]
            message = completion(messages=turns, tools=[TOOL], tool_choice="required", **asked).choices[0].message
            yield "calls", message.tool_calls
            turns.append(message)
            for call in message.tool_calls:
                result = weather(**json.loads(call.function.arguments))
                turns.append({"role": "tool", "tool_call_id": call.id, "name": "weather", "content": result})
            yield "results", completion(messages=turns, tools=[TOOL], **asked).choices[0].message.content
        answer = completion(messages=messages, response_format=job_model(), **asked)
        yield "structured", answer.choices[0].message.content
        habits = {
            "user": "me", "seed": 1, "top_p": 0.9, "stop": ["#"], "n": 2, "presence_penalty": 0.5, "logprobs": True,
            "top_logprobs": 1, "reasoning_effort": "low", "top_k": 5, "service_tier": "auto", "store": True,
            "allowed_openai_params": ["reasoning_effort"],
        }  # fmt: skip
        yield "settings", completion(messages=messages, **asked, **habits).choices[1].message.content


def smolagents(url: str, model: str) -> Iterator[tuple[str, object]]:
    from smolagents import OpenAIModel, ToolCallingAgent, tool

    chat = OpenAIModel(model, api_base=url, api_key="none", **SETTINGS)
    messages = [{"role": "user", "content": [{"type": "text", "text": QUESTION}]}]
    answer = chat.generate(messages)
    yield "chat", (answer.content, answer.token_usage)
    pieces = list(chat.generate_stream(messages))
    yield "stream", (len(pieces), "".join(piece.content or "" for piece in pieces), pieces[-1].token_usage)
    wanted = {"type": "json_schema", "json_schema": {"name": "job", "schema": JOB, "strict": True}}
    yield "structured", chat.generate(messages, response_format=wanted).content
    habits = {"reasoning_effort": "low", "top_p": 0.9, "seed": 1, "user": "me", "extra_body": {"top_k": 5}}
    yield "settings", chat.generate(messages, stop_sequences=["#"], **habits).content
    empty = {part: dict.fromkeys(names, "") for part, names in PROMPTS.items()}
    for question in (QUESTION, BOTH):
        prompts = {"system_prompt": SYSTEM, **empty}
        agent = ToolCallingAgent([tool(weather)], chat, prompt_templates=prompts, max_steps=3, verbosity_level=0)
        yield "calls, results", agent.run(question)


PROMPTS = {
    "planning": ("initial_plan", "update_plan_pre_messages", "update_plan_post_messages"),
    "managed_agent": ("task", "report"),
    "final_answer": ("pre_messages", "post_messages"),
}
"""Texts of smolagents' own that are long and not needed here."""


def aider(url: str, model: str) -> Iterator[tuple[str, object]]:
    with tempfile.TemporaryDirectory(prefix=HOME) as folder:
        environment = {**os.environ, "OPENAI_API_BASE": url, "OPENAI_API_KEY": "none", "HOME": folder}
        options = ["--no-git", "--yes-always", "--no-check-update", "--no-show-model-warnings", "--analytics-disable"]
        efforts = ["--reasoning-effort", "low", "--no-check-model-accepts-settings"]
        for more in (["--no-stream"], ["--stream", *efforts]):
            command = [
                sys.executable,
                "-m",
                "aider",
                "--model",
                f"openai/{model}",
                "--chat-mode",
                "ask",
                *options,
                *more,
            ]
            command += ["--message", QUESTION]
            run = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
            yield more[0].strip("-"), run.stdout[-300:] + run.stderr[-300:]


def ai_sdk(url: str, model: str) -> Iterator[tuple[str, object]]:
    script = Path(__file__).with_name("record_clients.js").read_text()
    run = subprocess.run(["node", "-e", script, url, model], cwd=NODE, capture_output=True, text=True)
    yield "all", run.stdout
    if run.returncode:
        raise RuntimeError(run.stderr)


def opencode(url: str, model: str) -> Iterator[tuple[str, object]]:
    local = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": url, "apiKey": "none"},
        "models": {model: {"limit": {"context": 2048, "output": SETTINGS["max_tokens"]}}},
    }
    prompts = {"title": {"prompt": "Name this chat."}, "build": {"prompt": SYSTEM, "tools": {"*": False, "glob": True}}}
    settings = {"provider": {"local": local}, "agent": prompts, "share": "disabled", "autoupdate": False}
    with tempfile.TemporaryDirectory(prefix=HOME) as folder:
        environment = {**os.environ, "HOME": folder, "PWD": folder, "OPENCODE_CONFIG_CONTENT": json.dumps(settings)}
        for question in (QUESTION, BOTH):
            command = [NODE / "node_modules/.bin/opencode", "run", "--model", f"local/{model}", question]
            run = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)
            yield "calls, results", run.stdout[-300:] + run.stderr[-300:]


NODE: Path | None = None
CLIENTS = {
    "openai": openai_client, "langchain-openai": langchain, "llama-index-llms-openai-like": llama_index,
    "pydantic-ai-slim": pydantic_ai, "litellm": litellm, "smolagents": smolagents, "aider-chat": aider,
    "ai": ai_sdk, "opencode-ai": opencode,
}  # fmt: skip


def version_of(package: str) -> str | None:
    if package in ("ai", "opencode-ai"):
        return json.loads((NODE / f"node_modules/{package}/package.json").read_text())["version"] if NODE else None
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def record(package: str, out: Path) -> None:
    StandIn.requests = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), StandIn)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    for step, told in CLIENTS[package](f"http://127.0.0.1:{server.server_port}/v1", "demo"):
        print(f"{package}: {step}: {told}")
    server.shutdown()
    once = {json.dumps(each.get("body"), sort_keys=True): each for each in StandIn.requests}.values()
    lines = [json.dumps(each, ensure_ascii=False, separators=(",", ":")) for each in once]
    lines = [re.sub(rf"{tempfile.gettempdir()}/{HOME}\w+", "/home/me", line) for line in lines]
    head = json.dumps({"client": package, "version": version_of(package)})[:-1]
    (out / f"{package}.json").write_text(head + ', "requests": [\n' + ",\n".join(lines) + "\n]}\n")


def main() -> None:
    global NODE
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("clients", nargs="*", help="packages; without any, all that are installed")
    parser.add_argument("--out", type=Path, help="folder for the recorded requests")
    parser.add_argument("--server", help="address of a server to ask instead")
    parser.add_argument("--model", default="demo", help="its model's name")
    parser.add_argument("--node", type=Path, help="folder with node_modules, for ai and opencode")
    told = parser.parse_args()
    NODE = told.node
    for package in told.clients or [name for name in CLIENTS if version_of(name)]:
        if told.server:
            for step, made in CLIENTS[package](told.server, told.model):
                print(f"{package}: {step}: {made}", flush=True)
        else:
            record(package, told.out)


if __name__ == "__main__":
    main()
