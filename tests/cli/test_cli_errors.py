"""What commands refuse, and that they say so in one line."""

import json
import re
import shlex
import shutil
import socket
from io import StringIO
from pathlib import Path
from unittest.mock import Mock

import pytest
import typer
from command_line import DRAFTER, TARGET, error_of, run
from rich.console import Console
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, MptConfig, T5Config

from eagle31_hf.cli.options import command
from eagle31_hf.cli.pairs import LoadedPair
from eagle31_hf.cli.serve import _context
from eagle31_hf.errors import REMOVED_IN_0_2, CheckpointNotFoundError, ConfigurationError, removal
from eagle31_hf.serving.session import ChatSession
from mtp_targets import target_with_head

WRONG: dict[str, dict | None] = {
    "wrong": {"hidden_size": True}, "no-heads": {"num_attention_heads": 0}, "heads-of-no-width": {"head_dim": 0},
    "a-size-of-1e30": {"hidden_size": -5, "vocab_size": 1e30}, "no-kv-heads": {"num_key_value_heads": 0},
    "heads-in-words": {"num_attention_heads": "four"}, "infinite": {"hidden_size": float("inf")},
    "rope-that-is-a-number": {"rope_scaling": 5}, "unknown-layer-types": {"layer_types": ["x", "y"]},
    "bits-in-words": {"quantization_config": {"quant_method": "gptq", "bits": "four"}},
    "packed-by-a-number": {"quantization_config": 5}, "unknown-precision": {"dtype": "float33"},
    "less-than-no-layers": {"num_hidden_layers": -1}, "no-hidden-size": {"hidden_size": 0}, "nested-too-deep": None,
}  # fmt: skip
"""Fields of `config.json` files that make no model."""


@pytest.fixture(scope="module")
def top(tmp_path_factory) -> Path:
    """Folders that are no pair."""
    top = tmp_path_factory.mktemp("folders")
    for name, config in {"unweighted": LlamaConfig(), "t5": T5Config()}.items():
        config.save_pretrained(top / name)
    sizes = {"hidden_size": 256, "intermediate_size": 64, "num_hidden_layers": 6, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=99)).save_pretrained(top / "other")
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    headed = target_with_head("qwen3_5_text", top / "headed", vocab_size=len(tokenizer))
    headed.save_pretrained(top / "tuned")  # without its head
    for name in ("unweighted", "t5", "other", "headed", "tuned"):
        tokenizer.save_pretrained(top / name)
    for name in ("empty", "small-pair-drafter", "no-tokenizer"):
        (top / name).mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(f"{TARGET}/{name}", top / "no-tokenizer")
    written = json.loads((top / "unweighted" / "config.json").read_text())
    for name, fields in WRONG.items():
        (top / name).mkdir()
        (top / name / "config.json").write_text("[" * 200_000 if fields is None else json.dumps(written | fields))
    (top / "broken.jinja").write_text("{% if messages %}Hello")
    (top / "latin-1.txt").write_bytes(b"caf\xe9")
    return top


UNKNOWN = "nobody/nothing.*local folder"
IS_DRAFTER = "the target '.*' is a drafter.*name the model it was made for as the target"
IS_TARGET = "a whole language model, not a drafter; name it as the target, and its drafter here"
NO_TOKENIZER = "the folder '.*' holds no tokenizer; copy tokenizer.json"
ONE_CARD = r"got 2 cards \(.*a plan is for one.*--device-map auto"
MEANT = r"did you mean .*/small-pair-drafter\?$"
NOTHING_ALIKE = "^(?!.*did you mean)"
CHAINS = "serve cannot do {}: "

REFUSED = {
    # --- targets and drafters
    "inspect nobody/nothing": UNKNOWN,
    "generate --target nobody/nothing --drafter {drafter} --prompt x": UNKNOWN,
    "generate --target {top}/no --drafter {drafter} --prompt x": "no such folder",
    "plan {top}/no": "error: no target at '.*/no': no such folder; check the path$",
    f"generate --target {'x' * 300} --drafter {{drafter}} --prompt x": "no such folder",
    "plan {top}/small-pair-drafer": MEANT,
    "generate --target {top}/empty --drafter {drafter} --prompt x": "config.json",
    "generate --target {top}/unweighted --drafter {drafter} --prompt x": "holds no complete target",
    "generate --target {top}/wrong --drafter {drafter} --prompt x": "is wrong: hidden_size is true; wanted",
    "plan {top}/wrong --card 'RTX 4090'": r"cannot be read \(hidden_size is true; wanted a whole number\)",
    **{f"plan {{top}}/{name} --card 'RTX 3090'": "error: " for name in WRONG},
    "generate --target {top}/other --drafter {drafter} --prompt x": "8192.*99",
    "generate --target {top}/t5 --drafter {drafter} --prompt x": "decoder-only",
    "generate --target {target} --prompt x": "no drafter given",
    "chat --target {target}": "no drafter given.*--drafter none",
    "bench {target}": "no drafter given",
    "bench {top}/no/target": "no such folder",
    "generate --target {drafter} --drafter {target} --prompt x": IS_DRAFTER,
    "chat --target {drafter} --drafter {target}": IS_DRAFTER,
    "doctor --target {drafter} --drafter {target}": IS_DRAFTER,
    "warmup --target {drafter} --drafter {target}": IS_DRAFTER,
    "plan {drafter} --card 'RTX 4090'": IS_DRAFTER,
    "plan {drafter} --drafter {target} --card 'RTX 4090'": IS_DRAFTER,
    "train {drafter} --prompts self --out {top}/out": IS_DRAFTER,
    "generate --target {target} --drafter {target} --prompt x": IS_TARGET,
    "plan {target} --drafter {target} --card 'RTX 4090'": IS_TARGET,
    "train {target} --prompts self --out {top}/out --drafter {target}": IS_TARGET,
    "generate --target {top}/no-tokenizer --drafter {drafter} --prompt x": NO_TOKENIZER,
    "chat --target {top}/no-tokenizer --drafter {drafter}": NO_TOKENIZER,
    "serve --target {top}/no-tokenizer --drafter {drafter} --port 0": NO_TOKENIZER,
    "train {top}/no-tokenizer --prompts self --out {top}/out": NO_TOKENIZER,
    "plan 'Lama 3.1 8B' --card 'RTX 4090'": r"did you mean Llama 3.1 8B\?",
    "generate --target {top}/small-pair-drafer --drafter {drafter} --prompt x": MEANT,
    "generate --target {target} --drafter {top}/small-pair-drafer --prompt x": MEANT,
    "inspect {top}": r"has no config\.json; pass the folder that holds it",
    "plan 'what is this' --card 'RTX 4090'": NOTHING_ALIKE,
    "inspect '{top}/another thing'": NOTHING_ALIKE,
    # --- without a drafter, or with the head inside a target
    "doctor --target {target} --drafter none": "this command is about a drafter",
    "train {target} --prompts self --out {top}/out --drafter none": "to train a fresh drafter leave it out",
    "chat --target {target} --drafter none --tree-width 4": "got draft_top_k=4, but there is no drafter.*as chains",
    "plan {target} --drafter none --draft-tokens 4": "a plan without a drafter",
    "generate --target {target} --drafter mtp --prompt x": "holds no MTP head that can be read.*qwen3_5",
    "generate --drafter mtp --prompt x": "holds no MTP head",
    "plan 'Llama 3.1 8B' --drafter mtp --card 'RTX 4090'": "no MTP head",
    "mtp {target} --out {top}/out": "holds no MTP head",
    "train {top}/headed --drafter {top}/headed --prompts self --out {top}/out": "is an MTP head, which is trained with",
    "mtp {target}": "neither --out nor --into",
    "generate --target {target} --drafter {top}/headed --prompt x": "hidden size",
    "generate --target {top}/tuned --drafter mtp --prompt x": "transformers drops them",
    "inspect {top}/tuned": "transformers drops them",
    "mtp {top}/headed --into {top}/tuned --state raw": "go with --out",
    "mtp {top}/headed --out {top}/out --into {top}/tuned": "got both",
    "mtp {top}/headed --out {top}/out --prompts nowhere.jsonl": "goes with",
    "doctor --target {top}/headed --drift": "attention is not looked at",
    "convert {top}/headed {top}/out": "eagle31 mtp",
    # --- plans
    "plan {target} --card 'RTX 4090' --card 'RTX 3090'": ONE_CARD,
    "plan {target} --card 'RTX 4090, RTX 3090'": ONE_CARD,
    "plan {target} --card '4090 + 3090'": ONE_CARD,
    "plan {target} --card '2x RTX 4090'": ONE_CARD,
    "plan {target} --card '24,576 MiB'": r"got card '24,576 MiB', which is not known",
    "generate --prompt x --memory auto --card 'RTX 4090' --card 'RTX 3090'": ONE_CARD,
    "plan {target} --card 'RTX 9999'": "RTX 4090",
    "plan {target} --card 'RTX 5090 laptop'": r"did you mean RTX 5090\?",
    "generate --prompt x --context 512": "got --context without a plan.*--memory auto, or leave it out",
    "chat --context 512 --card 'RTX 4090'": "got --card and --context",
    "serve --port 0 --card 'RTX 4090' --context 512": "got --card without a plan",
    "generate --prompt x --memory plan.json": "was removed in 0.2.0: pass --memory auto, and the options",
    # --- one command each
    "generate --prompt-file {top}/latin-1.txt": "is no character; wanted text in the encoding of",
    "serve --port 0 --context 4000": "was made for texts of 2048 tokens",
    "serve --target nowhere --tree-width 2": CHAINS.format("--tree-width 2"),
    "chat --chat-template {top}/broken.jinja": "got --chat-template .*/broken.jinja, which cannot be used: .*'endif'",
    "serve --target nowhere --acceleration compile": CHAINS.format("--acceleration compile"),
    "serve --allow-origin http://localhost:3000/chat": "scheme, host and port",
    "serve --allow-origin *": "scheme, host and port",
    "train {top}/no-tokenizer --prompts {top}/nothing.jsonl --out {top}/out": "no file or folder .*nothing.jsonl",
    "bench --prompts nowhere.jsonl": "no file or folder",
    "generate 'Why is the sky blue?'": "wanted one of --prompt and --prompt-file",
    **{
        f"{name} {{target}} {{drafter}} {more}": "wanted TARGET DRAFTER"
        for name in ("bench", "chat", "doctor", "generate", "serve", "warmup")
        for more in ("more", "--drafter x")
    },
    **{f"bench {name}": re.escape(str(removal(f"bench {name}"))) for name in ("run", "loop", "acceptance")},
    "convert {drafter} {top}/out --format nemo": "was removed in 0.2.0: all layouts are read",
    "convert nobody/nothing {top}/out --format gguf": "gguf.*speculators",
    "convert {drafter} {top}/out --target nobody/nothing": "no target at",
    "convert {drafter} {top}/out --target {top}/wrong": "is wrong: hidden_size is true; wanted a whole number$",
}
USAGE_ERRORS = {
    "plan x --quantization 4 bit": "write 4bit or 8bit",
    "plan {target} {drafter}": r"unexpected extra argument.*; name a drafter with --drafter$",
    "train {target} {drafter} --prompts self --out {top}/out": "name a drafter with --drafter$",
    "inspect {drafter} more": "unexpected extra argument.*; see eagle31 inspect --help$",
    "chat --chat-template {top}/no.jinja": "got --chat-template .*/no.jinja: .* does not exist",
    "generate --temperature hot": "got --temperature hot: wanted a valid number; see eagle31 generate --help$",
    **{
        f"{name} --temperature inf": "got --temperature inf: wanted a number less than or equal to 5"
        for name in ("bench", "generate", "warmup")
    },
    "generate --prompt-file {top}/no.txt": "got --prompt-file .*/no.txt: .*No such file",
    "demo --json {top}/no/demo.json": "there is no folder",
    "bench --plot {top}/no/speed.png": "there is no folder",
    "doctor --plot {top}/drift.gif": "wanted a name that ends in .png, .svg",
    "convert {drafter} {top}/out --allow-loss": "convert --allow-loss was removed in 0.2.0",
    "bench --batch 1,x": "got --batch 1,x: wanted whole numbers",
    "bench --batch 0": "got --batch 0: wanted whole numbers",
    "bench --dtype int8": "got --dtype int8: 'int8' is not one of",
    "bench --max-new-tokens 2": "got --max-new-tokens 2: wanted a number greater than or equal to 3;",
    "serve --port many": "got --port many: wanted a valid integer;",
    **{
        f"plan x --context {context}": f"got --context {context}: wanted a number of tokens"
        for context in ("many", "0", "9999k")
    },
    "train": "(?i)missing argument 'target'",
    "nonsense": "No such command 'nonsense'",
    "train --no-such-option": "No such option: --no-such-option",
    "generate --schedule never": "'never' is not one of",
}


def words_of(command: str, top: Path) -> list[str]:
    return [word.format(top=top, target=TARGET, drafter=DRAFTER) for word in shlex.split(command)]


@pytest.mark.parametrize("command", REFUSED)
def test_what_cannot_be_done_is_told_in_one_line(command, top):
    message = error_of(*words_of(command, top))
    assert re.search(REFUSED[command], message), message
    assert not re.search("repo_type|Repo id|drafter-05", message), message
    assert not (top / "out").exists(), "nothing was written before that was said"


@pytest.mark.parametrize("command", USAGE_ERRORS)
def test_a_command_line_that_cannot_be_read_is_told_in_one_line(command, top):
    message = error_of(*words_of(command, top), code=2)
    assert re.search(USAGE_ERRORS[command], message), message


def test_a_device_that_is_not_there_is_named(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert "this machine has no cuda device" in error_of("generate", "--prompt", "x", "--device", "cuda")


def test_a_hub_drafter_is_known_by_its_architecture(monkeypatch):
    """Of an id only the config is at hand when it is asked."""
    config = LlamaConfig(architectures=["LlamaForCausalLMEagle3"])
    monkeypatch.setattr("eagle31_hf.drafter.loading.AutoConfig.from_pretrained", lambda *_, **__: config)
    assert "'some/eagle3' is a drafter" in error_of(
        "generate", "--target", "some/eagle3", "--drafter", DRAFTER, "--prompt", "x"
    )


def test_serve_takes_a_context_without_a_plan(monkeypatch):
    engine = Mock(side_effect=LookupError("it would start here"))
    monkeypatch.setattr("eagle31_hf.serving.engine.Engine", engine)
    for told in (["--context", 512], []):
        with pytest.raises(LookupError, match="it would start here"):
            run("serve", "--port", 0, *told)
    assert [call.args[2].context for call in engine.call_args_list] == [512, 2048]


def test_the_longest_text_is_as_trained_under_any_name():
    target = Mock(config=MptConfig(max_seq_len=99))
    pair = LoadedPair("mpt", target, Mock(), Mock())
    assert _context(pair, None) == ChatSession(target, Mock(), Mock()).context == 99
    with pytest.raises(ConfigurationError, match="texts of 99 tokens"):
        _context(pair, 100)


def test_serve_says_that_a_port_is_taken_before_it_loads_anything():
    with socket.create_server(("127.0.0.1", 0)) as other:
        message = error_of("serve", "--target", "nowhere", "--port", other.getsockname()[1])
    assert "give another --port" in message


def test_traceback_shows_the_whole_error():
    with pytest.raises(CheckpointNotFoundError):
        run("inspect", "nobody/nothing", "--traceback")


def test_an_error_is_wrapped_at_words_in_a_terminal(monkeypatch):
    terminal = Console(file=StringIO(), width=30, force_terminal=True, color_system=None)
    monkeypatch.setattr("eagle31_hf.cli.options.make_console", lambda **_: terminal)

    @command
    def refuse() -> None:
        raise ConfigurationError("got a word too many for one line of this terminal")

    with pytest.raises(typer.Exit):
        refuse(traceback=False)
    lines = terminal.file.getvalue().splitlines()
    assert [line.rstrip() for line in lines] == ["error: got a word too many for", "one line of this terminal"]


def test_a_folder_may_be_called_like_a_command_that_went(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    assert "cannot be loaded" in error_of("bench", "run", DRAFTER)


COMMANDS = [name for name in REMOVED_IN_0_2 if " " not in name and "_" not in name]
OPTIONS = [name for name in REMOVED_IN_0_2 if " --" in name]
SCHEDULES = [name.split()[1] for name in REMOVED_IN_0_2 if name.startswith("--schedule")]


@pytest.mark.parametrize("name", [*COMMANDS, *OPTIONS])
def test_a_removed_command_or_option_names_its_replacement(name):
    assert error_of(*name.split(), code=2) == f"error: {removal(name)}"


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("options", [["--schedule", "{}"], ["--schedule={}"]])
@pytest.mark.parametrize("command", ["generate", "serve"])
def test_a_removed_schedule_names_its_replacement(command, options, schedule):
    said = error_of(command, *(option.format(schedule) for option in options), code=2)
    assert said == f"error: {removal(f'--schedule {schedule}')}"
