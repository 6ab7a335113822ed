"""The views of the explorer: functions from a model and a question to data that can be sent as JSON.

    answer(model, Question("next", prompt="When Mary and John went to the store, John gave a drink to"))

Tensors are sent as float32, so the page has the library's own numbers.
"""

from __future__ import annotations

import difflib
import math
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from hookline.errors import HooklineError
from hookline.experiments import ablation, head_detectors, logit_lens, metrics, patching
from hookline.experiments.result import Result
from hookline.explore import parts
from hookline.explore.attached_probe import AttachedProbe
from hookline.explore.attached_saes import AttachedSaes
from hookline.explore.feature_views import FEATURE_VIEWS
from hookline.explore.image_views import image_layouts, tower_boxes
from hookline.explore.live_edits import edited, edited_any_text
from hookline.explore.prompt_inputs import (
    GivenPrompt,
    keywords,
    other_of,
    placeholders,
    prompt_of,
    tokens_in,
)
from hookline.explore.question import Question
from hookline.explore.remembered import remembered
from hookline.explore.shared_runs import clean_logits, logits_at_position, logits_of_lens, run_with_points
from hookline.model import HookedModel
from hookline.pages.tensors import packed_tensor

Data: TypeAlias = dict[str, Any]

MOST_NEW = 200
"""Tokens to generate."""
MOST_LENS = 2**26
"""Logits that the lens reads at a time: layers by positions by tokens of the vocabulary."""
MEASURES = ("attribution", "ablation", "attention", "previous_token", "duplicate_token", "induction")
SWEEPS: dict[str, tuple[str, tuple[str, ...]]] = {
    "stream": ("resid_pre", ("layer", "pos")),
    "attention": ("attn_out", ("layer", "pos")),
    "mlp": ("mlp_out", ("layer", "pos")),
    "heads": ("z", ("layer", "head")),
}


def answer(model: HookedModel, question: Question) -> Data:
    """The view that was asked for, with the warnings that came up on the way as `notes`."""
    if question.view not in VIEWS:
        raise HooklineError(f"there is no view {question.view!r}: there are {', '.join(VIEWS)}")
    with own_warnings() as notes, torch.no_grad():
        data = VIEWS[question.view](model, question)
    return {"view": question.view, **_finite(data), "notes": list(dict.fromkeys(notes))}


@contextmanager
def own_warnings() -> Iterator[list[str]]:
    """The warnings of this thread, which are not shown; those of other threads are shown as before."""
    thread_id, messages = threading.get_ident(), list[str]()
    with warnings.catch_warnings():
        show = warnings.showwarning

        def keep(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
            if threading.get_ident() != thread_id:
                show(message, category, *where, **more)
            elif category is not DeprecationWarning:
                messages.append(str(message))

        warnings.simplefilter("always")
        warnings.showwarning = keep
        yield messages


def _finite(data: Data) -> Data:
    """The data with None for NaN and infinity, which JSON does not have."""
    cleaned = {key: _finite(value) if isinstance(value, dict) else value for key, value in data.items()}
    return {key: None if isinstance(x, float) and not math.isfinite(x) else x for key, x in cleaned.items()}


def about_model(
    model: HookedModel, name: str, saes: AttachedSaes | None = None, probe: AttachedProbe | None = None
) -> Data:
    """What the page needs to know about the model."""
    cfg = model.cfg
    points = {point.name: point.axes for point in model.hook_dict.values() if point.axes}
    return {
        "model": name,
        "layers": cfg.n_layers,
        "heads": cfg.n_heads,
        "d_model": cfg.d_model,
        "context": cfg.n_ctx,
        "points": points,
        "placeholder": placeholders(model),
        "measures": list(MEASURES),
        "sweeps": list(SWEEPS),
        "probe": None if probe is None else probe.about(),
        "saes": [] if saes is None else saes.about(),
        "store": None if saes is None or saes.store is None else saes.store.path,
    }


def tokens_view(model: HookedModel, question: Question) -> Data:
    """The tokens of both prompts, and which of them are opposite each other."""
    first = _tokens(model, prompt_of(model, question), question.images)
    if not question.other:
        return {"tokens": first, "other": [], "aligned": []}
    second = _tokens(model, other_of(model, question), question.other_images)
    return {"tokens": first, "other": second, "aligned": aligned(first["ids"], second["ids"])}


def _tokens(model: HookedModel, prompt: GivenPrompt, images: tuple[str, ...]) -> Data:
    ids = tokens_in(model, prompt)[0].tolist()
    tokens: Data = {"ids": ids, "texts": [model.to_string([token]) for token in ids]}
    if not isinstance(prompt, str):
        tokens |= {"images": image_layouts(model, prompt, images), "tower": tower_boxes(model, prompt)}
    return tokens


def aligned(first: list[int], second: list[int]) -> list[list[int | None]]:
    """Pairs of positions in two lists of tokens, `[a, b]`; None where there is nothing opposite."""
    pairs: list[list[int | None]] = []
    for _, start, stop, begin, end in difflib.SequenceMatcher(None, first, second, autojunk=False).get_opcodes():
        for at in range(max(stop - start, end - begin)):
            pairs.append([start + at if start + at < stop else None, begin + at if begin + at < end else None])
    return pairs


def next_view(model: HookedModel, question: Question) -> Data:
    """The likeliest next tokens after a position, without the edits and with them, and the tokens to compare."""
    before = after = logits_at_position(model, question).float()
    if question.active:
        before = clean_logits(model, question).float()
    target, versus = answers(model, question, before)
    first, old = (x.topk(min(most, len(x))).indices.tolist() for x, most in ((after, 10), (before, 5)))
    shown = list(dict.fromkeys([*first, *old, target, versus]))
    return {
        "ids": shown,
        "texts": [model.to_string([token]) for token in shown],
        "before": packed_tensor(before.softmax(-1)[shown]),
        "after": packed_tensor(after.softmax(-1)[shown]),
        "logits": packed_tensor(torch.stack([before[shown], after[shown]])),
        "target": {"id": target, "text": model.to_string([target])},
        "versus": {"id": versus, "text": model.to_string([versus])},
    }


def answers(model: HookedModel, question: Question, logits: Tensor | None = None) -> tuple[int, int]:
    """The ids of the target and of the token that it is compared with.

    By default, they are the model's choice and, of a second prompt with another choice, that one; else its second.
    """
    target, versus = (_token_id(model, token) for token in (question.target, question.versus))
    if target is None or versus is None:
        logits = clean_logits(model, question) if logits is None else logits
        choices = logits.topk(min(3, len(logits))).indices.tolist()
        target = next((token for token in choices if token != versus), choices[0]) if target is None else target
        others = [*_choice_of_other(model, question), *choices] if versus is None else [versus]
        versus = next((token for token in others if token != target), target)
    if target == versus:
        raise HooklineError("the token and the one that it is compared with are the same: choose another")
    return target, versus


def _choice_of_other(model: HookedModel, question: Question) -> list[int]:
    logits = model(**keywords(other_of(model, question))) if question.other else torch.empty(1, 0, 0)
    return [int(logits[0, question.pos].argmax())] if question.pos in range(-logits.shape[1], logits.shape[1]) else []


def _token_id(model: HookedModel, token: int | str | None) -> int | None:
    if token is None or isinstance(token, int):
        return token
    return model.to_single_token(token)


def lens_view(model: HookedModel, question: Question) -> Data:
    """What each layer would say at each position: the likeliest tokens, with their probabilities.

    Of a long prompt, these are the positions from `question.start` on, as many as are read at a time.
    """
    length = tokens_in(model, prompt_of(model, question)).shape[1]
    count = min(length, max(8, MOST_LENS // ((model.cfg.n_layers + 1) * model.cfg.d_vocab)))
    start = min(max(0, question.pos % length - count + 1 if question.start is None else question.start), length - count)
    top, where = min(10, model.cfg.d_vocab), slice(start, start + count)
    logits = logits_of_lens(model, question, where).float()
    tokens, probs = logit_lens.top_tokens(model, [logits], top)
    words: dict[str, int] = {}
    cells = [[[words.setdefault(token, len(words)) for token in cell] for cell in row] for row in tokens]
    layers = ["embed", *range(model.cfg.n_layers)]
    read = {"layers": layers, "cells": cells, "words": list(words), "probs": packed_tensor(probs)}
    return {**read, "start": start, "length": length}


def heads_view(model: HookedModel, question: Question) -> Data:
    """One number for each head: see `MEASURES`."""
    if question.measure not in MEASURES:
        raise HooklineError(f"heads are measured by {', '.join(MEASURES)}, not {question.measure!r}")
    if question.measure == "attention":
        return {"measure": question.measure, **_rows(model, _attention_to(model, question))}
    if question.measure in head_detectors.KINDS:
        return remembered(
            model, question, ("heads", question.measure), partial(_detected, model, question, question.measure)
        )
    target, versus = answers(model, question)
    if question.measure == "attribution":
        head_parts = parts.heads(model, question, target, versus)
        return {"measure": question.measure, **_rows(model, head_parts.layers), "edits": head_parts.edits}
    return remembered(model, question, ("ablation", target, versus), lambda: _ablated(model, question, target, versus))


def _detected(model: HookedModel, question: Question, kind: head_detectors.Kind) -> Data:
    with edited_any_text(model, question):
        scores = head_detectors.head_scores(model, kinds=kind).isel(kind=0)
    return {"measure": kind, **_grid(model, scores)}


def _ablated(model: HookedModel, question: Question, target: int, versus: int) -> Data:
    with edited(model, question):
        metric = metrics.logit_diff(target, versus, pos=question.pos)
        lost = ablation.ablate(model, prompt_of(model, question), metric, progress=False)
    return {"measure": question.measure, **_grid(model, lost - lost.info["clean"]), "clean": lost.info["clean"]}


def _grid(model: HookedModel, result: Result) -> Data:
    """A result over layers and heads."""
    layers = [int(layer) for layer in result.coords["layer"]]
    return _rows(model, dict(zip(layers, result.values, strict=True)))


def _rows(model: HookedModel, rows: dict[int, Tensor]) -> Data:
    """A row for each layer; NaN where a layer has no head, or fewer than others."""
    if not rows:
        raise HooklineError("this model has no attention heads")
    values = torch.full((model.cfg.n_layers, max(map(len, rows.values()))), float("nan"))
    for layer, row in rows.items():
        values[layer, : len(row)] = row
    return {"values": packed_tensor(values)}


def _attention_to(model: HookedModel, question: Question) -> dict[int, Tensor]:
    patterns = _patterns(model, question)
    if not patterns:
        raise HooklineError("this model has no attention patterns")
    width = next(iter(patterns.values())).shape[-1]
    if question.pos not in range(-width, width) or question.src not in range(-width, width):
        raise HooklineError(f"positions {question.pos} and {question.src} are not both in a prompt of {width} tokens")
    return {layer: pattern[:, question.pos, question.src] for layer, pattern in patterns.items()}


def _patterns(model: HookedModel, question: Question) -> dict[int, Tensor]:
    """The attention of all heads, by layer: [head, query, key]."""
    names = {layer: name for layer in range(model.cfg.n_layers) if (name := _pattern(layer)) in model.hook_dict}
    if not names:
        return {}
    with torch.no_grad():
        cache = run_with_points(model, question, [*names.values()])
    return {layer: cache[name][0] for layer, name in names.items()}


def _pattern(layer: int) -> str:
    return f"blocks.{layer}.attn.hook_pattern"


def attention_view(model: HookedModel, question: Question) -> Data:
    """The attention of one head: [query, key]."""
    return _point(model, question, _pattern(question.layer), question.head)


def attention_views(model: HookedModel, question: Question) -> dict[tuple[int, int], Data]:
    """The attention of every head, by layer and head, from one run: as many answers as `attention_view` would give."""
    views_by_head = {}
    for layer, pattern in _patterns(model, question).items():
        point = model.point(_pattern(layer))
        for head in range(len(pattern)):
            views_by_head[layer, head] = {
                **{"view": "attention", **_matrix(point.name, point.axes, pattern, head)},
                **{"stream": point.stream, "rows": 1, "notes": []},
            }
    return views_by_head


def attribution_view(model: HookedModel, question: Question) -> Data:
    """What each component adds to the target's logit, minus what it adds to the other token's."""
    target, versus = answers(model, question)
    logit_parts = parts.components(model, question, target, versus)
    return {
        "components": logit_parts.labels,
        "values": packed_tensor(logit_parts.values),
        "bias": logit_parts.bias,
        "logit": logit_parts.logit,
    }


def point_view(model: HookedModel, question: Question) -> Data:
    """The activation at any point as a matrix; of points with heads, one head."""
    return _point(model, question, question.point, question.head)


def _point(model: HookedModel, question: Question, name: str, head: int) -> Data:
    point = model.point(name)
    x = run_with_points(model, question, [name])[name]
    rows = len(x)  # of the vision tower: images, or tiles of them
    if question.row not in range(rows):
        raise HooklineError(f"{name} has rows 0 to {rows - 1}, not {question.row}")
    return {**_matrix(name, point.axes, x[question.row], head), "stream": point.stream, "rows": rows}


def _matrix(name: str, all_axes: str, x: Tensor, head: int) -> Data:
    """An activation of one prompt; where it has heads, that of one."""
    axes = all_axes.split()[1:]
    for letter in ("h", "g"):
        if letter in axes:
            at = axes.index(letter)
            if head not in range(x.shape[at]):
                raise HooklineError(f"{name} has heads 0 to {x.shape[at] - 1}, not {head}")
            x = x.select(at, head)
            axes.remove(letter)
    if x.ndim == 1:
        x, axes = x[:, None], [*axes, "1"]
    if x.ndim != 2:
        raise HooklineError(f"{name} has the shape {list(x.shape)}, which is not a matrix: choose another point")
    return {"point": name, "axes": axes, "head": head, "values": packed_tensor(x)}


def scores_view(model: HookedModel, question: Question) -> Data:
    """The score of the explorer's probe at each token."""
    if question.probe is None:
        raise HooklineError(
            "scores need a probe: model.explore(prompt, probe=…) with the result of probes.fit, or hookline explore "
            "MODEL --probe FILE"
        )
    monitor = question.probe.at(question.point)
    name = model.point(monitor.point).name
    return {"point": name, "values": packed_tensor(monitor.read(run_with_points(model, question, [name])[name])[0])}


def patching_view(model: HookedModel, question: Question) -> Data:
    """The patching sweep from the prompt into the other one: 1 where a cell restores the whole effect."""
    if question.measure not in SWEEPS:
        raise HooklineError(f"patching is over {', '.join(SWEEPS)}, not {question.measure!r}")
    if not question.other:
        raise HooklineError("patching needs a second prompt: write one below the first")
    target, versus = answers(model, question)
    key = ("patching", question.measure, target, versus)
    return remembered(model, question, key, lambda: _patched(model, question, target, versus))


def _patched(model: HookedModel, question: Question, target: int, versus: int) -> Data:
    points, over = SWEEPS[question.measure]
    metric = metrics.logit_diff(target, versus, pos=question.pos)
    first, second = prompt_of(model, question), other_of(model, question)
    with edited(model, question):
        result = patching.sweep(model, first, second, metric, points=points, over=over, progress=False)
    return {
        "measure": question.measure,
        "over": list(over),
        "layers": result.coords["layer"],
        "values": packed_tensor(result.normalized.values),
        "clean": result.info["clean"],
        "corrupted": result.info["corrupted"],
    }


def generate_view(model: HookedModel, question: Question) -> Data:
    """The text that the model continues the prompt with, without the edits and with them."""
    if question.count not in range(1, MOST_NEW + 1):
        raise HooklineError(f"the number of new tokens is from 1 to {MOST_NEW}, got {question.count}")
    before = _continuation(model, replace(question, edits=()))
    return {"before": before, "after": _continuation(model, question) if question.active else before}


def _continuation(model: HookedModel, question: Question) -> list[str]:
    def generated() -> list[str]:
        prompt = prompt_of(model, question)
        tokens = tokens_in(model, prompt)
        inputs = keywords(tokens if isinstance(prompt, str) else prompt)
        start = 1 if model.anatomy.is_encoder_decoder else tokens.shape[1]  # a decoder begins with a token
        with edited(model, question):
            ids = model.generate(**inputs, max_new_tokens=question.count, do_sample=False)[0, start:].tolist()
        return [model.to_string([token]) for token in ids]

    return remembered(model, question, ("generate", question.count), generated)


VIEWS: dict[str, Callable[[HookedModel, Question], Data]] = {
    "tokens": tokens_view,
    "next": next_view,
    "lens": lens_view,
    "heads": heads_view,
    "attention": attention_view,
    "attribution": attribution_view,
    "point": point_view,
    "scores": scores_view,
    "patching": patching_view,
    "generate": generate_view,
    **FEATURE_VIEWS,
}
