"""The options of `model.compile`, and the backend objects that are made from them."""

from __future__ import annotations

import copy
import platform
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from numbers import Integral, Real
from typing import Any

import torch

from hookline.compiled.fixed import is_fixed
from hookline.compiled.rewrites import rewrite
from hookline.compiled.traceable import check_writes
from hookline.errors import HooklineError

_IN_PLACE = {"setitem", "delitem", "iadd", "isub", "imul", "imatmul", "itruediv", "ifloordiv", "imod", "ipow", "iand"}
_IN_PLACE |= {"ior", "ixor", "ilshift", "irshift", "iconcat"}
"""Operators of Python that write to a tensor."""


class OwnBackend:
    """The backend of one variant, which counts its graphs. The compiler tells backends apart by identity.

    It keeps each graph as it was traced, too: while `is_plain`, that runs, operation by operation, with the kernels of
    an uncompiled run.
    """

    def __init__(self, call: Callable[..., Any], *, rewrites: bool = False) -> None:
        self.call, self.rewrites, self.graphs, self.is_plain = call, rewrites, 0, False
        self.has_functions = False
        """Whether functions of the user are traced, which may write to other tensors than ours."""
        self.is_proving = False
        """Whether graphs may be compiled: one that is not compared with an uncompiled run is never used."""
        self.calls = 0

    @contextmanager
    def proving(self) -> Iterator[None]:
        """A context in which it may compile, because the result is compared with an uncompiled run."""
        self.is_proving = True
        try:
            yield
        finally:
            self.is_proving = False

    def __call__(self, graph: Any, inputs: Any, **options: Any) -> Any:
        """Compile a graph."""
        if not self.is_proving:
            raise RuntimeError("this is compiled when it is proved")
        if self.has_functions:
            check_writes(graph, inputs, is_fixed)
        self.graphs += 1
        graph.graph.eliminate_dead_code(_has_effect)
        graph.recompile()
        plain = copy.deepcopy(graph)  # a compiler may change the graph that it is given
        if self.rewrites:
            rewrite(graph.graph)
            graph.graph.eliminate_dead_code(_has_effect)
            graph.recompile()
        fused = self.call(graph, inputs, **options)

        def run(*args: Any) -> Any:
            self.calls += 1
            return plain(*args) if self.is_plain else fused(*args)

        return run


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
        return ", ".join([name, *(setting for setting in settings if setting)])

    def new_backend(self, device: torch.device) -> OwnBackend:
        """A backend object for one variant."""
        if self.backend == "inductor":
            mode = self.mode or ("reduce-overhead" if device.type == "cuda" and self.options is None else None)
            return OwnBackend(torch._TorchCompileInductorWrapper(mode, self.options, False), rewrites=True)
        if callable(self.backend):
            return OwnBackend(self.backend)
        return OwnBackend(torch._dynamo.lookup_backend(self.backend))


def compile_options(options: Mapping[str, Any]) -> CompileOptions:
    """The options of `model.compile`; raises an error at once if one of them is wrong."""
    option_names = [field.name for field in fields(CompileOptions)]
    for name in options:
        if name not in option_names:
            raise HooklineError(f"compile has no option {name!r}; it has {', '.join(option_names)}")
    checked = CompileOptions(**options)
    if checked.mode is not None and checked.options is not None:
        raise HooklineError("mode and options are two ways to say the same: give one of them, as to torch.compile")
    if not isinstance(checked.limit, Integral) or checked.limit < 1:
        raise HooklineError(f"limit is how many graphs are kept: a whole number above 0, not {checked.limit!r}")
    if checked.patience is not None and not (isinstance(checked.patience, Real) and checked.patience >= 0):
        raise HooklineError(f"patience is a number of seconds, not {checked.patience!r}")
    try:
        torch.compile(compile_options)  # nothing is compiled before it is called
    except RuntimeError as error:
        raise HooklineError(
            f"torch {torch.__version__} cannot compile on Python {platform.python_version()} ({error}): "
            "install another version of torch, or run without model.compile"
        ) from error
    _check_backend(checked)
    return checked


def _check_backend(options: CompileOptions) -> None:
    backend, mode = options.backend, options.mode
    if backend == "inductor":
        modes = {*torch._inductor.list_mode_options(), "default"}
        if mode is not None and mode not in modes:
            raise HooklineError(f"there is no mode {mode!r}: torch has {', '.join(sorted(modes))}")
        try:
            options.new_backend(torch.device("cpu"))
        except RuntimeError as error:  # with a list of all options that there are
            raise HooklineError(f"options: {str(error).partition(', known options')[0]}") from error
    elif mode is not None or options.options is not None:
        raise HooklineError('mode and options are for the backend "inductor": leave them out')
    elif isinstance(backend, str):
        if backend not in torch._dynamo.list_backends(exclude_tags=()):
            usual = ", ".join(torch._dynamo.list_backends())
            raise HooklineError(f"there is no backend {backend!r}: torch has {usual}, eager and aot_eager")
    elif not callable(backend):
        raise HooklineError(f"a backend is a name or a function, as of torch.compile, not {backend!r}")


def _has_effect(node: Any) -> bool:
    """Whether an operation of a graph is kept although nothing uses its result."""
    if node.op not in ("call_function", "call_method"):
        return True
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "_")
    is_in_place = name.endswith("_") or name in _IN_PLACE or "out" in node.kwargs or bool(node.kwargs.get("inplace"))
    return is_in_place or node.is_impure()
