"""What version 0.1.0 wrote before the folders came (commit 5f40793): checkpoints, settings and plans are understood."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from eagle31_hf import Eagle31Drafter
from eagle31_hf.errors import ConfigurationError
from eagle31_hf.settings import Eagle31GenerationConfig

CONFIG = {
    "model_type": "llama", "tie_word_embeddings": False, "architectures": ["LlamaForCausalLMEagle3"], "vocab_size": 64,
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 8, "hidden_act": "silu", "rms_norm_eps": 1e-06,
    "max_position_embeddings": 128, "initializer_range": 0.02, "attention_bias": False, "attention_dropout": 0.0,
    "mlp_bias": False, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None, "draft_vocab_size": 64,
    "target_hidden_size": 16, "fc_norm": True, "norm_before_fc": False, "norm_output": True,
    "norm_before_residual": False, "num_aux_hidden_states": 3, "bias": False,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}, "rope_theta": 10000.0, "rope_scaling": None,
    "torch_dtype": "float32",
}  # fmt: skip
SHAPES = {
    "fc.weight": (16, 48), "fc_norm.0.weight": (16,), "fc_norm.1.weight": (16,), "fc_norm.2.weight": (16,),
    "lm_head.weight": (64, 16), "midlayer.hidden_norm.weight": (16,), "midlayer.input_layernorm.weight": (16,),
    "midlayer.mlp.down_proj.weight": (16, 24), "midlayer.mlp.gate_proj.weight": (24, 16),
    "midlayer.mlp.up_proj.weight": (24, 16), "midlayer.post_attention_layernorm.weight": (16,),
    "midlayer.self_attn.k_proj.weight": (8, 32), "midlayer.self_attn.o_proj.weight": (16, 16),
    "midlayer.self_attn.q_proj.weight": (16, 32), "midlayer.self_attn.v_proj.weight": (8, 32), "norm.weight": (16,),
}  # fmt: skip
LOGITS = [0.08404216, 0.09578302, -0.0451533, -0.11411572, -0.00117879, 0.11363711]
"""Of the first draft tokens, by the code of that commit, from the weights below."""

SETTINGS = {
    "acceleration": "eager", "cache_type": "int8", "draft_confidence_floor": 0.1, "draft_top_k": 3,
    "draft_tree": "dynamic", "draft_tree_size": None, "num_assistant_tokens": 4,
    "num_assistant_tokens_schedule": "constant", "speculation_loop": "auto", "transformers_version": "5.23.0",
}  # fmt: skip


def wave(shape, start):
    steps = torch.arange(start, start + torch.Size(shape).numel(), dtype=torch.float64)
    return (steps.mul(0.7).sin() * 0.5).float().view(shape)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    tensors = {name: wave(shape, 1000 * number) for number, (name, shape) in enumerate(sorted(SHAPES.items()))}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    return tmp_path


@pytest.fixture
def target():
    names = "hidden_size intermediate_size num_attention_heads num_key_value_heads vocab_size max_position_embeddings"
    sizes = {name: CONFIG[name] for name in names.split()}
    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=8, **sizes))
    with torch.no_grad():
        for number, (_, parameter) in enumerate(sorted(model.named_parameters())):
            parameter.copy_(wave(parameter.shape, 100 * number))
    return model


@torch.no_grad()
def test_a_checkpoint_drafts_what_it_drafted_and_is_written_as_it_was(folder, target, tmp_path):
    drafter = Eagle31Drafter.from_pretrained(folder, target=target, dtype=torch.float32)
    ids, aux = torch.tensor([[1, 5, 9, 33]]), wave((1, 4, 48), 7)
    rotary = drafter.rotary(torch.arange(4)[None])
    out = drafter.decode(drafter.embed(ids), drafter.fuse_aux(aux), rotary, None, None)
    torch.testing.assert_close(drafter.draft_logits(out.normed)[0, -1, :6], torch.tensor(LOGITS))
    drafter.save_pretrained(tmp_path / "again")
    assert json.loads((tmp_path / "again" / "config.json").read_text()) == CONFIG
    again, before = (load_file(path / "model.safetensors") for path in (tmp_path / "again", folder))
    assert again.keys() == before.keys()
    assert all(torch.equal(again[name], before[name]) for name in before)


def test_settings_are_read_and_old_names_are_ignored_with_a_line(tmp_path, caplog):
    (tmp_path / "generation_config.json").write_text(json.dumps(SETTINGS))
    config = Eagle31GenerationConfig.from_pretrained(tmp_path)
    assert (config.draft_min_confidence, config.draft_top_k, config.cache_type) == (None, 3, "int8")
    assert "draft_confidence_floor went in 0.2.0: it is called draft_min_confidence" in caplog.text
    config.check()
    assert "draft_confidence_floor" not in config.to_dict()


def test_settings_that_were_never_set_are_read_without_a_line(caplog):
    Eagle31GenerationConfig(draft_confidence_floor=None, draft_tree="dynamic")
    assert not caplog.records


def test_an_old_name_that_is_set_is_refused_with_the_new_one():
    with pytest.raises(ConfigurationError, match=r"draft_confidence_floor went in 0\.2\.0: .*draft_min_confidence"):
        Eagle31GenerationConfig().draft_confidence_floor = 0.3
