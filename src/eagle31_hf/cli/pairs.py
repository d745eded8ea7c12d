"""A target, its drafter and its tokenizer, loaded together and asked together. What the command line works with."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from jinja2.exceptions import TemplateError
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import is_peft_available

from ..checkpoints import require_head, target_holds_head
from ..checkpoints.hub import missing_folder
from ..demo import drafter_path, target_path
from ..drafter.assistant import Assistant, NoDrafter
from ..drafter.drafter import Eagle31Drafter, MtpDrafter
from ..drafter.loading import dtype_here, load_target, packing_config
from ..drafter.packed_linear import bitsandbytes
from ..errors import CheckpointNotFoundError, ConfigurationError, first_line, removal
from ..generate.hooks import install
from ..measure.results import Task
from ..memory import MemoryPlan, plan_memory
from ..memory.cards import Card, best_kind, measure_card, one_card
from ..memory.drafter_facts import OWN_HEAD
from ..targets.devices import SHORT_NAMES
from ..texts.chats import encode_chat
from ..texts.prompts import Prompt
from .options import DRAFTS, LOADING, argument, make_console, option, token_count
from .plan import print_decision
from .progress import waiting_for

NONE = "none"
"""What `--drafter` is told where there is none."""


@dataclass(frozen=True)
class LoadedPair:
    """A drafter attached to its target, or the target without one (`NoDrafter`).

    `name` is what people call the target; `plan` is the memory plan it was loaded under, if one was asked for.
    """

    name: str
    target: PreTrainedModel
    drafter: Assistant
    tokenizer: PreTrainedTokenizerBase
    plan: MemoryPlan | None = None

    @property
    def described(self) -> str:
        """The target's name, and whose head drafts if it is its own."""
        return f"{self.name}, drafting by its own MTP head" if isinstance(self.drafter, MtpDrafter) else self.name

    def tasks(self, prompts: Sequence[Prompt]) -> list[Task]:
        """Prompts with their ids on the target's device, by the chat template if there is one."""
        device = self.drafter.binding.input_device
        return [Task(each, torch.tensor(encode_chat(self.tokenizer, each.messages), device=device)) for each in prompts]


@dataclass
class PairSource:
    """What to load and how; the options of every command that loads a pair."""

    pair: list[str] | None = argument("TARGET DRAFTER, instead of --target and --drafter.", None)
    target: str | None = option(None, "Folder or Hub id; default: the embedded one.")
    drafter: str | None = option(
        None,
        "Folder or Hub id of a drafter for that target; mtp: the head inside the target, which is the default "
        "where there is one; none: drafts are looked up.",
    )
    dtype: Literal["auto", "stored", "bfloat16", "float16", "float32", "bf16", "fp16", "fp32"] = option(
        "auto", "Precision; auto is as stored, unless this machine has no arithmetic for that.", panel=LOADING
    )
    device: Literal["auto", "cpu", "cuda", "mps"] = option("auto", "Where to run.", panel=LOADING)
    adapter: str | None = option(None, "Folder or Hub id of a PEFT adapter for the target.", panel=LOADING)
    device_map: str | None = option(
        None, "Spread the target as transformers does: auto, balanced, or a JSON object.", panel=LOADING
    )
    quantization: Literal["4bit", "8bit"] | None = option(
        None, "Pack the target's weights with bitsandbytes (nf4, int8)."
    )
    memory: str | None = option(None, "auto: plan before loading, and keep to it.", panel=LOADING)
    card: list[str] | None = option(
        None, "With --memory auto: the card to plan for; default: this machine's.", panel=LOADING
    )
    context: int | None = option(
        None,
        "With --memory auto, and in serve: tokens of the longest row, prompt and answer, e.g. 32k.",
        parser=token_count,
        metavar="TOKENS",
        panel=LOADING,
    )
    cache_type: Literal["auto", "full", "int8"] = option(
        "auto", "How the target's keys and values are stored.", panel=LOADING
    )
    acceleration: Literal["auto", "eager", "compile"] = option(
        "auto",
        "auto: graphs that `eagle31 warmup` made, if any; compile (not in serve): bench makes missing ones first.",
        panel=LOADING,
    )
    chat_template: Path | None = option(
        None, "Jinja file to use instead of the target's chat template.", exists=True, dir_okay=False, panel=LOADING
    )

    def __post_init__(self) -> None:
        """What was named without options is target and drafter."""
        names, self.pair = self.pair or [], None
        if len(names) > 2 or (names and self.target is not None) or (len(names) == 2 and self.drafter is not None):
            raise ConfigurationError(
                f"got {' '.join(names)!r}, which names too much; wanted TARGET DRAFTER, or --target and --drafter"
            )
        if names:
            self.target, self.drafter = names[0], names[1] if len(names) == 2 else self.drafter

    @property
    def has_drafter(self) -> bool:
        """Whether one is asked for; a folder that is called none is `./none`."""
        return self.drafter != NONE

    @property
    def target_name(self) -> str:
        """Folder or id of the target, the embedded one's if none is named."""
        return self.target or str(target_path())


@dataclass(frozen=True)
class DraftOptions:
    """What to draft in a round."""

    draft_tokens: int | None = option(None, "Tokens drafted in a round.", min=1, panel=DRAFTS)
    tree_width: int | None = option(None, "Children per draft token; 1 drafts a chain.", min=1, panel=DRAFTS)
    tree_size: int | None = option(None, "Tokens verified per round with a tree.", min=2, panel=DRAFTS)
    schedule: Literal["planned", "constant", "pid"] = option(
        "planned", "How the draft length follows what is accepted.", panel=DRAFTS
    )

    def apply_to(self, drafter: Assistant) -> None:
        """Set what was asked for; the rest stays as it is, as a memory plan may have decided it."""
        asked = {
            "num_assistant_tokens": self.draft_tokens,
            "draft_top_k": self.tree_width,
            "draft_tree_size": self.tree_size,
            "num_assistant_tokens_schedule": self.schedule,
        }
        for name, value in asked.items():
            if value is not None:
                setattr(drafter.generation_config, name, value)
        drafter.check_settings()

    @property
    def for_trees(self) -> list[str]:
        """Options given that ask for trees."""
        asked = {"--tree-width": self.tree_width if self.tree_width != 1 else None, "--tree-size": self.tree_size}
        return [f"{name} {value}" for name, value in asked.items() if value is not None]


def load_pair(
    source: PairSource, drafting: DraftOptions = DraftOptions(), *, batch: int = 1, needs_drafter: bool = False
) -> LoadedPair:
    """Load target, tokenizer and drafter, and attach them; a memory plan that was asked for is printed before.

    Args:
        batch: rows a memory plan has to leave room for.
        needs_drafter: whether `--drafter none` makes no sense; it is refused before anything is loaded.
    """
    source = _with_own_head(source)
    if source.target is not None and source.drafter is None:
        if missing := missing_folder(source.target):
            raise CheckpointNotFoundError(missing)
        without = "" if needs_drafter else ", or pass --drafter none to look drafts up in the text"
        raise ConfigurationError(
            f"no drafter given for {source.target!r}; name one trained for it with --drafter{without}"
        )
    if needs_drafter and not source.has_drafter:
        raise ConfigurationError(
            "got --drafter none, but this command is about a drafter; name one, or use generate, chat, serve or "
            "warmup, which do without one"
        )
    placed = _placement(source)
    plan = make_plan(source, drafting, batch=batch)
    if plan is not None:
        print_decision(make_console(), plan)
        plan.require_fit()
        if source.card and (card := _card_here(source)) is not None:
            replace(plan, card=card).require_fit()
    install()
    with waiting_for("loading the models"):
        target, tokenizer = load_target(
            source.target_name, dtype=source.dtype, device_map=placed, quantization_config=_packing(source)
        )
        if source.adapter is not None:
            _load_adapter(target, source.adapter)
        if source.chat_template is not None:
            _take_template(tokenizer, source.chat_template)
        drafter = _load_assistant(source, target, plan)
    if source.cache_type != "auto":
        drafter.generation_config.cache_type = source.cache_type
    drafter.generation_config.acceleration = source.acceleration
    drafting.apply_to(drafter)
    return LoadedPair(source.target or "the embedded target", target, drafter, tokenizer, plan)


def _take_template(tokenizer: PreTrainedTokenizerBase, file: Path) -> None:
    """Use a file's chat template. One that refuses a chat of one message in words of its own is strict, not broken."""
    try:
        tokenizer.chat_template = file.read_text(encoding="utf-8")
        encode_chat(tokenizer, [{"role": "user", "content": "Hello"}])
    except (ConfigurationError, OSError, UnicodeDecodeError) as error:
        if type(error.__cause__) is not TemplateError:
            raise ConfigurationError(f"got --chat-template {file}, which cannot be used: {error}") from error
        make_console(stderr=True).print(
            f"--chat-template {file} takes no chat of one message, but says {str(error.__cause__)!r}; chats as it "
            "wants them are answered",
            style="yellow",
            markup=False,
        )


def _with_own_head(source: PairSource) -> PairSource:
    """The source with the target as its own drafter where its MTP head is asked for, or is there and none is named."""
    asked = source.drafter == OWN_HEAD and not Path(OWN_HEAD).is_dir()
    if asked and source.target is None:
        raise ConfigurationError(
            "got --drafter mtp, but the embedded target holds no MTP head; name a target that does (docs/choosing.md)"
        )
    if asked:
        require_head(source.target_name)
    if asked or (source.target is not None and source.drafter is None and target_holds_head(source.target)):
        return replace(source, drafter=source.target)
    return source


def _load_assistant(source: PairSource, target: PreTrainedModel, plan: MemoryPlan | None) -> Assistant:
    if source.has_drafter:
        return Eagle31Drafter.from_pretrained(source.drafter or drafter_path(), target=target, memory=plan)
    alone = NoDrafter(target)
    if plan is not None:
        plan.check_target(target)
        alone.memory_plan = plan
        alone.generation_config.prefill_chunk_size = plan.settings.prefill_chunk
        alone.generation_config.cache_type = plan.settings.cache_type
    return alone


def make_plan(source: PairSource, drafting: DraftOptions, *, batch: int) -> MemoryPlan | None:
    """The memory plan that was asked for, made from configurations alone."""
    planned = " and ".join(f"--{name}" for name in ("card", "context") if getattr(source, name))
    if source.memory is None and not planned:
        return None
    if source.memory is None:
        raise ConfigurationError(
            f"got {planned} without a plan, which is what it is for: pass --memory auto, or leave it out"
        )
    if source.memory != "auto":
        raise ConfigurationError(f"got --memory {source.memory}; {removal('--memory FILE')}")
    return plan_memory(
        source.target_name,
        quantization=_planned_weights(source),
        drafter=(source.drafter or drafter_path()) if source.has_drafter else None,
        card=one_card(source.card or ()) or _card_here(source),
        context=source.context,
        batch=batch,
        draft_tokens=drafting.draft_tokens if source.has_drafter else 0,
        tree_width=drafting.tree_width,
        tree_size=drafting.tree_size,
        cache_type=source.cache_type,
    )


def _card_here(source: PairSource) -> Card | None:
    """The card that the target will sit on; `None`: transformers chooses."""
    return None if source.device_map is not None else measure_card(torch.device(_placement(source)))


def _planned_weights(source: PairSource) -> str | None:
    """What a plan is told of the target's weights; `None`: they are as stored."""
    if source.quantization is not None:
        return source.quantization
    if source.dtype not in ("auto", "stored"):
        return source.dtype
    dtype = dtype_here(source.target_name, dtype=source.dtype, device_map=_placement(source))
    return None if dtype is None else str(dtype).removeprefix("torch.")


def _placement(source: PairSource) -> Any:
    """`device_map` as transformers takes it."""
    if source.device_map is None:
        is_there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
        if not is_there.get(source.device, True):
            raise ConfigurationError(f"this machine has no {source.device} device; use --device cpu or auto")
        return best_kind() if source.device == "auto" else source.device
    if source.device != "auto":
        raise ConfigurationError("--device and --device-map both say where the target goes; pass one of them")
    if not source.device_map.lstrip().startswith("{"):
        return source.device_map
    try:
        return json.loads(source.device_map)
    except ValueError as error:
        raise ConfigurationError(f"got --device-map {source.device_map!r}, which is no JSON: {error}") from error


def _packing(source: PairSource) -> Any:
    """`quantization_config` as transformers takes it."""
    if source.quantization is None:
        return None
    bitsandbytes()  # says how to install it
    dtype = None if source.dtype in ("auto", "stored") else SHORT_NAMES.get(source.dtype, source.dtype)
    return packing_config(source.quantization, dtype)


def _load_adapter(target: PreTrainedModel, adapter: str) -> None:
    if not is_peft_available():
        raise ConfigurationError("--adapter needs the package peft: pip install peft")
    try:
        target.load_adapter(adapter)
    except (OSError, ValueError, RuntimeError) as error:
        raise CheckpointNotFoundError(
            f"the adapter {adapter!r} cannot be put on {target.name_or_path!r}: {first_line(error)}; wanted a folder "
            "or Hub id of a PEFT adapter made for this target"
        ) from error
