"""The page's edits as the library's, and as Python."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hookline import edits
from hookline.errors import HooklineError
from hookline.experiments import steering
from hookline.explore.feature_edits import edit_groups, script_saes, splice_of
from hookline.explore.image_script import image_lines
from hookline.explore.prompt_inputs import GivenPrompt, keywords, other_of, prompt_of, tokens_in
from hookline.explore.question import LiveEdit, Question
from hookline.model import HookedModel
from hookline.text.token_positions import Meaning

Hooks = list[Any]
"""Edits as `(name, edit)` pairs, and splices of autoencoders: what `run_with_hooks(fwd_hooks=…)` takes."""
_LAYER = re.compile(r"blocks\.(\d+)\.hook_(\w+)")


def edited(model: HookedModel, question: Question) -> AbstractContextManager[Any]:
    """A context in which the edits that are switched on apply."""
    return applied(model, library_edits(model, question))


def edited_any_text(model: HookedModel, question: Question) -> AbstractContextManager[Any]:
    """The same for a text other than the prompt: without patches and without edits at single positions."""
    anywhere = tuple(edit for edit in question.active if edit.pos is None and edit.kind != "patch")
    return edited(model, replace(question, edits=anywhere))


def applied(model: HookedModel, hooks: Hooks) -> AbstractContextManager[Any]:
    """A context in which these edits apply."""
    return model.hooks(fwd_hooks=hooks) if hooks else nullcontext()


def library_edits(model: HookedModel, question: Question, *, keep_features: bool = False) -> Hooks:
    """The edits that are switched on, one hook for each group, for `run_with_hooks(fwd_hooks=…)`."""
    return [
        (group[0].point, _made(model, question, group[0]))
        if group[0].feature is None
        else splice_of(question, group, keep_features=keep_features)
        for group in edit_groups(question)
    ]


def _made(model: HookedModel, question: Question, edit: LiveEdit) -> edits.DataEdit:
    model.point(edit.point)  # raises, with suggestions, if there is none
    where: dict[str, Any] = {"head": edit.head, "neuron": edit.neuron, "pos": edit.pos}
    if edit.kind == "zero":
        return edits.zero(**where)
    if edit.kind == "scale":
        return edits.scale(edit.amount, **where)
    if edit.kind == "set":
        return edits.replace(float(edit.amount), **where)
    if edit.kind == "mean":
        return edits.mean(_activation(model, prompt_of(model, question), edit.point), **where)
    if edit.kind == "steer":
        return edits.add(_direction(model, edit), edit.amount, pos=edit.pos)
    value = _activation(model, other_of(model, question), edit.point)
    if isinstance(edit.pos, int):
        return edits.replace(_at(value, edit.pos), **where)
    if edit.is_in_tower:  # its positions are not tokens
        _check_shape(value, _activation(model, prompt_of(model, question), edit.point), edit.point)
    else:
        length = _same_length(model, question)
        where["pos"] = slice(0, length) if edit.pos is None else edit.pos
    return edits.replace(value, **where)


@torch.no_grad()
def _activation(model: HookedModel, prompt: GivenPrompt, point: str) -> Tensor:
    if not prompt:
        raise HooklineError("patching needs a second prompt: write one below the first")
    return model.cache(**keywords(prompt), names_filter=point)[point]


def _at(value: Tensor, pos: int) -> Tensor:
    """The activation at one position, with all axes."""
    if pos not in range(-value.shape[1], value.shape[1]):
        raise HooklineError(f"position {pos} is out of range: the second prompt has {value.shape[1]} tokens")
    return value[:, pos : pos + 1 or None]


def _check_shape(other: Tensor, activation: Tensor, point: str) -> None:
    if other.shape != activation.shape:
        raise HooklineError(
            f"{point} has the shape {list(activation.shape)} in the first prompt and {list(other.shape)} in the "
            f"second: use images of the same size"
        )


def _direction(model: HookedModel, edit: LiveEdit) -> Tensor:
    layer, kind = stream_point(edit)
    vectors = steering.contrast_vectors(model, edit.positive, edit.negative, points=kind, layers=[layer])
    return vectors.at(layer)


def stream_point(edit: LiveEdit) -> tuple[int, str]:
    """The layer and the kind of point at which a steering vector is added."""
    match = _LAYER.fullmatch(edit.point)
    if match is None:
        raise HooklineError(f"a steering vector is added at a point such as blocks.2.hook_resid_post, not {edit.point}")
    return int(match[1]), match[2]


def _same_length(model: HookedModel, question: Question) -> int:
    first, second = (
        tokens_in(model, prompt_getter(model, question)).shape[1] for prompt_getter in (prompt_of, other_of)
    )
    if first != second:
        raise HooklineError(
            f"the prompts do not align: the first has {first} tokens, the second {second}. Patch one position, or "
            f"write prompts with the same number of tokens"
        )
    return first


def script(name: str, question: Question, paths: Mapping[str, str] | None = None) -> str:
    """A program that prints the same next-token probabilities as the page, with the edits that are switched on.

    `paths` has the file of an image by its URL; other images are written into the program.
    """
    needs_other = any(edit.kind == "patch" for edit in question.active)
    needs_steering = any(edit.kind == "steer" for edit in question.active)
    other_images = question.other_images if needs_other else ()
    imports, images = image_lines({"images": question.images, "other_images": other_images}, paths or {})
    lines = [*imports, "import hookline", *(["from hookline import edits"] if question.active else [])]
    lines += ["from hookline.experiments import steering"] if needs_steering else []
    saes = script_saes(question)
    has_meanings = any(isinstance(edit.pos, Meaning) for edit in question.active)
    lines += ["from hookline.positions import sentence, span, turn"] if has_meanings else []
    lines += ["from hookline.sae import SparseAutoencoder"] if saes else []
    lines += ["", f"model = hookline.load({name!r})", f"prompt = {question.prompt!r}"]
    lines += [f"other = {question.other!r}"] if needs_other else []
    lines += [line for _, line in saes.values()]
    lines += images
    arguments = {
        "prompt": _with("prompt", "images", question.images),
        "other": _with("other", "other_images", other_images),
    }
    run = f"model({arguments['prompt']})[0, {question.pos}]"
    if question.active:
        written = [f"    {_written_hook(group, saes, arguments)}," for group in edit_groups(question)]
        lines += ["", "fwd_hooks = [", *written, "]"]
        run = f"model.run_with_hooks({arguments['prompt']}, fwd_hooks=fwd_hooks)[0, {question.pos}]"
    lines += [f"probs, ids = {run}.softmax(-1).topk(10)"]
    lines += ["for prob, token in zip(probs.tolist(), ids.tolist()):"]
    lines += ['    print(f"{prob:.4f} {model.to_string([token])!r}")']
    return "\n".join(lines) + "\n"


def _with(text: str, images: str, urls: Sequence[str]) -> str:
    """The arguments of a call as Python."""
    return f"{text}, images={images}" if urls else text


def _written_hook(group: list[LiveEdit], saes: dict[str, tuple[str, str]], arguments: Mapping[str, str]) -> str:
    """An edit, or the edits of features that one splice makes, as Python."""
    first = group[0]
    if first.feature is None:
        return f"({first.point!r}, {_written(first, arguments)})"
    changes = ", ".join(_written(replace(edit, neuron=edit.feature, feature=None), arguments) for edit in group)
    return f"{saes[first.sae][0]}.spliced({first.point!r}, edits=[{changes}])"


def _written(edit: LiveEdit, arguments: Mapping[str, str]) -> str:
    """An edit as Python; `arguments` has the arguments of a call for each prompt."""
    names: Sequence[str] = ("head", "neuron", "pos")
    where = [f"{name}={value}" for name in names if (value := getattr(edit, name)) is not None]
    if edit.kind == "zero":
        return f"edits.zero({', '.join(where)})"
    if edit.kind == "scale":
        return f"edits.scale({', '.join([repr(edit.amount), *where])})"
    if edit.kind == "set":
        return f"edits.replace({', '.join([repr(float(edit.amount)), *where])})"
    if edit.kind == "mean":
        return f"edits.mean({', '.join([_cached(arguments['prompt'], edit), *where])})"
    if edit.kind == "steer":
        layer, kind = stream_point(edit)
        vectors = f"steering.contrast_vectors(model, {edit.positive!r}, {edit.negative!r}, points={kind!r})"
        at = [argument for argument in where if argument.startswith("pos=")]
        return f"edits.add({', '.join([f'{vectors}.at({layer})', repr(edit.amount), *at])})"
    value = _cached(arguments["other"], edit)
    if isinstance(edit.pos, int):
        after = edit.pos + 1 or None
        value += f"[:, {edit.pos}:{'' if after is None else after}]"
    elif edit.pos is None and not edit.is_in_tower:
        has_images = arguments["prompt"] != "prompt"
        tokens = f"model.to_inputs({arguments['prompt']})['input_ids']" if has_images else "model.to_tokens(prompt)"
        where.append(f"pos=slice(0, {tokens}.shape[1])")
    return f"edits.replace({', '.join([value, *where])})"


def _cached(arguments: str, edit: LiveEdit) -> str:
    return f"model.cache({arguments}, names_filter={edit.point!r})[{edit.point!r}]"
