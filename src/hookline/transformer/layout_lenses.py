"""Lenses for the tensor layouts in transformers: fused projections, heads, gates, and the patches and tiles of images.

See `hookline.engine.lenses` for what a lens is, and for its laws.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Shaped
from torch import Tensor, nn

from hookline.errors import HooklineError


@dataclass(frozen=True, slots=True)
class Slice:
    """A range of the last axis: the query third of a fused projection."""

    is_pure: ClassVar[bool] = True
    start: int
    stop: int

    def get(self, value: Shaped[Tensor, "*rest all"]) -> Shaped[Tensor, "*rest part"]:
        return value[..., self.start : self.stop]

    def put(
        self, value: Shaped[Tensor, "*rest all"], tensor: Shaped[Tensor, "*rest part"]
    ) -> Shaped[Tensor, "*rest all"]:
        return torch.cat([value[..., : self.start], tensor, value[..., self.stop :]], dim=-1)


@dataclass(frozen=True, slots=True)
class Heads:
    """The last axis split into `n` heads: `b p (h e)` read as `b p h e`."""

    is_pure: ClassVar[bool] = True
    n: int

    def get(self, value: Shaped[Tensor, "*rest all"]) -> Shaped[Tensor, "*rest {self.n} each"]:
        return torch.unflatten(value, -1, (self.n, -1))

    def put(
        self,
        value: Shaped[Tensor, "*rest all"],  # noqa: ARG002 (all of it is replaced)
        tensor: Shaped[Tensor, "*rest {self.n} each"],
    ) -> Shaped[Tensor, "*rest all"]:
        return tensor.flatten(-2)


@dataclass(frozen=True, slots=True)
class Interleaved:
    """One part (query, key or value) of a fused projection that has all parts of a group of heads side by side.

    `b p (g n x)` is read as `b p h e`; with as many groups as heads, as a view.
    """

    is_pure: ClassVar[bool] = True
    groups: int
    parts: int
    index: int
    heads: int

    def get(self, value: Shaped[Tensor, "*rest all"]) -> Shaped[Tensor, "*rest {self.heads} each"]:
        part = value.unflatten(-1, (self.groups, self.parts, -1))[..., self.index, :]
        return part if self.groups == self.heads else part.flatten(-2).unflatten(-1, (self.heads, -1))

    def put(
        self, value: Shaped[Tensor, "*rest all"], tensor: Shaped[Tensor, "*rest {self.heads} each"]
    ) -> Shaped[Tensor, "*rest all"]:
        parts = list(value.unflatten(-1, (self.groups, self.parts, -1)).unbind(-2))
        parts[self.index] = tensor.flatten(-2).unflatten(-1, (self.groups, -1))
        return torch.stack(parts, -2).flatten(-3)


@dataclass(frozen=True, slots=True)
class HeadsFirst:
    """A tensor with heads before positions, `b h p e` or `(b h) p e`, read as `b p n e`.

    Keys and values may have been repeated for the query heads of their group; `n` is their number without repetition.
    """

    is_pure: ClassVar[bool] = True
    n: int

    def get(self, value: Tensor) -> Tensor:
        by_head = value if value.ndim == 4 else value.unflatten(0, (-1, self.n))
        return by_head[:, :: by_head.shape[1] // self.n].transpose(1, 2)

    def put(self, value: Tensor, tensor: Tensor) -> Tensor:
        by_head = tensor.transpose(1, 2)
        if value.ndim == 3:
            return by_head.flatten(0, 1)
        return by_head.repeat_interleave(value.shape[1] // self.n, 1)


@dataclass(frozen=True, slots=True)
class Times:
    """A tensor times a number that the model multiplies it by later."""

    is_pure: ClassVar[bool] = True
    factor: float

    def get(self, value: Tensor) -> Tensor:
        return value * self.factor

    def put(self, value: Tensor, tensor: Tensor) -> Tensor:  # noqa: ARG002 (all of it is replaced)
        return tensor / self.factor


@dataclass(frozen=True, slots=True)
class TimesParameter:
    """A tensor times a parameter of a layer that the layer multiplies it by before adding it to the stream.

    A gate is a single number, and the factor is its hyperbolic tangent.
    """

    module: nn.Module
    name: str

    def get(self, value: Tensor) -> Tensor:
        return value * self._gain()

    def put(self, value: Tensor, tensor: Tensor) -> Tensor:  # noqa: ARG002 (all of it is replaced)
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
class AddBatchAxis:
    """A tensor without a batch axis, read as a batch of one; `n` is the number of axes with it."""

    is_pure: ClassVar[bool] = True
    n: int

    def get(self, value: Tensor) -> Tensor:
        return value[None] if value.ndim == self.n - 1 else value

    def put(self, value: Tensor, tensor: Tensor) -> Tensor:
        return tensor[0] if value.ndim == self.n - 1 else tensor


@dataclass(frozen=True, slots=True)
class Patches:
    """The output of a convolution over an image, `b d y x`, read as a row of patches, `b p d`."""

    is_pure: ClassVar[bool] = True

    def get(self, value: Tensor) -> Tensor:
        return value.flatten(2).transpose(1, 2) if value.ndim == 4 else value

    def put(self, value: Tensor, tensor: Tensor) -> Tensor:
        return tensor.transpose(1, 2).reshape(value.shape) if value.ndim == 4 else tensor


@dataclass(frozen=True, slots=True)
class Flat:
    """A tensor with several axes before the last two, for images and their tiles, read with one: `b p d`."""

    is_pure: ClassVar[bool] = True

    def get(self, value: Tensor) -> Tensor:
        return value.flatten(0, -3) if value.ndim > 3 else value

    def put(self, value: Tensor, tensor: Tensor) -> Tensor:
        return tensor.reshape(*value.shape[:-2], *tensor.shape[-2:])
