"""Lenses: pairs of pure functions between what flows through a module and one tensor in it.

`get(value)` finds the tensor; `put(value, tensor)` is `value` with that tensor in its place, and leaves `value`
itself untouched. Every lens obeys, and the tests check for each:

    get(put(value, tensor)) == tensor        what is put in is there
    put(value, get(value)) == value          putting back what is there changes nothing
    put(put(value, a), b) == put(value, b)   the last one counts
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Shaped
from torch import Tensor, nn

from hookline.engine.structures import NoTensorError, Path, first_tensor, look, replaced
from hookline.errors import HooklineError


@runtime_checkable
class Lens(Protocol):
    """A way to see one tensor in a value, and to put another in its place."""

    def get(self, value: Any) -> Tensor: ...  # noqa: D102
    def put(self, value: Any, tensor: Tensor) -> Any: ...  # noqa: D102


@dataclass(frozen=True, slots=True)
class First:
    """The value itself if it is a tensor, else the first tensor in it."""

    def get(self, value: Any) -> Tensor:
        """The first tensor."""
        return value if isinstance(value, Tensor) else look(value, first_tensor(value))

    def put(self, value: Any, tensor: Tensor) -> Any:
        """`value` with its first tensor replaced."""
        return tensor if isinstance(value, Tensor) else replaced(value, first_tensor(value), tensor)


@dataclass(frozen=True, slots=True)
class Item:
    """The tensor at a path of keys: `Item((1, 0))` is `value[1][0]`."""

    path: Path

    def get(self, value: Any) -> Tensor:
        """The tensor at the path."""
        return look(value, self.path)

    def put(self, value: Any, tensor: Tensor) -> Any:
        """`value` with another tensor at the path."""
        return replaced(value, self.path, tensor)


@dataclass(frozen=True, slots=True)
class Argument:
    """A tensor among the arguments `(args, kwargs)` of a call.

    `parameters` are the names of the module's parameters in order, so that an argument is found whether it was
    passed by position or by keyword; only the first `positional` of them can be passed by position. With no `key` it is
    the first tensor, in the order of the parameters.
    """

    parameters: tuple[str, ...]
    key: int | str | None = None
    rest: Path = ()
    positional: int | None = None

    def get(self, value: Any) -> Tensor:
        """The tensor passed for that parameter."""
        if self.key is None and value[0] and isinstance(value[0][0], Tensor):
            return value[0][0]
        return look(value, self._path(value))

    def put(self, value: Any, tensor: Tensor) -> Any:
        """The arguments with another tensor for that parameter."""
        return replaced(value, self._path(value), tensor)

    def _path(self, value: tuple[tuple[Any, ...], dict[str, Any]]) -> Path:
        args, kwargs = value
        if self.key is None:
            return self._first(args, kwargs)
        position, name = self._place(self.key)
        if position is not None and position < len(args):
            return (0, position, *self.rest)
        if name in kwargs:
            return (1, name, *self.rest)
        given = [f"[{i}]" for i in range(len(args))] + [f"[{k}]" for k in kwargs]
        raise NoTensorError(f"the call passes no [{self.key}]; it passes {', '.join(given) or 'nothing'}")

    def _place(self, key: int | str) -> tuple[int | None, str | None]:
        by_position = self.parameters[: self.positional]
        if isinstance(key, int):
            return key, by_position[key] if key < len(by_position) else None
        return by_position.index(key) if key in by_position else None, key

    def _first(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Path:
        if args and isinstance(args[0], Tensor):
            return (0, 0)
        if (renamed := self._old_name(kwargs)) is not None:
            return (1, renamed)
        ordered = {name: kwargs[name] for name in self.parameters if name in kwargs} | kwargs
        side, *path = first_tensor((args, ordered))
        return (side, *path)

    def _old_name(self, kwargs: dict[str, Any]) -> str | None:
        """What the first parameter is passed as by those who call it by a name it had: `hidden_state`."""
        if not self.parameters or self.parameters[0] in kwargs:
            return None
        return next((name for name in kwargs if f"{name}s" == self.parameters[0]), None)


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


@dataclass(frozen=True, slots=True, eq=False)
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

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TimesParameter) and self.module is other.module and self.name == other.name

    def __hash__(self) -> int:
        return hash((id(self.module), self.name))


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


@dataclass(frozen=True, slots=True)
class Chain:
    """One lens after another, from the outside in."""

    lenses: tuple[Lens, ...]

    def get(self, value: Any) -> Tensor:
        """What the innermost lens sees."""
        for lens in self.lenses:
            value = lens.get(value)
        return value

    def put(self, value: Any, tensor: Tensor) -> Any:
        """Put through every lens, from the inside out."""
        outer = [value]
        for lens in self.lenses[:-1]:
            outer.append(lens.get(outer[-1]))
        for lens, seen in zip(reversed(self.lenses), reversed(outer), strict=True):
            tensor = lens.put(seen, tensor)
        return tensor


FIRST = First()
