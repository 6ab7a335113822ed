"""The autoencoders of an explorer: each is at a point of the model, and a store has the texts of their top contexts."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeAlias
from weakref import ref

import torch
from torch import Tensor, nn

from hookline.errors import HooklineError
from hookline.model import HookedModel
from hookline.sae import Profile, SparseAutoencoder, profile
from hookline.store import Rows, Store, open_store
from hookline.store.identity import tokenizer_digest, weights_digest

Given: TypeAlias = SparseAutoencoder | str | os.PathLike[str]
"""An autoencoder, or its folder."""
SaesGiven: TypeAlias = Given | Iterable[Given] | Mapping[str, Given]
"""One or several, each at the point where it was trained; or by point."""

Versions: TypeAlias = tuple[Any, ...]
"""Compares equal to a later one unless something has changed in between."""

CONTEXTS = 12
"""Top contexts of a feature."""
_MOST_KEPT = 64


class AttachedSae(NamedTuple):
    """An autoencoder at a point, with the name that the page shows; `path` is None if it was not given as a folder."""

    name: str
    point: str
    sae: SparseAutoencoder
    path: str | None

    def features(self, model: HookedModel, x: Tensor) -> Tensor:
        """The features [pos, d_sae] of the activation of one prompt."""
        return self.sae.encode(self.sae.flattened(x, model.point(self.point)))[0].float()


class AttachedSaes:
    """The autoencoders that an explorer was given, and a store for top contexts.

    saes = AttachedSaes(model, "my_sae", store="activations")
    saes.named("my_sae").point
    saes.profile(model, "my_sae").top(7)       # reads the store once, and keeps what it found
    """

    def __init__(
        self, model: HookedModel, saes: SaesGiven, store: str | os.PathLike[str] | Store | None = None
    ) -> None:
        self.all: list[AttachedSae] = []
        for point, source in _pairs(saes):
            self.all.append(self._attached(model, point, source))
        if not self.all:
            raise HooklineError("saes is empty: pass an autoencoder, or the path of its folder")
        self.store = None if store is None else _watched(store)
        self._profiles: dict[str, tuple[Versions, Profile]] = {}
        self._kept: dict[Any, Any] = {}
        self.notes = [] if self.store is None else self._compared(model, self.store)

    @classmethod
    def given(
        cls, model: HookedModel, saes: SaesGiven | None, store: str | os.PathLike[str] | Store | None
    ) -> Self | None:
        """The autoencoders and the store that the caller gave; None without an autoencoder."""
        if saes is None and store is not None:
            raise HooklineError("a store is for the top contexts of features: pass saes=…, too (--sae)")
        return None if saes is None else cls(model, saes, store)

    def named(self, name: str) -> AttachedSae:
        """The autoencoder with a name; "" is the first."""
        for attached in self.all:
            if name in ("", attached.name):
                return attached
        names = ", ".join(repr(attached.name) for attached in self.all)
        raise HooklineError(f"there is no autoencoder {name!r} in this explorer: there are {names}")

    def about(self) -> list[dict[str, Any]]:
        """What the page needs to know about them."""
        return [
            {
                "name": attached.name,
                "point": attached.point,
                "d_sae": attached.sae.d_sae,
                "about": attached.sae.extra_repr(),
            }
            for attached in self.all
        ]

    def profile(self, model: HookedModel, name: str) -> Profile:
        """The top contexts of all features in the store; read once."""
        attached = self.named(name)
        if self.store is None:
            raise HooklineError("top contexts need a store of activations: hookline explore MODEL --sae … --store PATH")
        sae_profile = self.known_profile(attached.name)
        if sae_profile is None:
            now, sae_profile = (
                weight_versions(attached.sae),
                profile(attached.sae, model, self.store, k=CONTEXTS, point=attached.point),
            )
            self._profiles[attached.name] = now, sae_profile
        return sae_profile

    def known_profile(self, name: str) -> Profile | None:
        """The top contexts, if the store was read before with the autoencoder as it is now."""
        attached = self.named(name)
        before, sae_profile = self._profiles.get(attached.name, ((), None))
        return sae_profile if before == weight_versions(attached.sae) else None

    def kept(self, key: Any, make: Callable[[], Any]) -> Any:
        """A value that is computed once for a key; a few of the latest are kept."""
        if key not in self._kept:
            self._kept = dict(list(self._kept.items())[1 - _MOST_KEPT :])
            self._kept[key] = make()
        return self._kept[key]

    def _attached(self, model: HookedModel, point: str | None, source: Given) -> AttachedSae:
        if isinstance(source, str) and not Path(source).exists() and "=" in source:
            # POINT=FOLDER, as on the command line
            point, _, source = source.partition("=")
        path = None if isinstance(source, SparseAutoencoder) else str(source)
        sae = (
            source
            if isinstance(source, SparseAutoencoder)
            else SparseAutoencoder.load(Path(source), device=model.device)
        )
        where = sae.cfg.hook_name if point is None else point
        name = Path(path).resolve().name if path else str(where)
        taken = {attached.name for attached in self.all}
        names = [name, *(f"{name} {number}" for number in range(2, len(taken) + 2))]
        name = next(candidate for candidate in names if candidate not in taken)
        return AttachedSae(name, _checked_point(model, sae, name, where), sae, path)

    def _compared(self, model: HookedModel, store: Store) -> list[str]:
        """Raise if the store has not what the top contexts of all need; returns notes for the page."""
        for attached in self.all:
            if attached.point not in store:
                have = ", ".join(store.points)
                raise HooklineError(
                    f"{store.path} has no activations at {attached.point!r} for {attached.name!r}: it has {have}"
                )
        about = store.manifest.about.model
        if about.get("tokenizer") != tokenizer_digest(model.tokenizer):
            raise HooklineError(f"{store.path} was harvested with another tokenizer: its tokens cannot be shown")
        if about.get("weights") == weights_digest(model.module):
            return []
        return [f"the store was harvested from other weights ({about.get('id')}, {about.get('class')})"]

    def warn(self) -> None:
        """Raise the notes as warnings, which the view shows."""
        for note in self.notes:
            warnings.warn(note, stacklevel=2)


def weight_versions(module: nn.Module) -> Versions:
    """The identity and the version of every parameter and buffer: other ones after a change to the weights.

    A change in place of `parameter.data`, which PyTorch does not count, is not among them.
    """
    return tuple((id(x), x.data_ptr(), 0 if x.is_inference() else x._version) for x in _weights(module))


def model_versions(model: HookedModel) -> Versions:
    """`weight_versions` of a model, and its permanent hooks."""
    hooks = tuple((ref(hook), hook.registration.is_enabled()) for hook in model.index.permanent.hooks())
    return weight_versions(model.module), hooks


def _weights(module: nn.Module) -> Iterator[Tensor]:
    yield from module.parameters()
    yield from module.buffers()


class _Watched(Store):
    """A store that calls a module with each batch it reads: there, a job can be canceled."""

    _call = nn.Identity()

    def batches(self, batch_size: int, points: str | Sequence[str] | None = None, **options: Any) -> Any:
        """The batches of the store, one after another."""

        def read() -> Iterator[Rows]:
            for rows in Store.batches(self, batch_size, points, **options):
                self._call(rows.token)
                yield rows

        return read()


def _watched(store: str | os.PathLike[str] | Store) -> Store:
    plain_store = open_store(store if isinstance(store, Store) else str(store))
    return _Watched(plain_store.folder, check=plain_store._checks)


def _pairs(saes: SaesGiven) -> list[tuple[str | None, Given]]:
    if isinstance(saes, Mapping):
        return list(saes.items())
    if isinstance(saes, SparseAutoencoder | str | os.PathLike):
        return [(None, saes)]
    return [(None, source) for source in saes]


@torch.no_grad()
def _checked_point(model: HookedModel, sae: SparseAutoencoder, name: str, point: str | None) -> str:
    """The name of the point; raises unless the autoencoder fits there."""
    if point is None:
        raise HooklineError(
            f"the autoencoder {name!r} has no hook_name: name its point, saes={{POINT: sae}} or --sae POINT=PATH. "
            f"{_fitting(model, sae)}"
        )
    try:
        hook_point = model.point(point)
    except HooklineError as error:
        raise HooklineError(
            f"the autoencoder {name!r} is for {point!r}, which this model does not have. {_fitting(model, sae)}"
        ) from error
    tokens = model.example_tokens()[:1]
    x = model.cache(tokens, names_filter=hook_point.name)[hook_point.name]
    if not _fits(sae, hook_point.axes, x):
        shape = list(x.shape)
        raise HooklineError(
            f"the autoencoder {name!r} takes activations of width {sae.d_in} at each position, but {hook_point.name!r} "
            f"has the shape {shape} ({hook_point.axes or 'no named axes'}). {_fitting(model, sae)}"
        )
    sae.encode(x)  # raises if it is on another device
    return hook_point.name


def _fits(sae: SparseAutoencoder, axes: str, x: Tensor) -> bool:
    """Whether the features at a point are one row for each position."""
    is_over_heads = sae.cfg.reshape_activations == "hook_z" and x.ndim == 4
    width = x.shape[-1] * x.shape[-2] if is_over_heads else x.shape[-1]
    return axes.startswith("b p ") and (is_over_heads or x.ndim == 3) and width == sae.d_in


def _fitting(model: HookedModel, sae: SparseAutoencoder) -> str:
    """The points of a model where an autoencoder fits, in words."""
    cache = model.cache(model.example_tokens()[:1])
    names = [name for name, x in cache.items() if _fits(sae, model.point(name).axes, x)]
    kinds = dict.fromkeys(re.sub(r"\.\d+\.", ".N.", name) for name in names)
    return f"Points of width {sae.d_in}: {', '.join(kinds) or 'none'}"
