"""Heads inside targets: what they compute is what transformers' `MtpModel` computes of the same tensors.

They draft from the first rows of the LM head where that is most of what a step costs.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from packaging.version import Version
from torch import Tensor
from transformers.modeling_layers import MtpModel

from eagle31_hf import Eagle31Drafter
from eagle31_hf.demo import drafter_path
from eagle31_hf.drafter import draft_rows
from eagle31_hf.drafter.draft_rows import follows_merges
from eagle31_hf.drafter.session import DraftSession
from eagle31_hf.errors import ConfigurationError
from helpers import assert_same_text
from mtp_targets import (
    FAMILIES,
    FULL,
    LAYER_TYPES,
    SLIDING,
    TWO_LAYERS,
    final_norm,
    layers_like_the_heads,
    random_head,
    target_with_head,
)

DEPTH = 5
LENGTH = 9  # of the prompt: one more than the narrowest window
needs_oracle = pytest.mark.skipif(
    Version(hf.__version__) < Version("5.20"), reason="this version's MtpModel does not rotate by layer type"
)


class Reference:
    """A head by transformers' own class, which reads the whole sequence anew for every step and keeps no cache."""

    def __init__(self, target: Any, tensors: dict[str, Tensor]):
        config = target.config
        has_types = getattr(config, "layer_types", None) is not None
        self.layer_type = LAYER_TYPES.get(config.model_type, FULL) if has_types else None
        config.num_mtp_layers = 1
        config.mtp_layer_types = [self.layer_type] if has_types else None
        config.mtp_mlp_layer_types = list(getattr(config, "mlp_layer_types", None) or [])[-1:] or None
        self.model = MtpModel(target, 1).eval()
        self.layer = self.model.layers[0]
        names = {"fc": "eh_proj", "norm": "post_norm", "layers.0": "mtp_block"}
        state = {}
        for name, tensor in tensors.items():
            part = "layers.0" if name.startswith("layers.0.") else name.partition(".")[0]
            state[names.get(part, part) + name.removeprefix(part)] = tensor
        self.layer.load_state_dict(state)
        self.window = config.sliding_window if self.layer_type == SLIDING else None

    def __call__(self, tokens: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """Logits `(T, V)` and outputs `(1, T, H)` of slots that read `tokens` `(T,)` and `states` `(1, T, H)`."""
        positions = torch.arange(1, len(tokens) + 1)[None]
        mask = causal_mask(len(tokens), self.window)
        kind = {"layer_type": self.layer_type} if self.model.has_per_layer_rope else {}
        rotary = self.model.rotary_emb(states, positions, **kind)
        embeddings = self.model.embed_tokens(tokens[None])
        out = self.layer(embeddings, states, rotary, mask, positions, None)
        return self.model.shared_head(out)[0], out


class TwoLayers:
    """A head of two layers, which transformers has no class for, from copies of the target's own."""

    def __init__(self, target: Any, tensors: dict[str, Tensor]):
        self.target, self.fc = target, tensors["fc.weight"]
        self.layers = copy.deepcopy(layers_like_the_heads(target))
        for number, layer in enumerate(self.layers):
            prefix = f"layers.{number}."
            layer.load_state_dict({n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)})
        self.norms = {}
        for part in ("enorm", "hnorm", "norm"):
            self.norms[part] = copy.deepcopy(final_norm(target))
            self.norms[part].weight.copy_(tensors[f"{part}.weight"])

    def __call__(self, tokens: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """As `Reference` does."""
        embeddings = self.target.get_input_embeddings()(tokens[None])
        joined = torch.cat((self.norms["enorm"](embeddings), self.norms["hnorm"](states)), dim=-1)
        hidden = joined @ self.fc.T
        for layer in self.layers:
            hidden = layer(hidden, attention_mask=causal_mask(len(tokens)))
        out = self.norms["norm"](hidden)
        return self.target.lm_head(out)[0], out


def causal_mask(length: int, window: int | None = None) -> Tensor:
    """Additive `(1, 1, T, T)`."""
    seen = torch.ones(length, length, dtype=torch.bool).tril()
    if window is not None:
        seen &= ~torch.ones(length, length, dtype=torch.bool).tril(-window)
    return torch.zeros(length, length).masked_fill(~seen, torch.finfo(torch.float32).min)[None, None]


def reference_of(target: Any) -> Reference | TwoLayers:
    """The slow head beside a target that `target_with_head` made."""
    kind = TwoLayers if target.config.model_type in TWO_LAYERS else Reference
    return kind(target, random_head(target, seed=0))


def recursion(reference: Reference | TwoLayers, target: Any, ids: Tensor, drafts: Tensor) -> Tensor:
    """Logits `(DEPTH, V)` of a head behind `ids` `(T,)` and `drafts` `(DEPTH,)`, of which the first is the root."""
    states = target.get_decoder()(ids[None]).last_hidden_state
    tokens, rows = torch.cat((ids[1:], drafts[:1])), []
    for step in range(DEPTH):
        logits, out = reference(tokens, states)
        rows.append(logits[-1])
        states = torch.cat((states, out[:, -1:]), dim=1)
        tokens = torch.cat((tokens, drafts[step + 1 : step + 2]))
    return torch.stack(rows)


def drafted(drafter: Eagle31Drafter, target: Any, ids: Tensor, drafts: Tensor, chunk: int = LENGTH) -> Tensor:
    """The same of our session, which reads the prompt in chunks and keeps what it has read."""
    session = DraftSession(drafter, batch_size=1, capacity=64, block=LENGTH)
    with drafter.binding.capturing():
        target(ids[None])
        aux = drafter.binding.take_aux()
    tokens = torch.cat((ids[1:], drafts[:1]))[None]
    for start in range(0, len(ids), chunk):
        part = slice(start, min(start + chunk, len(ids)))
        session.absorb(tokens[:, part], aux[:, part], [part.stop - start])
    state, rows = session.root, []
    for step in range(DEPTH):
        rows.append(state.logits[0, 0])
        state = session.step(drafts[None, step + 1 : step + 2], state.feedback, after=step, depth=step)
    return torch.stack(rows)


@pytest.fixture(scope="module", params=FAMILIES)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    folder = tmp_path_factory.mktemp(request.param)
    return target_with_head(request.param, folder), folder


@needs_oracle
@torch.inference_mode()
def test_logits_are_those_of_transformers(made):
    target, folder = made
    drafter = Eagle31Drafter.from_pretrained(folder, target=target)
    reference = reference_of(target)
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(3, 90, (LENGTH,), generator=generator)
    drafts = torch.randint(3, 90, (DEPTH + 1,), generator=generator)
    wanted = recursion(reference, target, ids, drafts)
    for chunk in (LENGTH, 4):
        torch.testing.assert_close(drafted(drafter, target, ids, drafts, chunk), wanted, atol=1e-5, rtol=1e-5)


# --- rows of the LM head ----------------------------------------------------------------------------------------------

LETTERS = "abcdefghijklmnopqrstuvwxyz"


def tokenizer_file(folder: Path, kind: str = "BPE", shuffled: bool = False, added: int = 0) -> Path:
    """A tokenizer that knows all letters and pairs of them, in the order of its merges unless they are shuffled."""
    pairs = [(a, b) for a in LETTERS for b in LETTERS]
    order = torch.randperm(len(pairs), generator=torch.Generator().manual_seed(0)).tolist()
    words = [a + b for a, b in pairs]
    ids = [words[i] for i in order] if shuffled else words
    vocabulary = {word: number for number, word in enumerate([*LETTERS, *ids, *(f"added{i}" for i in range(added))])}
    model: dict[str, Any] = {"type": kind, "vocab": vocabulary, "merges": [f"{a} {b}" for a, b in pairs]}
    path = folder / "tokenizer.json"
    path.write_text(json.dumps({"model": model}))
    return path


def test_tokenizers_whose_ids_follow_merges_are_known(tmp_path):
    assert follows_merges(tokenizer_file(tmp_path))
    for other in ({"kind": "Unigram"}, {"shuffled": True}, {"added": 2000}):
        assert not follows_merges(tokenizer_file(tmp_path, **other)), other
    (tmp_path / "tokenizer.json").write_text("[1, 2]")
    assert not follows_merges(tmp_path / "tokenizer.json")
    assert not follows_merges(tmp_path / "none.json")


@pytest.fixture
def large_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_rows, "SMALLEST_CUT", 512)


def test_a_large_vocabulary_is_cut_and_nothing_is_copied(tmp_path, large_vocabulary):
    tokenizer_file(tmp_path)
    target = target_with_head("qwen3_5_text", tmp_path, vocab_size=1024)
    drafter = Eagle31Drafter.from_pretrained(tmp_path, target=target)
    assert drafter.config.draft_vocab_size == 256
    (rows,) = drafter.head_weights
    assert rows.shape == (256, 64)
    assert rows.data_ptr() == target.lm_head.weight.data_ptr()


@pytest.mark.parametrize("reason", ["no tokenizer", "small", "another order"])
def test_all_rows_are_kept_where_cutting_is_not_known_to_pay(tmp_path, monkeypatch, reason):
    monkeypatch.setattr(draft_rows, "SMALLEST_CUT", 2048 if reason == "small" else 512)
    if reason != "no tokenizer":
        tokenizer_file(tmp_path, shuffled=reason == "another order")
    target = target_with_head("qwen3_5_text", tmp_path, vocab_size=1024)
    assert Eagle31Drafter.from_pretrained(tmp_path, target=target).config.draft_vocab_size == 1024


def test_rows_that_are_asked_for_draft_the_same_text(tmp_path):
    target = target_with_head("qwen3_5_text", tmp_path, vocab_size=1024)
    ids = torch.arange(20, 28)[None]
    for size in (1, 100, 1024):
        drafter = Eagle31Drafter.from_pretrained(tmp_path, target=target, draft_vocab_size=size)
        assert drafter.config.draft_vocab_size == size
        settings = {"num_assistant_tokens": 3, "num_assistant_tokens_schedule": "constant"}
        assert_same_text(target, drafter, ids, settings=settings, max_new_tokens=24)
        assert drafter.stats.drafted > 0
    drafter.detach()
    for size in (0, 1025):
        with pytest.raises(ConfigurationError, match="wanted 1 to 1024"):
            Eagle31Drafter.from_pretrained(tmp_path, draft_vocab_size=size)


def test_rows_are_kept_when_the_head_is_saved(tmp_path):
    target_with_head("qwen3_5_text", tmp_path / "target", vocab_size=1024)
    Eagle31Drafter.from_pretrained(tmp_path / "target", draft_vocab_size=100).save_pretrained(tmp_path / "head")
    assert Eagle31Drafter.from_pretrained(tmp_path / "head").draft_ids.tolist() == list(range(100))
    with pytest.raises(ConfigurationError, match="saved with 100 draft rows"):
        Eagle31Drafter.from_pretrained(tmp_path / "head", draft_vocab_size=50)


def test_an_eagle_drafter_has_a_vocabulary_of_its_own():
    with pytest.raises(ConfigurationError, match="draft vocabulary is its own"):
        Eagle31Drafter.from_pretrained(drafter_path(), draft_vocab_size=100)
