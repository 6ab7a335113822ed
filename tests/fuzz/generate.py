"""Programs from seeds: a network, and random steps at the points that it has."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

import torch
from fuzz import changes, networks, parts
from fuzz.program import Add, Attach, Enter, Foreign, Gradient, Hook, Leave, Place, Program, Remove, Run, Step, Swap
from fuzz.subject import InvalidError, Subject, quietly
from torch import Tensor, nn
from zoo.oracle import Event, Path, hooked, memory, tensors, watching


@dataclass
class Sight:
    """A tensor at an event: what a hook may be put on."""

    place: Place
    shape: tuple[int, ...]
    is_float: bool
    is_strided: bool
    calls: int
    memory: int = 0
    """A number for its memory: points of views, such as an output that is also an input, have the same."""

    def is_near(self, other: Sight) -> bool:
        """Whether both are of one tensor, or of its views; or of two tensors of one event."""
        is_one_event = (self.place.module, self.place.side) == (other.place.module, other.place.side)
        return self.is_float == other.is_float and (is_one_event or self.memory == other.memory)

    def is_beside(self, place: Place) -> bool:
        """Whether it sees the tensor at an event in another way than a place does."""
        is_one_event = (self.place.module, self.place.side) == (place.module, place.side)
        return is_one_event and self.is_float and not self.place.inside and self.place.lens != place.lens


def native_name(names: set[str], module: str, side: str, path: Path | None, call: int | None) -> str:
    """The name of a point, as docs/names.md says."""
    name = module
    if side == "input" or not module:
        name = f"{module}.{side}" if module else side
        name = f"{module}:{side}" if name in names else name
    keys = () if path is None else path[1:] if side == "input" else path
    return name + "".join(f"[{key}]" for key in keys) + ("" if call is None else f"#{call}")


def sights(subject: Subject, run: Run) -> list[Sight]:
    """Every tensor that passes an event of the network in a run, as the oracle sees it."""
    kept: dict[tuple[Event, Path], Tensor] = {}

    def keep(_module: nn.Module, event: Event, value: Any) -> None:
        kept.update({(event, path): x for path, x in tensors(value)})

    with watching(subject.module) as seen, hooked(subject.module, keep, first=False), quietly():
        subject.observe(run, subject.module)
    subject.restore()
    storages = list(dict.fromkeys(memory(x) for x in kept.values()))
    names = {name for name, _ in subject.module.named_modules(remove_duplicate=False)}
    found: list[Sight] = []
    for event, by_path in seen.tensors.items():
        calls = seen.calls(event.module, event.side)
        for path, x in by_path.items():
            is_first = path == seen.first[event]
            if not is_first and x is by_path.get(seen.first[event]):
                continue  # the same tensor twice: its point stands for both places
            for call in {None, event.call} if event.call == 0 else {event.call}:
                one = sight(names, event, path, is_first, call, calls, x)
                found.append(replace(one, memory=storages.index(memory(kept[event, path]))))
    return found


def sight(names: set[str], event: Event, path: Path, is_first: bool, call: int | None, calls: int, x: Any) -> Sight:
    shown = None if is_first else path
    if shown is not None and event.side == "input" and shown[0] == 1:
        shown = path
    name = native_name(names, event.module, event.side, shown, call)
    place = Place(name, event.module, event.side, call, shown)
    is_strided = x.layout == torch.strided and not x.is_nested
    return Sight(place, tuple(x.shape) if not x.is_nested else (), changes.is_number(x), is_strided, calls)


GRAPHS = 60
"""One of so many programs is for compiled graphs, which take seconds."""


class Generator:
    """Random steps at the points of one network."""

    drawing = tuple(changes.DRAWING)
    """The changes that draw random numbers."""

    def __init__(
        self, choose: random.Random, seen: list[Sight], ignored: set[tuple[str, int]], modules: nn.Module
    ) -> None:
        self.choose, self.ignored = choose, {name for name, _ in ignored}
        self.seen = [one for one in seen if one.shape or not one.is_strided]
        self.has_checkpoint = any(isinstance(module, parts.Again | parts.Selective) for module in modules.modules())
        if self.has_checkpoint:  # calls have no number where a checkpoint runs its region again
            self.seen = [one for one in self.seen if one.place.call is None]
        self.last: Sight | None = None
        self.added: Sight | None = None
        """Where the last hook was, and the last that was added: the next one is often there, too."""
        self.modules = [name for name, _ in modules.named_modules() if name]
        self.leaves = [
            name for name, module in modules.named_modules() if name.isalnum() and not list(module.children())
        ]
        self.numbers: list[int] = []
        self.next = 0

    def place(self, *, floats: bool = False) -> Sight:
        """A point: mostly the first tensor of an output or an input."""
        plain = [one for one in self.seen if one.place.path is None]
        table = plain if self.choose.random() < 0.8 else self.seen
        table = [one for one in table if one.is_float or not floats] or [one for one in plain if one.is_float]
        if not table:
            raise InvalidError("no point")
        return self.one_of(table)

    def one_of(self, table: list[Sight]) -> Sight:
        """A point out of a table, often one of the same tensor as the last: what acts there has an order."""
        near = [one for one in self.everything() if self.last is not None and one.is_near(self.last)]
        if near and self.choose.random() < 0.4 and (near[0].is_float or not any(one.is_float for one in table)):
            table = near
        self.last = self.choose.choice(table)
        return self.last

    def everything(self) -> list[Sight]:
        """All points."""
        return self.seen

    def hook(self) -> Hook:
        seen = self.place()
        choose = self.choose
        if not seen.is_strided:
            return Hook(seen.place, "same" if choose.random() < 0.5 else "read")
        chance = choose.random()
        if chance < 0.1:
            return Hook(seen.place, choose.choice(("read", "read" if self.has_checkpoint else "calls")))
        if chance < 0.25 and seen.is_float and len(seen.shape) >= 1:
            return self.edit(seen)
        if chance < 0.28:
            return Hook(seen.place, "raise")
        if self.drawing and chance < (0.5 if self.has_checkpoint else 0.36):
            return Hook(seen.place, choose.choice(self.drawing))
        keeping = () if self.has_checkpoint else (*changes.KEEPING[:1], "mean")
        change = choose.choice((*changes.CHANGES, *keeping))
        return Hook(seen.place, change, choose.choice(("return", "return", "in place", "data")))

    def edit(self, seen: Sight) -> Hook:
        """An edit as data; positions are along the second of three axes."""
        choose, where = self.choose, [("width", seen.shape[-1])]
        if len(seen.shape) == 3 and choose.random() < 0.5:
            where.append(("pos", (choose.randrange(seen.shape[1]),)))
        chance = choose.random()
        if chance < 0.25:
            where.append(("neuron", (choose.randrange(seen.shape[-1]), 0)))
        elif chance < 0.4:
            where.append(("mask", True))
        change = choose.choice(tuple(changes.EDITS))
        return Hook(seen.place, change, "edit", tuple(where))

    def gradient(self, before: Gradient | None = None) -> Gradient | None:
        """A backward hook, often where the one before it is, but seen in another way: they act in order."""
        beside = [] if before is None else [one for one in self.everything() if one.is_beside(before.place)]
        seen = self.choose.choice(beside) if beside and self.choose.random() < 0.7 else self.place(floats=True)
        if not seen.is_strided or (seen.place.module in self.ignored and seen.place.side == "output"):
            return None
        # Linear ones only: where an edit makes an activation constant, there may be no gradient or one that is zero.
        return Gradient(seen.place, self.choose.choice(("read", "read", "third", "negate")))

    def run(self) -> Run:
        choose = self.choose
        mode = choose.choice(("no_grad", "grad", "grad", "grad" if self.has_checkpoint else "inference"))
        hooks = tuple(self.hook() for _ in range(choose.choice((0, 1, 1, 1, 2, 3))))
        gradients: list[Gradient] = []
        if mode == "grad" and choose.random() < 0.6:
            for _ in range(choose.randint(1, 2)):
                gradient = self.gradient(gradients[-1] if gradients else None)
                gradients += [] if gradient is None else [gradient]
        reads: Any = None
        chance = choose.random()
        if chance < 0.3:
            reads = "all"
        elif chance < 0.65:
            reads = tuple(
                {one.place.name: one.place for one in (self.place() for _ in range(choose.randint(1, 4)))}.values()
            )
        return Run(
            hooks,
            tuple(gradients),
            reads,
            mode,
            is_training=choose.random() < 0.12,
            autocast=choose.random() < 0.08,
            seed=choose.randrange(100),
        )

    def foreign(self, *, may_be_first: bool) -> Foreign:
        """A torch hook; it may be the first if hookline has none on the modules, and will be before it."""
        side: Any = self.choose.choice(("input", "output"))
        change = self.choose.choice(("half", "negate", "vector", "read"))
        return Foreign(self.choose.choice(self.modules), side, change, may_be_first and self.choose.random() < 0.5)

    def steps(self) -> tuple[Step, ...]:
        """One run mostly; sometimes several, with contexts, added hooks and foreign hooks between them."""
        choose = self.choose
        chance = choose.random()
        if chance < 0.6:
            return (self.run(),)
        if chance < 0.65 and self.leaves:
            run = self.run()
            return (run, Swap(1, choose.choice(self.leaves)), replace(run, seed=run.seed + 1), Remove(1), run)
        steps: list[Step] = []
        depth = 0
        for _ in range(choose.randint(2, 5)):
            chance = choose.random()
            if chance < 0.3:
                self.last = self.added
                steps.append(Add(self.number(), self.hook(), choose.random() < 0.4))
                self.added = self.last
            elif chance < 0.4:
                has_hooks = depth or any(isinstance(step, Add) for step in steps)
                steps.append(Attach(self.number(), self.foreign(may_be_first=not has_hooks)))
            elif chance < 0.5 and self.numbers:
                steps.append(Remove(self.numbers.pop(choose.randrange(len(self.numbers)))))
            elif chance < 0.7:
                steps.append(Enter(tuple(self.hook() for _ in range(choose.randint(1, 2)))))
                depth += 1
            elif chance < 0.8 and depth:
                steps.append(Leave())
                depth -= 1
            else:
                steps.append(self.run())
        return (*steps, self.run(), *[Leave()] * depth, Run(seed=1))

    def number(self) -> int:
        self.next += 1
        self.numbers.append(self.next)
        return self.next


def plain_program(seed: int) -> tuple[Program, Subject]:
    """The program of a seed, and its network. Sources that cannot run are passed over."""
    choose = random.Random(seed)
    for _ in range(50):
        network = networks.plain(choose)
        try:
            with quietly():
                subject = Subject(network)
                seen = sights(subject, Run(mode="no_grad"))
            generator = Generator(choose, seen, subject.ignored(), subject.module)
            return Program(network, generator.steps()), subject
        except (InvalidError, RuntimeError, ValueError, TypeError, IndexError, NotImplementedError, AttributeError):
            continue
    raise InvalidError(f"seed {seed}: no network of 50 runs")


def language_program(seed: int) -> tuple[Program, Subject]:
    """The program of a seed on a model of transformers."""
    from fuzz import language_programs  # which builds on this

    return language_programs.language_program(seed)


def program(seed: int) -> tuple[Program, Subject]:
    """The program of a seed: of every sixth, on a model of transformers, which takes ten times as long."""
    return language_program(seed) if seed % 6 == 5 else plain_program(seed)
