"""Drafters as their makers publish them, cut down: each drafts what its maker's formulas say, and the text is plain's.

One entry for each published layout: the fields of its config that are not sizes, the names of its tensors, and the
depth of its target. What its maker's code makes of them is said beside them, where it is not the usual.
"""

from __future__ import annotations

import math
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from layout_cases import (
    HEAD_DIM,
    LATENT_FIELDS,
    LAYERS,
    STEPS,
    WIDTH,
    Case,
    assert_same_logits,
    first_logits,
    make_target,
    network,
    prompt,
    reference_logits,
    write,
)
from torch import Tensor
from torch.nn.functional import gelu

from eagle31_hf import Eagle31Drafter
from helpers import assert_same_text
from reference_drafter import Yarn, plain_frequencies

LLAMA: dict[str, Any] = {"rope_theta": ...}
"""A file that states no base: 10000."""
OF_QWEN = {
    "attention_bias": False, "attention_dropout": 0.0, "rms_norm_eps": 1e-6, "rope_scaling": None,
    "sliding_window": None, "use_sliding_window": False, "max_window_layers": 48, "head_dim": 8,
}  # fmt: skip
WIDE_HEADS = 12  # heads of which four are wider than the hidden size
ANGELSLIM_CLASS: dict[str, Any] = {"architectures": ["Eagle3LlamaForCausalLM"]}


def ids(*layers: int, **more: Any) -> dict[str, Any]:
    return {"eagle_config": {"eagle_aux_hidden_state_layer_ids": list(layers), **more}}


def specforge(config: dict[str, Any], depth: int, *taps: int, **how: Any) -> Case:
    """Its files have no embedding: the target's is frozen while they are trained."""
    return Case(config, depth=depth, taps=taps, **{"embeds": False, **how})


SPECFORGE = {
    "llama3-8b": specforge(LLAMA, 32),
    "deepseek-v2-lite": specforge(
        OF_QWEN | {"rope_theta": 10000, "rope_scaling": {
            "beta_fast": 32.0, "beta_slow": 1.0, "factor": 40.0, "mscale": 0.707, "mscale_all_dim": 0.707,
            "original_max_position_embeddings": 64, "rope_type": "yarn",
        }},
        27,
        means={"frequencies": Yarn(40.0, 64).frequencies(1e4, HEAD_DIM)},
    ),
    "deepseek-v3": specforge(LLAMA | ids(1, 29, 57, use_aux_hidden_state=True), 61, 2, 30, 58),
    "gemma3-1b": specforge(
        OF_QWEN | {"sliding_window": 5, "head_dim": WIDE_HEADS, "target_model_type": "gemma3_text"}, 26
    ),
    "longcat": specforge(OF_QWEN | {"rope_theta": 1e7, "rms_norm_eps": 1e-5, "draft_vocab_size": 120}, 28, whole=True),
    "phi4": specforge({"model_type": "phi3", "rope_theta": 250000.0}, 40),
    "qwen2.5-vl-7b": specforge(
        OF_QWEN | {"sliding_window": 32768, "pretraining_tp": 1, "target_model_type": "qwen2_5_vl",
                   "rope_scaling": {"type": "mrope", "mrope_section": [2, 1, 1]}},
        28,
    ),
    "qwen3-next-80b": specforge({"decoder_sparse_step": 1, "rope_theta": 10000000, "head_dim": WIDE_HEADS}, 48),
    "qwq-32b": specforge({"model_type": "qwen2", "sliding_window": 32768, "use_sliding_window": False}, 64),
}  # fmt: skip

SPECFORGE |= {
    "the norms' first names": specforge(
        {"use_aux_norm": True, "norm_output": True}, 36, aux_norm="per_slot", means={"norm_output": True},
        renames={f"fc_norm.{i}.weight": f"aux_norm_{name}.weight" for i, name in enumerate(("low", "mid", "high"))},
    ),
    "SGLang's further layers": specforge(
        {}, 36, layers=2, renames={"layers.1.input_layernorm.weight": "layers.1.hidden_norm.weight"}
    ),
}  # fmt: skip

KIMI_YARN = {"type": "yarn", "factor": 64.0, "original_max_position_embeddings": 4096, "beta_fast": 1.0,
             "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0}  # fmt: skip
OF_LATENT: dict[str, Any] = {
    "frequencies": Yarn(64.0, 4096, fast=1).frequencies(1e6, 4), "score_scale": (0.1 * math.log(64.0) + 1) ** 2,
}  # fmt: skip
MLA = {"model_type": "deepseek_v3", "rope_scaling": KIMI_YARN, "rms_norm_eps": 1e-6, "draft_vocab_size": ...,
       **LATENT_FIELDS}  # fmt: skip
DEEPSEEK_CLASS = {"architectures": ["DeepSeekForCausalLMEagle3"]}
VLLM_LATENT_CLASS = {"architectures": ["Eagle3DeepseekV2ForCausalLM"]}
MARK = {"_torchspec_version": "0.2.0"}
WHOLE = {"draft_vocab_size": ...}

TORCHSPEC = {
    "layers by what they complete": Case(
        OF_QWEN | WHOLE | MARK | {"eagle_aux_hidden_state_layer_ids": [5, 20, 30]},
        depth=36,
        taps=(6, 21, 31),
        whole=True,
    ),
    "kimi-k2.5, latent": Case(
        MLA | VLLM_LATENT_CLASS | MARK | {"model_type": "kimi_k2"}, OF_LATENT, depth=61, whole=True, latent=True
    ),
    "minimax-m2.5": Case(OF_QWEN | WHOLE | MARK, depth=62, whole=True, prefix="layers.0."),
    "qwen3-8b, latent, without its mark": Case(MLA | DEEPSEEK_CLASS, OF_LATENT, depth=36, whole=True, latent=True),
}

ANGELSLIM = {
    "hunyuan-1.8b": Case(
        ANGELSLIM_CLASS | {"rope_theta": 10000.0, "rope_scaling": {"alpha": 1000.0, "type": "dynamic", "factor": 1.0}},
        depth=32,
    ),
    "hunyuan-ocr": Case(ANGELSLIM_CLASS | {"modal_type": "VLM", "rope_theta": 10000.0}, depth=24),
    "qwen2.5-1.5b": Case(
        ANGELSLIM_CLASS | {"target_model_type": "qwen2", "tie_word_embeddings": True, "use_mrope": False,
                     "sliding_window": 131072, "use_sliding_window": False, "max_window_layers": 28},
        depth=28,
    ),
    "qwen3-vl-4b": Case(
        ANGELSLIM_CLASS | {"tie_word_embeddings": True, "modal_type": "VLM", "rope_theta": 5000000, "rope_scaling": {
            "type": "default", "rope_type": "default", "mrope_interleaved": True, "mrope_section": [2, 1, 1],
        }},
        depth=36,
    ),
    "cosyvoice3": Case(ANGELSLIM_CLASS | {"num_hidden_layers": 24, "modal_type": "TTS"}, depth=24),
}  # fmt: skip

SAFEAILAB = {"architectures": ["LlamaForCausalLM"], **LLAMA}
HUB = {
    "SafeAILab, Llama 3.1 8B": Case(
        SAFEAILAB | {"num_hidden_layers": 32}, depth=32, dtype=torch.float16, file="pytorch_model.bin", embeds=False
    ),
    "AQ-MedAI, Kimi K2.5": Case(
        LLAMA | ids(2, 30, 58, use_aux_hidden_state=True), depth=61, taps=(2, 30, 58), embeds=False
    ),
    "SafeAILab, in two files and an index": Case(SAFEAILAB, depth=32, embeds=False, file="shards"),
    "nebius, a map in 32 bits under another size": Case(
        SAFEAILAB | {"draft_vocab_size": ..., "truncated_vocab_size": 60, "rope_theta": 5e5, "rope_scaling": {
            "type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64,
        }},
        {"frequencies": Yarn(4.0, 64).frequencies(5e5, HEAD_DIM), "rotary_scale": 0.1 * math.log(4.0) + 1},
        depth=32, map_dtype=torch.int32,
    ),
    "MiniMax M3, 3.1": Case(
        {"fc_norm": True, "norm_output": True}, {"norm_output": True}, depth=62, aux_norm="per_slot",
        dtype=torch.bfloat16,
    ),
}  # fmt: skip

SPECULATORS = {"architectures": ["Eagle3DraftModel"], "speculators_model_type": "eagle3",
               "speculators_version": "0.3.0", "draft_vocab_size": 60}  # fmt: skip
PROPOSALS = {"algorithm": "eagle3", "default_proposal_method": "greedy",
             "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 5}]}  # fmt: skip
VERIFIER = {"name_or_path": "meta-llama/Llama-3.1-8B-Instruct", "architectures": ["LlamaForCausalLM"]}
VERIFIED = {"speculators_config": {**PROPOSALS, "verifier": VERIFIER}}


def speculators(
    depth: int, *taps: int, layer: dict[str, Any] | None = None, means: dict[str, Any] | None = None, **more: Any
) -> Case:
    """Its residual is normed unless a file says no."""
    how = {name: more.pop(name) for name in ("norms", "aux_norm") if name in more}
    layer_ids = {"eagle_aux_hidden_state_layer_ids": list(taps)} if taps else {}
    config = SPECULATORS | VERIFIED | layer_ids | more | {"transformer_layer_config": layer or {}}
    residual = {"norm_before_residual": more.get("norm_before_residual", True)}
    return Case(
        config, residual | (means or {}), depth=depth, taps=taps, prefix="layers.0.",
        layer_config="transformer_layer_config", **how,
    )  # fmt: skip


OF_SPECULATORS = {
    "Llama 3.1 8B": speculators(32, norm_before_residual=False, layer={"rope_theta": 500000.0}),
    "Llama 4 Maverick": speculators(48, 1, 23, 44, layer={"head_dim": 8, "rope_theta": 500000.0}),
    "Qwen3 8B's layer": speculators(
        36, layer={"model_type": "qwen3", "rms_norm_eps": 1e-6, "head_dim": 8}, norms=True, norm_before_residual=False
    ),
    "four states, window": speculators(
        94, 2, 46, 91, 93, aux_norm="concatenated", norm_before_fc=True,
        layer={"sliding_window": 6, "use_sliding_window": True, "layer_types": ["sliding_attention"]},
        means={"window": 6},
    ),
}  # fmt: skip

MODELOPT_MARKS = {"use_aux_hidden_state": True, "use_input_layernorm_in_first_layer": True, "use_last_layernorm": True,
                  "use_mtp_layernorm": False, "next_layer_regular": True}  # fmt: skip
LONG_YARN = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 64, "beta_fast": 32.0,
             "beta_slow": 1.0}  # fmt: skip
MODELOPT_NAMES = {"midlayer.hidden_norm.weight": "hidden_norm.weight",
                  "midlayer.input_layernorm.weight": "input_embeds_norm.weight",
                  "lm_head.weight": "eagle_lm_head.weight"}  # fmt: skip
MODELOPT = {
    "qwen3-8b": Case(ids(**MODELOPT_MARKS) | {"rms_norm_eps": 1e-6, "head_dim": 8}, depth=36, renames=MODELOPT_NAMES),
    "four layers": Case(ids(**MODELOPT_MARKS) | {"num_hidden_layers": 4}, depth=36, layers=4),
    "no head": Case(ids(**MODELOPT_MARKS) | WHOLE, depth=36, whole=True, own_head=False, embeds=False),
    "yarn": Case(
        ids(**MODELOPT_MARKS) | {"rope_theta": 150000.0, "rope_scaling": LONG_YARN},
        {"frequencies": Yarn(32.0, 64).frequencies(150000.0, HEAD_DIM), "rotary_scale": 0.1 * math.log(32.0) + 1},
        depth=36,
    ),
    "kimi-k2, latent": Case(
        MLA | VLLM_LATENT_CLASS | ids(**MODELOPT_MARKS), OF_LATENT, depth=61, whole=True, latent=True, embeds=False
    ),
    "gpt-oss-120b v3": Case(
        LLAMA | WHOLE | ids(24, 30, 36, **MODELOPT_MARKS, norm_before_fc=True), depth=36, taps=(24, 30, 36),
        aux_norm="concatenated", whole=True,
    ),
    "gpt-oss-120b long context": Case(
        LLAMA | WHOLE | {"eagle_aux_hidden_state_layer_ids": [1, 17, 32]} | ids(**MODELOPT_MARKS), depth=36,
        taps=(1, 17, 32), whole=True,
    ),
}  # fmt: skip

NEMO: dict[str, Any] = {"num_aux_hidden_states": 3, "target_hidden_size": WIDTH, "rms_norm_eps": 1e-6}
NEMO_NAMES: dict[str, Any] = {"prefix": "layers.0.", "wrapper": "model."}
OF_NEMO = {
    "qwen3, 3.1": Case(
        NEMO | {"architectures": ["LlamaEagle3DraftModel"], "fc_norm": True, "norm_output": True},
        {"norm_output": True}, depth=36, aux_norm="per_slot", **NEMO_NAMES,
    ),
    "qwen3_moe": Case(
        NEMO | {"architectures": ["LlamaEagle3DraftModel"], "num_experts": 128, "moe_intermediate_size": 768,
                "norm_topk_prob": True, "num_hidden_layers": 48},
        depth=48, **NEMO_NAMES,
    ),
}  # fmt: skip

# --- configurations that say things in unusual ways -------------------------------------------------------------------

FULL, SLIDING = "full_attention", "sliding_attention"
YARN = {"factor": 8.0, "original_max_position_embeddings": 64, "beta_fast": 32, "beta_slow": 1}
DEEPSEEK_YARN = {"type": "yarn", "mscale": 1.0, "mscale_all_dim": 1.0, **YARN}
SHORT, LONG = [1.0, 1.05, 1.1, 1.3], [1.1, 2.0, 8.0, 30.0]


def gelu_tanh(x: Tensor) -> Tensor:
    return gelu(x, approximate="tanh")


def longrope(max_length: int, original: int) -> float:
    return math.sqrt(1 + math.log(max_length / original) / math.log(original))


LLAMA_3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
PLAIN_TURNS = plain_frequencies(1e6, HEAD_DIM)


def llama_3_frequencies() -> Tensor:
    """Short waves stay, long ones are stretched."""
    keep = ((64 * PLAIN_TURNS / (2 * math.pi) - 1.0) / (4.0 - 1.0)).clamp(0, 1)
    return PLAIN_TURNS * keep + PLAIN_TURNS / 8.0 * (1 - keep)


GEMMA_ROPES = {
    FULL: {"rope_type": "default", "rope_theta": 3e5}, SLIDING: {"rope_type": "default", "rope_theta": 2e4},
}  # fmt: skip
DEEPSPEC = {"architectures": ["Qwen3Eagle3Model"], "model_type": "qwen3", "draft_vocab_size": ..., "ttt_length": 7,
            "layer_types": [FULL], "num_target_layers": LAYERS, "step_loss_decay": 0.8, "max_window_layers": LAYERS,
            "draft_num_hidden_layers": 1, "use_sliding_window": False, "sliding_window": None}  # fmt: skip
NEMO_LLAMA = {"architectures": ["LlamaEagle3DraftModel"], "num_aux_hidden_states": 3, "target_hidden_size": WIDTH}
UNUSUAL = {
    "DeepSpec": Case(
        DEEPSPEC | {"target_layer_ids": [1, 3, 5, 7, 9]}, taps=(2, 4, 6, 8, 10), prefix="layers.0.", norms=True,
        whole=True,
    ),
    "verl-SpeCo": Case({"target_layer_ids": [1, 4, 10]}, taps=(2, 5, 11)),
    "verl-SpeCo, another key": Case({"eagle_config": {"target_hidden_layer_ids": [3, 4, 9]}}, taps=(4, 5, 10)),
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
        {"frequencies": Yarn(8.0, 64).frequencies(1e6, HEAD_DIM), "rotary_scale": 0.1 * math.log(8.0) + 1},
    ),
    "hidden_activation": Case({"hidden_act": ..., "hidden_activation": "gelu_pytorch_tanh"}, {"activation": gelu_tanh}),
    "Gemma's two activations": Case(
        {"hidden_act": "gelu", "hidden_activation": "gelu_pytorch_tanh"}, {"activation": gelu}
    ),
    "renamed map": Case({}, renames={"d2t": "draft_id_to_target_id"}),
    "the target's layers and types": Case(
        {"num_hidden_layers": LAYERS, "layer_types": [SLIDING, FULL] * 6, "sliding_window": 5}
    ),
    "a hybrid target's types": Case({"layer_types": ["linear_attention"] * 3 + [FULL], "sliding_window": 5}),
    "Qwen's window, which begins in later layers": Case(
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 8}
    ),
    "NeMo for gpt-oss": Case(
        NEMO_LLAMA | {"layer_types": [SLIDING, FULL] * 6, "sliding_window": 5, "num_hidden_layers": LAYERS,
                "swiglu_limit": 7.0, "rope_theta": ..., "num_local_experts": 32,
                "rope_parameters": {"rope_type": "yarn", "rope_theta": 150000.0, "truncate": True, **YARN}},
        {"frequencies": Yarn(8.0, 64).frequencies(150000.0, HEAD_DIM), "rotary_scale": 0.1 * math.log(8.0) + 1},
        **NEMO_NAMES,
    ),
    "NeMo for Gemma 4": Case(
        NEMO_LLAMA | {"layer_types": [SLIDING] * 5 + [FULL], "sliding_window": 5, "hidden_act": "gelu_pytorch_tanh",
                "hidden_activation": "gelu_pytorch_tanh", "final_logit_softcapping": 30.0, "global_head_dim": 16,
                "query_pre_attn_scalar": 256, "rope_parameters": None, "partial_rotary_factor": 1.0},
        {"activation": gelu_tanh},
        **NEMO_NAMES,
    ),
    "NeMo for DeepSeek": Case(
        {"architectures": ["DeepseekV3Eagle3DraftModel"], "num_hidden_layers": 61, "rope_scaling": DEEPSEEK_YARN,
         "head_dim": 64, "rope_interleave": True, **LATENT_FIELDS},
        {"frequencies": Yarn(8.0, 64).frequencies(1e6, 4)},
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
    "a wider target": Case({"target_hidden_size": 48}, target_width=48),
    "a wider target, each state normed": Case(
        {"target_hidden_size": 48, "fc_norm": True}, aux_norm="per_slot", target_width=48
    ),
    "a bias on fc": Case({"bias": True}, fc_bias=True),
    "rows of the target's head": Case({}, own_head=False),
    "linear": Case({"rope_scaling": {"type": "linear", "factor": 4.0}}, {"frequencies": PLAIN_TURNS / 4}),
    "llama3": Case({"rope_scaling": LLAMA_3}, {"frequencies": llama_3_frequencies()}),
    "latent sizes of the target": Case(LATENT_FIELDS),
    "latent sizes of the target, NeMo": Case(NEMO_LLAMA | LATENT_FIELDS, **NEMO_NAMES),
}  # fmt: skip

# --- the forms of the network, in every combination ---------------------------------------------------------------

AUX_NORMS = {"": {}, "per_slot": {"fc_norm": True}, "concatenated": {"norm_before_fc": True}}
FORMS = {
    f"{norm or 'no'} norm, norm_output={output}, norm_before_residual={before}, {layers} layers": Case(
        {**AUX_NORMS[norm], "norm_output": output, "norm_before_residual": before, "num_hidden_layers": layers},
        {"norm_output": output, "norm_before_residual": before},
        aux_norm=norm, layers=layers, norms=output != before,
    )
    for norm, output, before, layers in product(AUX_NORMS, (False, True), (False, True), (1, 4))
}  # fmt: skip

MAKERS = {
    "SpecForge": SPECFORGE,
    "TorchSpec": TORCHSPEC,
    "AngelSlim": ANGELSLIM,
    "Hub": HUB,
    "speculators": OF_SPECULATORS,
    "ModelOpt": MODELOPT,
    "NeMo": OF_NEMO,
    "unusual": UNUSUAL,
    "forms": FORMS,
}
PUBLISHED = {f"{maker}, {name}": case for maker, cases in MAKERS.items() for name, case in cases.items()}


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.thorough(every=4)
def test_drafts_are_the_formulas(name: str, tmp_path: Path) -> None:
    case = PUBLISHED[name]
    tensors, target, inputs = network(case), make_target(case.depth, case.target_width), prompt()
    eagle = Eagle31Drafter.from_pretrained(write(case, tensors, tmp_path), target=target, dtype=torch.float32)
    got = first_logits(eagle, target, inputs)
    assert_same_logits(got, reference_logits(case, tensors, target, inputs))
    assert_same_text(
        target, eagle, inputs, settings={"num_assistant_tokens": STEPS}, do_sample=False, max_new_tokens=12
    )
    # What is written of it means the same.
    eagle.save_pretrained(tmp_path / "again", format="speculators" if case.norms else None)
    again = Eagle31Drafter.from_pretrained(tmp_path / "again", target=target)
    for ours, theirs in zip(first_logits(again, target, inputs), got, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)
