"""What is told of long work where no bar can be drawn."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from eagle31_hf.training.progress import Counting


@pytest.mark.parametrize(("resumes", "first", "says"), [(False, 4, False), (True, 4, True), (True, 0, False)])
def test_only_what_an_earlier_run_has_left_is_said_to_be_kept(resumes, first, says):
    log = io.StringIO()
    with Counting(Console(file=log), "the target writes", 10, resumes=resumes) as counting:
        for count in (first, 3, 3):
            counting.advance(count)
    assert ("kept from an earlier run" in log.getvalue()) == says
    assert f"{first + 6} of 10 in" in log.getvalue()
