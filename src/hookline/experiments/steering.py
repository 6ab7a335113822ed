"""Steering: contrast vectors, added to the residual stream while the model runs or generates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Self, TypeAlias, Unpack

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from hookline.edits import add
from hookline.engine import HookPoint
from hookline.errors import HooklineError, warn
from hookline.experiments.core.aligned import Aligned, PromptPositions, one_of
from hookline.experiments.core.continuations import continued
from hookline.experiments.core.labels import Label, about
from hookline.experiments.core.measure import ControlledCellOptions, ControlledOptions, measured, reader_of
from hookline.experiments.core.prompts import (
    Prompt,
    Prompts,
    baselines,
    check_language_model,
    prompts_of,
    warn_of_dropout,
)
from hookline.experiments.core.sweep import CellBuilder, Cells, Grid, layer_number, layer_numbers, sweep_points
from hookline.experiments.metrics import KL, Loss, Metric
from hookline.experiments.result import Result, TopCells
from hookline.files.tensorfile import read_tensors, taking_apart, write_tensors
from hookline.functions.listed_options import lists
from hookline.hooks.fitting import averaged
from hookline.model import HookedModel
from hookline.model_options import PromptSamplingOptions
from hookline.rerun.baseline import Baseline
from hookline.text.chats import is_conversation
from hookline.text.outliers import Outliers, Outlying
from hookline.text.token_positions import Positions, new_tokens

__all__ = ["Directions", "Steered", "best", "contrast_vectors", "generate", "sweep_layers"]

Where: TypeAlias = Literal["all", "new"] | Positions
Damage: TypeAlias = Literal["kl", "loss"]
NEUTRAL = ("He closed the window and sat down",)
"""A sentence that has nothing to do with most directions: `sweep_layers` measures damage at its last word but one."""
ROUNDING = 1e-5
"""A difference of means below this fraction of the activations' norm is rounding."""


def __dir__() -> list[str]:
    return __all__


@dataclass(frozen=True, eq=False, repr=False)
class Directions:
    """A vector for each of some layers, to be added at one kind of point.

    vectors.at(2)                          # [d_model]
    vectors.save("towards-truth.safetensors"); Directions.load("towards-truth.safetensors")
    """

    vectors: Float[Tensor, "layer d_model"]
    layers: list[int]
    kind: str = "resid_post"
    info: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.vectors.is_floating_point() or not all(isinstance(layer, int) for layer in self.layers):
            raise HooklineError(
                f"directions are float vectors at numbered layers, got {self.vectors.dtype} at {self.layers}"
            )
        if self.vectors.ndim != 2 or len(self.vectors) != len(self.layers) or len({*self.layers}) < len(self.layers):
            raise HooklineError(
                f"directions need one vector per layer, [layer, d_model], got {list(self.vectors.shape)} for layers "
                f"{self.layers}"
            )
        if bad := int((~self.vectors.isfinite()).any(-1).sum()):
            raise HooklineError(f"{bad} of {len(self.vectors)} vectors have values that are NaN or infinite")

    @classmethod
    def bare(cls, vector: Any, layer: int) -> Self:
        """A single vector, for one layer."""
        if not isinstance(vector, Tensor) or vector.ndim != 1 or not vector.is_floating_point():
            raise HooklineError("a vector is a float tensor [d_model], or the Directions of contrast_vectors")
        return cls(vector.detach()[None], [layer])

    def at(self, layer: int) -> Float[Tensor, " d_model"]:
        """The vector of a layer."""
        if layer not in self.layers:
            raise HooklineError(f"there is no vector for layer {layer}: there are vectors for {self.layers}")
        return self.vectors[self.layers.index(layer)]

    @property
    def norms(self) -> Float[Tensor, " layer"]:
        """The norm of each vector."""
        return self.vectors.norm(dim=-1)

    def point(self, model: HookedModel, layer: int) -> HookPoint:
        """The point where the vector of a layer is added."""
        return next(iter(_points(model, self.kind, [layer]).values()))

    def fitting(self, model: HookedModel, layer: int) -> Float[Tensor, " d_model"]:
        """The vector of a layer; an error if it does not have the width of the model."""
        vector = self.at(layer)
        if vector.shape[0] != model.cfg.d_model:
            raise HooklineError(f"the vectors have width {vector.shape[0]}, but d_model is {model.cfg.d_model}")
        return vector.to(model.cfg.device)

    def save(self, path: str | Path) -> None:
        """Write them to a safetensors file."""
        layers = torch.tensor(self.layers)
        write_tensors(path, "directions", {"vectors": self.vectors, "layers": layers}, {"kind": self.kind, **self.info})

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read what `save` wrote."""
        tensors, about = read_tensors(path, "directions", called="directions", writer="save")
        with taking_apart(str(path)):
            return cls(tensors["vectors"], tensors["layers"].tolist(), about.pop("kind"), about)

    def __repr__(self) -> str:
        norms = ", ".join(f"{layer}: {norm:.3g}" for layer, norm in zip(self.layers, self.norms.tolist(), strict=True))
        return f"Directions at {self.kind}, [{len(self.layers)} layers × {self.vectors.shape[1]}], norms {norms}"


def contrast_vectors(
    model: HookedModel,
    positive: Prompt,
    negative: Prompt,
    *,
    points: str = "resid_post",
    layers: Sequence[int] | None = None,
    pos: Positions = -1,
    normalize: bool = False,
    outliers: Outliers = "exclude",
) -> Directions:
    """The mean activation of the positive prompts minus that of the negative ones, in each layer.

        >>> vectors = steering.contrast_vectors(model, "The capital of Italy is", "The capital of France is")
        >>> vectors.at(2).shape
        torch.Size([128])

    `points` must have the width of the stream (`resid_post`, `resid_pre`, `attn_out`, `mlp_out`, …). Activations are
    read at the last position, or at `pos` (as in `run_with_cache`); over several positions, or all with `pos=None`,
    each prompt is averaged first. Positions where the norm is more than 10 times the prompt's median, such as attention
    sinks, are excluded from that average; `info` reports how many, `outliers="include"` includes them, and a number
    replaces the 10. With `normalize`, every vector has norm 1. The two lists may differ in length. A vector that is
    only rounding, because the prompts do not differ there, is an error with `normalize` and otherwise a warning.
    """
    by_layer = _points(model, points, layers)
    names = [point.name for point in by_layer.values()]
    warn_of_dropout(model)
    left_out: dict[str, Outlying] = {}
    vectors = torch.zeros(len(names), model.cfg.d_model, dtype=torch.float64)
    typical = torch.zeros(len(names), dtype=torch.float64)
    for sign, prompts in ((1, prompts_of(model, positive)), (-1, prompts_of(model, negative))):
        for row in range(len(prompts)):
            with torch.no_grad():
                cache = model.cache(**prompts.one(row), names_filter=names, pos_slice=pos)
            for layer, name in enumerate(names):
                mean, outlying = averaged(cache[name].reshape(1, -1, model.cfg.d_model), "b p d", None, outliers)
                vectors[layer] += sign * mean[0, 0].cpu() / len(prompts)
                typical[layer] += mean[0, 0].norm().cpu() / len(prompts) / 2
                if outlying.count:
                    left_out[name] = left_out.get(name, Outlying()) + outlying
    _check_difference(vectors, typical, list(by_layer), normalize)
    if normalize:
        vectors = vectors / vectors.norm(dim=-1, keepdim=True)
    info = {"model": model.cfg.model_name}
    if left_out:
        info["outlying"] = "; ".join(f"{name}: {outlying}" for name, outlying in left_out.items())
    return Directions(vectors.to(model.cfg.dtype), list(by_layer), points, info)


def _check_difference(vectors: Tensor, typical: Tensor, layers: list[int], normalize: bool) -> None:
    """Raise, or warn, if some vectors are rounding: `typical` is the norm of the activations in each layer."""
    norms = vectors.norm(dim=-1)
    same = (norms <= ROUNDING * typical).tolist()
    if not any(same):
        return
    where = [layer for layer, is_same in zip(layers, same, strict=True) if is_same]
    problem = (
        f"the positive and negative prompts have the same mean in layers {where}: the difference has norm "
        f"{float(norms[same].max()):.1g}, the activations {float(typical[same].mean()):.3g}"
    )
    advice = "Use prompts that differ, other positions (pos=) or other layers="
    if normalize:
        raise HooklineError(f"{problem}, so normalize=True would scale up rounding. {advice}")
    warn(f"{problem}, so these vectors are zero up to rounding. {advice}")


def _points(model: HookedModel, kind: str, layers: Sequence[int] | None) -> dict[int, HookPoint]:
    """The points of some layers; an error unless they have the width of the residual stream."""
    by_layer = {int(layer): point for (layer,), point in sweep_points(model, kind, "layer", layers).points.items()}
    for point in by_layer.values():
        if point.stream == "image":
            raise HooklineError(f"steering needs a language-model point; {point.name!r} is in the vision tower")
        if point.axes != "b p d":
            raise HooklineError(
                f"steering needs a point with the width of the residual stream, but {point.name!r} has axes "
                f"{point.axes}"
            )
    return by_layer


@lists(ControlledCellOptions, ControlledOptions)
def sweep_layers(
    model: HookedModel,
    vectors: Directions,
    prompts: Prompt,
    metric: Any,
    *,
    coefficients: Sequence[float] = (-2.0, -1.0, 1.0, 2.0),
    layers: Sequence[int] | None = None,
    positions: PromptPositions = None,
    pos: PromptPositions = None,
    neutral: Prompt | None = NEUTRAL,
    damage: Damage = "kl",
    **options: Unpack[ControlledCellOptions],
) -> Result:
    """Add each layer's vector to the stream, times each coefficient, and measure: `result.values[layer, coefficient]`.

        >>> vectors = steering.contrast_vectors(model, texts[1], texts[0])
        >>> metric = metrics.logit_diff(" Rome", " Paris")
        >>> steering.sweep_layers(model, vectors, texts[0], metric, positions=-1).top(2, by="value")
        layer  coefficient  value
        3      2.0          16.92
        3      1.0          12.3

    It is added at every position, or at `positions`, as in `ablation.ablate` (`pos` is deprecated).
    `result.info["clean"]` is unsteered. `result.info["damage"]`, a Result on the same axes, is what the vector does to
    the predictions on `neutral` text: the KL divergence from those of the unsteered model, or with `damage="loss"` how
    much the loss rises. In texts that you pass, the vector is added at every position and all predictions count; by
    default, it is one prediction in a plain sentence, which costs as much as one more prompt. `best` selects cells by
    both. With `neutral=None`, or without a tokenizer for the sentence, there is no damage. Further `options`: see
    `Options` (per_example, batch_size, progress, resume).
    """
    if not isinstance(vectors, Directions):
        raise HooklineError(
            f"sweep_layers takes the Directions of contrast_vectors, not a {type(vectors).__name__}: for a tensor of "
            f"one vector per layer, use steering.Directions(tensor, layers=[0, 1, …])"
        )
    if isinstance(coefficients, int | float | str) or not len(coefficients):
        raise HooklineError(f"coefficients is a list of numbers, such as [1.0, 2.0], got {coefficients!r}")
    check_language_model(model)
    how = ControlledOptions.of(options)
    selected_layers = vectors.layers if layers is None else layer_numbers(layers, model.cfg.n_layers)
    added = {layer: vectors.fitting(model, layer) for layer in selected_layers}
    points = {layer: vectors.point(model, layer) for layer in selected_layers}
    if damage not in ("kl", "loss"):
        raise HooklineError(f'damage is "kl" or "loss", got {damage!r}')
    times = [float(coefficient) for coefficient in coefficients]
    metric, (rows,) = continued(model, metric, prompts_of(model, prompts))
    bases = baselines(model, rows, keep=[point.name for point in points.values()])
    where = one_of(positions, pos)
    aligned = None if where is None else Aligned.of(model, rows, where, apart=False)
    grid = _grid(points, added, times, bases, rows, aligned)
    reader = reader_of(model, bases, rows, metric)
    info: dict[str, Any] = {"clean": reader.baseline, **about(model, "steering vectors added")}
    if neutral is not None and (neutral is not NEUTRAL or model.tokenizer is not None):
        info["damage"] = _damage(model, points, added, times, neutral, damage, how)
    return measured(reader, grid, info, how)


def _grid(
    points: Mapping[int, HookPoint],
    added: Mapping[int, Tensor],
    times: Sequence[float],
    bases: Sequence[Baseline],
    rows: Prompts,
    aligned: Aligned | None,
) -> Grid:
    """The vector of each layer, times each coefficient, added to these runs."""
    cells = Cells({"layer": [*points]}, {(layer,): [(point, {})] for layer, point in points.items()})
    builders = []
    for coefficient in times:
        moved = {point.name: coefficient * added[layer] for layer, point in points.items()}
        activations = [{name: base.kept[name] + x.to(base.kept[name]) for name, x in moved.items()} for base in bases]
        builders.append(CellBuilder(cells, activations, bases, rows, aligned))
    variants = [builder.variant_for([key]) for key in cells.covered for builder in builders]
    coords: dict[str, list[Label]] = {**cells.coords, "coefficient": [*times]}
    return Grid(("layer", "coefficient"), coords, variants)


def _damage(
    model: HookedModel,
    points: Mapping[int, HookPoint],
    added: Mapping[int, Tensor],
    times: Sequence[float],
    neutral: Prompt,
    damage: Damage,
    how: ControlledOptions,
) -> Result:
    """How much the vectors change the predictions on neutral texts: at every position, but of `NEUTRAL` only at one."""
    rows, is_default = prompts_of(model, neutral), neutral is NEUTRAL
    bases = baselines(model, rows, keep=[point.name for point in points.values()])
    where = Aligned.of(model, rows, -2, apart=False) if is_default else None
    if damage == "kl":
        metric: Metric = KL(rows.padded([base.logits for base in bases]), pos=-2 if is_default else None)
    else:
        metric = Loss(rows.tokens, mask=_last_two(rows.mask) if is_default else None)
    read = [rows.width - 2] if is_default else range(rows.width)
    reader = reader_of(model, bases, rows, metric, read=read)
    measurements = replace(how, per_example=False, resume=None, control=0)
    values = measured(reader, _grid(points, added, times, bases, rows, where), {}, measurements)
    return replace(values - float(reader.baseline.mean()), name="damage", info={})


def _last_two(mask: Bool[Tensor, "batch pos"]) -> Bool[Tensor, "batch pos"]:
    """A mask of the last two tokens: the loss of the last one, which is predicted at the one before."""
    return mask & (torch.arange(mask.shape[1], device=mask.device) >= mask.shape[1] - 2)


def best(
    swept: Result, most_damage: float, k: int = 1, *, by: Literal["value", "lowest", "effect", "abs"] = "effect"
) -> TopCells:
    """The layers and coefficients with the strongest effect, among those that damage neutral text at most so much.

        >>> vectors = steering.contrast_vectors(model, texts[1], texts[0])
        >>> lead = metrics.logit_diff(" Rome", " Paris")
        >>> swept = steering.sweep_layers(model, vectors, texts[0], lead, positions=-1, neutral=texts[2:])
        >>> steering.best(swept, most_damage=1.5, by="value")
        layer  coefficient  value
        3      1.0          12.3

    `swept` is a result of `sweep_layers`, whose `info["damage"]` is in nats; `by` is as for `Result.top`.
    """
    damage = swept.info.get("damage")
    if not isinstance(damage, Result):
        raise HooklineError("best needs a result of sweep_layers with neutral texts: neutral=[…]")
    mean = swept.mean("example") if "example" in swept.axes else swept
    is_allowed = mean._aligned(damage, "damage") <= most_damage
    if not bool(is_allowed.any()):
        raise HooklineError(
            f"every cell damages neutral text by more than {most_damage}, {float(damage.values.min()):.3g} at least: "
            f"use smaller coefficients, or allow more"
        )
    return replace(mean, values=mean.values.masked_fill(~is_allowed, torch.nan), by_example=None).top(k, by)


@dataclass(frozen=True)
class Steered:
    """What a model generates unmodified and steered; prints one above the other."""

    prompts: list[str]
    plain: list[str]
    steered: list[str]

    def __repr__(self) -> str:
        rows = zip(self.prompts, self.plain, self.steered, strict=True)
        return "\n".join(f"{prompt!r}\n  plain    {plain!r}\n  steered  {steered!r}" for prompt, plain, steered in rows)


@lists(PromptSamplingOptions)
def generate(
    model: HookedModel,
    prompts: str | Sequence[str],
    vector: Directions | Float[Tensor, " d_model"],
    layer: int,
    coefficient: float = 1.0,
    *,
    max_new_tokens: int = 20,
    pos: Where = "all",
    seed: int | None = None,
    **options: Unpack[PromptSamplingOptions],
) -> Steered:
    """Generate from the prompts, unmodified and with a vector added to the residual stream after a layer.

        >>> vectors = steering.contrast_vectors(model, "The capital of Italy is", "The capital of France is")
        >>> steering.generate(model, "The capital of France is", vectors, layer=3, max_new_tokens=2)
        'The capital of France is'
          plain    'The capital of France is Paris.'
          steered  'The capital of France is Rome.'

    `pos` is where it is added: "all" positions of the prompt and the new text, "new" tokens only (the first new token
    is predicted from the prompt, so it does not change), or as in `hookline.at`: `last`, `token(" weather")`, indices,
    … A tensor is added to `resid_post`. With `do_sample=True`, both generations use the same `seed`, by default 0.
    Other options are those of `model.generate`.
    """
    kwargs: dict[str, Any] = {**options}
    if isinstance(prompts, Mapping):
        raise HooklineError("pass the text and its images separately: steering.generate(model, text, …, images=[…])")
    texts: list[Any] = [prompts] if isinstance(prompts, str) or is_conversation(prompts) else list(prompts)
    _check_generation(model, seed, kwargs)
    layer = layer_number(layer, model.cfg.n_layers)
    vectors = vector if isinstance(vector, Directions) else Directions.bare(vector, layer)
    if isinstance(pos, str) and pos not in ("all", "new"):
        raise HooklineError(f'pos is "all", "new", or anything that hookline.at accepts, got {pos!r}')
    if isinstance(pos, str) and pos == "new" and max_new_tokens < 2:
        raise HooklineError(
            'the first new token depends on the prompt only: with pos="new" use max_new_tokens=2 or more'
        )
    where: Positions = {"all": None, "new": new_tokens}[pos] if isinstance(pos, str) else pos
    hook = add(vectors.fitting(model, layer), coefficient, pos=where)
    point = vectors.point(model, layer)
    with model.hooks(fwd_hooks=[(point.name, hook)]):
        steered = _written(model, texts, max_new_tokens, seed or 0, kwargs)
    plain = _written(
        model, texts, max_new_tokens, seed or 0, kwargs
    )  # second: a graph with the edit can run without it
    return Steered(model.text.prompts(texts, is_open=True), plain, steered)


def _check_generation(model: HookedModel, seed: int | None, kwargs: dict[str, Any]) -> None:
    check_language_model(model)
    if kwargs.get("num_return_sequences", 1) != 1:
        raise HooklineError(
            "steering.generate compares one text per prompt: leave out num_return_sequences, and call it with seed=0, "
            "seed=1, …"
        )
    samples_by_default = getattr(
        kwargs.get("generation_config", getattr(model.module, "generation_config", None)), "do_sample", None
    )
    if seed is not None and not kwargs.get("do_sample", samples_by_default):
        raise HooklineError(f"seed={seed!r} has no effect without sampling: pass do_sample=True, or leave out seed")


def _written(model: HookedModel, texts: list[Any], count: int, seed: int | None, kwargs: dict[str, Any]) -> list[str]:
    devices = [model.cfg.device] if model.cfg.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), torch.no_grad():
        torch.manual_seed(seed or 0)
        return list(model.generate(texts, count, **kwargs))
