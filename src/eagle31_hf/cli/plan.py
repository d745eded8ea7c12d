"""`eagle31 plan`: what fits on a card, before anything is loaded."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

import typer
from rich.console import Console

from ..errors import ConfigurationError
from ..memory import MemoryPlan, plan_memory
from ..memory.cards import one_card
from ..memory.known_targets import find_known_target
from ..memory.plan import LEDGER_COLUMNS, decision_rows, ledger_rows, part_rows
from .options import JSON, argument, command, make_console, option, plain_table, token_count, writable_plot, write_json
from .progress import waiting_for


@dataclass(frozen=True)
class PlanOptions:
    """What to plan for: most arguments of `plan_memory`."""

    drafter: str | None = option(
        None,
        "Folder or Hub id; mtp: the head inside the target, which is the default where there is one, else one "
        "shaped like the target; none.",
    )
    quantization: str | None = option(
        None, "4bit, 8bit, or by name: bf16, fp16, bnb-nf4 ...", "--quantization", "--quant"
    )
    card: list[str] | None = option(None, "E.g. 'RTX 4090', 'M3 Ultra' or 24GB; default: this machine.")
    context: int | None = option(
        None,
        "Tokens of the longest row, prompt and answer, e.g. 32k; default: 8192, or as trained.",
        parser=token_count,
        metavar="TOKENS",
    )
    batch: int = option(1, "Rows.")
    draft_tokens: int | None = option(None, "Draft depth, 0 for none; default: as drafted.")
    tree_width: int | None = option(None, "Children per draft token; 1 drafts a chain.")
    tree_size: int | None = option(None, "Tokens verified per round with a tree.")
    prefill_chunk: int | None = option(None, "Prompt tokens per forward; default: what fits.")
    margin: int | None = option(None, "Bytes of the card to leave free; default: 3 %.")

    def plan(self, target: str) -> MemoryPlan:
        """What they ask for.

        Raises:
            ConfigurationError: drafts of no drafter.
            MemoryPlanError: as of `plan_memory`.
        """
        arguments = {**vars(self), "card": one_card(self.card or ())}
        if self.drafter == "none":
            if self.draft_tokens or self.tree_width or self.tree_size:
                raise ConfigurationError(
                    "got --drafter none with --draft-tokens, --tree-width or --tree-size; a plan without a drafter "
                    "has none"
                )
            arguments |= {"drafter": None, "draft_tokens": 0}
        return plan_memory(target, **arguments)


@command
def plan(
    *,
    options: PlanOptions,
    target: str = argument("Hub id or folder of a target, or e.g. 'Llama 3.1 8B'."),
    formulas: bool = option(False, "Show every term, when it is alive, and how it is computed.", "--formulas"),
    plot: Path | None = option(
        None, "Draw what fills the card to this picture.", dir_okay=False, callback=writable_plot
    ),
    json_path: Path | None = JSON,
) -> None:
    """Plan a run's memory from configurations alone. Exit code 1 if it does not fit."""
    is_here = Path(target).exists() or find_known_target(target) is not None
    # Without a network huggingface_hub tries for half a minute.
    with waiting_for("planning" if is_here else f"asking the Hub for {target}, then planning"):
        made = options.plan(target)
    write_json(json_path, made.to_dict())  # before a picture can fail
    console = make_console()
    print_decision(console, made)
    console.print(plain_table(part_rows(made)))
    if formulas:
        console.print()
        console.print(plain_table(ledger_rows(made), *LEDGER_COLUMNS))
    if made.fits:
        console.print(f"\n{command_to_run(made, target, options.drafter)}", soft_wrap=True)
    if plot is not None:
        from ..measure.plots import plot_card  # the loop comes with it, which no plan needs

        plot_card(made, plot)
    raise typer.Exit(0 if made.fits else 1)


_AS_LOADED = {"bnb-nf4": "--quantization 4bit", "bnb-nf4-dq": "--quantization 4bit", "bnb-int8": "--quantization 8bit"}


def command_to_run(plan: MemoryPlan, target: str, drafter: str | None) -> str:
    """What starts a chat under this plan."""
    is_named = "/" in target or Path(target).exists()
    words = ["eagle31 chat", shlex.quote(target) if is_named else "TARGET"]
    if drafter is not None:
        words.append(shlex.quote(drafter))
    elif plan.drafter is not None and "MTP" not in plan.drafter.name:
        words.append("DRAFTER")
    words.append(_AS_LOADED.get(plan.target.quantization.name, ""))
    words.append(f"--memory auto --context {plan.settings.context}")
    return " ".join(filter(None, words))


def print_decision(console: Console, plan: MemoryPlan) -> None:
    """What a plan decided and what to look out for."""
    console.print(plain_table(decision_rows(plan)))
    for warning in plan.warnings:
        console.print(f"[yellow]warning:[/yellow] {warning}")
    console.print()
