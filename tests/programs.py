"""Random small programs of torch operations: views, in-place writes, outputs that are inputs, ignored return values."""

from __future__ import annotations

import random
from collections.abc import Callable

import devices
import torch
from torch import Tensor, nn

SIZE = 4


class Scale(nn.Module):
    """Writes to its argument, and returns it."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(0.75)


class Turn(nn.Module):
    """Returns a view of its argument."""

    def forward(self, x: Tensor) -> Tensor:
        return x.T


class Store(nn.Module):
    """Writes its result to a buffer, and returns that."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("last", torch.zeros(SIZE, SIZE))

    def forward(self, x: Tensor) -> Tensor:
        self.last.copy_(x.detach() + 0.5)
        return self.last


class Residual(nn.Module):
    """Has children of its own, one of which works in place on what the other one made."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.act = nn.Linear(SIZE, SIZE), nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        h = self.fc(x)
        self.act(h)
        return x + h


KINDS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(SIZE, SIZE),
    "tanh": nn.Tanh,
    "relu": nn.ReLU,
    "relu_": lambda: nn.ReLU(inplace=True),
    "dropout": nn.Dropout,
    "dropout_": lambda: nn.Dropout(inplace=True),
    "identity": nn.Identity,
    "scale_": Scale,
    "turn": Turn,
    "store": Store,
    "residual": Residual,
}
WRITING = (nn.ReLU, Scale)

OPERATIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": lambda a, b: a + b,
    "mul": lambda a, b: a * b,
    "sub": lambda a, b: a - 0.5 * b,
    "view": lambda a, _b: a.view_as(a),
    "turn": lambda a, _b: a.T,
    "same": lambda a, _b: a,
}
WRITES: dict[str, Callable[[Tensor, Tensor], object]] = {
    "add_": lambda a, _b: a.add_(0.25),
    "mul_": lambda a, _b: a.mul_(0.5),
    "copy_": lambda a, b: a.copy_(b * 0.5),
    "row": lambda a, _b: a[0].zero_(),
    "part": lambda a, _b: a[:, 1:3].add_(1),
}
BLIND: dict[str, Callable[[Tensor, Tensor], object]] = {
    "data": lambda a, _b: a.data.add_(0.125),
}
if devices.DEVICE.type == "cpu":
    BLIND["numpy"] = lambda a, _b: a.detach().numpy().__imul__(0.5)
"""Writes that leave no trace in a version counter; autograd cannot know of them."""


class Program(nn.Module):
    """Runs instructions on tensors, which have numbers; the first is the input."""

    def __init__(self, seed: int, *, writes: bool = True, blind: bool = False) -> None:
        super().__init__()
        rng = random.Random(seed)
        self.names = [rng.choice(list(KINDS)) for _ in range(rng.randint(2, 5))]
        if not writes:
            self.names = [name for name in self.names if not name.endswith("_")] + ["linear"]
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.parts = nn.ModuleList(KINDS[name]() for name in self.names).eval()
            self.stem = nn.Linear(SIZE, SIZE)
        kinds = ["call"] * 4 + ["operation"] * 3 + (["ignore", "write"] * 2 + ["buffer"] if writes else [])
        if blind and writes:
            kinds.append("blind")
        self.register_buffer("table", torch.linspace(-1, 1, SIZE * SIZE).view(SIZE, SIZE).clone())
        self.steps, count = [], 3
        for _ in range(rng.randint(4, 10)):
            kind = rng.choice(kinds)
            step = (kind, rng.randrange(count), rng.randrange(count), rng.randrange(len(self.names)), rng.random())
            count += kind in ("call", "operation")
            self.steps.append(step)
        self.results = [rng.randrange(count) for _ in range(2)] + [2, count - 1]

    def forward(self, x: Tensor) -> Tensor:
        values = [x, self.table, self.stem(x)]
        for kind, a, b, part, chance in self.steps:
            if kind == "call":
                values.append(self.call(part, values[a]))
            elif kind == "ignore":
                self.ignore(part, values[a])
            elif kind == "operation":
                values.append(_chosen(OPERATIONS, chance)(values[a], values[b]))
            elif kind == "buffer":
                self.table.add_(0.125)
            else:
                _chosen(WRITES if kind == "write" else BLIND, chance)(values[a], values[b])
        return torch.stack([values[index] for index in self.results]).sum(0)

    def call(self, part: int, x: Tensor) -> Tensor:
        return self.parts[part](x)

    def ignore(self, part: int, x: Tensor) -> None:
        self.parts[part](x)


class Edited(Program):
    """The same program with an edit placed by hand at the input or the output of one of its parts."""

    part: int
    at_input: bool
    edit: Callable[[Tensor], Tensor]

    def call(self, part: int, x: Tensor) -> Tensor:
        if part != self.part:
            return self.parts[part](x)
        if not self.at_input:
            return self.edit(self.parts[part](x))
        mine = self.edit(x)
        result = self.parts[part](mine)
        if not self._writes(part):
            return result
        x.copy_(mine)
        return x

    def ignore(self, part: int, x: Tensor) -> None:
        if self.at_input:
            self.call(part, x)
            return
        result = self.parts[part](x)
        if part == self.part and result.untyped_storage() is x.untyped_storage():
            result.copy_(self.edit(result))

    def _writes(self, part: int) -> bool:
        module = self.parts[part]
        return isinstance(module, Scale) or (isinstance(module, nn.ReLU) and module.inplace)


def _chosen(table: dict[str, Callable[[Tensor, Tensor], object]], chance: float) -> Callable[[Tensor, Tensor], object]:
    return list(table.values())[int(chance * len(table))]
