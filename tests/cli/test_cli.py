"""The command line: each command, its figures, its errors, and what streaming shows."""

import json
import shlex
import subprocess
import sys
from io import StringIO
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, T5Config
from typer.testing import CliRunner

from eagle31_hf.benchmark.records import add_up
from eagle31_hf.checkpoints import read_checkpoint
from eagle31_hf.cli import app, comparison, terminal
from eagle31_hf.cli.comparison import Comparison, Difference
from eagle31_hf.decoding.calibration.bare_meter import BareCosts
from eagle31_hf.demo import CONVERSATIONS, drafter_path, target_path
from eagle31_hf.errors import CheckpointNotFoundError
from eagle31_hf.generation_config import Eagle31GenerationConfig
from eagle31_hf.stats import SpeculationStats
from eagle31_hf.target.precision import quick_dtype

TARGET, DRAFTER = str(target_path()), str(drafter_path())
PROMPT = "What is the weather going to be like in Portland this weekend?"


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def run(*arguments, code=0):
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": "100"})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    return result


def error_of(*arguments):
    result = run(*arguments, code=1)
    lines = result.stderr.splitlines()
    assert len(lines) == 1, "an error is one line"
    assert lines[0].startswith("error: ")
    assert not result.stdout
    return lines[0]


# --- commands ---------------------------------------------------------------------------------------------------------


def test_version():
    assert run("--version").stdout.startswith("eagle31-hf ")


@pytest.mark.slow
def test_demo_shows_the_ceiling_first_and_the_table_last(tmp_path, monkeypatch):
    monkeypatch.setattr(comparison, "TIMED_ROUNDS", 1)
    out = run("demo", "--json", tmp_path / "demo.json").stdout
    lines = out.splitlines()
    assert lines[0].startswith("Theoretical speedup ")
    assert all(word in out for word in ("Bella Luna", "plain generate", "EAGLE", "acceptance length"))
    assert max(map(len, lines)) <= terminal.WIDTH
    record = json.loads((tmp_path / "demo.json").read_text())
    assert record["dtype"] == str(quick_dtype(torch.bfloat16, "cpu")).removeprefix("torch.")
    assert record["same_text"] is True
    assert record["stats"]["acceptance_length"] > 3
    assert record["new_tokens"] == record["stats"]["new_tokens"] > 100


def test_generate_compares_any_pair(tmp_path):
    path = tmp_path / "figures.json"
    out = run("generate", "--target", TARGET, "--drafter", DRAFTER, "--prompt", PROMPT, "--dtype", "float32",
              "--draft-tokens", 3, "--max-new-tokens", 12, "--json", path).stdout  # fmt: skip
    assert "yes" in out
    record = json.loads(path.read_text())
    assert (record["target"], record["dtype"]) == (TARGET, "float32")
    assert record["same_text"] is True
    assert record["differences"] == []
    assert record["new_tokens"] == 12
    assert len(record["plain_tok_per_s"]) == len(record["eagle_tok_per_s"]) == comparison.TIMED_ROUNDS
    assert record["bare_costs"]["verified_tokens"] == 4
    assert len(record["stats"]["drafted_at"]) == 3


def test_generate_without_comparison_samples_a_tree(tmp_path):
    path = tmp_path / "figures.json"
    out = run("generate", "--prompt", PROMPT, "--no-compare", "--temperature", 0.8, "--tree-width", 2, "--draft-tokens",
              3, "--tree-size", 6, "--max-new-tokens", 8, "--json", path).stdout  # fmt: skip
    assert "drafted and accepted" in out
    assert "plain generate" not in out
    stats = json.loads(path.read_text())["stats"]
    assert stats["new_tokens"] <= 8
    assert stats["drafted"] <= 5 * stats["rounds"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_generate_on_a_gpu(tmp_path):
    run("generate", "--prompt", PROMPT, "--device", "cuda", "--json", tmp_path / "figures.json")
    assert json.loads((tmp_path / "figures.json").read_text())["same_text"] is True


def test_inspect_tells_what_a_checkpoint_is(tmp_path):
    out = run("inspect", DRAFTER, "--json", tmp_path / "facts.json").stdout
    assert "EAGLE 3.1" in out
    assert "4,096 of 8,192" in out
    assert "midlayer.self_attn.q_proj.weight" in out
    assert json.loads((tmp_path / "facts.json").read_text())["draft_vocab_size"] == 4096


@pytest.mark.parametrize("layout", ["plain", "specforge", "speculators", "torchspec"])
def test_convert_and_inspect_every_layout_that_can_hold_the_drafter(tmp_path, layout):
    converted = tmp_path / "converted"
    run("convert", DRAFTER, converted, "--format", layout)
    assert layout in run("inspect", converted).stdout
    before, after = read_checkpoint(DRAFTER), read_checkpoint(converted)
    assert after.format == layout
    assert before.tensors.keys() == after.tensors.keys()
    assert all(torch.equal(tensor, after.tensors[name]) for name, tensor in before.tensors.items())


def test_convert_says_what_a_layout_would_lose_and_goes_on_only_when_told(tmp_path):
    arguments = ("convert", DRAFTER, tmp_path / "out", "--format", "modelopt")
    message = error_of(*arguments)
    assert all(words in message for words in ("speculators", "--allow-loss", "aux_norm", "norm_output"))
    assert not (tmp_path / "out").exists()
    shown = run(*arguments, "--allow-loss").stdout
    assert "left out, so train it again" in shown
    assert not read_checkpoint(tmp_path / "out").config.is_eagle31


def test_convert_overwrites_only_when_told(tmp_path):
    run("convert", DRAFTER, tmp_path)
    before = (tmp_path / "config.json").read_text()
    assert "--force" in error_of("convert", DRAFTER, tmp_path, "--format", "specforge")
    assert (tmp_path / "config.json").read_text() == before
    run("convert", DRAFTER, tmp_path, "--format", "specforge", "--force")
    assert read_checkpoint(tmp_path).format == "specforge"


@pytest.mark.parametrize(("answer", "code", "layout"), [("n\n", 1, "plain"), ("y\n", 0, "specforge")])
def test_convert_asks_on_a_terminal(tmp_path, monkeypatch, answer, code, layout):
    run("convert", DRAFTER, tmp_path)
    monkeypatch.setattr("eagle31_hf.cli.convert._can_ask", lambda: True)
    command = ["convert", DRAFTER, str(tmp_path), "--format", "specforge"]
    assert CliRunner().invoke(app, command, input=answer).exit_code == code
    assert read_checkpoint(tmp_path).format == layout


def test_convert_writes_the_target_down_and_prints_lines_to_paste(tmp_path):
    folder = tmp_path / "a drafter's folder"
    shown = run("convert", DRAFTER, folder, "--target", TARGET).stdout.splitlines()
    (vllm,) = [shlex.split(line) for line in shown if line.strip().startswith("vllm serve")]
    (sglang,) = [shlex.split(line) for line in shown if "sglang.launch_server" in line]
    assert vllm[2] == TARGET
    assert json.loads(vllm[4])["model"] == str(folder)
    assert sglang[sglang.index("--speculative-draft-model-path") + 1] == str(folder)
    assert any("not run by us" in line for line in shown)
    run("convert", folder, tmp_path / "speculators", "--format", "speculators")
    verifier = json.loads((tmp_path / "speculators" / "config.json").read_text())["speculators_config"]["verifier"]
    assert verifier == {"name_or_path": TARGET, "architectures": ["LlamaForCausalLM"]}


def test_convert_says_that_a_loader_will_ask_for_the_target(tmp_path):
    shown = run("convert", DRAFTER, tmp_path / "out", "--format", "speculators").stdout
    assert "convert it with --target" in shown
    assert "vllm serve TARGET" in shown
    assert "SGLang does not read it" in shown
    assert "no target at" in error_of("convert", DRAFTER, tmp_path / "other", "--target", "nobody/nothing")


def test_convert_copies_from_the_target_what_a_layout_cannot_share(tmp_path):
    message = error_of("convert", DRAFTER, tmp_path / "out", "--format", "nemo")
    assert "--target" in message
    assert "--allow-loss" not in message
    run("convert", DRAFTER, tmp_path / "out", "--format", "nemo", "--target", TARGET)
    target = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.bfloat16)
    written = read_checkpoint(tmp_path / "out")
    assert torch.equal(written.tensors["embed_tokens.weight"], target.get_input_embeddings().weight)


# --- errors -----------------------------------------------------------------------------------------------------------


def test_an_unknown_hub_id_is_named_with_a_way_out():
    message = error_of("inspect", "nobody/nothing")
    assert "nobody/nothing" in message
    assert "local folder" in message
    message = error_of("generate", "--target", "nobody/nothing", "--drafter", DRAFTER, "--prompt", "x")
    assert "nobody/nothing" in message
    assert "local folder" in message


def test_a_missing_folder_and_a_folder_without_a_model_are_told_apart(tmp_path):
    assert "no such folder" in error_of("generate", "--target", tmp_path / "no", "--drafter", DRAFTER, "--prompt", "x")
    assert "config.json" in error_of("generate", "--target", tmp_path, "--drafter", DRAFTER, "--prompt", "x")
    AutoTokenizer.from_pretrained(TARGET).save_pretrained(tmp_path)
    LlamaConfig().save_pretrained(tmp_path)
    message = error_of("generate", "--target", tmp_path, "--drafter", DRAFTER, "--prompt", "x")
    assert "holds no complete target" in message


def test_a_target_needs_a_drafter():
    assert "--drafter" in error_of("generate", "--target", TARGET, "--prompt", "x")


def test_a_target_with_another_vocabulary_is_refused(tmp_path):
    other = LlamaConfig(
        hidden_size=256, intermediate_size=64, num_hidden_layers=6, num_attention_heads=4, vocab_size=99
    )
    LlamaForCausalLM(other).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(TARGET).save_pretrained(tmp_path)
    message = error_of("generate", "--target", tmp_path, "--drafter", DRAFTER, "--prompt", "x")
    assert "8192" in message
    assert "99" in message


def test_an_encoder_decoder_target_is_refused(tmp_path):
    T5Config().save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(TARGET).save_pretrained(tmp_path)
    message = error_of("generate", "--target", tmp_path, "--drafter", DRAFTER, "--prompt", "x")
    assert "decoder-only" in message


def test_an_unknown_layout_is_named_before_anything_is_read(tmp_path):
    message = error_of("convert", "nobody/nothing", tmp_path / "out", "--format", "gguf")
    assert "gguf" in message
    assert "speculators" in message


def test_traceback_shows_the_whole_error():
    with pytest.raises(CheckpointNotFoundError):
        run("inspect", "nobody/nothing", "--traceback")


def test_json_into_a_missing_folder_is_refused_before_measuring(tmp_path):
    result = run("demo", "--json", tmp_path / "no" / "demo.json", code=2)
    assert "no folder" in " ".join(result.stderr.split())


# --- streaming --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(TARGET)


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_pieces_join_to_the_decoded_text_and_never_split_a_character(tokenizer, data):
    text = data.draw(st.text(alphabet=st.characters(codec="utf-8", exclude_categories=("Cs",)), max_size=20))
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    if data.draw(st.booleans()):  # any ids at all, broken characters among them
        ids = data.draw(st.lists(st.integers(0, len(tokenizer) - 1), max_size=30))
    decoder = terminal.IncrementalDecoder(tokenizer)
    pieces = [decoder.feed(token) for token in ids]
    assert not any(piece.endswith("\ufffd") for piece in pieces)
    assert "".join(pieces) + decoder.flush() == tokenizer.decode(
        ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
    )


def stream(tokenizer, blocks, width=100):
    console = Console(file=StringIO(), record=True, width=width, force_terminal=True, color_system="standard")
    streamer = terminal.AcceptanceStreamer(tokenizer, console)
    streamer.put(torch.zeros(1, 5, dtype=torch.long))  # the prompt
    for block in blocks:
        streamer.put(torch.tensor(block))
    streamer.end()
    return console.export_text(clear=False, styles=True), console.export_text()


def test_accepted_tokens_are_green_and_the_last_of_a_block_is_not(tokenizer):
    first, second, third = tokenizer("We like bread", add_special_tokens=False)["input_ids"][:3]
    styled, plain = stream(tokenizer, [[first], [second, third]])
    words = [tokenizer.decode([token]).strip() for token in (first, second, third)]
    assert plain.strip() == tokenizer.decode([first, second, third])
    assert f"\x1b[32m{words[1]}\x1b[0m" in styled
    assert f"\x1b[32m{words[0]}" not in styled
    assert f"\x1b[32m{words[2]}" not in styled


def test_lines_break_between_words_and_lose_nothing(tokenizer):
    text = "The number of pencils in the box is 24 and the rest of them are somewhere else.\n#### 24"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    _, plain = stream(tokenizer, [ids[i : i + 3] for i in range(0, len(ids), 3)], width=20)
    assert max(map(len, plain.splitlines())) <= 20
    assert plain.split() == text.split()
    assert not any(line.endswith(" ") for line in plain.splitlines())


# --- figures ----------------------------------------------------------------------------------------------------------


def test_ceiling_is_tokens_per_round_over_its_cost_in_plain_steps():
    costs = BareCosts(target_step_s=0.010, verify_s=0.012, drafter_step_s=0.001, absorb_s=0.002, verified_tokens=7,
                      drafter_steps=6)  # fmt: skip
    assert costs.ceiling(4.5) == pytest.approx(4.5 * 10 / (12 + 2 + 5))


def test_stats_of_several_calls_add_up():
    one, two = SpeculationStats(new_tokens=3), SpeculationStats(new_tokens=4, loop="stock", reason="because")
    one.record_round(depth=1, nodes=1, accepted=[1])
    two.record_round(depth=2, nodes=2, accepted=[0])
    total = add_up([one, two])
    assert (total.rounds, total.drafted, total.accepted, total.new_tokens) == (2, 3, 1, 7)
    assert (total.drafted_at, total.reached_at, total.accepted_at) == ([2, 1], [2, 0], [1, 0])
    assert (total.loop, total.reason) == ("stock", "because")


def comparison_with(*differences, samples=False):
    return Comparison((10.0, 12.0, 11.0), (20.0, 30.0, 22.0), 5, 1, samples, differences, SpeculationStats())


def test_same_text_allows_ties_and_nothing_else():
    tie = Difference(prompt=0, position=3, logit_gap=0.01, rounding=0.01)
    real = Difference(prompt=0, position=3, logit_gap=0.5, rounding=0.01)
    assert comparison_with().same_text is True
    assert comparison_with(tie).same_text is True
    assert comparison_with(tie, real).same_text is False
    assert comparison_with(samples=True).same_text is None
    assert comparison_with().speedup == pytest.approx(2.0)


def test_a_difference_is_found_where_it_begins_and_judged_by_the_targets_own_logits(tokenizer):
    model = LlamaForCausalLM.from_pretrained(TARGET, dtype=torch.float32)
    wishes = Eagle31GenerationConfig(num_assistant_tokens=4)
    drafter = SimpleNamespace(generation_config=wishes, stats=None, device=torch.device("cpu"))
    pair = SimpleNamespace(target=model, drafter=drafter)
    chat = tokenizer.apply_chat_template(CONVERSATIONS[0], add_generation_prompt=True, return_tensors="pt")
    prompt = {"input_ids": chat["input_ids"]}
    plain = model.generate(**prompt, do_sample=False, max_new_tokens=6)[0, prompt["input_ids"].shape[1] :]
    other = plain.clone()
    other[2] += 1
    (found,) = comparison._differences(pair, [prompt], [plain], [other])
    assert found.position == 2
    assert not found.is_tie
    assert comparison._differences(pair, [prompt], [plain], [plain.clone()]) == ()
    (shorter,) = comparison._differences(pair, [prompt], [plain], [plain[:3]])
    assert (shorter.position, shorter.is_tie) == (3, False)


def test_plan_says_what_fits_and_leaves_with_1_where_it_does_not(tmp_path):
    figures = tmp_path / "plan.json"
    result = run("plan", TARGET, "--card", "RTX 3060", "--context", "1024", "--frontier", "--json", figures)
    assert "target weights" in result.output
    assert json.loads(figures.read_text())["settings"]["context"] == 1024
    run("plan", TARGET, "--card", "1GiB", "--context", "2000000", code=1)


def test_plan_names_the_cards_it_knows():
    assert "RTX 4090" in run("plan", TARGET, "--card", "RTX 9999", code=1).output


@pytest.mark.slow
def test_the_command_starts_without_the_trainer():
    code = "import sys, eagle31_hf.cli; print([m for m in ('transformers.trainer', 'datasets') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_train_refuses_a_missing_prompt_file_in_one_line(tmp_path):
    missing = tmp_path / "nothing.jsonl"
    result = run("train", TARGET, "--prompts", missing, "--out", tmp_path / "out", code=1)
    assert str(missing.name) in result.output
