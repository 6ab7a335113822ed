"""A page as one HTML document: its style, its script and its data are inside, and nothing else is loaded."""

from __future__ import annotations

import base64
import hashlib
import json
from functools import cache
from html import escape
from importlib.resources import files
from typing import Any

TOOLS = ("data.js", "draw.js", "grid.js")
APP = (
    *TOOLS,
    *("transport.js", "panels.js", "features.js", "images.js", "image_view.js", "edits.js", "tour.js", "app.js"),
)
EXPLORER = (*APP, "start.js")
"""The scripts of the explorer: joined in this order, they are one ES module."""
FIGURE = (*TOOLS, "figure.js")
"""The scripts of a figure, such as `Result.plot_html` returns."""
GRAPH = ("data.js", "draw.js", "graph.js", "subgraph.js")
"""The scripts of an attribution graph."""
CIRCUIT = ("data.js", "draw.js", "circuit.js")
"""The scripts of a circuit."""


def document(data: dict[str, Any], scripts: tuple[str, ...] = EXPLORER, *, title: str = "hookline explorer") -> str:
    """The page with its data inside; for the explorer `live`, `model` (see `views.about_model`), `steps` and `answers`.

    A step has a `state`, and in a tour what the guide says (see `saved.Step`). An answer is a pair of a question and
    the view that answers it. A page that is live has one step and no answers: it asks its server.
    """
    content = json.dumps(data, ensure_ascii=True, allow_nan=False).replace("<", "\\u003c")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy(scripts, is_live=bool(data.get("live")))}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="referrer" content="no-referrer"><meta name="color-scheme" content="light dark">\n'
        f'<title>{escape(title)}</title><link rel="icon" href="data:,">\n'
        f'<style>{style()}</style></head>\n<body><div id="explorer" data-theme="light"></div>\n'
        f'<script type="application/json" id="data">{content}</script>\n'
        f'<script type="module">{module(scripts)}</script></body></html>\n'
    )


def policy(scripts: tuple[str, ...] = EXPLORER, *, is_live: bool) -> str:
    """The content security policy: only this script and this style, and requests only to the page's own server."""
    connect = "'self'" if is_live else "'none'"
    return (
        f"default-src 'none'; script-src '{_hash(module(scripts))}'; style-src '{_hash(style())}'; "
        f"connect-src {connect}; img-src data:; base-uri 'none'; form-action 'none'"
    )


@cache
def module(scripts: tuple[str, ...] = EXPLORER) -> str:
    """The ES module of a page."""
    text = "\n".join(map(_asset, scripts))
    assert "</script" not in text
    return text


def widget_module() -> str:
    """The ES module of the explorer in a notebook, for anywidget; its style is inside."""
    return f"{module((*APP, 'widget.js'))}\nexport default showIn({json.dumps(style())});\n"


def style() -> str:
    """The style sheet of every page."""
    return _asset("explorer.css")


@cache
def _asset(name: str) -> str:
    return (files("hookline.pages") / "assets" / name).read_text(encoding="utf-8")


@cache
def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
