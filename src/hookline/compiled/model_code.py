"""ModelCode: what runs when the modules of a model are called, as far as the compiler's guards do not compare it.

A graph keeps the methods that it was traced with, although somebody may replace one on a class later, as libraries of
kernels and of quantization do, or assign its code, as IPython's autoreload does. And it has no place for torch hooks
that come later.
"""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter, is_, itemgetter
from types import CellType, FunctionType
from typing import Any

from torch import nn

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks")
_WHEN_MADE = {"__init__", "__setstate__"}
"""Methods that no call runs. The compiler replaces those of `nn.Module`."""
_is_training = itemgetter("training")
_code_of = attrgetter("__code__")
"""What IPython's autoreload assigns to a function whose source has changed."""


class ModelCode:
    """The modules of a model, and what their classes define, at one moment."""

    def __init__(self, root: nn.Module) -> None:
        self._modules = [*root.modules()]
        self._types = [*map(type, self._modules)]
        bases = dict.fromkeys(base for kind in dict.fromkeys(self._types) for base in kind.__mro__[:-1])
        self._members = [vars(base) for base in bases]  # views, which follow what is assigned to the class
        self._values = self._values_now()
        self._methods = self._methods_now()
        self._functions = _functions_in(self._methods.values())
        self._codes = [*map(_code_of, self._functions)]
        self._attributes = [vars(module) for module in self._modules]
        self._hooks = [attributes[name] for attributes in self._attributes for name in _HOOKS]

    def is_of(self, root: nn.Module) -> bool:
        """Whether the model has the same modules, with the same methods."""
        return [*root.modules()] == self._modules and self.is_current()

    def is_current(self) -> bool:
        """Whether the modules have the same methods; it takes microseconds."""
        if not _are_same([*map(_code_of, self._functions)], self._codes):
            return False
        values = self._values_now()
        if _are_same(values, self._values):
            return _are_same([*map(type, self._modules)], self._types)
        methods = self._methods_now()  # perhaps a class has only got another attribute that is no method
        if methods.keys() != self._methods.keys() or any(methods[key] is not self._methods[key] for key in methods):
            return False
        self._values = values
        return _are_same([*map(type, self._modules)], self._types)

    def on_modules(self) -> tuple[Any, ...]:
        """What is on the modules themselves: torch hooks, the number of attributes, and whether each is training."""
        hooks = [*map(tuple, filter(None, self._hooks))]
        return hooks, [*map(len, self._attributes)], [*map(_is_training, self._attributes)]

    def _values_now(self) -> list[Any]:
        return [value for members in self._members for value in members.values()]

    def _methods_now(self) -> dict[tuple[int, str], Any]:
        return {
            (number, name): value
            for number, members in enumerate(self._members)
            for name, value in members.items()
            if name not in _WHEN_MADE and (callable(value) or hasattr(type(value), "__get__"))
        }


def _functions_in(methods: Iterable[Any]) -> list[FunctionType]:
    """The functions of methods and properties, and those that are inside of decorated ones."""
    functions: dict[FunctionType, None] = {}
    left = list(methods)
    while left:
        value = left.pop()
        if isinstance(value, staticmethod | classmethod):
            left.append(value.__func__)
        elif isinstance(value, property):
            left.append(value.fget)
        elif isinstance(value, FunctionType) and value not in functions:
            functions[value] = None
            left += [cell.cell_contents for cell in value.__closure__ or () if cell != CellType()]
    return list(functions)


def _are_same(values: list[Any], others: list[Any]) -> bool:
    return len(values) == len(others) and all(map(is_, values, others))
