"""What commands refuse, and that they say so in one line."""

import shutil
import socket
from io import StringIO

import pytest
import typer
from command_line import DRAFTER, TARGET, error_of, run
from rich.console import Console
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, T5Config

from eagle31_hf.cli.options import readable_errors
from eagle31_hf.errors import CheckpointNotFoundError, ConfigurationError


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


@pytest.mark.parametrize("command", ["chat", "doctor", "generate", "serve", "warmup"])
def test_a_pair_without_its_options_is_told_of_them(command):
    message = " ".join(run(command, "one", "two", code=2).stderr.replace("│", "").split())
    assert "(one two); name what it is, with --target, --drafter" in message


SWAPPED = {
    "both": ["generate", "--target", DRAFTER, "--drafter", TARGET, "--prompt", "x"],
    "chat": ["chat", "--target", DRAFTER, "--drafter", TARGET],
    "doctor": ["doctor", "--target", DRAFTER, "--drafter", TARGET],
    "warmup": ["warmup", "--target", DRAFTER, "--drafter", TARGET],
    "plan": ["plan", DRAFTER, "--card", "RTX 4090"],
    "plan both": ["plan", DRAFTER, "--drafter", TARGET, "--card", "RTX 4090"],
    "train": ["train", DRAFTER, "--prompts", "self", "--out", "nowhere"],
}


@pytest.mark.parametrize("case", SWAPPED)
def test_a_drafter_named_as_the_target_is_called_so(case):
    message = error_of(*SWAPPED[case])
    assert f"the target '{DRAFTER}' is a drafter" in message
    assert "name the model it was made for as the target" in message


@pytest.mark.parametrize("case", ["generate", "plan", "train"])
def test_a_target_named_as_the_drafter_is_called_so(case, tmp_path):
    rest = {"generate": ["--target", TARGET, "--prompt", "x"], "plan": [TARGET, "--card", "RTX 4090"],
            "train": [TARGET, "--prompts", "self", "--out", tmp_path / "out"]}  # fmt: skip
    message = error_of(case, *rest[case], "--drafter", TARGET)
    assert "a whole language model, not a drafter; pass this model as the target (--target" in message
    assert not (tmp_path / "out").exists(), "nothing was written before that was said"


def test_a_hub_drafter_is_known_by_its_architecture(tmp_path, monkeypatch):
    """Of an id only the config is at hand when it is asked."""
    config = LlamaConfig(architectures=["LlamaForCausalLMEagle3"])
    monkeypatch.setattr("eagle31_hf.drafter.loading.AutoConfig.from_pretrained", lambda *_, **__: config)
    assert "'some/eagle3' is a drafter" in error_of(
        "generate", "--target", "some/eagle3", "--drafter", DRAFTER, "--prompt", "x"
    )


@pytest.mark.parametrize("command", ["generate", "chat", "serve", "train"])
def test_a_folder_without_a_tokenizer_says_what_is_missing(command, tmp_path):
    for name in ("config.json", "model.safetensors"):
        shutil.copy(f"{TARGET}/{name}", tmp_path)
    rest = {"generate": ["--prompt", "x"], "serve": ["--port", 0]}.get(command, [])
    pair = ["--target", tmp_path, "--drafter", DRAFTER, *rest]
    told = [tmp_path, "--prompts", "self", "--out", tmp_path / "out"] if command == "train" else pair
    message = error_of(command, *told)
    assert f"the folder '{tmp_path}' holds no tokenizer; copy tokenizer.json" in message


def test_plans_are_for_one_card():
    for told in (
        ["plan", TARGET, "--card", "RTX 4090", "--card", "RTX 3090"],
        ["plan", TARGET, "--card", "RTX 4090, RTX 3090"],
        ["plan", TARGET, "--card", "4090 + 3090"],
        ["plan", TARGET, "--card", "2x RTX 4090"],
        ["generate", "--prompt", "x", "--memory", "auto", "--card", "RTX 4090", "--card", "RTX 3090"],
    ):
        message = error_of(*told)
        assert "got 2 cards (" in message
        assert "a plan is for one" in message
        assert "--device-map auto" in message
    assert "not in the table" in error_of("plan", TARGET, "--card", "Voodoo 2, Voodoo 3")
    run("plan", TARGET, "--card", "RTX 4090")


def test_options_of_a_plan_want_one():
    message = error_of("generate", "--prompt", "x", "--context", 512)
    assert "got --context without a plan" in message
    assert "--memory auto, or leave it out" in message
    assert "got --card and --context" in error_of("chat", "--context", 512, "--card", "RTX 4090")
    assert "got --card without a plan" in error_of("serve", "--port", 0, "--card", "RTX 4090", "--context", 512)


def test_serve_takes_a_context_without_a_plan(monkeypatch):
    asked: list[int] = []

    class Stop(Exception):
        pass

    def stop(drafter, tokenizer, settings):
        asked.append(settings.context)
        raise Stop

    monkeypatch.setattr("eagle31_hf.serving.engine.Engine", stop)
    for told in (["--context", 512], []):
        with pytest.raises(Stop):
            run("serve", "--port", 0, *told)
    assert asked == [512, 2048]
    assert "was made for texts of 2048 tokens" in error_of("serve", "--port", 0, "--context", 4000)


def test_an_encoder_decoder_target_is_refused(tmp_path):
    T5Config().save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(TARGET).save_pretrained(tmp_path)
    message = error_of("generate", "--target", tmp_path, "--drafter", DRAFTER, "--prompt", "x")
    assert "decoder-only" in message


def test_traceback_shows_the_whole_error():
    with pytest.raises(CheckpointNotFoundError):
        run("inspect", "nobody/nothing", "--traceback")


def test_json_into_a_missing_folder_is_refused_before_measuring(tmp_path):
    result = run("demo", "--json", tmp_path / "no" / "demo.json", code=2)
    assert "no folder" in " ".join(result.stderr.split())


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


def test_a_plan_in_a_file_is_answered_with_what_to_do(tmp_path):
    message = error_of("generate", "--prompt", "x", "--memory", tmp_path / "plan.json")
    assert "went in 0.2.0: pass --memory auto, and the options the plan was made with" in message


def test_serve_says_that_a_port_is_taken_before_it_loads_anything():
    with socket.create_server(("127.0.0.1", 0)) as other:
        told = run("serve", "--target", "nowhere", "--port", other.getsockname()[1], code=1)
    assert "give another --port" in " ".join(told.output.split())


@pytest.mark.parametrize("command", ["generate", "plan"])
def test_a_path_that_is_not_there_is_told_without_words_of_the_hub(tmp_path, command):
    words = ["--prompt", "x", "--drafter", DRAFTER] if command == "generate" else []
    target = ["--target", tmp_path / "no"] if command == "generate" else [tmp_path / "no"]
    message = error_of(command, *target, *words)
    assert "no such folder" in message
    assert "repo_type" not in message
    assert "Repo id" not in message


def test_a_misspelt_model_is_told_with_the_name_that_was_meant():
    message = error_of("plan", "Lama 3.1 8B", "--card", "RTX 4090")
    assert "did you mean Llama 3.1 8B?" in message
    assert "did you mean" not in error_of("plan", "what is this", "--card", "RTX 4090")


@pytest.mark.parametrize("part", ["target", "drafter"])
def test_a_misspelt_folder_is_told_with_the_one_beside_it_that_was_meant(tmp_path, part):
    (tmp_path / "small-pair-drafter").mkdir()
    misspelt = tmp_path / "small-pair-drafer"
    words = ["--target", misspelt, "--drafter", DRAFTER] if part == "target" else ["--drafter", misspelt]
    message = error_of("generate", "--target", TARGET, *words, "--prompt", "x")
    assert message.endswith(f"did you mean {tmp_path / 'small-pair-drafter'}?")
    assert "did you mean" not in error_of("inspect", tmp_path / "another thing")


def test_an_error_is_wrapped_at_words_in_a_terminal(monkeypatch):
    terminal = Console(file=StringIO(), width=30, force_terminal=True, color_system=None)
    monkeypatch.setattr("eagle31_hf.cli.options.make_console", lambda **_: terminal)

    @readable_errors
    def command(**_: object) -> None:
        raise ConfigurationError("got a word too many for one line of this terminal")

    with pytest.raises(typer.Exit):
        command(traceback=False)
    lines = terminal.file.getvalue().splitlines()
    assert [line.rstrip() for line in lines] == ["error: got a word too many for", "one line of this terminal"]


def test_a_folder_of_many_drafters_is_refused_in_a_short_line(tmp_path):
    for number in range(12):
        shutil.copytree(DRAFTER, tmp_path / f"drafter-{number:02}", symlinks=True)
    message = error_of("inspect", tmp_path)
    assert "drafter-04 and 7 more have" in message
    assert "drafter-05" not in message
