"""Published layouts written down by hand: what is read of them."""

import pytest
import torch
from tiny_checkpoints import PLAIN, SPECFORGE, layout, save, speculators_config

from eagle31_hf.checkpoints import inspect_checkpoint, read_checkpoint
from eagle31_hf.errors import CheckpointFormatError

IDS = "eagle_aux_hidden_state_layer_ids"


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
