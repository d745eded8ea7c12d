"""Policies on known texts: rounds by hand, and those of `generate`."""

from __future__ import annotations

import pytest
import torch
from policy_replay import DraftTrace, replay

from eagle31_hf import Eagle31Drafter
from eagle31_hf.decoding.adaptive.costs import RoundTable
from eagle31_hf.decoding.draft_policy import DraftPlan, DraftPolicy, RoundState, RoundStats
from eagle31_hf.decoding.policy_choice import RequestedDraft, choose_policy
from eagle31_hf.demo import CONVERSATIONS, drafter_path
from eagle31_hf.evidence.gauges import ends_off
from eagle31_hf.stats import SpeculationStats
from eagle31_hf.training.distillation.evaluation import EvaluationPrompt
from eagle31_hf.training.distillation.known_texts import chains_along, write_texts
from eagle31_hf.trees.shape import DraftShape
from helpers import CHEAP_DRAFTS, DEAR_DRAFTS, calibrated, configured, demo_tokenizer, seeded, target_of
from matrix import pairwise

NEW_TOKENS = 48
TABLE = RoundTable(speculative_s=(1.0, 1.5, 1.75, 2.0), lookup_s=(1.0, 1.25, 1.25, 1.5))  # reading takes 0.25


class Told(DraftPolicy):
    """A policy that plays its plans one after the other, and keeps what it is told."""

    def __init__(self, plans: list[DraftPlan]):
        self.plans, self.told = plans, []
        self.seen: list[int] = []

    def next_draft(self, state: RoundState) -> DraftPlan:
        self.seen.append(len(state.sequences.new[0]))
        return self.plans[len(self.told)]

    def record(self, stats: RoundStats) -> None:
        self.told.append((stats.depth, *stats.accepted))


def test_rounds_and_seconds_by_hand() -> None:
    chain = DraftPlan(DraftShape(3))
    lookup = DraftPlan(DraftShape(2), tokens=((15, 99),))
    policy = Told([chain, DraftPlan.skip(), lookup, chain, chain])
    trace = DraftTrace((2, 0, 0, 9, 9, 0, 9, 0, 9, 9), prompt=(7, 8), written=tuple(range(11, 21)))
    found = replay(policy, trace, TABLE, DraftShape(3))
    # Written: 3 tokens by a chain that was right twice, 1 at rest, 2 by a lookup right once, 4 by a whole chain.
    assert [(done.at, done.drafted, done.accepted) for done in found.rounds] == [
        (0, 3, 2),
        (3, 0, 0),
        (4, 2, 1),
        (6, 3, 3),
    ]
    assert [done.looked_up for done in found.rounds] == [False, False, True, False]
    assert found.seconds == 2.0 + 1.0 + 1.25 + 2.0
    assert policy.told == [(3, 2), (0, 0), (2, 1), (3, 3)]
    assert policy.seen == [0, 3, 4, 6]


def test_a_draft_after_a_rest_waits_for_the_drafter_to_read() -> None:
    one = DraftPlan(DraftShape(1))
    rested = replay(Told([DraftPlan.skip(), one, one]), DraftTrace((0,) * 4), TABLE, DraftShape(3))
    assert rested.seconds == 1.0 + (0.25 + 1.5) + 1.5 + 1.0


@pytest.mark.parametrize("other", [DraftPlan.skip(), DraftPlan(DraftShape(1), tokens=((99,),))], ids=["rest", "lookup"])
def test_a_draft_behind_other_rounds_takes_what_resuming_does(other: DraftPlan) -> None:
    one, table = DraftPlan(DraftShape(1)), TABLE._replace(resume_s=2.0)
    plans, trace = [one, other, one, one, one], DraftTrace((0,) * 5, written=(1, 2, 3, 4, 5))
    others_s = table.lookup_s[1] if other.tokens else 1.0
    found = replay(Told(plans), trace, table, DraftShape(3))
    assert found.seconds == 1.5 + others_s + (2.0 + 1.5) + 1.5 + 1.0


def test_doubt_ends_a_chain() -> None:
    trace = DraftTrace((3, 0), sure=((0.5, 0.5, 0.5), (0.9, 0.9, 0.9)))
    assert trace.drafted(0, DraftShape(3, min_confidence=0.3)) == 2
    assert trace.drafted(0, DraftShape(3)) == trace.drafted(1, DraftShape(3, min_confidence=0.3)) == 3


@pytest.fixture(scope="module")
def drafter() -> Eagle31Drafter:
    return Eagle31Drafter.from_pretrained(drafter_path(), dtype=torch.float32, target=target_of("demo-target"))


@pytest.fixture(scope="module")
def ignorant() -> Eagle31Drafter:
    """A drafter that was never trained."""
    drafter = Eagle31Drafter.from_pretrained(drafter_path(), dtype=torch.float32, target=target_of("demo-target"))
    with seeded(0), torch.no_grad():
        for weight in drafter.parameters():
            if weight.dim() > 1:
                weight.normal_(std=0.02)
    return drafter


@pytest.mark.parametrize(
    ("schedule", "dear", "trained"),
    pairwise(("constant", "calibrated", "pid", "heuristic"), (False, True), (True, False)),
)
@pytest.mark.thorough(every=6)
def test_greedy_rounds_are_those_of_generate(
    schedule: str, dear: bool, trained: bool, request: pytest.FixtureRequest
) -> None:
    """What is decided depends on counts alone: a text that is gone through again has the rounds it was written in."""
    costs = DEAR_DRAFTS if dear else CHEAP_DRAFTS
    chats = demo_tokenizer().apply_chat_template(list(CONVERSATIONS[:3]), add_generation_prompt=True, return_dict=True)[
        "input_ids"
    ]
    prompts = [EvaluationPrompt(ids, "chat") for ids in sorted(chats, key=len)]
    drafter: Eagle31Drafter = request.getfixturevalue("drafter" if trained else "ignorant")
    binding, settings = drafter.binding, drafter.generation_config
    drafter.eval()
    with configured(drafter, num_assistant_tokens=4, num_assistant_tokens_schedule=schedule), ends_off(binding.model):
        texts = write_texts(binding, prompts, 0.0, max_new_tokens=NEW_TOKENS)
        length = settings.draft_length(device_type="cpu", batch_size=1, compiled=False)
        for known in texts.texts:
            prompt = known.text.ids[None, : known.text.prompt_length]
            with calibrated(drafter, costs):
                out = binding.model.generate(
                    prompt, do_sample=False, max_new_tokens=NEW_TOKENS, assistant_model=drafter
                )
            assert torch.equal(out[0], known.text.ids)
            requested = RequestedDraft.of(
                drafter, length, rows=1, context=prompt.shape[1], sampled=False, compiled=False
            )
            chains = chains_along(drafter, known, texts, requested.shape.depth)
            trace = DraftTrace.of(known, chains)
            rests_at_once = any(event.new_tokens == 0 and event.what == "rest" for event in drafter.stats.events)
            assert rests_at_once or not dear or schedule == "constant"
            with calibrated(drafter, costs):
                policy = choose_policy(drafter, requested, SpeculationStats())
            table = costs.costs(prompt.shape[1]).rounds(requested.shape.depth)
            found = replay(policy, trace, table, requested.shape)
            assert len(found.rounds) == drafter.stats.rounds
            assert sum(done.drafted for done in found.rounds) == drafter.stats.drafted
            assert sum(not done.drafted for done in found.rounds[:-1]) == drafter.stats.skipped_rounds
