"""Lenses for the tensor layouts in transformers: fused projections, heads, gates, and the patches and tiles of images.

See `hookline.engine.lenses` for what a lens is, and for its laws.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Shaped
from torch import Tensor, nn

from hookline.errors import HooklineError


@dataclass(frozen=True, slots=True)
class Slice:
    """A range of the last axis: the query third of a fused projection."""

    start: int
    stop: int

    def get(self, value: Shaped[Tensor, "*rest all"]) -> Shaped[Tensor, "*rest part"]:
        """The range, as a view."""
        return value[..., self.start : self.stop]

    def put(
        self, value: Shaped[Tensor, "*rest all"], tensor: Shaped[Tensor, "*rest part"]
    ) -> Shaped[Tensor, "*rest all"]:
        """`value` with another range."""
        return torch.cat([value[..., : self.start], tensor, value[..., self.stop :]], dim=-1)


@dataclass(frozen=True, slots=True)
class Heads:
    """The last axis folded into `n` heads: `b p (h e)` seen as `b p h e`."""

    n: int

    def get(self, value: Shaped[Tensor, "*rest all"]) -> Shaped[Tensor, "*rest {self.n} each"]:
        """One axis more."""
        return torch.unflatten(value, -1, (self.n, -1))

    def put(
        self,
        value: Shaped[Tensor, "*rest all"],  # noqa: ARG002 (all of it is replaced)
        tensor: Shaped[Tensor, "*rest {self.n} each"],
    ) -> Shaped[Tensor, "*rest all"]:
        """One axis fewer."""
        return tensor.flatten(-2)


@dataclass(frozen=True, slots=True)
class Interleaved:
    """One of the parts that a fused projection computes for each group of heads: `b p (g n x)` seen as `b p h e`.

    With as many groups as heads, the parts of one head are side by side.
    """

    groups: int
    parts: int
    index: int
    heads: int

    def get(self, value: Shaped[Tensor, "*rest all"]) -> Shaped[Tensor, "*rest {self.heads} each"]:
        """The part, of every head; a view, with as many groups as heads."""
        part = value.unflatten(-1, (self.groups, self.parts, -1))[..., self.index, :]
        return part if self.groups == self.heads else part.flatten(-2).unflatten(-1, (self.heads, -1))

    def put(
        self, value: Shaped[Tensor, "*rest all"], tensor: Shaped[Tensor, "*rest {self.heads} each"]
    ) -> Shaped[Tensor, "*rest all"]:
        """`value` with another part of every head."""
        parts = list(value.unflatten(-1, (self.groups, self.parts, -1)).unbind(-2))
        parts[self.index] = tensor.flatten(-2).unflatten(-1, (self.groups, -1))
        return torch.stack(parts, -2).flatten(-3)


@dataclass(frozen=True, slots=True)
class HeadsFirst:
    """A tensor with heads before positions, `b h p e` or `(b h) p e`, seen as `b p n e`.

    Keys and values that serve a group of query heads each may have been repeated for it; `n` is the number of
    different ones.
    """

    n: int

    def get(self, value: Tensor) -> Tensor:
        """Positions before heads, each head once."""
        by_head = value if value.ndim == 4 else value.unflatten(0, (-1, self.n))
        return by_head[:, :: by_head.shape[1] // self.n].transpose(1, 2)

    def put(self, value: Tensor, tensor: Tensor) -> Tensor:
        """As it was, repeated where it was repeated."""
        by_head = tensor.transpose(1, 2)
        if value.ndim == 3:
            return by_head.flatten(0, 1)
        return by_head.repeat_interleave(value.shape[1] // self.n, 1)


@dataclass(frozen=True, slots=True)
class Times:
    """A tensor times a number, where the model multiplies it on the way to what the point is about."""

    factor: float

    def get(self, value: Tensor) -> Tensor:
        """Multiplied."""
        return value * self.factor

    def put(self, value: Tensor, tensor: Tensor) -> Tensor:  # noqa: ARG002 (all of it is replaced)
        """Divided."""
        return tensor / self.factor


@dataclass(frozen=True, slots=True)
class TimesParameter:
    """A tensor times a parameter of a layer, where the layer multiplies it so before it adds it.

    A gate is a single number, and what multiplies is its hyperbolic tangent.
    """

    module: nn.Module
    name: str

    def get(self, value: Tensor) -> Tensor:
        """Multiplied."""
        return value * self._gain()

    def put(self, value: Tensor, tensor: Tensor) -> Tensor:  # noqa: ARG002 (all of it is replaced)
        """Divided; where the layer multiplies by nothing, nothing can be put in."""
        gain = self._gain()
        if not bool(gain.all()):
            raise HooklineError(
                f"{self.name} of this {type(self.module).__name__} is 0 (an untrained gate, perhaps): whatever its "
                f"module gives is multiplied by 0, so an edit cannot take effect here; edit the stream after it"
            )
        return tensor / gain

    def _gain(self) -> Tensor:
        gain: Tensor = getattr(self.module, self.name)
        return gain.tanh() if "gate" in self.name else gain


@dataclass(frozen=True, slots=True)
class AddBatchAxis:
    """A tensor without an axis for the batch, seen as a batch of one; `n` is how many axes there are to be."""

    n: int

    def get(self, value: Tensor) -> Tensor:
        """One axis more, if it is not there."""
        return value[None] if value.ndim == self.n - 1 else value

    def put(self, value: Tensor, tensor: Tensor) -> Tensor:
        """As it was."""
        return tensor[0] if value.ndim == self.n - 1 else tensor


@dataclass(frozen=True, slots=True)
class Patches:
    """What a convolution makes of a picture, `b d y x`, seen as a row of patches, `b p d`."""

    def get(self, value: Tensor) -> Tensor:
        """Row by row; what is a row of patches already, as it is."""
        return value.flatten(2).transpose(1, 2) if value.ndim == 4 else value

    def put(self, value: Tensor, tensor: Tensor) -> Tensor:
        """As it was."""
        return tensor.transpose(1, 2).reshape(value.shape) if value.ndim == 4 else tensor


@dataclass(frozen=True, slots=True)
class Flat:
    """A tensor with several axes before the last two, of pictures and their tiles, seen with one: `b p d`."""

    def get(self, value: Tensor) -> Tensor:
        """One axis for all."""
        return value.flatten(0, -3) if value.ndim > 3 else value

    def put(self, value: Tensor, tensor: Tensor) -> Tensor:
        """As they were."""
        return tensor.reshape(*value.shape[:-2], *tensor.shape[-2:])
