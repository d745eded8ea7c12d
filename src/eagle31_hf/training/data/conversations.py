"""Conversations from JSONL files, folders or the Hub.

A row holds chat messages under `messages` or `conversations` (`role` / `content`, or ShareGPT's `from` / `value`),
user turns alone under `turns` (Spec-Bench, MT-Bench), one prompt under `prompt` or `question`, or plain `text`. Beside
messages may stand `tools` and `chat_template_kwargs`; a message may have `tool_calls`, `reasoning_content`, `name` and
`tool_call_id`, and its content may be null or a list of text parts. All of it reaches the chat template in the form in
which serving passes it on, so that a row's tokens are those of the request it came from.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...errors import TrainingError

Message = dict[str, Any]

SHAREGPT_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "user": "user",
    "assistant": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
}
KEPT_OF_A_MESSAGE = ("name", "tool_call_id", "reasoning_content")


@dataclass(frozen=True)
class Conversation:
    """One row of training or evaluation data.

    Attributes:
        id: the row's own id, else file and line; unique within a data set.
        category: what acceptance is reported by: the row's `category`, else the name of its file.
        messages: chat messages; one message of role `"text"` for a row that is no chat.
        answer_ids: token ids with which the target itself ended the last message (`regeneration`); empty otherwise.
        answer_temperature: what it wrote them with; `None` if that is not known.
        tools: JSON schemas of functions the assistant may call.
        template_kwargs: passed on to the chat template, e.g. `enable_thinking`.
    """

    id: str
    category: str
    messages: tuple[Message, ...]
    answer_ids: tuple[int, ...] = ()
    answer_temperature: float | None = None
    tools: tuple[dict[str, Any], ...] = ()
    template_kwargs: dict[str, Any] = field(default_factory=dict)

    @property
    def is_text(self) -> bool:
        """Plain text without roles."""
        return self.messages[0]["role"] == "text"


def read_conversations(sources: Sequence[str | Path], *, limit: int | None = None) -> list[Conversation]:
    """Read JSONL files, folders of them, or Hub data sets (`name` or `name:split`, needs `datasets`).

    Args:
        sources: read in order.
        limit: most rows per source.

    Raises:
        TrainingError: nothing is there, or a row cannot be understood; the message names file and line.
    """
    found: list[Conversation] = []
    for source in sources:
        for index, conversation in enumerate(_read_source(str(source))):
            if limit is not None and index >= limit:
                break
            found.append(conversation)
    if not found:
        raise TrainingError(f"no conversations in {', '.join(map(str, sources)) or 'no source'}; name a JSONL file")
    return with_unique_ids(found)


def with_unique_ids(conversations: list[Conversation]) -> list[Conversation]:
    """The same, if no two have one id.

    Raises:
        TrainingError: two have; the id is named.
    """
    seen: set[str] = set()
    for conversation in conversations:
        if conversation.id in seen:
            raise TrainingError(f"two rows have the id {conversation.id!r}; give every row an id of its own")
        seen.add(conversation.id)
    return conversations


def _read_source(source: str) -> Iterator[Conversation]:
    path = Path(source)
    if path.is_dir():
        files = sorted(path.glob("*.jsonl"))
        if not files:
            raise TrainingError(f"the folder {source!r} holds no *.jsonl file; name a folder of JSONL files")
        for file in files:
            yield from _read_jsonl(file)
    elif path.is_file():
        yield from _read_jsonl(path)
    elif path.suffix in (".jsonl", ".json") or source.startswith((".", "/", "~")):
        raise TrainingError(f"no file or folder {source!r}; check the path")
    elif source.isdecimal():  # a number of prompts, no doubt: the Hub would be asked for minutes
        raise TrainingError(f"got {source!r} where prompts are wanted; name a JSONL file, a folder or a Hub data set")
    else:
        yield from _read_hub(source)


def _read_jsonl(file: Path) -> Iterator[Conversation]:
    with file.open(encoding="utf-8") as lines:
        for number, line in enumerate(_decoded(lines, file), start=1):
            if not line.strip():
                continue
            where = f"{file}, line {number}"
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise TrainingError(
                    f"{where}: not JSON ({error.msg} at column {error.colno}); mend or remove it"
                ) from None
            except (ValueError, RecursionError) as error:  # thousands of digits, or of brackets
                raise TrainingError(f"{where}: JSON that nobody can read ({error}); mend or remove it") from None
            yield conversation_from_row(row, where=where, fallback_id=f"{file.stem}-{number}", category=file.stem)


def _decoded(lines: Iterator[str], file: Path) -> Iterator[str]:
    try:
        yield from lines
    except UnicodeDecodeError as error:
        raise TrainingError(f"{file} is not UTF-8 text ({error.reason}); convert it") from None


def _read_hub(source: str) -> Iterator[Conversation]:
    try:
        import datasets  # an extra: reading files must not need it
    except ImportError:
        raise TrainingError(f"no file or folder {source!r}; to read it from the Hub: pip install datasets") from None
    name, _, split = source.partition(":")
    try:
        rows = datasets.load_dataset(name, split=split or "train")
    except (OSError, ValueError, RuntimeError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise TrainingError(f"no file or folder {source!r}, and the Hub did not give it: {reason}") from error
    for number, row in enumerate(rows, start=1):
        yield conversation_from_row(
            dict(row), where=f"{source}, row {number}", fallback_id=f"{name}-{number}", category=name.split("/")[-1]
        )


def conversation_from_row(row: Any, *, where: str, fallback_id: str, category: str) -> Conversation:
    """One row as a conversation; see the module docstring for the forms.

    Raises:
        TrainingError: the row has none of them; the message begins with `where`.
    """
    if not isinstance(row, dict):
        raise TrainingError(f"{where}: a row is {type(row).__name__}; wanted an object with messages")
    messages = _messages_of(row, where)
    answer = row.get("answer_ids") or ()
    if not all(isinstance(token, int) and token >= 0 for token in answer):
        raise TrainingError(f"{where}: answer_ids holds something else than token ids; regenerate the row")
    temperature = row.get("answer_temperature")
    if temperature is not None and not isinstance(temperature, (int, float)):
        raise TrainingError(f"{where}: answer_temperature is {temperature!r}; wanted a number")
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


def _tools_of(row: dict[str, Any], where: str) -> tuple[dict[str, Any], ...]:
    tools = row.get("tools") or []
    if isinstance(tools, str):  # columns of one type each cannot hold schemas otherwise
        tools = _parsed(tools, f"{where}, tools")
    if not isinstance(tools, list):
        raise TrainingError(f"{where}: tools is {type(tools).__name__}; wanted a list of JSON schemas")
    return tuple(_object(tool, f"{where}, tools[{i}]") for i, tool in enumerate(tools))


def _object(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TrainingError(f"{where} is {type(value).__name__}; wanted an object")
    return value


def _parsed(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise TrainingError(f"{where} is text but no JSON ({error.msg}); mend it") from None
    except (ValueError, RecursionError) as error:
        raise TrainingError(f"{where} is JSON that nobody can read ({error}); mend it") from None


def _messages_of(row: dict[str, Any], where: str) -> tuple[Message, ...]:
    for key in ("conversations", "messages"):
        if isinstance(row.get(key), list) and row[key]:
            return tuple(_message(entry, f"{where}, {key}[{i}]") for i, entry in enumerate(row[key]))
    if isinstance(row.get("turns"), list) and row["turns"]:
        return tuple({"role": "user", "content": _text(turn, f"{where}, turns")} for turn in row["turns"])
    for key in ("prompt", "question"):
        if row.get(key):
            return ({"role": "user", "content": _text(row[key], f"{where}, {key}")},)
    if row.get("text"):
        return ({"role": "text", "content": _text(row["text"], f"{where}, text")},)
    raise TrainingError(
        f"{where}: no messages (keys: {', '.join(map(str, row)) or 'none'}); wanted conversations, messages, turns, "
        "prompt, question or text"
    )


def _message(entry: Any, where: str) -> Message:
    if not isinstance(entry, dict):
        raise TrainingError(f"{where} is {type(entry).__name__}; wanted an object with role and content")
    role, content = entry.get("role"), entry.get("content")
    if role is None and "from" in entry:
        role, content = SHAREGPT_ROLES.get(str(entry["from"])), entry.get("value")
    if not isinstance(role, str) or not role:
        raise TrainingError(f"{where} has no role (keys: {', '.join(map(str, entry))}); wanted role and content")
    message: Message = {"role": "system" if role == "developer" else role, "content": _content(content, where)}
    if entry.get("tool_calls"):
        message["tool_calls"] = [_tool_call(call, where) for call in entry["tool_calls"]]
    message.update({name: entry[name] for name in KEPT_OF_A_MESSAGE if entry.get(name)})
    return message


def _content(content: Any, where: str) -> str:
    """Null is an empty text (a turn that only calls tools); text parts are joined."""
    if content is None:
        return ""
    if not isinstance(content, list):
        return _text(content, where)
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
        arguments = _parsed(arguments, f"{where}, arguments")
    return {**call, "function": {**function, "arguments": arguments}}


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise TrainingError(f"{where}: content is {type(value).__name__}; wanted text")
    return value
