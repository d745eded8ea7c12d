"""Many clients on one server, for a short while: examples/studies/load_on_server.py."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

STUDY = Path(__file__).parents[2] / "examples" / "studies" / "load_on_server.py"


@pytest.mark.slow
def test_nothing_is_lost_or_wrong_in_a_crowd(tmp_path):
    record = tmp_path / "load.json"
    told = ["--seconds", "60", "--clients", "8", "--requests", "40", "--json", str(record)]
    done = subprocess.run([sys.executable, str(STUDY), *told], capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    seen = json.loads(record.read_text())
    assert (seen["wrong"], seen["lost"]) == (0, 0)
    assert min(seen["right"], seen["cancelled"], seen["refused"]) >= 1
