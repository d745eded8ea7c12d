"""Figures from records, and whether two runs differ. All records here are made by hand."""

from dataclasses import replace
from io import StringIO

import numpy as np
import pytest
from rich.console import Console
from rich.table import Table

from eagle31_hf.errors import ConfigurationError
from eagle31_hf.measure.calls import CallRecord, Drafting, TextPart, Verdict
from eagle31_hf.measure.comparing import compare_runs
from eagle31_hf.measure.exports import acceptance_rows, best_drafting, profile
from eagle31_hf.measure.record_file import Records
from eagle31_hf.measure.run_tables import category_table, run_notes, run_parts
from eagle31_hf.measure.summary import Setting, summarise

RUN = {
    "eagle31_hf": "0.1.0", "commit": "abc", "torch": "2", "transformers": "5", "python": "3", "command": "eagle31",
    "machine": {"device": "cpu", "processor": "P", "threads": 2},
    "pair": {"target": {"name": "t", "revision": "r"}, "drafter": {"name": "d", "revision": "r"}, "dtype": "float32",
             "quantisation": "none", "template": "x"},
    "prompts": ["a/0"], "settings": {"new_tokens": 128, "ignore_eos": False, "repeats": 3},
}  # fmt: skip
SPEEDS = {"plain generate": 10.0, "plain compiled": 20.0, "chain": 30.0, "chain compiled": 80.0}
DRAFTING = Drafting(10, 50, 30, [10, 10, 8], [10, 8, 4], [8, 4, 2], 0.1, 0.2, 0.3, 0.05, 10)


def call(method, prompt=0, repeat=0, speed=None, **fields):
    speed = speed or SPEEDS[method]
    is_ours = "chain" in method
    made = CallRecord(
        turn=f"{repeat}.{prompt}", method=method, temperature=0.0, seed=0, batch_size=1, repeat=repeat,
        prompts=[f"a/{prompt}"], suite="a", category="xy"[prompt % 2], prompt_tokens=5, new_tokens=40,
        seconds=40 / speed, first_token_s=0.1, texts=["d"], window_s=[8 / speed] * 5,
        drafting=DRAFTING if is_ours else None, target_passes=None if is_ours else 40, peak_bytes=10**9,
        verdicts=[Verdict("reference" if method == "plain generate" else "same")],
        answering=TextPart(10, 39) if is_ours else TextPart(),
    )  # fmt: skip
    return replace(made, **fields)


def records(calls, name="r.jsonl", **run):
    return Records(name, {**RUN, **run}, list(calls))


def run_of(prompts=2, repeats=3, noise=0.0, gain=1.0, seed=0, methods=("plain generate", "chain")):
    """Records of a machine that is slower as a whole from repeat to repeat, and whose speeds scatter by `noise`."""
    dice = np.random.default_rng(seed)
    found = []
    for repeat in range(repeats):
        slow = 1 - 0.2 * repeat
        for prompt in range(prompts):
            for method in methods:
                scatter = np.exp(noise * dice.normal())
                speed = SPEEDS[method] * slow * scatter * (gain if "chain" in method else 1)
                found.append(call(method, prompt, repeat, speed))
    return found


def summary_of(*calls, **run):
    return {method.method: method for method in summarise(records(calls, **run)).methods}


def test_ratios_are_formed_within_a_repeat():
    chain = summary_of(*run_of())["chain"]
    assert chain.tok_per_s.median == pytest.approx(24.0)
    assert (chain.speedup.median, chain.speedup.low, chain.speedup.high) == pytest.approx((3.0, 3.0, 3.0))
    assert chain.speedup.interval == pytest.approx((3.0, 3.0))


def test_the_compilers_share_and_the_drafters_are_told_apart():
    both = summary_of(*(call(method, prompt) for prompt in range(2) for method in SPEEDS))
    compiled = both["chain compiled"]
    shares = (compiled.speedup.median, compiled.by_compiler.median, compiled.by_drafter.median)
    assert shares == pytest.approx((8.0, 2.0, 4.0))
    assert both["chain"].by_compiler is None
    assert both["chain"].by_drafter.median == pytest.approx(3.0)
    alone = summary_of(call("plain generate"), call("chain compiled"))["chain compiled"]
    assert (alone.by_compiler, alone.by_drafter) == (None, None), "never guessed"


def test_no_speedup_is_told_where_answers_are_wrong():
    wrong = [call("plain generate"), call("chain", verdicts=[Verdict("different", 3, 0.5, 0.1)])]
    chain = summary_of(*wrong)["chain"]
    assert chain.speedup is None
    assert chain.by_drafter is None
    assert "1 of 1 answers" in chain.refusal
    summary = summarise(records(wrong))
    assert "no speedup is told" in " ".join(run_notes(summary))
    columns = [column for part in run_parts(summary) if isinstance(part, Table) for column in part.columns]
    assert any("refused" in str(cell) for column in columns for cell in column.cells)
    tie = summary_of(call("plain generate"), call("chain", verdicts=[Verdict("tie", 3, 0.1, 0.1)]))["chain"]
    assert tie.speedup is not None


def test_acceptance_by_position():
    chain = summary_of(*run_of(prompts=1, repeats=1))["chain"]
    assert chain.acceptance_length == pytest.approx(4.0)
    assert chain.acceptance.cumulative == pytest.approx([0.8, 0.4, 0.25])
    assert chain.acceptance.conditional == pytest.approx([0.8, 0.5, 0.5])
    assert chain.answering.acceptance_length == pytest.approx(3.9)
    assert chain.thinking.acceptance_length is None


def test_counts_of_unlike_depths_add_up():
    shallow = replace(DRAFTING, drafted_at=[5], reached_at=[5], accepted_at=[1])
    chain = summary_of(call("plain generate"), call("chain"), call("chain", 1, drafting=shallow))["chain"]
    assert chain.acceptance.drafted_at == (15, 10, 8)


def test_acceptance_without_our_drafter_is_tokens_per_pass():
    found = summary_of(call("plain generate"), call("prompt lookup", speed=20.0, target_passes=14))
    assert found["prompt lookup"].acceptance_length == pytest.approx(39 / 13)
    assert found["plain generate"].acceptance_length == pytest.approx(1.0)


def test_steadiness_cost_energy_and_memory():
    uneven = call("chain", window_s=[0.1, 0.1, 0.1, 0.5], energy_j=20.0, peak_bytes=3 * 10**9)
    chain = summary_of(call("plain generate"), uneven, price_per_hour=0.36)["chain"]
    assert chain.slow_tok_per_s == pytest.approx(np.percentile([80, 80, 80, 16], 5))
    assert chain.variation == pytest.approx(np.std([80, 80, 80, 16]) / np.mean([80, 80, 80, 16]))
    assert chain.joules_per_token == pytest.approx(0.5)
    assert chain.price_per_million == pytest.approx(0.36 / 3600 / 30 * 1e6)
    assert chain.peak_bytes == 3 * 10**9


def test_where_a_rounds_time_goes():
    parts = summary_of(*run_of(prompts=1, repeats=1))["chain"].round_ms
    assert parts == pytest.approx({"draft": 20, "verify": 30, "other": 5})


def test_categories_are_summarised_alone():
    chain = summary_of(*run_of(prompts=4))["chain"]
    assert list(chain.categories) == ["x", "y"]
    assert len(chain.categories["x"].calls) == 6
    assert chain.categories["x"].speedup.median == pytest.approx(3.0)


def test_a_file_that_breaks_off_is_told():
    cut = Records("r.jsonl", RUN, run_of(), cut_at=17, why_cut="the line ends in its middle")
    assert "r.jsonl breaks off in line 17" in run_notes(summarise(cut))[-1]


# --- two runs ---------------------------------------------------------------------------------------------------------


def verdicts(before, after, **kwargs):
    compared = compare_runs(records(before, "a.jsonl"), records(after, "b.jsonl", **kwargs))
    return {found.what: found for found in compared.differences if found.method == "chain"}


def test_the_same_thing_measured_twice_is_within_the_noise():
    pairs = ((run_of(24, noise=0.05, seed=seed), run_of(24, noise=0.05, seed=seed + 99)) for seed in range(40))
    kept = [verdicts(*pair)["speedup"].verdict for pair in pairs]
    assert 40 - kept.count("noise") <= 6, "some 5 % of those draws are outside by chance"


def test_a_gain_beyond_the_noise_is_seen():
    found = verdicts(run_of(24, noise=0.05), run_of(24, noise=0.05, gain=1.2, seed=1))["speedup"]
    assert found.verdict == "better"
    assert found.ratio == pytest.approx(1.2, abs=0.05)
    assert verdicts(run_of(24, noise=0.05, gain=1.2), run_of(24, noise=0.05, seed=1))["speedup"].verdict == "worse"


def test_a_gain_that_processes_of_one_code_differ_by_is_none():
    found = verdicts(run_of(24, noise=0.01), run_of(24, noise=0.01, gain=1.03, seed=1))["speedup"]
    assert found.interval[0] > 1
    assert found.verdict == "processes differ so"


def test_a_machine_that_is_slower_as_a_whole_is_no_difference():
    slow = [replace(each, seconds=2 * each.seconds) for each in run_of(8, noise=0.02, seed=1)]
    assert verdicts(run_of(8, noise=0.02), slow)["speedup"].verdict == "noise"


def test_only_prompts_of_both_runs_count():
    assert verdicts(run_of(6), run_of(4))["speedup"].prompts == 4
    with pytest.raises(ConfigurationError, match="share no method"):
        verdicts(run_of(1), run_of(1))


def test_runs_of_unlike_things_are_not_compared():
    other = {"machine": {**RUN["machine"], "threads": 8}}
    with pytest.raises(ConfigurationError, match=r"machine.threads: 2, 8.*--allow machine.threads"):
        verdicts(run_of(2), run_of(2), **other)
    compared = compare_runs(records(run_of(2)), records(run_of(2), commit="def", **other), allow=["machine.threads"])
    assert compared.told == ('commit: "abc", "def"', "machine.threads: 2, 8")


def test_wrong_answers_have_no_speedup_to_compare():
    wrong = [replace(each, verdicts=[Verdict("different")]) if each.method == "chain" else each for each in run_of(4)]
    assert "speedup" not in verdicts(run_of(4), wrong)


# --- for other tools --------------------------------------------------------------------------------------------------


def test_the_csv_counts_positions_over_all_drafts():
    summary = summarise(records(run_of(prompts=2, repeats=1)))
    first, second = acceptance_rows(best_drafting(summary))
    assert first == {"subset": "x", "num_drafts": 10, "num_draft_tokens": 50, "num_accepted_tokens": 30,
                     "acceptance_length": 4.0, "acceptance_at_pos_0": 0.8, "acceptance_at_pos_1": 0.4,
                     "acceptance_at_pos_2": 0.2}  # fmt: skip
    assert second["subset"] == "y"


def test_the_profile_tells_the_break_even():
    (told,) = profile(summarise(records(run_of())))["methods"]
    assert told["break_even_acceptance_length"] == pytest.approx(4.0 / 3.0)
    assert (told["speedup"], told["draft_tokens"]) == (pytest.approx(3.0), 3)
    with pytest.raises(ConfigurationError, match="no method that drafts"):
        best_drafting(summarise(records(run_of(methods=("plain generate",)))))


def test_settings_are_read_as_a_person_says_them():
    assert str(Setting(0.0, 1)) == "greedy, batch 1"
    assert str(Setting(0.7, 8)) == "temperature 0.7, batch 8"


def test_eighty_columns_show_every_figure_of_every_category():
    methods = ("plain generate", "prompt lookup", "early exit", "stock loop", "own lookup", "chain", "tree")
    summary = summarise(records([call(method, prompt, speed=20.0) for method in methods for prompt in range(2)]))
    console = Console(width=80, file=StringIO())
    console.print(category_table(summary.settings[0], summary.of(summary.settings[0])))
    assert "…" not in console.file.getvalue()
    assert console.file.getvalue().count("×") == 2 * (len(methods) - 1)
