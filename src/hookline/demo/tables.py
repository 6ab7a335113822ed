"""The numbers of the tour as text, for the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from hookline.demo.chapters import Change, Grid, Head


def name(head: Head) -> str:
    """A head as layer.head."""
    return f"{head[0]}.{head[1]}"


def number(value: float, digits: int, sign: str = "-") -> str:
    """A number with a typographic minus, and without a negative zero."""
    return f"{round(value, digits) + 0.0:{sign}.{digits}f}".replace("-", "−")


def lines_of_bars(rows: Sequence[tuple[str, float]]) -> str:
    """Words with their probabilities as text bars."""
    return "\n".join(f"{word.strip():8} {share:6.1%}  {'█' * round(40 * share)}".rstrip() for word, share in rows)


def table(grid: Grid, digits: int, marked: Head) -> str:
    """A grid of heads as text, the marked one in brackets."""
    lines = ["         " + "".join(f"{f'head {head}':>8}" for head in range(grid.shape[1]))]
    for layer, row in enumerate(grid.tolist()):
        cells = [number(value, digits) for value in row]
        framed = [f"[{cell}]" if (layer, head) == marked else f"{cell} " for head, cell in enumerate(cells)]
        lines.append(f"layer {layer}  " + "".join(f"{cell:>8}" for cell in framed))
    return "\n".join(line.rstrip() for line in lines)


def changes(change: Change, columns: Sequence[str]) -> str:
    """Probabilities before and after as text."""
    head = f"{'':10}" + "".join(f"{column:>22}" for column in columns)
    return "\n".join([head, *(f"{word.strip():10}{before:>22.1%}{after:>22.1%}" for word, before, after in change)])
