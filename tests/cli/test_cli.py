"""The command line: each command, its figures, its errors, and what streaming shows."""

import json
import shlex
import socket
import subprocess
import sys
from io import StringIO

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, T5Config
from typer.testing import CliRunner

from eagle31_hf.benchmark.calls import DIFFERENT, REFERENCE, SAME, SAMPLED, TIE, CallRecord, Drafting, Verdict
from eagle31_hf.benchmark.pair import pair_settings
from eagle31_hf.benchmark.record_file import Records
from eagle31_hf.benchmark.records import add_up
from eagle31_hf.benchmark.summary import summarise
from eagle31_hf.checkpoints import read_checkpoint
from eagle31_hf.cli import app, generate, pairs, terminal
from eagle31_hf.cli.wrapped_writer import WrappedWriter
from eagle31_hf.decoding.calibration.bare_meter import BareCosts
from eagle31_hf.demo import drafter_path, target_path
from eagle31_hf.errors import CheckpointNotFoundError
from eagle31_hf.stats import SpeculationStats
from eagle31_hf.target.precision import quick_dtype
from helpers import configured, drafter_of, use_fixed_shapes_only

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
def test_demo_writes_first_and_then_measures_four_methods_in_one_run(tmp_path, monkeypatch):
    use_fixed_shapes_only(monkeypatch)  # real graphs take minutes; what they compute is tested elsewhere
    monkeypatch.setattr(generate, "REPEATS", 1)
    out = run("demo", "--json", tmp_path / "demo.json").stdout
    assert out.index("Bella Luna") < out.index("Compiling") < out.index("ceiling")
    assert max(map(len, out.splitlines())) <= terminal.WIDTH
    record = json.loads((tmp_path / "demo.json").read_text())
    assert record["run"]["pair"]["dtype"] == str(quick_dtype(torch.bfloat16, "cpu")).removeprefix("torch.")
    assert record["same_text"] is True
    methods = {method["method"]: method for method in record["methods"]}
    assert list(methods) == ["plain generate", "plain compiled", "chain", "chain compiled"]
    assert all(f"{name} compiled, greedy, batch 1" in record["warm_up_s"] for name in ("plain", "chain"))
    for name in ("chain", "chain compiled"):
        assert methods[name]["acceptance_length"] > 3
        assert methods[name]["ceiling"] > 1
        assert methods[name]["new_tokens"] == methods["plain generate"]["new_tokens"] > 100


def test_generate_compares_any_pair(tmp_path):
    path = tmp_path / "figures.json"
    out = run("generate", "--target", TARGET, "--drafter", DRAFTER, "--prompt", PROMPT, "--dtype", "float32",
              "--draft-tokens", 3, "--max-new-tokens", 12, "--json", path).stdout  # fmt: skip
    assert "yes" in out
    record = json.loads(path.read_text())
    assert (record["target"], record["run"]["pair"]["dtype"]) == (TARGET, "float32")
    assert record["run"]["pair"]["drafter"]["name"] == "drafter"
    assert record["same_text"] is True
    plain, eagle = record["methods"]
    assert (plain["answers"], eagle["answers"]) == ({"reference": 3}, {"same": 3})
    assert plain["new_tokens"] == eagle["new_tokens"] == generate.REPEATS * 12
    assert len(eagle["accepted_at"]["cumulative"]) == 3
    assert eagle["ceiling"] > 0


def test_generate_measures_what_the_drafter_is_told_to_do(tmp_path):
    drafter = drafter_of("llama")
    with configured(drafter, draft_top_k=3, num_assistant_tokens=2, draft_tree_size=None):
        told = pair_settings(drafter, new_tokens=8, temperature=0.5, repeats=1, compiled=True)
    assert told.methods == ("plain generate", "plain compiled", "tree", "tree compiled")
    assert (told.depth, told.tree_width, told.tree_size) == (2, 3, 12)
    assert told.at(0.5).to_generate() == {"max_new_tokens": 8, "do_sample": True, "temperature": 0.5}
    with configured(drafter, num_assistant_tokens=4):
        told = pair_settings(drafter, new_tokens=8, temperature=0.0, repeats=1, compiled=False)
    assert (told.methods, told.depth) == (("plain generate", "chain"), 4)


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


def test_lines_behind_the_first_are_indented_and_a_label_waits_for_a_word():
    console = Console(file=StringIO(), width=20, record=True)
    writer = WrappedWriter(console, 20, "  > ", 4)
    assert not console.export_text(clear=False), "what is logged before the text has a line of its own"
    writer.add("The number of pencils\n\nis 24.")
    writer.end()
    assert console.export_text() == "  > The number of\n    pencils\n\n    is 24.\n"


def test_a_base_model_goes_on_with_its_prompt_and_no_roles_are_shown(tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    tokenizer.chat_template = None
    AutoModelForCausalLM.from_pretrained(TARGET).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    out = run("generate", "--target", tmp_path, "--drafter", DRAFTER, "--prompt", "The weather in Portland",
              "--no-compare", "--max-new-tokens", 4).stdout  # fmt: skip
    assert "The weather in Portland" in out
    assert not {"user:", "assistant:"} & set(out.split())


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


@pytest.mark.parametrize(
    ("verdict", "shown", "told"),
    [
        (Verdict(SAME), "yes", ""),
        (Verdict(TIE, 3, 0.01, 0.01), "yes, up to ties", "EAGLE, p/1, differs from its token 4 on: a tie in float32"),
        (Verdict(DIFFERENT, 3, 0.5, 0.01), "NO", "EAGLE, p/1, differs from its token 4 on: not a tie"),
        (Verdict(SAMPLED), "sampled", "Sampling: the texts differ by chance"),
    ],
)
def test_the_table_says_whether_the_text_is_the_targets_own(verdict, shown, told):
    def call(method, seconds, verdict, bare_round_s=None):
        drafting = Drafting(2, 6, 4, [2], [2], [2], 0.0, 0.1, 0.1, 0.0, passes=2) if method == "chain" else None
        served_by = "own" if drafting else ""
        return CallRecord("turn", method, 0.0, 0, 1, 0, ["p/1"], "p", "p", 5, 6, seconds, 0.1, ["t"], drafting=drafting,
                          bare_round_s=bare_round_s, served_by=served_by, verdicts=[verdict])  # fmt: skip

    calls = [call("plain generate", 0.6, Verdict(REFERENCE)), call("chain", 0.4, verdict, 0.1)]
    run = {"pair": {"dtype": "float32"}}
    summary = summarise(Records("test", run, calls))
    assert summary.methods[1].ceiling == pytest.approx(3.0 * 0.1 / 0.1)  # 3 tokens a round, 0.1 s each when plain
    console = Console(record=True, width=100, file=StringIO())
    console.print(terminal.pair_table(summary))
    assert f" {shown} " in console.export_text().splitlines()[4] + " "
    assert any(str(note).startswith(told) for note in terminal.pair_notes(summary)) or not told


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


@pytest.mark.parametrize("option", [("--schedule", "pid"), ("--tree-width", 2), ("--acceleration", "compile")])
def test_serve_refuses_what_a_running_batch_cannot_draft(option):
    told = run("serve", "--target", "nowhere", *option, code=1)
    assert f"serve cannot do {option[0]} {option[1]}" in told.output


def test_serve_wants_the_origin_of_a_page_and_no_address_in_it():
    assert "scheme, host and port" in error_of("serve", "--allow-origin", "http://localhost:3000/chat")
    assert "scheme, host and port" in error_of("serve", "--allow-origin", "*")


def test_serve_needs_a_plan_with_a_row_to_read_prompts_in(tmp_path):
    path = tmp_path / "plan.json"
    run("plan", TARGET, "--drafter", DRAFTER, "--card", "this machine", "--context", 256, "--batch", 3, "--json", path)
    told = run("serve", "--port", 0, "--memory", path, "--max-batch", 3, code=1)
    assert "for 3 rows, and --max-batch 3 takes 4" in told.stderr
    assert "pass --max-batch 2" in told.stderr


def test_serve_says_that_a_port_is_taken_before_it_loads_anything():
    with socket.create_server(("127.0.0.1", 0)) as other:
        told = run("serve", "--target", "nowhere", "--port", other.getsockname()[1], code=1)
    assert "give another --port" in " ".join(told.output.split())


def test_the_schedule_asked_for_reaches_the_drafter():
    with configured(drafter_of("llama"), num_assistant_tokens_schedule="constant") as eagle:
        pairs.Drafting(schedule="pid").apply_to(eagle)
        assert eagle.generation_config.num_assistant_tokens_schedule == "pid"
