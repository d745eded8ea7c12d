"""Pictures on the pages, from plans and of how it works: `make figures` draws them.

A test draws them anew. They are SVG on a white card, since pages may be dark, and as wide as a page, so that letters
are as large as its own. Numbers and names are written beside what they belong to: hardly
anybody has to tell colours apart.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from html import escape
from io import StringIO
from pathlib import Path

from rich.console import Console
from rich.text import Text

from eagle31_hf.cli.generate import DEMO_DRAFT_TOKENS, MOST_STREAMED
from eagle31_hf.cli.options import ACCEPTED_STYLE, legend
from eagle31_hf.cli.pairs import DraftOptions, PairSource, load_pair
from eagle31_hf.memory import plan_memory
from eagle31_hf.memory.cards import GIB
from eagle31_hf.memory.plan import PARTS, part_bytes
from eagle31_hf.texts.decoder import IncrementalDecoder, RoundStreamer
from eagle31_hf.texts.prompts import embedded_prompts

ROOT = Path(__file__).parents[1]
IMAGES = ROOT / "docs" / "images"

WIDTH, MARGIN, SIZE, LETTER = 760, 16, 14, 7.2
"""Of a page, at its borders, of letters, and of one in most fonts."""
INK, RULE, PAPER = "#111111", "#555555", "#ffffff"
BLUE, ORANGE, GREEN, PURPLE, RED, GREY = (
    "#8fb8ea", "#f5b95c", "#8fd08a", "#c5a7e8", "#ee9c9c", "#b9b9b9",
)  # fmt: skip


TIP = (
    '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
    f'<path d="M0,0 L8,4 L0,8 z" fill="{RULE}"/></marker></defs>'
)


@dataclass
class Drawing:
    """An SVG that grows by what is drawn; sizes are in pixels of a page.

    Attributes:
        title: what is seen, for those who do not see it.
        height: of the whole.
    """

    title: str
    height: float
    parts: list[str] = field(default_factory=list)

    def text(
        self,
        x: float,
        y: float,
        words: str,
        *,
        anchor: str = "start",
        bold: bool = False,
        ink: str = INK,
        size: int = SIZE,
    ) -> None:
        """`words` on the line `y`."""
        looks = (' font-weight="bold"' if bold else "") + (f' font-size="{size}"' if size != SIZE else "")
        at = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{ink}"{looks}'
        self.parts.append(f"<text {at}>{escape(words, quote=False)}</text>")

    def box(self, x: float, y: float, width: float, height: float, colour: str, *, corner: int = 0) -> None:
        at = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"' + (
            f' rx="{corner}"' if corner else ""
        )
        self.parts.append(f'<rect {at} fill="{colour}" stroke="{RULE}" stroke-width="0.8"/>')

    def named(self, x: float, y: float, size: tuple[int, int], colour: str, words: str, *, letters: int = SIZE) -> None:
        """A rounded box of `size` with words in its middle."""
        width, height = size
        self.box(x, y, width, height, colour, corner=4)
        self.text(x + width / 2, y + height / 2 + 5, words, anchor="middle", size=letters)

    def arrow(self, x: float, y: float, to_x: float, to_y: float) -> None:
        at = f'x1="{x:.1f}" y1="{y:.1f}" x2="{to_x:.1f}" y2="{to_y:.1f}"'
        self.parts.append(f'<line {at} stroke="{RULE}" stroke-width="1.5" marker-end="url(#tip)"/>')

    def legend(self, y: float, entries: Iterable[tuple[str, str]]) -> None:
        """A box of each colour with its name, side by side."""
        x = float(MARGIN)
        for name, colour in entries:
            self.box(x, y, 14, 14, colour)
            self.text(x + 20, y + 12, name)
            x += 46 + LETTER * len(name)

    def svg(self) -> str:
        size = f'viewBox="0 0 {WIDTH} {self.height:.0f}"'
        lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" font-family="sans-serif" font-size="{SIZE}">',
            f"<title>{escape(self.title, quote=False)}</title>",
            f'<rect width="{WIDTH}" height="{self.height:.0f}" rx="8" fill="{PAPER}"/>',
            *([TIP] if any("#tip" in part for part in self.parts) else []),
            *self.parts,
            "</svg>",
        ]
        return "\n".join(lines) + "\n"


# --- what fills a card ------------------------------------------------------------------------------------------------

PLANNED = (
    ("RTX 4090", "Llama 3.1 8B", "bf16", 32768),
    ("RTX 4090", "Qwen3.6 27B", "bnb-nf4-dq", 16384),
    ("RTX A6000", "Llama 3.1 70B", "bnb-nf4-dq", 8192),
    ("Apple M1 Max 32GB", "Llama 3.1 8B", "bf16", 8192),
)
"""Card, target, quantisation, context."""
SCHEME_NAMES = {"bf16": "bf16", "bnb-nf4-dq": "nf4"}
COLOURS = dict(zip(PARTS, (BLUE, ORANGE, GREEN, PURPLE, RED, GREY, PAPER), strict=True))


def cards() -> str:
    """One bar for each of `PLANNED`, as long as the card has memory."""
    drawing = Drawing("What fills four cards: weights, drafter, cache, graphs, activations, and what is free", 404)
    for place, (card, target, scheme, context) in enumerate(PLANNED):
        plan = plan_memory(target, quantization=scheme, card=card, context=context).require_fit()
        assert (plan.settings.speculates, plan.settings.cache_type) == (True, "full"), (
            "with a drafter, nothing given up"
        )
        top, shares = 14 + 88 * place, part_bytes(plan)
        total = f"{plan.card.total_bytes / GIB:.0f} GiB"
        drawing.text(
            MARGIN, top + 14, f"{card}, {total}: {target} in {SCHEME_NAMES[scheme]}, {context:,} tokens", bold=True
        )
        x = float(MARGIN)
        for name, num_bytes in shares.items():
            width = num_bytes / plan.card.total_bytes * (WIDTH - 2 * MARGIN)
            drawing.box(x, top + 24, width, 26, COLOURS[name])
            x += width
        told = [f"{name} {num_bytes / GIB:.1f}" for name, num_bytes in shares.items() if num_bytes]
        drawing.text(MARGIN, top + 68, ", ".join(told))
    drawing.legend(374, COLOURS.items())
    return drawing.svg()


# --- how it works -----------------------------------------------------------------------------------------------------

TARGET, DRAFT, RIGHT, WRONG, HIDDEN = "#cfe0f7", "#fde3b8", "#cdeccb", "#f6c9c9", "#f4f4f4"


def passes() -> str:
    """Five passes that write a token each, and two that write four each."""
    drawing = Drawing("Plain decoding takes one pass for each token; with drafts one pass checks several", 218)
    drawing.text(MARGIN, 36, "plain", bold=True)
    for place, word in enumerate(("What", "time", "would", "you", "like")):
        drawing.named(116 + 126 * place, 14, (108, 32), TARGET, "target")
        drawing.text(170 + 126 * place, 66, word, anchor="middle")
    drawing.text(MARGIN, 124, "with drafts", bold=True)
    first = (("What", RIGHT), ("time", RIGHT), ("would", RIGHT), ("we", WRONG), ("you", TARGET))
    second = (("like", RIGHT), ("to", RIGHT), ("book", RIGHT), ("a", TARGET))
    for left, words in ((116.0, first), (452.0, second)):
        drawing.named(left, 102, (64, 32), DRAFT, "draft")
        drawing.named(left + 70, 102, (108, 32), TARGET, "target")
        for place, (word, colour) in enumerate(words):
            drawing.named(left + 63 * place, 142, (59, 28), colour, word)
    names = {"drafted, accepted": RIGHT, "drafted, rejected": WRONG, "the target's own token": TARGET}
    drawing.legend(190, names.items())
    return drawing.svg()


def drafter() -> str:
    """What the drafter reads: of each accepted token three states of the target, then its own."""
    drawing = Drawing(
        "The drafter reads hidden states of the target for accepted tokens, its own for drafted ones", 320
    )
    drawing.text(MARGIN, 34, "target: hidden states of three of its layers", bold=True)
    for place, word in enumerate(("I", "would", "like", "to")):
        left = 110 + 90 * place
        drawing.box(left, 50, 72, 118, TARGET, corner=4)
        for row, layer in enumerate(("low", "middle", "high")):
            drawing.named(left + 6, 60 + 34 * row, (60, 26), "#9fc1ef", layer, letters=13)
        drawing.text(left + 36, 190, word, anchor="middle")
        drawing.arrow(left + 36, 198, left + 36, 238)
        drawing.named(left, 242, (72, 44), DRAFT, "target's", letters=13)
    drawing.text(MARGIN, 269, "drafter", bold=True)
    drawing.text(110, 308, "accepted text")
    drawing.text(470, 230, "drafted: each step reads the one before")
    for place, word in enumerate(("book", "a", "table")):
        left = 470 + 90 * place
        drawing.named(left, 242, (72, 44), "#fff1d9", "own", letters=13)
        drawing.arrow(left - 18, 264, left - 2, 264)
        drawing.text(left + 36, 308, word, anchor="middle")
    return drawing.svg()


NODES = (
    ("to", None, 16, 176), ("book", 0, 116, 140), ("reserve", 0, 116, 212), ("a", 1, 226, 118), ("the", 1, 226, 164),
    ("a", 2, 226, 212), ("table", 3, 336, 118),
)  # fmt: skip
"""Of a tree: word, parent, and where it is drawn."""


def tree() -> str:
    """A chain, a tree, and which nodes each node sees."""
    drawing = Drawing(
        "A chain of drafts, a tree of them, and its mask: a node sees itself and its way to the root", 262
    )
    drawing.text(MARGIN, 28, "chain", bold=True)
    for place, word in enumerate(("to", "book", "a", "table")):
        drawing.named(16 + 92 * place, 42, (70, 32), DRAFT if place else TARGET, word)
        if place:
            drawing.arrow(92 * place - 6, 58, 92 * place + 14, 58)
    drawing.text(MARGIN, 122, "tree", bold=True)
    drawing.text(470, 28, "what each node of the tree sees", bold=True)
    for node, (word, parent, x, y) in enumerate(NODES):
        drawing.named(x, y, (76, 30), TARGET if parent is None else DRAFT, word)
        drawing.text(x + 72, y - 3, str(node), anchor="end", size=12)
        if parent is not None:
            drawing.arrow(NODES[parent][2] + 76, NODES[parent][3] + 15, x - 2, y + 15)
        drawing.text(492, 65 + 28 * node, str(node), anchor="end", size=12)
        drawing.text(511 + 28 * node, 46, str(node), anchor="middle", size=12)
        seen = way_to_root(node)
        for other in range(len(NODES)):
            drawing.box(499 + 28 * other, 50 + 28 * node, 24, 22, "#8fd08a" if other in seen else HIDDEN)
    return drawing.svg()


def way_to_root(node: int | None) -> set[int]:
    return set() if node is None else {node, *way_to_root(NODES[node][1])}


def demo() -> str:
    """What `eagle31 demo` shows of its first answers, as a terminal does; README begins with it."""
    pair = load_pair(PairSource(), DraftOptions(draft_tokens=DEMO_DRAFT_TOKENS, schedule="constant"))
    lines = []
    for task in pair.tasks(embedded_prompts())[:MOST_STREAMED]:
        lines += [Text(f"{message['role']}: {message['content']}", style="dim") for message in task.prompt.messages]
        lines += [Text.assemble(("assistant: ", "dim")), Text()]
        streamer = RoundStreamer(IncrementalDecoder(pair.tokenizer), partial(_append, lines[-2]))
        ids = {"input_ids": task.ids[None], "attention_mask": task.ids[None].new_ones(1, len(task.ids))}
        pair.target.generate(
            **ids, assistant_model=pair.drafter, streamer=streamer, max_new_tokens=128, do_sample=False
        )
    console = Console(record=True, file=StringIO(), width=80, highlight=False)
    console.print(*lines, legend(), sep="\n")
    drawn = console.export_svg(title="eagle31 demo", unique_id="eagle31-demo")
    return re.sub(r" *@font-face {.*?}\n", "", drawn, flags=re.S)  # it loads no font from elsewhere


def _append(answer: Text, text: str, accepted: bool) -> None:
    answer.append(text, ACCEPTED_STYLE if accepted else "")


PICTURES = {
    "passes.svg": passes,
    "drafter.svg": drafter,
    "tree.svg": tree,
    "memory-cards.svg": cards,
}


def main() -> None:
    """Draw all pictures; that of the demo, whose models take a few seconds, by its name."""
    for name, draw in {"demo.svg": demo}.items() if sys.argv[1:] == ["demo"] else PICTURES.items():
        (IMAGES / name).write_text(draw(), encoding="utf-8")


if __name__ == "__main__":
    main()
