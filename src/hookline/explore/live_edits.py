"""The page's edits as the library's, and as Python."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hookline import edits
from hookline.errors import HooklineError
from hookline.experiments import steering
from hookline.explore.feature_edits import edit_groups, script_saes, splice_of
from hookline.explore.question import LiveEdit, Question
from hookline.model import HookedModel

Hooks = list[Any]
"""Edits as `(name, edit)` pairs, and splices of autoencoders: what `run_with_hooks(fwd_hooks=…)` takes."""
_LAYER = re.compile(r"blocks\.(\d+)\.hook_(\w+)")


def edited(model: HookedModel, asked: Question) -> AbstractContextManager[Any]:
    """A context in which the edits that are switched on apply."""
    return applied(model, library_edits(model, asked))


def edited_any_text(model: HookedModel, asked: Question) -> AbstractContextManager[Any]:
    """The same for a text other than the prompt: without patches and without edits at single positions."""
    anywhere = tuple(edit for edit in asked.active if edit.pos is None and edit.kind != "patch")
    return edited(model, replace(asked, edits=anywhere))


def applied(model: HookedModel, hooks: Hooks) -> AbstractContextManager[Any]:
    """A context in which these edits apply."""
    return model.hooks(fwd_hooks=hooks) if hooks else nullcontext()


def library_edits(model: HookedModel, asked: Question, *, keep_features: bool = False) -> Hooks:
    """The edits that are switched on, one hook for each group, for `run_with_hooks(fwd_hooks=…)`."""
    return [
        (group[0].point, _made(model, asked, group[0]))
        if group[0].feature is None
        else splice_of(asked, group, keep_features=keep_features)
        for group in edit_groups(asked)
    ]


def _made(model: HookedModel, asked: Question, edit: LiveEdit) -> edits.DataEdit:
    model.point(edit.point)  # raises, with suggestions, if there is none
    where: dict[str, Any] = {"head": edit.head, "neuron": edit.neuron, "pos": edit.pos}
    if edit.kind == "zero":
        return edits.zero(**where)
    if edit.kind == "scale":
        return edits.scale(edit.amount, **where)
    if edit.kind == "set":
        return edits.replace(float(edit.amount), **where)
    if edit.kind == "mean":
        return edits.mean(_activation(model, asked.prompt, edit.point), **where)
    if edit.kind == "steer":
        return edits.add(_direction(model, edit), edit.amount, pos=edit.pos)
    value = _activation(model, asked.other, edit.point)
    where["pos"] = slice(0, _same_length(model, asked)) if edit.pos is None else edit.pos
    return edits.replace(value if edit.pos is None else _at(value, edit), **where)


@torch.no_grad()
def _activation(model: HookedModel, text: str, point: str) -> Tensor:
    if not text:
        raise HooklineError("patching needs a second prompt: write one below the first")
    return model.cache(text, names_filter=point)[point]


def _at(value: Tensor, edit: LiveEdit) -> Tensor:
    """The activation at the position of an edit, with all axes."""
    assert edit.pos is not None
    if edit.pos not in range(-value.shape[1], value.shape[1]):
        raise HooklineError(f"position {edit.pos} is out of range: the second prompt has {value.shape[1]} tokens")
    return value[:, edit.pos : edit.pos + 1 or None]


def _direction(model: HookedModel, edit: LiveEdit) -> Tensor:
    layer, kind = stream_point(edit)
    found = steering.contrast_vectors(model, edit.positive, edit.negative, points=kind, layers=[layer])
    return found.at(layer)


def stream_point(edit: LiveEdit) -> tuple[int, str]:
    """The layer and the kind of point at which a steering vector is added."""
    found = _LAYER.fullmatch(edit.point)
    if found is None:
        raise HooklineError(f"a steering vector is added at a point such as blocks.2.hook_resid_post, not {edit.point}")
    return int(found[1]), found[2]


def _same_length(model: HookedModel, asked: Question) -> int:
    first, second = (model.to_tokens(text).shape[1] for text in (asked.prompt, asked.other))
    if first != second:
        raise HooklineError(
            f"the prompts do not align: the first has {first} tokens, the second {second}. Patch one position, or "
            f"write prompts with the same number of tokens"
        )
    return first


def script(name: str, asked: Question) -> str:
    """A program that prints the same next-token probabilities as the page, with the edits that are switched on."""
    needs_other = any(edit.kind == "patch" for edit in asked.active)
    needs_steering = any(edit.kind == "steer" for edit in asked.active)
    lines = ["import hookline", *(["from hookline import edits"] if asked.active else [])]
    lines += ["from hookline.experiments import steering"] if needs_steering else []
    saes = script_saes(asked)
    lines += ["from hookline.sae import SparseAutoencoder"] if saes else []
    lines += ["", f"model = hookline.load({name!r})", f"prompt = {asked.prompt!r}"]
    lines += [f"other = {asked.other!r}"] if needs_other else []
    lines += [line for _, line in saes.values()]
    run = f"model(prompt)[0, {asked.pos}]"
    if asked.active:
        lines += ["", "fwd_hooks = [", *(f"    {_written_hook(group, saes)}," for group in edit_groups(asked)), "]"]
        run = f"model.run_with_hooks(prompt, fwd_hooks=fwd_hooks)[0, {asked.pos}]"
    lines += [f"probs, ids = {run}.softmax(-1).topk(10)"]
    lines += ["for prob, token in zip(probs.tolist(), ids.tolist()):"]
    lines += ['    print(f"{prob:.4f} {model.to_string([token])!r}")']
    return "\n".join(lines) + "\n"


def _written_hook(group: list[LiveEdit], saes: dict[str, tuple[str, str]]) -> str:
    """An edit, or the edits of features that one splice makes, as Python."""
    first = group[0]
    if first.feature is None:
        return f"({first.point!r}, {_written(first)})"
    changes = ", ".join(_written(replace(edit, neuron=edit.feature, feature=None)) for edit in group)
    return f"{saes[first.sae][0]}.spliced({first.point!r}, edits=[{changes}])"


def _written(edit: LiveEdit) -> str:
    """An edit as Python."""
    names: Sequence[str] = ("head", "neuron", "pos")
    where = [f"{name}={value}" for name in names if (value := getattr(edit, name)) is not None]
    if edit.kind == "zero":
        return f"edits.zero({', '.join(where)})"
    if edit.kind == "scale":
        return f"edits.scale({', '.join([repr(edit.amount), *where])})"
    if edit.kind == "set":
        return f"edits.replace({', '.join([repr(float(edit.amount)), *where])})"
    if edit.kind == "mean":
        return f"edits.mean({', '.join([_cached('prompt', edit), *where])})"
    if edit.kind == "steer":
        layer, kind = stream_point(edit)
        vectors = f"steering.contrast_vectors(model, {edit.positive!r}, {edit.negative!r}, points={kind!r})"
        at = [each for each in where if each.startswith("pos=")]
        return f"edits.add({', '.join([f'{vectors}.at({layer})', repr(edit.amount), *at])})"
    if edit.pos is None:
        where.append("pos=slice(0, model.to_tokens(prompt).shape[1])")
        return f"edits.replace({', '.join([_cached('other', edit), *where])})"
    after = edit.pos + 1 or None
    piece = f"{_cached('other', edit)}[:, {edit.pos}:{'' if after is None else after}]"
    return f"edits.replace({', '.join([piece, *where])})"


def _cached(text: str, edit: LiveEdit) -> str:
    return f"model.cache({text}, names_filter={edit.point!r})[{edit.point!r}]"
