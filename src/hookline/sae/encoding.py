"""Reading features: of a run, as a cache of them; or with a detector that stays."""

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
    """Reads the features of what passes, [batch, pos, d_sae], and changes nothing.

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
        """Keep the features of the first tensor of it."""
        with torch.no_grad():
            self.capture(FEATURES, self.sae.encode(flattened(self.sae, FIRST.get(activation), self.point)))


def run_with_features(model: Hooked, *args: Any, saes: Autoencoders, **kwargs: Any) -> tuple[Any, ActivationCache]:
    """The model's output, and the features at each point that there is an autoencoder for.

        logits, features = run_with_features(model, prompt, saes=sae)
        features["blocks.2.hook_resid_post"]     # [batch, pos, d_sae]; by any name of the point

    `saes` is an autoencoder, or several, each for the point that it was trained at; or a mapping from points to
    autoencoders. All else is as for `run_with_cache`. Nothing is spliced in: the model runs as it does.
    """
    for name in ("names_filter", "incl_bwd", "dtype", "device"):
        if name in kwargs:
            raise HooklineError(
                f"run_with_features does not take {name}: the points are those of `saes`; for gradients of features "
                f"splice them in with keep_features=True, and cast what comes back with .to(…)"
            )
    pairs = [(model.point(name), sae) for name, sae in _by_name(saes)]
    names = [point.listed for point, _ in pairs]
    if len(set(names)) != len(names):
        raise HooklineError(f"one autoencoder for each point, but they are for {names}: read them one after the other")
    output, cache = model.run_with_cache(*args, names_filter=[point for point, _ in pairs], **kwargs)
    tensors = {point.name: _features(sae, cache[point.name], point) for point, sae in pairs}
    features = ActivationCache(tensors, model._points, has_batch_dim=cache.has_batch_dim)
    features.passing, features.positions = cache.passing, cache.positions
    return output, features


def _features(sae: SparseAutoencoder, x: Tensor, point: HookPoint) -> Tensor:
    return sae.encode(flattened(sae, x, point))


def _by_name(saes: Autoencoders) -> list[tuple[str, SparseAutoencoder]]:
    if isinstance(saes, Mapping):
        return list(saes.items())
    several = [saes] if isinstance(saes, SparseAutoencoder) else list(saes)
    pairs = [(sae.cfg.hook_name, sae) for sae in several]
    if any(name is None for name, _ in pairs):
        raise HooklineError("an autoencoder does not say where it belongs: give saes={'blocks.2.hook_resid_post': sae}")
    if not pairs:
        raise HooklineError("there is no autoencoder in saes")
    return [(str(name), sae) for name, sae in pairs]
