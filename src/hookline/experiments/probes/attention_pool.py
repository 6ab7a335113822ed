"""Probes that pool: a query weighs the positions of a text by attention, and the pooled activation is classified.

The score of a class is linear in the pooled activation, so it is the same pool of the scores of the tokens: what is
trained and what is watched are two numbers per token, its logit `x · query` and its score `x · w + b`.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import cos, pi

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from hookline.experiments.probes.linear_fits import Linear

_STEPS, _RATE, _DECAYS = 200, 0.05, (0.9, 0.99)
_TINY = 1e-6
"""Slopes and deviations below this are noise: Adam would amplify them."""


@dataclass(frozen=True, eq=False)
class Pooled:
    """Classifiers of pooled activations, one for each problem."""

    queries: Float[Tensor, "problem d"]
    linear: Linear

    def scores(self, x: Float[Tensor, "row d"], text: Int[Tensor, " row"]) -> Float[Tensor, "problem text class"]:
        """The scores of all classes of texts, whose numbers the rows have."""
        weights = text_softmax(x @ self.queries.T, text)
        return text_sums(self.linear.scores(x).permute(1, 2, 0) * weights[:, None], text).permute(2, 0, 1)


def text_softmax(logits: Float[Tensor, "row problem"], text: Int[Tensor, " row"]) -> Float[Tensor, "row problem"]:
    """The softmax of the rows of each text."""
    texts = int(text.max()) + 1
    index = text[:, None].expand_as(logits)
    highest = logits.new_full((texts, logits.shape[1]), -torch.inf).scatter_reduce(0, index, logits, "amax")
    powers = (logits - highest[text]).exp()
    return powers / text_sums(powers, text)[text]


def text_sums(values: Float[Tensor, "row ..."], text: Int[Tensor, " row"]) -> Float[Tensor, "text ..."]:
    """The sum over the rows of each text."""
    return values.new_zeros(int(text.max()) + 1, *values.shape[1:]).index_add(0, text, values)


def attention_pool(
    x: Float[Tensor, "row d"], text: Int[Tensor, " row"], labels: Float[Tensor, "problem text class"], penalty: float
) -> Pooled:
    """Multinomial logistic regression of the pooled activations, in which the query is learned along with the weights.

    The mean cross-entropy of the texts, plus `penalty` / 2 times the squared weights and query of standardized rows.
    All problems take the same number of steps of Adam from zero, where the pool is the mean; the rate falls as a
    cosine. Nothing is random.
    """
    mean, std = x.mean(0), x.std(0, correction=0)
    std = torch.where(std > _TINY * std.max().clamp_min(1e-30), std, torch.inf)
    problems, texts, classes = labels.shape
    rows, targets = ((x - mean) / std).float(), labels.permute(1, 2, 0).float()
    weights, bias = rows.new_zeros(x.shape[1], classes + 1, problems), rows.new_zeros(classes, problems)
    moments = [[torch.zeros_like(parameter) for parameter in (weights, bias)] for _ in _DECAYS]
    for step in range(1, _STEPS + 1):
        values = (rows @ weights.flatten(1)).view(-1, classes + 1, problems)
        tokens, share = values[:, :-1], text_softmax(values[:, -1], text)
        scores = text_sums(tokens * share[:, None], text)
        error = ((scores + bias).softmax(1) - targets) / texts
        toward = ((tokens - scores[text]) * error[text]).sum(1)
        slopes = torch.cat([error[text], toward[:, None]], 1) * share[:, None]
        gradient = (rows.T @ slopes.flatten(1)).view_as(weights) + penalty * weights
        rate = _RATE * (1 + cos(pi * (step - 1) / _STEPS)) / 2
        for number, (parameter, slope) in enumerate(((weights, gradient), (bias, error.sum(0)))):
            _adam(parameter, slope, moments[0][number], moments[1][number], step, rate)
    queries, directions = weights[:, -1].T.to(x) / std, weights[:, :-1].permute(2, 1, 0).to(x) / std
    return Pooled(queries, Linear(directions, bias.T.to(x) - directions @ mean))


def _adam(parameter: Tensor, slope: Tensor, first: Tensor, second: Tensor, step: int, rate: float) -> None:
    fast, slow = _DECAYS
    first.lerp_(slope, 1 - fast)
    second.lerp_(slope**2, 1 - slow)
    root = (second / (1 - slow**step)).sqrt() + _TINY
    parameter.sub_(first / (1 - fast**step) / root, alpha=rate)


class RunningPool:
    """The score of a text so far at each of its tokens: the pool over the tokens up to that one, piece by piece.

    Keeps three logarithms per row: of the sums of the powers, and of their products with the scores above and below 0.
    """

    def __init__(self) -> None:
        self._sums: Float[Tensor, "sum row"] | None = None

    def scores(
        self, values: Float[Tensor, "row column 2"], is_text: Bool[Tensor, "row column"]
    ) -> Float[Tensor, "row column"]:
        """The scores of some more columns, of their scores and logits; NaN before the first token of a row."""
        tokens, logits = values.double().unbind(-1)
        logits = logits.masked_fill(~is_text.to(logits.device), -torch.inf)
        parts = torch.stack([logits, logits + tokens.clamp_min(0).log(), logits + (-tokens).clamp_min(0).log()])
        before = parts.new_full(parts.shape[:2], -torch.inf) if self._sums is None else self._sums.to(parts.device)
        total, above, below = sums = torch.cat([before[..., None], parts], -1).logcumsumexp(-1)[..., 1:]
        self._sums = sums[..., -1] if sums.shape[-1] else before
        return ((above - total).exp() - (below - total).exp()).to(values.dtype)
