"""A row of training or evaluation data as a conversation.

A row holds

- chat messages under `messages`, `conversations` or `conversation` (`role` / `content`, or ShareGPT's `from` /
  `value`),
- user turns alone under `turns` (Spec-Bench, MT-Bench),
- one prompt under `prompt`, `question`, `instruction` or `input`, with its answer under `output`, `response`,
  `answer`, `completion` or `chosen`; or the two under `user` and `assistant`. Alpaca's `input` and a `context` are
  parts of that prompt. `prompt` and what follows it may be messages (TRL), and `chosen` may be a whole chat,
- plain `text`, or an exported chat of Open WebUI.

Beside these may stand a `system` prompt, `tools` and `chat_template_kwargs`; a message may have `tool_calls`,
`reasoning_content`, `name` and `tool_call_id`, `weight: 0` if it is not to be learned from, and its content may be null
or a list of text parts. All of it reaches the chat template in the form in which serving passes it on, so that a row's
tokens are those of the request it came from. Fields that belong to a prompt and cannot be read are refused by name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from ..errors import TrainingError, json_kind, shown

Message = dict[str, Any]

_SPEAKERS = {
    "user": ("human", "prompter", "instruction", "question", "customer"),
    "assistant": ("gpt", "chatgpt", "gpt3", "gpt4", "gpt-3.5", "gpt-4", "bot", "chatbot", "ai", "model", "llm", "bard",
                  "bing", "claude", "gemini", "answer", "response", "output"),
    "system": ("system_prompt", "context"),
    "tool": ("observation", "function", "function_response", "tool_response", "ipython"),
}  # fmt: skip
SHAREGPT_ROLES = {name: role for role, names in _SPEAKERS.items() for name in (role, *names)}
"""What speakers are called in ShareGPT's form, in small letters."""
_SAME_AS_ROLES = ("human", "gpt", "chatgpt", "prompter", "bot")  # no template knows these: rows mix the two forms
_CHATS = ("conversations", "messages", "conversation")
_PROMPTS = ("prompt", "question", "instruction")
_ANSWERS = ("completion", "chosen", "output", "response", "answer")
_SYSTEMS = ("system", "system_prompt")
_PARTS_OF_A_PROMPT = ("input", "context", "history")
_UNREAD = ("functions", "image", "images", "video", "videos", "audio", "audios")
_UNREAD_IN_A_MESSAGE = ("function_call", "images", "audio", "files")
_NOT_LEARNED = ("weight", "train", "loss")  # as OpenAI, axolotl and ms-swift say it of a message
KEPT_OF_A_MESSAGE = ("name", "tool_call_id", "reasoning_content", "thinking")
_WEB_UI_DETAILS = re.compile(r"<details\b[^>]*\btype=.*?</details>\s*", re.DOTALL)
"""Reasoning and calls of tools as Open WebUI shows them in an answer."""


@dataclass(frozen=True)
class Conversation:
    """One row of training or evaluation data."""

    id: str  # the row's own id, else file and line: what messages name it by
    category: str  # what acceptance is reported by: the row's `category`, else the name of its file
    messages: tuple[Message, ...]  # chat messages; one message of role `"text"` for a row that is no chat
    # token ids with which the target itself ended the last message (`training.writing`); empty otherwise
    answer_ids: tuple[int, ...] = ()
    answer_temperature: float | None = None  # what it wrote them with; `None` if that is not known
    tools: tuple[dict[str, Any], ...] = ()  # JSON schemas of functions the assistant may call
    # passed on to the chat template, e.g. `enable_thinking`.
    template_kwargs: dict[str, Any] = field(default_factory=dict)

    @property
    def is_text(self) -> bool:
        """Plain text without roles."""
        return self.messages[0]["role"] == "text"

    @property
    def is_empty(self) -> bool:
        """Whether no one says a word or calls a tool."""
        said = [each for each in self.messages if each["role"] != "system"]
        return not any(each["content"].strip() or each.get("tool_calls") for each in said)


def conversation_from_row(row: Any, *, where: str, fallback_id: str, category: str) -> Conversation:
    """One row as a conversation; see the module's docstring for the forms."""
    if not isinstance(row, dict):
        raise TrainingError(f"{where}: a row is {json_kind(row)}; wanted an object with messages")
    messages = _messages_of(row, where)
    answer = row.get("answer_ids") or ()
    if not all(isinstance(token, int) and token >= 0 for token in answer):
        raise TrainingError(f"{where}: answer_ids holds something else than token ids; regenerate the row")
    temperature = row.get("answer_temperature")
    if temperature is not None and not isinstance(temperature, (int, float)):
        raise TrainingError(f"{where}: answer_temperature is {shown(temperature)}; wanted a number")
    identity = row.get("id", row.get("question_id", row.get("task_id")))
    return Conversation(
        id=fallback_id if identity is None else str(identity),
        category=str(row.get("category") or category),
        messages=messages,
        answer_ids=tuple(answer),
        answer_temperature=temperature,
        tools=_tools_of(row, where),
        template_kwargs=_object(row.get("chat_template_kwargs") or {}, f"{where}, chat_template_kwargs"),
    )


FIRST_MESSAGES = 5
"""Chats are asked up to one of these at most: long dialogues would set the figures, and batches be too unlike."""


def up_to_question(messages: Sequence[Message], most: int | None = None) -> list[Message]:
    """Messages up to the last of the user's among the first `most`, or the first that goes unanswered."""
    roles = [message["role"] for message in messages[:most]]
    pairs = enumerate(pairwise(roles), start=1)
    end = next((end for end, pair in pairs if pair == ("user", "user")), len(roles))
    while end and roles[end - 1] != "user":
        end -= 1
    return list(messages[:end])


def _tools_of(row: dict[str, Any], where: str) -> tuple[dict[str, Any], ...]:
    tools = row.get("tools") or []
    if isinstance(tools, str):  # columns of one type each cannot hold schemas otherwise
        tools = parsed(tools, f"{where}, tools")
    if not isinstance(tools, list):
        raise TrainingError(f"{where}: tools is {json_kind(tools)}; wanted a list of JSON schemas")
    return tuple(_object(tool, f"{where}, tools[{i}]") for i, tool in enumerate(tools))


def _object(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TrainingError(f"{where} is {json_kind(value)}; wanted an object")
    return value


def _messages_of(row: dict[str, Any], where: str) -> tuple[Message, ...]:
    """Its messages; none where what should hold them is empty."""
    _refuse(row, _UNREAD, where, "train on rows of text alone")
    if isinstance(row.get("chat"), dict):
        row = _web_ui_row(row["chat"], where)
    if isinstance(row.get("turns"), str):
        row = {**row, "turns": [row["turns"]]}
    chat = next((key for key in (*_CHATS, "turns", "prompt") if isinstance(row.get(key), list) and row[key]), None)
    if chat is None and isinstance(row.get("chosen"), list) and not row.get("prompt"):
        chat = "chosen"
    if chat is None:
        return _with_system(_prompt_and_answer(row, where), row, where)
    _refuse(row, _PARTS_OF_A_PROMPT, where, f"put it into {chat}, or leave it out")
    entries = row[chat]
    if chat == "turns":
        entries = [{"role": "user", "content": turn} for turn in entries]
    elif chat == "prompt":
        entries = [*entries, *_completion(row)]
    messages = tuple(_message(entry, f"{where}, {chat}[{i}]") for i, entry in enumerate(entries))
    return _with_system(messages, row, where)


def _refuse(row: dict[str, Any], names: Sequence[str], where: str, advice: str) -> None:
    """Raise a `TrainingError` that names the first of these fields which holds something."""
    for name in names:
        if row.get(name):
            raise TrainingError(f"{where}: {name} cannot be read here; {advice}")


def _completion(row: dict[str, Any]) -> list[Any]:
    """Messages that follow a prompt of messages."""
    for key in _ANSWERS:
        if isinstance(row.get(key), list):
            return row[key]
        if isinstance(row.get(key), str):
            return [{"role": "assistant", "content": row[key]}]
    return []


def _prompt_and_answer(row: dict[str, Any], where: str) -> tuple[Message, ...]:
    """A prompt of its parts and its answer; or plain text."""
    if "user" in row and "assistant" in row:
        row = {"prompt": row["user"], "answer": row["assistant"], **row}
    key = next((key for key in (*_PROMPTS, "input") if str(row.get(key) or "").strip()), None)
    if key is None:
        if row.get("text"):
            _refuse(row, (*_SYSTEMS, *_PARTS_OF_A_PROMPT), where, "give the row as messages")
            return ({"role": "text", "content": _text(row["text"], f"{where}, text")},)
        if any(place in row for place in (*_CHATS, "turns", *_PROMPTS, "input", "text")):
            return ()
        raise TrainingError(
            f"{where}: no messages (keys: {', '.join(map(str, row)) or 'none'}); wanted conversations, messages, "
            "turns, prompt, question, instruction, input or text"
        )
    _refuse(row, ("history",), where, "give the row as messages")
    prompt = _text(row[key], f"{where}, {key}")
    if key != "input" and row.get("input"):
        prompt += "\n" + _text(row["input"], f"{where}, input")
    if row.get("context"):
        prompt = _text(row["context"], f"{where}, context") + "\n\n" + prompt
    answers = (row[key] for key in _ANSWERS if isinstance(row.get(key), str) and row[key].strip())
    answer = None if row.get("label") is False else next(answers, None)  # KTO's unwanted ones
    following = () if answer is None else ({"role": "assistant", "content": answer},)
    return ({"role": "user", "content": prompt}, *following)


def _with_system(messages: tuple[Message, ...], row: dict[str, Any], where: str) -> tuple[Message, ...]:
    """With the system prompt that stands beside the messages in front of them."""
    key = next((key for key in _SYSTEMS if row.get(key)), None)
    if key is None or not messages:
        return messages
    message: Message = {"role": "system", "content": _text(row[key], f"{where}, {key}")}
    if messages[0]["role"] != "system":
        return (message, *messages)
    if messages[0]["content"] != message["content"]:
        raise TrainingError(f"{where}: {key} stands beside another system message; keep one of them")
    return messages


def _web_ui_row(chat: dict[str, Any], where: str) -> dict[str, Any]:
    """An exported chat of Open WebUI as messages: those of the branch that was shown last."""
    messages, history = chat.get("messages"), chat.get("history")
    if not messages and isinstance(history, dict):
        by_id, place, messages = _object(history.get("messages"), f"{where}, history"), history.get("currentId"), []
        while place in by_id and len(messages) < len(by_id):
            messages.insert(0, by_id[place])
            place = _object(by_id[place], f"{where}, history").get("parentId")
    if not isinstance(messages, list) or not messages:
        raise TrainingError(f"{where}: chat holds no messages; wanted an export of Open WebUI")
    said = []
    for message in messages:
        message = _object(message, f"{where}, chat")
        content = message.get("content")
        if message.get("role") == "assistant" and isinstance(content, str):
            content = _WEB_UI_DETAILS.sub("", content)
        said.append({"role": message.get("role"), "content": content, "files": message.get("files")})
    parameters = chat.get("params")
    return {"messages": said, "system": parameters.get("system") if isinstance(parameters, dict) else None}


def _message(entry: Any, where: str) -> Message:
    if not isinstance(entry, dict):
        raise TrainingError(f"{where} is {json_kind(entry)}; wanted an object with role and content")
    role, content = entry.get("role"), entry.get("content")
    if role is None and "from" in entry:
        role, content = _speaker(entry["from"], where), entry.get("value", entry.get("content"))
    elif isinstance(role, str) and role.lower() in _SAME_AS_ROLES:
        role = SHAREGPT_ROLES[role.lower()]
    if not isinstance(role, str) or not role:
        raise TrainingError(f"{where} has no role (keys: {', '.join(map(str, entry))}); wanted role and content")
    _refuse(entry, _UNREAD_IN_A_MESSAGE, where, "give calls as tool_calls, and train on rows of text alone")
    message: Message = {"role": "system" if role == "developer" else role, "content": _text(content, where)}
    if _weight(entry, where) == 0:
        message["weight"] = 0
    if entry.get("tool_calls"):
        message["tool_calls"] = [_tool_call(call, where) for call in entry["tool_calls"]]
    message.update({name: entry[name] for name in KEPT_OF_A_MESSAGE if entry.get(name)})
    if isinstance(entry.get("reasoning"), str) and entry["reasoning"]:  # what several servers call it
        message.setdefault("reasoning_content", entry["reasoning"])
    return message


def _weight(entry: dict[str, Any], where: str) -> int:
    """Whether a message is learned from, 1 or 0."""
    weights = [entry[name] for name in _NOT_LEARNED if entry.get(name) is not None]
    if any(weight not in (0, 1) for weight in weights):
        raise TrainingError(f"{where}: weight is {shown(weights[0])}; wanted 0 (not learned from) or 1")
    return min(map(int, weights), default=1)


def _speaker(name: Any, where: str) -> str:
    role = SHAREGPT_ROLES.get(str(name).strip().lower())
    if role is None:
        raise TrainingError(
            f"{where} is from {str(name)[:40]!r}, a speaker nobody here knows; wanted human or gpt, or another name of "
            f"a {', '.join(_SPEAKERS)}: rename it"
        )
    return role


def _text(content: Any, where: str) -> str:
    """Null is an empty text (a turn that only calls tools); text parts are joined."""
    if not isinstance(content, list):
        if not isinstance(content, str | None):
            raise TrainingError(f"{where}: content is {json_kind(content)}; wanted text")
        return content or ""
    parts = [_object(part, f"{where}, content") for part in content]
    kinds = sorted({str(part.get("type")) for part in parts} - {"text"})
    if kinds:
        raise TrainingError(f"{where}: content has parts of type {', '.join(kinds)}; wanted text alone")
    return "".join(_text(part.get("text"), f"{where}, content") for part in parts)


def _tool_call(call: Any, where: str) -> dict[str, Any]:
    """With its arguments as an object, as templates take them; on the wire they are JSON text."""
    where = f"{where}, tool_calls"
    function = _object(_object(call, where).get("function"), f"{where}, function")
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        arguments = parsed(arguments, f"{where}, arguments")
    return {**call, "function": {**function, "arguments": arguments}}


def parsed(text: str, where: str, *, is_file: bool = False) -> Any:
    """JSON text, of a whole file or of one place in it; an error that begins with `where` if it is none."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}" if is_file else f"character {error.pos + 1}"
        raise TrainingError(f"{where}: not JSON ({error.msg} at {place}); mend or remove it") from None
    except (RecursionError, ValueError) as error:  # nested without end, or a number of thousands of digits
        raise TrainingError(f"{where}: not usable JSON ({str(error)[:80]}); mend or remove it") from None
