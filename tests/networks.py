"""Networks that several test files use."""

import torch
from torch import nn

from hookline import taps


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
