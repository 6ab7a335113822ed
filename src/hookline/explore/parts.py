"""What parts of the model add to a logit while the stream itself, or what attention adds to it, is edited.

`logit_attribution` raises an error then, because its parts do not sum to the stream. Here the difference is a part of
its own: the edits.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import torch
from torch import Tensor

from hookline.engine import HookPoint
from hookline.errors import HooklineError
from hookline.experiments.core.answers import cached_run, checked_text
from hookline.explore.live_edits import applied, edited
from hookline.explore.prompt_inputs import prompt_of
from hookline.explore.question import Question
from hookline.explore.shared_runs import run_at_position
from hookline.model import HookedModel
from hookline.residual import ModelCache
from hookline.residual.stream import is_rounding

EDITS = "edits"
"""The label of what the edits of the stream add."""
_STREAM = re.compile(r"blocks\.\d+\.hook_resid_(pre|mid|post)|hook_(pos_)?embed")
_ATTENTION = re.compile(r"blocks\.\d+\.hook_attn_out")
"""Points whose edits leave an attention output that is not the sum of its heads."""
_HEAD = re.compile(r"L(\d+)H\d+")


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


def components(model: HookedModel, question: Question, target: int, versus: int) -> LogitParts:
    """The components of the run with the edits."""
    cache = run_at_position(model, question)
    labels, stack = _with_edits(cache) if edits_stream(question) else cache.decompose_resid(return_labels=True)[::-1]
    return LogitParts(
        labels,
        cache.logit_attrs(stack, target, versus).reshape(len(labels)).float(),
        float(cache.logit_bias(target, versus)),
        _logit(cache, question, target, versus),
    )


def _logit(cache: ModelCache, question: Question, target: int, versus: int) -> float:
    """The logit difference of the run; raises if an edit after the stream has made it another than the stream's."""
    assert cache.logits is not None
    both = cache.logits.reshape(-1)[[target, versus]]
    logit = both[0].float() - both[1].float()
    if question.active:
        stream = cache._stream(cache.n_layers)[None]
        read = cache.logit_attrs(stream, target, versus).float().sum() + float(cache.logit_bias(target, versus))
        if not is_rounding(read - logit, both):
            raise HooklineError(
                f"the logits are edited after the residual stream: its parts sum to {float(read):.3f}, the logit "
                f"difference is {float(logit):.3f}. Disable edits at the final norm and at the unembedding"
            )
    return float(logit)


def _with_edits(cache: ModelCache) -> tuple[list[str], Tensor]:
    embeddings, first = cache.decompose_resid(0, return_labels=True)
    layers, others = cache.decompose_resid(incl_embeds=False, return_labels=True)
    labels, stack = [*first, *others], torch.cat([embeddings, layers])
    stream = cache["resid_post", cache.n_layers - 1]
    rest = stream - stack.sum(0)
    return (labels, stack) if is_rounding(rest, stream) else ([*labels, EDITS], torch.cat([stack, rest[None]]))


def heads(model: HookedModel, question: Question, target: int, versus: int) -> HeadParts:
    """What each head adds in the run with the edits.

    Where an attention output is edited, the heads are as they were before that edit, and the edit is a part of its own.
    """
    points = list(dict.fromkeys(edit.point for edit in question.active if _ATTENTION.fullmatch(edit.point)))
    before: dict[str, Tensor] = {}

    def keep(x: Tensor, hook: HookPoint) -> None:
        before[hook.name] = x[:, question.pos].clone()

    if points:
        with applied(model, [(point, keep) for point in points]), edited(model, question):  # in this order at a point
            cache = cached_run(model, checked_text(model, prompt_of(model, question), question.pos), question.pos)
    else:
        cache = run_at_position(model, question)
    if points or edits_stream(question):
        stack, labels = cache.stack_head_results(return_labels=True)
    else:  # raises if they do not sum to the stream
        stack, labels = cache.get_full_resid_decomposition(expand_neurons=False, return_labels=True)
    _logit(cache, question, target, versus)  # raises if the parts would not sum to it
    values = cache.logit_attrs(stack, target, versus).reshape(len(labels)).float()
    layers: dict[int, list[Tensor]] = {}
    for label, value in zip(labels, values, strict=True):
        if head := _HEAD.fullmatch(label):
            layers.setdefault(int(head[1]), []).append(value)
    changes = [float(cache.logit_attrs(cache[point] - before[point], target, versus)) for point in points]
    return HeadParts(
        {layer: torch.stack(head_values) for layer, head_values in layers.items()}, sum(changes) if points else None
    )


def edits_stream(question: Question) -> bool:
    """Whether an edit that is switched on changes the stream itself."""
    return any(_STREAM.fullmatch(edit.point) for edit in question.active)
