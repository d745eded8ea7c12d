"""Libraries that call `generate` by themselves draft after `use_by_default`: the same results in fewer target passes.

Stand-ins call it as libraries do, with their arguments and their stopping criteria, so that the packages need not
be there; `examples/hosts` has the libraries themselves, and what is installed of them runs here, too.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    StoppingCriteria,
    StoppingCriteriaList,
    TextIteratorStreamer,
)

from eagle31_hf import Eagle31Drafter
from eagle31_hf.demo import CONVERSATIONS
from helpers import DEMO_DRAFTER, MODELS, demo_tokenizer

HOSTS = Path(__file__).parents[1] / "examples" / "hosts"
SCRIPTS = {"evaluation": "lm_eval", "grpo": "trl", "transformers_serve": "fastapi", "pipeline_chat": "transformers",
           "agent_model": "smolagents"}  # fmt: skip
"""What each needs."""

sys.path.insert(0, str(HOSTS))
from both_ways import count_passes  # noqa: E402


@pytest.fixture(scope="module")
def target() -> Any:
    return AutoModelForCausalLM.from_pretrained(MODELS / "demo-target", dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def passes(target) -> Counter[str]:
    return count_passes(target)


@pytest.fixture
def eagle(target) -> Iterator[Eagle31Drafter]:
    drafter = Eagle31Drafter.from_pretrained(DEMO_DRAFTER, target=target)
    drafter.generation_config.num_assistant_tokens_schedule = "constant"  # planned drafts go by the clock
    yield drafter
    drafter.detach()


def batch_of(chats: Any) -> Any:
    return demo_tokenizer().apply_chat_template(
        list(chats), add_generation_prompt=True, return_tensors="pt", return_dict=True, padding=True
    )


# --- as lm-eval's HFLM does -------------------------------------------------------------------------------------------


class EndsWhenAllHaveEnded(StoppingCriteria):
    """As `MultiTokenEOSCriteria`: it remembers which rows of the batch are done, and answers once they all are."""

    def __init__(self, stop: str, prompt_length: int, rows: int):
        self.stop, self.prompt_length, self.done = stop, prompt_length, [False] * rows

    def __call__(self, input_ids, scores, **kwargs):
        texts = demo_tokenizer().batch_decode(input_ids[:, self.prompt_length :][:, -4:])
        for row, done in enumerate(self.done):
            self.done[row] = done or self.stop in texts[row]
        return False not in self.done


def evaluation(model, rows=1, **sampling):
    for start in range(0, len(CONVERSATIONS), rows):
        inputs = batch_of(CONVERSATIONS[start : start + rows])
        count, length = inputs["input_ids"].shape
        rules = [EndsWhenAllHaveEnded(stop, length, count) for stop in ("?", "\n\n", "<|end|>")]
        with torch.autocast(device_type="cpu", dtype=None, enabled=False):
            yield model.generate(
                input_ids=inputs["input_ids"],
                attention_mask=inputs["attention_mask"],
                max_length=length + 40,
                stopping_criteria=StoppingCriteriaList(rules),
                pad_token_id=demo_tokenizer().pad_token_id,
                use_cache=True,
                **(sampling or {"do_sample": False}),
            ).tolist()


# --- as TRL's GRPOTrainer does ----------------------------------------------------------------------------------------


def training(model):
    """Between two calls the weights change where they lie."""
    begun = {name: weights.clone() for name, weights in model.state_dict().items()}
    tokenizer = demo_tokenizer()
    settings = GenerationConfig(
        max_new_tokens=24, do_sample=True, pad_token_id=tokenizer.pad_token_id, bos_token_id=tokenizer.bos_token_id,
        eos_token_id=[tokenizer.eos_token_id], temperature=1.0, top_p=1.0, top_k=0, min_p=None, repetition_penalty=1.0,
        cache_implementation=None, disable_compile=True,
    )  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    model.train()
    try:
        for chats in ([CONVERSATIONS[1]] * 2 + [CONVERSATIONS[4]] * 2, CONVERSATIONS[:4], CONVERSATIONS[:4]):
            inputs = batch_of(chats)
            with torch.no_grad():
                written = model.generate(**inputs, generation_config=settings)
            yield written.tolist()
            model(input_ids=written, labels=written).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    finally:
        model.eval()
        model.load_state_dict(begun)


# --- as smolagents' TransformersModel does ----------------------------------------------------------------------------


def agent(model):
    for messages in CONVERSATIONS:
        prompt = batch_of([messages])["input_ids"]
        rules = StoppingCriteriaList([EndsWhenAllHaveEnded("?", prompt.shape[1], 1)])
        kwargs = {"inputs": prompt, "use_cache": True, "max_new_tokens": 40}
        yield model.generate(**kwargs, stopping_criteria=rules).tolist()
        streamer = TextIteratorStreamer(demo_tokenizer(), skip_prompt=True, skip_special_tokens=True, timeout=60)
        with ThreadPoolExecutor(1) as pool:
            pool.submit(model.generate, streamer=streamer, **kwargs, stopping_criteria=None).result(timeout=120)
        yield "".join(streamer)


STAND_INS = {
    "evaluation": evaluation,
    "evaluation, drawn": lambda model: evaluation(model, do_sample=True, temperature=0.8),
    "training": training,
    "agent": agent,
}


@pytest.mark.slow
@pytest.mark.parametrize("host", list(STAND_INS))
def test_a_host_gets_the_same_in_fewer_passes(host, target, eagle, passes):
    def work():
        torch.manual_seed(3)
        passes.clear()
        results = list(STAND_INS[host](target))
        return results, torch.get_rng_state(), passes.total()

    plain, generator, without = work()
    eagle.use_by_default()
    results, generator_after, drafted = work()
    assert results == plain
    assert torch.equal(generator, generator_after)
    assert drafted < 0.8 * without
    assert len({str(result) for result in results}) > 1, "texts that differ from one another"


def test_a_batch_that_ends_as_one_is_written_plainly_and_says_why(target, eagle):
    plain = list(evaluation(target, rows=3))
    eagle.use_by_default()
    assert list(evaluation(target, rows=3)) == plain
    assert "EndsWhenAllHaveEnded may end a row of the batch by what other rows hold" in eagle.stats.reason


def test_passes_are_those_that_stats_tell(target, eagle, passes):
    eagle.use_by_default()
    passes.clear()
    target.generate(**batch_of(CONVERSATIONS[:1]), max_new_tokens=24, do_sample=False)
    assert passes.total() == eagle.stats.passes + 1, "and one that read the prompt"


# --- the libraries themselves -----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("script", list(SCRIPTS))
def test_the_library_itself(script):
    if find_spec(SCRIPTS[script]) is None:
        pytest.skip(f"{SCRIPTS[script]} is not installed; `make hosts` has it")
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    ran = subprocess.run(
        [sys.executable, str(HOSTS / f"{script}.py")], capture_output=True, text=True, env=environment, timeout=300
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert "results: the same" in ran.stdout
    without, drafted = re.search(r"target passes: (\d+) without, (\d+) with", ran.stdout).groups()
    assert int(drafted) < int(without)


def test_each_host_has_a_short_script_that_make_runs():
    names = {path.stem for path in HOSTS.glob("*.py")} - {"both_ways"}
    assert names == set(SCRIPTS)
    assert all(20 <= len((HOSTS / f"{name}.py").read_text().splitlines()) <= 40 for name in names)
    makefile = (HOSTS.parents[1] / "Makefile").read_text()
    assert all(re.search(rf"^HOST_SCRIPTS := .*\b{name}\b", makefile, re.M) for name in names)
