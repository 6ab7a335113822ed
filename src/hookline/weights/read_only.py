"""Read-only tensors: weights that are computed, where a write would look like an edit of the model and have no effect.

    model.blocks[0].attn.b_Q[:] = 1          # raises on a model without that bias, and says what to do instead

Otherwise they behave like any tensor. Tensors that share their memory are read-only too; what is computed from them is
a plain tensor.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from hookline.errors import HooklineError

_WRITING = re.compile(
    r".*[^_]_|__(setitem|set|delete|i(add|sub|mul|truediv|floordiv|div|mod|pow|and|or|xor|lshift|rshift))__"
)
"""Names of functions that write to their first argument; `__set__` is the setter of `.data`, `.grad` and so on."""


class ReadOnlyTensor(Tensor):
    """A tensor that is not part of the model, and raises if it is written to."""

    why: str
    """What it is, and what to write to instead."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run `func`, unless it writes to a read-only tensor."""
        kwargs = kwargs or {}
        is_in_place = _WRITING.fullmatch(getattr(func, "__name__", "")) is not None
        for target in (kwargs.get("out"), *((*args, *kwargs.values())[:1] if is_in_place else ())):
            for written in target if isinstance(target, list | tuple) else [target]:
                if isinstance(written, ReadOnlyTensor):
                    raise HooklineError(f"this tensor is a copy, so writing to it would have no effect: {written.why}")
        read_only_tensors = [arg for arg in args if isinstance(arg, ReadOnlyTensor)]

        def marked(x: Any) -> Any:
            source = next(
                (tensor for tensor in read_only_tensors if isinstance(x, Tensor) and shares_memory(x, tensor)), None
            )
            return plain(x) if source is None else read_only(x, source.why)

        with torch._C.DisableTorchFunctionSubclass():
            return tree_map(marked, func(*args, **kwargs))

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A plain tensor when saved or copied."""
        return plain(self).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return plain(self).__deepcopy__(memo)


def read_only(tensor: Tensor, why: str) -> Tensor:
    """The tensor as a read-only one; `why` says what it is and what to write to instead."""
    new = tensor.as_subclass(ReadOnlyTensor)
    new.why = why
    return new


def plain(x: Any) -> Any:
    """A read-only tensor as a plain tensor with the same memory; anything else unchanged."""
    with torch._C.DisableTorchFunctionSubclass():
        return x.as_subclass(Tensor) if isinstance(x, ReadOnlyTensor) else x


def shares_memory(one: Tensor, other: Tensor) -> bool:
    """Whether both tensors are views of the same storage."""
    return one.untyped_storage()._cdata == other.untyped_storage()._cdata
