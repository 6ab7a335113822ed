"""The page as one HTML document: its style, its script and its data are inside, and nothing else is loaded."""

from __future__ import annotations

import base64
import hashlib
import json
from functools import cache
from importlib.resources import files
from typing import Any

SCRIPTS = (
    *("data.js", "draw.js", "grid.js", "panels.js", "features.js", "images.js", "image_view.js"),
    *("edits.js", "tour.js", "app.js"),
)
"""Joined in this order, they are one ES module."""


def document(data: dict[str, Any]) -> str:
    """The page with its data inside: `live`, `model` (see `views.about_model`), `steps`, and `answers`.

    A step has a `state`, and in a tour what the guide says (see `saved.Step`). An answer is a pair of a question and
    the view that answers it. A page that is live has one step and no answers: it asks its server.
    """
    content = json.dumps(data, ensure_ascii=True, allow_nan=False).replace("<", "\\u003c")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy(is_live=bool(data.get("live")))}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="referrer" content="no-referrer"><meta name="color-scheme" content="light dark">\n'
        '<title>hookline explorer</title><link rel="icon" href="data:,">\n'
        f'<style>{_asset("explorer.css")}</style></head>\n<body><div id="explorer"></div>\n'
        f'<script type="application/json" id="data">{content}</script>\n'
        f'<script type="module">{module()}</script></body></html>\n'
    )


def policy(*, is_live: bool) -> str:
    """The content security policy: only this script and this style, and requests only to the page's own server."""
    connect = "'self'" if is_live else "'none'"
    return (
        f"default-src 'none'; script-src '{_hash(module())}'; style-src '{_hash(_asset('explorer.css'))}'; "
        f"connect-src {connect}; img-src data:; base-uri 'none'; form-action 'none'"
    )


@cache
def module() -> str:
    """The ES module of the page."""
    text = "\n".join(_asset(name) for name in SCRIPTS)
    assert "</script" not in text
    return text


@cache
def _asset(name: str) -> str:
    return (files("hookline.pages") / "assets" / name).read_text(encoding="utf-8")


@cache
def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
