"""Options of the test suite."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path
from weakref import WeakSet

import pytest
from hypothesis import settings

from eagle31_hf.cli import progress
from eagle31_hf.drafter.drafter import Eagle31Drafter
from eagle31_hf.graphs.ahead.kept import CACHE_VARIABLE
from eagle31_hf.loop.pair import Pair
from eagle31_hf.stats import RoundClock
from helpers import SHARED
from slices import shared_out, sliced, spread

CONTRACT_CASES = 3
"""One in so many of each contract test's cases is run by `make test`, on one of the two versions of transformers."""


def _tiles_kill() -> bool:
    """Some virtual machines list AMX and keep it back: the first product of bfloat16 dies (docs/choosing.md)."""
    facts = Path("/proc/cpuinfo")
    if not facts.exists() or "amx_bf16" not in facts.read_text(encoding="ascii", errors="replace").split():
        return False
    product = "import torch; torch.ones(64, 64, dtype=torch.bfloat16) @ torch.ones(64, 64, dtype=torch.bfloat16)"
    return subprocess.run([sys.executable, "-c", product], check=False).returncode < 0


if "ONEDNN_MAX_CPU_ISA" not in os.environ and _tiles_kill():
    os.environ["ONEDNN_MAX_CPU_ISA"] = "AVX512_CORE_BF16"  # before any test multiplies; processes inherit it

# The same examples in every run, so that what failed once fails again; `--hypothesis-profile default` tries new ones.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")


def pytest_configure(config: pytest.Config) -> None:
    """One thread per test worker: more only wait for each other. Workers inherit the environment.

    Nor does any compile in processes of its own, each of which would import torch first.
    """
    if config.getoption("numprocesses", None):
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--slice",
        type=int,
        default=1,
        metavar="N",
        help="run every N-th test of each file, the first among them, and of model families one (`make quick`)",
    )

    parser.addoption(
        "--contract-share",
        type=int,
        choices=(0, 1),
        help="run every other case of each contract test; the other share is for another version of transformers",
    )

    parser.addoption("--thorough", action="store_true", help="also run what is marked thorough (`make thorough`)")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave the tests out that the options leave out, of those that marks and names have left."""
    every, share = config.getoption("slice"), config.getoption("contract_share")
    if not config.getoption("thorough") and not any("::" in asked for asked in config.args):
        _keep(config, items, spread([(item.nodeid, _one_in(item)) for item in items]))
    if every < 1:
        raise pytest.UsageError(f"got --slice {every}; wanted 1 (all tests) or more")
    if every > 1:
        _keep(config, items, sliced([(item.nodeid, _family(item)) for item in items], every))
    if share is not None:
        contract = [item.nodeid for item in items if item.get_closest_marker("contract")]
        others = [item.nodeid for item in items if not item.get_closest_marker("contract")]
        _keep(config, items, [*shared_out(contract, share), *others])


def _keep(config: pytest.Config, items: list[pytest.Item], tests: list[str]) -> None:
    kept = set(tests)
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in kept])
    items[:] = [item for item in items if item.nodeid in kept]


def _one_in(item: pytest.Item) -> int:
    """Of how many of its test's cases one is run; of 0, none."""
    mark = item.get_closest_marker("thorough")
    return mark.kwargs.get("every", 0) if mark else CONTRACT_CASES if item.get_closest_marker("contract") else 1


def _family(item: pytest.Item) -> str:
    parameters = getattr(item, "callspec", None)
    return str(parameters.params.get("family", "")) if parameters else ""


@pytest.fixture(autouse=True, scope="session")
def _own_cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Generator[None, None, None]:
    """No test sees graphs that were kept on this machine before, and none leaves anything behind."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(CACHE_VARIABLE, str(tmp_path_factory.mktemp("eagle31-cache")))
        yield


@pytest.fixture(autouse=True)
def _waits_are_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine anything may take two seconds, and stderr would say so."""
    monkeypatch.setattr(progress, "QUIET_S", 600.0)


@pytest.fixture(autouse=True)
def _nothing_learnt_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """What pairs that many tests share learnt in one of them decides nothing in the next: workers run any order."""
    met: WeakSet[Pair] = WeakSet()
    pair_of = Pair.of

    def of(drafter: Eagle31Drafter) -> Pair:
        pair = pair_of(drafter)
        if pair not in met:
            met.add(pair)
            pair.costs.clear()
        return pair

    monkeypatch.setattr(Pair, "of", of)


@pytest.fixture(autouse=True)
def _no_round_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that stands still: what is drafted depends on counts and bytes alone, so tests can count rounds."""
    monkeypatch.setattr(RoundClock, "now", staticmethod(lambda: 0.0))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Where the folder of models and texts is missing beside the repository, what fails for want of it is skipped."""
    report = yield
    if report.failed and not SHARED.exists() and call.excinfo and str(SHARED) in str(call.excinfo.getrepr()):
        report.outcome = "skipped"
        report.longrepr = (str(item.path), item.location[1] or 0, f"Skipped: needs {SHARED}")
    return report
