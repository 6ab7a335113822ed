"""A smaller program that fails in the same way."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

from fuzz.program import Add, Attach, Enter, Hook, Leave, Plain, Program, Remove, Run, Step


def shrink(program: Program, fails: Callable[[Program], bool], seconds: float = 20) -> Program:
    """Take things away while the program still fails."""
    ends = time.monotonic() + seconds
    is_smaller = True
    while is_smaller and time.monotonic() < ends:
        is_smaller = False
        for candidate in candidates(program):
            if time.monotonic() > ends:
                break
            if fails(candidate):
                program, is_smaller = candidate, True
                break
    return program


def candidates(program: Program) -> Iterator[Program]:
    """Programs with a little less."""
    steps = program.steps
    for index, step in enumerate(steps):
        less = steps[:index] + steps[index + 1 :]
        if isinstance(step, Add | Attach):
            less = tuple(other for other in less if other != Remove(step.number))
        elif isinstance(step, Enter):
            less = without_leave(steps, index)
        elif isinstance(step, Leave):
            continue
        yield replace(program, steps=less)
    for index, step in enumerate(steps):
        for simpler in simpler_steps(step):
            yield replace(program, steps=(*steps[:index], simpler, *steps[index + 1 :]))
    if isinstance(program.network, Plain):
        for network in simpler_networks(program.network):
            yield replace(program, network=network)
    elif program.network.dtype != "float32":
        yield replace(program, network=replace(program.network, dtype="float32"))


def without_leave(steps: tuple[Step, ...], index: int) -> tuple[Step, ...]:
    """The steps without a context."""
    depth = 0
    for end in range(index + 1, len(steps)):
        depth += isinstance(steps[end], Enter)
        if isinstance(steps[end], Leave):
            if depth == 0:
                return steps[:index] + steps[index + 1 : end] + steps[end + 1 :]
            depth -= 1
    return steps


def simpler_steps(step: Step) -> Iterator[Step]:
    if isinstance(step, Add):
        yield from (replace(step, hook=hook) for hook in simpler_hooks(step.hook))
        if step.prepend:
            yield replace(step, prepend=False)
    elif isinstance(step, Enter):
        yield from (replace(step, hooks=hooks) for hooks in simpler_lists(step.hooks))
    elif isinstance(step, Run):
        yield from simpler_runs(step)


def simpler_runs(run: Run) -> Iterator[Run]:
    yield from (replace(run, hooks=hooks) for hooks in simpler_lists(run.hooks))
    for index in range(len(run.gradients)):
        yield replace(run, gradients=run.gradients[:index] + run.gradients[index + 1 :])
    for index, gradient in enumerate(run.gradients):
        if gradient.change != "read":
            simpler = replace(gradient, change="read")
            yield replace(run, gradients=(*run.gradients[:index], simpler, *run.gradients[index + 1 :]))
    if run.reads is not None:
        yield replace(run, reads=None)
    if isinstance(run.reads, tuple):
        for index in range(len(run.reads)):
            yield replace(run, reads=run.reads[:index] + run.reads[index + 1 :] or None)
    for index in range(len(run.options)):
        yield replace(run, options=run.options[:index] + run.options[index + 1 :])
    plainer = {"mode": "no_grad", "is_training": False, "autocast": False, "seed": 0}
    for name, value in plainer.items():
        if getattr(run, name) != value:
            yield replace(run, **{name: value})


def simpler_lists(hooks: tuple[Hook, ...]) -> Iterator[tuple[Hook, ...]]:
    for index in range(len(hooks)):
        yield hooks[:index] + hooks[index + 1 :]
    for index, hook in enumerate(hooks):
        yield from ((*hooks[:index], simpler, *hooks[index + 1 :]) for simpler in simpler_hooks(hook))


def simpler_hooks(hook: Hook) -> Iterator[Hook]:
    if hook.change != "read" and hook.way != "edit":
        yield replace(hook, change="read", way="return")
        if hook.change != "half":
            yield replace(hook, change="half")
    if hook.way in ("in place", "data"):
        yield replace(hook, way="return")
    if hook.way == "edit":
        yield Hook(hook.place, "half")
        for index, (name, _) in enumerate(hook.where):
            if name != "width":
                yield replace(hook, where=hook.where[:index] + hook.where[index + 1 :])


NEW = re.compile(r"^(v\d+)(, \w+)? = ")
VALUE = re.compile(r"\b([vxyw]\d*)\b")


def simpler_networks(network: Plain) -> Iterator[Plain]:
    """Networks with a line less, or a simpler setting."""
    for index, line in enumerate(network.lines[:-1]):
        rest = [*network.lines[:index], *network.lines[index + 1 :]]
        match = NEW.match(line)
        if match is None:
            yield with_lines(network, rest)
            continue
        stands_in = list(VALUE.findall(line.split("=", 1)[1])) or ["x"]
        for name in dict.fromkeys(stands_in):
            yield with_lines(network, [re.sub(rf"\b{match[1]}\b", name, other) for other in rest])
    last = network.lines[-1]
    for name in dict.fromkeys(VALUE.findall(last)):
        if last != f"return {name}":
            yield with_lines(network, [*network.lines[:-1], f"return {name}"])
    plainer = {"dtype": "float32", "layout": "contiguous_format", "by_keyword": False, "requires_grad": False}
    for name, value in plainer.items():
        if getattr(network, name) != value:
            yield replace(network, **{name: value})
    for index, (name, part) in enumerate(network.parts):
        for plainer_part in ("nn.Identity()",) if part != "nn.Identity()" else ():
            parts = (*network.parts[:index], (name, plainer_part), *network.parts[index + 1 :])
            yield replace(network, parts=parts)


def with_lines(network: Plain, lines: list[str]) -> Plain:
    """The network with other lines, without the modules that they no longer call."""
    parts = tuple((name, part) for name, part in network.parts if any(f"self.{name}(" in line for line in lines))
    return replace(network, lines=tuple(lines), parts=parts)
