"""What more text would bring a drafter: acceptance of several, each trained on more, against the tokens they saw.

    eagle31 bench acceptance first second third --target T --prompts FILE --json set.json     # for each set of prompts
    python examples/studies/learning_curve.py set.json other.json --seen first=114357 second=387702 third=670000 \\
        --out docs/images/curve.png --json docs/records/curve.json

`--seen` says how many distinct tokens each drafter of the records has learned from. Through the points of each set goes
a line over the logarithm of the tokens; what it says of ten times the last drafter's is printed, and drawn dashed. Two
or three drafters make a poor line: it says what to expect, not what will be.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import pyplot as plt

from eagle31_hf.measure.provenance import origin

TIMES = 10


def points_of(path: Path, temperature: float) -> dict[str, tuple[float, tuple[float, float]]]:
    """Acceptance length and its interval of each drafter in a record of `bench acceptance`."""
    record = json.loads(path.read_text(encoding="utf-8"))
    return {
        Path(each["name"]).name: (each["length"], tuple(each["interval"]))
        for each in record["drafters"]
        if each["temperature"] == temperature
    }


def curve_of(path: Path, seen: dict[str, int], temperature: float) -> dict[str, Any]:
    """One set's points, the line through them and what it says of more tokens."""
    points = points_of(path, temperature)
    if missing := sorted(set(points) - set(seen)):
        raise SystemExit(f"{path} has drafters {', '.join(missing)}, of which --seen does not say the tokens")
    tokens = np.array([seen[name] for name in points], dtype=float)
    lengths = np.array([length for length, _ in points.values()])
    slope, start = np.polyfit(np.log10(tokens), lengths, 1)
    last = tokens.max()
    return {
        "prompts": path.stem,
        "tokens": tokens.tolist(),
        "lengths": lengths.tolist(),
        "intervals": [interval for _, interval in points.values()],
        "per_tenfold": float(slope),
        "at_ten_times": float(start + slope * np.log10(TIMES * last)),
        "last": float(lengths[tokens.argmax()]),
    }


def draw(curves: list[dict[str, Any]], out: Path) -> None:
    figure, axes = plt.subplots(figsize=(7, 4.2))
    for curve in curves:
        tokens, lengths = np.array(curve["tokens"]), np.array(curve["lengths"])
        low, high = (np.array([interval[end] for interval in curve["intervals"]]) for end in (0, 1))
        (line,) = axes.plot(tokens, lengths, "o-", label=curve["prompts"])
        axes.fill_between(tokens, low, high, alpha=0.15, color=line.get_color())
        ahead = [tokens.max(), TIMES * tokens.max()]
        axes.plot(ahead, [curve["last"], curve["at_ten_times"]], "--", color=line.get_color(), linewidth=1)
    axes.set(xscale="log", xlabel="distinct tokens learned from", ylabel="acceptance length (chains)")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(out, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", nargs="+", type=Path, help="of `eagle31 bench acceptance --json`, one for each set")
    parser.add_argument("--seen", nargs="+", required=True, metavar="DRAFTER=TOKENS")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    seen = {name: int(tokens) for name, _, tokens in (each.partition("=") for each in given.seen)}
    curves = [curve_of(path, seen, given.temperature) for path in given.records]
    draw(curves, given.out)
    for curve in curves:
        print(
            f"{curve['prompts']}: {curve['last']:.2f} now, {curve['per_tenfold']:+.2f} for ten times the tokens, "
            f"so {curve['at_ten_times']:.2f}"
        )
    if given.json is not None:
        given.json.write_text(json.dumps({**origin(), "curves": curves}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
