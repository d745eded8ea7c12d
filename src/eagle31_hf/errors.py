"""Every error this package raises on purpose. Messages say what was got, what was wanted and what to do."""

from __future__ import annotations

import json
import re
import reprlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


class Eagle31Error(Exception):
    """Base class: `except Eagle31Error` catches everything this package raises on purpose."""


class ConfigurationError(Eagle31Error, ValueError):
    """A configuration field is missing, absurd or contradicts another."""


class CheckpointError(Eagle31Error):
    """A drafter checkpoint cannot be used, or not written."""


class CheckpointNotFoundError(CheckpointError, OSError):
    """No such folder or Hub id, or no network to ask for it."""


class CheckpointFormatError(CheckpointError, ValueError):
    """The files are there but do not hold an EAGLE-3 / 3.1 drafter we can read."""


class UnsafeCheckpointError(CheckpointError):
    """The file would run code when read. Nothing was run and nothing was loaded."""


class IncompatibleTargetError(Eagle31Error, ValueError):
    """The drafter does not fit this target, or this kind of target cannot be served."""


class NotAttachedError(Eagle31Error, RuntimeError):
    """The drafter was used without a target."""


class UnsupportedGenerationError(Eagle31Error, ValueError):
    """A `generate` request that cannot be served with exactly the text the target alone would write."""


class MemoryPlanError(Eagle31Error, ValueError):
    """A memory plan cannot be made, or does not belong to this target or card."""


if TYPE_CHECKING:

    class OutOfMemoryError(Eagle31Error, torch.OutOfMemoryError): ...


def __getattr__(name: str) -> Any:
    """`OutOfMemoryError` is torch's error, too; torch takes seconds to import, so the class is made when asked for."""
    if name != "OutOfMemoryError":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import torch

    class OutOfMemoryError(Eagle31Error, torch.OutOfMemoryError):
        """Memory ran out during a generation, although all was given up that could be. Says which steps."""

    OutOfMemoryError.__qualname__ = name  # it can be pickled
    globals()[name] = OutOfMemoryError
    return OutOfMemoryError


class PublishingError(Eagle31Error, RuntimeError):
    """A drafter cannot be put on the Hub: its card lacks evidence, or the Hub refused."""


class TrainingError(Eagle31Error, RuntimeError):
    """Training data or the training run itself are unusable."""


_ONE_BENCH = "`eagle31 bench --target TARGET --drafter DRAFTER` measures all methods in turns, as tables and --json"
_AS_STORED = "weights packed so are planned by the size of their files: plan the checkpoint that holds them"
_LAYOUTS = "all layouts are read, plain, mla and speculators are written; leave the option out (plain)"
REMOVED_IN_0_2 = {
    **{f"quantization {name}": _AS_STORED for name in ("gptq-4bit", "awq-4bit", "fp8", "fp8-block", "mxfp4")},
    "convert --allow-loss": "a layout that cannot express the drafter is refused; write it as plain or speculators",
    **{f"--format {name}": _LAYOUTS for name in ("specforge", "torchspec", "modelopt", "nemo")},
    "report": "`eagle31 bench --plot speed.png --json figures.json` draws and writes what it measures",
    "bench run": _ONE_BENCH,
    "bench loop": _ONE_BENCH,
    "bench acceptance": "`eagle31 bench` once for each drafter: texts are the same, and --json has what was accepted",
    "bench --out": "pass --json FILE for the figures",
    "bench --resume": "measure fewer prompts with --limit; a run that was stopped begins anew",
    "bench --compare": "`examples/studies/two_commits.py` says whether a change costs speed",
    "bench --allow": "it belonged to --compare; leave it out",
    "bench --csv": "--json has acceptance by position",
    "bench --profile": "--json has every figure",
    "bench --all-turns": "each prompt is asked up to its first unanswered turn; leave it out",
    "bench --ignore-eos": "answers end where the target ends; leave it out",
    "bench --methods": "all methods are measured, graphs among them where there are any; leave it out",
    "bench --compile": "pass --acceleration compile",
    "bench --ceilings": "figures are of whole texts; leave it out",
    "bench --synthetic": "pass a target and a drafter, or leave both out for the embedded pair",
    "bench --acceptance": "acceptance is the drafter's own; leave it out",
    "doctor --calibrate": "costs of rounds are taken from the rounds a process writes; leave the option out",
    "--schedule calibrated": "it is the default, under the name planned; leave the option out",
    "--schedule heuristic": "pass --schedule planned, or constant for drafts of one length",
    "num_assistant_tokens_schedule calibrated": "it is the default, under the name 'planned'; leave the field out",
    "num_assistant_tokens_schedule heuristic": "choose 'planned', 'constant' or 'pid'",
    "draft_length_bounds": "set num_assistant_tokens, the longest draft; leave the field out",
    "draft_confidence_floor": "it is called draft_min_confidence; rename the field in the file, too",
    "draft_tree": "trees follow the drafter's confidence; leave the field out",
    "demo --svg": "`python docs/pictures.py demo` in a checkout draws README's picture; leave the option out",
    "push --json": "it prints all that it would write; leave the option out",
    "warmup --json": "it prints how many graphs it made; leave the option out",
    "doctor --beside": "--drift shows what the drafter looks at; leave the option out",
    "bench --four-bit": "pass --quantization 4bit",
    "plan --frontier": "plan again with another --context, --draft-tokens or --batch; each takes seconds",
    "--memory FILE": "pass --memory auto, and the options the plan was made with",
    "speculation_loop stock": "leave it at 'auto': our loop, or plain decoding where a target cannot verify drafts",
    "train --minutes": "the bar tells how many minutes are left; stop there and choose --max-steps",
    "train --reward": "stage 2 maximises the expected number of accepted drafts; leave the option out",
    "cache_type fp8": "int8 takes the same bytes and comes closer; use cache_type='int8'",
    "target FILE.gguf": "transformers unpacks it to four times its bytes; name the model's folder or Hub id, and "
    "pack it while loading (--quantization 4bit)",
    "chat /save": "redirect the output into a file, or use ChatSession.turns from Python",
    "chat /load": "set ChatSession.turns from Python",
    "chat /plan": "`eagle31 plan` prints it, as `chat --memory auto` does at its start",
    "chat /colour": "start with --no-colour",
    "chat /thoughts": "start with --thoughts",
    "structured_outputs.grammar in GBNF": "write the grammar in Lark's notation: start: ...",
    "guided_json": "pass structured_outputs with json, or response_format",
    "guided_regex": "pass structured_outputs with regex",
    "guided_choice": "pass structured_outputs with choice",
    "guided_grammar": "pass structured_outputs with grammar",
    "bad_words": "forbid tokens by a logit_bias of -100",
    "allowed_token_ids": "describe the text by structured_outputs",
    "--stage both": "train stage 1, then `eagle31 train ... --stage 2 --drafter DIR --out OTHER`",
    "train --push": "when it has ended, `eagle31 push OUT OWNER/NAME --upload`; leave the option out",
    "train --loss": "cross-entropy was never worse than the other losses; leave the option out",
    "train --step-decay": "each step weighs 0.8 of the one before; leave the option out",
    "train --given-weight": "all supervised tokens weigh the same; leave the option out",
    "train --supervise": "a small target's drafter learns every token, others the assistant's; leave the option out",
    "train --too-long": "longer conversations lose their end, and are counted; leave the option out",
    "train --store-features": "hidden states are computed in every step; leave the option out",
    "train --stage2-share": "each stage is a run of its own; leave the option out",
    "train --optimizer": "matrices are stepped by Muon, the rest by AdamW; leave the option out",
    "train --warmup-share": "the learning rate rises over 3 % of the steps; leave the option out",
    "train --max-grad-norm": "gradients are scaled down to a norm of 0.5; leave the option out",
    "train --patience": "training stops after 5 measurements without progress; leave the option out",
    "train --draft-tokens": "acceptance is measured with 5 draft tokens; leave the option out",
    "train --json": "OUT/training_report.json holds the figures; leave the option out",
    "train --report-to": "the bar shows loss and accuracy, the card the curve of acceptance; leave the option out",
    "train --gradient-checkpointing": "a small target's draft logits are kept, else made twice; leave the option out",
    "train --layers": "pass one of Eagle31Drafter.from_target(target, num_hidden_layers=N) as --drafter",
    "train --heads": "pass one of Eagle31Drafter.from_target(target, num_attention_heads=N) as --drafter",
    "train --intermediate-size": "pass one of Eagle31Drafter.from_target(target, intermediate_size=N) as --drafter",
}
"""What version 0.2.0 removed, and what to do instead: a command ("report"), an option ("train --reward"), a value
("--format nemo") or a field ("draft_length_bounds")."""


def removal(name: str) -> str | None:
    """One line for whoever still asks for something that version 0.2.0 removed; None if `name` is not such a thing."""
    return f"{name} was removed in 0.2.0: {REMOVED_IN_0_2[name]}" if name in REMOVED_IN_0_2 else None


def count(number: int, noun: str) -> str:
    """`"1 token"`, `"1,024 tokens"`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 80
_SHORT.repr_bool = _SHORT.repr_NoneType = lambda value, _level: json.dumps(value)  # type: ignore[attr-defined]


def shown(value: Any) -> str:
    """A value from a file as an error may quote it: escaped, and short however long it is."""
    return _SHORT.repr(value)


def json_kind(value: Any) -> str:
    """What a value from a JSON file is, in words."""
    kinds = {dict: "an object", list: "a list", str: "text", int: "a number", float: "a number"}
    return kinds.get(type(value)) or shown(value)


_WRONG_TYPE = re.compile(
    r"Field '(\S+)' (?:expected (\w+), got \w+ \(value: (.*)\)$|with value (.*?) doesn't match)", re.S
)
_WANTED = {"int": "a whole number", "float": "a number", "str": "text", "bool": "true or false", "dict": "an object"}
_PYTHON_NAMES = {"True": "true", "False": "false", "None": "null"}


def config_problem(error: BaseException) -> str:
    """What is wrong with a configuration, in one line; of a field's type in JSON's words and not in Python's, which
    huggingface_hub uses."""
    found = _WRONG_TYPE.search(str(error))
    if found is None:
        return " ".join(str(error).split())
    name, kind, *values = found.groups()
    value = next(filter(None, values))
    wanted = f"; wanted {_WANTED[kind]}" if kind in _WANTED else ""
    return f"{name} is {_PYTHON_NAMES.get(value, value)}{wanted}"


def first_line(error: BaseException) -> str:
    """What an error says, in one line; its kind where it says nothing."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def named_line(error: BaseException) -> str:
    """An error's kind, and what it says in one line."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"


def blame_caller(error: BaseException) -> None:
    """Mark an error as raised by code the caller brought along (a processor, a criterion): it is passed on as it is."""
    error.raised_by_caller = True  # type: ignore[attr-defined]


def is_callers(error: BaseException) -> bool:
    """Whether `blame_caller` marked it."""
    return getattr(error, "raised_by_caller", False)
