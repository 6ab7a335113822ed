"""Directions in the residual stream: one per layer, the difference between two kinds of prompts."""

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
from hookline.hooks.fitting import averaged
from hookline.model import HookedModel
from hookline.text.outliers import Outliers, Outlying
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
                f"directions are float vectors at numbered layers, got {self.vectors.dtype} at {self.layers}"
            )
        if self.vectors.ndim != 2 or len(self.vectors) != len(self.layers) or len({*self.layers}) < len(self.layers):
            raise HooklineError(
                f"directions need one vector per layer, [layer, d_model], got {list(self.vectors.shape)} for layers "
                f"{self.layers}"
            )

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
        if layer not in range(model.cfg.n_layers):
            raise HooklineError(f"layer {layer} is out of range: the model has layers 0 to {model.cfg.n_layers - 1}")
        return _point(model, self.kind, layer)

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
    normalize: bool = False,
    outliers: Outliers = "exclude",
) -> Directions:
    """The mean activation of the positive prompts minus that of the negative ones, in each layer.

        vectors = steering.contrast_vectors(model, ["I love it", …], ["I hate it", …])
        vectors.at(2).shape                    # [d_model]

    `points` must have the width of the stream (`resid_post`, `resid_pre`, `attn_out`, `mlp_out`, …). Activations are
    read at the last position, or at `pos` (as in `run_with_cache`); over several positions, or all with `pos=None`,
    each prompt is averaged first. Positions where the norm is more than 10 times the prompt's median, such as attention
    sinks, are excluded from that average; `info` reports how many, `outliers="include"` includes them, and a number
    replaces the 10. With `normalize`, every vector has norm 1. The two lists may differ in length.
    """
    if points.startswith(("vision.", "projector.")):
        raise HooklineError(f"steering needs a language-model point; points={points!r} is in the vision tower")
    wanted = list(range(model.cfg.n_layers)) if layers is None else list(layers)
    wrong = next((each for each in wanted if each not in range(model.cfg.n_layers)), None)
    if wrong is not None or not wanted:
        raise HooklineError(f"layers={wanted} is out of range: the model has layers 0 to {model.cfg.n_layers - 1}")
    names = [_point(model, points, layer).name for layer in wanted]
    warn_of_dropout(model)
    left_out: dict[str, Outlying] = {}
    means = [_mean(model, prompts, names, pos, outliers, left_out) for prompts in (positive, negative)]
    vectors = means[0] - means[1]
    if normalize:
        norms = vectors.norm(dim=-1, keepdim=True)
        if bool((norms == 0).any()):
            raise HooklineError("the prompts have the same mean in a layer: a zero vector cannot be normalized")
        vectors = vectors / norms
    info = {"model": model.cfg.model_name}
    if left_out:
        info["outlying"] = "; ".join(f"{name}: {each}" for name, each in left_out.items())
    return Directions(vectors.to(model.cfg.dtype), wanted, points, info)


def _point(model: HookedModel, kind: str, layer: int) -> HookPoint:
    point = model._points.find(model._points.name_of((kind, layer)))
    if point.stream == "image":
        raise HooklineError(f"steering needs a language-model point; {point.name!r} is in the vision tower")
    if point.axes != "b p d":
        raise HooklineError(
            f"steering needs a point with the width of the residual stream, but {point.name!r} has axes {point.axes}"
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
    """The mean over prompts, without padding and outlying positions, which are added to `left_out`."""
    prompts = prompts_of(model, given)
    total = torch.zeros(len(names), model.cfg.d_model, dtype=torch.float64)
    for row in range(len(prompts)):
        cache = model.cache(**prompts.one(row), names_filter=names, pos_slice=pos)
        for layer, name in enumerate(names):
            mean, found = averaged(cache[name].reshape(1, -1, model.cfg.d_model), "b p d", None, outliers)
            if found.count:
                left_out[name] = left_out.get(name, Outlying()) + found
            total[layer] += mean[0, 0].cpu()
    return total / len(prompts)
