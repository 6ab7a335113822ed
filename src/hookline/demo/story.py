"""The story of the tour, step by step: the text and the code are in `story.md`, the states of the page are here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from textwrap import dedent
from typing import Any

from hookline.demo.chapters import ASKED, PROMPT, SWAPPED, TWICE, Change, Findings, Grid, Head
from hookline.explore.saved import Step
from hookline.pages.text_tables import table


def story(findings: Findings) -> list[tuple[Step, str]]:
    """The steps of the tour, each with a table for the terminal. Their code examples run one after the other."""
    parts = f"\n{Path(__file__).with_name('story.md').read_text(encoding='utf-8')}".split("\n# ")[1:]
    fields, steps = _fields(findings), []
    for part, (scene, shown) in zip(parts, _scenes(findings), strict=True):
        title, *paragraphs, code = part.strip().split("\n\n")
        text = "\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)
        text = text.format(found=findings, prompt=PROMPT, question=ASKED, **fields)
        steps.append((replace(scene, title=title, text=text, code=dedent(code)), shown))
    return steps


def _fields(findings: Findings) -> dict[str, Any]:
    """The numbers and words in the text."""
    word, _ = findings.predictions[0]
    answered = next(at for at, (guess, _) in enumerate(findings.lens) if guess == word)
    told, plain, gift = findings.shares.values()
    others = [x for at, x in enumerate(findings.restored.flatten().tolist()) if at != int(findings.restored.argmax())]
    return {
        "answer": findings.predictions[0],
        "guess": findings.lens[answered - 1],
        "before_layer": answered - 2,
        "answer_layer": answered - 1,
        "last_layer": len(findings.stream) - 1,
        "added": _signed(findings.added),
        "added_without": _signed(findings.added_without),
        "head_adds": decimal(findings.added_by_heads[findings.giver].item()),
        "lost": decimal(-findings.lost[findings.giver].item()),
        "looks": findings.attention.last,
        "pushed": _signed(findings.pushed),
        "without": likeliest(findings.without_giver, 1),
        "at_name": findings.stream[-1].max().item(),
        "at_end": findings.stream[-1, -1].item(),
        "restored": findings.restored[findings.giver].item(),
        "next_best": max(others),
        "stripe": findings.induction[findings.repeater].item(),
        "opinion": likeliest(findings.corrected, 0),
        "copies": findings.opinion.last,
        "truth": likeliest(findings.corrected, 1),
        "told": told,
        "plain": plain,
        "gift": gift,
    }


def _scenes(findings: Findings) -> list[tuple[Step, str]]:
    """What each step shows, in order: a state of the page with the views to look at, and a table for the terminal."""
    giver, repeater, (one, two) = findings.giver, findings.repeater, findings.agreeing
    first = {"prompt": PROMPT, "other": SWAPPED, **giver._asdict()}
    ablated, edited = {**first, "measure": "ablation"}, {**first, "edits": _zeroed([giver])}
    twice = {"prompt": TWICE, "measure": "induction", **repeater._asdict()}
    opinion = {"prompt": ASKED, **one._asdict(), "edits": _zeroed([one, two], on=False)}
    silent = {**opinion, "edits": _zeroed([one, two])}
    name = {"layer": len(findings.stream) - 1, "pos": int(findings.stream[-1].argmax())}
    lens = [
        [f"after layer {at - 1}" if at else "before layer 0", *_share(*row)] for at, row in enumerate(findings.lens)
    ]
    return [
        (_scene(first, "next generate"), table([_share(*row) for row in findings.predictions])),
        (_scene(first, "lens"), table(lens)),
        (_scene(first, "attribution heads", giver), ""),
        (_scene(ablated, "heads attribution", giver), _head_table(-findings.lost, giver)),
        (_scene(ablated, "attention heads", giver), ""),
        (_scene(edited, "next edits attribution generate", giver), _changes(findings.without_giver)),
        (Step(first, look=("patching",), select=name), ""),
        (_scene({**first, "sweep": "heads"}, "patching", giver), ""),
        (_scene(twice, "attention heads", repeater), ""),
        (_scene(opinion, "next attention", one), ""),
        (_scene(silent, "next edits", one), _changes(findings.corrected)),
        (_scene(first, "next edits"), ""),
    ]


def _scene(state: dict[str, Any], look: str, head: Head | None = None) -> Step:
    """A step without its text; the head is outlined."""
    select = {} if head is None else {"point": _point(head), **head._asdict()}
    return Step(state, look=tuple(look.split()), select=select)


def _zeroed(heads: Sequence[Head], on: bool = True) -> list[dict[str, Any]]:
    """Edits of the page that zero these heads."""
    return [{"kind": "zero", "point": _point(head), "head": head.head, "on": on} for head in heads]


def _point(head: Head) -> str:
    return f"blocks.{head.layer}.attn.hook_z"


def likeliest(change: Change, at: int) -> tuple[str, float]:
    """The likeliest word before (0) or after (1) a change, and its probability."""
    return max(((word, shares[at]) for word, shares in change), key=lambda row: row[1])


def _share(word: str, share: float) -> list[str]:
    """A word and its probability, as a row of a table for the terminal."""
    return [word, f"{share:6.1%}", "█" * round(40 * share)]


def _changes(change: Change) -> str:
    return table([["", "before", "after"], *([word, *(f"{x:.1%}" for x in row)] for word, row in change)], ">")


def _head_table(grid: Grid, marked: Head) -> str:
    """A number for each head as a table for the terminal, with one marked."""
    rows = [[f"layer {layer}", *(f"{decimal(x)} " for x in row)] for layer, row in enumerate(grid.tolist())]
    rows[marked.layer][marked.head + 1] = f"[{decimal(grid[marked].item())}]"
    return table([["", *(f"head {head}" for head in range(grid.shape[1]))], *rows], ">")


def _signed(values: dict[str, float]) -> dict[str, str]:
    return {key: decimal(value) for key, value in values.items()}


def decimal(value: float) -> str:
    """A number with its sign and one decimal place, and a typographic minus."""
    return f"{round(value, 1) + 0.0:+.1f}".replace("-", "−")
