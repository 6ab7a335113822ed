"""Runs inside compiled graphs.

A graph takes seconds, so a model is compiled once in a process, for all points, and programs share it. They have edits
as data only, which compile nothing; what a graph cannot do runs uncompiled, and must give the same.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from fuzz.library import Library
from fuzz.program import Language, Program, hooks_of, runs
from fuzz.subject import quietly

import hookline

KINDS = ("llama", "gpt2", "gpt_neox")
MOST = 8
"""How many models have graphs at a time."""
_wrappers: OrderedDict[Any, tuple[Any, Any]] = OrderedDict()


class Compiled(Library):
    """A wrapper whose runs are compiled with the backend that changes no operation."""

    backend = "eager"

    def wrapped(self) -> Any:
        network = self.subject.network
        key = (network.kind, network.dtype, network.attention, self.backend)
        if key not in _wrappers:
            with quietly():
                net: Any = hookline.hook(self.subject.module)
                _wrappers[key] = net, net.compile(backend=self.backend, points="*")
        _wrappers.move_to_end(key)
        while len(_wrappers) > MOST:
            _wrappers.popitem(last=False)[1][1].close()
        return _wrappers[key][0]


class Inductor(Compiled):
    """A wrapper whose runs are compiled as users compile them: it takes a minute for a model."""

    backend = "inductor"


def is_for_inductor(program: Program) -> bool:
    """Whether a program is one of those of the two models that are compiled so."""
    network = program.network
    if not isinstance(network, Language):
        return False
    return is_compiled(program) and (network.kind, network.dtype) in (("llama", "float32"), ("gpt2", "float32"))


def is_compiled(program: Program) -> bool:
    """Whether most of a program can run in graphs."""
    network = program.network
    if (
        not isinstance(network, Language)
        or network.kind not in KINDS
        or network.family != "causal"
        or network.as_module
    ):
        return False
    if any(dict(run.options).get("does") not in ("logits", "generate", "stream", None) for run in runs(program)):
        return False
    if any(run.mode == "grad" or run.is_training or run.autocast or run.reads for run in runs(program)):
        return False
    if any(dict(run.options).get("batch", 2) != 2 for run in runs(program)):
        return False
    return all(hook.way == "edit" and not hook.place.inside for hook in hooks_of(program))
