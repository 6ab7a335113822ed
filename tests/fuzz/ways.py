"""Other ways of saying the same: contexts in each other, added hooks, runs again, two threads at once."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from fuzz import changes, languages
from fuzz.library import Library, pairs, received
from fuzz.oracle import ANYTHING, Observed
from fuzz.program import Add, Attach, Language, Plain, Program, Remove, Run, Swap, hooks_of, runs
from fuzz.subject import Subject


class InContext(Library):
    """The hooks of a run are there before it is called."""

    def passed(self, run: Run, kept: Observed, args: Any, kwargs: Any) -> Any:
        kwargs = self.options() | kwargs
        with self.hooked(run, kept):
            return self.net(*args, **kwargs) if run.reads is None else self.cached(run, kept, args, kwargs)


class Nested(InContext):
    """Every hook of a run in a context of its own."""

    @contextmanager
    def hooked(self, run: Run, kept: Observed) -> Iterator[None]:
        with ExitStack() as contexts:
            for pair in pairs(run.hooks):
                contexts.enter_context(self.net.hooks(fwd_hooks=[pair]))
            for pair in received(run.gradients, kept):
                contexts.enter_context(self.net.hooks(bwd_hooks=[pair]))
            yield


class Added(InContext):
    """Every hook of a run is added to the model, and removed after it."""

    @contextmanager
    def hooked(self, run: Run, kept: Observed) -> Iterator[None]:
        with ExitStack() as added:
            for name, hook in pairs(run.hooks):
                added.callback(self.net.add_hook(name, hook))
            for name, hook in received(run.gradients, kept):
                added.callback(self.net.add_hook(name, hook, dir="bwd"))
            yield


def again(subject: Subject, program: Program) -> Observed:
    """Run a program twice with one wrapper, which keeps what it planned. What counts is the second time."""
    first = Library(subject, program)
    first.run()
    subject.restore()
    return Library(subject, program, first.net).run()


WITH_STATE = ("Store", "Count", "BatchNorm", "table", "Drops", "Selective")
"""What a network shares between threads: state, or the random numbers that it draws."""


def is_for_threads(program: Program) -> bool:
    """Whether two threads can run a program without sharing more than the network's weights.

    Hooks that are added, those of others, gradients of parameters and the random numbers are of all threads.
    """
    if any(isinstance(step, Add | Attach | Swap | Remove) for step in program.steps):
        return False
    if any(hook.change in changes.DRAWING for hook in hooks_of(program)):
        return False
    network = program.network
    if isinstance(network, Plain) and any(word in repr((network.parts, network.lines)) for word in WITH_STATE):
        return False
    if isinstance(network, Language) and languages.draws(network):
        return False
    return all(run.mode != "grad" and not run.is_training for run in runs(program))


def in_two_threads(subject: Subject, program: Program) -> Observed:
    """Run a program in two threads at once, with hooks of their own; what counts is the one that ends last."""
    observed: list[Observed | BaseException] = []
    start = threading.Barrier(2)

    def run() -> None:
        torch.set_num_threads(1)
        library = Library(subject, program, net)
        start.wait()
        try:
            observed.append(library.run())
        except BaseException as error:  # raised in the thread that waits
            observed.append(error)

    net = Library(subject, program).net
    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in observed:
        if isinstance(result, BaseException):
            raise result
    last: Any = observed[-1]
    # None are drawn, and the other thread may have begun another run.
    return {name: ANYTHING if " random numbers" in name else value for name, value in last.items()}
