"""Conversations to token ids with a mask over what the assistant wrote, by the target's own chat template."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from ...errors import TrainingError
from ...texts.rows import Conversation, Message

TOO_LONG = ("truncate", "drop", "error")
SUPERVISED = ("assistant", "all")
MOST_OPENING_TOKENS = 256
CLOSING_TOKENS = 2
"""What a template may write behind a conversation's last turn alone, an end of text and a line break, say."""


@dataclass(frozen=True)
class Document:
    """Token ids of one conversation."""

    id: str  # of the conversation
    input_ids: list[int]  # tokens
    loss_mask: list[bool]  # whether the drafter learns to predict each of them
    # the first token the target wrote itself, and nothing else follows; `None`: it wrote none
    written_from: int | None = None
    temperature: float | None = None  # what it wrote with; `None` if that is not known


@dataclass(frozen=True)
class Documents:
    """Rendered conversations and what became of the long ones."""

    documents: list[Document]  # what is left to train on
    truncated: int = 0  # truncated, dropped: how many were longer than the limit, by what was done
    dropped: int = 0
    unsupervised: int = 0  # how many lost every supervised token by truncation, or had none; they are left out
    rewritten: int = 0  # how many of the documents hold a turn that the template shows otherwise later on

    @property
    def tokens(self) -> int:
        """Tokens in all documents."""
        return sum(len(document.input_ids) for document in self.documents)

    @property
    def supervised_tokens(self) -> int:
        """Tokens the drafter learns from."""
        return sum(sum(document.loss_mask) for document in self.documents)


def render_documents(
    conversations: Iterable[Conversation],
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_length: int,
    too_long: str = "truncate",
    supervise: str = "assistant",
) -> Documents:
    """Render conversations to documents of at most `max_length` tokens.

    Where the template shows an earlier turn otherwise than it was written (reasoning left out), that turn is learned
    in a document of its own, which ends with it.

    Args:
        too_long: what to do with longer ones: `"truncate"` their end, `"drop"` them, or raise an `"error"`.
        supervise: `"assistant"` learns what the assistant wrote, `"all"` every token (a drafter for a small target
            has too few of the former).

    Raises:
        TrainingError: a conversation cannot be rendered or is too long; the message names it. Or nothing is left.
    """
    kept: list[Document] = []
    truncated = dropped = unsupervised = rewritten = 0
    for conversation in conversations:
        for number, (ids, mask) in enumerate(render_turns(tokenizer, conversation, supervise)):
            is_whole = number == 0
            written_from = len(ids) - len(conversation.answer_ids) if conversation.answer_ids and is_whole else None
            if len(ids) > max_length:
                if too_long == "error":
                    raise TrainingError(
                        f"{conversation.id} has {len(ids)} tokens, the limit is {max_length}; raise the limit, or "
                        "truncate or drop long rows"
                    )
                if too_long == "drop":
                    dropped += 1
                    continue
                truncated += 1
                ids, mask = ids[:max_length], mask[:max_length]
            if not any(mask[2:]):  # the first two tokens of a document cannot be drafted
                unsupervised += 1
                continue
            rewritten += not is_whole
            temperature = conversation.answer_temperature if is_whole else None
            name = conversation.id if is_whole else f"{conversation.id}, rewritten turn {number}"
            kept.append(Document(name, ids, mask, written_from, temperature))
    if not kept:
        raise TrainingError(
            f"no document is left to train on ({dropped} too long and dropped, {unsupervised} without a supervised "
            f"token within {max_length} tokens); raise the limit or regenerate the assistant turns"
        )
    return Documents(kept, truncated, dropped, unsupervised, rewritten)


def render_turns(
    tokenizer: PreTrainedTokenizerBase, conversation: Conversation, supervise: str = "assistant"
) -> list[tuple[list[int], list[bool]]]:
    """Token ids and loss masks: of the whole conversation, and up to each assistant turn that it shows otherwise.

    An assistant turn is what the rendering gains by it over the generation prompt. If the target wrote the last turn,
    its own ids are used, since its text may tokenise differently. Turns of weight 0 are never learned.

    Raises:
        TrainingError: the template renders no assistant turn of it, or fails.
    """
    learns_all = supervise == "all"
    if is_plain(tokenizer, conversation):
        return [_render_plain(tokenizer, conversation, learns_all=learns_all)]
    messages, answer = list(conversation.messages), list(conversation.answer_ids)
    if not any(message["role"] == "assistant" for message in messages):
        raise TrainingError(
            f"{conversation.id} has no assistant turn to learn from; let the target write it (regenerate)"
        )
    if answer:
        messages = messages[:-1]
        ids = prompt_ids(tokenizer, conversation, messages)
    else:
        ids = _apply(tokenizer, conversation, messages)["input_ids"]
    mask, rewritten, is_shown = [learns_all] * len(ids), [], bool(answer)
    for turn, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        alone = _apply(tokenizer, conversation, messages[: turn + 1])["input_ids"]
        start = _common_prefix(alone, prompt_ids(tokenizer, conversation, messages[:turn]) if turn else [])
        shared, is_learned = _common_prefix(ids, alone), message.get("weight") != 0
        is_shown |= start < len(alone)
        is_rewritten = shared < len(alone) - CLOSING_TOKENS
        if is_rewritten and is_learned:
            rewritten.append((alone, [False] * start + [True] * (len(alone) - start)))
            continue
        if is_rewritten:  # where its other form ends is not known, so what follows it is left out, too
            shared = _common_prefix(ids, _apply(tokenizer, conversation, messages[: turn + 2])["input_ids"])
        mask[start:shared] = [is_learned] * max(0, shared - start)
    if not is_shown:
        raise TrainingError(
            f"{conversation.id}: the target's chat template renders no assistant turn (roles: "
            f"{', '.join(message['role'] for message in messages)}); rename the roles or set another template"
        )
    return [(ids + answer, mask + [True] * len(answer)), *rewritten]


# --- plain text -------------------------------------------------------------------------------------------------------


def is_plain(tokenizer: PreTrainedTokenizerBase, conversation: Conversation) -> bool:
    """Text without roles, or a lone prompt for a target without a chat template (a base model), which continues it.

    Raises:
        TrainingError: the conversation needs a template and there is none.
    """
    if conversation.is_text:
        return True
    if tokenizer.chat_template:
        return False
    if [message["role"] for message in conversation.messages] in (["user"], ["user", "assistant"]):
        return True
    raise TrainingError(
        f"{conversation.id} is a chat, but the target's tokenizer has no chat template; set one, or use text or prompt "
        "rows"
    )


def _render_plain(
    tokenizer: PreTrainedTokenizerBase, conversation: Conversation, *, learns_all: bool
) -> tuple[list[int], list[bool]]:
    """All of a text is learned from; of a prompt what follows it, if something does."""
    answer = list(conversation.answer_ids)
    ids = _plain_ids(tokenizer, conversation, opening=bool(answer))
    if not answer and len(conversation.messages) > 1:
        answer = tokenizer(conversation.messages[1]["content"], add_special_tokens=False)["input_ids"]
    return ids + answer, [learns_all or conversation.is_text or not answer] * len(ids) + [True] * len(answer)


def _plain_ids(tokenizer: PreTrainedTokenizerBase, conversation: Conversation, *, opening: bool) -> list[int]:
    """Of all of it, or of the `opening` that the target is asked to continue: a whole prompt, or half of a text."""
    ids = tokenizer(conversation.messages[0]["content"])["input_ids"]
    return ids[: min(MOST_OPENING_TOKENS, max(2, len(ids) // 2))] if opening and conversation.is_text else ids


# --- chats ------------------------------------------------------------------------------------------------------------


def prompt_ids(
    tokenizer: PreTrainedTokenizerBase, conversation: Conversation, messages: Sequence[Message]
) -> list[int]:
    """Ids up to where the target begins to write.

    Args:
        messages: those of the conversation that come before.

    Raises:
        TrainingError: the template refuses the messages; the row is named.
    """
    if is_plain(tokenizer, conversation):
        return _plain_ids(tokenizer, conversation, opening=True)
    return _apply(tokenizer, conversation, messages, add_generation_prompt=True)["input_ids"]


def _apply(
    tokenizer: PreTrainedTokenizerBase, conversation: Conversation, messages: Sequence[Message], **options: Any
) -> Any:
    try:
        return tokenizer.apply_chat_template(
            list(messages),
            tools=list(conversation.tools) or None,
            tokenize=True,
            return_dict=True,
            **conversation.template_kwargs,
            **options,
        )
    except Exception as error:  # a template may raise anything
        raise TrainingError(
            f"{conversation.id}: the target's chat template refuses this conversation ({error}); mend the row"
        ) from error


def _common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    different = (place for place, (a, b) in enumerate(zip(left, right, strict=False)) if a != b)
    return next(different, min(len(left), len(right)))
