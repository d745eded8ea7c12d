"""EAGLE-3 form against EAGLE 3.1 form: same texts, steps and seeds; acceptance by depth where they should differ.

    python compare_eagle3_and_31.py TARGET --prompts chats.jsonl --held-out other.jsonl --out study

Conditions: clean prompts, perturbed chat templates (other role markers, a system prompt added, white space), and
contexts of twice the trained length. Beside them the norm of the state that a draft step hands to the next. Tables go
to standard output, all figures to OUT/comparison.json. A run that was stopped goes on when it is called again.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers import set_seed

from eagle31_hf import Eagle31Drafter
from eagle31_hf.drafter.session import DraftSession
from eagle31_hf.target.binding import TargetBinding
from eagle31_hf.texts.conversations import read_conversations
from eagle31_hf.texts.rows import Conversation
from eagle31_hf.training.data.vocabulary import build_vocabulary, count_supervised
from eagle31_hf.training.distillation.evaluation import (
    EvaluationPrompt,
    EvaluationSettings,
    context_of,
    measure_acceptance,
)
from eagle31_hf.training.distillation.features import compute_features
from eagle31_hf.training.preparation import Preparation
from eagle31_hf.training.settings import ResolvedSettings, TrainingSettings
from eagle31_hf.training.setup import fresh_drafter, load_target, resolve
from eagle31_hf.training.train import train_drafter
from eagle31_hf.trees.draft_tree import to_target_ids

FORMS: dict[str, dict[str, Any]] = {
    "EAGLE-3": {"aux_norm": "none", "norm_output": False},
    "EAGLE 3.1": {"aux_norm": "per_slot", "norm_output": True},
}
DEPTH = 8
SYSTEM = {"role": "system", "content": "You are a helpful assistant. Answer briefly."}


# --- conditions -------------------------------------------------------------------------------------------------------


def render(tokenizer: Any, messages: Sequence[dict], change: Callable[[str], str] = lambda text: text) -> list[int]:
    text = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
    return tokenizer(change(text), add_special_tokens=False)["input_ids"]


def other_markers(text: str) -> str:
    for role in ("user", "assistant", "system"):
        text = text.replace(f"<|{role}|>", f"\n### {role.capitalize()}:\n")
    return text


def toggle_system(messages: list[dict]) -> list[dict]:
    return messages[1:] if messages[0]["role"] == "system" else [SYSTEM, *messages]


def white_space(text: str) -> str:
    return text.replace("|>", "|>\n ").replace(". ", ".  ")


def long_context(tokenizer: Any, chats: Sequence[Conversation], start: int, length: int) -> list[int]:
    """The prompt of chat `start` behind as many other whole chats as it takes to reach `length` tokens."""
    messages = context_of(chats[start])
    for offset in range(1, len(chats)):
        ids = render(tokenizer, messages)
        if len(ids) >= length:
            break
        messages = list(chats[(start + offset) % len(chats)].messages) + messages
    return ids


def conditions(tokenizer: Any, chats: Sequence[Conversation], length: int) -> dict[str, list[EvaluationPrompt]]:
    contexts = [context_of(chat) for chat in chats]
    ids = {
        "clean": [render(tokenizer, context) for context in contexts],
        "other role markers": [render(tokenizer, context, other_markers) for context in contexts],
        "system prompt toggled": [render(tokenizer, toggle_system(context)) for context in contexts],
        "white space": [render(tokenizer, context, white_space) for context in contexts],
        "twice the length": [long_context(tokenizer, chats, i, 2 * length) for i in range(len(chats))],
    }
    return {name: [EvaluationPrompt(row, name) for row in rows] for name, rows in ids.items()}


# --- measuring --------------------------------------------------------------------------------------------------------


@torch.no_grad()
def feedback_norms(drafter: Eagle31Drafter, prompts: Sequence[EvaluationPrompt]) -> list[float]:
    """Mean norm of what each draft step hands on, depth 1 to `DEPTH`, drafting greedily after every prompt."""
    binding: TargetBinding = drafter.binding
    sums = torch.zeros(DEPTH)
    for prompt in prompts:
        ids = torch.tensor([prompt.input_ids], device=binding.input_device)
        aux = compute_features(binding, ids, torch.arange(ids.shape[1], device=ids.device)[None]).aux
        session = DraftSession(drafter, batch_size=1, capacity=ids.shape[1] + DEPTH, block=ids.shape[1])
        session.absorb(ids[:, 1:], aux[:, :-1], [ids.shape[1] - 1])
        state = session.root
        for depth in range(DEPTH):
            sums[depth] += state.feedback.float().norm(dim=-1).mean().cpu()
            if depth + 1 < DEPTH:
                tokens = to_target_ids(state.logits.argmax(-1), session.draft_ids)
                state = session.step(tokens, state.feedback, after=depth, depth=depth)
    return (sums / len(prompts)).tolist()


def measure(drafter: Eagle31Drafter, prompts: dict[str, list[EvaluationPrompt]], new_tokens: int) -> dict[str, Any]:
    settings = EvaluationSettings(depth=DEPTH, max_new_tokens=new_tokens)
    record: dict[str, Any] = {}
    for name, chosen in prompts.items():
        counts = measure_acceptance(drafter, chosen, settings)[name]
        record[name] = {"length": counts.acceptance_length, "by_depth": counts.cumulative}
    return {"acceptance": record, "norms": feedback_norms(drafter, prompts["clean"])}


# --- the study --------------------------------------------------------------------------------------------------------


def train(form: str, seed: int, told: TrainingSettings, start: Callable[[], Eagle31Drafter]) -> Path:
    """The folder of a drafter of this form and seed; what was finished before is not trained again."""
    folder = told.out / f"{form.replace(' ', '-')}-seed{seed}"
    if not (folder / "training_report.json").exists():
        set_seed(seed)
        start().save_pretrained(folder / "start")
        resume = any(folder.glob("stage1/checkpoint-*"))
        # The best checkpoint is chosen on rows of the prompts: those that are held out only judge.
        told = replace(told, out=folder, drafter=str(folder / "start"), held_out=(), seed=seed, resume=resume)
        train_drafter(told)
    return folder


def settings_of_further_runs(settings: ResolvedSettings) -> ResolvedSettings:
    """For other runs on the texts of one, after `Preparation.read_texts`: what the target wrote is read again.

    Rows kept for measuring are not among those it wrote. Without regeneration the settings are the run's own.
    """
    if settings.regenerate == "none":
        return settings
    written = settings.out / "data" / "conversations.jsonl"
    return replace(settings, prompts=(str(written),), regenerate="none", max_rows=None)


def study(told: TrainingSettings, seeds: int, rows: int, new_tokens: int) -> dict[str, Any]:
    target, tokenizer = load_target(told)
    told = resolve(told, target)
    assert told.draft_vocab_size is not None, "resolve sets it"
    assert told.max_length is not None, "resolve sets it"
    console = Console(stderr=True)
    preparation = Preparation(told, target, tokenizer, console)
    texts = preparation.read_texts()
    counts = count_supervised(texts.documents.documents, target.config.get_text_config().vocab_size)
    vocabulary = build_vocabulary(counts, told.draft_vocab_size)
    told = settings_of_further_runs(told)  # every run reads what was written once
    prompts = conditions(tokenizer, read_conversations(told.held_out, limit=rows), told.max_length)
    results: dict[str, Any] = {}
    for seed in range(seeds):
        for form, fields in FORMS.items():
            folder = train(form, seed, told, lambda fields=fields: fresh_drafter(target, vocabulary, **fields))
            drafter = Eagle31Drafter.from_pretrained(folder, target=target)
            results.setdefault(form, []).append(measure(drafter, prompts, new_tokens))
            console.print(f"{form}, seed {seed}: measured", highlight=False)
    return results


def tables(results: dict[str, Any]) -> str:
    """Mean over seeds, and the range of acceptance length."""
    lines = ["| prompts | form | acceptance length (least to most) | accepted at depth 1 to 8 |", "|---|---|---|---|"]
    for condition in next(iter(results.values()))[0]["acceptance"]:
        for form, runs in results.items():
            lengths = [run["acceptance"][condition]["length"] for run in runs]
            depths = torch.tensor([run["acceptance"][condition]["by_depth"] for run in runs]).mean(0)
            mean = sum(lengths) / len(lengths)
            lines.append(
                f"| {condition} | {form} | {mean:.3f} ({min(lengths):.3f} to {max(lengths):.3f}) | "
                f"{' '.join(f'{value:.2f}' for value in depths)} |"
            )
    lines += ["", "| form | norm of the state handed on, depth 1 to 8 | last by first |", "|---|---|---|"]
    for form, runs in results.items():
        norms = torch.tensor([run["norms"] for run in runs]).mean(0)
        values = " ".join(f"{value:.1f}" for value in norms)
        lines.append(f"| {form} | {values} | {norms[-1] / norms[0]:.2f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target")
    parser.add_argument("--prompts", nargs="+", required=True)
    parser.add_argument("--held-out", nargs="+", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--max-rows", type=int, help="conversations of each source to train on")
    parser.add_argument("--regenerate", help="which turns the target writes: each, last or none; default suits it")
    parser.add_argument("--dtype", default="auto", help="precision of the target")
    parser.add_argument("--max-steps", type=int)
    parser.add_argument("--max-length", type=int, help="trained length; contexts of twice as much are measured")
    parser.add_argument("--measured-rows", type=int, default=25, help="held-out conversations of each source")
    parser.add_argument("--new-tokens", type=int, default=64)
    given = parser.parse_args()
    told = TrainingSettings(
        target=given.target,
        prompts=tuple(given.prompts),
        held_out=tuple(given.held_out),
        out=given.out,
        max_rows=given.max_rows,
        regenerate=given.regenerate,
        dtype=given.dtype,
        max_steps=given.max_steps,
        learning_rate=8e-3,  # as the tables were made; 2e-3 and 2 rows came later
        batch_rows=4,
        max_length=given.max_length,
    )
    results = study(told, given.seeds, given.measured_rows, given.new_tokens)
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / "comparison.json").write_text(json.dumps(results, indent=1), encoding="utf-8")
    print(tables(results))


if __name__ == "__main__":
    main()
