"""A folder read by its headers alone: what the model class itself would say, or nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from eagle31_hf.cache.quantized import CACHE_TYPES as CACHED_TYPES
from eagle31_hf.demo import target_path
from eagle31_hf.memory import target_facts
from eagle31_hf.memory.folder_facts import read_plain_decoder
from eagle31_hf.memory.ledger import CACHE_TYPES
from eagle31_hf.memory.target_facts import read_target
from helpers import CONFIGS, random_target

SCHEMES = (None, "bf16", "fp32", "bnb-int8", "bnb-nf4-dq")
PLAIN = {"llama", "qwen2", "qwen3"}


@pytest.fixture(params=sorted(CONFIGS))
def family(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Path]:
    random_target(CONFIGS[request.param]()).save_pretrained(tmp_path)
    return request.param, tmp_path


def both_ways(monkeypatch: pytest.MonkeyPatch, folder: Path, **asked: Any) -> tuple[Any, Any]:
    from_headers = read_target(folder, **asked)
    with monkeypatch.context() as patched:
        patched.setattr(target_facts, "read_plain_decoder", lambda _: None)
        return from_headers, read_target(folder, **asked)


def test_headers_say_what_the_class_says(family: tuple[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    name, folder = family
    found = read_plain_decoder(folder)
    if name in PLAIN:
        assert found is not None, "or nothing is gained"
    if found is None:
        return
    for quantization in SCHEMES:
        for attention in (None, "eager"):
            quick, slow = both_ways(monkeypatch, folder, quantization=quantization, attention=attention)
            assert quick == slow


def test_the_embedded_target_is_read_by_its_headers(monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_plain_decoder(target_path()) is not None
    quick, slow = both_ways(monkeypatch, target_path())
    assert quick == slow


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_hidden_layers", 11),
        ("hidden_size", "256"),
        ("vocab_size", None),
        ("head_dim", 32),
        ("tie_word_embeddings", False),
        ("sliding_window", 64),
        ("quantization_config", {"quant_method": "gptq"}),
        ("num_local_experts", 4),
        ("architectures", ["LlamaForSequenceClassification"]),
        ("rope_parameters", {"full_attention": {"rope_type": "default"}}),
    ],
)
def test_anything_unusual_is_left_to_the_class(tmp_path: Path, field: str, value: Any) -> None:
    copy_target(tmp_path, **{field: value})
    assert read_plain_decoder(tmp_path) is None


def copy_target(folder: Path, **fields: Any) -> None:
    config = json.loads((target_path() / "config.json").read_text()) | fields
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes((target_path() / "model.safetensors").read_bytes())


@pytest.mark.parametrize("change", ["more", "fewer", "damaged"])
def test_other_tensors_are_left_to_the_class(tmp_path: Path, change: str) -> None:
    copy_target(tmp_path)
    weights = tmp_path / "model.safetensors"
    tensors = load_file(weights)
    if change == "more":
        tensors["model.layers.0.mlp.router.weight"] = tensors["model.norm.weight"].clone()
    else:
        tensors.pop("model.layers.3.mlp.up_proj.weight")
    save_file(tensors, weights, metadata={"format": "pt"})
    if change == "damaged":
        weights.write_bytes(b"no header at all")
    assert read_plain_decoder(tmp_path) is None


def test_cache_types_are_those_of_the_cache() -> None:
    assert CACHE_TYPES == CACHED_TYPES
