"""On-policy drafts for stage 2, made and verified as in generation: prefill, `DraftSession`, `propose_chain`, verify.

`N` contexts, `G` samples of each, `K` drafted tokens, `Vd` draft vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...cache.block_reading import BlockReading
from ...cache.speculative import SpeculativeCache
from ...drafter.drafter import Eagle31Drafter
from ...drafter.propose import DraftChoice, propose_chain
from ...drafter.replay import rows_of_ids
from ...drafter.session import DraftSession
from ...generation_config import DraftLength
from ...target.verify import Verification
from ..data.packing import NOT_WRITTEN, PackedBatch
from ..distillation.step_attention import GrowingCache
from ..distillation.unroll import supervised_positions


@dataclass(frozen=True)
class Contexts:
    """Where drafts begin.

    Attributes:
        tokens: `(N, L)` right-padded ids.
        lengths: tokens per row the target reads; the one after them is the root.
        roots: `(N,)` last token of each context: the target has not read it yet.
        aux: `(N, L, A*Ht)` the target's hidden states over `tokens`; `None` before the prefill.
    """

    tokens: Tensor
    lengths: list[int]
    roots: Tensor
    aux: Tensor | None = None

    @property
    def shifted(self) -> Tensor:
        """`(N, L)` the token after each position, as the drafter reads them."""
        shifted = self.tokens.roll(-1, dims=1)
        index = torch.tensor(self.lengths, device=shifted.device)[:, None] - 1
        return shifted.scatter(1, index, self.roots[:, None])


@dataclass(frozen=True)
class ChainRollout:
    """Sampled chains with what the target says of them; row `n * G + g` is sample `g` of context `n`.

    Attributes:
        contexts: with their aux states.
        tokens, draft_ids: `(N*G, K)` drafted tokens as target ids and as ids of the draft vocabulary.
        target_log_probs: `(N*G, K, Vd)` the target's at the same places, over its whole vocabulary, draft ids only.
    """

    contexts: Contexts
    tokens: Tensor
    draft_ids: Tensor
    target_log_probs: Tensor


def choose_contexts(batch: PackedBatch, count: int) -> Contexts | None:
    """`count` contexts that end at random supervised places.

    If the batch says what the target wrote, roots are tokens of that: nobody drafts elsewhere.

    Returns:
        `None` if the batch has no such place.
    """
    allowed = supervised_positions(batch) & (tokens_left(batch) > 1)  # a root, and something behind it
    written = allowed & (batch.written_at != NOT_WRITTEN)
    allowed = written if bool(written.any()) else allowed
    places = allowed.flatten().nonzero().squeeze(1)
    if len(places) == 0:
        return None
    chosen = places[torch.randint(len(places), (count,), device=places.device)].tolist()
    width = batch.input_ids.shape[1]
    rows: list[list[int]] = []
    for place in chosen:
        row, end = divmod(place, width)
        begin = end - int(batch.position_ids[row, end])
        rows.append(batch.input_ids[row, begin : end + 1].tolist())
    longest = max(len(row) for row in rows) - 1
    padded = [row[:-1] + [0] * (longest - len(row) + 1) for row in rows]
    device = batch.input_ids.device
    return Contexts(
        tokens=torch.tensor(padded, device=device),
        lengths=[len(row) - 1 for row in rows],
        roots=torch.tensor([row[-1] for row in rows], device=device),
    )


def tokens_left(batch: PackedBatch) -> Tensor:
    """`(B, T)` tokens of the same document from here on."""
    left = torch.ones_like(batch.position_ids)
    for column in range(left.shape[1] - 2, -1, -1):
        same = batch.document_ids[:, column] == batch.document_ids[:, column + 1]
        left[:, column] = torch.where(same, left[:, column + 1] + 1, 1)
    return left


def _prefill(drafter: Eagle31Drafter, contexts: Contexts, nodes: int) -> tuple[Contexts, SpeculativeCache]:
    """The contexts with their aux states, and the target's cache of them."""
    binding = drafter.require_binding()
    tokens = contexts.tokens.to(binding.input_device)
    longest = tokens.shape[1]
    cache = SpeculativeCache.from_config(
        binding.text_config,
        batch_size=tokens.shape[0],
        capacity=longest + nodes,
        block=max(longest, nodes),
        masks_by_type=binding.masks_by_type,
        device=tokens.device,
    )
    cache.place(longest, reading=BlockReading(counts=contexts.lengths))
    mask = cache.attention_mask(dtype=binding.compute_dtype)
    out = binding.forward(tokens, cache.position_ids(), mask, cache, logits_to_keep=1)
    cache.commit(contexts.lengths)
    assert out.aux is not None, "the binding captures"
    return replace(contexts, aux=out.aux), cache


def _session(drafter: Eagle31Drafter, contexts: Contexts, block: int) -> DraftSession:
    assert contexts.aux is not None, "prefill comes first"
    longest = contexts.tokens.shape[1]
    session = DraftSession(
        drafter, batch_size=len(contexts.lengths), capacity=longest + block, block=max(longest, block)
    )
    session.absorb(contexts.shifted, contexts.aux, contexts.lengths)
    return session


@torch.no_grad()
def roll_out_chains(
    drafter: Eagle31Drafter, contexts: Contexts, *, depth: int, samples: int, temperature: float
) -> ChainRollout:
    """Draw `samples` chains of `depth` tokens for each context and let the target judge them in one pass.

    Args:
        temperature: of drafter and target alike, above 0.
    """
    binding = drafter.require_binding()
    with binding.masked_attention(), binding.capturing():
        contexts, cache = _prefill(drafter, contexts, depth + 1)
        session = _session(drafter, contexts, depth + 1)
        rows = [row for row in range(len(contexts.lengths)) for _ in range(samples)]
        cache.select_rows(rows)
        session.select_rows(rows)
        roots = contexts.roots.to(drafter.device).repeat_interleave(samples)
        noise = torch.empty(len(roots), depth, binding.text_config.vocab_size, device=roots.device).exponential_()
        choice = DraftChoice(lambda logits, _: logits / temperature, noise)
        tree = propose_chain(session, roots, DraftLength(depth), choice)
        logits = Verification(binding, cache)(tree).logits.float()[:, :depth] / temperature  # (N*G, K, V)
    logits, tokens = logits.to(drafter.device), tree.tokens[:, 1:]
    ids, row_of = drafter.draft_ids, rows_of_ids(drafter)
    log_probs = logits.log_softmax(-1)
    return ChainRollout(
        contexts=contexts,
        tokens=tokens,
        draft_ids=tokens if row_of is None else row_of[tokens],
        target_log_probs=log_probs if ids is None else log_probs[..., ids],
    )


def chain_logits(drafter: Eagle31Drafter, contexts: Contexts, tokens: Tensor) -> Tensor:
    """The drafter's logits `(N*G, K, Vd)` along drafted chains, with gradients: the drafting of generation again.

    Args:
        contexts: `N` of them, with aux states.
        tokens: `(N*G, K)` drafted target ids, `G` chains per context; position `k` is predicted from those before it.
    """
    assert contexts.aux is not None, "a rollout has them"
    device, count = drafter.device, len(contexts.lengths)
    samples, depth = tokens.shape[0] // count, tokens.shape[1]
    length = contexts.tokens.shape[1]
    lengths = torch.tensor(contexts.lengths, device=device)
    column = torch.arange(length, device=device)
    hidden = drafter.fuse_aux(contexts.aux.to(device=device, dtype=drafter.dtype))
    causal = (column[:, None] >= column)[None] & (column < lengths[:, None])[:, None]  # (N, L, L)
    causal = causal | torch.eye(length, dtype=torch.bool, device=device)  # a padded row must see something
    cache = GrowingCache()
    positions = column.expand(count, -1)
    out = drafter.decode(
        drafter.embed(contexts.shifted.to(device)),
        hidden,
        drafter.rotary(positions),
        _additive(causal, drafter.dtype),
        cache,  # type: ignore[arg-type]
    )
    rows = torch.arange(count, device=device)
    normed = out.normed[rows, lengths - 1][:, None].repeat_interleave(samples, dim=0)  # (N*G, 1, H)
    feedback = out.feedback[rows, lengths - 1][:, None].repeat_interleave(samples, dim=0)
    cache.repeat(samples)
    prefix = (column < lengths[:, None]).repeat_interleave(samples, dim=0)[:, None]  # (N*G, 1, L)
    starts = lengths.repeat_interleave(samples)
    collected = [normed]
    for step in range(1, depth):
        visible = torch.cat((prefix, prefix.new_ones(count * samples, 1, step)), dim=-1)
        out = drafter.decode(
            drafter.embed(tokens[:, step - 1 : step]),
            feedback,
            drafter.rotary((starts + step - 1)[:, None]),
            _additive(visible, drafter.dtype),
            cache,  # type: ignore[arg-type]
        )
        feedback = out.feedback
        collected.append(out.normed)
    return drafter.draft_logits(torch.cat(collected, dim=1))


def _additive(visible: Tensor, dtype: torch.dtype) -> Tensor:
    mask = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
    return mask.masked_fill_(~visible, torch.finfo(dtype).min)[:, None]
