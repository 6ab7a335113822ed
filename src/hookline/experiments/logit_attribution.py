"""Direct logit attribution: what each part of the model adds to a logit. The logit lens is in `logit_lens.py`."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from hookline.errors import HooklineError
from hookline.experiments.core.aligned import PromptPositions
from hookline.experiments.core.answers import (
    Answers,
    answer_ids,
    at_each,
    beside,
    cached_run,
    checked_text,
    laid_out,
    layer_labels,
    next_ids,
)
from hookline.experiments.core.labels import Label, about
from hookline.experiments.core.prompts import Prompt
from hookline.experiments.result import Result
from hookline.model import HookedModel
from hookline.residual import ModelCache

__all__ = ["direct_logit_attribution"]

Parts: TypeAlias = Literal["layers", "components", "heads", "neurons"]

_ROOM = 2**28
"""Bytes of neuron contributions that are computed at a time."""


def __dir__() -> list[str]:
    return __all__


@torch.no_grad()
def direct_logit_attribution(
    model: HookedModel,
    prompts: Prompt,
    tokens: Answers | None = None,
    wrong: Answers | None = None,
    *,
    of: Parts = "components",
    layers: int | None = None,
    pos: int | Tensor | None = -1,
    positions: PromptPositions = None,
    per_example: bool = False,
) -> Result:
    """What each part of the model directly adds to the logit of a token, or to its difference to a wrong token's.

        >>> logit_attribution.direct_logit_attribution(model, prompt, " Mary", " John", of="heads").top(2)
        layer  head  value
        3      4     2.62
        3      7     -1.736

    The parts are `of` "components" (each attention, MLP and embedding), "layers" (everything a layer adds, and the
    embeddings as "embed"), "heads" or "neurons"; of heads and neurons, `layers` selects one layer, without an axis for
    it. Tokens are one for all prompts or one per prompt; by default, the next token of the prompt. `pos` counts within
    each prompt; None is all positions, as an axis `pos`; `positions` are such an axis in prompts of any lengths, as in
    `patching.sweep`, with one run for each. The values sum, with `info["bias"]` (of the unembedding) and,
    for heads and neurons, `info["rest"]` (all other parts), to `info["logit"]`. Where they cannot, because the readout
    is not linear or the model normalizes the stream itself, an error says so.
    """
    if positions is not None:
        read = partial(direct_logit_attribution, model, prompts, tokens, wrong, of=of, layers=layers)
        return at_each(model, prompts, positions, lambda place: read(pos=place, per_example=per_example))
    if of not in _PARTS:
        raise HooklineError(f"of is one of {', '.join(map(repr, _PARTS))}, got {of!r}")
    layer = _checked_layer(model, layers, of)
    text = checked_text(model, prompts, pos)
    ids = next_ids(text, pos) if tokens is None else answer_ids(model, text, tokens, pos)
    others = None if wrong is None else answer_ids(model, text, wrong, pos)
    is_cut = tokens is None and pos is None  # after the last token comes none
    if others is not None and is_cut and others.ndim == 2:
        others = others[:, :-1]
    cache = cached_run(model, text, slice(0, -1) if is_cut else pos)
    bias, logit = _readout(cache, ids)
    if others is not None:
        if bool((beside(ids, logit.shape) == beside(others, logit.shape)).any()):
            raise HooklineError("the token and the wrong token are the same in a row: their difference is 0 there")
        less = _readout(cache, others)
        bias, logit = bias - less[0], logit - less[1]
    attrs = partial(cache.logit_attrs, tokens=ids, incorrect_tokens=others)
    parts, coords = _PARTS[of](cache, attrs, layer)
    info: dict[str, Any] = {"by": of.removesuffix("s"), "tokens": ids.tolist(), "bias": bias, "logit": logit}
    info["prompts"] = text.checksums
    info |= about(model, f"direct logit attribution of {of}") | ({} if others is None else {"wrong": others.tolist()})
    if of in ("heads", "neurons"):
        info["rest"] = attrs(cache.decompose_resid()).sum(0) - parts.sum(tuple(range(len(coords))))
    if layer is not None:
        parts, coords = parts[0], {axis: labels for axis, labels in coords.items() if axis != "layer"}
    labels: list[Label] = [*text.labels(model)]
    places = {} if pos is not None else {"pos": labels[:-1] if is_cut else labels}
    name = "logit" if others is None else "logit_diff"
    return laid_out(parts, coords, places, name, info, per_example=per_example)


def _readout(cache: ModelCache, ids: Tensor) -> tuple[Tensor, Tensor]:
    """The bias and the logit of tokens, by row and position."""
    assert cache.logits is not None
    shape = cache.logits.shape[:-1]
    return beside(cache.logit_bias(ids), shape), cache.logits.float().gather(-1, beside(ids, shape)[..., None])[..., 0]


def _checked_layer(model: HookedModel, layer: int | None, of: Parts) -> int | None:
    if layer is None:
        return None
    if of not in ("heads", "neurons"):
        raise HooklineError(f'layers={layer} selects heads or neurons, but of={of!r}: use of="heads" or of="neurons"')
    n = model.cfg.n_layers
    if layer not in range(-n, n):
        raise HooklineError(f"layer {layer} is out of range: the model has layers 0 to {n - 1}")
    return layer % n


_Found: TypeAlias = tuple[Tensor, dict[str, list[Label]]]
"""What the parts add, with their axes first, and the labels of these axes."""
_Attrs: TypeAlias = Callable[[Tensor], Tensor]


def _by_component(cache: ModelCache, attrs: _Attrs, _layer: int | None) -> _Found:
    stack, labels = cache.decompose_resid(return_labels=True)
    return attrs(stack), {"component": labels}


def _by_layer(cache: ModelCache, attrs: _Attrs, layer: int | None) -> _Found:
    parts, coords = _by_component(cache, attrs, layer)
    values = parts.new_zeros(cache.n_layers + 1, *parts.shape[1:])
    for label, part in zip(coords["component"], parts, strict=True):
        number, _, _ = str(label).partition("_")
        values[int(number) + 1 if number.isdigit() else 0] += part
    return values, layer_labels(cache.n_layers)


def _by_head(cache: ModelCache, attrs: _Attrs, layer: int | None) -> _Found:
    stack, labels = cache.get_full_resid_decomposition(expand_neurons=False, return_labels=True)
    parts_by_layer: dict[int, list[Tensor]] = {}
    for label, part in zip(labels, attrs(stack), strict=True):
        head = re.fullmatch(r"L(\d+)H\d+", label)
        if head and layer in (None, int(head[1])):
            parts_by_layer.setdefault(int(head[1]), []).append(part)
    return _by_layers(parts_by_layer, "head", layer)


def _by_neuron(cache: ModelCache, attrs: _Attrs, layer: int | None) -> _Found:
    layers = range(cache.n_layers) if layer is None else [layer]
    parts_by_layer = {}
    for number in layers:
        if layer is not None or cache._has(number, "mlp.hook_post"):
            step = max(1, _ROOM // (4 * cache["resid_post", number].numel()))
            starts = range(0, cache["post", number].shape[-1], step)
            chunks = (cache.get_neuron_results(number, slice(start, start + step)).movedim(-2, 0) for start in starts)
            parts_by_layer[number] = [part for chunk in chunks for part in attrs(chunk)]
    return _by_layers(parts_by_layer, "neuron", layer)


def _by_layers(parts_by_layer: dict[int, list[Tensor]], axis: str, layer: int | None) -> _Found:
    counts = {number: len(parts) for number, parts in parts_by_layer.items()}
    if not counts:
        raise HooklineError(f"no layer of this model has {axis}s" if layer is None else f"layer {layer} has no {axis}s")
    if len({*counts.values()}) > 1:
        raise HooklineError(f"the layers differ in their number of {axis}s, {counts}: select one, layers=…")
    values = torch.stack([torch.stack(parts) for parts in parts_by_layer.values()])
    return values, {"layer": list(parts_by_layer), axis: list(range(values.shape[1]))}


_PARTS: dict[str, Callable[[ModelCache, _Attrs, int | None], _Found]] = {
    "components": _by_component,
    "layers": _by_layer,
    "heads": _by_head,
    "neurons": _by_neuron,
}
