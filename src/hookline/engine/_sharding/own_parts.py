"""The parts of activations that this process has: `run_with_cache(…, local=True)` records them without the rest."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

import torch
from jaxtyping import Int
from torch import Tensor

from hookline.engine.actions import Record
from hookline.engine.cache import ActivationCache
from hookline.engine.lenses import Lens, chained, parts_of
from hookline.engine.points import HookPoint, Site
from hookline.errors import HooklineError, UnavailablePointError

if TYPE_CHECKING:
    from hookline.engine.names import Points

Spans: TypeAlias = tuple[range, ...]
"""Which indices of an axis a process has: one range, or one for each block of a packed layer."""


def own_site(site: Site) -> tuple[Site, Spans | None]:
    """The site of this process's part, and the indices of its heads or neurons; None if it has all of them."""
    lenses = parts_of(site.lens)
    for place, lens in enumerate(lenses):
        part: Any = getattr(lens, "own_part", None)
        if part is not None:
            rest: tuple[Lens, ...]
            rest, spans = part(lenses[place + 1 :])
            return replace(site, lens=chained(*lenses[:place], *rest)), spans
    return site, None


class OwnRecord(Record):
    """Keeps the part of an activation that this process has."""


def own_points(points: Iterable[HookPoint], *, skips: bool) -> Iterator[tuple[HookPoint, Spans | None]]:
    """The points as this process has them, with their indices; `skips` leaves out those where that is not known."""
    for point in points:
        try:
            site, spans = own_site(point.site)
        except UnavailablePointError as error:
            if skips:
                continue
            raise UnavailablePointError(f"local=True is not available at {point.name!r}: {error}") from error
        yield HookPoint.at_site(point.name, site, point.permanent, point.axes, point.only), spans


class LocalCache(ActivationCache):
    """The parts of a run's activations that this process has: all of them, unless the model is sharded.

    _, cache = model.run_with_cache(tokens, local=True)
    cache["blocks.0.attn.hook_z"]                  # [batch, pos, heads of this process, d_head]
    cache.local_indices("blocks.0.attn.hook_z")    # tensor([2, 3])
    """

    spans: Mapping[str, Spans | None]

    def __init__(self, tensors: MutableMapping[str, Tensor], points: Points) -> None:
        super().__init__(tensors, points)
        self.spans = {}

    def local_indices(self, name: Any) -> Int[Tensor, " own"]:
        """Return which heads an activation has, by their indices in the whole model.

        If it has no axis of heads, which neurons or columns: the indices of its last axis.
        """
        key = self._key(name)
        base = key.removesuffix("_grad").partition("#")[0]
        if (spans := self.spans.get(base)) is not None:
            return torch.tensor([index for span in spans for index in span], dtype=torch.long)
        x, axes = self._tensors[key], self._points.find(base).axes.split() if self._points is not None else []
        heads = next((place - len(axes) for place, letter in enumerate(axes) if letter in "hg"), -1)
        return torch.arange(x.shape[heads])

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(
            f"a local cache has no {name!r}: methods that need all heads and neurons are those of a cache without "
            f"local=True"
        )

    def save(self, path: Any) -> NoReturn:  # noqa: ARG002
        """Raise: the file would not say which part of each activation it has."""
        raise HooklineError(
            "a local cache has only the parts of activations that this process has, and cannot be saved: save the "
            "tensors that you need together with cache.local_indices(name)"
        )
