"""What parts of the model add to a logit while the stream itself, or what attention adds to it, is edited.

`logit_attribution` raises an error then, because its parts do not sum to the stream. Here the difference is a part of
its own: the edits.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import torch
from torch import Tensor

from hookline.engine.points import HookPoint
from hookline.experiments import logit_attribution
from hookline.experiments.core.answers import cached_run, checked_text
from hookline.explore.live_edits import applied, edited
from hookline.explore.question import Question
from hookline.model import HookedModel
from hookline.residual import ModelCache
from hookline.residual.stream import is_rounding

EDITS = "edits"
"""The label of what the edits of the stream add."""
_STREAM = re.compile(r"blocks\.\d+\.hook_resid_(pre|mid|post)|hook_(pos_)?embed")
_ATTENTION = re.compile(r"blocks\.\d+\.hook_attn_out")
"""Points whose edits leave an attention output that is not the sum of its heads."""


class LogitParts(NamedTuple):
    """What each component adds to a logit difference; with the bias, they sum to it."""

    labels: list[str]
    values: Tensor
    bias: float
    logit: float


class HeadParts(NamedTuple):
    """What each head adds to a logit difference, by layer; and what the edits of attention outputs add, if any."""

    layers: dict[int, Tensor]
    edits: float | None = None


def components(model: HookedModel, asked: Question, target: int, versus: int) -> LogitParts:
    """The components of a run, inside the context of its edits."""
    if not edits_stream(asked):
        found = logit_attribution.direct_logit_attribution(model, asked.prompt, target, versus, pos=asked.pos)
        labels = [str(label) for label in found.coords["component"]]
        return LogitParts(labels, found.values, float(found.info["bias"]), float(found.info["logit"]))
    cache = _run(model, asked)
    embeddings, first = cache.decompose_resid(0, return_labels=True)
    layers, others = cache.decompose_resid(incl_embeds=False, return_labels=True)
    labels, stack = [*first, *others], torch.cat([embeddings, layers])
    stream = cache["resid_post", cache.n_layers - 1]
    rest = stream - stack.sum(0)
    if not is_rounding(rest, stream):
        labels, stack = [*labels, EDITS], torch.cat([stack, rest[None]])
    assert cache.logits is not None
    logits = cache.logits.reshape(-1).float()
    return LogitParts(
        labels,
        cache.logit_attrs(stack, target, versus).reshape(len(labels)).float(),
        float(cache.logit_bias(target, versus)),
        float(logits[target] - logits[versus]),
    )


def heads(model: HookedModel, asked: Question, target: int, versus: int) -> HeadParts:
    """What each head adds in the run with the edits.

    Where an attention output is edited, the heads are as they were before that edit, and the edit is a part of its own.
    """
    points = list(dict.fromkeys(edit.point for edit in asked.active if _ATTENTION.fullmatch(edit.point)))
    if not points and not edits_stream(asked):
        with edited(model, asked):
            found = logit_attribution.direct_logit_attribution(
                model, asked.prompt, target, versus, of="heads", pos=asked.pos
            )
        return HeadParts({int(layer): row for layer, row in zip(found.coords["layer"], found.values, strict=True)})
    before: dict[str, Tensor] = {}

    def keep(x: Tensor, hook: HookPoint) -> None:
        before[hook.name] = x[:, asked.pos].clone()

    with applied(model, [(point, keep) for point in points]), edited(model, asked):  # in this order at a point
        cache = _run(model, asked)
    stack, labels = cache.stack_head_results(return_labels=True)
    values = cache.logit_attrs(stack, target, versus).reshape(len(labels)).float()
    layers: dict[int, list[Tensor]] = {}
    for label, value in zip(labels, values, strict=True):
        layers.setdefault(int(label[1:].partition("H")[0]), []).append(value)
    changes = [float(cache.logit_attrs(cache[point] - before[point], target, versus)) for point in points]
    return HeadParts({layer: torch.stack(each) for layer, each in layers.items()}, sum(changes) if points else None)


def edits_stream(asked: Question) -> bool:
    """Whether an edit that is switched on changes the stream itself."""
    return any(_STREAM.fullmatch(edit.point) for edit in asked.active)


def _run(model: HookedModel, asked: Question) -> ModelCache:
    return cached_run(model, checked_text(model, asked.prompt, asked.pos), asked.pos)
