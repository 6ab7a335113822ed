"""The tour as one HTML page with inline figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from textwrap import dedent
from typing import TypeAlias

from jaxtyping import Float
from torch import Tensor

from hookline.demo.chapters import Grid, Head
from hookline.demo.tables import number

Colour: TypeAlias = tuple[int, int, int]
WARM, COLD, COOL = (194, 65, 12), (29, 78, 216), (67, 56, 202)
INK = "#1e2430"


@dataclass(frozen=True)
class Chapter:
    """One finding: a text, a table for the terminal, a figure for the page, and the code to reproduce it."""

    title: str
    text: str
    table: str
    figure: str
    code: str


def page(chapters: Sequence[Chapter]) -> str:
    """The whole story as one HTML page with inline figures."""
    parts = [
        f"<section><h2><b>{number}</b>{escape(chapter.title)}</h2><p>{escape(chapter.text)}</p>{chapter.figure}"
        f"<pre>{escape(dedent(chapter.code).strip())}</pre></section>"
        for number, chapter in enumerate(chapters, 1)
    ]
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>hookline: inside a small language model</title><style>{STYLE}</style></head><body>
<header><h1>Inside a small language model</h1><p>tinyworld has 4 layers of 8 attention heads and ships with hookline.
Everything below was read, or changed, while it ran: by name, and without changing the model. The code that does it
is under each image.</p></header>
{"".join(parts)}
</body></html>
"""


STYLE = """
body { font: 16px/1.55 system-ui, sans-serif; color: #1e2430; background: #f6f5f1; margin: 0 auto; padding: 2rem 1rem;
  max-width: 60rem }
header, section { background: #fff; border-radius: 14px; padding: 1.4rem 2rem; margin-bottom: 1.2rem;
  box-shadow: 0 1px 4px #0001 }
header { background: #1e2430; color: #e8eaf0 }
h1 { margin: .2rem 0 } h2 { margin: 0 } h2 b { color: #c2410c; margin-right: .6rem } p { max-width: 52rem }
figure { margin: 1rem 0 0 } figcaption { font-size: .85rem; font-weight: 600; color: #5a6274; margin-bottom: .4rem }
.side { display: flex; flex-wrap: wrap; gap: 1rem 2rem; align-items: flex-start } .side figure { flex: 1 1 24rem }
svg { width: 100%; height: auto; display: block } svg text { font-family: system-ui, sans-serif }
pre { background: #f4f5f8; border-radius: 8px; padding: .8rem 1rem; margin: 1.2rem 0 0; font-size: .8rem;
  overflow-x: auto }
table { border-collapse: collapse; table-layout: fixed; width: 100%; font-size: .92rem }
th { text-align: left; font-weight: 600; color: #5a6274 }
td, th { padding: .3rem .8rem .3rem 0 } th:first-child { width: 5rem } .wide th:first-child { width: 30% }
.bar { display: flex; align-items: center; gap: .5rem; font-size: .85rem; font-variant-numeric: tabular-nums }
.bar i { height: .85rem; border-radius: 3px; background: #8b93a7; min-width: 2px } .bar.new i { background: #c2410c }
.callout { color: #5a6274; margin-top: 1rem } .callout b { font-size: 2rem; color: #1d4ed8; margin-right: .3rem }
"""


def figure(caption: str, image: str) -> str:
    """A figure with a caption."""
    return f"<figure><figcaption>{escape(caption)}</figcaption>{image}</figure>"


def side_by_side(*figures: str) -> str:
    """Figures side by side, if there is room."""
    return f'<div class="side">{"".join(figures)}</div>'


def callouts(values: dict[str, str]) -> str:
    """A few numbers in large type."""
    return "".join(f'<div class="callout"><b>{escape(value)}</b> {escape(key)}</div>' for key, value in values.items())


def bars(rows: Sequence[tuple[str, Sequence[float]]], columns: Sequence[str]) -> str:
    """Words with a bar per probability: one column before a change, one after."""
    cells = [(word.strip(), [bar(share, 1, is_new=n > 0) for n, share in enumerate(row)]) for word, row in rows]
    return f"<figure>{_table(cells, columns)}</figure>"


def shares(rows: dict[str, list[float]], columns: Sequence[str]) -> str:
    """Kinds of questions with a bar per accuracy."""
    cells = [(kind, [bar(share, 0, is_new=n > 0) for n, share in enumerate(row)]) for kind, row in rows.items()]
    return f'<div class="wide">{_table(cells, columns)}</div>'


def bar(share: float, digits: int, *, is_new: bool) -> str:
    """A fraction as a bar."""
    kind = "bar new" if is_new else "bar"
    return f'<div class="{kind}"><i style="width:{75 * share:.1f}%"></i>{share:.{digits}%}</div>'


def _table(rows: Sequence[tuple[str, Sequence[str]]], columns: Sequence[str]) -> str:
    head = "".join(f"<th>{escape(column)}</th>" for column in ["", *columns])
    body = "".join(f"<tr><td>{escape(key)}</td>{''.join(f'<td>{x}</td>' for x in row)}</tr>" for key, row in rows)
    return f"<table><tr>{head}</tr>{body}</table>"


def head_map(grid: Grid, digits: int, marked: Head) -> str:
    """A heat map of heads with their values: warm colors above zero, cold colors below."""
    wide, high, left, up = 46, 34, 56, 24
    most = float(grid.abs().max())
    parts = [label("head", left - 8, up - 8)]
    parts += [label(f"{head}", left + wide * (head + 0.5), up - 8, "middle") for head in range(grid.shape[1])]
    parts += [label(f"layer {layer}", left - 8, up + high * (layer + 0.5) + 3) for layer in range(grid.shape[0])]
    for layer, row in enumerate(grid.tolist()):
        for head, value in enumerate(row):
            ink = "#fff" if abs(value) > 0.6 * most else INK
            place, text = (left + wide * head, up + high * layer), number(value, digits)
            parts.append(cell(place, (wide, high), colour(value / most), f"head {layer}.{head}: {text}"))
            parts.append(label(text, place[0] + wide / 2 - 1, place[1] + high / 2 + 3, "middle", ink))
    parts.append(outline(left + wide * marked[1], up + high * marked[0], wide, high))
    return svg(left + wide * grid.shape[1], up + high * grid.shape[0], parts)


def token_map(pattern: Float[Tensor, "pos pos"], tokens: Sequence[str], marked: tuple[int, int] | None = None) -> str:
    """A heat map of attention: queries in rows, keys in columns."""
    size, left, up = 26, 74, 66
    words = [token.strip() for token in tokens]
    parts = [label(word, left - 8, up + size * (row + 0.5) + 3) for row, word in enumerate(words)]
    for column, word in enumerate(words):
        turned = f"translate({left + size * (column + 0.5)} {up - 6}) rotate(-50)"
        parts.append(f'<g transform="{turned}">{label(word, 0, 0, "start")}</g>')
    for query, row in enumerate(pattern.tolist()):
        for key, share in enumerate(row[: query + 1]):
            place, tip = (left + size * key, up + size * query), f"{words[query]} looks at {words[key]}: {share:.0%}"
            parts.append(cell(place, (size, size), colour(share, COOL), tip))
    if marked is not None:
        parts.append(outline(left + size * marked[1], up + size * marked[0], size, size))
    return svg(left + size * len(words) + 40, up + size * len(words), parts)


def colour(share: float, warm: Colour = WARM) -> str:
    """A color from almost white at 0 to warm at 1 or cold at -1."""
    full = warm if share >= 0 else COLD
    return "#" + "".join(f"{round(244 + (part - 244) * min(abs(share), 1.0)):02x}" for part in full)


def cell(place: tuple[float, float], size: tuple[float, float], fill: str, tip: str) -> str:
    """A cell of a heat map, with a tooltip."""
    (x, y), (wide, high) = place, size
    shape = f'x="{x}" y="{y}" width="{wide - 2}" height="{high - 2}" rx="4"'
    return f'<rect {shape} fill="{fill}"><title>{escape(tip)}</title></rect>'


def outline(x: float, y: float, wide: float, high: float) -> str:
    """A frame around a cell."""
    shape = f'x="{x}" y="{y}" width="{wide - 2}" height="{high - 2}" rx="4"'
    return f'<rect {shape} fill="none" stroke="{INK}" stroke-width="2"/>'


def label(text: str, x: float, y: float, anchor: str = "end", ink: str = "#5a6274") -> str:
    """A word in a figure."""
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}" font-size="12" fill="{ink}">{escape(text)}</text>'


def svg(width: float, height: float, parts: Sequence[str]) -> str:
    """An SVG that is never wider than its natural size."""
    return (
        f'<svg viewBox="-2 -2 {width + 4} {height + 4}" style="max-width:{width}px" role="img" '
        f'xmlns="http://www.w3.org/2000/svg">{"".join(parts)}</svg>'
    )
