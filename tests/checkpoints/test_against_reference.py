"""Published files whose configs are unusual draft what their trainers' formulas say: logits of whole greedy chains."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest
import torch
import transformers as hf
from reference_drafter import Latent, Reference, plain_frequencies, yarn_frequencies
from tiny_checkpoints import random_tensors, save
from torch import Tensor
from torch.nn.functional import gelu

from eagle31_hf import Eagle31Drafter
from eagle31_hf.checkpoints import inspect_checkpoint
from helpers import random_target, seeded

WIDTH, HEADS, KV_HEADS, HEAD_DIM, INNER, VOCABULARY, DRAFTS, STEPS = 32, 4, 2, 8, 48, 120, 60, 4
LAYERS = 12
FULL, SLIDING = "full_attention", "sliding_attention"
COMMON: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_size": WIDTH,
    "intermediate_size": INNER, "num_hidden_layers": 1, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM, "hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 1e6,
    "max_position_embeddings": 512, "vocab_size": VOCABULARY, "draft_vocab_size": DRAFTS, "tie_word_embeddings": False,
}  # fmt: skip
LATENT = Latent(rank=10, plain=6, rotated=4, value=5)
LATENT_FIELDS = {
    "kv_lora_rank": 10, "q_lora_rank": 12, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5,
}  # fmt: skip
YARN = {"factor": 8.0, "original_max_position_embeddings": 64, "beta_fast": 32, "beta_slow": 1}
DEEPSEEK_YARN = {"type": "yarn", "mscale": 1.0, "mscale_all_dim": 1.0, **YARN}
SHORT, LONG = [1.0, 1.05, 1.1, 1.3], [1.1, 2.0, 8.0, 30.0]


def gelu_tanh(x: Tensor) -> Tensor:
    return gelu(x, approximate="tanh")


def longrope(max_length: int, original: int) -> float:
    return math.sqrt(1 + math.log(max_length / original) / math.log(original))


@dataclass(frozen=True)
class Case:
    """A file as somebody writes it: entries of its config (`...` leaves one out), and what they mean to its trainer."""

    config: dict[str, Any]
    means: dict[str, Any] = field(default_factory=dict)
    taps: tuple[int, ...] = (2, LAYERS // 2, LAYERS - 3)
    prefix: str = "midlayer."
    wrapper: str = ""
    norms: bool = False  # on query and key heads
    whole: bool = False  # the draft vocabulary
    latent: bool = False
    renamed_map: bool = False
    embeds: bool = True


GEMMA_ROPES = {
    FULL: {"rope_type": "default", "rope_theta": 3e5}, SLIDING: {"rope_type": "default", "rope_theta": 2e4},
}  # fmt: skip
DEEPSPEC = {"architectures": ["Qwen3Eagle3Model"], "model_type": "qwen3", "draft_vocab_size": ..., "ttt_length": 7,
            "layer_types": [FULL], "num_target_layers": LAYERS, "step_loss_decay": 0.8, "max_window_layers": LAYERS,
            "draft_num_hidden_layers": 1, "use_sliding_window": False, "sliding_window": None}  # fmt: skip
NEMO = {"architectures": ["LlamaEagle3DraftModel"], "num_aux_hidden_states": 3, "target_hidden_size": WIDTH}
NEMO_NAMES: dict[str, Any] = {"prefix": "layers.0.", "wrapper": "model."}
CASES = {
    "DeepSpec": Case(
        DEEPSPEC | {"target_layer_ids": [1, 3, 5, 7, 9]}, taps=(2, 4, 6, 8, 10), prefix="layers.0.", norms=True,
        whole=True,
    ),
    "verl-SpeCo": Case({"target_layer_ids": [1, 4, 10]}, taps=(2, 5, 11)),
    "verl-SpeCo, another key": Case({"eagle_config": {"target_hidden_layer_ids": [3, 4, 9]}}, taps=(4, 5, 10)),
    "mrope": Case({"rope_scaling": {"type": "mrope", "mrope_section": [2, 1, 1]}}),
    "mrope, interleaved": Case(
        {"rope_scaling": {"rope_type": "default", "mrope_section": [2, 1, 1], "mrope_interleaved": True}}
    ),
    "nested rope": Case(
        {"rope_theta": ..., "rope_parameters": GEMMA_ROPES}, {"frequencies": plain_frequencies(3e5, HEAD_DIM)}
    ),
    "nested rope of a drafter with a window": Case(
        {"rope_parameters": GEMMA_ROPES, "layer_types": [SLIDING], "sliding_window": 5},
        {"frequencies": plain_frequencies(2e4, HEAD_DIM), "window": 5},
    ),
    "longrope, original length beside it, short text": Case(
        {"rope_scaling": {"type": "longrope", "short_factor": SHORT, "long_factor": LONG},
         "original_max_position_embeddings": 64},
        {"frequencies": plain_frequencies(1e6, HEAD_DIM) / torch.tensor(SHORT, dtype=torch.float64),
         "rotary_scale": longrope(512, 64)},
    ),
    "longrope by its first name, long text": Case(
        {"rope_scaling": {"type": "su", "short_factor": SHORT, "long_factor": LONG},
         "original_max_position_embeddings": 8},
        {"frequencies": plain_frequencies(1e6, HEAD_DIM) / torch.tensor(LONG, dtype=torch.float64),
         "rotary_scale": longrope(512, 8)},
    ),
    "yarn, original length beside it": Case(
        {"rope_scaling": {"type": "yarn", "factor": 8.0}, "original_max_position_embeddings": 64},
        {"frequencies": yarn_frequencies(1e6, HEAD_DIM, 8.0, 64), "rotary_scale": 0.1 * math.log(8.0) + 1},
    ),
    "hidden_activation": Case({"hidden_act": ..., "hidden_activation": "gelu_pytorch_tanh"}, {"activation": gelu_tanh}),
    "Gemma's two activations": Case(
        {"hidden_act": "gelu", "hidden_activation": "gelu_pytorch_tanh"}, {"activation": gelu}
    ),
    "renamed map": Case({}, renamed_map=True),
    "the target's layers and types": Case(
        {"num_hidden_layers": LAYERS, "layer_types": [SLIDING, FULL] * 6, "sliding_window": 5}
    ),
    "a hybrid target's types": Case({"layer_types": ["linear_attention"] * 3 + [FULL], "sliding_window": 5}),
    "Qwen's window, which begins in later layers": Case(
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 8}
    ),
    "NeMo for gpt-oss": Case(
        NEMO | {"layer_types": [SLIDING, FULL] * 6, "sliding_window": 5, "num_hidden_layers": LAYERS,
                "swiglu_limit": 7.0, "rope_theta": ..., "num_local_experts": 32,
                "rope_parameters": {"rope_type": "yarn", "rope_theta": 150000.0, "truncate": True, **YARN}},
        {"frequencies": yarn_frequencies(150000.0, HEAD_DIM, 8.0, 64), "rotary_scale": 0.1 * math.log(8.0) + 1},
        **NEMO_NAMES,
    ),
    "NeMo for Gemma 4": Case(
        NEMO | {"layer_types": [SLIDING] * 5 + [FULL], "sliding_window": 5, "hidden_act": "gelu_pytorch_tanh",
                "hidden_activation": "gelu_pytorch_tanh", "final_logit_softcapping": 30.0, "global_head_dim": 16,
                "query_pre_attn_scalar": 256, "rope_parameters": None, "partial_rotary_factor": 1.0},
        {"activation": gelu_tanh},
        **NEMO_NAMES,
    ),
    "NeMo for DeepSeek": Case(
        {"architectures": ["DeepseekV3Eagle3DraftModel"], "num_hidden_layers": 61, "rope_scaling": DEEPSEEK_YARN,
         "head_dim": 64, "rope_interleave": True, **LATENT_FIELDS},
        {"frequencies": yarn_frequencies(1e6, 4, 8.0, 64)},
        latent=True,
        **NEMO_NAMES,
    ),
    "NeMo for DeepSeek, texts no longer than the original ones": Case(
        {"architectures": ["DeepseekV3Eagle3DraftModel"], "rope_scaling": DEEPSEEK_YARN, **LATENT_FIELDS,
         "max_position_embeddings": 64, "q_lora_rank": None},
        {"frequencies": plain_frequencies(1e6, 4)},
        latent=True,
        **NEMO_NAMES,
    ),
    "latent sizes of the target": Case(LATENT_FIELDS),
    "latent sizes of the target, NeMo": Case(NEMO | LATENT_FIELDS, **NEMO_NAMES),
}  # fmt: skip


def network(case: Case) -> dict[str, Tensor]:
    """Its tensors without prefixes."""
    read = 2 * WIDTH
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (WIDTH, len(case.taps) * WIDTH), "lm_head.weight": (VOCABULARY if case.whole else DRAFTS, WIDTH),
        "mlp.gate_proj.weight": (INNER, WIDTH), "mlp.up_proj.weight": (INNER, WIDTH),
        "mlp.down_proj.weight": (WIDTH, INNER),
    }  # fmt: skip
    norms = {"norm": WIDTH, "input_layernorm": WIDTH, "hidden_norm": WIDTH, "post_attention_layernorm": WIDTH}
    if case.latent:
        query = HEADS * (LATENT.plain + LATENT.rotated)
        if case.config["q_lora_rank"] is None:
            attention = {"q_proj": (query, read)}
        else:
            attention = {"q_a_proj": (12, read), "q_b_proj": (query, 12)}
            norms["self_attn.q_a_layernorm"] = 12
        attention |= {"kv_a_proj_with_mqa": (14, read), "kv_b_proj": (HEADS * 11, 10), "o_proj": (WIDTH, HEADS * 5)}
        norms["self_attn.kv_a_layernorm"] = 10
    else:
        rows, few = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
        attention = {"q_proj": (rows, read), "k_proj": (few, read), "v_proj": (few, read), "o_proj": (WIDTH, rows)}
    if case.norms:
        norms |= {"self_attn.q_norm": HEAD_DIM, "self_attn.k_norm": HEAD_DIM}
    shapes |= {f"self_attn.{name}.weight": shape for name, shape in attention.items()}
    if case.embeds:
        shapes["embed_tokens.weight"] = (VOCABULARY, WIDTH)
    tensors = {name: tensor * 1.5 / tensor.shape[-1] ** 0.5 for name, tensor in random_tensors(shapes).items()}
    with seeded(3):
        tensors |= {f"{name}.weight": 1 + 0.2 * torch.randn(width) for name, width in norms.items()}
        if not case.whole:
            tensors["d2t"] = torch.randperm(VOCABULARY)[:DRAFTS].sort().values - torch.arange(DRAFTS)
    return tensors


def stored(case: Case, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same under the names of the file."""
    named = {}
    for name, tensor in tensors.items():
        in_layer = name.startswith(("self_attn.", "mlp.", "input_layernorm", "hidden_norm", "post_attention"))
        place = case.wrapper + case.prefix if in_layer else case.wrapper
        named[name if name in ("lm_head.weight", "d2t") else place + name] = tensor
    if case.renamed_map:
        named["draft_id_to_target_id"] = named.pop("d2t")
    return named


def make_target(vocabulary: int = VOCABULARY) -> Any:
    return random_target(
        hf.LlamaConfig(
            vocab_size=vocabulary, hidden_size=WIDTH, intermediate_size=64, num_hidden_layers=LAYERS,
            num_attention_heads=4, num_key_value_heads=2, head_dim=8, max_position_embeddings=512,
            initializer_range=0.2, bos_token_id=1, eos_token_id=None, pad_token_id=0, tie_word_embeddings=False,
        ),
        seed=5,
    )  # fmt: skip


@torch.no_grad()
def first_logits(eagle: Eagle31Drafter, target: Any, ids: Tensor) -> list[Tensor]:
    """Logits of the first draft of a greedy call."""
    seen: list[Tensor] = []
    draft = Eagle31Drafter.draft_logits

    def watched(self: Eagle31Drafter, normed: Tensor) -> Tensor:
        logits = draft(self, normed)
        seen.append(logits.reshape(-1, logits.shape[-1])[-1].clone())
        return logits

    eagle.generation_config.num_assistant_tokens = STEPS
    eagle.generation_config.num_assistant_tokens_schedule = "constant"
    with mock.patch.object(Eagle31Drafter, "draft_logits", watched):
        target.generate(ids, assistant_model=eagle, do_sample=False, max_new_tokens=STEPS + 2)
    return seen[:STEPS]


@torch.no_grad()
def reference_logits(
    case: Case, tensors: dict[str, Tensor], target: Any, ids: Tensor, embed: Callable[[Tensor], Tensor]
) -> list[Tensor]:
    out = target(ids, output_hidden_states=True)
    aux = torch.cat([out.hidden_states[tap][0] for tap in case.taps], -1).double()
    following = [*ids[0, 1:].tolist(), int(out.logits[0, -1].argmax())]
    told = {"frequencies": plain_frequencies(1e6, HEAD_DIM), **case.means}
    w = {name: tensor.double() if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}
    reference = Reference(w, HEADS, KV_HEADS, latent=LATENT if case.latent else None, **told)
    return reference.chain(aux, lambda tokens: embed(tokens).double(), following, STEPS)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.thorough(every=2)
def test_drafts_are_the_formulas(name: str, tmp_path) -> None:
    case = CASES[name]
    tensors, target = network(case), make_target()
    config = {key: value for key, value in (COMMON | case.config).items() if value is not ...}
    folder = save(tmp_path / "a", config, {name: t.contiguous() for name, t in stored(case, tensors).items()})
    eagle = Eagle31Drafter.from_pretrained(folder, target=target)
    ids = torch.randint(3, VOCABULARY, (1, 17), generator=torch.Generator().manual_seed(7))
    wanted = reference_logits(case, tensors, target, ids, tensors["embed_tokens.weight"].__getitem__)
    got = first_logits(eagle, target, ids)
    for step, (ours, theirs) in enumerate(zip(got, wanted, strict=True)):
        largest = float(theirs.abs().max())
        torch.testing.assert_close(ours.double(), theirs, rtol=0, atol=1e-5 * max(1.0, largest), msg=f"step {step}")
    # What is written of it means the same.
    eagle.save_pretrained(tmp_path / "b", format="speculators" if case.norms else None)
    again = Eagle31Drafter.from_pretrained(tmp_path / "b", target=target)
    for ours, theirs in zip(first_logits(again, target, ids), got, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)
    assert not [note for note in inspect_checkpoint(folder).notes if "nothing here knows" in note]


def test_tokens_the_target_has_and_the_file_does_not_have_the_targets_rows(tmp_path) -> None:
    case, target = Case({}), make_target(VOCABULARY + 5)
    tensors = network(case)
    eagle = Eagle31Drafter.from_pretrained(save(tmp_path, COMMON, stored(case, tensors)), target=target)
    ids = torch.tensor([[7, 9, VOCABULARY + 1, 11, VOCABULARY + 4, 50, 60, VOCABULARY]])
    rows = torch.cat((tensors["embed_tokens.weight"], target.get_input_embeddings().weight[VOCABULARY:].detach()))
    wanted = reference_logits(case, tensors, target, ids, rows.__getitem__)
    for ours, theirs in zip(first_logits(eagle, target, ids), wanted, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=0, atol=1e-5 * max(1.0, float(theirs.abs().max())))
