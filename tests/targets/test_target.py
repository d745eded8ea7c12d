"""What a drafter takes from its target: hidden states, shared weights, and a clear no where it does not fit.

What a target cannot do is found out when a drafter is attached, by trying it, and leads to a loop that is exact.
"""

from __future__ import annotations

import copy
import gc
import pickle
import re
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn

from eagle31_hf import Eagle31Drafter
from eagle31_hf.errors import (
    ConfigurationError,
    IncompatibleTargetError,
    NotAttachedError,
    UnsupportedGenerationError,
)
from eagle31_hf.measure.doctor import preflight
from eagle31_hf.serving.batch import EngineSettings
from eagle31_hf.serving.engine import within_what_the_target_can
from eagle31_hf.targets.binding import TargetBinding
from eagle31_hf.targets.fresh_drafter import default_config
from families import TEXT_FAMILIES, recurrent_target
from helpers import (
    CONFIGS,
    FAMILIES,
    GROUPED,
    SIZES,
    assert_same_text,
    configured,
    demo_tokenizer,
    left_padded,
    random_drafter,
    random_prompts,
    random_target,
    write,
)

UNLIKE_WIDTH = partial(hf.LlamaConfig, **{**GROUPED, "hidden_size": 32})


def hooks_of(model: nn.Module) -> int:
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


@pytest.fixture
def llama() -> Any:
    return random_target(CONFIGS["llama"]())


@torch.no_grad()
@pytest.mark.contract
@pytest.mark.parametrize("name", [*FAMILIES, "qwen3_5_moe_text", "nemotron_h"])
def test_hooks_see_what_output_hidden_states_shows(name: str) -> None:
    """In the order of the config, which may name one twice. Every block counts, whatever it keeps."""
    target = random_target(CONFIGS[name]()) if name in CONFIGS else recurrent_target(name)
    layers = target.config.num_hidden_layers
    indices = [layers, *range(layers), 0]
    binding = TargetBinding(
        target, default_config(target.config, num_aux_hidden_states=len(indices), aux_layers=indices)
    )
    ids = torch.tensor(random_prompts(1, longest=20)[0])[None]
    with binding.capturing():
        shown = target(ids, output_hidden_states=True)
        last, *states = binding.take_aux().chunk(len(indices), dim=-1)
    for index, found in zip(indices[1:], states, strict=True):
        assert torch.equal(found, shown.hidden_states[index]), index
    # The last one is shown after the final norm; a tap takes it before.
    assert not torch.allclose(last, shown.hidden_states[layers], atol=1e-3)
    (norm,) = (part for name, part in target.get_decoder().named_children() if "norm" in name)
    torch.testing.assert_close(norm(last), shown.hidden_states[layers])
    binding.close()


def test_taps_are_handed_over_once_and_only_while_capturing(llama: Any) -> None:
    binding = TargetBinding(llama, default_config(llama.config))
    ids = torch.tensor([[3, 4, 5]])
    with torch.no_grad():
        llama(ids)
        assert not any(binding.taps._caught.values())
        with binding.capturing():
            llama(ids)
            assert binding.take_aux().shape == (1, 3, 3 * 64)
            with pytest.raises(IncompatibleTargetError, match="before compiling"):
                binding.take_aux()
            llama(ids)
    assert not any(binding.taps._caught.values()), "nothing outlives the capture"


def test_detach_leaves_the_target_as_it_was(llama: Any) -> None:
    before = {name: tensor.clone() for name, tensor in llama.state_dict().items()}
    modules = [name for name, _ in llama.named_modules()]
    drafter = random_drafter(llama)
    binding = weakref.ref(drafter.binding)
    assert hooks_of(llama) > 0
    with configured(drafter, draft_top_k=2):
        llama.generate(torch.tensor([[5, 6]]), max_new_tokens=5, assistant_model=drafter, do_sample=False)
    drafter.detach()
    gc.collect()
    assert hooks_of(llama) == 0
    assert binding() is None
    assert [name for name, _ in llama.named_modules()] == modules
    assert all(torch.equal(tensor, before[name]) for name, tensor in llama.state_dict().items())
    drafter.detach()  # twice is fine
    dropped = random_drafter(llama)
    assert hooks_of(llama) > 0
    del dropped
    gc.collect()
    assert hooks_of(llama) == 0


def test_attaching_elsewhere_lets_go_of_the_first_target_unless_it_fails(llama: Any) -> None:
    drafter = random_drafter(llama)
    narrow, other = random_target(UNLIKE_WIDTH()), random_target(CONFIGS["llama"](), seed=5)
    hooks = hooks_of(llama)
    with pytest.raises(IncompatibleTargetError):
        drafter.attach(narrow)
    assert (hooks_of(narrow), hooks_of(llama)) == (0, hooks)
    assert drafter.binding.model is llama
    assert drafter.attach(other) is drafter
    assert (hooks_of(llama), hooks_of(other)) == (0, hooks)
    assert drafter.binding.model is other


@torch.no_grad()
def test_copies_of_an_attached_target_work_alone(llama: Any) -> None:
    drafter = random_drafter(llama)
    ids = torch.tensor([[3, 4, 5]])
    logits = llama(ids).logits
    for twin in (copy.deepcopy(llama), pickle.loads(pickle.dumps(llama))):
        assert torch.equal(twin(ids).logits, logits)
        binding = drafter.binding
        with binding.capturing():
            twin(ids)
            assert not any(binding.taps._caught.values()), "a copy's forward must not reach the drafter of the original"
        out = twin.generate(ids, max_new_tokens=4, do_sample=False)
        assert torch.equal(out, llama.generate(ids, max_new_tokens=4, do_sample=False))


def test_embedding_and_full_head_are_the_targets_own(llama: Any) -> None:
    drafter = random_drafter(llama, own_lm_head=False)
    assert drafter.embed_tokens is None
    assert drafter.lm_head is None
    binding = drafter.binding
    assert binding.embedding.weight.data_ptr() == llama.get_input_embeddings().weight.data_ptr()
    assert binding.lm_head.weight.data_ptr() == llama.lm_head.weight.data_ptr()
    assert binding.draft_head is None
    names = drafter.state_dict().keys()
    assert not any("embed" in name or "lm_head" in name for name in names)
    with torch.no_grad():
        hidden = torch.randn(1, 2, 64)
        assert torch.equal(drafter.draft_logits(hidden), llama.lm_head(hidden))


def test_reduced_vocabulary_over_a_shared_head_keeps_the_gathered_rows_only(llama: Any) -> None:
    drafter = random_drafter(llama, own_lm_head=False, draft_vocab_size=16)
    binding = drafter.binding
    rows = binding.draft_head
    assert isinstance(rows, torch.Tensor)
    assert rows.untyped_storage().nbytes() == 16 * 64 * 4
    ids = drafter.draft_ids
    assert ids is not None
    assert torch.equal(rows, llama.lm_head.weight[ids])
    drafter.detach()
    assert binding.draft_head is None


def refused(target: Any, **overrides: Any) -> str:
    fitting = random_target(CONFIGS["llama"]())
    config = default_config(fitting.config, **overrides)
    with pytest.raises((IncompatibleTargetError, ConfigurationError)) as caught:
        Eagle31Drafter(config).attach(target)
    if isinstance(target, nn.Module):
        assert hooks_of(target) == 0
    return str(caught.value)


def with_fewer_rows() -> Any:
    target = random_target(CONFIGS["llama"]())
    target.model.embed_tokens = nn.Embedding(50, 64)
    return target


def projecting() -> Any:
    config = TEXT_FAMILIES["opt"]()
    config.word_embed_proj_dim = 32
    return random_target(config)


T5 = {"vocab_size": 96, "d_model": 64, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
UNFIT: dict[str, tuple[Callable[[], Any], dict[str, Any], str]] = {
    "another vocabulary": (lambda: random_target(hf.LlamaConfig(**{**GROUPED, "vocab_size": 1000})), {}, "96.*1000"),
    "another width": (lambda: random_target(UNLIKE_WIDTH()), {}, "64.*32"),
    "a projected embedding": (projecting, {}, "projects its embedding"),
    "layers out of range": (lambda: random_target(CONFIGS["llama"]()), {"aux_layers": [1, 2, 5]}, r"\[5\].*0\.\.4"),
    "layers unnamed": (lambda: random_target(CONFIGS["llama"]()), {"num_aux_hidden_states": 2}, "no default"),
    "encoder and decoder": (lambda: hf.T5ForConditionalGeneration(hf.T5Config(**T5)), {}, "encoder-decoder"),
    "no head": (lambda: hf.LlamaModel(CONFIGS["llama"]()), {}, "AutoModelForCausalLM"),
    "no model": (lambda: nn.Linear(2, 2), {}, "Linear"),
    "fewer rows than its vocabulary": (with_fewer_rows, {}, "50 rows"),
}


@pytest.mark.parametrize("case", UNFIT)
def test_targets_that_do_not_fit_are_refused(case: str) -> None:
    make, overrides, message = UNFIT[case]
    assert re.search(message, refused(make(), **overrides))


KINDS_OF_STATES: dict[str, dict[str, Any]] = {
    "minimax": {**GROUPED, "layer_types": ["full_attention", "linear_attention"] * 2, "num_local_experts": 4},
    "recurrent_gemma": {**GROUPED, "lru_width": 64},
    "rwkv": {"vocab_size": 96, "hidden_size": 64, "attention_hidden_size": 64, "num_hidden_layers": 4},
    "xlstm": {"vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 4, "num_blocks": 4, "num_heads": 4},
    "deepseek_v4": GROUPED,
    "qwen4_exp_text": {
        **GROUPED, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "num_experts": 4,
        "num_experts_per_tok": 2, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "hc_lowrank": 8,
        "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 16,
        "indexer_compress_ratio": 4, "pad_token_id": 0,
    },
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS_OF_STATES)
def test_states_that_nobody_can_take_back_are_refused(kind: str) -> None:
    if kind not in hf.CONFIG_MAPPING:
        pytest.skip("this transformers does not have it")
    message = refused(random_target(hf.AutoConfig.for_model(kind, **KINDS_OF_STATES[kind])))
    assert "a state that cannot be taken back" in message
    assert "layers" in message


@pytest.mark.contract
@torch.no_grad()
def test_a_compiled_target_is_read_as_it_was_and_stays_one_graph_where_nothing_drafts(llama: Any) -> None:
    binding = TargetBinding(llama, default_config(llama.config, aux_layers=[1, 2, 3]))
    ids = torch.tensor([[3, 4, 5, 6]])
    shown = llama(ids, output_hidden_states=True).hidden_states
    torch.compile(llama.forward, backend="eager", fullgraph=True)(ids, use_cache=False)
    with binding.capturing():
        torch.compile(llama.forward, backend="eager")(ids, use_cache=False)
        wanted = torch.cat([shown[index] for index in binding.aux_layers], -1)
        torch.testing.assert_close(binding.take_aux(), wanted)


NO_DRAFTS: dict[str, Callable[[], Any]] = {
    "sees what comes later, keeps no cache": lambda: hf.BertConfig(**SIZES),
    "asserts": lambda: hf.XLMConfig(
        vocab_size=96, emb_dim=64, n_layers=4, n_heads=4, max_position_embeddings=128, bos_token_id=1, eos_token_id=None
    ),
    "sees what comes later": lambda: hf.BigBirdConfig(**SIZES, attention_type="original_full"),
    "takes no positions": lambda: hf.WhisperConfig(
        vocab_size=96, d_model=64, decoder_layers=4, decoder_attention_heads=4, bos_token_id=1, eos_token_id=None,
        pad_token_id=0, decoder_start_token_id=1, suppress_tokens=None, begin_suppress_tokens=None,
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", NO_DRAFTS)
def test_a_target_that_cannot_verify_drafts_is_decoded_plainly(kind: str) -> None:
    target = random_target(NO_DRAFTS[kind]())
    eagle = random_drafter(target)
    binding = eagle.binding
    assert "tree self-test" in binding.tree_unsupported_reason
    assert_same_text(target, eagle, torch.tensor(random_prompts(1, seed=3)), loop="plain")
    assert "tree self-test" in eagle.stats.reason
    found = {finding.check: finding for finding in preflight(eagle, demo_tokenizer())}
    assert (found["verification"].level, "plain decoding only" in found["verification"].text) == ("problem", True)
    with pytest.raises(UnsupportedGenerationError, match=r"tree self-test.*use generate"):
        within_what_the_target_can(eagle, EngineSettings())


@pytest.mark.parametrize("rows", [1, 3])
def test_windows_under_other_names_are_not_believed(rows: int) -> None:
    """GPT-Neo counts keys where they lie, which shows only in texts that are longer than its window."""
    config = TEXT_FAMILIES["gpt_neo"]()
    config.window_size = 24
    target = random_target(config)
    eagle = random_drafter(target)
    inputs = left_padded(random_prompts(rows, seed=rows))
    assert_same_text(target, eagle, inputs, loop="plain", max_new_tokens=50)
    assert "window of 24 tokens, window_size" in eagle.stats.reason


def test_a_target_of_several_streams_is_refused() -> None:
    config = hf.Gemma3nTextConfig(
        **GROUPED, sliding_window=8, layer_types=["sliding_attention", "full_attention"] * 2, laurel_rank=8,
        hidden_size_per_layer_input=8, vocab_size_per_layer_input=96, num_kv_shared_layers=0,
        activation_sparsity_pattern=[0.0] * 4,
    )  # fmt: skip
    target = random_target(config)
    with pytest.raises(IncompatibleTargetError, match=r"\(4, 2, .*one vector a token"):
        random_drafter(target)
    assert hooks_of(target) == 0, "it is as it was"


@pytest.mark.skipif(not hasattr(hf, "InklingTextConfig"), reason="of newer versions of transformers")
def test_masks_under_names_of_its_own_are_named_in_the_reason() -> None:
    """Inkling's layer types are not the names that it looks its masks up by."""
    config = hf.InklingTextConfig(
        **{name: value for name, value in GROUPED.items() if name != "sliding_window"}, swa_num_attention_heads=4,
        swa_num_key_value_heads=2, swa_head_dim=16, sliding_window_size=512, d_rel=4, rel_extent=64,
        moe_intermediate_size=32, n_routed_experts=4, num_experts_per_tok=2, n_shared_experts=1,
        layer_types=["hybrid_sliding", "hybrid"] * 2,
    )  # fmt: skip
    target = random_target(config)
    eagle = random_drafter(target, aux_layers=[1, 2, 3])
    assert_same_text(target, eagle, torch.tensor(random_prompts(1, seed=3)), loop="plain")
    assert "looks for 'sliding_attention'" in eagle.stats.reason
    assert "hybrid_sliding" in eagle.stats.reason


def test_a_detached_drafter_and_one_of_another_model_are_refused(llama: Any) -> None:
    drafter, other = random_drafter(llama), random_target(CONFIGS["llama"](), seed=9)
    with pytest.raises(NotAttachedError, match="another LlamaForCausalLM"):
        write(other, torch.tensor([[3]]), assistant_model=drafter)
    drafter.detach()
    with pytest.raises(NotAttachedError, match="attach"):
        write(llama, torch.tensor([[3]]), assistant_model=drafter)


@pytest.mark.contract
def test_two_drafters_share_one_target(llama: Any) -> None:
    first, second = random_drafter(llama, seed=1), random_drafter(llama, seed=2, aux_layers=[0, 1, 4])
    inputs = left_padded(random_prompts(1))
    for drafter in (first, second, first):
        assert_same_text(llama, drafter, inputs, max_new_tokens=12)
    first.detach()
    assert_same_text(llama, second, inputs, max_new_tokens=12)
