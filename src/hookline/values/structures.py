"""Structures: tensors in tuples, lists, dicts and dataclasses, as modules take and return them.

A path of keys leads to a tensor in such a structure. Replacing the tensor makes a new structure that shares everything
else with the old one; the old one is not changed, since other code may hold it.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from types import MappingProxyType
from typing import Any, TypeAlias

from torch import Tensor

from hookline.errors import HooklineError, a_type

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
    kind: Any = type(value)
    if kind is tuple or kind is list:
        items = list(value)
        items[key] = child  # type: ignore[index]
        return items if kind is list else tuple(items)
    if kind is dict or kind is OrderedDict:
        new = kind(value)  # the compiler cannot trace dict.copy
        new[_as_stored(new, key)] = child
        return new
    if isinstance(value, tuple) and not hasattr(value, "__dict__"):
        fields = getattr(kind, "_fields", ())
        if key in fields or (fields and isinstance(key, int)):  # a named tuple
            items = list(value)
            items[fields.index(key) if isinstance(key, str) else key] = child
            return kind._make(items)
    is_record = dataclasses.is_dataclass(value)
    if is_record and (isinstance(value, OrderedDict) or not isinstance(value, Mapping)):
        new = copy.copy(value)
        if isinstance(new, OrderedDict):  # a ModelOutput also has its items by number
            key = _as_stored(new, key)
            new[list(new)[key] if isinstance(key, int) and key not in new else key] = child
        else:
            object.__setattr__(new, str(key), child)  # also of a frozen dataclass: nobody else has `new` yet
        return new
    return _with_child_of_unusual(value, key, child)


def _with_child_of_unusual(value: Any, key: Key, child: Any) -> Any:
    """As `_with_child`, for what people derive from the usual containers; checked, because they can do anything."""
    old, key = _child(value, key), _as_stored(value, key)
    if isinstance(value, Mapping) and isinstance(key, int) and key not in value:
        key = list(value)[key]
    try:
        new = _copied(value, key, old, child)
        is_right = type(new) is type(value) and _child(new, key) is child and _child(value, key) is old
    except Exception as error:
        raise _not_copied(value, key) from error
    if not is_right:
        _put_back(value, key, old)
        raise _not_copied(value, key)
    return new


def _copied(value: Any, key: Key, old: Any, child: Any) -> Any:
    if isinstance(value, tuple):
        return _copied_tuple(value, key, child)
    if isinstance(value, MappingProxyType):
        return MappingProxyType(_with_child(value.copy(), key, child))
    new = copy.copy(value)
    attributes = getattr(value, "__dict__", {})
    if isinstance(value, dict) and attributes is value:  # an AttrDict
        new.__dict__ = new
    elif isinstance(value, Mapping) and not isinstance(value, dict):
        for name, part in attributes.items():  # what holds the items
            if vars(new).get(name) is part and isinstance(part, MutableMapping | list):
                is_holder = isinstance(part, MutableMapping) and part.get(key) is old
                vars(new)[name] = _with_child(part, key, child) if is_holder else copy.copy(part)
    if isinstance(new, MutableMapping | list):
        new[key] = child  # type: ignore[index]
    elif not isinstance(new, Mapping):
        object.__setattr__(new, str(key), child)
    if isinstance(key, str) and attributes.get(key) is old and vars(new)[key] is old:
        vars(new)[key] = child  # an attribute that is also an item
    return new


def _copied_tuple(value: tuple[Any, ...], key: Key, child: Any) -> Any:
    """A copy of one of torch's own tuples, as of `x.max(1)`, or of another subclass, whose attributes stay."""
    kind, attributes = type(value), dict(getattr(value, "__dict__", {}))
    items = list(value)
    if isinstance(key, str):
        names = getattr(kind, "_fields", getattr(kind, "__match_args__", ()))
        if key in names:
            key = names.index(key)
        else:
            attributes[key] = child
    if isinstance(key, int):
        items[key] = child
    try:
        new: Any = tuple.__new__(kind, items)  # that of the class itself could take anything
    except TypeError:  # torch's own kinds refuse it
        new = kind(items)
    if attributes:
        vars(new).update(attributes)
    return new


def _put_back(value: Any, key: Key, old: Any) -> None:
    """Undo that a change of the copy also changed the caller's own container."""
    if isinstance(value, MutableMapping | list) and _child(value, key) is not old:
        value[key] = old  # type: ignore[index]


def _not_copied(value: Any, key: Key) -> HooklineError:
    return HooklineError(
        f"[{key}] in {a_type(value)} cannot be replaced, because copy.copy() does not make a copy of it that is "
        f"independent of the original: let the module take or return a tuple, a list, a dict or a dataclass, or let "
        f"{type(value).__name__}.__copy__ copy what holds the items"
    )


def map_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return the structure with `change(tensor)` for every tensor, in new containers."""
    if isinstance(value, Tensor):
        return change(value)
    for path in list(tensor_paths(value)):
        value = replaced(value, path, change(look(value, path)))
    return value
