"""Published files whose configs are unusual draft what their trainers' formulas say: logits of whole greedy chains."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from layout_cases import (
    HEAD_DIM,
    LATENT_FIELDS,
    LAYERS,
    VOCABULARY,
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
from reference_drafter import Yarn, plain_frequencies
from torch import Tensor
from torch.nn.functional import gelu

from eagle31_hf import Eagle31Drafter
from eagle31_hf.checkpoints import inspect_checkpoint

FULL, SLIDING = "full_attention", "sliding_attention"
YARN = {"factor": 8.0, "original_max_position_embeddings": 64, "beta_fast": 32, "beta_slow": 1}
DEEPSEEK_YARN = {"type": "yarn", "mscale": 1.0, "mscale_all_dim": 1.0, **YARN}
SHORT, LONG = [1.0, 1.05, 1.1, 1.3], [1.1, 2.0, 8.0, 30.0]


def gelu_tanh(x: Tensor) -> Tensor:
    return gelu(x, approximate="tanh")


def longrope(max_length: int, original: int) -> float:
    return math.sqrt(1 + math.log(max_length / original) / math.log(original))


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
        NEMO | {"layer_types": [SLIDING, FULL] * 6, "sliding_window": 5, "num_hidden_layers": LAYERS,
                "swiglu_limit": 7.0, "rope_theta": ..., "num_local_experts": 32,
                "rope_parameters": {"rope_type": "yarn", "rope_theta": 150000.0, "truncate": True, **YARN}},
        {"frequencies": Yarn(8.0, 64).frequencies(150000.0, HEAD_DIM), "rotary_scale": 0.1 * math.log(8.0) + 1},
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
    "latent sizes of the target": Case(LATENT_FIELDS),
    "latent sizes of the target, NeMo": Case(NEMO | LATENT_FIELDS, **NEMO_NAMES),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
@pytest.mark.thorough(every=2)
def test_drafts_are_the_formulas(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    tensors, target, ids = network(case), make_target(), prompt()
    folder = write(case, tensors, tmp_path / "a")
    eagle = Eagle31Drafter.from_pretrained(folder, target=target)
    got = first_logits(eagle, target, ids)
    assert_same_logits(got, reference_logits(case, tensors, target, ids))
    # What is written of it means the same.
    eagle.save_pretrained(tmp_path / "b", format="speculators" if case.norms else None)
    again = Eagle31Drafter.from_pretrained(tmp_path / "b", target=target)
    for ours, theirs in zip(first_logits(again, target, ids), got, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)
    assert not [note for note in inspect_checkpoint(folder).notes if "nothing here knows" in note]


def test_tokens_the_target_has_and_the_file_does_not_have_the_targets_rows(tmp_path: Path) -> None:
    case, target = Case({}), make_target(vocabulary=VOCABULARY + 5)
    tensors = network(case)
    eagle = Eagle31Drafter.from_pretrained(write(case, tensors, tmp_path), target=target)
    ids = torch.tensor([[7, 9, VOCABULARY + 1, 11, VOCABULARY + 4, 50, 60, VOCABULARY]])
    rows = torch.cat((tensors["embed_tokens.weight"], target.get_input_embeddings().weight[VOCABULARY:].detach()))
    wanted = reference_logits(case, tensors, target, ids, rows.__getitem__)
    assert_same_logits(first_logits(eagle, target, ids), wanted)
