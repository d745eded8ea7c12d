"""Many clients on one server, for a short while: examples/studies/load_on_server.py."""

import json
import runpy
import sys
from pathlib import Path

import pytest

STUDY = Path(__file__).parents[2] / "examples" / "studies" / "load_on_server.py"


@pytest.mark.slow
@pytest.mark.thorough
def test_nothing_is_lost_or_wrong_in_a_crowd(tmp_path, monkeypatch):
    record = tmp_path / "load.json"
    told = ["--seconds", "15", "--clients", "8", "--requests", "20", "--json", str(record)]
    monkeypatch.setattr(sys, "argv", [str(STUDY), *told])
    with pytest.raises(SystemExit) as left:
        runpy.run_path(str(STUDY), run_name="__main__")
    assert not left.value.code
    seen = json.loads(record.read_text())
    assert (seen["wrong"], seen["lost"]) == (0, 0)
    assert min(seen["right"], seen["cancelled"], seen["refused"]) >= 1
    # Masks grow with the most rows that ever met, which is left to chance; a row of texts is an eighth of it all.
    assert seen["counted"]["cache_bytes_after"] < 1.01 * seen["counted"]["cache_bytes_before"]
    assert seen["counted"]["texts_per_round"] > 3 > 1.01 > seen["counted_alone"]["texts_per_round"]
