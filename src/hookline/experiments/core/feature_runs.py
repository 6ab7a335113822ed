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

from hookline.engine.batch_index import drawn_once
from hookline.engine.compiling import left_out
from hookline.engine.points import HookPoint
from hookline.errors import HooklineError
from hookline.experiments.core.integration import ran
from hookline.experiments.core.labels import Label
from hookline.experiments.core.masked_runs import in_batches
from hookline.experiments.core.prompts import Prompts
from hookline.experiments.result import Result
from hookline.model import HookedModel
from hookline.sae.autoencoder import SparseAutoencoder
from hookline.sae.splice import Autoencoders, autoencoders_at

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
        found = _LABEL.fullmatch(label) if isinstance(label, str) else None
        if found is None:
            raise HooklineError(
                f"{label!r} is not a feature: a label is the name of a point, and a number or 'error', as in "
                f"'blocks.1.hook_resid_post/17'"
            )
        return cls(found["point"], ERROR if found["what"] == "error" else int(found["what"]), found["place"])


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
    found = [Dictionary(listed.get(point.site, point), sae) for point, sae in autoencoders_at(model, saes)]
    for each in found:
        name, axes = each.point.name, each.point.axes.split()
        if each.point.stream == "image" or axes[:2] != ["b", "p"] or len(axes) not in (3, 4):
            raise HooklineError(f"features at {name!r} are not supported: use a point of text, with axes batch and pos")
    order = {point.canonical_name: at for at, point in enumerate(model.hook_dict.values())}
    found.sort(key=lambda each: order[each.point.canonical_name])
    return {each.point.canonical_name: replace(each, point=model.point(each.point.canonical_name)) for each in found}


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
    def between(cls, at: Dictionary, there: Tensor, given: Tensor, mask: Tensor) -> FeatureChanges:
        """From the activation of one run, `there`, to that of another, `given`."""
        (x, own), (y, features) = at.split(there), at.split(given)
        if mask.shape != x.shape[:2]:
            raise HooklineError(
                f"{at.point.name!r} has the shape {list(x.shape)}, but the prompts {list(mask.shape)}: features are "
                f"nodes at the positions of the prompt"
            )
        moved = at.sae.decode(features, x) - at.sae.decode(own, x)
        return cls(at, x, own, features, (y.float() - x.float()) - moved, mask)

    @classmethod
    def to_zero(cls, at: Dictionary, there: Tensor, mask: Tensor) -> FeatureChanges:
        """From the activation of a run to one without features and error."""
        x, own = at.split(there)
        return cls(at, x, own, torch.zeros_like(own), at.sae.decode(own, x).float() - x.float(), mask)

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
            (found,) = torch.autograd.grad(self.at.sae.decode(features, self.there), features, flat.to(features))
        return found, flat

    def effects(self, gradient: Tensor) -> Float[Tensor, "batch pos node"]:
        """The change of each feature, and of the error, times its gradient."""
        weights, flat = self.weights(gradient)
        each = [(self.given - self.own) * weights, (self.error * flat).sum(-1, keepdim=True)]
        return torch.cat(each, -1).float() * self.mask[..., None]

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
        known: Mapping[str, Dictionary],
        units: Sequence[tuple[str, int]],
        clean: Prompts,
        corrupted: Prompts | None,
    ) -> None:
        self.model, self.prompt = model, clean
        self._far: dict[str, tuple[Tensor, Tensor]] = {}
        """The activation and the features of the corrupted run at each point, if there is one."""
        if corrupted is not None:
            _, far = ran(model, corrupted, [each.point.name for each in known.values()])
            self._far = {name: each.split(far[each.point.name]) for name, each in known.items()}
        self._known = known
        self._numbers: dict[str, Int[Tensor, " d_sae_1"]] = {}
        """The number of the unit of each feature, the error last; the last number is that of no unit."""
        for name, each in known.items():
            self._numbers[name] = torch.full((each.sae.d_sae + 1,), len(units))
        for number, (name, feature) in enumerate(units):
            self._numbers[name][feature] = number

    def logits(
        self, masks: Sequence[Bool[Tensor, "unit place"]], positions: Sequence[int], most: int | None = None
    ) -> Iterator[tuple[Sequence[int], Float[Tensor, "row pos vocab"]]]:
        """Numbers of some masks, `most` of them at once, with the logits of their runs at these positions."""
        size = 16 * max(each.sae.d_sae for each in self._known.values()) * self.prompt.width
        return in_batches(self._run, masks, positions, most, self.prompt.width, size)

    @torch.no_grad()
    def _run(self, masks: Bool[Tensor, "row unit place"]) -> Float[Tensor, "row pos vocab"]:
        rows, device = len(masks), self.prompt.tokens.device
        kept = torch.cat([masks, masks.new_zeros(rows, 1, masks.shape[-1])], 1).to(device)
        hooks: list[Any] = [(each.point.name, self._mixer(name, kept)) for name, each in self._known.items()]
        with drawn_once(rows), left_out("its features are masked"):
            return self.model.run_with_hooks(self.prompt.tokens.expand(rows, -1), fwd_hooks=hooks)

    def _mixer(self, name: str, kept: Bool[Tensor, "row unit_1 place"]) -> Any:
        at, rows = self._known[name], len(kept)
        far = [x.expand(rows, -1, -1) for x in self._far.get(name, ())]
        sae, numbers = at.sae, self._numbers[name]

        def mix(x: Tensor) -> Tensor:
            own, features = at.split(x)
            mask = kept[:, numbers].transpose(1, 2)  # row, place, feature
            mixed = torch.where(mask[..., :-1], features, far[1] if far else torch.zeros_like(features))
            # From the run whose error it has, so that a run with all nodes, or none, has just that activation.
            inside = own + (sae.decode(mixed, own) - sae.decode(features, own)).to(x)
            if far:
                outside = far[0] + (sae.decode(mixed, far[0]) - sae.decode(far[1], far[0])).to(x)
            else:
                outside = sae.decode(mixed, own).to(x)
            return torch.where(mask[..., -1:], inside, outside).view(x.shape)

        return mix


def without_features(
    model: HookedModel, known: Mapping[str, Dictionary], prompts: Prompts
) -> Float[Tensor, "batch pos vocab"]:
    """The logits of runs in which all features and errors are 0."""
    none, rows = torch.zeros(1, 0, 1, dtype=torch.bool), []
    for row in range(len(prompts)):
        alone = Prompts.of_rows([prompts.row(row)[0]])
        rows.append(FeatureRuns(model, known, [], alone, None)._run(none)[0])
    return prompts.padded(rows)


def feature_nodes(scores: Result, known: Mapping[str, Dictionary]) -> list[FeatureNode]:
    """The nodes of scores, checked."""
    found = [FeatureNode.of(label) for label in scores.coords["node"]]
    for node in found:
        if node.point not in known:
            raise HooklineError(
                f"the scores have features at {node.point!r}, but saes has none there: it has {', '.join(known)}"
            )
        if node.feature >= (size := known[node.point].sae.d_sae):
            raise HooklineError(
                f"the scores have the feature {node.label!r}, but the autoencoder there has {size}: it is another one"
            )
    return found


def check_ablation(scores: Result, corrupted: Any) -> None:
    """Raise if scores are not of the same replacement of features: by those of a corrupted run, or by 0."""
    is_zero = scores.info.get("ablation") == "zero"
    if is_zero != (corrupted is None):
        what = (
            "of features set to 0: pass corrupted=None" if is_zero else "of features of a corrupted run: pass it, too"
        )
        raise HooklineError(f"the scores are {what}, or compute them again")
