"""Variants: a program with its own graph. Each has its own code and backend object, so that none reuses another's."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from hookline.compiled.program import Program, Slot
from hookline.compiled.tables import spec_of
from hookline.engine.hook_actions import HookAction
from hookline.engine.points import Site

_IN_PLACE = {"setitem", "delitem", "iadd", "isub", "imul", "imatmul", "itruediv", "ifloordiv", "imod", "ipow", "iand"}
_IN_PLACE |= {"ior", "ixor", "ilshift", "irshift", "iconcat"}
"""Operators of Python that write to a tensor."""
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class OwnBackend:
    """The backend of one variant, which counts its graphs. The compiler tells backends apart by identity.

    It keeps each graph as it was traced, too: while `is_plain`, that runs, operation by operation, with the kernels of
    an uncompiled run.
    """

    def __init__(self, call: Callable[..., Any]) -> None:
        self.call, self.graphs, self.is_plain = call, 0, False

    def __call__(self, graph: Any, inputs: Any, **options: Any) -> Any:
        """Compile a graph."""
        self.graphs += 1
        graph.graph.eliminate_dead_code(_has_effect)
        graph.recompile()
        plain = copy.deepcopy(graph)  # a compiler may change the graph that it is given
        fused = self.call(graph, inputs, **options)
        return lambda *args: plain(*args) if self.is_plain else fused(*args)


@dataclass(frozen=True)
class CompileOptions:
    """How variants are compiled."""

    backend: Any = "inductor"
    mode: str | None = None
    options: Mapping[str, Any] | None = None
    points: Any = None
    """A filter for points that may be edited, with any edit as data; by default those that are."""
    limit: int = 8
    """How many variants are kept."""
    patience: float | None = None
    """How many seconds a shape of batches in experiments and harvests takes uncompiled before it is compiled."""

    @property
    def seconds(self) -> float:
        """The patience; by default, what the default backend takes to compile, and none for any other backend."""
        return self.patience if self.patience is not None else 20.0 if self.backend == "inductor" else 0.0

    def __str__(self) -> str:
        name = self.backend if isinstance(self.backend, str) else type(self.backend).__qualname__
        settings = (self.mode, *(f"{key}={value}" for key, value in sorted((self.options or {}).items())))
        return ", ".join([name, *(each for each in settings if each)])

    def new_backend(self, device: torch.device) -> OwnBackend:
        """A backend object for one variant."""
        if self.backend == "inductor":
            mode = self.mode or ("reduce-overhead" if device.type == "cuda" and self.options is None else None)
            return OwnBackend(torch._TorchCompileInductorWrapper(mode, self.options, False))
        if callable(self.backend):
            return OwnBackend(self.backend)
        return OwnBackend(torch._dynamo.lookup_backend(self.backend))


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
        self.runs = 0

    @property
    def is_proved(self) -> bool:
        """Whether every graph of it was proved: something that it depends on may have changed, and compiled anew."""
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

    def assigned(self, actions: Sequence[HookAction], reads: Sequence[Site]) -> dict[HookAction, Slot] | None:
        """A slot for each hook, in their order; None if the program does not have them all."""
        if not set(reads) <= self.program.reads.keys():
            return None
        found: dict[HookAction, Slot] = {}
        used: dict[Any, int] = {}
        for action in actions:
            need = spec_of(action)
            event = need.site.module, need.site.kind
            for index in range(used.get(event, 0), len(self.program.slots)):
                if self.program.slots[index].spec.takes(need):
                    found[action], used[event] = self.program.slots[index], index + 1
                    break
            else:
                return None
        traced = [slot for slot in self.program.slots if slot.kind == "function"]
        return found if all(slot in found.values() for slot in traced) else None


def _has_effect(node: Any) -> bool:
    """Whether an operation of a graph is kept although nothing uses its result."""
    if node.op not in ("call_function", "call_method"):
        return True
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "_")
    is_in_place = name.endswith("_") or name in _IN_PLACE or "out" in node.kwargs or bool(node.kwargs.get("inplace"))
    return is_in_place or node.is_impure()


def _without_hooks(guards: Sequence[Any]) -> list[bool]:
    """Which guards to keep: not those on hooks of modules. Hooks are looked at before every run, in `entry.py`."""
    return [not any(name in guard.name for name in _HOOKS) for guard in guards]


def _with_own_code(function: Any) -> Any:
    """The same function with a code object of its own: the compiler keeps graphs with the code."""
    code = function.__code__.replace(co_name=f"{function.__name__}_variant")
    return FunctionType(code, function.__globals__, function.__name__, function.__defaults__, function.__closure__)
