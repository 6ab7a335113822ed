"""Whole inputs and outputs of modules, as hook objects get them: tuples, dicts and dataclasses of tensors.

The arguments of a call are a pair `(args, kwargs)`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import Tensor, nn

from hookline.engine import Edit, Kind, Lens, lens_of, parts_of, sharding
from hookline.errors import HooklineError, a_type
from hookline.functions.signatures import parameters_of
from hookline.values.structures import children, look, map_tensors, tensor_paths


@dataclass(frozen=True)
class Whole:
    """The lens that leaves a value as it is."""

    def get(self, value: Any) -> Any:
        """The value itself."""
        return value

    def put(self, value: Any, new: Any) -> Any:  # noqa: ARG002 (it is replaced entirely)
        """The new value."""
        return new


WHOLE = Whole()
Loans: TypeAlias = dict[int, tuple[Tensor, Tensor | None]]
"""The tensors that were lent to a hook, by `id`, each with what shows whether the hook wrote to it."""


@dataclass(frozen=True)
class Completed:
    """The arguments or the output of a module whose tensor is only this process's part: with the whole tensor in it."""

    tensor: Lens
    parts: Lens

    def get(self, value: Any) -> Any:
        """The value with the whole tensor."""
        return self.tensor.put(value, self.parts.get(self.tensor.get(value)))

    def put(self, value: Any, new: Any) -> Any:
        """The new value with this process's part of its tensor."""
        return self.tensor.put(new, self.parts.put(self.tensor.get(value), self.tensor.get(new)))


def arguments_of(module: nn.Module) -> Whole | Completed:
    """The lens for the arguments of a call, as hook objects get them."""
    parts = sharding.completing(module, Kind.INPUT)
    return Completed(_first_argument(module), *parts) if parts else WHOLE


def _first_argument(module: nn.Module) -> Lens:
    return parts_of(lens_of(module, Kind.INPUT))[0]


def copied(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """As `map_tensors`; of arguments, `(args, kwargs)`, the keywords too are in a dict of their own."""
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], dict):
        value = (value[0], dict(value[1]))
    return map_tensors(value, change)


def is_as_it_was(lent_value: Any, seen: Any, loans: Loans) -> bool:
    """Whether `lent_value`, a copy of `seen` that was lent to a hook, has certainly not been written to."""
    if isinstance(seen, Tensor):
        return id(lent_value) in loans and Edit.is_loan_unchanged(*loans[id(lent_value)])
    if not _is_container(seen):
        return lent_value is seen
    before, after = dict(children(seen)), dict(children(lent_value))
    return before.keys() == after.keys() and all(is_as_it_was(after[key], before[key], loans) for key in before)


def _is_container(value: Any) -> bool:
    return isinstance(value, Mapping | tuple | list) or (
        dataclasses.is_dataclass(value) and not isinstance(value, type)
    )


def needs_grad(value: Any) -> bool:
    """Whether any tensor in the value requires gradients."""
    return any(look(value, path).requires_grad for path in tensor_paths(value))


def in_order(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """The arguments of a call in the order of the module's parameters, positional or not."""
    return (*args, *(kwargs[name] for name in _keywords(module, kwargs)))


def out_of_order(
    module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], new: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """New arguments for a call, from the result of a hook: all arguments in order, or the first tensor."""
    if isinstance(new, Tensor):
        return _first_argument(module).put((args, dict(kwargs)), new)
    names = _keywords(module, kwargs)
    if not isinstance(new, tuple | list) or len(new) != len(args) + len(names):
        what = f"{len(new)} values" if isinstance(new, tuple | list) else a_type(new)
        raise HooklineError(
            f"returned {what}; it must return None, a tensor for the first argument, or a tuple of all "
            f"{len(args) + len(names)} arguments: {[f'[{i}]' for i in range(len(args))] + names}"
        )
    return tuple(new[: len(args)]), dict(zip(names, new[len(args) :], strict=True))


def _keywords(module: nn.Module, kwargs: Mapping[str, Any]) -> list[str]:
    parameter_names = [name for name in parameters_of(module)[0] if name in kwargs]
    return [*parameter_names, *(name for name in kwargs if name not in parameter_names)]
