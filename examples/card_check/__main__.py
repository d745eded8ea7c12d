"""What works on a CUDA card, what it costs, and what it should cost: one command, a process for each step.

    python3 examples/card_check [--out DIR] [--budget SECONDS] [--only texts,large] [--skip static]

It needs a checkout of the repository, torch, transformers, accelerate and what these need; nothing has to be
installed, and nothing is fetched. 4-bit steps need bitsandbytes, the repository's tests pytest and hypothesis: a step
says what it lacks. `make_carry.sh` packs bitsandbytes for a machine that has no network; see docs/speed.md. Steps
use the package's public interface alone.

Steps run in the order of their worth, each in a process and with a time limit of its own. `DIR` gets `results.jsonl` (a
line for each step as it ends), `log.txt` and `summary.txt`; a short table is the last thing printed. The exit status is
1 if any part of any step failed.

`--device cpu --tiny` tries the script itself: sizes are tiny, nothing is captured, and figures mean nothing.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from zipfile import ZipFile

REPOSITORY = Path(__file__).resolve().parents[2]
CARRIED = REPOSITORY / ".carry" / "bitsandbytes.zip"


def main() -> int:
    options = parse()
    with tempfile.TemporaryDirectory(prefix="card_check_") as scratch:
        prepare(Path(scratch))
        from card_check.driver import run, run_one  # it can be imported only now
        from card_check.machine import Machine

        machine = Machine(options.device, options.tiny)
        if options.step:
            return run_one(options.step, machine, Path(options.notes))
        out = Path(options.out or tempfile.mkdtemp(prefix="card_check_results_"))
        print(f"results go to {out}", flush=True)
        return run(machine, out, Path(scratch), options.budget, options.only, options.skip)


def parse() -> argparse.Namespace:
    names = lambda listed: tuple(filter(None, listed.replace(" ", "").split(",")))  # noqa: E731
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--out", default=os.environ.get("OUT", ""), help="folder; default: $OUT, or a new one in /tmp")
    parser.add_argument("--budget", type=float, default=560.0, help="seconds for all steps, imports included")
    parser.add_argument("--only", type=names, default=(), help="steps, with commas between them")
    parser.add_argument("--skip", type=names, default=(), help="steps, with commas between them")
    parser.add_argument("--tiny", action="store_true", help="try the script, not the card")
    for name in ("--step", "--notes"):  # how the script starts itself for one step
        parser.add_argument(name, default="", help=argparse.SUPPRESS)
    return parser.parse_args()


def prepare(scratch: Path) -> None:
    """Put the package and its tests' helpers on the path, and keep what libraries would leave on disk in `scratch`."""
    paths = [str(REPOSITORY / part) for part in ("src", "tests")]
    if find_spec("bitsandbytes") is None and CARRIED.exists():
        with ZipFile(CARRIED) as packed:
            packed.extractall(scratch / "carried")
        paths.append(str(scratch / "carried"))
    sys.path[:1] = paths  # in place of this folder, whose modules have names that others have, too
    sys.path.append(str(REPOSITORY / "examples"))
    os.environ["PYTHONPATH"] = os.pathsep.join([*paths, *filter(None, [os.environ.get("PYTHONPATH")])])
    os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", PYTHONDONTWRITEBYTECODE="1")
    for name in ("EAGLE31_CACHE", "XDG_CACHE_HOME", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        os.environ[name] = str(scratch / name.lower())


if __name__ == "__main__":
    sys.exit(main())
