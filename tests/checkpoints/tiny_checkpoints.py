"""One tiny drafter in the layouts that are published, and in every shape that a layout may be asked to hold."""

import copy
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from eagle31_hf.checkpoints import Checkpoint, inspect_checkpoint, read_checkpoint
from eagle31_hf.checkpoints.eagle_network import expected_shapes
from eagle31_hf.config import Eagle31Config
from eagle31_hf.errors import CheckpointFormatError

# One tiny drafter, spelled out: H = Ht = 8, 2 query heads and 1 key head of width 6, MLP 12, V = 20, Vd = 5, A = 3.
LAYER_0 = {
    "hidden_norm.weight": (8,), "input_layernorm.weight": (8,), "post_attention_layernorm.weight": (8,),
    "self_attn.q_proj.weight": (12, 16), "self_attn.k_proj.weight": (6, 16), "self_attn.v_proj.weight": (6, 16),
    "self_attn.o_proj.weight": (8, 12),
    "mlp.gate_proj.weight": (12, 8), "mlp.up_proj.weight": (12, 8), "mlp.down_proj.weight": (8, 12),
}  # fmt: skip
KEPT_IDS = torch.tensor([0, 1, 5, 6, 19])
D2T = torch.tensor([0, 0, 3, 3, 15])
LLAMA = {
    "hidden_size": 8, "intermediate_size": 12, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 6,
    "vocab_size": 20, "rms_norm_eps": 1e-5, "max_position_embeddings": 2048,
}  # fmt: skip


def t2d() -> torch.Tensor:
    mask = torch.zeros(20, dtype=torch.bool)
    mask[KEPT_IDS] = True
    return mask


def random_tensors(shapes: dict, dtype=torch.float32) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}


def layout(first_layer: str, wrapper: str = "", **more: tuple) -> dict[str, torch.Tensor]:
    """Stored tensors of the tiny drafter, `d2t` and `t2d` included."""
    shapes = {f"{wrapper}fc.weight": (8, 24), f"{wrapper}norm.weight": (8,), "lm_head.weight": (5, 8)}
    shapes |= {f"{wrapper}{first_layer}.{name}": shape for name, shape in LAYER_0.items()}
    shapes |= {name.replace("__", "."): shape for name, shape in more.items()}
    return random_tensors(shapes) | {"d2t": D2T.clone(), "t2d": t2d()}


def save(folder: Path, config: dict, tensors: dict, file: str = "model.safetensors") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if file.endswith(".bin"):
        torch.save(tensors, folder / file)
    else:
        save_file(tensors, folder / file)
    return folder


SPECFORGE = {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "draft_vocab_size": 5, **LLAMA}
PLAIN = SPECFORGE | {"num_hidden_layers": 1, "num_aux_hidden_states": 3, "tie_word_embeddings": False}


def speculators_config(model_type: str = "llama", **top) -> dict:
    return {
        "architectures": ["Eagle3DraftModel"],
        "auto_map": {"": "eagle3.Eagle3SpeculatorConfig"},
        "speculators_model_type": "eagle3",
        "speculators_version": "0.3.0",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 5}],
            "verifier": {"name_or_path": "Qwen/Qwen3-8B", "architectures": ["Qwen3ForCausalLM"]},
        },
        "transformer_layer_config": {**LLAMA, "model_type": model_type, "num_hidden_layers": 1, "rope_theta": 1e6},
        "draft_vocab_size": 5,
        "target_hidden_size": None,
        **top,
    }


LATENT = {"kv_lora_rank": 3, "q_lora_rank": 4, "qk_nope_head_dim": 2, "qk_rope_head_dim": 4, "v_head_dim": 5}
LATENT_SHAPES = {"q_a_proj": (4, 16), "q_a_layernorm": (4,), "q_b_proj": (12, 4), "kv_a_proj_with_mqa": (7, 16),
                 "kv_a_layernorm": (3,), "kv_b_proj": (14, 3), "o_proj": (8, 10)}  # fmt: skip


PLAIN_LATENT = PLAIN | LATENT | {"architectures": ["Eagle3DeepseekV2ForCausalLM"]}


def latent_layout() -> dict[str, torch.Tensor]:
    """The tiny drafter with latent attention."""
    kept = {name: tensor for name, tensor in layout("midlayer").items() if "self_attn" not in name}
    return kept | {f"midlayer.self_attn.{name}.weight": torch.ones(shape) for name, shape in LATENT_SHAPES.items()}


BASE = {**LLAMA, "draft_vocab_size": 5, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
YARN = {"rope_type": "yarn", "rope_theta": 5e5, "factor": 32.0, "original_max_position_embeddings": 64}
VARIANTS = {
    "eagle3": {},
    "eagle31": {"aux_norm": "per_slot", "norm_output": True},
    "concatenated": {"aux_norm": "concatenated", "norm_output": True},
    "norm_before_residual": {"norm_before_residual": True},
    "wider_target": {"target_hidden_size": 10, "own_embedding": True},
    "four_layers": {"num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 8},
    "qk_norm": {"qk_norm": True},
    "full_vocabulary": {"draft_vocab_size": 20},
    "own_embedding": {"own_embedding": True},
    "shared_head": {"draft_vocab_size": 20, "own_lm_head": False},
    "shared_head_rows": {"own_lm_head": False},
    "explicit_layers": {"aux_layers": [2, 18, 36]},
    "layers_at_the_ends": {"aux_layers": [0, 18, 36]},
    "layers_from_one": {"aux_layers": [1, 18, 36]},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "fc_bias": {"fc_bias": True},
    "latent": LATENT,
    "four_aux_states": {"num_aux_hidden_states": 4, "aux_layers": [2, 9, 18, 33]},
    "yarn": {"rope_parameters": YARN},
}
REFUSES = {
    "mla": {*VARIANTS} - {"latent"},
    "plain": {"latent", "qk_norm"},
    "speculators": {"latent", "wider_target", "shared_head", "shared_head_rows", "fc_bias"},
}


def make(**changes) -> Checkpoint:
    config = Eagle31Config(**{**BASE, **changes})
    tensors = random_tensors(expected_shapes(config), torch.bfloat16)
    if "d2t" in tensors:
        tensors["d2t"] = D2T.clone()
    return Checkpoint(config, tensors)


def sharded(folder: Path) -> Path:
    return save_shards(folder, PLAIN, layout("midlayer"))


def save_shards(folder: Path, config: dict, tensors: dict[str, torch.Tensor]) -> Path:
    names = sorted(tensors)
    shards = {"model-00001-of-00002.safetensors": names[:5], "model-00002-of-00002.safetensors": names[5:]}
    for file, part in shards.items():
        save(folder, config, {name: tensors[name] for name in part}, file)
    weight_map = {name: file for file, part in shards.items() for name in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def with_field(config: dict, path: str, value: object) -> dict:
    """The configuration with another value at a dotted path."""
    config = copy.deepcopy(config)
    *sections, name = path.split(".")
    place = config
    for section in sections:
        if not isinstance(place.get(section), dict):
            place[section] = {}
        place = place[section]
    place[name] = value
    return config


LONGEST_MESSAGE = 2500


def assert_refused(folder: Path, message: str, error: type[Exception] = CheckpointFormatError) -> None:
    """Reading and inspecting agree, and the message can be read."""
    for use in (read_checkpoint, inspect_checkpoint):
        with pytest.raises(error, match=message) as caught:
            use(folder)
        assert len(str(caught.value)) < LONGEST_MESSAGE
