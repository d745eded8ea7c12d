"""Conversations from files (JSONL, or one JSON list of rows), folders or the Hub.

A row holds chat messages under `messages` or `conversations` (`role` / `content`, or ShareGPT's `from` / `value`),
user turns alone under `turns` (Spec-Bench, MT-Bench), one prompt under `prompt`, `question` or `instruction`, or plain
`text`. A `prompt` may be messages, which those of `completion` or `chosen` follow (TRL). Beside messages may stand
`tools` and `chat_template_kwargs`; a message may have `tool_calls`, `reasoning_content`, `name` and `tool_call_id`, and
its content may be null or a list of text parts. All of it reaches the chat template in the form in which serving passes
it on, so that a row's tokens are those of the request it came from.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..errors import TrainingError, first_line

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
_FOLLOWING = ("completion", "chosen")
KEPT_OF_A_MESSAGE = ("name", "tool_call_id", "reasoning_content")


@dataclass(frozen=True)
class Conversation:
    """One row of training or evaluation data."""

    id: str  # the row's own id, else file and line; unique within a data set
    category: str  # what acceptance is reported by: the row's `category`, else the name of its file
    messages: tuple[Message, ...]  # chat messages; one message of role `"text"` for a row that is no chat
    # token ids with which the target itself ended the last message (`regeneration`); empty otherwise
    answer_ids: tuple[int, ...] = ()
    answer_temperature: float | None = None  # what it wrote them with; `None` if that is not known
    tools: tuple[dict[str, Any], ...] = ()  # JSON schemas of functions the assistant may call
    # passed on to the chat template, e.g. `enable_thinking`.
    template_kwargs: dict[str, Any] = field(default_factory=dict)

    @property
    def is_text(self) -> bool:
        """Plain text without roles."""
        return self.messages[0]["role"] == "text"


def read_conversations(
    sources: Sequence[str | Path], *, limit: int | None = None, on_empty: Callable[[str], None] = lambda where: None
) -> list[Conversation]:
    """Read files (JSONL, or one JSON list), folders of them, or Hub data sets (`name` or `name:split`, needs
    `datasets`).

    Args:
        sources: read in order. Ids that two files have in common are told apart by the second one's name.
        limit: most rows per source.
        on_empty: told where a row without any text stands; it is left out.

    Raises:
        TrainingError: nothing is there, or a row cannot be understood; the message names file and line.
    """
    found: dict[str, Conversation] = {}
    origins: dict[str, str] = {}  # of each id
    for source in sources:
        for origin, conversation in itertools.islice(_read_source(str(source), on_empty), limit):
            if origins.get(conversation.id, origin) != origin:
                conversation = replace(conversation, id=_id_beside(found, origin, conversation.id))
            elif conversation.id in found:
                raise TrainingError(
                    f"{origin}: two rows have the id {conversation.id!r}; give every row an id of its own, and name "
                    "every file once"
                )
            found[conversation.id], origins[conversation.id] = conversation, origin
    if not found:
        raise TrainingError(f"no conversations in {', '.join(map(str, sources)) or 'no source'}; name a JSONL file")
    return list(found.values())


def _id_beside(taken: Collection[str], origin: str, identity: str) -> str:
    """Another file has a row of this id, too."""
    named = f"{Path(origin).stem}/{identity}"
    numbered = (f"{named}-{number}" for number in itertools.count(2))
    return next(name for name in itertools.chain([named], numbered) if name not in taken)


def with_unique_ids(conversations: list[Conversation]) -> list[Conversation]:
    """The same; raises a `TrainingError` that names the id if two have one."""
    for name, count in Counter(conversation.id for conversation in conversations).items():
        if count > 1:
            raise TrainingError(f"two rows have the id {name!r}; give every row an id of its own")
    return conversations


def _read_source(source: str, on_empty: Callable[[str], None]) -> Iterator[tuple[str, Conversation]]:
    """Conversations of a source, with the file or data set each is from."""
    for origin, name, rows in _tables(source):
        for number, where, row in rows:
            if _is_empty(row):
                on_empty(where)
                continue
            category = name.rpartition("/")[2]
            yield origin, conversation_from_row(row, where=where, fallback_id=f"{name}-{number}", category=category)


_Rows = Iterator[tuple[int, str, Any]]  # number, place and content


def _tables(source: str) -> Iterator[tuple[str, str, _Rows]]:
    """Each file or data set of a source: where it lies, what it is called, its rows."""
    path = Path(source)
    if path.is_dir():
        files = sorted(path.glob("*.jsonl")) or sorted(path.glob("*.json"))
        if not files:
            raise TrainingError(f"the folder {source!r} holds no *.jsonl or *.json file; name a folder of such files")
        yield from ((str(file), file.stem, file_rows(file)) for file in files)
    elif path.is_file():
        yield str(path), path.stem, file_rows(path)
    elif path.suffix in (".jsonl", ".json") or source.startswith((".", "/", "~")):
        raise TrainingError(f"no file or folder {source!r}; check the path")
    elif source.isdecimal():  # a number of prompts, no doubt: the Hub would be asked for minutes
        raise TrainingError(f"got {source!r} where prompts are wanted; name a JSONL file, a folder or a Hub data set")
    else:
        yield source, source.partition(":")[0], _hub_rows(source)


def file_rows(file: Path) -> _Rows:
    """Number, place and content of each row: one a line, or the items of one list.

    Raises:
        TrainingError: it is no UTF-8 text or no JSON; the message names the line.
    """
    is_first = True
    try:
        with file.open(encoding="utf-8-sig") as lines:  # editors of Windows put a mark in front
            for number, line in enumerate(lines, start=1):
                if is_first and line.lstrip().startswith("["):
                    items = _parsed(line + lines.read(), f"{file}, read as one list of rows")
                    yield from ((number, f"{file}, row {number}", row) for number, row in enumerate(items, start=1))
                elif line.strip():
                    is_first, where = False, f"{file}, line {number}"
                    yield number, where, _parsed(line, where)
    except UnicodeDecodeError as error:
        raise TrainingError(f"{file} is not UTF-8 text ({error.reason}); convert it") from None


def _hub_rows(source: str) -> _Rows:
    try:
        import datasets  # an extra: reading files must not need it
    except ImportError:
        raise TrainingError(f"no file or folder {source!r}; to read it from the Hub: pip install datasets") from None
    name, _, split = source.partition(":")
    try:
        rows = datasets.load_dataset(name, split=split or "train")
    except (OSError, ValueError, RuntimeError) as error:
        raise TrainingError(
            f"no file or folder {source!r}, and the Hub did not give it: {first_line(error)}"
        ) from error
    yield from ((number, f"{source}, row {number}", row) for number, row in enumerate(map(dict, rows), start=1))


def _parsed(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        line = f"line {error.lineno}, " if error.lineno > 1 else ""
        raise TrainingError(
            f"{where}: not JSON ({error.msg} at {line}column {error.colno}); mend or remove it"
        ) from None
    except (RecursionError, ValueError) as error:  # nested without end, or a number of thousands of digits
        raise TrainingError(f"{where}: not usable JSON ({str(error)[:80]}); mend or remove it") from None


def _is_empty(row: Any) -> bool:
    """Whether it has a place for text and nothing there."""
    if not isinstance(row, dict):
        return False
    places = [row[key] for key in ("conversations", "messages", "turns", "prompt", "question", "text") if key in row]
    return bool(places) and not any(map(_has_text, places))


def _has_text(place: Any) -> bool:
    """Anything but blanks, at whatever depth; what is of an unknown kind will be named when it is read."""
    if isinstance(place, dict):
        told = [place[key] for key in ("content", "value", "text", "tool_calls") if key in place]
        return any(map(_has_text, told)) if told else True
    if isinstance(place, list):
        return any(map(_has_text, place))
    return bool(place.strip()) if isinstance(place, str) else place is not None


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


def _messages_of(row: dict[str, Any], where: str) -> tuple[Message, ...]:
    for key in ("conversations", "messages"):
        if isinstance(row.get(key), list) and row[key]:
            return tuple(_message(entry, f"{where}, {key}[{i}]") for i, entry in enumerate(row[key]))
    if isinstance(row.get("turns"), list) and row["turns"]:
        return tuple({"role": "user", "content": _text(turn, f"{where}, turns")} for turn in row["turns"])
    if isinstance(row.get("prompt"), list) and row["prompt"]:
        following: list[Any] = next((row[key] for key in _FOLLOWING if isinstance(row.get(key), list)), [])
        entries = [*row["prompt"], *following]
        return tuple(_message(entry, f"{where}, prompt[{i}]") for i, entry in enumerate(entries))
    for key in ("prompt", "question", "instruction"):
        if row.get(key):
            return ({"role": "user", "content": _text(row[key], f"{where}, {key}")},)
    if row.get("text"):
        return ({"role": "text", "content": _text(row["text"], f"{where}, text")},)
    raise TrainingError(
        f"{where}: no messages (keys: {', '.join(map(str, row)) or 'none'}); wanted conversations, messages, turns, "
        "prompt, question, instruction or text"
    )


def _message(entry: Any, where: str) -> Message:
    if not isinstance(entry, dict):
        raise TrainingError(f"{where} is {type(entry).__name__}; wanted an object with role and content")
    role, content = entry.get("role"), entry.get("content")
    if role is None and "from" in entry:
        role, content = _speaker(entry["from"], where), entry.get("value", entry.get("content"))
    elif isinstance(role, str) and role.lower() in _SAME_AS_ROLES:
        role = SHAREGPT_ROLES[role.lower()]
    if not isinstance(role, str) or not role:
        raise TrainingError(f"{where} has no role (keys: {', '.join(map(str, entry))}); wanted role and content")
    message: Message = {"role": "system" if role == "developer" else role, "content": _content(content, where)}
    if entry.get("tool_calls"):
        message["tool_calls"] = [_tool_call(call, where) for call in entry["tool_calls"]]
    message.update({name: entry[name] for name in KEPT_OF_A_MESSAGE if entry.get(name)})
    return message


def _speaker(name: Any, where: str) -> str:
    role = SHAREGPT_ROLES.get(str(name).strip().lower())
    if role is None:
        raise TrainingError(
            f"{where} is from {str(name)[:40]!r}, a speaker nobody here knows; wanted human or gpt, or another name of "
            f"a {', '.join(_SPEAKERS)}: rename it"
        )
    return role


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
