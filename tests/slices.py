"""Which tests `make quick` and `make test` run, and on which version of transformers."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from zlib import crc32


def sliced(tests: Iterable[tuple[str, str]], every: int) -> list[str]:
    """The first of each file's tests and every n-th after it; of a test's model families only the first.

    Args:
        tests: node ids, each with its model family (empty: none).
    """
    met, families, kept = Counter[str](), dict[str, str](), []
    for test, family in tests:
        file, function = test.partition("::")[0], test.partition("[")[0]
        if families.setdefault(function, family) != family:
            continue
        if met[file] % every == 0:
            kept.append(test)
        met[file] += 1
    return kept


def shared_out(tests: Iterable[str], share: int) -> list[str]:
    """Of the cases of each test every other one; a test without cases is in both shares.

    Args:
        tests: node ids.
        share: 0 or 1.
    """
    return [case for each in _cases(tests) for place, case in enumerate(each) if len(each) == 1 or place % 2 == share]


def spread(tests: Iterable[tuple[str, int]]) -> list[str]:
    """Of the cases of each test one in so many; of 0, none.

    Args:
        tests: node ids, each with that number.
    """
    every = dict(tests)
    return [
        case for each in _cases(every) for place, case in enumerate(each) if every[case] and place % every[case] == 0
    ]


def _cases(tests: Iterable[str]) -> list[list[str]]:
    """Cases of each test, in an order of their own: in that of their parameters every other one often has the same
    value."""
    cases = defaultdict[str, list[str]](list)
    for test in tests:
        cases[test.partition("[")[0]].append(test)
    return [sorted(each, key=lambda test: crc32(test.encode())) for each in cases.values()]
