"""Which tests `make quick` runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable


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
