"""Steering: contrast vectors, added to the residual stream while the model runs or generates."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from hookline.errors import HooklineError
from hookline.experiments.core.continuations import continued
from hookline.experiments.core.directions import Directions, contrast_vectors
from hookline.experiments.core.labels import Label, about
from hookline.experiments.core.measure import Options, measured, reader_of
from hookline.experiments.core.prompts import Prompt, baselines, prompt_positions, prompts_of
from hookline.experiments.core.sweep import CellBuilder, Cells, Grid
from hookline.experiments.result import Result
from hookline.model import HookedModel
from hookline.text.token_positions import Positions, at, new_tokens

__all__ = ["Directions", "Steered", "contrast_vectors", "generate", "sweep_layers"]

Where: TypeAlias = Literal["all", "new"] | Positions


def __dir__() -> list[str]:
    return __all__


def sweep_layers(
    model: HookedModel,
    vectors: Directions,
    prompts: Prompt,
    metric: Any,
    *,
    coefficients: Sequence[float] = (-2.0, -1.0, 1.0, 2.0),
    layers: Sequence[int] | None = None,
    pos: int | slice | Sequence[int] | None = None,
    **options: Any,
) -> Result:
    """Add each layer's vector to the stream, times each coefficient, and measure: `result.values[layer, coefficient]`.

        vectors = steering.contrast_vectors(model, positive, negative)
        steering.sweep_layers(model, vectors, prompts, metrics.logit_diff(" Paris", " Rome")).top(3)

    It is added at every position, or at `pos`, counted within each prompt. `result.info["clean"]` is unsteered.
    Further `options`: see `Options` (per_example, batch_size, progress, resume).
    """
    how, wanted = Options.of(options), vectors.layers if layers is None else list(layers)
    if not len(coefficients) or not len(wanted):
        raise HooklineError(f"a sweep needs coefficients and layers, got {coefficients!r} and {list(wanted)}")
    added = {layer: vectors.fitting(model, layer) for layer in wanted}
    points = {layer: vectors.point(model, layer) for layer in wanted}
    metric, (rows,) = continued(model, metric, prompts_of(model, prompts))
    bases = baselines(model, rows, keep=[point.name for point in points.values()])
    positions = None if pos is None else prompt_positions(model, rows, pos)
    cells = Cells({"layer": list(wanted)}, {(layer,): [(point, {})] for layer, point in points.items()})
    builders = []
    for times in coefficients:
        moved = {point.name: times * added[layer] for layer, point in points.items()}
        given = [{name: base.kept[name] + x.to(base.kept[name]) for name, x in moved.items()} for base in bases]
        builders.append(CellBuilder(cells, given, bases, rows, positions))
    variants = [builder.variant_for([key]) for key in cells.covered for builder in builders]
    coords: dict[str, list[Label]] = {**cells.coords, "coefficient": [float(each) for each in coefficients]}
    reader = reader_of(model, bases, rows, metric)
    info = {"clean": reader.baseline, **about(model, "steering vectors added")}
    return measured(reader, Grid(("layer", "coefficient"), coords, variants), info, how)


@dataclass(frozen=True)
class Steered:
    """What a model generates unmodified and steered; prints one above the other."""

    prompts: list[str]
    plain: list[str]
    steered: list[str]

    def __repr__(self) -> str:
        rows = zip(self.prompts, self.plain, self.steered, strict=True)
        return "\n".join(f"{prompt!r}\n  plain    {plain!r}\n  steered  {steered!r}" for prompt, plain, steered in rows)


def generate(
    model: HookedModel,
    prompts: str | Sequence[str],
    vector: Directions | Float[Tensor, " d_model"],
    layer: int,
    coefficient: float = 1.0,
    *,
    max_new_tokens: int = 20,
    pos: Where = "all",
    seed: int = 0,
    **kwargs: Any,
) -> Steered:
    """Generate from the prompts, unmodified and with a vector added to the residual stream after a layer.

        print(steering.generate(model, "The weather today is", vectors, layer=2, coefficient=4.0))

    `pos` is where it is added: "all" positions of the prompt and the new text, "new" tokens only (the first new token
    is predicted from the prompt, so it does not change), or as in `hookline.at`: `last`, `token(" weather")`, indices,
    … A tensor is added to `resid_post`. With `do_sample=True`, both generations use the same `seed`. Other arguments go
    to the model's own generate.
    """
    if isinstance(prompts, Mapping):
        raise HooklineError("pass the text and its images separately: steering.generate(model, text, …, images=[…])")
    texts = [prompts] if isinstance(prompts, str) else list(prompts)
    vectors = vector if isinstance(vector, Directions) else Directions.bare(vector, layer)
    if isinstance(pos, str) and pos not in ("all", "new"):
        raise HooklineError(f'pos is "all", "new", or anything that hookline.at accepts, got {pos!r}')
    if isinstance(pos, str) and pos == "new" and max_new_tokens < 2:
        raise HooklineError(
            'the first new token depends on the prompt only: with pos="new" use max_new_tokens=2 or more'
        )
    where: Positions = {"all": None, "new": new_tokens}[pos] if isinstance(pos, str) else pos
    hook = at(where, _adding(coefficient * vectors.fitting(model, layer)))
    point = vectors.point(model, layer)
    plain = _written(model, texts, max_new_tokens, seed, kwargs)
    with model.hooks(fwd_hooks=[(point.name, hook)]):
        steered = _written(model, texts, max_new_tokens, seed, kwargs)
    return Steered(texts, plain, steered)


def _adding(change: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda x: x + change.to(x)


def _written(model: HookedModel, texts: list[str], count: int, seed: int, kwargs: dict[str, Any]) -> list[str]:
    devices = [model.cfg.device] if model.cfg.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), torch.no_grad():
        torch.manual_seed(seed)
        return list(model.generate(texts, count, **kwargs))
