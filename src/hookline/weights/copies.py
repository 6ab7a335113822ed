"""Copies of weights, which refuse to be written into: a write there would look like an edit of the model, and be none.

    model.blocks[0].attn.b_Q[:] = 1          # of a model without that bias: HooklineError, with what to do instead

All else is as with any tensor. What shares its memory refuses too; what is computed from it is a plain tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from hookline.errors import HooklineError

_WRITING = frozenset(
    {"__setitem__", "__set__", "__delete__"}
    | {f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "floordiv", "div", "mod", "pow")}
    | {f"__i{name}__" for name in ("and", "or", "xor", "lshift", "rshift")}
)
"""Methods that write, beside those whose names end in an underscore; `__set__` is of `.data`, `.grad` and the like."""


class Copy(Tensor):
    """A tensor that is no part of the model, and says so when it is written into."""

    why: str
    """What it is, and what to write instead."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run `func`, unless it would write into a copy."""
        kwargs = kwargs or {}
        for written in _written(func, args, kwargs):
            if isinstance(written, Copy):
                raise HooklineError(f"this tensor is a copy, and writing into it would change nothing: {written.why}")
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
            return _marked(result, [each for each in args if isinstance(each, Copy)])

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Saved and copied, it is a plain tensor."""
        return self.as_subclass(Tensor).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.as_subclass(Tensor).__deepcopy__(memo)


def copied(tensor: Tensor, why: str) -> Tensor:
    """The tensor, refusing writes; `why` says what it is and what to write instead."""
    new = tensor.as_subclass(Copy)
    new.why = why
    return new


def plain(tensor: Tensor) -> Tensor:
    """The tensor without that."""
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.as_subclass(Tensor) if isinstance(tensor, Copy) else tensor


def shares_memory(one: Tensor, other: Tensor) -> bool:
    """Whether both are views of the same numbers."""
    return one.untyped_storage()._cdata == other.untyped_storage()._cdata


def _written(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The arguments that a function writes into."""
    name = getattr(func, "__name__", "")
    is_in_place = name in _WRITING or (name.endswith("_") and not name.endswith("__"))
    targets = [kwargs.get("out"), *((*args, *kwargs.values())[:1] if is_in_place else ())]
    return [each for target in targets for each in (target if isinstance(target, list | tuple) else [target])]


def _marked(result: Any, copies: list[Copy]) -> Any:
    """A result that shares a copy's memory is one as well."""
    if isinstance(result, list | tuple):
        marked = [_marked(each, copies) for each in result]
        return type(result)(marked) if type(result) in (list, tuple) else result
    if isinstance(result, Tensor):
        source = next((each for each in copies if shares_memory(result, each)), None)
        return plain(result) if source is None else copied(result, source.why)
    return result
