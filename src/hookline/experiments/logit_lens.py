"""The logit lens: the residual stream after each layer, unembedded as if it were the last."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from hookline.errors import HooklineError
from hookline.experiments.core.aligned import PromptPositions
from hookline.experiments.core.answers import (
    Answers,
    Place,
    answer_ids,
    at_each,
    beside,
    checked_text,
    laid_out,
    layer_labels,
)
from hookline.experiments.core.labels import Label, about
from hookline.experiments.core.prompts import Prompt, Prompts
from hookline.experiments.result import Result
from hookline.model import HookedModel
from hookline.pages.text_tables import html_table, table
from hookline.rerun.strategy import stream_names
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
    pos: int | Tensor | None = None,
    positions: PromptPositions = None,
    per_example: bool = False,
) -> Result:
    """The prediction for a token if the model stopped after each layer: `result.values[layer, pos]`.

        >>> logit_lens.logit_lens(model, prompt, " Mary").axes
        ('layer', 'pos')
        >>> logit_lens.logit_lens(model, prompt, " Mary", measure="rank", pos=-1).values
        tensor([271., 437., 284.,  71.,   0.])

    The stream after each layer (and before the first: "embed") goes through the final norm and the unembedding.
    `tokens` defaults to the model's own final prediction at each position. `measure` is its "prob", "log_prob", "logit"
    or "rank" (0 is the most likely token). `pos` counts within each prompt; None is all positions. Prompts may differ
    in length with `pos`, or with `positions`, which are the axis `pos`: as in `patching.sweep`, one run for each.
    """
    if positions is not None:
        read = partial(logit_lens, model, prompts, tokens, measure=measure, per_example=per_example)
        return at_each(model, prompts, positions, lambda place: read(pos=place))
    if measure not in MEASURES:
        raise HooklineError(f"measure is one of {', '.join(map(repr, MEASURES))}, got {measure!r}")
    text = checked_text(model, prompts, pos)
    cache = lens_cache(model, text, pos)
    assert cache.logits is not None
    ids = cache.logits.argmax(-1) if tokens is None else answer_ids(model, text, tokens, pos)
    shape = cache.logits.shape[:-1]
    every, start = beside(ids, shape).reshape(shape[0], -1), 0
    chunks = []
    for logits in lens_logits(cache, None if pos is not None else range(text.width)):
        chunk_ids = every[:, start : start + logits.shape[2]]
        chunks.append(MEASURES[measure](logits, chunk_ids.expand(logits.shape[:-1])[..., None]))
        start += logits.shape[2]
    values = torch.cat(chunks, -1)
    places: dict[str, list[Label]] = {} if pos is not None else {"pos": [*text.labels(model)]}
    info = {"tokens": ids.tolist(), "measure": measure, "prompts": text.checksums, **about(model, "logit lens")}
    values = values[..., 0] if pos is not None else values
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
            cells = [[" ".join(map(repr, candidates)) for candidates in layer] for layer in self.tokens]
        return [head, *([str(label), *row] for label, row in zip(self.layers, cells, strict=True))]

    def __repr__(self) -> str:
        return table(self.rows())

    def _repr_html_(self) -> str:
        return html_table(self.rows())


def lens_tokens(model: HookedModel, prompts: Prompt, *, top: int = 5, pos: int | None = -1) -> LensTokens:
    """The most likely next tokens after each layer, at the last position, at `pos`, or (None) at all positions.

    Examples:
        >>> logit_lens.lens_tokens(model, prompt, top=1)
        layer  0
        embed  ' to' 1.00
        0      ' to' 0.98
        1      ' to' 0.92
        2      ' to' 0.87
        3      ' Mary' 0.99
    """
    text = checked_text(model, prompts, pos)
    if len(text) != 1:
        raise HooklineError(f"lens_tokens takes one prompt, got {len(text)}: call it for each")
    where = None if pos is not None else range(text.width)
    tokens, probs = top_tokens(model, lens_logits(lens_cache(model, text, pos), where), top)
    positions: list[Label] = [*text.labels(model)]
    layers = layer_labels(len(tokens) - 1)["layer"]
    return LensTokens(layers, positions if pos is None else [positions[pos]], tokens, probs)


def lens_cache(model: HookedModel, prompts: Prompts, pos: Place = None) -> ModelCache:
    """A run with the residual streams that the lens reads, at one position, some or all, and its logits."""
    names = [*stream_names(model.index), "unembed.hook_in", "unembed.hook_out"]
    with torch.no_grad():
        return model.run_with_cache(**prompts.call(model), names_filter=names, pos_slice=pos)[1]


@torch.no_grad()
def lens_logits(cache: ModelCache, where: Sequence[int] | None) -> Iterator[Float[Tensor, "layer batch pos vocab"]]:
    """The logits after each layer, in chunks of these positions; None if the cache has one position per row."""
    assert cache.logits is not None
    if where is None:
        yield cache.logit_lens()[:, :, None].float()
        return
    step = max(1, _ROOM // (4 * len(cache.logits) * cache.logits.shape[-1] * (cache.n_layers + 1)))
    for start in range(0, len(where), step):
        yield cache.logit_lens(pos_slice=list(where[start : start + step])).float()


def top_tokens(
    model: HookedModel, logits: Iterable[Float[Tensor, "layer 1 pos vocab"]], top: int, layers: Sequence[int] = ()
) -> tuple[list[list[list[str]]], Float[Tensor, "layer pos top"]]:
    """The likeliest tokens and their probabilities, after all layers or those with these indices."""
    if isinstance(top, bool) or not isinstance(top, int) or not 1 <= top <= model.cfg.d_vocab:
        raise HooklineError(f"top is the number of tokens to keep, from 1 to {model.cfg.d_vocab}, got {top!r}")
    chunks = [
        (chunk_logits[list(layers)] if layers else chunk_logits)[:, 0].softmax(-1).topk(top) for chunk_logits in logits
    ]
    ids = torch.cat([chunk.indices for chunk in chunks], 1).tolist()
    texts = {token: shown_token(model, token) for layer in ids for candidates in layer for token in candidates}
    tokens = [[[texts[token] for token in candidates] for candidates in layer] for layer in ids]
    return tokens, torch.cat([chunk.values for chunk in chunks], 1).cpu()


def shown_token(model: HookedModel, token: int) -> str:
    """A token as text, or its id without a tokenizer."""
    return str(token) if model.tokenizer is None else model.to_string([token])


MEASURES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "prob": lambda logits, ids: logits.softmax(-1).gather(-1, ids)[..., 0],
    "log_prob": lambda logits, ids: logits.log_softmax(-1).gather(-1, ids)[..., 0],
    "logit": lambda logits, ids: logits.gather(-1, ids)[..., 0],
    "rank": lambda logits, ids: (logits > logits.gather(-1, ids)).sum(-1),
}
