"""Conversations to token ids with a mask over what the assistant wrote, by the target's own chat template."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from ...errors import ConfigurationError, TrainingError
from ...texts.conversations import Conversation, Message

TOO_LONG = ("truncate", "drop", "error")
SUPERVISED = ("assistant", "all")
MOST_OPENING_TOKENS = 256


@dataclass(frozen=True)
class Document:
    """Token ids of one conversation.

    Attributes:
        id: of the conversation.
        input_ids: tokens.
        loss_mask: whether the drafter learns to predict each of them.
        written_from: the first token the target wrote itself, and nothing else follows; `None`: it wrote none.
        temperature: what it wrote with; `None` if that is not known.
    """

    id: str
    input_ids: list[int]
    loss_mask: list[bool]
    written_from: int | None = None
    temperature: float | None = None


@dataclass(frozen=True)
class Documents:
    """Rendered conversations and what became of the long ones.

    Attributes:
        documents: what is left to train on.
        truncated, dropped: how many were longer than the limit, by what was done.
        unsupervised: how many lost every supervised token by truncation, or had none; they are left out.
    """

    documents: list[Document]
    truncated: int = 0
    dropped: int = 0
    unsupervised: int = 0

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

    Args:
        too_long: what to do with longer ones: `"truncate"` their end, `"drop"` them, or raise an `"error"`.
        supervise: `"assistant"` learns what the assistant wrote, `"all"` every token (a drafter for a small target
            has too few of the former).

    Raises:
        TrainingError: a conversation cannot be rendered or is too long; the message names it. Or nothing is left.
    """
    if too_long not in TOO_LONG or supervise not in SUPERVISED:
        raise ConfigurationError(
            f"too_long={too_long!r}, supervise={supervise!r}; wanted one of {TOO_LONG} and one of {SUPERVISED}"
        )
    kept: list[Document] = []
    truncated = dropped = unsupervised = 0
    for conversation in conversations:
        ids, mask = render(tokenizer, conversation)
        written_from = len(ids) - len(conversation.answer_ids) if conversation.answer_ids else None
        if supervise == "all":
            mask = [True] * len(ids)
        if len(ids) > max_length:
            if too_long == "error":
                raise TrainingError(
                    f"{conversation.id} has {len(ids)} tokens, the limit is {max_length}; raise the limit, or truncate "
                    "or drop long rows"
                )
            if too_long == "drop":
                dropped += 1
                continue
            truncated += 1
            ids, mask = ids[:max_length], mask[:max_length]
        if not any(mask[2:]):  # the first two tokens of a document cannot be drafted
            unsupervised += 1
            continue
        kept.append(Document(conversation.id, ids, mask, written_from, conversation.answer_temperature))
    if not kept:
        raise TrainingError(
            f"no document is left to train on ({dropped} too long and dropped, {unsupervised} without a supervised "
            f"token within {max_length} tokens); raise the limit or regenerate the assistant turns"
        )
    return Documents(kept, truncated, dropped, unsupervised)


def render(tokenizer: PreTrainedTokenizerBase, conversation: Conversation) -> tuple[list[int], list[bool]]:
    """Token ids and loss mask of one conversation.

    The mask comes from the template's `{% generation %}` marks if it has them; else each assistant turn is what the
    rendering gains by it over the generation prompt. If the target wrote the last turn, its own ids are used, since
    its text may tokenise differently.

    Raises:
        TrainingError: the template renders no assistant turn of it, or fails.
    """
    if is_plain(tokenizer, conversation):
        return _render_plain(tokenizer, conversation)
    messages = list(conversation.messages)
    if conversation.answer_ids:
        return _render_with_answer(tokenizer, conversation, messages)
    if not any(message["role"] == "assistant" for message in messages):
        raise TrainingError(
            f"{conversation.id} has no assistant turn to learn from; let the target write it (regenerate)"
        )
    ids, mask = _render_chat(tokenizer, conversation, messages)
    if not any(mask):
        raise TrainingError(
            f"{conversation.id}: the target's chat template renders no assistant turn (roles: "
            f"{', '.join(message['role'] for message in messages)}); rename the roles or set another template"
        )
    return ids, mask


def _render_with_answer(
    tokenizer: PreTrainedTokenizerBase, conversation: Conversation, messages: list[Message]
) -> tuple[list[int], list[bool]]:
    context = messages[:-1]
    prompt = prompt_ids(tokenizer, conversation, context)
    mask = [False] * len(prompt)
    if any(message["role"] == "assistant" for message in context):
        ids, earlier = _render_chat(tokenizer, conversation, context)
        shared = _common_prefix(ids, prompt)
        mask[:shared] = earlier[:shared]
    return prompt + list(conversation.answer_ids), mask + [True] * len(conversation.answer_ids)


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
    written = len(conversation.messages) == 2 and conversation.answer_ids
    if conversation.messages[0]["role"] == "user" and (len(conversation.messages) == 1 or written):
        return True
    raise TrainingError(
        f"{conversation.id} is a chat, but the target's tokenizer has no chat template; set one, or use text or prompt "
        "rows"
    )


def _render_plain(tokenizer: PreTrainedTokenizerBase, conversation: Conversation) -> tuple[list[int], list[bool]]:
    """All of a text is learned from; of a prompt what the target wrote behind it, if it wrote."""
    answer = list(conversation.answer_ids)
    ids = _plain_opening(tokenizer, conversation) if answer else _plain_ids(tokenizer, conversation)
    return ids + answer, [conversation.is_text or not answer] * len(ids) + [True] * len(answer)


def _plain_ids(tokenizer: PreTrainedTokenizerBase, conversation: Conversation) -> list[int]:
    return tokenizer(conversation.messages[0]["content"])["input_ids"]


def _plain_opening(tokenizer: PreTrainedTokenizerBase, conversation: Conversation) -> list[int]:
    """What the target is asked to continue: a whole prompt, or the first half of a text."""
    ids = _plain_ids(tokenizer, conversation)
    return ids[: min(MOST_OPENING_TOKENS, max(2, len(ids) // 2))] if conversation.is_text else ids


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
        return _plain_opening(tokenizer, conversation)
    return _apply(tokenizer, conversation, messages, add_generation_prompt=True)["input_ids"]


def _render_chat(
    tokenizer: PreTrainedTokenizerBase, conversation: Conversation, messages: list[Message]
) -> tuple[list[int], list[bool]]:
    if has_generation_marks(tokenizer):
        encoded = _apply(tokenizer, conversation, messages, return_assistant_tokens_mask=True)
        return encoded["input_ids"], [bool(marked) for marked in encoded["assistant_masks"]]
    ids = _apply(tokenizer, conversation, messages)["input_ids"]
    mask = [False] * len(ids)
    for turn, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        # Templates may render an earlier turn otherwise than the last one (reasoning left out): what does not appear
        # in the whole rendering is not supervised.
        start = _common_prefix(ids, prompt_ids(tokenizer, conversation, messages[:turn]))
        end = _common_prefix(ids, _apply(tokenizer, conversation, messages[: turn + 1])["input_ids"])
        mask[start:end] = [True] * max(0, end - start)
    return ids, mask


def has_generation_marks(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the chat template marks what the assistant writes."""
    template = tokenizer.chat_template
    return isinstance(template, str) and re.search(r"{%-?\s*generation\s*-?%}", template) is not None


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
    for position, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return position
    return min(len(left), len(right))
