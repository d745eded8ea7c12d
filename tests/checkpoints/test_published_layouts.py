"""Published layouts written down by hand: what is read of them."""

import json

import pytest
import torch
from safetensors.torch import load_file
from tiny_checkpoints import PLAIN, SPECFORGE, layout, save, speculators_config

from eagle31_hf import Eagle31Drafter
from eagle31_hf.checkpoints import inspect_checkpoint, read_checkpoint
from eagle31_hf.errors import CheckpointFormatError
from families import recurrent_target
from helpers import SHARED, assert_same_text

IDS = "eagle_aux_hidden_state_layer_ids"


@pytest.mark.parametrize(
    ("name", "method", "aux_norm"), [("eagle31", "EAGLE 3.1", "per_slot"), ("eagle3", "EAGLE-3", "none")]
)
def test_reads_the_trained_demo_drafters(name, method, aux_norm):
    folder = SHARED / "models" / f"demo-drafter-{name}"
    checkpoint, summary = read_checkpoint(folder), inspect_checkpoint(folder)
    config = checkpoint.config
    assert (config.hidden_size, config.vocab_size, config.draft_vocab_size) == (256, 8192, 4096)
    assert (config.aux_norm, config.norm_output, config.num_hidden_layers) == (aux_norm, name == "eagle31", 1)
    assert checkpoint.tensors["fc.weight"].dtype == config.dtype == torch.bfloat16
    assert (checkpoint.format, summary.method) == ("plain", method)
    assert summary.stored_bytes == sum(t.nbytes for t in load_file(folder / "model.safetensors").values())
    json.dumps(summary.to_dict())


@pytest.mark.parametrize(
    ("fields", "note"),
    [
        ({"sliding_window": 8}, "the drafter sees 8 tokens back"),
        ({"target_layer_ids": [1, 9, 17]}, ""),
    ],
)
def test_what_a_reader_would_not_expect_is_noted(tmp_path, fields, note):
    summary = inspect_checkpoint(save(tmp_path, SPECFORGE | fields, layout("midlayer")))
    assert bool(summary.notes) == bool(note)
    assert all(note in each for each in summary.notes)
    if "target_layer_ids" in fields:
        assert (summary.config.aux_layers, summary.aux_layers_as_stored) == ([2, 10, 18], fields)


def test_speculators_metadata_and_what_is_left_of_its_training(tmp_path):
    config = speculators_config(eagle_aux_hidden_state_layer_ids=[1, 9, 36], norm_before_fc=True)
    tensors = layout("layers.0", input_norm__weight=(24,), embed_tokens__weight=(20, 8), verifier_norm__weight=(8,))
    checkpoint = read_checkpoint(save(tmp_path, config, tensors))
    assert checkpoint.config.own_embedding
    assert checkpoint.metadata == {"target_model": config["speculators_config"]["verifier"]}
    assert "verifier_norm.weight" not in checkpoint.tensors


def test_a_layer_of_qwen3_has_norms_on_its_heads(tmp_path):
    config = speculators_config("qwen3", norm_before_residual=False)
    with pytest.raises(CheckpointFormatError, match=r"missing: .*k_norm"):
        read_checkpoint(save(tmp_path, config, layout("layers.0")))


def test_an_identity_map_of_the_whole_vocabulary_is_dropped(tmp_path):
    tensors = layout("midlayer", lm_head__weight=(20, 8))
    identity = {"d2t": torch.zeros(20, dtype=torch.int64), "t2d": torch.ones(20, dtype=torch.bool)}
    folder = save(tmp_path, PLAIN | {"draft_vocab_size": 20}, tensors | identity)
    assert "d2t" not in read_checkpoint(folder).tensors
    save(tmp_path, PLAIN | {"draft_vocab_size": 20}, tensors | {"d2t": torch.ones(20, dtype=torch.int64)})
    with pytest.raises(CheckpointFormatError, match="no identity map"):
        read_checkpoint(folder)


def test_dtype_is_converted_but_not_the_map(tmp_path):
    checkpoint = read_checkpoint(save(tmp_path, PLAIN, layout("midlayer")), dtype=torch.bfloat16)
    kinds = {tensor.dtype for name, tensor in checkpoint.tensors.items() if name != "d2t"}
    assert kinds == {torch.bfloat16} == {checkpoint.config.dtype}
    assert checkpoint.tensors["d2t"].dtype == torch.int64


# --- published for targets of which most layers keep states ----------------------------------------------------------
# Every block counts, whatever it keeps: Nemotron's experts have blocks of their own.

NEMOTRON = ["linear_attention", "moe", "linear_attention", "moe", "linear_attention", "full_attention", "moe"]


@pytest.mark.parametrize(
    ("config", "first_layer", "layers", "family", "fields"),
    [
        (  # Qwen3.5-MoE, by speculators, whose ids are those of the states that enter layers
            speculators_config(**{IDS: [3, 19, 39]}), "layers.0", [3, 19, 39],
            "qwen3_5_moe_text", {"num_hidden_layers": 40, "layer_types": None},
        ),
        (  # Nemotron-Cascade-2-30B-A3B, whose drafter sees a window
            PLAIN | {IDS: [2, 26, 48], "sliding_window": 4096, "layer_types": ["sliding_attention"]}, "midlayer",
            [2, 26, 48], "nemotron_h", {"layers_block_type": (NEMOTRON * 8)[:52]},
        ),
    ],
)  # fmt: skip
@pytest.mark.thorough(every=2)
def test_a_drafter_for_a_hybrid_reads_its_blocks_and_writes_its_text(
    tmp_path, config, first_layer, layers, family, fields
):
    target = recurrent_target(family, hidden_size=8, vocab_size=20, intermediate_size=12, **fields)
    drafter = Eagle31Drafter.from_pretrained(save(tmp_path, config, layout(first_layer)), target=target)
    ids = torch.tensor([[3, 5, 7, 11]])
    with torch.no_grad(), drafter.binding.capturing():
        out = target(ids, output_hidden_states=True)
        aux = drafter.binding.take_aux()
    assert torch.equal(aux, torch.cat([out.hidden_states[layer] for layer in layers], -1))
    assert_same_text(target, drafter, ids, do_sample=False, max_new_tokens=8, pad_token_id=0)
