"""`eagle31 plan` on folders whose config.json is wrong: one line that says so."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from eagle31_hf.cli import app

SOUND = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 160,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 300,
}  # fmt: skip
BROKEN: dict[str, dict | str] = {
    "no heads": {"model_type": "llama", "num_attention_heads": 0},
    "less than no layers": SOUND | {"num_hidden_layers": -1},
    "no hidden size": SOUND | {"hidden_size": 0},
    "a size of 1e30": {"model_type": "llama", "hidden_size": -5, "vocab_size": 1e30},
    "no key and value heads": SOUND | {"num_key_value_heads": 0},
    "heads of no width": SOUND | {"head_dim": 0},
    "heads in words": SOUND | {"num_attention_heads": "four"},
    "infinite": SOUND | {"hidden_size": float("inf")},
    "rope that is a number": SOUND | {"rope_scaling": 5},
    "unknown layer types": SOUND | {"layer_types": ["x", "y"]},
    "bits in words": SOUND | {"quantization_config": {"quant_method": "gptq", "bits": "four"}},
    "packed by a number": SOUND | {"quantization_config": 5},
    "unknown precision": SOUND | {"dtype": "float33"},
    "nested too deep": "[" * 200_000,
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_config_that_makes_no_model_is_one_line(what: str, tmp_path: Path) -> None:
    content = BROKEN[what]
    (tmp_path / "config.json").write_text(content if isinstance(content, str) else json.dumps(content))
    result = CliRunner().invoke(app, ["plan", str(tmp_path), "--card", "RTX 4090"], env={"COLUMNS": "400"})
    assert isinstance(result.exception, SystemExit), result.exception
    assert (result.exit_code, len(result.output.strip().splitlines())) == (1, 1), result.output
    assert result.output.startswith("error: ")
