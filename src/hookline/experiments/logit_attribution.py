"""Logits taken apart: what each part of the model adds to one. What they would be after each layer is in `lens.py`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any, Literal, TypeAlias

import torch
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
    next_ids,
)
from hookline.experiments.core.labels import Label, about
from hookline.experiments.core.prompts import Prompt
from hookline.experiments.logit_lens import LensTokens, lens_tokens, logit_lens
from hookline.experiments.result import Result
from hookline.model import HookedModel
from hookline.residual import ModelCache

__all__ = ["LensTokens", "attribute", "lens_tokens", "logit_lens"]

By: TypeAlias = Literal["layer", "component", "head", "neuron"]

_ROOM = 2**28
"""Bytes of what neurons add that are there at a time."""


@torch.no_grad()
def attribute(
    model: HookedModel,
    prompts: Prompt,
    tokens: Answers | None = None,
    wrong: Answers | None = None,
    *,
    by: By = "component",
    layer: int | None = None,
    pos: int | None = -1,
    per_example: bool = False,
) -> Result:
    """What each part of the model adds by itself to the logit of a token, or to its lead over a wrong one.

        from hookline.experiments import logits
        logits.attribute(model, prompt, " Mary", " John", by="head").top(3)       # axes layer and head

    The parts are, by "component", each attention, MLP and embedding; by "layer", what is in each together, and the
    embeddings as "embed"; by "head" or "neuron" each of those, of all layers or of one `layer`. Tokens are one for all
    prompts or one for each; without, those that come next in the prompt. `pos` is counted in each prompt; None is all
    positions, an axis `pos`. The values sum, with `info["bias"]` (of the readout) and, by head or neuron,
    `info["rest"]` (all other parts), to `info["logit"]`. Where they cannot, because the readout is not linear or the
    stream itself is normed, it is refused.
    """
    if by not in _PARTS:
        raise HooklineError(f"by is one of {', '.join(map(repr, _PARTS))}, not {by!r}")
    layer = _checked_layer(model, layer, by)
    text = checked_text(model, prompts, pos)
    ids = next_ids(text, pos) if tokens is None else answer_ids(model, text, tokens, pos)
    others = None if wrong is None else answer_ids(model, text, wrong, pos)
    is_cut = tokens is None and pos is None  # after the last token comes none
    if others is not None and is_cut and others.ndim == 2:
        others = others[:, :-1]
    cache = cached_run(model, text, slice(0, -1) if is_cut else pos)
    of = _Lead(cache, ids, others)
    parts, coords = _PARTS[by](of, layer)
    info: dict[str, Any] = {"by": by, "tokens": ids.tolist(), "bias": of.bias, "logit": of.logit}
    info |= about(model, f"direct logit attribution by {by}")
    if others is not None:
        info["wrong"] = others.tolist()
    if by in ("head", "neuron"):
        every = of.attrs(cache.decompose_resid()).sum(0)
        info["rest"] = every - parts.sum(tuple(range(len(coords))))
    if layer is not None:
        parts, coords = parts[0], {axis: labels for axis, labels in coords.items() if axis != "layer"}
    labels: list[Label] = [*text.labels(model)]
    places = {} if pos is not None else {"pos": labels[:-1] if is_cut else labels}
    name = "logit" if others is None else "logit_diff"
    return laid_out(parts, coords, places, name, info, per_example=per_example)


def _checked_layer(model: HookedModel, layer: int | None, by: By) -> int | None:
    if layer is None:
        return None
    if by not in ("head", "neuron"):
        raise HooklineError(f'layer={layer} chooses heads or neurons, but by={by!r}: say by="head" or by="neuron"')
    n = model.cfg.n_layers
    if layer not in range(-n, n):
        raise HooklineError(f"layer {layer}, but the model has {n}: 0 to {n - 1}")
    return layer % n


class _Lead:
    """The logit of tokens, or their lead over others, in a run."""

    def __init__(self, cache: ModelCache, ids: Tensor, others: Tensor | None) -> None:
        assert cache.logits is not None
        self.cache, self._tokens = cache, (ids, others)
        shape = cache.logits.shape[:-1]
        self.bias = beside(cache.logit_bias(ids), shape)
        self.logit = _of(cache.logits, ids)
        if others is not None:
            if bool((beside(ids, shape) == beside(others, shape)).any()):
                raise HooklineError("the token and the wrong one are the same somewhere: neither leads there")
            self.bias = self.bias - beside(cache.logit_bias(others), shape)
            self.logit = self.logit - _of(cache.logits, others)

    def attrs(self, stack: Tensor) -> Tensor:
        """What each part of a stack adds to it."""
        return self.cache.logit_attrs(stack, *self._tokens)


def _of(logits: Tensor, ids: Tensor) -> Tensor:
    return logits.float().gather(-1, beside(ids, logits.shape[:-1])[..., None])[..., 0]


_Found: TypeAlias = tuple[Tensor, dict[str, list[Label]]]
"""What parts add, with their axes first, and the labels of those."""


def _by_component(of: _Lead, _layer: int | None) -> _Found:
    stack, labels = of.cache.decompose_resid(return_labels=True)
    return of.attrs(stack), {"component": labels}


def _by_layer(of: _Lead, _layer: int | None) -> _Found:
    stack, labels = of.cache.decompose_resid(return_labels=True)
    parts = of.attrs(stack)
    values = parts.new_zeros(of.cache.n_layers + 1, *parts.shape[1:])
    for label, part in zip(labels, parts, strict=True):
        number, _, _ = label.partition("_")
        values[int(number) + 1 if number.isdigit() else 0] += part
    return values, layer_labels(of.cache.n_layers)


def _by_head(of: _Lead, layer: int | None) -> _Found:
    stack, labels = of.cache.get_full_resid_decomposition(expand_neurons=False, return_labels=True)
    found: dict[int, list[Tensor]] = {}
    for label, part in zip(labels, of.attrs(stack), strict=True):
        head = re.fullmatch(r"L(\d+)H\d+", label)
        if head and layer in (None, int(head[1])):
            found.setdefault(int(head[1]), []).append(part)
    return _by_layers(found, "head", layer)


def _by_neuron(of: _Lead, layer: int | None) -> _Found:
    layers = range(of.cache.n_layers) if layer is None else [layer]
    having = [each for each in layers if layer is not None or of.cache._has(each, "mlp.hook_post")]
    return _by_layers({each: list(_neurons(of, each)) for each in having}, "neuron", layer)


def _neurons(of: _Lead, layer: int) -> Iterator[Tensor]:
    """What each neuron of a layer adds, a number of them at a time."""
    step = max(1, _ROOM // (4 * of.cache["resid_post", layer].numel()))
    for start in range(0, of.cache["post", layer].shape[-1], step):
        yield from of.attrs(of.cache.get_neuron_results(layer, slice(start, start + step)).movedim(-2, 0))


def _by_layers(found: dict[int, list[Tensor]], axis: str, layer: int | None) -> _Found:
    counts = {each: len(parts) for each, parts in found.items()}
    if not counts:
        raise HooklineError(f"no layer of this model has {axis}s" if layer is None else f"layer {layer} has no {axis}s")
    if len({*counts.values()}) > 1:
        raise HooklineError(f"the layers differ in how many {axis}s they have, {counts}: choose one, layer=…")
    values = torch.stack([torch.stack(parts) for parts in found.values()])
    return values, {"layer": list(found), axis: list(range(values.shape[1]))}


_PARTS: dict[str, Callable[[_Lead, int | None], _Found]] = {
    "component": _by_component,
    "layer": _by_layer,
    "head": _by_head,
    "neuron": _by_neuron,
}
