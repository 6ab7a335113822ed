"""The fields of an edit: each declares the check that turns a given value into the one that is kept.

@dataclass(frozen=True, eq=False, repr=False)
class Scale(DataEdit):
    factor: float = edit_field(number)

A check takes the field's name and the value, and returns the value to keep or raises. Values loaded from a file pass
the same checks.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Sequence
from operator import index
from typing import Any, TypeAlias

import torch
from numpy import generic, ndarray
from torch import Tensor

from hookline.errors import HooklineError, a_type
from hookline.text.outliers import Outliers, factor_of
from hookline.text.score_positions import Crossed
from hookline.text.token_positions import Positions, canonical, is_index, whole_number

Units: TypeAlias = int | Sequence[int] | None
"""Heads or neurons: one, several, or all."""
Check: TypeAlias = Callable[[str, Any], Any]


def edit_field(check: Check, default: Any = dataclasses.MISSING) -> Any:
    """A field of an edit whose values pass `check`; None is allowed only as the default."""
    return dataclasses.field(default=default, metadata={"check": check})


def checked(field: dataclasses.Field[Any], value: Any) -> Any:
    """The value of a field that was made by `edit_field`, after its check."""
    return value if value is None and field.default is None else field.metadata["check"](field.name, value)


def units(name: str, value: Any) -> Units:
    """One index, or a tuple of indices, of heads or neurons."""
    items: Any = value.tolist() if isinstance(value, Tensor | ndarray) else value
    if items is None or is_index(items):
        return None if items is None else index(items)
    if isinstance(items, Sequence) and items and all(map(is_index, items)):
        return tuple(map(index, items))
    raise HooklineError(f"{name}= must be an index or a list of indices, not {described(value)}")


def number(name: str, value: Any) -> float:
    """A finite number as a float."""
    plain = value.item() if isinstance(value, generic) else value
    if isinstance(plain, bool) or not isinstance(plain, int | float) or not abs(plain) <= sys.float_info.max:
        raise HooklineError(f"{name}= must be a number, not {described(value)}")
    return float(plain)


def flag(name: str, value: Any) -> bool:
    """True or False."""
    if not isinstance(value, bool):
        raise HooklineError(f"{name}= must be True or False, not {described(value)}")
    return value


def tensor(name: str, value: Any) -> Tensor:
    """A copy of a tensor, or a number as a tensor."""
    if isinstance(value, Tensor):
        copy = _own_copy(name, value)
        _check_values(name, copy)
        return copy
    if not isinstance(value, int | float):
        raise HooklineError(f"{name}= must be a tensor or a number, not {described(value)}: use torch.as_tensor(…)")
    return torch.tensor(number(name, value), dtype=torch.float64)


def _check_values(name: str, values: Tensor) -> None:
    """Raise for NaN and infinity; -inf is allowed, because it masks attention scores."""
    bad = values.isnan() if values.is_complex() else values.isnan() | values.isposinf()
    if count := int(bad.sum()):
        raise HooklineError(
            f"{name}= has NaN or infinity in {count:,} of {values.numel():,} values: an edit needs finite values (or "
            f"-inf, which masks attention scores)"
        )


def bools(name: str, value: Any) -> Tensor:
    """A copy of a bool tensor."""
    if not (isinstance(value, Tensor) and value.dtype == torch.bool):
        raise HooklineError(f"{name}= must be a bool tensor, not {described(value)}")
    return _own_copy(name, value)


def token_positions(name: str, value: Any) -> Positions:
    """Positions in their canonical form."""
    positions = canonical(value)
    return _own_copy(name, positions) if isinstance(positions, Tensor) else positions


def condition(name: str, value: Any) -> Crossed:
    """The bound of a monitor."""
    if not isinstance(value, Crossed):
        raise HooklineError(f"{name}= is a bound of a monitor, monitor.above(…) or monitor.below(…), not {value!r:.60}")
    return value


integer: Check = whole_number


def outliers(_: str, value: Any) -> Outliers:
    """What to do with outlying positions, as given."""
    factor_of(value)
    return value


def _own_copy(name: str, value: Tensor) -> Tensor:
    if value.requires_grad:
        raise HooklineError(
            f"{name}= requires gradients, but an edit is data: pass {name}.detach(), or train it in a hook function"
        )
    if value.layout != torch.strided or value.is_nested:
        kind = "nested" if value.is_nested else value.layout
        raise HooklineError(f"{name}= is a {kind} tensor, but an edit needs a dense one: pass {name}.to_dense()")
    if value.device.type == "meta":
        raise HooklineError(f"{name}= is on the device 'meta', so it has no values")
    return value.clone(memory_format=torch.contiguous_format)


def is_same(a: Any, b: Any) -> bool:
    """Whether two values of a field are equal; tensors by value, NaN equal to itself."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return (a.dtype, a.shape) == (b.dtype, b.shape) and torch.allclose(a, b.to(a.device), 0, 0, equal_nan=True)
    return type(a) is type(b) and bool(a == b)


def described(value: Any) -> str:
    """A wrong value, as an error message shows it."""
    if isinstance(value, Tensor):
        return f"a {str(value.dtype).removeprefix('torch.')} tensor of shape {list(value.shape)}"
    if isinstance(value, int) and abs(value) > sys.float_info.max:
        return "an integer that is too large for a float"
    text = repr(value)
    return text if len(text) <= 60 and "\n" not in text else a_type(value)


def shown(value: Any) -> str:
    """The value of a field, as an edit prints it."""
    if isinstance(value, Tensor) and value.ndim:
        return f"<{list(value.shape)} {str(value.dtype).removeprefix('torch.')}>"
    if isinstance(value, Tensor | float):
        return f"{value.item() if isinstance(value, Tensor) else value:g}"
    return repr(list(value) if isinstance(value, tuple) else value)
