"""Structures: tensors in tuples, lists, dicts and dataclasses, as modules take and return them.

A path of keys leads to a tensor in such a structure. Replacing the tensor makes a new structure that shares everything
else with the old one; the old one is not changed, since other code may hold it.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any, TypeAlias

from torch import Tensor

from hookline.errors import a_type

Key: TypeAlias = int | str
Path: TypeAlias = tuple[Key, ...]


class NoTensorError(LookupError):
    """A value has no tensor at a path."""


def children(value: Any) -> Iterator[tuple[Key, Any]]:
    """The items of a structure with their keys, in order; none for a leaf."""
    if isinstance(value, Mapping):
        return iter(value.items())
    if isinstance(value, tuple | list):
        return enumerate(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return ((field.name, getattr(value, field.name)) for field in dataclasses.fields(value))
    return iter(())


def tensor_paths(value: Any) -> Iterator[Path]:
    """The paths to all tensors in a value, depth first."""
    if isinstance(value, Tensor):
        yield ()
        return
    for key, child in children(value):
        yield from ((key, *path) for path in tensor_paths(child))


def first_tensor(value: Any) -> Path:
    """The path to the first tensor in a value, depth first."""
    for path in tensor_paths(value):
        return path
    raise NoTensorError(f"the value is {a_type(value)} with no tensor in it")


def tensors_in(value: Any) -> list[Tensor]:
    """All tensors in a structure, in no particular order."""
    found, waiting = [], [value]
    while waiting:
        each = waiting.pop()
        kind = type(each)
        if isinstance(each, Tensor):
            found.append(each)
        elif kind is tuple or kind is list:  # the usual ones first: this runs in every pass
            waiting += each
        elif kind is dict:
            waiting += each.values()
        elif each is not None and not isinstance(each, int | str):
            waiting.extend(child for _, child in children(each))
    return found


def look(value: Any, path: Path) -> Tensor:
    """Return the tensor at `path`."""
    for key in path:
        value = _child(value, key)
    if not isinstance(value, Tensor):
        raise NoTensorError(f"it is {a_type(value)}, not a tensor; {_items(value)}")
    return value


def replaced(value: Any, path: Path, tensor: Tensor) -> Any:
    """Return a copy of the structure with another tensor at `path`."""
    if not path:
        return tensor
    key, rest = path[0], path[1:]
    return _with_child(value, key, replaced(_child(value, key), rest, tensor))


def _child(value: Any, key: Key) -> Any:
    try:
        if isinstance(value, Mapping) or (isinstance(value, tuple | list) and isinstance(key, int)):
            return value[_as_stored(value, key)]  # type: ignore[index]
        if isinstance(key, str) and not isinstance(value, Tensor) and not key.startswith("_"):
            return getattr(value, key)  # a dataclass, a named tuple
        raise KeyError(key)
    except (KeyError, IndexError, AttributeError) as error:
        raise NoTensorError(f"there is no [{key}] in this {type(value).__name__}; {_items(value)}") from error


def _as_stored(value: Any, key: Key) -> Key:
    """The key as a mapping has it: the name of a point does not tell 1 from "1"."""
    is_text = isinstance(key, int) and isinstance(value, Mapping) and key not in value and str(key) in value
    return str(key) if is_text else key


def _items(value: Any) -> str:
    return "it has " + (", ".join(f"[{key}]" for key, _ in children(value)) or "no items")


def _with_child(value: Any, key: Key, child: Any) -> Any:
    if isinstance(value, tuple):
        if isinstance(key, str):
            return value._replace(**{key: child})  # type: ignore[attr-defined]
        items = list(value)
        items[key] = child
        make = getattr(type(value), "_make", type(value))  # a named tuple, or torch's own: x.max(1)
        return make(items)
    new = dict(value) if type(value) is dict else copy.copy(value)  # the compiler cannot trace dict.copy
    if isinstance(new, MutableMapping | list):
        key = _as_stored(new, key)
        if isinstance(new, MutableMapping) and isinstance(key, int) and key not in new:
            key = list(new)[key]  # a ModelOutput also has its items by number
        new[key] = child  # type: ignore[index]
    else:
        object.__setattr__(new, str(key), child)  # also of a frozen dataclass: nobody else has `new` yet
    return new


def map_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return the structure with `change(tensor)` for every tensor, in new containers."""
    if isinstance(value, Tensor):
        return change(value)
    for path in list(tensor_paths(value)):
        value = replaced(value, path, change(look(value, path)))
    return value
