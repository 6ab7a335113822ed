"""Reading activations in the model's own words: they are put at a marker of another prompt, and it is continued."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any, TypeAlias, Unpack

import torch
from jaxtyping import Float
from torch import Tensor

from hookline.edits import replace
from hookline.errors import HooklineError, a_type
from hookline.experiments.core.labels import Label, about, token_labels
from hookline.experiments.core.measure import BatchOptions, Options
from hookline.experiments.core.prompts import Prompt, Prompts, baselines, prompt_positions, prompts_of
from hookline.experiments.core.sweep import sweep_points
from hookline.experiments.logit_lens import MEASURES, Measure, shown_token
from hookline.experiments.result import Result
from hookline.functions.listed_options import lists
from hookline.model import HookedModel
from hookline.model_options import SamplingOptions
from hookline.pages.text_tables import table
from hookline.text.at_positions import at
from hookline.text.token_positions import Positions
from hookline.transformer.memory.halving import BatchFitter

__all__ = ["oracle", "patchscope", "token_table"]

WidthMap: TypeAlias = Float[Tensor, "into d_model"] | Callable[[Tensor], Tensor]
"""A matrix, or a function of vectors along the last axis."""


def __dir__() -> list[str]:
    return __all__


@lists(BatchOptions, Options)
def patchscope(
    model: HookedModel,
    source: Prompt,
    target: Prompt,
    *,
    marker: str | Positions = "?",
    pos: Positions = None,
    layers: Sequence[int] | None = None,
    into_layers: Sequence[int] | None = None,
    points: str = "resid_post",
    into: HookedModel | None = None,
    width_map: WidthMap | None = None,
    tokens: str | int | None = None,
    measure: Measure = "prob",
    max_new_tokens: int = 0,
    **options: Unpack[BatchOptions],
) -> Result:
    """Put activations of one prompt at a marker of another, and read the next token there: axes `layer` and `pos`.

        >>> source, target = "The capital of France is", "The capital of Italy is"
        >>> print(reading.token_table(reading.patchscope(model, source, target, marker=" Italy", pos=[3])))
        layer  3: France
        0      ' Paris'
        1      ' Paris'
        2      ' Paris'
        3      ' Rome'

    Each cell is a run of the target with the source's activation after `layer`, at `pos`, in place of that at the
    marker: a token, or positions as in `hookline.at`; several markers all get it. It goes in after the same layer, or
    after each of `into_layers`. `into` is another model that runs the target; `width_map` maps activations to its
    width: a matrix `[d_model there, d_model here]`, or a function.

    Values are the `measure` of the likeliest token, which `info["tokens"]` has by cell, or of the token in `tokens`.
    With `max_new_tokens`, the target is continued, and `info["texts"]` has the texts. Further options: batch_size.
    """
    if measure not in MEASURES or (measure == "rank" and tokens is None):
        choices = ", ".join(map(repr, MEASURES))
        raise HooklineError(f"measure is one of {choices} ('rank' needs tokens=…), got {measure!r}")
    how, other = Options.of(options, "per_example", "resume"), into or model
    scope = _Scope.of(model, source, other, target, (marker, pos), points, (layers, into_layers), width_map)
    answer = None if tokens is None else int(other.token_ids(tokens))
    values = torch.full([len(scope.cells)], torch.nan)
    ids = torch.zeros(len(scope.cells), dtype=torch.long)
    for numbers, logits in scope.logits(None if how.batch_size == "auto" else how.batch_size):
        cell_logits, indices = logits.float(), list(numbers)
        ids[indices] = cell_logits.argmax(-1).cpu()
        token_ids = cell_logits.argmax(-1) if answer is None else torch.full_like(cell_logits.argmax(-1), answer)
        values[indices] = MEASURES[measure](cell_logits, token_ids[:, None]).float().cpu()
    shape = [len(labels) for labels in scope.coords.values()]
    info: dict[str, Any] = {"measure": measure, "marker": scope.columns, **about(other, "activations read at a marker")}
    info["tokens"] = _nested([shown_token(other, int(token)) for token in ids], shape)
    if max_new_tokens:
        info["texts"] = _nested(scope.texts(max_new_tokens, how.batch_size), shape)
    return Result(values.view(shape), tuple(scope.coords), scope.coords, measure, info)


@lists(SamplingOptions)
def oracle(
    model: HookedModel,
    source: Prompt,
    question: Prompt,
    *,
    layers: Sequence[int],
    into_layer: int = 1,
    marker: str | Positions = "?",
    pos: Positions = None,
    into: HookedModel | None = None,
    width_map: WidthMap | None = None,
    scale: float = 1.0,
    max_new_tokens: int = 30,
    **options: Unpack[SamplingOptions],
) -> list[str]:
    """Ask a model a question about activations that are added at markers in it; returns the answer for each layer.

        reading.oracle(model, text, "? ? ? What is this about? Answer:", layers=[3], pos=[4, 5, 6])

    The activations of the source after a layer, at the positions `pos` (by default the last ones), are added to the
    stream after `into_layer` at as many markers, each with the norm that the stream has there times `scale`. It is
    meant for models that were trained to answer such questions. Other options are those of `model.generate`.
    """
    other = into or model
    text = _one(other, question, "question")
    columns = _markers(other, text, marker)
    from_text = _one(model, source, "source")
    sources = prompt_positions(model, from_text, slice(-len(columns), None) if pos is None else pos)[0]
    if len(sources) != len(columns):
        raise HooklineError(
            f"the question has {len(columns)} markers, but pos={pos!r} selects {len(sources)} positions of the source: "
            f"use one marker per position"
        )
    activations = _activations(model, from_text, "resid_post", layers, width_map, other)
    added = torch.stack([x[sources] for x in activations.values()])
    (name,) = _names(other, "resid_post", [into_layer]).values()

    def matched(x: Tensor) -> Tensor:
        new = added.to(x)
        return x + scale * x.norm(dim=-1, keepdim=True) * new / new.norm(dim=-1, keepdim=True)

    with other.hooks(fwd_hooks=[(name, at(columns, matched))]), torch.no_grad():
        rows = text.tokens.expand(len(added), -1)
        new = other.generate(rows, max_new_tokens, **options)
    return [_said(other, row[text.width :]) for row in new]


def token_table(result: Result) -> str:
    """The tokens of the cells of a `patchscope`, or its texts, as a table: a row per layer, a column per position.

    Examples:
        >>> found = reading.patchscope(model, texts[0], texts[1], marker=" Italy", pos=[3], layers=[0])
        >>> print(reading.token_table(found))
        layer  3: France
        0      ' Paris'
    """
    cells = result.info.get("texts", result.info.get("tokens"))
    *rows, columns = result.axes
    labels = list(product(*(result.coords[axis] for axis in rows)))
    lines = cells if len(rows) == 1 else [line for group in cells or () for line in group]
    if (
        columns != "pos"
        or not isinstance(lines, list)
        or [len(lines), len(lines[0])] != [len(labels), result.shape[-1]]
    ):
        raise HooklineError("token_table takes a whole result of reading.patchscope or of JacobianLens.read")
    head = [*rows, *map(str, result.coords[columns])]
    body = [[*map(str, label), *map(repr, line)] for label, line in zip(labels, lines, strict=True)]
    return table([head, *body])


@dataclass(frozen=True, eq=False)
class _Scope:
    """The cells of a patchscope: a source layer, a target layer and a source position each."""

    into: HookedModel
    text: Prompts
    columns: list[int]
    """Where the markers are in the target."""
    names: dict[int, str]
    """The point of each layer of the target."""
    given: dict[int, Float[Tensor, "pos into"]]
    """The activations of the source, in the width of the target."""
    coords: dict[str, list[Label]]
    cells: list[tuple[int, int, int]]

    @classmethod
    def of(
        cls,
        model: HookedModel,
        source: Prompt,
        into: HookedModel,
        target: Prompt,
        where: tuple[Any, Any],
        points: str,
        layers: tuple[Sequence[int] | None, Sequence[int] | None],
        width_map: WidthMap | None,
    ) -> _Scope:
        """Check everything, and run the source."""
        text, from_text = _one(into, target, "target"), _one(model, source, "source")
        columns = _markers(into, text, where[0])
        sources = prompt_positions(model, from_text, slice(None) if where[1] is None else where[1])[0]
        activations = _activations(model, from_text, points, layers[0], width_map, into)
        names = _names(into, points, list(activations) if layers[1] is None else layers[1])
        coords: dict[str, list[Label]] = {"layer": [*activations]}
        pairs = [(layer, layer) for layer in activations]
        if layers[1] is not None:
            coords["into"] = [*names]
            pairs = list(product(activations, names))
        labels: list[Label] = [*from_text.labels(model)]
        coords["pos"] = [labels[position] for position in sources]
        return cls(
            into, text, columns, names, activations, coords, [(*pair, at) for pair, at in product(pairs, sources)]
        )

    def logits(self, most: int | None) -> Iterator[tuple[Sequence[int], Float[Tensor, "cell vocab"]]]:
        """The logits at the end of the target in each cell, batch by batch, with the numbers of the cells."""
        (base,) = baselines(self.into, self.text, keep=self.names.values())
        changes = [
            [
                base.change(self.names[target_layer], self.given[source_layer][at].to(base.logits), pos=column)
                for column in self.columns
            ]
            for source_layer, target_layer, at in self.cells
        ]
        for numbers, logits in base.rerun(changes, positions=[-1], most_rows=most):
            yield numbers, logits[:, 0]

    def texts(self, count: int, batch_size: Any) -> list[str]:
        """What follows the target in each cell."""
        texts: dict[int, str] = {}
        for target_layer, name in self.names.items():
            numbers = [number for number, cell in enumerate(self.cells) if cell[1] == target_layer]
            fit = BatchFitter("cells")
            fit.most = None if batch_size == "auto" else batch_size
            for part, said in fit.parts(numbers, partial(self._written, name, count)):
                texts |= dict(zip(part, said, strict=True))
        return [texts[number] for number in range(len(self.cells))]

    def _written(self, name: str, count: int, numbers: Sequence[int]) -> list[str]:
        rows = torch.stack([self.given[self.cells[number][0]][self.cells[number][2]] for number in numbers])
        values = rows[:, None].expand(-1, len(self.columns), -1)
        with self.into.hooks(fwd_hooks=[(name, replace(values, pos=self.columns))]), torch.no_grad():
            new = self.into.generate(self.text.tokens.expand(len(rows), -1), count, do_sample=False)
        return [_said(self.into, row[self.text.width :]) for row in new]


def _one(model: HookedModel, prompt: Prompt, called: str) -> Prompts:
    text = prompts_of(model, prompt)
    if len(text) != 1:
        raise HooklineError(f"the {called} is one prompt, got {len(text)}: call it for each")
    return text


def _markers(model: HookedModel, text: Prompts, marker: Any) -> list[int]:
    """The columns of the markers: tokens with that text, or positions."""
    if not isinstance(marker, str):
        return prompt_positions(model, text, marker, "marker")[0]
    strings = model.to_str_tokens(text.tokens[0])
    columns = [at for at, string in enumerate(strings) if string.strip() == marker.strip() != ""]
    if not columns:
        raise HooklineError(
            f"the target has no token {marker!r} to put activations at. Its tokens are "
            f"{', '.join(token_labels(strings))}: pass one of them as marker=, or a position"
        )
    return columns


def _names(model: HookedModel, points: str, layers: Sequence[int] | None) -> dict[int, str]:
    """The points of some layers, each with one vector per position."""
    by_layer = {int(layer): point for (layer,), point in sweep_points(model, points, "layer", layers).points.items()}
    for point in by_layer.values():
        if point.axes != "b p d" or point.stream == "image":
            raise HooklineError(
                f"a read needs points with a vector per token, but {point.name!r} has axes {point.axes}"
            )
    return {layer: point.name for layer, point in by_layer.items()}


def _activations(
    model: HookedModel,
    text: Prompts,
    points: str,
    layers: Sequence[int] | None,
    width_map: WidthMap | None,
    into: HookedModel,
) -> dict[int, Float[Tensor, "pos into"]]:
    """The activations of a prompt after some layers, in the width of the model that they go into."""
    names = _names(model, points, layers)
    with torch.no_grad():
        cache = model.cache(**text.one(0), names_filter=list(names.values()))
        activations = {layer: _mapped(cache[name][0], width_map) for layer, name in names.items()}
    for layer, x in activations.items():
        if not bool(x.isfinite().all()):
            mapped = "" if width_map is None else ", after width_map,"
            raise HooklineError(f"the activations of layer {layer}{mapped} are not finite (NaN or infinite)")
        if x.shape[-1] != into.cfg.d_model:
            mapped = "" if width_map is None else " after width_map"
            raise HooklineError(
                f"the activations have width {x.shape[-1]}{mapped}, but the target model has d_model "
                f"{into.cfg.d_model}: pass width_map=, a matrix [{into.cfg.d_model}, {model.cfg.d_model}]"
            )
    return {layer: x.to(into.cfg.device) for layer, x in activations.items()}


def _mapped(x: Float[Tensor, "pos d_model"], width_map: WidthMap | None) -> Float[Tensor, "pos into"]:
    if width_map is None:
        return x
    if not isinstance(width_map, Tensor):
        new = width_map(x)
        if not isinstance(new, Tensor) or new.shape[:-1] != x.shape[:-1]:
            what = f"the shape {list(new.shape)}" if isinstance(new, Tensor) else a_type(new)
            raise HooklineError(f"width_map returned {what} for activations of the shape {list(x.shape)}")
        return new
    if width_map.ndim != 2 or width_map.shape[1] != x.shape[-1]:
        raise HooklineError(
            f"width_map has the shape {list(width_map.shape)}, but activations have width {x.shape[-1]}: pass "
            f"[d_model of the target, {x.shape[-1]}]"
        )
    return x @ width_map.to(x).T


def _said(model: HookedModel, ids: Tensor) -> str:
    if model.tokenizer is None:
        return " ".join(map(str, ids.tolist()))
    return str(model.tokenizer.decode(ids, skip_special_tokens=True))


def _nested(flat: list[str], shape: Sequence[int]) -> list[Any]:
    """A flat list as lists of lists."""
    for size in reversed(shape[1:]):
        flat = [flat[start : start + size] for start in range(0, len(flat), size)]  # type: ignore[misc]
    return flat
