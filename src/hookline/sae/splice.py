"""Autoencoders at a point of a model.

`Splice` inserts one, so that the model continues with its reconstruction. `FeatureDetector` and `run_with_features`
read features and change nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from jaxtyping import Bool
from torch import Tensor, nn

from hookline.edits import DataEdit
from hookline.engine import FIRST, ActivationCache, Hooked, HookPoint, pass_state
from hookline.errors import HooklineError, a_type
from hookline.functions.callers import caller
from hookline.hooks import Controller, Detector
from hookline.hooks.action import ObjectEdit
from hookline.sae.autoencoder import SparseAutoencoder
from hookline.text.outliers import Outliers, factor_of, outlying, row_norms
from hookline.types import Filter, OnError

FeatureEdit: TypeAlias = DataEdit | Callable[..., Tensor | None]
"""An edit of features, such as `zero(neuron=7)`, or a function of them."""

Autoencoders: TypeAlias = SparseAutoencoder | Iterable[SparseAutoencoder] | Mapping[str, SparseAutoencoder]


class Splice(Controller):
    """Inserts an autoencoder at a point: the activation is encoded, its features are edited, and decoded again.

        splice = sae.spliced("blocks.2.hook_resid_post", edits=[add(8.0, neuron=7, pos=last)])
        with model.hooks([splice]): model.generate(prompt)
        model.registry.register_hook("transformer.h.2", splice)

    The edits are those of activations (`zero`, `scale`, `add`, `replace` …, with `neuron=` for the features and
    `pos=`), or functions `f(features)` and `f(features, hook)`, applied in order.

    With `keep_error` the reconstruction error is added back, so that the activation changes only where edits change it,
    and not at all without edits. The error is a constant: gradients flow through the features alone. With
    `keep_error=False` the model continues with the reconstruction, except at outlying positions such as attention
    sinks, where the error is kept. A position is outlying if its norm is over 10 times the median of the positions in
    the same forward pass; `outliers="include"` uses the reconstruction there too. With `keep_features` the features of
    the last call stay available as `splice.features`, with their autograd graph.
    """

    def __init__(
        self,
        sae: SparseAutoencoder,
        point: Filter = None,
        edits: Sequence[FeatureEdit] = (),
        *,
        keep_error: bool = True,
        outliers: Outliers = "exclude",
        keep_features: bool = False,
        hook_id: str | None = None,
        on_error: OnError | None = None,
    ) -> None:
        super().__init__(point, hook_id=hook_id, on_error=on_error)
        if point is None and sae.cfg.hook_name is not None:
            self.place(sae.cfg.hook_name)
        if not isinstance(edits, Sequence) or isinstance(edits, str):
            raise HooklineError(f"edits must be a list of edits of features, not {edits!r}")
        self.sae, self.keep_error, self.keep_features = sae, keep_error, keep_features
        self.edits, self.outliers = tuple(edits), outliers
        self._factor = factor_of(outliers)
        self.features: Tensor | None = None
        self._calls = [_call(edit, sae) for edit in self.edits]

    def action(self, point: HookPoint, dir: str, *, prepend: bool = False) -> ObjectEdit:
        """Returns the action that splices it in at `point`."""
        super().action(point, dir, prepend=prepend)  # raises if the hook cannot be there
        return SpliceAction(point, self, prepend=prepend)

    def check_points(self, points: list[HookPoint]) -> None:
        """Raise if it keeps features and is at several points: only the last ones would be kept."""
        if self.keep_features and len(points) > 1:
            raise HooklineError(
                f"keep_features needs a single point, but the splice would be at {len(points)} "
                f"({points[0].name!r}, {points[1].name!r}, …): create one splice per point"
            )

    def modify_activations(self, module: nn.Module, inputs: Tensor | None, output: Tensor | None) -> Tensor | None:  # noqa: ARG002
        """Returns the reconstruction, plus its error with `keep_error`."""
        if output is None:
            raise HooklineError("to splice an autoencoder in at an input, name the point: 'layer.input'")
        x = self.sae.flattened(output, self.point)
        original_features = self.sae.encode(x)
        features = self._edited(original_features)
        if self.keep_features:
            self.features = features
        if self.keep_error and features is original_features and not torch.is_grad_enabled():
            return None
        new = self.sae.decode(features, x)
        is_kept = None if self.keep_error else self._outlying(x)
        if self.keep_error or is_kept is not None:
            # Not new + (x - seen): that would be x only within rounding where nothing is edited.
            seen = new if features is original_features else self.sae.decode(original_features, x)
            with_error = x.detach() + (new - seen.detach())
            new = with_error if is_kept is None else torch.where(is_kept[..., None], with_error, new)
        return new.view(output.shape)

    def _outlying(self, x: Tensor) -> Bool[Tensor, "*place"] | None:
        """A mask of the outlying positions, compared with the other tokens of the same pass; None if there are none."""
        if math.isinf(self._factor) or x.ndim < 2:
            return None
        norms = row_norms(x, x.ndim - 1)
        is_text = torch.ones_like(norms, dtype=torch.bool)
        if pass_state.forward_pass is not None and self.point.stream != "image":
            span = pass_state.forward_pass.span_at(self.point.stream)
            real = span.real()[:, span.positions.start : span.positions.stop].to(x.device)
            is_text = real if real.shape == norms.shape else is_text
        is_out = torch.zeros_like(is_text)
        is_out[is_text] = outlying(norms[is_text], self.outliers)[0]
        return is_out if bool(is_out.any()) else None

    def as_data(self) -> tuple[Any, ...]:
        """Returns the values that determine its output; a harvest compares splices by them."""
        return (self.sae, self.edits, self.keep_error, *(() if self.keep_error else (self._factor,)))

    def _edited(self, features: Tensor) -> Tensor:
        for edit, call in zip(self.edits, self._calls, strict=True):
            clone = features.clone()
            result = call(clone, self.point)
            new = clone if result is None else result
            if not isinstance(new, Tensor) or new.shape != features.shape:
                what = f"the shape {list(new.shape)}" if isinstance(new, Tensor) else a_type(new)
                raise HooklineError(
                    f"the edit {edit!r} returned {what}; the features have the shape {list(features.shape)}"
                )
            features = new
        return features

    def acted(self, number: int) -> bool:
        """Whether an edit applied to a position of the last call."""
        return getattr(self._calls[number], "acted", True)

    def __repr__(self) -> str:
        error = "" if self.keep_error else ", keep_error=False"
        edits = f", edits={list(self.edits)}" if self.edits else ""
        return f"<Splice of {self.sae.d_sae} features at {self.layer_signature!r}{edits}{error}>"


class SpliceAction(ObjectEdit):
    """A splice at its point. If the positions of an edit never occur, it is reported as not fired."""

    hook: Splice

    def __init__(self, point: HookPoint, hook: Splice, *, prepend: bool = False) -> None:
        super().__init__(point, hook, prepend=prepend)
        self._pending = set(range(len(hook.edits)))

    def _invoke(self, given: Any, point: HookPoint) -> Any:
        result = super()._invoke(given, point)
        if self._pending:
            self._pending -= {number for number in self._pending if self.hook.acted(number)}
            edits = [self.hook.edits[number] for number in sorted(self._pending)]
            self.why_not = f"no position of the run matches {edits[0]!r}" if edits else None
            self.fired = not edits
        return result


def _call(edit: Any, sae: SparseAutoencoder) -> Callable[[Tensor, Any], Tensor | None]:
    """The function that applies an edit; invalid edits raise here."""
    if not isinstance(edit, DataEdit):
        return caller(edit)
    if edit.head is not None:
        raise HooklineError(f"{edit!r}: features have no heads; select features with neuron=")
    chosen = [edit.neuron] if isinstance(edit.neuron, int) else list(edit.neuron or ())
    for feature in chosen:
        check_feature(sae, feature)
    return edit.at_positions() or edit.everywhere


def check_feature(sae: SparseAutoencoder, feature: int) -> None:
    """Raise unless the feature exists."""
    if isinstance(feature, bool) or not isinstance(feature, int) or feature not in range(-sae.d_sae, sae.d_sae):
        raise HooklineError(f"feature {feature!r} does not exist: there are {sae.d_sae}, 0 to {sae.d_sae - 1}")


class FeatureDetector(Detector):
    """Reads the features at a point, [batch, pos, d_sae], without changing anything.

    detector = sae.detector("blocks.2.hook_resid_post")
    model.run_with_hooks(prompt, fwd_hooks=[detector])
    detector.get_captured()
    """

    def __init__(
        self,
        sae: SparseAutoencoder,
        point: Filter = None,
        *,
        keep_all: bool = False,
        hook_id: str | None = None,
        on_error: OnError | None = None,
    ) -> None:
        super().__init__(point, hook_id=hook_id, keep_all=keep_all, on_error=on_error)
        if point is None and sae.cfg.hook_name is not None:
            self.place(sae.cfg.hook_name)
        self.sae = sae

    def process_activation(self, activation: Any) -> None:
        """Capture the features of the first tensor in it."""
        with torch.no_grad():
            self.capture("features", self.sae.encode(self.sae.flattened(FIRST.get(activation), self.point)))


def run_with_features(model: Hooked, *args: Any, saes: Autoencoders, **kwargs: Any) -> tuple[Any, ActivationCache]:
    """Returns the model's output, and the features at the point of each autoencoder.

        >>> logits, features = hookline.sae.run_with_features(model, prompt, saes=sae)
        >>> features["blocks.2.hook_resid_post"].shape
        torch.Size([1, 14, 64])

    `saes` is one or several autoencoders, each read at the point where it was trained, or a mapping from points to
    autoencoders. Everything else is as for `run_with_cache`. Nothing is spliced in: the model's output is unchanged.
    """
    for name in ("names_filter", "incl_bwd", "dtype", "device"):
        if name in kwargs:
            raise HooklineError(
                f"run_with_features does not take {name}: the points are those of `saes`. For gradients of features, "
                f"use sae.spliced(keep_features=True); cast the result with .to(…)"
            )
    pairs = autoencoders_at(model, saes)
    output, cache = model.run_with_cache(*args, names_filter=[point for point, _ in pairs], **kwargs)
    tensors = {point.name: sae.encode(sae.flattened(cache[point.name], point)) for point, sae in pairs}
    features = ActivationCache(tensors, model.index, has_batch_dim=cache.has_batch_dim)
    features.forward_pass, features.positions = cache.forward_pass, cache.positions
    return output, features


def autoencoders_at(model: Hooked, saes: Autoencoders) -> list[tuple[HookPoint, SparseAutoencoder]]:
    """Each autoencoder with its point; no point has two."""
    pairs = [(model.point(name), sae) for name, sae in _by_name(saes)]
    names = [point.canonical_name for point, _ in pairs]
    if len(set(names)) != len(names):
        raise HooklineError(f"expected one autoencoder per point, but they are at {names}: read them one at a time")
    return pairs


def _by_name(saes: Autoencoders) -> list[tuple[str, SparseAutoencoder]]:
    if isinstance(saes, Mapping):
        return list(saes.items())
    several = [saes] if isinstance(saes, SparseAutoencoder) else list(saes) if isinstance(saes, Iterable) else [saes]
    if not several:
        raise HooklineError("saes is empty")
    if not all(isinstance(sae, SparseAutoencoder) for sae in several):
        raise HooklineError(f"saes are autoencoders, or a mapping from points to autoencoders, got {saes!r}")
    if any(sae.cfg.hook_name is None for sae in several):
        raise HooklineError("an autoencoder has no hook_name: pass saes={'blocks.2.hook_resid_post': sae}")
    return [(str(sae.cfg.hook_name), sae) for sae in several]
