"""Tables as text and as HTML."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape


def table(rows: Sequence[Sequence[str]], align: str = "<") -> str:
    """Rows of cells as text with aligned columns: the first to the left, the others by `align`, "<" or ">"."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    sides = ["<", *[align] * len(widths)]
    lines = ("  ".join(f"{x:{side}{n}}" for x, side, n in zip(row, sides, widths, strict=False)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


def html_table(rows: Sequence[Sequence[str]]) -> str:
    """Rows of cells as an HTML table; the first row is its head."""
    kinds = ["th", *["td"] * len(rows)]
    lines = ("".join(f"<{kind}>{escape(x)}</{kind}>" for x in row) for kind, row in zip(kinds, rows, strict=False))
    return f"<table>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"
