"""The tour as one HTML page with inline figures; its frame is `page.html`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from textwrap import fill, indent
from typing import NamedTuple, TypeAlias

from jaxtyping import Float
from torch import Tensor

from hookline.experiments.core.labels import table

Rows: TypeAlias = Sequence[tuple[str, Sequence[float]]]
INK, GRAY = "#1e2430", "#5a6274"
WARM, COLD, COOL = (194, 65, 12), (29, 78, 216), (67, 56, 202)


class Head(NamedTuple):
    """An attention head; prints as "3.4"."""

    layer: int
    head: int

    def __str__(self) -> str:
        return f"{self.layer}.{self.head}"


class Attention(NamedTuple):
    """The words of a text, and the attention of a head from each to each."""

    words: list[str]
    pattern: Float[Tensor, "pos pos"]


class Shown(NamedTuple):
    """A table for the terminal, and a figure for the page."""

    text: str
    html: str


@dataclass(frozen=True)
class Chapter:
    """One finding: a text, the code to reproduce it, and its tables and figures."""

    title: str
    text: str
    code: str
    shown: Sequence[Shown]

    def __str__(self) -> str:
        tables = "\n\n".join(each.text for each in self.shown if each.text)
        return f"{self.title}\n\n{fill(self.text, 100)}\n\n{indent(tables, '  ')}"

    def html(self, number: int) -> str:
        """The chapter as a section of the page."""
        figures = "".join(each.html for each in self.shown)
        return (
            f"<section><h2><b>{number}</b>{escape(self.title)}</h2><p>{escape(self.text)}</p>"
            f'<div class="side">{figures}</div><pre>{escape(self.code)}</pre></section>'
        )


def page(chapters: Sequence[Chapter]) -> str:
    """The whole tour as one HTML page."""
    frame = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    return frame.replace("<!-- chapters -->", "".join(each.html(at) for at, each in enumerate(chapters, 1)))


def _figure(caption: str, image: str, kind: str = "") -> str:
    head = f"<figcaption>{escape(caption)}</figcaption>" if caption else ""
    return f'<figure class="{kind}">{head}{image}</figure>'


def callouts(caption: str, values: dict[str, str]) -> Shown:
    """A few numbers in large type, on the page only."""
    shown = (f'<div class="callout"><b>{escape(x)}</b> {escape(key)}</div>' for key, x in values.items())
    return Shown("", _figure(caption, "".join(shown)))


def bars(rows: Rows, columns: Sequence[str], caption: str = "", digits: int = 1) -> Shown:
    """Fractions, each with a bar: in the first column before a change, in the others after it."""
    texts = [[key, *(f"{x:.{digits}%}" for x in row)] for key, row in rows]
    body = ""
    for (_, row), (key, *shares) in zip(rows, texts, strict=True):
        kinds = ["bar", *["bar new"] * len(row)]
        cells = [
            f'<td><div class="{kind}"><i style="width:{75 * x:.1f}%"></i>{text}</div></td>'
            for kind, x, text in zip(kinds, row, shares, strict=False)
        ]
        body += f"<tr><td>{escape(key)}</td>{''.join(cells)}</tr>"
    head = "".join(f"<th>{escape(column)}</th>" for column in ["", *columns])
    html = _figure(caption, f"<table><tr>{head}</tr>{body}</table>", "bars wide" if caption else "bars")
    return Shown(text_bars(rows) if len(columns) == 1 else table([[caption, *columns], *texts], ">"), html)


def text_bars(rows: Rows) -> str:
    """Words with one fraction each, as bars for the terminal."""
    return table([[key, f"{x:6.1%}", "█" * round(40 * x)] for key, (x,) in rows])


class _Cell(NamedTuple):
    """A cell of a heat map: its strength from -1 to 1, its tooltip, and the text in it."""

    strength: float
    tip: str
    text: str = ""


def head_map(caption: str, grid: Float[Tensor, "layer head"], digits: int, marked: Head) -> Shown:
    """The values of all heads: warm colors above zero, cold colors below; in the terminal one is in brackets."""
    most = float(grid.abs().max())
    texts = [[decimal(x, digits) for x in row] for row in grid.tolist()]
    cells = [
        [_Cell(x / most, f"head {layer}.{head}: {text}", text) for head, (x, text) in enumerate(zip(*row, strict=True))]
        for layer, row in enumerate(zip(grid.tolist(), texts, strict=True))
    ]
    layers = [f"layer {layer}" for layer in range(grid.shape[0])]
    columns = [_label(f"{head}", 56 + 46 * (head + 0.5), 16, "middle") for head in range(grid.shape[1])]
    image = _heat_map(cells, layers, [_label("head", 48, 16), *columns], (46, 34), (56, 24), marked)
    rows = [[layer, *(f"{text} " for text in row)] for layer, row in zip(layers, texts, strict=True)]
    rows[marked.layer][marked.head + 1] = f"[{texts[marked.layer][marked.head]}]"
    head = ["", *(f"head {head}" for head in range(grid.shape[1]))]
    return Shown(f"{caption}\n{table([head, *rows], '>')}", _figure(caption, image))


def token_map(caption: str, attention: Attention, marked: tuple[int, int] | None = None) -> Shown:
    """The attention of a head, with queries in rows and keys in columns; in the terminal the row that is marked."""
    words, rows = attention.words, attention.pattern.tolist()
    cells = [
        [_Cell(x, f"{words[at]} looks at {word}: {x:.0%}") for word, x in zip(words, row[: at + 1], strict=False)]
        for at, row in enumerate(rows)
    ]
    columns = [
        f'<g transform="translate({74 + 26 * (at + 0.5)} 60) rotate(-50)">{_label(word, 0, 0, "start")}</g>'
        for at, word in enumerate(words)
    ]
    image = _heat_map(cells, words, columns, (26, 26), (74, 66), marked, warm=COOL, margin=40)
    text = "" if marked is None else text_bars([(word, [x]) for word, x in zip(words, rows[marked[0]], strict=True)])
    return Shown(text, _figure(caption, image))


def _heat_map(
    cells: Sequence[Sequence[_Cell]],
    rows: Sequence[str],
    columns: Sequence[str],
    size: tuple[int, int],
    corner: tuple[int, int],
    marked: tuple[int, int] | None,
    *,
    warm: tuple[int, int, int] = WARM,
    margin: int = 0,
) -> str:
    """An SVG of colored cells with tooltips, below the labels of the columns and right of those of the rows."""
    (wide, high), (left, up) = size, corner
    parts = [*columns, *(_label(row, left - 8, up + high * (at + 0.5) + 3) for at, row in enumerate(rows))]
    for down, row in enumerate(cells):
        for across, cell in enumerate(row):
            x, y = left + wide * across, up + high * down
            place = f'x="{x}" y="{y}" width="{wide - 2}" height="{high - 2}" rx="4"'
            parts.append(f'<rect {place} fill="{_color(cell.strength, warm)}"><title>{escape(cell.tip)}</title></rect>')
            if (down, across) == marked:
                parts.append(f'<rect {place} fill="none" stroke="{INK}" stroke-width="2"/>')
            ink = "#fff" if abs(cell.strength) > 0.6 else INK
            parts.append(_label(cell.text, x + wide / 2 - 1, y + high / 2 + 3, "middle", ink) if cell.text else "")
    width, height = left + wide * max(map(len, cells)) + margin, up + high * len(cells)
    return (
        f'<svg viewBox="-2 -2 {width + 4} {height + 4}" style="max-width:{width}px" role="img" '
        f'xmlns="http://www.w3.org/2000/svg">{"".join(parts)}</svg>'
    )


def _color(strength: float, warm: tuple[int, int, int]) -> str:
    """A color from almost white at 0 to warm at 1 or cold at -1."""
    full = warm if strength >= 0 else COLD
    return "#" + "".join(f"{round(244 + (part - 244) * min(abs(strength), 1.0)):02x}" for part in full)


def _label(text: str, x: float, y: float, anchor: str = "end", ink: str = GRAY) -> str:
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}" font-size="12" fill="{ink}">{escape(text)}</text>'


def decimal(value: float, digits: int, sign: str = "-") -> str:
    """A number with a typographic minus, and without a negative zero."""
    return f"{round(value, digits) + 0.0:{sign}.{digits}f}".replace("-", "−")
