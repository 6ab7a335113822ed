"""Lenses: pairs of pure functions between the value that passes through a module and one tensor in it.

`get(value)` returns the tensor; `put(value, tensor)` returns `value` with that tensor in its place, and leaves `value`
itself unchanged. Every lens obeys three laws, and the tests check them for each:

    get(put(value, tensor)) == tensor
    put(value, get(value)) == value
    put(put(value, a), b) == put(value, b)

Those here find a tensor of the model in the value. `formulas.py` has lenses that compute another one from it; for these
the laws hold up to rounding, and for tensors that they can compute.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, runtime_checkable

from torch import Tensor

from hookline.values.structures import NoTensorError, Path, first_tensor, look, replaced, tensor_paths, tensors_in


@runtime_checkable
class Lens(Protocol):
    """Reads one tensor in a value, and puts another in its place."""

    def get(self, value: Any) -> Tensor: ...
    def put(self, value: Any, tensor: Tensor) -> Any: ...


@dataclass(frozen=True, slots=True)
class First:
    """The value itself if it is a tensor, else the first tensor in it, wherever else in it that tensor is.

    A backbone returns its last hidden state, and again as the last one of all: who uses the second gets the edit too.
    """

    is_root: ClassVar[bool] = True

    def get(self, value: Any) -> Tensor:
        if type(value) is tuple and value and isinstance(value[0], Tensor):
            return value[0]
        return value if isinstance(value, Tensor) else look(value, first_tensor(value))

    def put(self, value: Any, tensor: Tensor) -> Any:
        if isinstance(value, Tensor):
            return tensor
        first = self.get(value)
        if sum(x is first for x in tensors_in(value)) == 1:
            return replaced(value, first_tensor(value), tensor)
        for path in [path for path in tensor_paths(value) if look(value, path) is first]:
            value = replaced(value, path, tensor)
        return value


@dataclass(frozen=True, slots=True)
class Item:
    """The tensor at a path of keys: `Item((1, 0))` is `value[1][0]`."""

    is_root: ClassVar[bool] = True

    path: Path

    def get(self, value: Any) -> Tensor:
        return look(value, self.path)

    def put(self, value: Any, tensor: Tensor) -> Any:
        return replaced(value, self.path, tensor)


@dataclass(frozen=True, slots=True)
class Argument:
    """A tensor among the arguments `(args, kwargs)` of a call.

    `parameters` are the names of the module's parameters in order, so that an argument is found whether it is passed by
    position or by keyword; only the first `positional` of them can be passed by position. Without a `key` the lens is
    for the first tensor, in the order of the parameters.
    """

    is_root: ClassVar[bool] = True

    parameters: tuple[str, ...]
    key: int | str | None = None
    rest: Path = ()
    positional: int | None = None

    def get(self, value: Any) -> Tensor:
        if self.key is None and value[0] and isinstance(value[0][0], Tensor):
            return value[0][0]
        return look(value, self._path(value))

    def put(self, value: Any, tensor: Tensor) -> Any:
        args, kwargs = value
        if self.key is None and type(args) is tuple and args and isinstance(args[0], Tensor):  # nearly always
            return (tensor, *args[1:]), kwargs
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
        first = self.parameters[0] if self.parameters else None
        if first not in kwargs and (renamed := next((name for name in kwargs if f"{name}s" == first), None)):
            return (1, renamed)  # by a former name that transformers still accepts: hidden_state
        ordered = {name: kwargs[name] for name in self.parameters if name in kwargs} | kwargs
        return first_tensor((args, ordered))


@dataclass(frozen=True, slots=True)
class Chain:
    """Several lenses, each looking into the tensor of the one before."""

    lenses: tuple[Lens, ...]

    def get(self, value: Any) -> Tensor:
        for lens in self.lenses:
            value = lens.get(value)
        return value

    def put(self, value: Any, tensor: Tensor) -> Any:
        outer = [value]
        for lens in self.lenses[:-1]:
            # A lens that collects the parts of several processes does not do so again to put its own part back.
            outer.append(getattr(lens, "stand_in", lens.get)(outer[-1]))
        for lens, seen in zip(reversed(self.lenses), reversed(outer), strict=True):
            tensor = lens.put(seen, tensor)
        return tensor


FIRST = First()


def chained(*lenses: Lens) -> Lens:
    """The composition of lenses."""
    flat = tuple(part for lens in lenses for part in parts_of(lens))
    return flat[0] if len(flat) == 1 else Chain(flat)


def is_root(lens: Lens) -> bool:
    """Whether its tensor is one of the model: it is in the value as it is."""
    return getattr(lens, "is_root", False)


def parts_of(lens: Lens) -> tuple[Lens, ...]:
    """The lenses that a lens is a chain of, the outermost first."""
    return lens.lenses if isinstance(lens, Chain) else (lens,)
