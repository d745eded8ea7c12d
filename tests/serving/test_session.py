"""A chat without a terminal: the history is not read twice, and every turn is what `generate` writes to all of it."""

from __future__ import annotations

import pytest
import torch

from eagle31_hf import Eagle31Drafter, NoDrafter
from eagle31_hf.demo import CONVERSATIONS
from eagle31_hf.errors import ConfigurationError
from eagle31_hf.generate import routes
from eagle31_hf.sampling.logits_processing import sampling_options
from eagle31_hf.serving.session import ChatSession
from eagle31_hf.texts.chats import encode_chat
from helpers import seeded
from mtp_targets import target_with_head

USER_TURNS = [message["content"] for message in CONVERSATIONS[0] if message["role"] == "user"]


@pytest.fixture
def session(pair):
    return ChatSession(*pair, max_new_tokens=40)


def plain(pair, session):
    """What the target alone writes to the conversation up to its last message."""
    ids = torch.tensor([encode_chat(pair.tokenizer, session.messages[:-1])])
    kwargs = {"max_new_tokens": session.max_new_tokens, "pad_token_id": 0, **sampling_options(session.temperature)}
    with seeded(7):
        written = pair.target.generate(ids, attention_mask=torch.ones_like(ids), **kwargs)[0, ids.shape[1] :]
    return pair.tokenizer.decode(written, skip_special_tokens=True)


@pytest.fixture(params=["trained", "none", "qwen3_5_text", "glm4_moe_lite", "mellum"])
def any_pair(pair, request, tmp_path):
    """With a drafter, without, or with a head of the target's own: beside states, of latent attention, or a window."""
    if request.param == "trained":
        return pair
    if request.param == "none":
        return pair._replace(drafter=NoDrafter(pair.target))
    sizes = {"vocab_size": len(pair.tokenizer), "max_position_embeddings": 512}
    target = target_with_head(request.param, tmp_path, **sizes)
    return pair._replace(target=target, drafter=Eagle31Drafter.from_pretrained(tmp_path, target=target))


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_turns_are_the_targets_own_and_only_what_is_new_is_read(any_pair, temperature, request):
    session = ChatSession(*any_pair, max_new_tokens=12, temperature=temperature, context=500)
    for turn in ("Hi.", "Is it far?", None, "Which way?"):
        if turn is None:
            session.undo()
            continue
        with seeded(7):
            answer = session.ask(turn)
        assert answer.content == plain(any_pair, session)
        assert answer.stats.loop == "own", answer.stats.reason
    first, second, last = session.answers
    assert first.stats.prefilled_tokens == first.prompt_tokens
    name = request.node.callspec.params["any_pair"]
    if name in ("trained", "none"):  # whose answers are read as the tokens that were written
        new = second.prompt_tokens - first.prompt_tokens - first.stats.new_tokens
        assert second.stats.prefilled_tokens <= new + 2, "up to the first answer's last token everything is there"
    if name not in ("qwen3_5_text", "mellum"):  # states and windows are not cut back
        assert last.stats.prefilled_tokens <= last.prompt_tokens - first.prompt_tokens


def test_pieces_add_up_and_say_what_was_drafted(session):
    pieces = []
    answer = session.ask(USER_TURNS[0], pieces.append)
    assert "".join(piece.text for piece in pieces) == answer.content
    assert any(piece.drafted for piece in pieces)
    assert not all(piece.drafted for piece in pieces)
    assert answer.finish == "stop"


def test_undo_and_retry_go_back_and_write_the_same_text(pair, session):
    first = session.ask(USER_TURNS[0]).content
    second = session.ask(USER_TURNS[1]).content
    again = session.retry()
    assert again.content == second
    assert again.stats.prefilled_tokens <= 2, "the message was read already"
    assert session.undo() == USER_TURNS[1]
    assert session.ask("How about eight?").content == plain(pair, session)
    session.undo()
    session.undo()
    assert session.turns == []
    with pytest.raises(ConfigurationError, match="nothing has been said"):
        session.undo()
    assert session.ask(USER_TURNS[0]).content == first


def test_an_answer_that_is_stopped_stays_as_far_as_it_got(pair, session):
    count = 0

    def stop_soon(piece):
        nonlocal count
        count += 1
        if count == 4:
            session.stop()

    answer = session.ask(USER_TURNS[0], stop_soon)
    assert answer.finish == "stopped"
    assert 0 < answer.stats.new_tokens < 20
    assert session.turns[-1] == {"role": "assistant", "content": answer.content}
    follow_up = session.ask(USER_TURNS[1])
    assert follow_up.content == plain(pair, session)
    assert follow_up.stats.prefilled_tokens < follow_up.prompt_tokens


def test_a_system_prompt_and_a_temperature_count_from_the_next_answer_on(pair, session):
    session.ask(USER_TURNS[0])
    session.system = "You sell bus tickets."
    assert session.ask(USER_TURNS[1]).content == plain(pair, session)
    session.set_temperature(1.5)
    session.ask("And now?")
    with pytest.raises(ConfigurationError, match="from 0"):
        session.set_temperature(-1)


def test_a_conversation_that_is_full_says_so_and_stays_as_it_was(pair):
    session = ChatSession(*pair, context=60)
    session.ask(USER_TURNS[0])
    before = list(session.turns)
    with pytest.raises(ConfigurationError, match="60 are possible"):
        session.ask("many words " * 50)
    assert session.turns == before


def test_drawn_answers_that_another_loop_writes_get_no_cache_of_another_history(pair, session, monkeypatch):
    """Plain decoding believes a cache, and after `undo` it holds what is no longer said."""
    monkeypatch.setattr(routes, "why_noise_is_unknown", lambda device: "tried in a test")
    session.ask(USER_TURNS[0])
    session.set_temperature(1.0)
    for turn in (USER_TURNS[1], "How about eight?"):
        with seeded(7):
            answer = session.ask(turn)
        assert answer.stats.loop == "plain"
        assert answer.content == plain(pair, session)
        session.undo()
    session.set_temperature(0.0)
    assert session.ask(USER_TURNS[1]).content == plain(pair, session)
