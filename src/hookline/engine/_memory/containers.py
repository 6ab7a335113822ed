"""Lists, dicts and dataclasses that a module got as copies of its caller's, because a tensor in them was replaced.

What the module itself puts into its copy, or takes out, is meant for the caller's own container.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterator, MutableMapping
from functools import partial
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor, nn

from hookline.engine._torch.graph_tasks import at_end_of_backward
from hookline.engine.pass_state import pass_state
from hookline.errors import HooklineError, NeverFiredWarning, a_type, users_level
from hookline.values.structures import children, replaced

Change: TypeAlias = Callable[[Any], Any]


class Contents(NamedTuple):
    """What is in a container at one moment, by identity."""

    items: list[Any] | dict[Any, Any]
    attributes: dict[str, Any]

    @classmethod
    def of(cls, container: Any) -> Contents:
        """What is in it now."""
        if isinstance(container, list):
            return cls(list(container), _attributes(container))
        if isinstance(container, MutableMapping):
            return cls(dict(container.items()), _attributes(container) if isinstance(container, dict) else {})
        return cls({}, _attributes(container))

    def values(self) -> Iterator[Any]:
        """All items and attributes."""
        yield from self.items.values() if isinstance(self.items, dict) else self.items
        yield from self.attributes.values()

    def is_same(self, other: Contents) -> bool:
        """Whether the same objects are at the same places, in the same order."""
        items = (
            contents.items if isinstance(contents.items, dict) else dict(enumerate(contents.items))
            for contents in (self, other)
        )
        return _are_same(*items) and _are_same(self.attributes, other.attributes)


class CopiedContainer(NamedTuple):
    """A copy that a module got instead of its caller's container, and what was in both when it was sent."""

    module: nn.Module
    original: Any
    copy: Any
    in_original: Contents
    in_copy: Contents

    def is_changed(self) -> bool:
        """Whether the module put something in or took something out."""
        return not Contents.of(self.copy).is_same(self.in_copy)

    def apply(self, change: Change) -> None:
        """Make the changes of the module in the caller's container too; what is new there goes through `change`."""
        if not Contents.of(self.original).is_same(self.in_original):
            raise HooklineError(
                f"{type(self.module).__name__} was called with a copy of {a_type(self.original)}, because a hook "
                f"replaced a tensor in it, but the original was changed during the call, by another name; place the "
                f"hook where the tensor is computed"
            )
        if not self.is_changed():
            return
        now = Contents.of(self.copy)
        if isinstance(self.original, list):
            self.original[:] = self._listed(now.items, change)  # type: ignore[arg-type]
        elif isinstance(now.items, dict) and now.items:
            self._apply_items(now.items, change)
        elif isinstance(self.original, MutableMapping):
            self.original.clear()
        before = self.in_copy.attributes
        for name in before.keys() - now.attributes.keys():
            object.__delattr__(self.original, name)
        for name, value in now.attributes.items():
            if name not in before or before[name] is not value:
                object.__setattr__(self.original, name, change(value))

    def _listed(self, now: list[Any], change: Change) -> list[Any]:
        """The items of the caller's list: an item that the copy had remains the caller's, also at another place."""
        pairs = list(zip(self.in_copy.items, self.in_original.items, strict=True))
        stays = [place < len(pairs) and pairs[place][0] is item for place, item in enumerate(now)]
        moved: dict[int, list[Any]] = {}
        for place, (item, original) in enumerate(pairs):
            if place >= len(now) or not stays[place]:
                moved.setdefault(id(item), []).append(original)
        return [
            pairs[place][1] if stays[place] else moved[id(item)].pop(0) if moved.get(id(item)) else change(item)
            for place, item in enumerate(now)
        ]

    def _apply_items(self, now: dict[Any, Any], change: Change) -> None:
        before: dict[Any, Any] = self.in_copy.items  # type: ignore[assignment]
        originals: dict[Any, Any] = self.in_original.items  # type: ignore[assignment]
        items = {
            key: originals[key] if key in before and before[key] is value else change(value)
            for key, value in now.items()
        }
        for key in [key for key in originals if key not in items]:
            del self.original[key]
        for key, value in items.items():
            if key not in originals or originals[key] is not value:
                self.original[key] = value
        if list(self.original) != list(items):  # the module has moved a key to the end
            for key in items:
                self.original[key] = self.original.pop(key)


def _attributes(container: Any) -> dict[str, Any]:
    attributes = getattr(container, "__dict__", None)
    if attributes is None and dataclasses.is_dataclass(container):
        names = [field.name for field in dataclasses.fields(container)]
        return {name: getattr(container, name) for name in names if hasattr(container, name)}
    return {} if attributes is None or attributes is container else dict(attributes)


def _are_same(one: dict[Any, Any], other: dict[Any, Any]) -> bool:
    return list(one) == list(other) and all(value is other[key] for key, value in one.items())


def copied_containers(old: Any, new: Any) -> Iterator[tuple[Any, Any]]:
    """The containers of a structure that `new` has a copy of at the same place, from the outside in."""
    if old is new or isinstance(old, Tensor) or type(old) is not type(new):
        return
    pairs = dict(children(old)), dict(children(new))
    if list(pairs[0]) != list(pairs[1]):
        return
    is_instance = dataclasses.is_dataclass(old) and not isinstance(old, type)
    if isinstance(old, list | MutableMapping) or is_instance:
        yield old, new
    for key, part in pairs[0].items():
        yield from copied_containers(part, pairs[1][key])


def note_copies(module: nn.Module, old: Any, new: Any) -> None:
    """Note which containers among the arguments of a module are copies of its caller's."""
    (args, kwargs), (new_args, new_kwargs) = old, new
    copies = pass_state.copies
    for before, after in [*zip(args, new_args, strict=False), *((kwargs[k], new_kwargs.get(k)) for k in kwargs)]:
        if before is after or isinstance(before, Tensor):
            continue
        for original, copy in copied_containers(before, after):
            note = CopiedContainer(module, original, copy, Contents.of(original), Contents.of(copy))
            copies[id(copy)] = note
            if pass_state.is_recomputing:  # torch may end the recomputation in the middle of the module
                at_end_of_backward(partial(_forget, copies, note))


def _forget(copies: dict[int, CopiedContainer], note: CopiedContainer) -> None:
    if copies.get(id(note.copy)) is note:
        del copies[id(note.copy)]


def take_copies(module: nn.Module, value: Any) -> list[CopiedContainer]:
    """Take the notes of the copies that this module was called with: a copy of a copy before that."""
    notes: list[CopiedContainer] = []
    waiting = [value]
    while waiting and pass_state.copies:
        part = waiting.pop(0)
        note = pass_state.copies.get(id(part))
        if note is not None and note.module is module:
            del pass_state.copies[id(part)]
            notes.append(note)
            waiting += [*note.in_copy.values(), note.original]
        elif not isinstance(part, Tensor):
            waiting += [child for _, child in children(part)]
    return notes


def with_originals(value: Any, originals: dict[int, Any]) -> Any:
    """The value with the caller's own containers in the places of their copies."""
    if not originals or isinstance(value, Tensor):
        return value
    if id(value) in originals:
        return with_originals(originals[id(value)], originals)
    for key, child in children(value):
        original = with_originals(child, originals)
        if original is not child:
            value = replaced(value, (key,), original)
    return value


def warn_of_lost_edit(notes: list[CopiedContainer], value: Any, edited: list[Tensor]) -> None:
    """Warn if a module returns its copy as it got it, with edited tensors in it."""
    for note in notes:
        if note.copy is value and not note.is_changed() and any(x is y for x in note.in_copy.values() for y in edited):
            warnings.warn(
                f"an edit at the input of {type(note.module).__name__} has no effect: the module returns the "
                f"{type(value).__name__} that it gets, and its caller gets its own one, without the edit; edit the "
                f"output instead",
                NeverFiredWarning,
                stacklevel=users_level(),
            )
