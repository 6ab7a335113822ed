"""Reading features: of one run, as a cache; or with a detector."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor

from hookline.engine.cache import ActivationCache
from hookline.engine.callbacks import OnError
from hookline.engine.hooked import Hooked
from hookline.engine.lenses import FIRST
from hookline.engine.names import Filter
from hookline.engine.points import HookPoint
from hookline.errors import HooklineError
from hookline.hooks import Detector
from hookline.sae.autoencoder import SparseAutoencoder
from hookline.sae.splice import flattened

FEATURES = "features"
Autoencoders: TypeAlias = SparseAutoencoder | Iterable[SparseAutoencoder] | Mapping[str, SparseAutoencoder]


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
            self.capture(FEATURES, self.sae.encode(flattened(self.sae, FIRST.get(activation), self.point)))


def run_with_features(model: Hooked, *args: Any, saes: Autoencoders, **kwargs: Any) -> tuple[Any, ActivationCache]:
    """Returns the model's output, and the features at the point of each autoencoder.

        logits, features = run_with_features(model, prompt, saes=sae)
        features["blocks.2.hook_resid_post"]     # [batch, pos, d_sae]; by any name of the point

    `saes` is one or several autoencoders, each read at the point where it was trained, or a mapping from points to
    autoencoders. Everything else is as for `run_with_cache`. Nothing is spliced in: the model's output is unchanged.
    """
    for name in ("names_filter", "incl_bwd", "dtype", "device"):
        if name in kwargs:
            raise HooklineError(
                f"run_with_features does not take {name}: the points are those of `saes`. For gradients of features, "
                f"use sae.spliced(keep_features=True); cast the result with .to(…)"
            )
    pairs = [(model.point(name), sae) for name, sae in _by_name(saes)]
    names = [point.canonical_name for point, _ in pairs]
    if len(set(names)) != len(names):
        raise HooklineError(f"expected one autoencoder per point, but they are at {names}: read them one at a time")
    output, cache = model.run_with_cache(*args, names_filter=[point for point, _ in pairs], **kwargs)
    tensors = {point.name: _features(sae, cache[point.name], point) for point, sae in pairs}
    features = ActivationCache(tensors, model._points, has_batch_dim=cache.has_batch_dim)
    features.forward_pass, features.positions = cache.forward_pass, cache.positions
    return output, features


def _features(sae: SparseAutoencoder, x: Tensor, point: HookPoint) -> Tensor:
    return sae.encode(flattened(sae, x, point))


def _by_name(saes: Autoencoders) -> list[tuple[str, SparseAutoencoder]]:
    if isinstance(saes, Mapping):
        return list(saes.items())
    several = [saes] if isinstance(saes, SparseAutoencoder) else list(saes)
    pairs = [(sae.cfg.hook_name, sae) for sae in several]
    if any(name is None for name, _ in pairs):
        raise HooklineError("an autoencoder has no hook_name: pass saes={'blocks.2.hook_resid_post': sae}")
    if not pairs:
        raise HooklineError("saes is empty")
    return [(str(name), sae) for name, sae in pairs]
