"""The ways in which a program can be run with the library. A new one is an entry in `EXECUTORS`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from fuzz import compiled, sharded, ways
from fuzz.library import Library, read_at
from fuzz.oracle import Observed
from fuzz.program import Language, Program, Run, runs
from fuzz.subject import Subject


class Executor(NamedTuple):
    """A way to run programs: which it takes, how it runs one, and whether results must have the same bits."""

    name: str
    takes: Callable[[Program], bool]
    run: Callable[[Subject, Program], Observed]
    is_exact: bool = True
    only_text: bool = False
    """Whether what is computed at the padding of a batch, which no token sees, may differ."""


def of(library: type[Library]) -> Callable[[Subject, Program], Observed]:
    return lambda subject, program: library(subject, program).run()


class Deferred(Library):
    """Every cache is a full one, whose activations are computed when they are read."""

    def cached(self, run: Run, kept: Observed, args: Any, kwargs: Any) -> Any:
        output, cache = self.net.run_with_cache(*args, **kwargs)
        if run.reads == "all":
            self.keep(run, cache, kept)
        else:
            for place in run.reads or ():
                kept |= {name: x.detach().clone() for name, x in read_at(place, cache)}
        return output


def is_in_full_cache(program: Program) -> bool:
    """Whether all that is read are outputs and inputs of modules: parts and single calls are only cached by name."""
    if isinstance(program.network, Language) and not program.network.as_module:
        return False  # it has classic points
    reads = [run.reads for run in runs(program) if run.reads is not None]
    return bool(reads) and all(
        one == "all" or all(place.path is None and place.call is None for place in one) for one in reads
    )


def has_hooks(program: Program) -> bool:
    """Whether a run has hooks of its own."""
    return any(run.hooks or run.gradients for run in runs(program))


EXECUTORS = (
    Executor("uncompiled", lambda program: True, of(Library)),
    Executor("deferred", is_in_full_cache, of(Deferred)),
    Executor("nested", has_hooks, of(ways.Nested)),
    Executor("added", has_hooks, of(ways.Added)),
    Executor("again", lambda program: True, ways.again),
    # A graph is for a bucket of lengths: products of other sizes are rounded in another way.
    Executor("compiled", compiled.is_compiled, of(compiled.Compiled), is_exact=False, only_text=True),
    Executor("inductor", compiled.is_for_inductor, of(compiled.Inductor), is_exact=False, only_text=True),
    # Sums over processes are added in another order.
    Executor("sharded", sharded.is_sharded, sharded.run, is_exact=False, only_text=True),
    Executor("threads", ways.is_for_threads, ways.in_two_threads),
)
