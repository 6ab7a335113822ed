"""Figures of texts for notebooks and files: attention between tokens, and a value for each token.

    from hookline.experiments import figures

    tokens = model.to_str_tokens(prompt)
    figures.attention_map(tokens, model.cache(prompt)["pattern", 3][0])
    figures.colored_tokens(tokens, losses)

Each returns an `HtmlPage`: a notebook shows it, `save(path)` writes it to a file.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from hookline.errors import HooklineError
from hookline.pages.html_page import HtmlPage, figure
from hookline.pages.tensors import packed_tensor

__all__ = ["attention_map", "colored_tokens"]


def __dir__() -> list[str]:
    return __all__


def attention_map(
    texts: Sequence[str],
    pattern: Float[Tensor, "pos pos"] | Float[Tensor, "head pos pos"],
    *,
    names: Sequence[str] | None = None,
    title: str = "Attention",
    theme: Literal["light", "dark"] | None = None,
) -> HtmlPage:
    """Attention patterns over a text: a heat map of one head at a time, and the text colored by what a token looks at.

        >>> page = figures.attention_map(model.to_str_tokens(prompt), model.cache(prompt)["pattern", 3][0])
        >>> path = page.save("attention.html")

    `pattern` is that of one head, or of several, which `names` can name; for one layer of a cache it is
    `cache["pattern", layer][0]`. Hover a token to see what it attends to; a click keeps it.
    """
    rows = _rows(pattern, 3, "a pattern is [query, key] or [head, query, key]")
    if rows.shape[1:] != (len(texts), len(texts)):
        raise HooklineError(f"a pattern of shape {list(rows.shape)} does not fit {len(texts)} tokens")
    heads = _names(names, len(rows), [f"head {at}" for at in range(len(rows))])
    panel = {"kind": "attention", "title": "", "tokens": list(texts), "names": heads, "values": packed_tensor(rows)}
    return figure([panel], title, theme)


def colored_tokens(
    texts: Sequence[str],
    values: Float[Tensor, " pos"] | Float[Tensor, "row pos"],
    *,
    names: Sequence[str] | None = None,
    title: str = "",
    theme: Literal["light", "dark"] | None = None,
) -> HtmlPage:
    """A text whose tokens are colored by values, such as losses or the activations of a neuron; hover for the number.

        >>> norms = model.cache(prompt)["z", 3][0, :, 4].norm(dim=-1)
        >>> page = figures.colored_tokens(model.to_str_tokens(prompt), norms)

    `values` has one number per token, or several rows of them, which `names` names and buttons choose from. Values that
    are never negative have one color, from 0 up; others are colored around 0.
    """
    rows = _rows(values, 2, "values are [pos] or [row, pos]")
    if rows.shape[1] != len(texts):
        raise HooklineError(f"values of shape {list(rows.shape)} do not fit {len(texts)} tokens")
    finite = torch.where(rows.isfinite(), rows, 0.0)
    fields = {"tokens": list(texts), "names": _names(names, len(rows), [""] if len(rows) == 1 else None)}
    most = [float(row.abs().max()) or 1.0 for row in finite]
    scales = ["zero" if bool((row < 0).any()) else "one" for row in finite]
    panel = {"kind": "tokens", "title": "", **fields, "most": most, "scales": scales, "values": packed_tensor(rows)}
    return figure([panel], title, theme)


def _rows(values: Any, ndim: int, shapes: str) -> Tensor:
    """The values as a tensor with one row for each head or name."""
    x = torch.as_tensor(values).detach().float().cpu()
    if x.ndim not in (ndim - 1, ndim) or not x.numel():
        raise HooklineError(f"{shapes}, got the shape {list(x.shape)}")
    return x if x.ndim == ndim else x[None]


def _names(requested: Sequence[str] | None, count: int, default: list[str] | None) -> list[str]:
    names = list(requested) if requested is not None else default or [f"row {at}" for at in range(count)]
    if len(names) != count:
        raise HooklineError(f"there are {len(names)} names for {count} rows of values")
    return names
