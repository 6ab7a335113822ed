"""Variants: a program with its own graph. Each has its own code and backend object, so that none reuses another's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from hookline.compiled.options import CompileOptions
from hookline.compiled.program import Program, ReadSpec, Slot
from hookline.compiled.tables import spec_of
from hookline.engine import HookAction

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class Variant:
    """A program, and the graph of a function that was compiled with it."""

    def __init__(
        self,
        program: Program,
        make: Callable[[Program], Callable[[], Any]],
        options: CompileOptions,
        device: torch.device,
        structure: Any = None,
    ) -> None:
        self.structure, self.program = structure, program
        self.eager = make(program)
        self.backend = options.new_backend(device)
        self.backend.has_functions = any(slot.kind == "function" for slot in program.slots)
        self.call = torch.compile(
            _with_own_code(self.eager),
            backend=self.backend,
            fullgraph=True,
            dynamic=False,
            options={"guard_filter_fn": _without_hooks},
        )
        self.refusal: str | None = None
        """Why it is not used, once that is known."""
        self._proved = 0
        self.proved_on: set[str] = set()
        """What calls that it was proved on had: texts shorter than the graph ("padding"), masked tokens ("mask")."""
        self.runs = 0

    @property
    def is_proved(self) -> bool:
        """Whether all of its graphs are proved. There is an unproved one after something made torch compile again."""
        return 0 < self.backend.graphs == self._proved

    def settle(self, refusal: str | None) -> None:
        """Note the outcome of a proof."""
        self.refusal, self._proved = refusal, self.backend.graphs if refusal is None else 0

    def plain(self) -> Tensor:
        """Call the graph as it was traced, without what the backend made of it."""
        self.backend.is_plain = True
        try:
            return self.call()
        finally:
            self.backend.is_plain = False

    @property
    def is_data(self) -> bool:
        """Whether it has edits, all of them as data."""
        slots = self.program.slots
        return bool(slots) and all(slot.kind != "function" for slot in slots)

    @property
    def size(self) -> int:
        """The number of slots and reads."""
        return len(self.program.slots) + len(self.program.reads)

    def assigned(self, actions: Sequence[HookAction], reads: Sequence[ReadSpec]) -> dict[HookAction, Slot] | None:
        """A slot for each hook, in their order; None if the program does not have them all."""
        if not set(reads) <= self.program.reads.keys():
            return None
        slots: dict[HookAction, Slot] = {}
        used: dict[Any, int] = {}
        for action in actions:
            need = spec_of(action)
            event = need.site.module, need.site.kind
            for index in range(used.get(event, 0), len(self.program.slots)):
                if self.program.slots[index].spec.takes(need):
                    slots[action], used[event] = self.program.slots[index], index + 1
                    break
            else:
                return None
        traced = [slot for slot in self.program.slots if slot.kind == "function"]
        return slots if all(slot in slots.values() for slot in traced) else None


def _without_hooks(guards: Sequence[Any]) -> list[bool]:
    """Which guards to keep: not those on hooks of modules. Hooks are looked at before every run, in `entry.py`."""
    return [not any(name in guard.name for name in _HOOKS) for guard in guards]


def _with_own_code(function: Any) -> Any:
    """The same function with a code object of its own: the compiler keeps graphs with the code."""
    code = function.__code__.replace(co_name=f"{function.__name__}_variant")
    return FunctionType(code, function.__globals__, function.__name__, function.__defaults__, function.__closure__)
