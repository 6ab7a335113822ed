"""Activations that are worked out when they are read: most of a full cache is never looked at.

A `Deferred` has a function, and what it takes: snapshots, which nothing changes, and numbers. It refers to no module
and no parameter, so whatever happens to the model after the run, it returns what would have been recorded.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from hookline.engine._inner import operators
from hookline.engine._memory.snapshots import own, shared
from hookline.engine._torch.thread_state import (
    inference_mode,
    is_autocast_on,
    no_autocast,
    no_dispatch_modes,
    no_function_modes,
    no_transforms,
)
from hookline.engine._undo.blocks import interrupt_safe
from hookline.engine._undo.modes import GradMode


class Deferred:
    """The result of a function of tensors, computed on demand. Its arguments may be deferred themselves."""

    __slots__ = ("arguments", "function", "note")

    def __init__(self, function: Callable[..., Tensor], *arguments: Any) -> None:
        self.function, self.arguments = function, arguments
        self.note: Callable[[Tensor], None] | None = None
        """Notes something on the tensor, such as which positions are padding."""

    def compute(self) -> Tensor:
        """Return a new tensor, or one that shares memory with nothing that can be written to."""
        sources = self.sources()
        with _as_in_run(), inference_mode(sources[0].is_inference()), GradMode(False):
            x = self._result()
            memory = x.untyped_storage()
            is_new = all(memory is not each.untyped_storage() for each in sources)
            return x if is_new else self._noted(own(x))

    def _result(self) -> Tensor:
        return self._noted(
            self.function(*[each._result() if type(each) is Deferred else each for each in self.arguments])
        )

    def _noted(self, x: Tensor) -> Tensor:
        if self.note is not None:
            self.note(x)
        return x

    def like(self) -> Tensor:
        """Return a tensor of the same shape and dtype, without data."""
        try:
            with _as_in_run(), GradMode(False):
                return self._without_data()
        except (NotImplementedError, RuntimeError):  # rows chosen by a mask: how many is known only from its data
            return self.compute()

    def _without_data(self) -> Tensor:
        return self.function(
            *[
                each._without_data()
                if type(each) is Deferred
                else each.to("meta")
                if isinstance(each, Tensor)
                else each
                for each in self.arguments
            ]
        )

    def sources(self) -> list[Tensor]:
        """The tensors that it is computed from."""
        found: list[Tensor] = []
        for each in self.arguments:
            if type(each) is Deferred:
                found += each.sources()
            elif isinstance(each, Tensor):
                found.append(each)
        return found


@contextmanager
def _as_in_run() -> Iterator[None]:
    """Outside what surrounds the reader: autocast, modes of torch such as fake tensors, transforms (`grad`), a module
    that a run looks into."""
    with (
        operators.kernels_off(),
        no_function_modes(),
        no_autocast(),
        no_dispatch_modes(),
        no_transforms(),
    ):
        yield


def kept(x: Tensor) -> Tensor | None:
    """Return a snapshot of `x` for a `Deferred`; None if `x` cannot be shared, and would have to be copied.

    None also under autocast, which changes what functions return and is over when the activation is read.
    """
    if is_autocast_on():
        return None
    return shared(x.detach() if x.requires_grad else x, is_for_reading=True)


def is_replayable() -> bool:
    """Whether a CUDA graph is being captured: its replays write to memory without torch knowing."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


class Activations(MutableMapping[str, Tensor]):
    """Tensors by name. One that is deferred is computed when it is first read, and kept from then on."""

    def __init__(self, found: dict[str, Any] | Callable[[], dict[str, Any]]) -> None:
        self._found = found

    @property
    def found(self) -> dict[str, Any]:
        """The tensors, and what computes the others; made when it is first needed."""
        if isinstance(self._found, dict):
            return self._found
        with _lock:
            if not isinstance(self._found, dict):
                self._found = self._found()
            return self._found

    def __getitem__(self, name: str) -> Tensor:
        x = self.found[name]
        if type(x) is not Deferred:
            return x
        computed = x.compute()
        with _lock:  # of two threads, both get the tensor of the first
            if self.found.get(name) is x:
                self.found[name] = computed
            return self.found.get(name, computed)

    def __setitem__(self, name: str, x: Tensor) -> None:
        self.found[name] = x

    def __delitem__(self, name: str) -> None:
        del self.found[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.found)

    def __len__(self) -> int:
        return len(self.found)

    def __contains__(self, name: object) -> bool:
        return name in self.found

    def __reduce__(self) -> Any:
        return dict, (read_once(self),)


_lock = interrupt_safe(threading.Lock())


def read_once(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors; those that are deferred are computed, but not kept in `tensors`."""
    return mapped(tensors, lambda x, _name: x, is_now=True)  # type: ignore[return-value]


def mapped(
    tensors: Mapping[str, Tensor], change: Callable[[Tensor, str], Tensor], *, is_now: bool = False
) -> dict[str, Tensor] | Activations:
    """Return `change(x, name)` of each tensor; of one that is deferred when it is read, unless `is_now`."""
    if not isinstance(tensors, Activations):
        return {name: change(x, name) for name, x in tensors.items()}
    if is_now:
        return {name: change(x.compute() if type(x) is Deferred else x, name) for name, x in tensors.found.items()}
    return Activations(
        {
            name: Deferred(change, x, name) if type(x) is Deferred else change(x, name)
            for name, x in tensors.found.items()
        }
    )


def some_of(tensors: MutableMapping[str, Tensor], names: list[str]) -> MutableMapping[str, Tensor]:
    """Return some of the tensors."""
    if isinstance(tensors, Activations):
        return Activations({name: tensors.found[name] for name in names})
    return {name: tensors[name] for name in names}


def without_data(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield names and tensors that have at least a shape and a dtype; nothing is computed."""
    found = tensors.found if isinstance(tensors, Activations) else tensors
    for name, x in found.items():
        yield name, x.like() if type(x) is Deferred else x


def memory_of(tensors: Mapping[str, Tensor]) -> list[Tensor]:
    """The tensors that are kept in memory; in place of a deferred one, those that it is computed from."""
    found = tensors.found if isinstance(tensors, Activations) else tensors
    return [each for x in found.values() for each in (x.sources() if isinstance(x, Deferred) else (x,))]
