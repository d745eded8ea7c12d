"""A small target of Qwen3.5's shape with a multi-token-prediction head of its own: what is the head worth, and is it
run right?

    python examples/studies/small_mtp.py gsm8k_train.jsonl taskmaster_train.jsonl --held-out gsm8k_heldout.jsonl \\
        --out small --json small-mtp.json

Trains the target (gated delta net, every fourth layer attention; or of Mellum's shape; an uneven final norm) on
conversations, then its head beside it, both for so many minutes of processor time, and writes them as such targets are
published. Then the pair writes held-out answers, and a slow reference does the same: it reads the whole text anew for
every draft step and keeps no cache. Both must accept the same numbers of tokens pass by pass. What is in the folder
already is not trained again.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from itertools import chain, product
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3_5TextConfig

from eagle31_hf import Eagle31Drafter
from eagle31_hf.demo import target_path
from eagle31_hf.stats import Acceptance
from eagle31_hf.texts.conversations import read_conversations

ROWS, WIDTH, RATE = 8, 128, 2e-3
UNROLLED = 3
"""Draft steps that the head is trained for."""
NAMES = {"fc.": "mtp.fc.", "enorm.": "mtp.pre_fc_norm_embedding.", "hnorm.": "mtp.pre_fc_norm_hidden.",
         "norm.": "mtp.norm.", "layers.": "mtp.layers."}  # fmt: skip


def shape_of(family: str, like: Any, layers: int, linear_head: int) -> Any:
    """As wide as the embedded target."""
    same = ("vocab_size", "hidden_size", "max_position_embeddings", "bos_token_id", "eos_token_id", "pad_token_id")
    common = {name: getattr(like, name) for name in same}
    common |= {"num_hidden_layers": layers, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
               "tie_word_embeddings": True}  # fmt: skip
    if family == "mellum":  # every other layer sees a window; experts
        from transformers import MellumConfig  # from 5.24 on

        return MellumConfig(
            **common, moe_intermediate_size=like.hidden_size, num_experts=4, num_experts_per_tok=2, sliding_window=512,
            mlp_layer_types=["sparse"] * layers, layer_types=["full_attention", "sliding_attention"] * (layers // 2),
            num_nextn_predict_layers=1, mtp_layer_types=["sliding_attention"], mtp_mlp_layer_types=["sparse"],
        )  # fmt: skip
    return Qwen3_5TextConfig(
        **common, intermediate_size=2 * like.hidden_size, mtp_num_hidden_layers=1,
        linear_num_key_heads=128 // linear_head, linear_num_value_heads=256 // linear_head,
        linear_key_head_dim=linear_head, linear_value_head_dim=linear_head,
    )  # fmt: skip


def batches_of(options: argparse.Namespace, tokenizer: Any, seed: int) -> Iterator[Tensor]:
    """Pieces `(ROWS, WIDTH)` of all conversations one after the other, each time other ones."""
    chats = read_conversations(options.texts, limit=options.limit_texts)
    rows = [tokenizer.apply_chat_template(list(chat.messages), return_dict=False) for chat in chats]
    ids, dice = torch.tensor([*chain.from_iterable(rows)]), torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(ids) - WIDTH, (ROWS,), generator=dice)
        yield ids[starts[:, None] + torch.arange(WIDTH)]


def train(
    weights: list[Tensor], loss_of: Callable[[Tensor], Tensor], batches: Iterator[Tensor], minutes: float
) -> None:
    """For so many minutes of processor time."""
    optimizer = torch.optim.AdamW(weights, lr=RATE, betas=(0.9, 0.95), weight_decay=0.01)
    started, done, steps = time.process_time(), 0.0, 0
    while done < 1:
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(1.0, 20 * done + 0.05) * (1 - done)
        loss = loss_of(next(batches))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        steps, done = steps + 1, (time.process_time() - started) / (60 * minutes)
        if steps % 50 == 0:
            print(f"step {steps}, {done:.0%}, loss {loss.item():.3f}", flush=True)


def make_target(options: argparse.Namespace) -> None:
    """Train the target and write it."""
    tokenizer = AutoTokenizer.from_pretrained(target_path())
    embedded = AutoModelForCausalLM.from_pretrained(target_path(), dtype=torch.float32)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        shape_of(options.family, embedded.config, options.layers, options.linear_head), dtype=torch.float32
    )
    with torch.no_grad():
        model.get_input_embeddings().weight.copy_(embedded.get_input_embeddings().weight)
        norm = model.get_decoder().norm.weight  # even norms would hide whether raw or normed states are read
        norm.add_(0.4 * torch.randn_like(norm))
    batches = batches_of(options, tokenizer, seed=0)
    model.get_decoder().norm.weight.requires_grad_(False)
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    train(weights, lambda ids: model(input_ids=ids, labels=ids, use_cache=False).loss, batches, options.minutes)
    model.eval().save_pretrained(options.out)
    tokenizer.save_pretrained(options.out)


def fresh_head(target: Any) -> dict[str, Tensor]:
    """Tensors of a head by its published names, its layer a copy of the target's last."""
    width = target.config.hidden_size
    layer = {f"mtp.layers.0.{name}": t.clone() for name, t in target.get_decoder().layers[-1].state_dict().items()}
    norm = target.get_decoder().norm.weight.detach().clone()
    start = torch.cat((0.5 * torch.eye(width), 0.5 * torch.eye(width)), dim=1)
    even = torch.full((width,), float(target.config.model_type == "mellum"))  # Qwen's norms multiply by 1 + w
    norms = {"mtp.norm.weight": norm, "mtp.pre_fc_norm_embedding.weight": even,
             "mtp.pre_fc_norm_hidden.weight": even.clone()}  # fmt: skip
    return {**layer, **norms, "mtp.fc.weight": start}


def make_head(options: argparse.Namespace) -> None:
    """Train a head beside the target, by its own cross-entropy over several draft steps, and write it into its file."""
    target = AutoModelForCausalLM.from_pretrained(options.out, dtype=torch.float32).eval()
    path = options.out / "model.safetensors"
    stored = load_file(path)
    save_file({**stored, **fresh_head(target)}, path, metadata={"format": "pt"})
    head = Eagle31Drafter.from_pretrained(options.out, target=target)
    weights = [weight.requires_grad_() for name, weight in head.named_parameters() if not name.startswith("lm_head")]

    def loss_of(ids: Tensor) -> Tensor:
        with torch.no_grad():
            output = target.get_decoder()(ids)
            teacher = target.lm_head(output.last_hidden_state).log_softmax(-1)
        states, loss = output.last_hidden_state[:, :-1], torch.zeros(())
        tokens = ids[:, 1:]
        for step in range(UNROLLED):
            positions = torch.arange(tokens.shape[1])[None] + step
            out = head.decode(target.get_input_embeddings()(tokens), states, head.rotary(positions))
            wanted = teacher[:, step + 1 :]
            drafted = target.lm_head(out.normed).log_softmax(-1)
            loss = loss + F.kl_div(drafted, wanted, log_target=True, reduction="batchmean") / wanted.shape[1]
            states, tokens = out.feedback[:, :-1], tokens[:, 1:]
        return loss / UNROLLED

    batches = batches_of(options, AutoTokenizer.from_pretrained(options.out), seed=1)
    train(weights, loss_of, batches, options.head_minutes)
    trained = {}
    for name, tensor in head.canonical_tensors().items():
        beginning = next(each for each in NAMES if name.startswith(each))
        trained[NAMES[beginning] + name.removeprefix(beginning)] = tensor.detach().clone()
    save_file({**stored, **trained}, path, metadata={"format": "pt"})


@torch.inference_mode()
def slow_passes(target: Any, head: Any, prompt: Tensor, new_tokens: int, depth: int) -> tuple[Tensor, list[int]]:
    """The greedy text, and the tokens each pass wrote, of a reference that reads everything anew in every step."""
    ids, passes = prompt, []
    embed = target.get_input_embeddings()
    ids = torch.cat((ids, target(ids[None]).logits[0, -1:].argmax(-1)))
    while len(ids) - len(prompt) < new_tokens and ids[-1] != target.config.eos_token_id:
        states = target.get_decoder()(ids[None, :-1]).last_hidden_state
        tokens, drafts = ids[1:], []
        for _ in range(depth):
            rotary = head.rotary(torch.arange(len(tokens))[None])
            out = head.decode(embed(tokens[None]), states, rotary)
            drafts.append(target.lm_head(out.normed[:, -1])[0, : head.config.draft_vocab_size].argmax())
            states = torch.cat((states, out.feedback[:, -1:]), dim=1)
            tokens = torch.cat((tokens, drafts[-1][None]))
        drafted = torch.stack(drafts)
        chosen = target(torch.cat((ids, drafted))[None]).logits[0, len(ids) - 1 :].argmax(-1)
        agreed = int((chosen[:-1] == drafted).long().cumprod(0).sum())
        written = chosen[: agreed + 1]
        ends = (written == target.config.eos_token_id).nonzero()
        written = written[: int(ends[0]) + 1] if len(ends) else written
        written = written[: new_tokens - (len(ids) - len(prompt))]
        ids = torch.cat((ids, written))
        passes.append(len(written))
    return ids, passes


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Tokens a pass by draft length and temperature, and agreement with the reference."""
    target = AutoModelForCausalLM.from_pretrained(options.out, dtype=torch.float32).eval()
    head = Eagle31Drafter.from_pretrained(options.out, target=target, draft_vocab_size=options.draft_vocab)
    head.generation_config.num_assistant_tokens_schedule = "constant"
    head.generation_config.acceleration = "eager"
    tokenizer = AutoTokenizer.from_pretrained(options.out)
    prompts = []
    for chat in read_conversations(options.held_out, limit=options.prompts):
        opening = list(chat.messages)[:1]
        ids = tokenizer.apply_chat_template(opening, add_generation_prompt=True, return_dict=False)
        prompts.append(torch.tensor(ids))
    by_drafts = [
        of_length(target, head, prompts, depth, temperature, options.new_tokens)
        for temperature, depth in product((0.0, 1.0), options.drafts)
    ]
    reference = against_reference(target, head, prompts, options.new_tokens)
    rows = head.config.draft_vocab_size
    return {"draft_rows": rows, "texts": len(prompts), "by_drafts": by_drafts, "reference": reference}


def of_length(
    target: Any, head: Any, prompts: list[Tensor], depth: int, temperature: float, new_tokens: int
) -> dict[str, Any]:
    """Tokens a pass over all prompts, and whether every text is plain decoding's."""
    head.generation_config.num_assistant_tokens = depth
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
    equal, stats = 0, []
    for number, prompt in enumerate(prompts):
        texts = []
        for assistant in ({}, {"assistant_model": head}):
            torch.manual_seed(number)
            texts.append(target.generate(prompt[None], max_new_tokens=new_tokens, **sampling, **assistant))
        equal += torch.equal(*texts)
        stats.append(head.stats)
    tokens, passes = sum(each.new_tokens - 1 for each in stats), sum(each.passes for each in stats)
    accepted_at = [round(share, 3) for share in Acceptance.of(stats).cumulative_acceptance[:depth]]
    return {"drafts": depth, "temperature": temperature, "tokens_per_pass": round(tokens / passes, 3),
            "accepted_at": accepted_at, "equal_texts": equal}  # fmt: skip


def against_reference(target: Any, head: Any, prompts: list[Tensor], new_tokens: int) -> dict[str, Any]:
    """Whether each text's passes wrote as many tokens as the reference's, with three drafts."""
    head.generation_config.num_assistant_tokens = 3
    same, ours, theirs = 0, [], []
    for prompt in prompts:
        text, passes = slow_passes(target, head, prompt, new_tokens, 3)
        out = target.generate(prompt[None], max_new_tokens=new_tokens, do_sample=False, assistant_model=head)
        written = [count for _, count in head.stats.arrivals[1:]]  # the first is a token of its own
        same += torch.equal(out[0], text) and written == passes
        ours += written
        theirs += passes
    return {"same_pass_by_pass": same, "of": len(prompts), "tokens_per_pass": round(mean(ours), 3),
            "reference_tokens_per_pass": round(mean(theirs), 3)}  # fmt: skip


def main(arguments: list[str] | None = None) -> None:
    """Train what is missing, measure, write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("texts", nargs="+", help="JSONL files with conversations to learn from")
    parser.add_argument("--held-out", nargs="+", required=True, help="such files to measure on")
    parser.add_argument("--out", type=Path, default=Path("small-mtp"))
    parser.add_argument("--family", choices=["qwen3_5", "mellum"], default="qwen3_5")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--linear-head", type=int, default=32, help="width of linear layers' heads; vLLM on a CPU: 128")
    parser.add_argument("--minutes", type=float, default=6.0, help="of processor time, for the target")
    parser.add_argument("--head-minutes", type=float, default=4.0)
    parser.add_argument("--limit-texts", type=int, default=2000, help="of each file to learn from")
    parser.add_argument("--prompts", type=int, default=5, help="of each held-out file")
    parser.add_argument("--new-tokens", type=int, default=80)
    parser.add_argument("--drafts", type=int, nargs="+", default=[1, 2, 3, 4, 5], help="lengths to measure")
    parser.add_argument("--draft-vocab", type=int)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    if not (options.out / "config.json").exists():
        make_target(options)
    if not any(name.startswith("mtp.") for name in load_file(options.out / "model.safetensors")):
        make_head(options)
    record = measure(options)
    print(json.dumps(record, indent=1))
    if options.json is not None:
        options.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
