"""Training data: rows, masks by template, the draft vocabulary, packing, stored features, texts the target writes."""

from __future__ import annotations

import io
import json
import shutil
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
from accelerate import PartialState
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer

from eagle31_hf import Eagle31Drafter
from eagle31_hf.demo import target_path
from eagle31_hf.errors import ConfigurationError, TrainingError
from eagle31_hf.training import train
from eagle31_hf.training.data.conversations import Conversation, read_conversations
from eagle31_hf.training.data.disk import require_disk
from eagle31_hf.training.data.packing import PackedDocuments, collate, pack
from eagle31_hf.training.data.regeneration import RegenerationSettings, _batches, _temperature, regenerate
from eagle31_hf.training.data.rendering import Document, render, render_documents
from eagle31_hf.training.data.vocabulary import build_vocabulary, check_vocabulary, count_supervised, read_vocabulary
from eagle31_hf.training.distillation.evaluation import EvaluationPrompt, evaluation_prompts
from eagle31_hf.training.distillation.features import (
    MANIFEST,
    FeatureManifest,
    StoredFeatures,
    compute_features,
    store_features,
)
from eagle31_hf.training.distillation.objective import DistillationSettings
from eagle31_hf.training.distillation.training_model import DistillationModel
from eagle31_hf.training.preparation import Preparation
from eagle31_hf.training.settings import TrainingSettings
from eagle31_hf.training.setup import resolve
from eagle31_hf.training.train import train_drafter
from hub_stand_in import StandInHub
from warm_processes import finish, start_group

CHAT = [
    {"role": "user", "content": "Two apples cost 4 dollars. What do five cost?"},
    {"role": "assistant", "content": "One costs 2 dollars."},
    {"role": "user", "content": "And five?"},
    {"role": "assistant", "content": "10 dollars."},
]
UNMARKED = (  # the same turns without generation marks
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
FORGETFUL = (  # reasoning of earlier turns left out, as Qwen3's does
    "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' and loop.last %}Thinking. {% endif %}"
    "{{ m.content }}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
ONLY_USERS = "{% for m in messages if m.role == 'user' %}<|user|>{{ m.content }}<|end|>{% endfor %}"


@pytest.fixture
def tokenizer():
    return AutoTokenizer.from_pretrained(target_path())


@pytest.fixture(scope="module")
def target():
    return AutoModelForCausalLM.from_pretrained(target_path(), dtype=torch.float32).eval().requires_grad_(False)


@pytest.fixture(scope="module")
def drafter(target) -> Eagle31Drafter:
    torch.manual_seed(0)
    return Eagle31Drafter.from_target(target, draft_vocab_size=64)


def chat(**fields) -> Conversation:
    return Conversation("row-7", "sums", tuple(CHAT), **fields)


def learned(tokenizer, conversation: Conversation) -> str:
    ids, mask = render(tokenizer, conversation)
    assert len(ids) == len(mask)
    return tokenizer.decode([token for token, on in zip(ids, mask, strict=True) if on])


# --- rows -------------------------------------------------------------------------------------------------------------


def test_every_form_of_row_is_read(tmp_path: Path) -> None:
    rows = [
        {"id": "a", "conversations": CHAT},
        {"messages": CHAT, "category": "maths"},
        {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]},
        {"question_id": 81, "category": "writing", "turns": ["First.", "Second."]},
        {"question": "Why?", "answer": "Because."},
        {"text": "Plain text."},
    ]
    file = tmp_path / "mixed.jsonl"
    file.write_text("\n\n".join(map(json.dumps, rows)))
    found = read_conversations([tmp_path])
    assert [c.id for c in found] == ["a", "mixed-3", "mixed-5", "81", "mixed-9", "mixed-11"]
    assert [c.category for c in found] == ["mixed", "maths", "mixed", "writing", "mixed", "mixed"]
    assert found[2].messages[1] == {"role": "assistant", "content": "Hello"}
    assert [c.is_text for c in found] == [False] * 5 + [True]
    assert len(read_conversations([file], limit=2)) == 2


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"id": ', r"bad\.jsonl, line 2: not JSON"),
        ("[1, 2]", r"bad\.jsonl, line 2: a row is list"),
        ('{"answer": "x"}', r"line 2: no messages \(keys: answer\)"),
        ('{"messages": ["x"]}', r"line 2, messages\[0\] is str"),
        ('{"messages": [{"content": "x"}]}', r"line 2, messages\[0\] has no role"),
        ('{"messages": [{"role": "user", "content": 3}]}', r"line 2, messages\[0\]: content is int"),
        ('{"messages": [{"from": "robot", "value": "x"}]}', r"line 2, messages\[0\] has no role"),
        ('{"prompt": "x", "answer_ids": ["y"]}', r"line 2: answer_ids holds something else"),
        ('{"id": "same", "prompt": "x"}', "two rows have the id 'same'"),
    ],
)
def test_a_bad_row_is_named(tmp_path: Path, line: str, message: str) -> None:
    file = tmp_path / "bad.jsonl"
    file.write_text('{"id": "same", "prompt": "Hello"}\n' + line + "\n")
    with pytest.raises(TrainingError, match=message):
        read_conversations([file])


def test_sources_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="no file or folder"):
        read_conversations([tmp_path / "missing.jsonl"])
    with pytest.raises(TrainingError, match=r"holds no \*\.jsonl"):
        read_conversations([tmp_path])
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(TrainingError, match="no conversations"):
        read_conversations([tmp_path])
    (tmp_path / "latin.jsonl").write_bytes(b'{"prompt": "\xe9"}\n')
    with pytest.raises(TrainingError, match="not UTF-8"):
        read_conversations([tmp_path / "latin.jsonl"])


# --- masks ------------------------------------------------------------------------------------------------------------


def test_generation_marks_say_what_is_learned(tokenizer) -> None:
    assert learned(tokenizer, chat()) == "One costs 2 dollars.<|end|>10 dollars.<|end|>"


def test_without_marks_the_mask_is_what_the_assistant_turn_adds(tokenizer) -> None:
    tokenizer.chat_template = UNMARKED
    assert learned(tokenizer, chat()) == "One costs 2 dollars.<|end|>10 dollars.<|end|>"


def test_a_template_that_renders_the_last_turn_otherwise(tokenizer) -> None:
    """What only a shorter conversation would show is not in the text, so it cannot be learned."""
    tokenizer.chat_template = FORGETFUL
    assert learned(tokenizer, chat()).endswith("Thinking. 10 dollars.<|end|>")


def test_the_targets_own_ids_are_used_as_they_are(tokenizer) -> None:
    answer = [*tokenizer("1")["input_ids"], *tokenizer("0")["input_ids"], tokenizer.eos_token_id]
    ids, mask = render(tokenizer, chat(answer_ids=tuple(answer)))
    assert ids[-len(answer) :] == answer
    assert mask[-len(answer) :] == [True] * len(answer)
    earlier = tokenizer.decode([t for t, on in zip(ids[: -len(answer)], mask, strict=False) if on])
    assert earlier == "One costs 2 dollars.<|end|>"


def test_templates_and_rows_without_an_assistant_are_named(tokenizer) -> None:
    with pytest.raises(TrainingError, match="row-7 has no assistant turn"):
        render(tokenizer, replace(chat(), messages=tuple(CHAT[:1])))
    tokenizer.chat_template = ONLY_USERS
    with pytest.raises(TrainingError, match="row-7: the target's chat template renders no assistant turn"):
        render(tokenizer, chat())
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(TrainingError, match=r"row-7: .*roles must alternate"):
        render(tokenizer, chat())
    tokenizer.chat_template = None
    with pytest.raises(TrainingError, match=r"row-7 is a chat, but .* no chat template"):
        render(tokenizer, chat())


def test_long_conversations_are_counted(tokenizer) -> None:
    rows = [chat(), Conversation("short", "sums", tuple(CHAT[:2]))]
    length = len(render(tokenizer, rows[1])[0])
    cut = render_documents(rows, tokenizer, max_length=length)
    assert (cut.truncated, cut.dropped, [len(d.input_ids) for d in cut.documents]) == (1, 0, [length, length])
    dropped = render_documents(rows, tokenizer, max_length=length, too_long="drop")
    assert (dropped.truncated, dropped.dropped, len(dropped.documents)) == (0, 1, 1)
    with pytest.raises(TrainingError, match=f"row-7 has .* the limit is {length}"):
        render_documents(rows, tokenizer, max_length=length, too_long="error")
    with pytest.raises(TrainingError, match="no document is left"):
        render_documents(rows, tokenizer, max_length=4)
    everything = render_documents(rows, tokenizer, max_length=length, supervise="all")
    assert everything.supervised_tokens == everything.tokens


def test_evaluation_prompts_end_with_an_early_user_message(tokenizer) -> None:
    turns = tuple({"role": "user" if i % 2 == 0 else "assistant", "content": f"turn {i}"} for i in range(9))
    (prompt,) = evaluation_prompts([Conversation("long", "a", turns)], tokenizer)
    text = tokenizer.decode(prompt.input_ids)
    assert text.endswith("turn 4<|end|><|assistant|>")
    with pytest.raises(TrainingError, match="late has no user message"):
        evaluation_prompts([Conversation("late", "a", turns[1:2])], tokenizer)


# --- vocabulary -------------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=50)
@given(data=st.data(), vocab_size=st.integers(1, 40))
def test_vocabulary_keeps_the_most_frequent(data, vocab_size: int) -> None:
    counts = torch.tensor(data.draw(st.lists(st.integers(0, 5), min_size=vocab_size, max_size=vocab_size)))
    size = data.draw(st.integers(1, vocab_size))
    vocabulary = build_vocabulary(counts, size)
    assert (vocabulary.ids.diff() > 0).all()
    assert torch.equal(vocabulary.d2t + torch.arange(size), vocabulary.ids)
    out = [i for i in range(vocab_size) if i not in vocabulary.ids.tolist()]
    assert max((int(counts[i]) for i in out), default=0) <= int(counts[vocabulary.ids].min())
    if counts.sum():
        assert vocabulary.coverage == pytest.approx(counts[vocabulary.ids].sum().item() / counts.sum().item())


def test_only_supervised_tokens_are_counted() -> None:
    counts = count_supervised([Document("a", [1, 2, 2, 3], [False, True, True, False])], 5)
    assert counts.tolist() == [0, 0, 2, 0, 0]
    with pytest.raises(TrainingError, match="b holds token id 9"):
        count_supervised([Document("b", [1, 9], [True, True])], 5)
    with pytest.raises(ConfigurationError, match=r"wanted 1\.\.5"):
        build_vocabulary(counts, 6)


def test_a_vocabulary_that_disagrees_with_the_head_is_refused(tmp_path: Path) -> None:
    vocabulary = build_vocabulary(torch.tensor([5, 0, 3, 0, 1]), 2)
    vocabulary.save(tmp_path / "v.json")
    stored = read_vocabulary(tmp_path / "v.json")
    check_vocabulary(stored, torch.tensor([0, 2]), 5, "v.json")
    with pytest.raises(TrainingError, match="1 ids agree"):
        check_vocabulary(stored, torch.tensor([0, 4]), 5, "v.json")
    with pytest.raises(TrainingError, match="vocabulary of 5"):
        check_vocabulary(stored, torch.tensor([0, 2]), 6, "v.json")
    for content in ("{", "{}", '{"vocab_size": 5, "draft_ids": [2, 2]}', '{"vocab_size": 2, "draft_ids": [0, 2]}'):
        (tmp_path / "bad.json").write_text(content)
        with pytest.raises(TrainingError, match=r"bad\.json"):
            read_vocabulary(tmp_path / "bad.json")


# --- packing ----------------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=50)
@given(lengths=st.lists(st.integers(1, 20), min_size=1, max_size=40), seed=st.integers(0, 99))
def test_packing_keeps_every_document_whole(lengths: list[int], seed: int) -> None:
    rows = pack(lengths, 20, seed=seed)
    assert sorted(number for row in rows for number in row) == list(range(len(lengths)))
    assert all(sum(lengths[number] for number in row) <= 20 for row in rows)
    assert len(rows) <= 2 * -(-sum(lengths) // 20)
    assert pack(lengths, 20, seed=seed) == rows


def test_packed_documents_do_not_see_each_other(target, drafter) -> None:
    generator = torch.Generator().manual_seed(0)
    documents = [
        Document(str(i), torch.randint(3, 8000, (length,), generator=generator).tolist(), [True] * length)
        for i, length in enumerate((9, 5, 7, 6))
    ]
    data = PackedDocuments(documents, 16, seed=1)
    rows = collate([data[i] for i in range(len(data))])
    packed = compute_features(drafter.require_binding(), rows["input_ids"], rows["position_ids"])
    for index, numbers in enumerate(data.rows):
        start = 0
        for number in numbers:
            ids = torch.tensor([documents[number].input_ids])
            alone = target(ids).logits[0]
            assert torch.allclose(packed.logits[index, start : start + ids.shape[1]], alone, atol=1e-3)
            start += ids.shape[1]
    assert max(map(len, data.rows)) > 1


# --- stored features --------------------------------------------------------------------------------------------------


def make_documents(count: int = 5) -> list[Document]:
    generator = torch.Generator().manual_seed(1)
    return [
        Document(str(i), torch.randint(3, 8000, (6 + i,), generator=generator).tolist(), [True] * (6 + i))
        for i in range(count)
    ]


def test_stored_features_train_as_online_ones(tmp_path: Path, drafter) -> None:
    documents, binding = make_documents(), drafter.require_binding()
    store_features(binding, documents, tmp_path, tokens_per_shard=16)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    stored = StoredFeatures(tmp_path, FeatureManifest.of(binding, documents), documents, row_length=16, seed=0)
    online = PackedDocuments(documents, 16, seed=0)
    model = DistillationModel(drafter, DistillationSettings(steps=2))
    with torch.no_grad():
        ours = model(**collate([stored[i] for i in range(2)])).steps
        theirs = model(**collate([online[i] for i in range(2)])).steps
    assert ours.sums.tolist() == pytest.approx(theirs.sums.tolist(), rel=1e-4)
    assert ours.supervised == theirs.supervised > 0


def test_storing_goes_on_where_it_was_stopped(tmp_path: Path, drafter) -> None:
    documents, binding = make_documents(), drafter.require_binding()
    store_features(binding, documents, tmp_path, tokens_per_shard=16)
    shards = sorted(tmp_path.glob("*.safetensors"))
    before = {shard: shard.read_bytes() for shard in shards}
    shards[1].unlink()
    with pytest.raises(TrainingError, match="lacks features-00001"):
        StoredFeatures(tmp_path, FeatureManifest.of(binding, documents), documents, row_length=16, seed=0)
    done: list[tuple[int, int]] = []
    store_features(binding, documents, tmp_path, tokens_per_shard=16, on_tokens=lambda *told: done.append(told))
    in_all = sum(len(document.input_ids) for document in documents)
    assert 0 < done[0][0] < in_all, "those of the shards that are there"
    assert done[-1] == (in_all, in_all)
    assert {shard: shard.read_bytes() for shard in shards} == before


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("target", "another/model"),
        ("aux_layers", [1, 5, 8]),
        ("head_input", "pre_norm"),
        ("dtype", "float16"),
        ("quantization", "nf4"),
        ("documents", "0"),
    ],
)
def test_features_made_otherwise_are_refused(tmp_path: Path, drafter, field: str, value) -> None:
    documents, binding = make_documents(2), drafter.require_binding()
    store_features(binding, documents, tmp_path)
    manifest = json.loads((tmp_path / MANIFEST).read_text())
    (tmp_path / MANIFEST).write_text(json.dumps({**manifest, field: value}))
    with pytest.raises(TrainingError, match=f"made otherwise \\({field}: stored"):
        StoredFeatures(tmp_path, FeatureManifest.of(binding, documents), documents, row_length=16, seed=0)
    with pytest.raises(TrainingError, match=field):
        store_features(binding, documents, tmp_path)
    (tmp_path / MANIFEST).write_text("{}")
    with pytest.raises(TrainingError, match="no readable feature manifest"):
        store_features(binding, documents, tmp_path)


def test_too_little_disk_is_said_before_writing(tmp_path: Path, drafter, monkeypatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**9, 10**9, 10))
    with pytest.raises(TrainingError, match=r"needs .* GB, but .* free"):
        store_features(drafter.require_binding(), make_documents(), tmp_path / "new")
    assert not list(tmp_path.glob("new/*"))
    with pytest.raises(TrainingError, match="checkpoints needs"):
        require_disk(tmp_path / "a" / "b", 10**6, "keeping checkpoints")


# --- texts the target writes ------------------------------------------------------------------------------------------


def conversations(count: int) -> list[Conversation]:
    return [replace(chat(), id=f"row-{i}", messages=tuple(CHAT[: 2 + 2 * (i % 2)])) for i in range(count)]


def test_the_target_writes_every_turn_after_its_own_turns(tmp_path: Path, target, tokenizer) -> None:
    how = RegenerationSettings(turns="each", temperatures=(0.0,), max_new_tokens=12, batch_size=3)
    written = regenerate(conversations(4), target, tokenizer, tmp_path / "c.jsonl", how)
    assert [c.id for c in written] == ["row-0", "row-1", "row-2", "row-3"]
    for row in written:
        prompt = tokenizer.apply_chat_template(
            list(row.messages[:-1]), add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        plain = target.generate(**prompt, do_sample=False, max_new_tokens=12)[0, prompt["input_ids"].shape[1] :]
        assert list(row.answer_ids) == plain.tolist()
        assert row.messages[-1]["content"] == tokenizer.decode(plain, skip_special_tokens=True)
        assert CHAT[1]["content"] not in [message["content"] for message in row.messages]


def test_writing_goes_on_after_a_kill(tmp_path: Path, target, tokenizer) -> None:
    how = RegenerationSettings(turns="last", temperatures=(0.0,), max_new_tokens=6, batch_size=2)
    file = tmp_path / "c.jsonl"
    whole = regenerate(conversations(5), target, tokenizer, file, how)
    content = file.read_bytes()
    file.write_bytes(content[: int(len(content) * 0.7)])  # in the middle of a line
    kept = file.read_bytes().count(b"\n")
    progress: list[int] = []
    again = regenerate(conversations(5), target, tokenizer, file, how, on_rows=progress.append)
    assert again == whole
    assert progress[0] == kept > 0
    with pytest.raises(TrainingError, match="max_new_tokens: 6, now 7"):
        regenerate(conversations(5), target, tokenizer, file, replace(how, max_new_tokens=7))


@given(
    lengths=st.lists(st.tuples(st.integers(0, 900), st.integers(0, 900)), max_size=40),
    size=st.integers(1, 7),
    turns=st.sampled_from(["each", "last"]),
)
def test_every_conversation_is_written_once_beside_its_like(lengths: list, size: int, turns: str) -> None:
    rows = [
        Conversation(str(i), "c", ({"role": "user", "content": "x" * a}, {"role": "assistant", "content": "x" * b}))
        for i, (a, b) in enumerate(lengths)
    ]
    batches = _batches(rows, RegenerationSettings(turns=turns, batch_size=size))
    assert sorted(row.id for batch in batches for row in batch) == sorted(row.id for row in rows)
    assert all(len(batch) == size for batch in batches[:-1])
    work = [[len(row.messages[1]["content"]).bit_length() for row in batch] for batch in batches]
    assert [length for batch in work for length in batch] == sorted((n for batch in work for n in batch), reverse=True)


def test_several_temperatures_share_the_conversations(tmp_path: Path, target, tokenizer) -> None:
    rows = conversations(12)
    how = RegenerationSettings(turns="last", temperatures=(0.0, 5.0, 0.0), max_new_tokens=8, batch_size=4)
    batches = _batches(rows, how)
    assert sorted(row.id for batch in batches for row in batch) == sorted(row.id for row in rows), "each once"
    assert all(len({_temperature(row, how) for row in batch}) == 1 for batch in batches)
    written = regenerate(rows, target, tokenizer, tmp_path / "mixed.jsonl", how)
    greedy = regenerate(rows, target, tokenizer, tmp_path / "greedy.jsonl", replace(how, temperatures=(0.0,)))
    same = [one.answer_ids == other.answer_ids for one, other in zip(written, greedy, strict=True)]
    assert same == [_temperature(row, how) == 0 for row in rows]
    assert {True, False} == set(same), "both kinds are there"


def test_a_target_that_says_nothing_of_sampling_writes_both_ways(tmp_path: Path, target) -> None:
    told = TrainingSettings(target=str(target_path()), prompts=("x.jsonl",), out=tmp_path)
    assert resolve(told, target).temperature == (0.0, 1.0)
    assert resolve(replace(told, temperature=(0.6,)), target).temperature == (0.6,)
    with mock.patch.object(target.generation_config, "do_sample", True):
        assert resolve(told, target).temperature == (), "as its generation config says"
    with pytest.raises(ConfigurationError, match="wanted 0"):
        replace(told, temperature=(-1.0,)).check()


def test_contexts_that_are_too_long_are_left_out(tmp_path: Path, target, tokenizer) -> None:
    how = RegenerationSettings(temperatures=(0.0,), max_new_tokens=4, max_prompt_tokens=3)
    assert regenerate(conversations(2), target, tokenizer, tmp_path / "c.jsonl", how) == []
    with pytest.raises(ConfigurationError, match="turns is 'some'"):
        regenerate([], target, tokenizer, tmp_path / "d.jsonl", replace(how, turns="some"))


def test_further_runs_read_what_the_first_let_the_target_write(tmp_path: Path, target, tokenizer) -> None:
    rows, judged = tmp_path / "rows.jsonl", tmp_path / "judged.jsonl"
    rows.write_text("\n".join(json.dumps({"id": f"r{i}", "conversations": CHAT[:2]}) for i in range(6)))
    judged.write_text(json.dumps({"id": "j", "conversations": CHAT[:2]}))
    told = TrainingSettings(
        target=str(target_path()), prompts=(str(rows),), held_out=(str(judged),), out=tmp_path / "out", max_rows=5,
        regenerate="last", max_new_tokens=4, max_length=64,
    )  # fmt: skip
    preparation = Preparation(resolve(told, target), target, tokenizer, Console(file=io.StringIO()))
    written = preparation.read_texts().documents.documents
    further = preparation.settings_of_further_runs()
    assert further == replace(preparation.settings, prompts=further.prompts, regenerate="none", max_rows=None)
    again = Preparation(further, target, tokenizer, Console(file=io.StringIO()))
    read = again.read_texts().documents.documents
    # In the order of the file, which is that of the batches.
    assert sorted(document.input_ids for document in read) == sorted(document.input_ids for document in written)
    assert len(read) == 5
    assert again.settings_of_further_runs() is further


# --- all together -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_from_prompts_to_a_drafter_and_on_after_an_interruption(tmp_path: Path, hub: StandInHub) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("\n".join(json.dumps({"id": f"r{i}", "conversations": CHAT[:2]}) for i in range(10)))
    told = TrainingSettings(
        target=str(target_path()), prompts=(str(rows),), out=tmp_path / "out", stage="both", regenerate="last",
        max_new_tokens=10, max_length=48, draft_vocab_size=256, max_steps=4, eval_steps=1, batch_rows=2, device="cpu",
        dtype="float32", stage2_share=0.5, eval_new_tokens=4, push="owner/drafter", license="mit", reward="text",
    )  # fmt: skip
    report = train_drafter(told)
    assert [stage.name for stage in report.stages] == ["stage1", "stage2"]
    assert [(stage.name, stage.steps) for stage in report.plan.stages] == [("stage1", 2), ("stage2", 2)]
    drafter = Eagle31Drafter.from_pretrained(told.out)
    assert drafter.config.is_eagle31
    assert drafter.config.draft_vocab_size == 256
    card = (told.out / "README.md").read_text()
    assert all(
        word in card for word in ("vllm serve", "sglang", "stage1", "stage2", "assistant_model", "without a drafter")
    )
    assert str(tmp_path) not in card
    stored = json.loads((told.out / "config.json").read_text())
    assert stored["target_model"] == {"name_or_path": "target", "architectures": ["LlamaForCausalLM"]}
    record = (told.out / "training_report.json").read_text()
    assert json.loads(record)["data"] == ["rows.jsonl"]
    assert str(tmp_path) not in record
    uploaded = hub.repositories["owner/drafter"].files
    assert {name: (told.out / name).read_bytes() for name in uploaded} == uploaded
    assert set(uploaded) == {"README.md", "config.json", "model.safetensors", "training_report.json"}
    with pytest.raises(TrainingError, match="earlier run"):
        train_drafter(told)
    shutil.rmtree(told.out / "stage2")
    again = train_drafter(replace(told, resume=True))
    assert again.stages[0] == report.stages[0]  # finished before: not trained again
    assert again.stages[1] == report.stages[1]  # trained again from the same drafter, data and seed


def test_a_run_that_cannot_be_resumed_or_makes_no_sense(tmp_path: Path) -> None:
    told = TrainingSettings(target=str(target_path()), prompts=("x.jsonl",), out=tmp_path / "none", resume=True)
    with pytest.raises(TrainingError, match="nothing to resume"):
        train_drafter(told)
    for wrong in ({"stage": "3"}, {"loss": "mse"}, {"stage": "2"}, {"prompts": ()}, {"ttt_steps": 0}):
        with pytest.raises(ConfigurationError):
            train_drafter(replace(told, **wrong))


def test_where_known_texts_cannot_tell_generate_does(tmp_path: Path, target, tokenizer, drafter, monkeypatch) -> None:
    told = TrainingSettings(target=str(target_path()), prompts=("x.jsonl",), out=tmp_path, eval_new_tokens=4)
    written = io.StringIO()
    PartialState(cpu=True)
    run = train._Run(told, target, tokenizer, Console(file=written))
    run.bf16 = False
    prompts = [EvaluationPrompt([1, 5, 9], "a"), EvaluationPrompt([1, 7, 8, 4], "b")]
    known = run._known_texts(drafter, prompts)
    assert [texts.temperature for texts in known] == [0.0, 1.0]  # what a target that says nothing of sampling writes at
    assert run._arguments("stage1", 4).metric_for_best_model == "acceptance_length"
    run.known = known
    assert run._arguments("stage1", 4).metric_for_best_model == "served_length"
    monkeypatch.setattr(target.generation_config, "repetition_penalty", 1.3)
    assert run._known_texts(drafter, prompts) == []
    assert "chosen by greedy acceptance alone: the target is served with RepetitionPenalty" in written.getvalue()


def joint_run(rows: str, out: str, batch_rows: int) -> None:
    train_drafter(TrainingSettings(
        target=str(target_path()), prompts=(rows,), out=Path(out), batch_rows=batch_rows,
        temperature=(0.0,),  # what is drawn depends on which rows are written together
        max_new_tokens=6, max_length=32, draft_vocab_size=256, epochs=1.0, eval_steps=9, eval_new_tokens=4,
        device="cpu", dtype="float32",
    ))  # fmt: skip


@pytest.mark.slow
def test_two_processes_write_and_train_as_one(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("\n".join(json.dumps({"id": f"r{i}", "conversations": CHAT[:2]}) for i in range(10)))
    joint_run(str(rows), str(tmp_path / "1"), batch_rows=2)
    for process in start_group(2, joint_run, str(rows), str(tmp_path / "2"), 1, log=tmp_path / "log"):
        assert finish(process) == 0, [log.read_text()[-3000:] for log in tmp_path.glob("log.*")]
    one, two = (json.loads((tmp_path / name / "training_report.json").read_text()) for name in ("1", "2"))
    for name in ("rows", "tokens", "supervised_tokens", "coverage"):
        assert one["plan"][name] == two["plan"][name], name
    assert one["plan"]["stages"][0]["steps"] == two["plan"]["stages"][0]["steps"]
    vocabularies = [(tmp_path / name / "draft_vocabulary.json").read_text() for name in ("1", "2")]
    assert vocabularies[0] == vocabularies[1]
    assert two["stages"][0]["loss"] == pytest.approx(one["stages"][0]["loss"], rel=1e-3)
    assert (tmp_path / "2" / "data" / "conversations-1.jsonl").exists()
