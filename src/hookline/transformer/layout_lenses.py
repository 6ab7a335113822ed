"""Lenses for the tensor layouts in transformers: fused projections, heads, gates, and the patches and tiles of images.

See `hookline.engine.lenses` for what a lens is and for its laws, and `formulas` for those that compute.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from jaxtyping import Shaped
from torch import Tensor, nn

from hookline.engine import Formula, Site
from hookline.errors import HooklineError
from hookline.values.structures import NoTensorError


@dataclass(frozen=True, slots=True)
class Slice(Formula):
    """A range of the last axis: the query third of a fused projection."""

    start: int
    stop: int

    def compute(self, x: Shaped[Tensor, "*rest all"]) -> Shaped[Tensor, "*rest part"]:
        return x[..., self.start : self.stop]

    def restore(
        self, x: Shaped[Tensor, "*rest all"], tensor: Shaped[Tensor, "*rest part"]
    ) -> Shaped[Tensor, "*rest all"]:
        return torch.cat([x[..., : self.start], tensor, x[..., self.stop :]], dim=-1)


@dataclass(frozen=True, slots=True)
class Heads(Formula):
    """The last axis split into `n` heads: `b p (h e)` read as `b p h e`."""

    n: int

    def compute(self, x: Shaped[Tensor, "*rest all"]) -> Shaped[Tensor, "*rest {self.n} each"]:
        return torch.unflatten(x, -1, (self.n, -1))

    def restore(
        self,
        x: Shaped[Tensor, "*rest all"],  # noqa: ARG002 (all of it is replaced)
        tensor: Shaped[Tensor, "*rest {self.n} each"],
    ) -> Shaped[Tensor, "*rest all"]:
        return tensor.flatten(-2)


@dataclass(frozen=True, slots=True)
class Interleaved(Formula):
    """One part (query, key or x) of a fused projection that has all parts of a group of heads side by side.

    `b p (g n x)` is read as `b p h e`; with as many groups as heads, as a view.
    """

    groups: int
    parts: int
    index: int
    heads: int

    def compute(self, x: Shaped[Tensor, "*rest all"]) -> Shaped[Tensor, "*rest {self.heads} each"]:
        part = x.unflatten(-1, (self.groups, self.parts, -1))[..., self.index, :]
        return part if self.groups == self.heads else part.flatten(-2).unflatten(-1, (self.heads, -1))

    def restore(
        self, x: Shaped[Tensor, "*rest all"], tensor: Shaped[Tensor, "*rest {self.heads} each"]
    ) -> Shaped[Tensor, "*rest all"]:
        parts = list(x.unflatten(-1, (self.groups, self.parts, -1)).unbind(-2))
        parts[self.index] = tensor.flatten(-2).unflatten(-1, (self.groups, -1))
        return torch.stack(parts, -2).flatten(-3)


@dataclass(frozen=True, slots=True)
class HeadsFirst(Formula):
    """A tensor with heads before positions, `b h p e` or `(b h) p e`, read as `b p n e`.

    Keys and values may have been repeated for the query heads of their group; `n` is their number without repetition.
    """

    n: int

    def compute(self, x: Tensor) -> Tensor:
        by_head = x if x.ndim == 4 else x.unflatten(0, (-1, self.n))
        return by_head[:, :: by_head.shape[1] // self.n].transpose(1, 2)

    def restore(self, x: Tensor, tensor: Tensor) -> Tensor:
        by_head = tensor.transpose(1, 2)
        if x.ndim == 3:
            return by_head.flatten(0, 1)
        return by_head.repeat_interleave(x.shape[1] // self.n, 1)


@dataclass(frozen=True, slots=True)
class Times(Formula):
    """A tensor times a number that the model multiplies it by later."""

    factor: float

    def compute(self, x: Tensor) -> Tensor:
        return x * self.factor

    def restore(self, x: Tensor, tensor: Tensor) -> Tensor:  # noqa: ARG002 (all of it is replaced)
        return tensor / self.factor


@dataclass(frozen=True, slots=True)
class TimesParameter(Formula):
    """A tensor times a parameter of a layer that the layer multiplies it by before adding it to the stream.

    A gate is a single number, and the factor is its hyperbolic tangent. The parameter may change after the pass.
    """

    can_wait = False

    module: nn.Module
    name: str

    def compute(self, x: Tensor) -> Tensor:
        return x * self._gain()

    def restore(self, x: Tensor, tensor: Tensor) -> Tensor:  # noqa: ARG002 (all of it is replaced)
        gain = self._gain()
        if not bool(gain.all()):
            raise HooklineError(
                f"{self.name} of this {type(self.module).__name__} is 0 (an untrained gate, perhaps): the output of "
                f"its module is multiplied by 0, so an edit has no effect here; edit the stream after it"
            )
        return tensor / gain

    def _gain(self) -> Tensor:
        gain: Tensor = getattr(self.module, self.name)
        return gain.tanh() if "gate" in self.name else gain


@dataclass(frozen=True, slots=True)
class AddBatchAxis(Formula):
    """A tensor without a batch axis, read as a batch of one; `n` is the number of axes with it."""

    n: int

    def compute(self, x: Tensor) -> Tensor:
        return x[None] if x.ndim == self.n - 1 else x

    def restore(self, x: Tensor, tensor: Tensor) -> Tensor:
        return tensor[0] if x.ndim == self.n - 1 else tensor


@dataclass(frozen=True, slots=True)
class Patches(Formula):
    """The output of a convolution over an image, `b d y x`, read as a row of patches, `b p d`."""

    def compute(self, x: Tensor) -> Tensor:
        return x.flatten(2).transpose(1, 2) if x.ndim == 4 else x

    def restore(self, x: Tensor, tensor: Tensor) -> Tensor:
        return tensor.transpose(1, 2).reshape(x.shape) if x.ndim == 4 else tensor


@dataclass(frozen=True, slots=True)
class Flat(Formula):
    """A tensor with several axes before the last two, for images and their tiles, read with one: `b p d`."""

    def compute(self, x: Tensor) -> Tensor:
        return x.flatten(0, -3) if x.ndim > 3 else x

    def restore(self, x: Tensor, tensor: Tensor) -> Tensor:
        return tensor.reshape(*x.shape[:-2], *tensor.shape[-2:])


@dataclass(frozen=True)
class Added(Formula):
    """The sum of what passed at another site and of the tensor: the stream after an addition."""

    needs: tuple[Site] = field()

    @staticmethod
    def compute(x: Tensor, base: Tensor) -> Tensor:
        if base.shape != x.shape:
            raise NoTensorError(f"shape {list(x.shape)} cannot be added to shape {list(base.shape)}")
        return base + x

    @staticmethod
    def restore(x: Tensor, tensor: Tensor, base: Tensor) -> Tensor:  # noqa: ARG004 (all of it is replaced)
        return tensor - base


@dataclass(frozen=True)
class Difference(Formula):
    """The tensor without what passed at another site: what was added in between."""

    needs: tuple[Site] = field()

    @staticmethod
    def compute(x: Tensor, base: Tensor) -> Tensor:
        return x - base

    @staticmethod
    def restore(x: Tensor, tensor: Tensor, base: Tensor) -> Tensor:  # noqa: ARG004 (all of it is replaced)
        return base + tensor


@dataclass(frozen=True)
class Unflatten(Formula):
    """A tensor with batch and positions as one axis, `(b p) d`, seen as `b p d` with those of another site."""

    needs: tuple[Site] = field()

    @staticmethod
    def compute(x: Tensor, like: Tensor) -> Tensor:
        return x if x.ndim == 3 else x.unflatten(0, like.shape[:2])

    @staticmethod
    def restore(x: Tensor, tensor: Tensor, like: Tensor) -> Tensor:  # noqa: ARG004 (the tensor has the sizes)
        return tensor if x.ndim == 3 else tensor.flatten(0, 1)


@dataclass(frozen=True)
class MergeTiles(Formula):
    """A tensor with several rows (tiles) per example, `(b n) p …`, seen as `b (n p) …` with another site's `b`."""

    needs: tuple[Site] = field()

    @staticmethod
    def compute(x: Tensor, like: Tensor) -> Tensor:
        return x.reshape(like.shape[0], -1, *x.shape[2:])

    @staticmethod
    def restore(x: Tensor, tensor: Tensor, like: Tensor) -> Tensor:  # noqa: ARG004 (the value has the sizes)
        return tensor.reshape(x.shape)


@dataclass(frozen=True)
class ExpandBatch(Formula):
    """A tensor that all rows share, `1 p d` or `p d`, seen as `b p d` with the `b` of another site, if that ran."""

    needs_all: ClassVar[bool] = False
    needs: tuple[Site] = field()

    @staticmethod
    def compute(x: Tensor, like: Tensor | None = None) -> Tensor:
        x = x[None] if x.ndim == 2 else x
        return x if like is None or x.shape[0] != 1 else x.expand(like.shape[0], *x.shape[1:])

    @staticmethod
    def restore(x: Tensor, tensor: Tensor, like: Tensor | None = None) -> Tensor:  # noqa: ARG004 (all is replaced)
        return tensor


@dataclass(frozen=True)
class Keys(Formula):
    """Scores or weights over the keys, `b h p k` or `(b h) p k`, seen as `b h p k`.

    With an attention sink there are more columns than keys: then it needs the site of the keys.
    """

    heads: int
    keys: tuple[Site, ...] = ()

    @property
    def needs(self) -> tuple[int | Site, ...]:  # type: ignore[override]
        """The number of heads, and the keys."""
        return (self.heads, *self.keys)

    @staticmethod
    def compute(x: Tensor, heads: int, keys: Tensor | None = None) -> Tensor:
        by_head = x if x.ndim == 4 else x.unflatten(0, (-1, heads))
        return by_head[..., : x.shape[-1] if keys is None else keys.shape[1]]

    @staticmethod
    def restore(x: Tensor, tensor: Tensor, heads: int, keys: Tensor | None = None) -> Tensor:  # noqa: ARG004 (it has them)
        """Put in the columns of the keys; other columns stay."""
        by_head = tensor if x.ndim == 4 else tensor.flatten(0, 1)
        rest = x[..., x.shape[-1] if keys is None else keys.shape[1] :]
        return torch.cat([by_head, rest], -1) if rest.shape[-1] else by_head
