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
        for point, given in _pairs(saes):
            self.all.append(self._attached(model, point, given))
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
        """The same, or None if there is no autoencoder."""
        if saes is None and store is not None:
            raise HooklineError("a store is for the top contexts of features: pass saes=…, too (--sae)")
        return None if saes is None else cls(model, saes, store)

    def named(self, name: str) -> AttachedSae:
        """The autoencoder with a name; "" is the first."""
        for each in self.all:
            if name in ("", each.name):
                return each
        known = ", ".join(repr(each.name) for each in self.all)
        raise HooklineError(f"there is no autoencoder {name!r} in this explorer: there are {known}")

    def about(self) -> list[dict[str, Any]]:
        """What the page needs to know about them."""
        return [
            {"name": each.name, "point": each.point, "d_sae": each.sae.d_sae, "about": each.sae.extra_repr()}
            for each in self.all
        ]

    def profile(self, model: HookedModel, name: str) -> Profile:
        """The top contexts of all features in the store; read once."""
        found = self.named(name)
        if self.store is None:
            raise HooklineError("top contexts need a store of activations: hookline explore MODEL --sae … --store PATH")
        known = self.known_profile(found.name)
        if known is None:
            now, known = (
                weight_versions(found.sae),
                profile(found.sae, model, self.store, k=CONTEXTS, point=found.point),
            )
            self._profiles[found.name] = now, known
        return known

    def known_profile(self, name: str) -> Profile | None:
        """The top contexts, if the store was read before with the autoencoder as it is now."""
        found = self.named(name)
        before, known = self._profiles.get(found.name, ((), None))
        return known if before == weight_versions(found.sae) else None

    def kept(self, key: Any, make: Callable[[], Any]) -> Any:
        """A value that is computed once for a key; a few of the latest are kept."""
        if key not in self._kept:
            self._kept = dict(list(self._kept.items())[1 - _MOST_KEPT :])
            self._kept[key] = make()
        return self._kept[key]

    def _attached(self, model: HookedModel, point: str | None, given: Given) -> AttachedSae:
        if isinstance(given, str) and not Path(given).exists() and "=" in given:  # POINT=FOLDER, as on the command line
            point, _, given = given.partition("=")
        path = None if isinstance(given, SparseAutoencoder) else str(given)
        sae = (
            given if isinstance(given, SparseAutoencoder) else SparseAutoencoder.load(Path(given), device=model._device)
        )
        where = sae.cfg.hook_name if point is None else point
        name = Path(path).resolve().name if path else str(where)
        taken = {each.name for each in self.all}
        names = [name, *(f"{name} {number}" for number in range(2, len(taken) + 2))]
        name = next(each for each in names if each not in taken)
        return AttachedSae(name, _checked_point(model, sae, name, where), sae, path)

    def _compared(self, model: HookedModel, store: Store) -> list[str]:
        """Raise if the store cannot have top contexts of all; returns what else is to be noted."""
        for each in self.all:
            if each.point not in store:
                have = ", ".join(store.points)
                raise HooklineError(
                    f"{store.path} has no activations at {each.point!r} for {each.name!r}: it has {have}"
                )
        about = store.manifest.about.model
        if about.get("tokenizer") != tokenizer_digest(model.tokenizer):
            raise HooklineError(f"{store.path} was harvested with another tokenizer: its tokens cannot be shown")
        if about.get("weights") == weights_digest(model.module):
            return []
        return [f"the store was harvested from other weights ({about.get('id')}, {about.get('class')})"]

    def warn(self) -> None:
        """Warn about what is to be noted, so that it is shown in a view."""
        for note in self.notes:
            warnings.warn(note, stacklevel=2)


def weight_versions(module: nn.Module) -> Versions:
    """The identity and the version of every parameter and buffer: other ones after a change to the weights.

    A change in place of `parameter.data`, which PyTorch does not count, is not among them.
    """
    return tuple((id(x), x.data_ptr(), 0 if x.is_inference() else x._version) for x in _weights(module))


def model_versions(model: HookedModel) -> Versions:
    """The same of a model, with its permanent hooks."""
    hooks = tuple((ref(each), each.registration.is_enabled()) for each in model._points.permanent.hooks())
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
    given = open_store(store if isinstance(store, Store) else str(store))
    return _Watched(given.folder, check=given._checks)


def _pairs(saes: SaesGiven) -> list[tuple[str | None, Given]]:
    if isinstance(saes, Mapping):
        return list(saes.items())
    if isinstance(saes, SparseAutoencoder | str | os.PathLike):
        return [(None, saes)]
    return [(None, each) for each in saes]


@torch.no_grad()
def _checked_point(model: HookedModel, sae: SparseAutoencoder, name: str, point: str | None) -> str:
    """The name of the point; raises unless the autoencoder fits there."""
    if point is None:
        raise HooklineError(
            f"the autoencoder {name!r} has no hook_name: name its point, saes={{POINT: sae}} or --sae POINT=PATH. "
            f"{_fitting(model, sae)}"
        )
    try:
        found = model.point(point)
    except HooklineError as error:
        raise HooklineError(
            f"the autoencoder {name!r} is for {point!r}, which this model does not have. {_fitting(model, sae)}"
        ) from error
    tokens = model.example_tokens()[:1]
    x = model.cache(tokens, names_filter=found.name)[found.name]
    if not _fits(sae, found.axes, x):
        shape = list(x.shape)
        raise HooklineError(
            f"the autoencoder {name!r} takes activations of width {sae.d_in} at each position, but {found.name!r} has "
            f"the shape {shape} ({found.axes or 'no named axes'}). {_fitting(model, sae)}"
        )
    sae.encode(x)  # raises if it is on another device
    return found.name


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
