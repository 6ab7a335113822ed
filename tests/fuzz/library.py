"""What a program observes when everything is done with hookline."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from fuzz import changes, language_runs
from fuzz.oracle import ANYTHING, Observed, Swapped, attach_torch_hook
from fuzz.program import Add, Attach, Enter, Gradient, Hook, Language, Leave, Place, Program, Remove, Run, Swap
from fuzz.subject import Subject, quietly
from torch import Tensor

import hookline
from hookline import edits


def function(hook: Hook) -> Any:
    """The hook as hookline gets it."""
    if hook.way == "edit":
        return edit(hook)
    change = changes.made(hook.change)
    if hook.way == "return":
        return change
    return changes.in_place(change, through_data=hook.way == "data")


def edit(hook: Hook) -> Any:
    """An edit as data."""
    options: dict[str, Any] = {name: value for name, value in hook.where if value is not None}
    width = options.pop("width")
    for name in ("pos", "neuron", "head"):
        if name in options:
            options[name] = list(options[name]) if name != "head" else options[name][0]
    if options.pop("mask", None):
        options["mask"] = torch.arange(width) % 2 == 0
    ramp = changes.ramp(torch.empty(width, dtype=torch.float64))
    made: dict[str, Callable[[], Any]] = {
        "zero": lambda: edits.zero(**options),
        "scale": lambda: edits.scale(-1.5, **options),
        "add": lambda: edits.add(ramp, 2.0, **options),
        "replace": lambda: edits.replace(torch.tensor(0.25), **options),
        "project_out": lambda: edits.project_out(ramp, **options),
        "reflect": lambda: edits.reflect(ramp, **options),
        "cap": lambda: edits.cap(ramp, -0.25, 0.5, **options),
        "match_norm": lambda: edits.add(ramp, 0.5, match_norm=True, **options),
    }
    return made[hook.change]()


OVERWRITTEN = "a tensor that the model then writes to in place, so that it has no gradient of its own"


class Library:
    """Runs a program with hookline; executors override how a pass is run."""

    def __init__(self, subject: Subject, program: Program, net: Any = None) -> None:
        self.subject, self.program = subject, program
        self.net = self.wrapped() if net is None else net
        self.contexts: list[AbstractContextManager[Any]] = []
        self.undo: dict[int, Callable[[], Any]] = {}
        self.observed: Observed = {}

    def wrapped(self) -> Any:
        network = self.subject.network
        is_model = isinstance(network, Language) and not network.as_module
        return hookline.hook(self.subject.module) if is_model else hookline.HookedModule(self.subject.module)

    def options(self) -> dict[str, Any]:
        """Keywords that make a call return what the module itself does."""
        return {"return_type": "output"} if isinstance(self.net, hookline.HookedModel) else {}

    def run(self) -> Observed:
        try:
            with quietly():
                for index, step in enumerate(self.program.steps):
                    self.step(index, step)
        finally:
            with quietly():
                while self.contexts:
                    self.contexts.pop().__exit__(None, None, None)
                for undo in self.undo.values():
                    undo()
        return self.observed

    def step(self, index: int, step: Any) -> None:
        if isinstance(step, Add):
            hook = step.hook
            self.undo[step.number] = self.net.add_hook(hook.place.name, function(hook), prepend=step.prepend)
        elif isinstance(step, Attach):
            self.undo[step.number] = attach_torch_hook(self.subject.module, step.foreign).remove
        elif isinstance(step, Swap):
            self.undo[step.number] = Swapped(self.subject.module, step.module).remove
        elif isinstance(step, Remove):
            self.undo.pop(step.number)()
        elif isinstance(step, Enter):
            context = self.net.hooks(fwd_hooks=pairs(step.hooks))
            context.__enter__()
            self.contexts.append(context)
        elif isinstance(step, Leave):
            self.contexts.pop().__exit__(None, None, None)
        else:
            self.observed |= {f"{index} {name}": value for name, value in self.observe(step).items()}

    def observe(self, run: Run) -> Observed:
        """One run, with all that it observes."""
        kept: Observed = {}

        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                return self.call(run, kept, args, kwargs)
            except hookline.HookError as error:
                if isinstance(error.original_error, changes.RaisedError):
                    raise error.original_error from error
                raise

        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            observed = self.subject.observe(run, call) | kept
        texts = [str(warning.message) for warning in told if OVERWRITTEN in str(warning.message)]
        for index, gradient in enumerate(run.gradients):
            if any(f"{gradient.place.name!r}:" in text for text in texts):  # the library says that there is none
                observed = {f"gradient {index} {call}": ANYTHING for call in range(4)} | observed
                if gradient.change != "read":
                    observed = {name: ANYTHING if "gradient" in name else value for name, value in observed.items()}
        return observed

    def call(self, run: Run, kept: Observed, args: Any, kwargs: Any) -> Any:
        """A pass of the network, in the way of this executor."""
        if "does" in dict(run.options):
            return language_runs.with_library(self, run, kept, kwargs)
        return self.passed(run, kept, args, kwargs)

    def passed(self, run: Run, kept: Observed, args: Any, kwargs: Any) -> Any:
        """A pass, with the hooks of the run."""
        kwargs = self.options() | kwargs
        if run.reads is None:
            fwd, bwd = pairs(run.hooks), received(run.gradients, kept)
            return self.net.run_with_hooks(*args, fwd_hooks=fwd, bwd_hooks=bwd, **kwargs)
        with self.hooked(run, kept):
            return self.cached(run, kept, args, kwargs)

    def hooked(self, run: Run, kept: Observed) -> AbstractContextManager[Any]:
        """A context with the hooks of a run."""
        context: AbstractContextManager[Any] = self.net.hooks(
            fwd_hooks=pairs(run.hooks), bwd_hooks=received(run.gradients, kept)
        )
        return context

    def cached(self, run: Run, kept: Observed, args: Any, kwargs: Any) -> Any:
        """A pass with a cache, under hooks that are open."""
        names = None if run.reads == "all" else [place.name for place in run.reads or ()]
        output, cache = self.net.run_with_cache(*args, names_filter=names, **kwargs)
        self.keep(run, cache, kept)
        return output

    def keep(self, run: Run, cache: Any, kept: Observed) -> None:
        """What a cache has, under the names of the oracle."""
        if run.reads == "all":
            kept |= {f"cached {name}": x.detach().clone() for name, x in cache.items()}
            return
        for place in run.reads or ():
            for name, x in read_at(place, cache):
                kept[name] = x.detach().clone()


def read_at(place: Place, cache: Any) -> list[tuple[str, Tensor]]:
    """The activations of a place in a cache: of its only call, or of each."""
    if place.call is not None:
        return [(f"read {place.name} {place.call}", cache[place.name])] if place.name in cache else []
    if place.name in cache:
        return [(f"read {place.name} 0", cache[place.name])]
    return [
        (f"read {place.name} {call}", cache[f"{place.name}#{call}"])
        for call in range(64)
        if f"{place.name}#{call}" in cache
    ]


def pairs(hooks: tuple[Hook, ...]) -> list[tuple[str, Any]]:
    return [(hook.place.name, function(hook)) for hook in hooks]


def received(gradients: tuple[Gradient, ...], kept: Observed) -> list[tuple[str, Any]]:
    """Backward hooks that keep what they get."""

    def made(index: int, gradient: Gradient) -> Callable[..., Any]:
        change = changes.made(gradient.change)

        def hook(g: Tensor, hook: Any) -> Any:
            kept[f"gradient {index} {hook.call}"] = g.detach().clone()
            return change(g)

        return hook

    return [(gradient.place.name, made(index, gradient)) for index, gradient in enumerate(gradients)]
