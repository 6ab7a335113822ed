"""What a program observes when everything is done by hand, with torch hooks that return changed clones.

It shares no code with hookline. At every event edits act in the order in which they were registered, then the torch
hooks of others, then what only reads.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from typing import Any, NamedTuple

import devices
import torch
from fuzz import changes
from fuzz.program import Add, Attach, Enter, Foreign, Gradient, Hook, Leave, Place, Program, Remove, Run, Swap
from torch import Tensor, nn
from zoo.oracle import at, first_path, replaced, same_bits, tensors

Observed = dict[str, Any]
"""What a program showed: tensors, numbers and texts by name."""


LONGEST = 10**6
"""More calls than a module gets."""
ANYTHING = object()
"""What hooks by hand cannot say."""


def same_memory(x: Tensor, other: Tensor) -> bool:
    """Whether two tensors are the same memory; sparse and nested ones if they are one object."""
    if any(one.is_nested or one.layout != torch.strided for one in (x, other)):
        return x is other
    return x.untyped_storage().data_ptr() == other.untyped_storage().data_ptr() and x.numel() == other.numel()


class AmbiguousError(Exception):
    """Hooks by hand cannot say what is right."""


class Sent(NamedTuple):
    """A tensor that a module got instead of the caller's."""

    original: Tensor
    clone: Tensor
    before: Tensor
    version: int
    is_users: bool
    """Whether the original outlives the pass, and so gets no graph."""

    def give_back(self, output: Any) -> Any:
        """Let the caller see what the module itself wrote to its argument, as it would without hooks."""
        if self.clone._version == self.version and same_bits(self.clone, self.before):
            return output
        self.original.copy_(self.clone.detach() if self.is_users else self.clone)
        if self.is_users and self.clone.requires_grad:
            return output  # what the module returns has a graph, other than the original
        for path, x in list(tensors(output)):
            if x is self.clone:
                output = replaced(output, path, self.original)
        return output


class Placed(NamedTuple):
    """A clone, or what has it, that is in a list or dict of the caller while the module runs."""

    container: Any
    key: Any
    original: Any
    clone: Any

    def take_out(self) -> None:
        """Put back what was there, unless the module has replaced it; it may be at another place of a list."""
        places = enumerate(self.container) if isinstance(self.container, list) else self.container.items()
        for key, part in list(places):
            if part is self.clone and (isinstance(self.container, list) or key == self.key):
                self.container[key] = self.original
                return


def sent(original: Tensor, clone: Tensor, is_users: bool) -> Sent:
    return Sent(original, clone, clone.detach().clone(), clone._version, is_users)


def clone(x: Tensor) -> Tensor:
    """A clone with the strides of the original, also of a part of a tensor: kernels round by them."""
    new = x.clone()
    if x.layout != torch.strided or x.is_nested or new.stride() == x.stride() or 0 in x.stride():
        return new
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device).copy_(x)


def seen(place: Place, x: Tensor) -> Tensor:
    """What a place shows of the tensor at its event: a part of the last axis, divided into heads."""
    if place.part is not None:
        x = x[..., slice(*place.part)]
    if place.heads:
        x = x.unflatten(-1, (place.heads, -1))
    if place.chunk is None:
        return x
    index, count = place.chunk
    size = x.shape[-1] // count
    return x[..., index * size : (index + 1) * size]


def with_part(place: Place, x: Tensor, new: Tensor) -> Tensor:
    """The tensor at an event with something else at a place."""
    if place.part is None and place.chunk is None:
        return new.flatten(-2) if place.heads else new
    whole = clone(x)
    seen(place, whole).copy_(new)
    return whole


class Acting:
    """A hook that is registered: its function, which may keep state, and the order in which it acts."""

    def __init__(self, hook: Hook) -> None:
        self.hook = hook
        self.text: changes.Text | None = None
        """Where the text is in the run that goes on; None if positions are columns."""
        self.function = self._made(hook)

    def _made(self, hook: Hook) -> Callable[[Tensor], Tensor | None]:
        if hook.way == "edit":
            return lambda x: changes.edited(x, hook.change, dict(hook.where), self.text)
        change = changes.made(hook.change)
        if hook.way == "return":
            return change
        write = changes.in_place(change, through_data=hook.way == "data")

        def written(x: Tensor) -> Tensor:
            write(x)
            return x

        return written

    def __call__(self, x: Tensor) -> Tensor:
        """The activation after this hook: a clone goes in, whatever comes out has its dtype."""
        place = self.hook.place
        own, before = clone(seen(place, x)), seen(place, x.detach()).clone()
        new = self.function(own)
        is_counted = self.hook.way == "in place" and not torch.is_inference_mode_enabled()
        if x.is_cuda and torch.is_inference_mode_enabled():
            is_counted = self.hook.way != "return"  # bits are not compared on a GPU: the hook may have written
        if new is None or (new is own and not is_counted and same_bits(new, before)):
            return x
        return with_part(place, x, new.to(x.dtype))


class Pass:
    """One forward pass with hooks placed by hand."""

    def __init__(self, root: nn.Module, edits: list[Acting], run: Run, ignored: set[tuple[str, int]]) -> None:
        self.root, self.edits, self.run, self.ignored = root, edits, run, ignored
        self.observed: Observed = {}
        self.calls: Counter[str] = Counter()
        self.running: dict[str, list[int]] = defaultdict(list)
        self.sent: dict[tuple[str, int], list[Sent]] = defaultdict(list)
        self.placed: dict[tuple[str, int], list[Placed]] = defaultdict(list)
        self.outside: list[Tensor] = [*root.parameters(), *root.buffers()]
        """What the user has: inputs, parameters and buffers."""
        self.arguments: dict[str, list[list[Tensor]]] = defaultdict(list)
        self.reads_all = run.reads == "all"
        self.called: Counter[str] = Counter()
        """How often each module was called, once the forward pass is over."""
        self.given: dict[str, Any] = {}
        """The arguments of each module in its last call."""

    def ends(self) -> None:
        """The forward pass is over."""
        self.called = Counter(self.calls)
        self.calls.clear()

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Hooks on every module: edits before those of others, reads behind them.

        They stay for the backward pass, in which checkpoints run their regions again.
        """
        handles: list[Any] = []
        for name, module in self.root.named_modules():
            if isinstance(module, torch.jit.ScriptModule):
                continue
            handles += self._of_module(name, module)
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _of_module(self, name: str, module: nn.Module) -> list[Any]:
        def enters(_module: nn.Module, args: Any, kwargs: Any) -> Any:
            if module is self.root and not self.called:
                self.outside += [x for _, x in tensors((args, kwargs))]
            self.running[name].append(self.calls[name] % self.called.get(name, LONGEST))
            self.calls[name] += 1
            new = self.edited(module, name, "input", (args, kwargs))
            self.arguments[name].append([x for _, x in tensors((args, kwargs) if new is None else new)])
            return new

        def is_read_before(_module: nn.Module, args: Any, kwargs: Any) -> Any:
            return self.read(module, name, "input", (args, kwargs))

        def leaves(_module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
            self.given[name] = args, kwargs
            self.arguments[name][-1] += [
                x for _, x in tensors((args, kwargs))
            ]  # what the module put into containers, too
            returned = self.taken_out(name, output)
            new = self.edited(module, name, "output", returned)
            return (None if returned is output else returned) if new is None else new

        def is_read_after(_module: nn.Module, _args: Any, _kwargs: Any, output: Any) -> Any:
            new = self.read(module, name, "output", output)
            call = self.running[name].pop()
            self.arguments[name].pop()
            value = output if new is None else new
            self.placed.pop((name, call), None)
            for one in reversed(self.sent.pop((name, call), [])):
                value = one.give_back(value)
            return None if value is output else value

        return [
            module.register_forward_pre_hook(enters, with_kwargs=True, prepend=True),
            module.register_forward_pre_hook(is_read_before, with_kwargs=True),
            module.register_forward_hook(leaves, with_kwargs=True, prepend=True),
            module.register_forward_hook(is_read_after, with_kwargs=True),
        ]

    def is_here(self, place: Place, name: str, side: str) -> bool:
        is_at = (place.module, place.side) == (name, side) and not place.inside
        return is_at and place.call in (None, self.running[name][-1])

    def edited(self, module: nn.Module, name: str, side: str, value: Any) -> Any:
        """The value with all edits at this event."""
        new = value
        for acting in self.edits:
            place = acting.hook.place
            if not self.is_here(place, name, side):
                continue
            path = first_path(module, side, new) if place.path is None else place.path
            if path is not None:
                x = at(new, path)
                new = self.put(name, side, new, path, x, acting(x), is_first=place.path is None)
        return None if new is value else new

    def put(self, name: str, side: str, value: Any, path: Any, x: Tensor, changed: Tensor, *, is_first: bool) -> Any:
        """The value with a tensor in another one's place; the first tensor of an output is changed wherever it is."""
        if changed is x:
            return value
        is_ignored = side == "output" and (name, self.running[name][-1]) in self.ignored
        if is_ignored and any(same_memory(x, argument) for argument in self.arguments[name][-1]):
            if self.sent[name, self.running[name][-1]] or self.placed[name, self.running[name][-1]]:
                raise AmbiguousError("whether the caller's tensor gets both an edit of the input and one of the output")
            x.copy_(changed)
            return value
        if side == "input":
            if not name:
                self.outside.append(changed)
            if changed.is_inference():
                with torch.inference_mode(False):  # torch then counts what the module writes to it
                    changed = clone(changed)
            is_users = not x.requires_grad and any(same_memory(x, own) for own in self.outside)
            self.sent[name, self.running[name][-1]].append(sent(x, changed, is_users))
            if self.place(name, value, path, changed):
                return value
        for other, tensor in list(tensors(value)):
            if tensor is x and other != path and is_first and side == "output":
                value = replaced(value, other, changed)
        return replaced(value, path, changed)

    def place(self, name: str, arguments: Any, path: Any, changed: Tensor) -> bool:
        """Put a tensor into the list or dict of the caller that has it. Returns whether there is one."""
        for depth in range(len(path) - 1, 1, -1):
            container, key = at(arguments, path[:depth]), path[depth]
            if isinstance(container, list | dict):
                original = container[key]
                container[key] = replaced(original, path[depth + 1 :], changed)
                self.placed[name, self.running[name][-1]].append(Placed(container, key, original, container[key]))
                return True
        return False

    def taken_out(self, name: str, output: Any) -> Any:
        """The output of a module, when the call is over: its caller's containers have what was theirs."""
        call = name, self.running[name][-1]
        for placed in reversed(self.placed[call]):
            placed.take_out()
        for one in reversed(self.sent.pop(call, []) if self.placed[call] else []):
            output = one.give_back(output)
        return output

    def read(self, module: nn.Module, name: str, side: str, value: Any) -> Any:
        """Keep what is asked for, and lead gradients through a clone."""
        call, has_been_read = self.running[name][-1], bool(self.called)  # a checkpoint runs its region again
        if has_been_read:
            pass
        elif self.reads_all:
            path = first_path(module, side, value)
            if path is not None:
                self.observed[f"all {name} {side} {call}"] = at(value, path).detach().clone()
        elif self.run.reads is not None:
            for place in self.run.reads:
                if self.is_here(place, name, side):
                    path = first_path(module, side, value) if place.path is None else place.path
                    if path is not None:
                        x = seen(place, at(value, path))
                        self.observed[f"read {place.name} {call}"] = x.detach().clone()
        by_path: dict[Any, list[tuple[int, Gradient]]] = defaultdict(list)
        for index, gradient in enumerate(self.run.gradients):
            if self.is_here(gradient.place, name, side):
                path = first_path(module, side, value) if gradient.place.path is None else gradient.place.path
                if path is not None:
                    by_path[path].append((index, gradient))
        if len({id(at(value, path)) for path in by_path}) < len(by_path):
            raise ValueError(
                "clones by hand do not say in which order gradients act at a tensor that stands twice in a container"
            )
        new = value
        for path, gradients in by_path.items():
            new = self.differentiated(name, side, new, path, gradients)
        return None if new is value else new

    def differentiated(self, name: str, side: str, value: Any, path: Any, gradients: list[tuple[int, Gradient]]) -> Any:
        """The value with a clone of a tensor, at which backward hooks act in order."""
        x = at(value, path)
        if not changes.is_number(x):
            return value
        clone = (x if x.requires_grad else x.detach().requires_grad_()).clone()
        for index, gradient in gradients if not self.called else ():
            clone.register_hook(self.received(f"gradient {index} {self.running[name][-1]}", gradient))
        is_first = any(gradient.place.path is None for _, gradient in gradients)
        return self.put(name, side, value, path, x, clone, is_first=is_first)

    def received(self, key: str, gradient: Gradient) -> Callable[[Tensor], Tensor | None]:
        change = changes.made(gradient.change)

        def hook(g: Tensor) -> Tensor | None:
            own = seen(gradient.place, g.detach()).clone()
            self.observed[key] = own.clone()
            new = change(own)
            return None if new is None else with_part(gradient.place, g, new.to(g.dtype))

        return hook


def torch_hook(foreign: Foreign) -> Callable[..., Any]:
    """A torch hook of somebody else, which both sides register."""
    change = changes.made(foreign.change)

    def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
        path = first_path(module, "input", (args, kwargs))
        new = None if path is None else change(at((args, kwargs), path).clone())
        return None if path is None or new is None else replaced((args, kwargs), path, new)

    def after(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        path = first_path(module, "output", output)
        new = None if path is None else change(at(output, path).clone())
        return None if path is None or new is None else replaced(output, path, new)

    return before if foreign.side == "input" else after


def attach_torch_hook(root: nn.Module, foreign: Foreign) -> Any:
    module = root.get_submodule(foreign.module)
    register = module.register_forward_pre_hook if foreign.side == "input" else module.register_forward_hook
    return register(torch_hook(foreign), with_kwargs=True, prepend=foreign.is_first)


class Swapped:
    """A module that takes the place of another; its weights have half the size."""

    def __init__(self, root: nn.Module, name: str) -> None:
        owner, _, self.name = name.rpartition(".")
        self.owner = root.get_submodule(owner)
        self.original = self.owner.get_submodule(self.name)
        other = deepcopy(self.original)
        with torch.no_grad():
            for x in other.parameters():
                x.mul_(0.5)
        setattr(self.owner, self.name, other)

    def remove(self) -> None:
        setattr(self.owner, self.name, self.original)


@contextmanager
def settings(run: Run) -> Iterator[None]:
    """The mode of a run, of gradients and of autocast."""
    mode = {"no_grad": torch.no_grad, "grad": torch.enable_grad, "inference": torch.inference_mode}[run.mode]
    with mode(), torch.autocast(devices.DEVICE.type, torch.bfloat16) if run.autocast else nullcontext():
        yield


def loss_of(output: Any) -> Tensor | None:
    """A number to differentiate, in which every element has another weight; None if there is nothing."""
    parts = [x for _, x in tensors(output) if x.requires_grad and x.is_floating_point()]
    weighted = [(x.float() * torch.linspace(0.5, 1.5, x.numel()).view(x.shape)).sum() for x in parts]
    return torch.stack(weighted).sum() if weighted else None


class ByHand:
    """Runs a program by hand."""

    def __init__(self, subject: Any, program: Program) -> None:
        self.subject, self.program = subject, program
        self.added: list[tuple[int, Acting]] = []
        self.contexts: list[list[Acting]] = []
        self.order: list[Acting] = []
        """All hooks that are registered, in the order in which they act."""
        self.handles: dict[int, Any] = {}
        self.observed: Observed = {}

    def run(self) -> Observed:
        try:
            for index, step in enumerate(self.program.steps):
                self.step(index, step)
        finally:
            for handle in self.handles.values():
                handle.remove()
        return self.observed

    def step(self, index: int, step: Any) -> None:
        if isinstance(step, Add):
            acting = Acting(step.hook)
            self.order.insert(0 if step.prepend else len(self.order), acting)
            self.added.append((step.number, acting))
        elif isinstance(step, Attach):
            self.handles[step.number] = attach_torch_hook(self.subject.module, step.foreign)
        elif isinstance(step, Swap):
            self.handles[step.number] = Swapped(self.subject.module, step.module)
        elif isinstance(step, Remove):
            self.remove(step.number)
        elif isinstance(step, Enter):
            self.contexts.append([Acting(hook) for hook in step.hooks])
            self.order += self.contexts[-1]
        elif isinstance(step, Leave):
            gone = self.contexts.pop()
            self.order = [acting for acting in self.order if acting not in gone]
        elif isinstance(step, Run):
            result = self.subject.by_hand(step, [*self.order, *map(Acting, step.hooks)])
            self.observed |= {f"{index} {name}": value for name, value in result.items()}

    def remove(self, number: int) -> None:
        if number in self.handles:
            self.handles.pop(number).remove()
            return
        gone = [acting for other, acting in self.added if other == number]
        self.added = [(other, acting) for other, acting in self.added if other != number]
        self.order = [acting for acting in self.order if acting not in gone]
