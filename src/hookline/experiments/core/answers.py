"""Answers: the tokens whose logits are read in a run on some prompts, and results over parts and positions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from jaxtyping import Int, Num
from torch import Tensor

from hookline.errors import HooklineError, how_many
from hookline.experiments.core.aligned import Aligned, PromptPositions
from hookline.experiments.core.labels import Label
from hookline.experiments.core.measure import ROOM, packed
from hookline.experiments.core.prompts import Prompt, Prompts, prompt_positions, prompts_of
from hookline.experiments.result import Result
from hookline.experiments.results.statistics import EXAMPLE_AXES
from hookline.model import HookedModel
from hookline.residual import ModelCache

Place: TypeAlias = int | slice | Tensor | None
"""A position, the same in each prompt or one for each; None is all positions."""
Answers: TypeAlias = str | int | Sequence[str] | Sequence[int] | Tensor


def checked_text(model: HookedModel, prompts: Prompt, pos: Place) -> Prompts:
    """The prompts, each of which must have the positions; None is all of them, for prompts of the same length."""
    text = prompts_of(model, prompts)
    if pos is None and not bool(text.mask.all()):
        raise HooklineError(
            "the prompts differ in length, so positions cannot be an axis: pass pos=-1, or positions=[-2, -1]"
        )
    if pos is not None:
        prompt_positions(model, text, pos)  # raises if a prompt is too short
    return text


def at_each(
    model: HookedModel, prompts: Prompt, positions: PromptPositions, measured: Callable[[Tensor], Result]
) -> Result:
    """Results at positions that mean the same in each prompt, as one with an axis `pos`; one run for each of them.

    `measured` takes the position in each prompt.
    """
    text = prompts_of(model, prompts)
    aligned = Aligned.of(model, text, positions, apart=True)
    for label, rows in zip(aligned.labels, aligned.at, strict=True):
        several = [row for row, places in enumerate(rows) if len(places) != 1]
        if several:
            raise HooklineError(
                f"positions={positions!r:.80}: {label!r} is {how_many(len(rows[several[0]]), 'token')} in prompt "
                f"{several[0]}, but one position of each prompt is read: pass the meaning without a list, or indices"
            )
    results = [measured(torch.tensor(rows)[:, 0]) for rows in aligned.at]
    return _joined(results, aligned.labels)


def _joined(results: Sequence[Result], labels: Sequence[Label]) -> Result:
    """Results at several positions as one: `pos` comes last, but for examples."""
    first = results[0]
    last = [axis for axis in first.axes if axis in EXAMPLE_AXES]
    axes = (*(axis for axis in first.axes if axis not in last), "pos", *last)
    coords = {**first.coords, "pos": [*labels]}
    values = torch.stack([result.values for result in results], axes.index("pos"))
    info = {key: _joined_info([result.info[key] for result in results], labels) for key in first.info}
    inner = [result.by_example for result in results if result.by_example is not None]
    return Result(
        values,
        axes,
        {axis: coords[axis] for axis in axes},
        first.name,
        info,
        by_example=_joined(inner, labels) if inner else None,
    )


def _joined_info(values: Sequence[Any], labels: Sequence[Label]) -> Any:
    if all(isinstance(value, Result) for value in values):
        return _joined(values, labels)
    if all(isinstance(value, float) for value in values):
        return Result(torch.tensor(values), ("pos",), {"pos": [*labels]})
    return values[0]


def cached_run(model: HookedModel, prompts: Prompts, where: Place) -> ModelCache:
    """The activations of a run at these positions, with its logits, without the vision tower."""
    names = [point.name for point in model.index.select(None) if point.stream != "image"]
    with torch.no_grad():
        cache = model.run_with_cache(**prompts.call(model), names_filter=names, pos_slice=where)[1]
    if cache.logits is None:
        raise HooklineError(f"{model.cfg.architecture} returned no logits: wrap a model with a language-model head")
    return cache


def answer_ids(model: HookedModel, text: Prompts, tokens: Answers, pos: Place) -> Int[Tensor, "*place"]:
    """Token ids: one, one per row, or one per row and position."""
    ids = model.token_ids(tokens)
    if tuple(ids.shape) not in ((), (len(text),)) and (pos is not None or ids.shape != text.tokens.shape):
        raise HooklineError(
            f"tokens of shape {list(ids.shape)} for {how_many(len(text), 'prompt')}: pass one, or one per prompt"
        )
    return ids


def next_ids(text: Prompts, pos: int | Tensor | None) -> Int[Tensor, "*place"]:
    """The next tokens of each prompt; at all positions, one fewer than there are tokens."""
    if pos is None and text.width > 1:
        return text.tokens[:, 1:]
    places = torch.as_tensor(0 if pos is None else pos).expand(len(text)).tolist()
    return torch.tensor([_next(text, row, place) for row, place in enumerate(places)]).to(text.tokens)


def _next(text: Prompts, row: int, pos: int) -> int:
    span = text.spans[row]
    if span[pos] == span[-1]:
        raise HooklineError(f"there is no token after position {pos} of prompt {row}: pass tokens=…")
    return int(text.tokens[row, span[pos] + 1])


def beside(ids: Num[Tensor, "*some"], shape: torch.Size) -> Num[Tensor, "*place"]:
    """One token, or one per row, expanded over rows and positions."""
    return ids.reshape(*ids.shape, *[1] * (len(shape) - ids.ndim)).expand(shape)


def layer_labels(n_layers: int) -> dict[str, list[Label]]:
    """The labels of the embeddings and of each layer."""
    return {"layer": ["embed", *range(n_layers)]}


def laid_out(
    values: Num[Tensor, "..."],
    coords: dict[str, list[Label]],
    places: dict[str, list[Label]],
    name: str,
    info: dict[str, Any],
    *,
    per_example: bool,
) -> Result:
    """The result over cells and positions, averaged over prompts or with an axis for them.

    Float tensors in `info` are by prompt and position, too.
    """

    def result(*, per_example: bool) -> Result:
        layout: dict[str, Any] = {"per_example": per_example, "keep": False}
        packed_info = {
            key: packed(x.movedim(0, -1)[None], places, ["value"], **layout)
            if isinstance(x, Tensor) and x.is_floating_point()
            else x
            for key, x in info.items()
        }
        every = values.float().movedim(len(coords), -1)[None]
        return packed(every, coords | places, [name], info=packed_info, **layout)

    whole = result(per_example=per_example)
    size = values.shape[len(coords)]
    if per_example or size < 2 or values.numel() * 4 > ROOM:
        return whole
    return replace(whole, by_example=result(per_example=True))
