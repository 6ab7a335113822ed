"""Networks and hooks that several test files use."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hookline.engine import taps


class MLP(nn.Module):
    """Two layers and a non-linearity: the network most tests use."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(4, 8)
        self.act = nn.GELU()
        self.fc2 = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(self.act(self.fc1(x)))


def has_taps(module: nn.Module) -> bool:
    hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
    return any(isinstance(hook, taps.Tap) for hook in hooks)


class Twice(nn.Module):
    """Calls its one module three times."""

    def __init__(self):
        super().__init__()
        self.cell = nn.Linear(4, 4)

    def forward(self, x):
        for _ in range(3):
            x = self.cell(x)
        return x


class Lazy(nn.Module):
    """Has a module it never calls."""

    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.used(x)


class InPlace(nn.Module):
    """Writes to its own activations in every way models do."""

    def __init__(self):
        super().__init__()
        self.fc1, self.relu, self.fc2 = nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4)
        self.register_buffer("state", torch.zeros(5, 4))

    def forward(self, x):
        h = self.fc1(x)
        F.relu_(h)
        y = self.fc2(h)
        y.add_(h)
        self.state.copy_(y.detach())
        z = self.relu(y) + 0
        z[:, 0] = 7.0
        return z


def zero(h: Tensor, hook) -> Tensor:
    return torch.zeros_like(h)


def fill(value: float):
    def edit(h: Tensor) -> Tensor:
        return torch.full_like(h, value)

    return edit


def hook_count(module: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) + len(m._backward_hooks) for m in module.modules())


def nodes(out) -> int:
    """How many nodes the graph of a tensor has."""
    found, todo = set(), [out.grad_fn]
    while todo:
        if (node := todo.pop()) is not None and node not in found:
            found.add(node)
            todo += [before for before, _ in node.next_functions]
    return len(found)
