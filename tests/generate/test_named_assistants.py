"""An assistant given by name: a drafter is loaded as one, anything else is transformers' or gets a clear error."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

from eagle31_hf import Eagle31Drafter
from eagle31_hf.demo import target_path as demo_target_path
from eagle31_hf.errors import CheckpointNotFoundError, IncompatibleTargetError, UnsupportedGenerationError
from eagle31_hf.generate.hooks import KEPT_AT
from helpers import (
    CONFIGS,
    DEMO_DRAFTER,
    demo_tokenizer,
    drafter_of,
    one,
    random_drafter,
    random_target,
    target_of,
    write,
)

pytestmark = pytest.mark.contract


@pytest.fixture
def target() -> Any:
    return random_target(CONFIGS["llama"]())


@pytest.mark.parametrize("layout", ["plain", "speculators"])
@pytest.mark.parametrize("kind", [str, Path])
def test_generate_takes_the_name_of_a_drafter(target: Any, tmp_path: Path, layout: str, kind: type) -> None:
    drafter = random_drafter(target)
    drafter.save_pretrained(tmp_path, format=layout)
    drafter.detach()  # a drafter of that name is one of its own
    out = write(target, one(), assistant_model=kind(tmp_path), return_dict_in_generate=True)
    assert torch.equal(out.sequences, write(target, one()))
    assert out.speculation_stats.loop == "own"
    assert out.speculation_stats.drafted > 0


def test_a_drafter_is_loaded_once_and_goes_with_its_target(target: Any, tmp_path: Path) -> None:
    random_drafter(target).save_pretrained(tmp_path)
    write(target, one(), assistant_model=str(tmp_path))
    first = vars(target)[KEPT_AT][str(tmp_path)]
    write(target, one(), assistant_model=str(tmp_path))
    assert list(vars(target)[KEPT_AT].values()) == [first]
    assert not any("drafter" in name or "_eagle31" in name for name in target.state_dict())
    for twin in (copy.deepcopy(target), pickle.loads(pickle.dumps(target))):
        assert vars(twin)[KEPT_AT] == {}
        assert torch.equal(write(twin, one(), assistant_model=str(tmp_path)), write(target, one()))
        assert vars(twin)[KEPT_AT][str(tmp_path)] is not first


def test_names_of_other_things_say_what_to_do(target: Any, tmp_path: Path) -> None:
    target.save_pretrained(tmp_path / "model")
    with pytest.raises(UnsupportedGenerationError, match=r"no EAGLE-3.*AutoModelForCausalLM"):
        write(target, one(), assistant_model=str(tmp_path / "model"))
    with pytest.raises(CheckpointNotFoundError, match="no-such"):
        write(target, one(), assistant_model=str(tmp_path / "no-such" / "folder" / "anywhere"))
    with pytest.raises(IncompatibleTargetError, match="hidden size"):
        write(target, one(), assistant_model=str(DEMO_DRAFTER))


@pytest.mark.parametrize("batch_size", [1, 2])
@pytest.mark.parametrize("by_name", [False, True], ids=["drafter", "name"])
def test_a_pipeline_drafts(by_name: bool, batch_size: int) -> None:
    model, tokenizer = target_of("demo-target"), demo_tokenizer()
    assistant = str(DEMO_DRAFTER) if by_name else drafter_of("demo-target")
    texts = ["How many legs do seven spiders have?", "I need a table for two", "Play some jazz."]
    chats = [[{"role": "user", "content": text}] for text in texts]
    settings: dict[str, Any] = {"max_new_tokens": 20, "do_sample": False, "batch_size": batch_size}
    plain = hf.pipeline("text-generation", model=model, tokenizer=tokenizer)(chats, **settings)
    eagle = hf.pipeline("text-generation", model=model, tokenizer=tokenizer, assistant_model=assistant)
    assert isinstance(eagle.assistant_model, Eagle31Drafter)
    assert eagle(chats, **settings) == plain
    assert eagle(chats[0], **settings) == plain[0]
    assert eagle.assistant_model.stats.loop == "own"
    assert eagle.assistant_model.stats.accepted > 0
    if by_name:  # the target is that of other tests, too
        vars(model).pop(KEPT_AT)[assistant].detach()


def test_pipeline_leaves_other_assistants_to_transformers(tmp_path: Path) -> None:
    model = target_of("demo-target")
    model.save_pretrained(tmp_path)
    demo_tokenizer().save_pretrained(tmp_path)
    eagle = hf.pipeline("text-generation", model=model, tokenizer=demo_tokenizer(), assistant_model=str(tmp_path))
    assert type(eagle.assistant_model) is type(model)


BY_NAME_ALONE = """
{imports}
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline
target = AutoModelForCausalLM.from_pretrained({target!r})
tokenizer = AutoTokenizer.from_pretrained({target!r})
def by_generate():
    call = dict(max_new_tokens=8, do_sample=False, return_dict_in_generate=True, assistant_model={drafter!r})
    print(target.generate(**tokenizer("Hello", return_tensors="pt"), **call).speculation_stats.loop)
def by_pipeline():
    made = pipeline("text-generation", target, tokenizer=tokenizer, assistant_model={drafter!r})
    print(type(made.assistant_model).__name__)
{calls}
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("imports", "calls", "told"),
    [
        ("from eagle31_hf import Eagle31Drafter", "by_generate(), by_pipeline()", ["own", "Eagle31Drafter"]),
        (
            "import transformers.generation.utils; from eagle31_hf import NoDrafter",
            "by_pipeline(), by_generate()",
            ["Eagle31Drafter", "own"],
        ),
    ],
)
@pytest.mark.thorough(every=2)
def test_importing_a_drafters_class_is_enough(imports: str, calls: str, told: list[str]) -> None:
    """A drafter may then be named where `generate` and `pipeline` take an assistant."""
    code = BY_NAME_ALONE.format(imports=imports, calls=calls, target=str(demo_target_path()), drafter=str(DEMO_DRAFTER))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.stdout.split()[-2:] == told, done.stderr
