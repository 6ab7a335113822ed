"""A page that needs nothing else: a notebook shows it in a frame, and it can be written to a file."""

from __future__ import annotations

import os
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any, Literal

from hookline.errors import HooklineError
from hookline.files.tensorfile import write_bytes
from hookline.pages.document import CIRCUIT, FIGURE, GRAPH, document

_WIDTH = 860  # of a notebook's output, about
_HIGHEST = 900


@dataclass(frozen=True, repr=False)
class HtmlPage:
    """One HTML document, with its script and its data inside; `str(page)` is its text.

        page                        # as the last line of a notebook's cell: shows it
        page.save("figure.html")    # opens from disk, without a network

    `height` is that of the frame in a notebook, in pixels.
    """

    html: str
    height: int = 480

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the document to a file."""
        write_bytes(Path(path), self.html.encode(), "the page")
        return Path(path)

    def __str__(self) -> str:
        return self.html

    def __repr__(self) -> str:
        return f"HtmlPage, {len(self.html.encode()) / 1000:.0f} kB: a notebook shows it, save(path) writes it"

    def _repr_html_(self) -> str:
        return (
            f'<iframe srcdoc="{escape(self.html)}" sandbox="allow-scripts allow-downloads" title="hookline" '
            f'style="width: 100%; height: {self.height}px; border: 0"></iframe>'
        )


def figure(panels: list[dict[str, Any]], title: str, theme: Literal["light", "dark"] | None = None) -> HtmlPage:
    """A page with these panels, drawn by assets/figure.js; without a theme, it is light or dark as the system is."""
    data = {"title": title, "theme": _theme(theme), "panels": panels}
    heights = [_height(panel) for panel in panels]
    per_row = 2 if panels[0].get("narrow") else 1
    rows = [max(heights[at : at + per_row]) for at in range(0, len(heights), per_row)]
    return HtmlPage(document(data, FIGURE, title=title or "hookline"), min(_HIGHEST, 70 + sum(rows)))


def graph_page(data: dict[str, Any], theme: Literal["light", "dark"] | None = None) -> HtmlPage:
    """A page with an attribution graph, drawn by assets/graph.js: see `AttributionGraph.plot_html`."""
    return HtmlPage(document({**data, "theme": _theme(theme)}, GRAPH, title=data["title"] or "hookline"), _HIGHEST)


def circuit_page(data: dict[str, Any], theme: Literal["light", "dark"] | None = None) -> HtmlPage:
    """A page with a circuit, drawn by assets/circuit.js: see `Circuit.plot_html`."""
    return HtmlPage(document({**data, "theme": _theme(theme)}, CIRCUIT, title=data["title"] or "hookline"), _HIGHEST)


def _theme(theme: Any) -> str:
    if theme not in ("light", "dark", None):
        raise HooklineError(f'theme is "light", "dark", or None for that of the system, got {theme!r}')
    return theme or ""


def _height(panel: dict[str, Any]) -> int:
    """The height of a panel, about; what does not fit its frame can be scrolled."""
    kind, around = panel["kind"], 90
    if kind == "heat":
        count, cell = len(panel["rows"]), 24 if max(len(panel["rows"]), len(panel["columns"])) <= 40 else 0
        return around + 60 + min(484, count * cell or _plain(count))
    if kind == "bars":
        return around + 24 * len(panel["labels"])
    if kind == "curves":
        return around + 280
    lines = -(-sum(8 * len(text) + 14 for text in panel["tokens"]) // _WIDTH)
    return around + 26 * lines + (0 if kind == "tokens" else 50 + min(484, _plain(len(panel["tokens"]))))


def _plain(rows: int) -> int:
    """The height of rows without text in them."""
    return rows * 4 if rows > 120 else int(rows * max(10, min(24, 420 / rows)))
