"""The logit lens: the residual stream after each layer, unembedded as if it were the last."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from html import escape
from typing import Literal, TypeAlias

import torch
from jaxtyping import Float, Int
from torch import Tensor

from hookline.errors import HooklineError
from hookline.experiments.core.answers import (
    Answers,
    answer_ids,
    beside,
    cached_run,
    checked_text,
    laid_out,
    layer_labels,
)
from hookline.experiments.core.labels import Label, about
from hookline.experiments.core.prompts import Prompt
from hookline.experiments.result import Result
from hookline.model import HookedModel
from hookline.residual import ModelCache

__all__ = ["LensTokens", "lens_tokens", "logit_lens"]

Measure: TypeAlias = Literal["prob", "log_prob", "logit", "rank"]

_ROOM = 2**28
"""Bytes of logits that are held at a time."""


def __dir__() -> list[str]:
    return __all__


def logit_lens(
    model: HookedModel,
    prompts: Prompt,
    tokens: Answers | None = None,
    *,
    measure: Measure = "prob",
    pos: int | None = None,
    per_example: bool = False,
) -> Result:
    """The prediction for a token if the model stopped after each layer: `result.values[layer, pos]`.

        from hookline.experiments import logit_lens
        logit_lens.logit_lens(model, prompt, " Mary").plot()
        logit_lens.logit_lens(model, prompts, answers, measure="rank", pos=-1)      # axis layer

    The stream after each layer (and before the first: "embed") goes through the final norm and the unembedding.
    `tokens` defaults to the model's own final prediction at each position. `measure` is its "prob", "log_prob", "logit"
    or "rank" (0 is the most likely token). `pos` counts within each prompt; None is all positions.
    """
    if measure not in _MEASURES:
        raise HooklineError(f"measure is one of {', '.join(map(repr, _MEASURES))}, got {measure!r}")
    text = checked_text(model, prompts, pos)
    cache = cached_run(model, text, pos)
    assert cache.logits is not None
    ids = cache.logits.argmax(-1) if tokens is None else answer_ids(model, text, tokens, pos)
    every = beside(ids, cache.logits.shape[:-1])
    found = []
    for span, logits in _after_layers(cache, pos):
        some = every if span is None else every[:, span]
        found.append(_MEASURES[measure](logits.float(), some.expand(logits.shape[:-1])[..., None]))
    values = torch.cat(found, -1)
    places: dict[str, list[Label]] = {} if pos is not None else {"pos": [*text.labels(model)]}
    info = {"tokens": ids.tolist(), "measure": measure, **about(model, "logit lens")}
    return laid_out(values, layer_labels(cache.n_layers), places, measure, info, per_example=per_example)


@dataclass(frozen=True, eq=False, repr=False)
class LensTokens:
    """The most likely tokens after each layer, as a table: `tokens[layer][pos]` has `top` of them, `probs` as many."""

    layers: list[Label]
    positions: list[Label]
    tokens: list[list[list[str]]]
    probs: Float[Tensor, "layer pos top"]

    def rows(self) -> list[list[str]]:
        """The table as text, with its head: a column for each position, or, where there is one, for each rank."""
        if len(self.positions) == 1:
            head = ["layer", *map(str, range(self.probs.shape[-1]))]
            cells = [
                [f"{token!r} {prob:.2f}" for token, prob in zip(tokens[0], probs[0].tolist(), strict=True)]
                for tokens, probs in zip(self.tokens, self.probs, strict=True)
            ]
        else:
            head = ["layer", *map(str, self.positions)]
            cells = [[" ".join(map(repr, each)) for each in layer] for layer in self.tokens]
        return [head, *([str(label), *row] for label, row in zip(self.layers, cells, strict=True))]

    def __repr__(self) -> str:
        rows = self.rows()
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ("  ".join(f"{x:<{width}}" for x, width in zip(row, widths, strict=True)) for row in rows)
        return "\n".join(line.rstrip() for line in lines)

    def _repr_html_(self) -> str:
        head, *rows = self.rows()
        body = "".join("<tr>" + "".join(f"<td>{escape(x)}</td>" for x in row) + "</tr>" for row in rows)
        return f"<table><tr>{''.join(f'<th>{escape(x)}</th>' for x in head)}</tr>{body}</table>"


def lens_tokens(model: HookedModel, prompts: Prompt, *, top: int = 5, pos: int | None = -1) -> LensTokens:
    """The most likely next tokens after each layer, at the last position, at `pos`, or (None) at all positions.

    print(logit_lens.lens_tokens(model, prompt))
    """
    text = checked_text(model, prompts, pos)
    if len(text) != 1:
        raise HooklineError(f"lens_tokens takes one prompt, got {len(text)}: call it for each")
    if isinstance(top, bool) or not isinstance(top, int) or not 1 <= top <= model.cfg.d_vocab:
        raise HooklineError(f"top is how many tokens to show, from 1 to {model.cfg.d_vocab}, got {top!r}")
    found = []
    for span, logits in _after_layers(cached_run(model, text, pos), pos):
        row = logits[:, 0] if span is not None else logits
        found.append(row.float().softmax(-1).topk(top))
    ids = torch.cat([each.indices for each in found], 1).tolist()
    tokens = [[[_shown(model, token) for token in here] for here in layer] for layer in ids]
    positions: list[Label] = [*text.labels(model)]
    layers = layer_labels(len(tokens) - 1)["layer"]
    probs = torch.cat([each.values for each in found], 1).cpu()
    return LensTokens(layers, positions if pos is None else [positions[pos]], tokens, probs)


def _shown(model: HookedModel, token: int) -> str:
    return str(token) if model.tokenizer is None else model.to_string([token])


@torch.no_grad()
def _after_layers(
    cache: ModelCache, pos: int | None
) -> Iterator[tuple[slice | None, Float[Tensor, "layer *place vocab"]]]:
    """The logits after each layer; for all positions, in chunks."""
    assert cache.logits is not None
    if pos is not None:
        yield None, cache.logit_lens()
        return
    batch, width, vocab = cache.logits.shape
    step = max(1, _ROOM // (4 * batch * vocab * (cache.n_layers + 1)))
    for start in range(0, width, step):
        span = slice(start, min(start + step, width))
        yield span, cache.logit_lens(pos_slice=span)


def _rank(logits: Tensor, ids: Int[Tensor, "*place 1"]) -> Tensor:
    return (logits > logits.gather(-1, ids)).sum(-1)


_MEASURES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "prob": lambda logits, ids: logits.softmax(-1).gather(-1, ids)[..., 0],
    "log_prob": lambda logits, ids: logits.log_softmax(-1).gather(-1, ids)[..., 0],
    "logit": lambda logits, ids: logits.gather(-1, ids)[..., 0],
    "rank": _rank,
}
