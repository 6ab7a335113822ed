"""The story of the tour, chapter by chapter: the text is in `story.md`, its tables and figures are made here."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent
from typing import Any

from hookline.demo.chapters import ASKED, PROMPT, Change, Findings
from hookline.demo.page import Chapter, Shown, bars, callouts, decimal, head_map, token_map


def story(found: Findings) -> list[Chapter]:
    """The findings as chapters. Their code examples run one after the other."""
    parts = f"\n{Path(__file__).with_name('story.md').read_text(encoding='utf-8')}".split("\n# ")[1:]
    looks = found.attention.pattern[-1]
    fields: dict[str, Any] = {
        "lost": found.lost[found.giver].item(),
        "restored": 100 * found.restored[found.giver].item(),
        "pushed": _signed(found.pushed),
        "looks": looks.max().item(),
        "looked_at": found.attention.words[int(looks.argmax())],
        "answer_without": likeliest(found.without_giver, 1),
        "stripe": 100 * found.induction[found.repeater].item(),
        "opinion": likeliest(found.corrected, 0),
    }
    chapters = []
    for part, shown in zip(parts, _shown(found), strict=True):
        title, text, code = part.split("\n\n", 2)
        text = " ".join(text.split()).format(found=found, prompt=PROMPT, question=ASKED, **fields)
        chapters.append(Chapter(title, text, dedent(code).strip(), shown))
    return chapters


def _signed(values: dict[str, float]) -> dict[str, str]:
    return {key: decimal(value, 1, "+") for key, value in values.items()}


def likeliest(change: Change, at: int) -> str:
    """The likeliest word before (0) or after (1) a change."""
    return max(change, key=lambda row: row[1][at])[0]


def _shown(found: Findings) -> list[list[Shown]]:
    """The tables and figures of each chapter."""
    giver, repeater, (one, two) = found.giver, found.repeater, found.agreeing
    marked = len(found.attention.words) - 1, int(found.attention.pattern[-1].argmax())
    columns = ["all heads", f"without {one}", f"without {one} and {two}"]
    return [
        [bars([(word, [share]) for word, share in found.predictions], ["probability"])],
        [
            head_map("Switched off: lead lost", found.lost, 1, giver),
            head_map("Patched in: lead brought back, in %", 100 * found.restored, 0, giver),
        ],
        [
            token_map("Each word, in a row, looks back at words, in columns", found.attention, marked),
            callouts("What it adds at the end to the score of", _signed(found.pushed)),
        ],
        [bars(found.without_giver, ["all heads", f"without {giver}"])],
        [
            token_map(f"Where head {repeater} looks", found.stripe),
            head_map("Every head: attention on the stripe, in %", 100 * found.induction, 0, repeater),
        ],
        [
            bars(found.corrected, columns[::2]),
            bars(list(found.shares.items()), columns, "Right answers, for other countries", digits=0),
        ],
    ]
