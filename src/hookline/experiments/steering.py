"""Steering: a direction found by contrast, added to the stream while the model runs or writes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from hookline.engine.points import HookPoint
from hookline.errors import HooklineError
from hookline.experiments.core.continuations import continued
from hookline.experiments.core.directions import Directions, contrast_vectors
from hookline.experiments.core.labels import Label, about
from hookline.experiments.core.measure import Options, Reader, measured, padded_logits
from hookline.experiments.core.prompts import Prompt, baselines, prompts_of
from hookline.experiments.core.sweep import Grid
from hookline.experiments.metrics import as_metric
from hookline.experiments.result import Result
from hookline.model import HookedModel
from hookline.rerun.baseline import Baseline
from hookline.rerun.changes import WHOLE, Change, Variant
from hookline.text.token_positions import Positions, at, new_tokens

__all__ = ["Directions", "Steered", "contrast_vectors", "generate", "sweep_layers"]

Where: TypeAlias = Literal["all", "new"] | Positions


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

    It is added at every position, or at `pos`, counted in each prompt. Without it the metric is `result.info["clean"]`.
    Further `options`: see `Options` (per_example, batch_size, progress, resume).
    """
    how, wanted = Options.of(options), vectors.layers if layers is None else list(layers)
    if not len(coefficients) or not len(wanted):
        raise HooklineError(f"a sweep needs coefficients and layers, but has {coefficients!r} and {list(wanted)}")
    added = {layer: vectors.fitting(model, layer) for layer in wanted}
    points = {layer: vectors.point(model, layer) for layer in wanted}
    metric, (rows,) = continued(model, metric, prompts_of(model, prompts))
    bases = baselines(model, rows, keep=[point.name for point in points.values()])
    logits = padded_logits(bases, rows)
    reader = Reader(bases, rows, as_metric(metric, model, logits, None, rows.tokens, rows.mask))
    cells = [(layer, float(times)) for layer in wanted for times in coefficients]
    own = [rows.length(row) for row in range(len(rows))]
    variants = [
        [_moved(base, points[layer], times * added[layer], pos, n) for base, n in zip(bases, own, strict=True)]
        for layer, times in cells
    ]
    coords: dict[str, list[Label]] = {"layer": [*wanted], "coefficient": [float(each) for each in coefficients]}
    info = {"clean": reader.baseline, **about(model, "steering vectors added")}
    return measured(reader, Grid(("layer", "coefficient"), coords, variants), info, how)


def _moved(base: Baseline, point: HookPoint, change: Float[Tensor, " d"], pos: Any, own: int) -> Variant:
    """The run with something added at a point: everywhere, or at positions of the prompt, which has `own` of them."""
    before = base.kept[point.name]
    indices = _indices(pos, before.shape[0] if pos is None else own)
    if not bool(change.any()):
        return ()
    value = before.clone()
    value[indices] += change.to(before)
    return (Change(point, (WHOLE, WHOLE), value, min(indices), before),)


def _indices(pos: Any, length: int) -> list[int]:
    if pos is None or isinstance(pos, slice):
        found = list(range(length))[WHOLE if pos is None else pos]
    else:
        found = [pos] if isinstance(pos, int) else list(pos)
    wrong = next((each for each in found if not isinstance(each, int) or each not in range(-length, length)), None)
    if wrong is not None or not found:
        raise HooklineError(
            f"pos={pos!r}, but a prompt has {length} tokens: give an index, a slice or a list of indices"
        )
    return [each % length for each in found]


@dataclass(frozen=True)
class Steered:
    """What a model writes as it is, and steered; prints one above the other."""

    prompts: list[str]
    plain: list[str]
    steered: list[str]

    def __repr__(self) -> str:
        rows = zip(self.prompts, self.plain, self.steered, strict=True)
        return "\n".join(f"{prompt!r}\n  plain    {plain!r}\n  steered  {steered!r}" for prompt, plain, steered in rows)


def generate(
    model: HookedModel,
    prompt: str | Sequence[str],
    vector: Directions | Float[Tensor, " d_model"],
    layer: int,
    coefficient: float = 1.0,
    *,
    max_new_tokens: int = 20,
    positions: Where = "all",
    seed: int = 0,
    **kwargs: Any,
) -> Steered:
    """Let the model go on with the prompts, as it is and with a vector added to the stream after a layer.

        print(steering.generate(model, "The weather today is", vectors, layer=2, coefficient=4.0))

    `positions` are where it is added: "all" of the prompt and of what is written, "new" tokens only (the first of these
    comes from the prompt, so it is not changed), or as in `hookline.at`: `last`, `token(" weather")`, indices, … A bare
    tensor is added to `resid_post`. If tokens are drawn by chance (`do_sample=True`), both use the same `seed`. Other
    arguments go to the model's own generate.
    """
    if isinstance(prompt, Mapping):
        raise HooklineError("with pictures give the text and them: steering.generate(model, text, …, images=[…])")
    texts = [prompt] if isinstance(prompt, str) else list(prompt)
    vectors = vector if isinstance(vector, Directions) else Directions.bare(vector, layer)
    if isinstance(positions, str) and positions not in ("all", "new"):
        raise HooklineError(f'positions are "all", "new", or as hookline.at takes them, not {positions!r}')
    if isinstance(positions, str) and positions == "new" and max_new_tokens < 2:
        raise HooklineError(
            'the first new token comes from the prompt alone: with positions="new" let there be two or more'
        )
    where: Positions = {"all": None, "new": new_tokens}[positions] if isinstance(positions, str) else positions
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
