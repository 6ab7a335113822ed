"""What parts of the model add to a logit while the stream itself is edited.

`logit_attribution` raises an error then, because its parts do not sum to the stream. Here the difference is a part of
its own: the edits.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import torch
from torch import Tensor

from hookline.experiments import logit_attribution
from hookline.experiments.core.answers import cached_run, checked_text
from hookline.explore.prompt_inputs import prompt_of
from hookline.explore.question import Question
from hookline.model import HookedModel
from hookline.residual import ModelCache
from hookline.residual.stream import is_rounding

EDITS = "edits"
"""The label of what the edits of the stream add."""
_STREAM = re.compile(r"blocks\.\d+\.hook_resid_(pre|mid|post)|hook_(pos_)?embed")
_BESIDE = re.compile(r"blocks\.\d+\.(hook_mlp_out|attn\.hook_z|attn\.hook_pattern|mlp\.hook_(pre|post))")
"""Points whose edits leave each attention output the sum of its heads."""


class LogitParts(NamedTuple):
    """What each component adds to a logit difference; with the bias, they sum to it."""

    labels: list[str]
    values: Tensor
    bias: float
    logit: float


def components(model: HookedModel, asked: Question, target: int, versus: int) -> LogitParts:
    """The components of a run, inside the context of its edits."""
    if not edits_stream(asked):
        prompt = prompt_of(model, asked)
        found = logit_attribution.direct_logit_attribution(model, prompt, target, versus, pos=asked.pos)
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


def heads(model: HookedModel, asked: Question, target: int, versus: int) -> dict[int, Tensor]:
    """What each head adds, by layer, inside the context of the edits."""
    if not edits_stream(asked) or not all(_leaves_heads(edit.point) for edit in asked.active):
        found = logit_attribution.direct_logit_attribution(
            model, prompt_of(model, asked), target, versus, of="heads", pos=asked.pos
        )
        return {int(layer): row for layer, row in zip(found.coords["layer"], found.values, strict=True)}
    cache = _run(model, asked)
    stack, labels = cache.stack_head_results(return_labels=True)
    values = cache.logit_attrs(stack, target, versus).reshape(len(labels)).float()
    layers: dict[int, list[Tensor]] = {}
    for label, value in zip(labels, values, strict=True):
        layers.setdefault(int(label[1:].partition("H")[0]), []).append(value)
    return {layer: torch.stack(each) for layer, each in layers.items()}


def edits_stream(asked: Question) -> bool:
    """Whether an edit that is switched on changes the stream itself."""
    return any(_STREAM.fullmatch(edit.point) for edit in asked.active)


def _leaves_heads(point: str) -> bool:
    return bool(_STREAM.fullmatch(point) or _BESIDE.fullmatch(point))


def _run(model: HookedModel, asked: Question) -> ModelCache:
    return cached_run(model, checked_text(model, prompt_of(model, asked), asked.pos), asked.pos)
