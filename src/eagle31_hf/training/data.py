"""Conversations to packed rows of token ids with a mask over what is learned, and the draft vocabulary of them.

Documents stand side by side in rows of one length, none cut, none seeing its neighbour.
"""

from __future__ import annotations

import random
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase

from ..errors import ConfigurationError, TrainingError
from ..texts.chats import apply_template, shared_prefix
from ..texts.rows import Conversation, Message

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


def render_documents(
    conversations: Iterable[Conversation],
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_length: int | None,
    learns_all: bool = False,
) -> tuple[list[Document], Counter[str]]:
    """Render conversations to documents of at most `max_length` tokens; the end of longer ones is left out.

    Where the template shows an earlier turn otherwise than it was written (reasoning left out), that turn is learned
    in a document of its own, which ends with it.

    Args:
        learns_all: every token is learned, not only what the assistant wrote: a drafter for a small target has too few
            of these.

    Returns:
        What is left to train on, and how many documents are "truncated" or, "rewritten" later, of their own, and how
        many were left out "without anything to learn".
    """
    kept: list[Document] = []
    counts: Counter[str] = Counter()
    for conversation in conversations:
        answer = len(conversation.answer_ids)
        for number, (ids, mask) in enumerate(render_turns(tokenizer, conversation, learns_all=learns_all)):
            counts["truncated"] += max_length is not None and len(ids) > max_length
            written_from = len(ids) - answer if answer and not number else None
            ids, mask = ids[:max_length], mask[:max_length]
            if not any(mask[2:]):  # the first two tokens of a document cannot be drafted
                counts["without anything to learn"] += 1
                continue
            name = f"{conversation.id}, rewritten turn {number}" if number else conversation.id
            counts["rewritten"] += number > 0
            temperature = None if number else conversation.answer_temperature
            kept.append(Document(name, ids, mask, written_from, temperature))
    if not kept:
        left = f"no document is left ({counts['without anything to learn']} without anything to learn"
        if max_length is None:
            raise TrainingError(f"{left}); name conversations with answers")
        raise TrainingError(
            f"{left} within {max_length} tokens); raise --max-length or let the target write the answers "
            "(--regenerate last)"
        )
    return kept, counts


def render_turns(
    tokenizer: PreTrainedTokenizerBase, conversation: Conversation, *, learns_all: bool = False
) -> list[tuple[list[int], list[bool]]]:
    """Token ids and loss masks: of the whole conversation, and up to each assistant turn that it shows otherwise.

    An assistant turn is what the rendering gains by it over the generation prompt. If the target wrote the last turn,
    its own ids are used, since its text may tokenise differently. Turns of weight 0 are never learned.
    """
    if is_plain(tokenizer, conversation):
        return [_render_plain(tokenizer, conversation, learns_all=learns_all)]
    messages, answer = list(conversation.messages), list(conversation.answer_ids)
    if not any(message["role"] == "assistant" for message in messages):
        raise TrainingError(
            f"{conversation.id} has no assistant turn to learn from; give its answer, or let the target write it "
            "(train --regenerate last)"
        )
    if answer:
        messages = messages[:-1]
        ids = prompt_ids(tokenizer, conversation, messages)
    else:
        ids = _apply(tokenizer, conversation, messages)
    mask, rewritten, is_shown = [learns_all] * len(ids), [], bool(answer)
    for turn, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        alone = _apply(tokenizer, conversation, messages[: turn + 1])
        start = shared_prefix(alone, prompt_ids(tokenizer, conversation, messages[:turn]) if turn else [])
        shared, is_learned = shared_prefix(ids, alone), message.get("weight") != 0
        is_shown |= start < len(alone)
        is_rewritten = shared < len(alone) - CLOSING_TOKENS
        if is_rewritten and is_learned:
            rewritten.append((alone, [False] * start + [True] * (len(alone) - start)))
            continue
        if is_rewritten:  # where its other form ends is not known, so what follows it is left out, too
            shared = shared_prefix(ids, _apply(tokenizer, conversation, messages[: turn + 2]))
        mask[start:shared] = [is_learned] * max(0, shared - start)
    if not is_shown:
        raise TrainingError(
            f"{conversation.id}: the target's chat template renders no assistant turn (roles: "
            f"{', '.join(message['role'] for message in messages)}); rename the roles or set another template"
        )
    return [(ids + answer, mask + [True] * len(answer)), *rewritten]


# --- plain text -------------------------------------------------------------------------------------------------------


def is_plain(tokenizer: PreTrainedTokenizerBase, conversation: Conversation) -> bool:
    """Text without roles, or a lone prompt for a target without a chat template (a base model), which continues it."""
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
    """
    if is_plain(tokenizer, conversation):
        return _plain_ids(tokenizer, conversation, opening=True)
    return _apply(tokenizer, conversation, messages, asks=True)


def _apply(
    tokenizer: PreTrainedTokenizerBase, conversation: Conversation, messages: Sequence[Message], *, asks: bool = False
) -> list[int]:
    options = {"add_generation_prompt": asks, **conversation.template_kwargs}
    try:
        return apply_template(tokenizer, messages, conversation.tools, **options)
    except Exception as error:  # a template may raise anything
        raise TrainingError(
            f"{conversation.id}: the target's chat template refuses this conversation ({error}); mend the row"
        ) from error


# --- packed rows ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PackedBatch:
    """Packed rows."""

    input_ids: Tensor  # `(B, T)` token ids; padding holds 0
    loss_mask: Tensor  # `(B, T)` bool: the token is supervised; never true on padding
    position_ids: Tensor  # `(B, T)` position within the document: each begins at 0, and so does padding
    # `(B, T)` temperature at which the target wrote the token itself; `NOT_WRITTEN` where it did not, or at a
    # temperature that is not known
    written_at: Tensor


NOT_WRITTEN = -1.0


def pack(lengths: Sequence[int], row_length: int, *, seed: int) -> list[list[int]]:
    """Which documents share a row: best fit in random order, so every row mixes what the data has side by side.

    Args:
        lengths: tokens per document, none above `row_length`.

    Returns:
        Document numbers per row; each document once.
    """
    assert max(lengths, default=0) <= row_length, "documents were cut to the row length before"
    order = list(range(len(lengths)))
    random.Random(seed).shuffle(order)
    rows: list[list[int]] = []
    free: list[tuple[int, int]] = []  # tokens for which a row has room, and its number, ascending
    for document in order:
        fit = bisect_left(free, (lengths[document], 0))
        if fit == len(free):
            rows.append([])
            free.append((row_length, len(rows) - 1))
        room, number = free.pop(fit)
        rows[number].append(document)
        insort(free, (room - lengths[document], number))
    return rows


class PackedDocuments(Dataset):
    """Rows of packed documents, as tensors `(T,)` under the field names of `PackedBatch`."""

    def __init__(self, documents: Sequence[Document], row_length: int, *, seed: int):
        self.documents, self.row_length = documents, row_length
        self.rows = pack([len(document.input_ids) for document in documents], row_length, seed=seed)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        documents = [self.documents[number] for number in self.rows[index]]
        free = self.row_length - sum(len(document.input_ids) for document in documents)
        padding = Document("padding", [0] * free, [False] * free)
        parts = [_fields(document) for document in (*documents, padding)]
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def _fields(document: Document) -> dict[str, Tensor]:
    length = len(document.input_ids)
    written_at = torch.full((length,), NOT_WRITTEN)
    if document.written_from is not None and document.temperature is not None:
        written_at[document.written_from :] = document.temperature
    return {
        "input_ids": torch.tensor(document.input_ids, dtype=torch.long),
        "loss_mask": torch.tensor(document.loss_mask, dtype=torch.bool),
        "position_ids": torch.arange(length),
        "written_at": written_at,
    }


# --- the draft vocabulary ---------------------------------------------------------------------------------------------


def count_supervised(documents: Iterable[Document], vocab_size: int) -> Tensor:
    """How often each target id is supervised, `(V,)` int64."""
    counts = torch.zeros(vocab_size, dtype=torch.long)
    for document in documents:
        ids = torch.tensor(document.input_ids)[torch.tensor(document.loss_mask)]
        if len(ids) and int(ids.max()) >= vocab_size:
            raise TrainingError(
                f"{document.id} holds token id {int(ids.max())}, but the target's vocabulary ends at {vocab_size - 1}; "
                "use the target's own tokenizer"
            )
        counts += torch.bincount(ids, minlength=vocab_size)
    return counts


def build_vocabulary(counts: Tensor, size: int) -> Tensor:
    """`(size,)` the most frequent ids of `counts (V,)`, ascending (ties and never-seen ids: the lower id first).

    Row `i` of the draft head stands for the `i`-th of them, as in EAGLE-3's scripts (reference §1.3).
    """
    vocab_size = len(counts)
    if not 1 <= size <= vocab_size:
        raise ConfigurationError(f"draft vocabulary size is {size}; wanted 1..{vocab_size} (the target's vocabulary)")
    return counts.argsort(descending=True, stable=True)[:size].sort().values


def coverage(counts: Tensor, draft_ids: Tensor | None) -> float:
    """Share of the counted tokens that can be drafted; `None` stands for all ids."""
    covered = counts if draft_ids is None else counts[draft_ids.cpu()]
    return int(covered.sum()) / max(1, int(counts.sum()))
