"""Directions in the stream: one for each layer, found as the difference between two kinds of prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import torch
from jaxtyping import Float
from torch import Tensor

from hookline.engine.points import HookPoint
from hookline.engine.tensorfile import read_tensors, taking_apart, write_tensors
from hookline.errors import HooklineError
from hookline.experiments.core.prompts import Prompt, prompts_of, warn_of_dropout
from hookline.model import HookedModel
from hookline.text.outliers import Outliers, Outlying, outlying, row_norms
from hookline.text.token_positions import Positions


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
        if not self.vectors.is_floating_point() or not all(isinstance(each, int) for each in self.layers):
            raise HooklineError(
                f"directions are vectors of floats at numbered layers, not {self.vectors.dtype} at {self.layers}"
            )
        if self.vectors.ndim != 2 or len(self.vectors) != len(self.layers) or len({*self.layers}) < len(self.layers):
            raise HooklineError(
                f"directions are a vector for each layer, [layer, d_model]: {list(self.vectors.shape)} for the layers "
                f"{self.layers}"
            )

    @classmethod
    def bare(cls, vector: Any, layer: int) -> Self:
        """One vector as that of a layer."""
        if not isinstance(vector, Tensor) or vector.ndim != 1 or not vector.is_floating_point():
            raise HooklineError("a vector is a tensor of floats [d_model], or what contrast_vectors gave")
        return cls(vector.detach()[None], [layer])

    def at(self, layer: int) -> Float[Tensor, " d_model"]:
        """The vector of a layer."""
        if layer not in self.layers:
            raise HooklineError(f"there is no vector of layer {layer}: there are those of {self.layers}")
        return self.vectors[self.layers.index(layer)]

    @property
    def norms(self) -> Float[Tensor, " layer"]:
        """How long each is."""
        return self.vectors.norm(dim=-1)

    def point(self, model: HookedModel, layer: int) -> HookPoint:
        """Where the vector of a layer is added."""
        if layer not in range(model.cfg.n_layers):
            raise HooklineError(f"layer {layer}, but the model has {model.cfg.n_layers}: 0 to {model.cfg.n_layers - 1}")
        return _point(model, self.kind, layer)

    def fitting(self, model: HookedModel, layer: int) -> Float[Tensor, " d_model"]:
        """The vector of a layer, if it is as wide as the model."""
        vector = self.at(layer)
        if vector.shape[0] != model.cfg.d_model:
            raise HooklineError(f"these vectors are {vector.shape[0]} wide, but the model is {model.cfg.d_model}")
        return vector.to(model.cfg.device)

    def save(self, path: str | Path) -> None:
        """Write them to a safetensors file."""
        layers = torch.tensor(self.layers)
        write_tensors(path, "directions", {"vectors": self.vectors, "layers": layers}, {"kind": self.kind, **self.info})

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read what `save` wrote."""
        found, about = read_tensors(path, "directions", called="directions", writer="save")
        with taking_apart(str(path)):
            return cls(found["vectors"], found["layers"].tolist(), about.pop("kind"), about)

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
    normalise: bool = False,
    outliers: Outliers = "exclude",
) -> Directions:
    """The average activation of the positive prompts less that of the negative ones, in each layer.

        vectors = steering.contrast_vectors(model, ["I love it", …], ["I hate it", …])
        vectors.at(2).shape                    # [d_model]

    It is taken at `points` as wide as the stream (`resid_post`, `resid_pre`, `attn_out`, `mlp_out`, …) and at the last
    position, or at another (`pos` is as in `run_with_cache`); at several, or with `pos=None` at all, it is first
    averaged over those of each prompt. Positions where the norm is over 10 times the prompt's median, such as attention
    sinks, are left out of that average; `info` says how many, `outliers="include"` counts them, and a number takes the
    place of the 10. With `normalise` every vector has length 1. The two kinds need not be as many.
    """
    if points.startswith(("vision.", "projector.")):
        raise HooklineError(f"steering vectors are of the language part, and points={points!r} is of what sees")
    wanted = list(range(model.cfg.n_layers)) if layers is None else list(layers)
    wrong = next((each for each in wanted if each not in range(model.cfg.n_layers)), None)
    if wrong is not None or not wanted:
        raise HooklineError(f"layers={wanted}, but the model has {model.cfg.n_layers}: 0 to {model.cfg.n_layers - 1}")
    names = [_point(model, points, layer).name for layer in wanted]
    warn_of_dropout(model)
    left_out: dict[str, Outlying] = {}
    means = [_mean(model, prompts, names, pos, outliers, left_out) for prompts in (positive, negative)]
    vectors = means[0] - means[1]
    if normalise:
        norms = vectors.norm(dim=-1, keepdim=True)
        if bool((norms == 0).any()):
            raise HooklineError("the two kinds of prompts are the same in a layer there: there is nothing to normalise")
        vectors = vectors / norms
    info = {"model": model.cfg.model_name}
    if left_out:
        info["outlying"] = "; ".join(f"{name}: {each}" for name, each in left_out.items())
    return Directions(vectors.to(model.cfg.dtype), wanted, points, info)


def _point(model: HookedModel, kind: str, layer: int) -> HookPoint:
    point = model._points.find(model._points.spelled((kind, layer)))
    if point.stream == "image":
        raise HooklineError(f"steering vectors are of the language part, and {point.name!r} is of what sees")
    if point.axes != "b p d":
        raise HooklineError(
            f"steering adds vectors as wide as the stream, but {point.name!r} has the axes {point.axes}"
        )
    return point


@torch.no_grad()
def _mean(
    model: HookedModel,
    given: Prompt,
    names: list[str],
    pos: Positions,
    outliers: Outliers,
    left_out: dict[str, Outlying],
) -> Float[Tensor, "layer d_model"]:
    """The average over prompts, each of them without padding and outlying positions, which are added to `left_out`."""
    prompts = prompts_of(model, given)
    total = torch.zeros(len(names), model.cfg.d_model, dtype=torch.float64)
    for row in range(len(prompts)):
        cache = model.cache(**prompts.one(row), names_filter=names, pos_slice=pos)
        for layer, name in enumerate(names):
            x = cache[name][0].double().cpu()
            if x.ndim == 1:
                total[layer] += x
                continue
            is_out, found = outlying(row_norms(x), outliers)
            if found.count:
                left_out[name] = left_out.get(name, Outlying()) + found
            total[layer] += (x[~is_out] if found.count else x).mean(0)
    return total / len(prompts)
