"""Features of autoencoders as nodes of circuits: what each adds to an activation, and runs that keep only some of them.

At the point of an autoencoder, an activation is a sum of features and of an error, which is what the autoencoder
misses. Each feature is a node, and so is the error, at all positions together or at each.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from hookline.engine import HookPoint, compiling
from hookline.errors import HooklineError
from hookline.experiments.circuits.masked_runs import in_batches
from hookline.experiments.core.integration import ran
from hookline.experiments.core.labels import Label
from hookline.experiments.core.prompts import Prompts
from hookline.experiments.result import Result
from hookline.model import HookedModel
from hookline.sae.autoencoder import SparseAutoencoder
from hookline.sae.splice import Autoencoders, autoencoders_at
from hookline.values.rows import drawn_once

ERROR = -1
"""The number of the error among the features of an autoencoder."""
_LABEL = re.compile(r"(?P<point>[^/]+)/(?P<what>\d+|error)(?: at (?P<place>.*))?", re.DOTALL)


@dataclass(frozen=True)
class FeatureNode:
    """A feature, or the error, of the autoencoder at a point; at one position or at all."""

    point: str
    feature: int
    place: Label | None = None

    @property
    def label(self) -> str:
        """Its label in results, "blocks.1.hook_resid_post/17" or "blocks.1.hook_resid_post/error at 9: John"."""
        what = "error" if self.feature == ERROR else self.feature
        return f"{self.point}/{what}" + ("" if self.place is None else f" at {self.place}")

    @classmethod
    def of(cls, label: Any) -> FeatureNode:
        """The node with this label."""
        match = _LABEL.fullmatch(label) if isinstance(label, str) else None
        if match is None:
            raise HooklineError(
                f"{label!r} is not a feature: a label is the name of a point, and a number or 'error', as in "
                f"'blocks.1.hook_resid_post/17'"
            )
        return cls(match["point"], ERROR if match["what"] == "error" else int(match["what"]), match["place"])


@dataclass(frozen=True, eq=False)
class Dictionary:
    """An autoencoder at a point."""

    point: HookPoint
    sae: SparseAutoencoder

    def split(self, x: Tensor) -> tuple[Float[Tensor, "batch pos d_in"], Float[Tensor, "batch pos d_sae"]]:
        """An activation with its heads flattened, and its features."""
        flat = self.sae.flattened(x, self.point)
        return flat, self.sae.encode(flat)


def dictionaries(model: HookedModel, saes: Autoencoders) -> dict[str, Dictionary]:
    """The autoencoders by the names of their points, in the order of the model's points."""
    listed = {point.site: point for point in model.hook_dict.values()}  # a module's name means the point there
    autoencoders = [Dictionary(listed.get(point.site, point), sae) for point, sae in autoencoders_at(model, saes)]
    for dictionary in autoencoders:
        name, axes = dictionary.point.name, dictionary.point.axes.split()
        if dictionary.point.stream == "image" or axes[:2] != ["b", "p"] or len(axes) not in (3, 4):
            raise HooklineError(f"features at {name!r} are not supported: use a point of text, with axes batch and pos")
    order = {point.canonical_name: at for at, point in enumerate(model.hook_dict.values())}
    autoencoders.sort(key=lambda dictionary: order[dictionary.point.canonical_name])
    return {
        dictionary.point.canonical_name: replace(dictionary, point=model.point(dictionary.point.canonical_name))
        for dictionary in autoencoders
    }


@dataclass(frozen=True, eq=False)
class FeatureChanges:
    """How far the features and the error at a point are from those of another run."""

    at: Dictionary
    there: Float[Tensor, "batch pos d_in"]
    own: Float[Tensor, "batch pos d_sae"]
    given: Float[Tensor, "batch pos d_sae"]
    error: Float[Tensor, "batch pos d_in"]
    mask: Bool[Tensor, "batch pos"]

    @classmethod
    def between(cls, at: Dictionary, start: Tensor, end: Tensor, mask: Tensor) -> FeatureChanges:
        """From the activation of one run, `start`, to that of another, `end`."""
        (x, start_features), (y, features) = at.split(start), at.split(end)
        if mask.shape != x.shape[:2]:
            raise HooklineError(
                f"{at.point.name!r} has the shape {list(x.shape)}, but the prompts {list(mask.shape)}: features are "
                f"nodes at the positions of the prompt"
            )
        moved = at.sae.decode(features, x) - at.sae.decode(start_features, x)
        return cls(at, x, start_features, features, (y.float() - x.float()) - moved, mask)

    @classmethod
    def to_zero(cls, at: Dictionary, start: Tensor, mask: Tensor) -> FeatureChanges:
        """From the activation of a run to one without features and error."""
        x, features = at.split(start)
        return cls(at, x, features, torch.zeros_like(features), at.sae.decode(features, x).float() - x.float(), mask)

    def end(self, like: Tensor) -> Tensor:
        """The activation with all changes, in the shape and dtype of another."""
        x = self.there.float()
        moved = self.at.sae.decode(self.given, self.there) - self.at.sae.decode(self.own, self.there)
        return (x + moved.float() + self.error).to(like).view(like.shape)

    @property
    def is_node(self) -> Bool[Tensor, "batch pos node"]:
        """Which features differ between the two runs; the error is the last."""
        differs = [self.own != self.given, self.error.any(-1, keepdim=True)]
        return torch.cat(differs, -1) & self.mask[..., None]

    def weights(self, gradient: Tensor) -> tuple[Float[Tensor, "batch pos d_sae"], Float[Tensor, "batch pos d_in"]]:
        """The gradient of each feature, and that of the error, given that of the activation."""
        flat = self.at.sae.flattened(gradient, self.at.point).float()
        with torch.enable_grad():
            features = self.own.detach().requires_grad_()
            (feature_gradient,) = torch.autograd.grad(
                self.at.sae.decode(features, self.there), features, flat.to(features)
            )
        return feature_gradient, flat

    def effects(self, gradient: Tensor) -> Float[Tensor, "batch pos node"]:
        """The change of each feature, and of the error, times its gradient."""
        weights, flat = self.weights(gradient)
        effects = [(self.given - self.own) * weights, (self.error * flat).sum(-1, keepdim=True)]
        return torch.cat(effects, -1).float() * self.mask[..., None]

    def change(self, feature: int) -> Float[Tensor, "batch pos d_in"]:
        """How far the activation moves if only this feature, or the error, does."""
        if feature == ERROR:
            return self.error
        moved = self.own.clone()
        moved[..., feature] = self.given[..., feature]
        return self.at.sae.decode(moved, self.there) - self.at.sae.decode(self.own, self.there)


class FeatureRuns:
    """Runs of one prompt in which the nodes of a mask have the values of the run, and all others those of another.

    A feature outside the mask has its value in the corrupted run, and an error outside it is that of the corrupted run.
    Without a corrupted prompt, both are 0.
    """

    def __init__(
        self,
        model: HookedModel,
        autoencoders: Mapping[str, Dictionary],
        units: Sequence[tuple[str, int]],
        clean: Prompts,
        corrupted: Prompts | None,
    ) -> None:
        self.model, self.prompt = model, clean
        self._far: dict[str, tuple[Tensor, Tensor]] = {}
        """The activation and the features of the corrupted run at each point, if there is one."""
        if corrupted is not None:
            _, far = ran(model, corrupted, [dictionary.point.name for dictionary in autoencoders.values()])
            self._far = {
                name: dictionary.split(far[dictionary.point.name]) for name, dictionary in autoencoders.items()
            }
        self._known = autoencoders
        self._numbers: dict[str, Int[Tensor, " d_sae_1"]] = {}
        """The number of the unit of each feature, the error last; the last number is that of no unit."""
        for name, dictionary in autoencoders.items():
            self._numbers[name] = torch.full((dictionary.sae.d_sae + 1,), len(units))
        for number, (name, feature) in enumerate(units):
            self._numbers[name][feature] = number

    def logits(
        self, masks: Sequence[Bool[Tensor, "unit place"]], positions: Sequence[int], most: int | None = None
    ) -> Iterator[tuple[Sequence[int], Float[Tensor, "row pos vocab"]]]:
        """Numbers of some masks, `most` of them at once, with the logits of their runs at these positions."""
        size = 16 * max(dictionary.sae.d_sae for dictionary in self._known.values()) * self.prompt.width
        return in_batches(self._run, masks, positions, most, self.prompt.width, size)

    @torch.no_grad()
    def _run(self, masks: Bool[Tensor, "row unit place"]) -> Float[Tensor, "row pos vocab"]:
        rows, device = len(masks), self.prompt.tokens.device
        padded_masks = torch.cat([masks, masks.new_zeros(rows, 1, masks.shape[-1])], 1).to(device)
        hooks: list[Any] = [
            (dictionary.point.name, self._mixer(name, padded_masks)) for name, dictionary in self._known.items()
        ]
        with drawn_once(rows), compiling.left_out("its features are masked"):
            return self.model.run_with_hooks(self.prompt.tokens.expand(rows, -1), fwd_hooks=hooks)

    def _mixer(self, name: str, padded_masks: Bool[Tensor, "row unit_1 place"]) -> Any:
        at, rows = self._known[name], len(padded_masks)
        far = [x.expand(rows, -1, -1) for x in self._far.get(name, ())]
        sae, numbers = at.sae, self._numbers[name]

        def mix(x: Tensor) -> Tensor:
            flat, features = at.split(x)
            mask = padded_masks[:, numbers].transpose(1, 2)  # row, place, feature
            mixed = torch.where(mask[..., :-1], features, far[1] if far else torch.zeros_like(features))
            # From the run whose error it has, so that a run with all nodes, or none, has just that activation.
            inside = flat + (sae.decode(mixed, flat) - sae.decode(features, flat)).to(x)
            if far:
                outside = far[0] + (sae.decode(mixed, far[0]) - sae.decode(far[1], far[0])).to(x)
            else:
                outside = sae.decode(mixed, flat).to(x)
            return torch.where(mask[..., -1:], inside, outside).view(x.shape)

        return mix


def without_features(
    model: HookedModel, autoencoders: Mapping[str, Dictionary], prompts: Prompts
) -> Float[Tensor, "batch pos vocab"]:
    """The logits of runs in which all features and errors are 0."""
    none, rows = torch.zeros(1, 0, 1, dtype=torch.bool), []
    for row in range(len(prompts)):
        alone = Prompts.of_rows([prompts.row(row)[0]])
        rows.append(FeatureRuns(model, autoencoders, [], alone, None)._run(none)[0])
    return prompts.padded(rows)


def feature_nodes(scores: Result, autoencoders: Mapping[str, Dictionary]) -> list[FeatureNode]:
    """The nodes of scores, checked."""
    nodes = [FeatureNode.of(label) for label in scores.coords["node"]]
    for node in nodes:
        if node.point not in autoencoders:
            raise HooklineError(
                f"the scores have features at {node.point!r}, but saes has none there: it has {', '.join(autoencoders)}"
            )
        if node.feature >= (size := autoencoders[node.point].sae.d_sae):
            raise HooklineError(
                f"the scores have the feature {node.label!r}, but the autoencoder there has {size}: it is another one"
            )
    return nodes


def check_ablation(scores: Result, corrupted: Any) -> None:
    """Raise if scores are not of the same replacement of features: by those of a corrupted run, or by 0."""
    is_zero = scores.info.get("ablation") == "zero"
    if is_zero != (corrupted is None):
        what = (
            "of features set to 0: pass corrupted=None" if is_zero else "of features of a corrupted run: pass it, too"
        )
        raise HooklineError(f"the scores are {what}, or compute them again")
