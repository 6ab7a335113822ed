"""A network of two layers, and a small classification task."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Net(nn.Module):
    """Ten features, five neurons, two classes."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(10, 5)
        self.act = nn.ReLU()
        self.fc2 = nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        """Return one score for each of two classes."""
        return self.fc2(self.act(self.fc1(x)))


def question(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return inputs `[count, 10]` and labels, which depend only on the first two features."""
    x = torch.randn(count, 10, generator=torch.Generator().manual_seed(seed))
    return x, (x[:, 0] + x[:, 1].abs() > 0.8).long()


def train(steps: int = 300) -> Net:
    """Train a network on the task."""
    torch.manual_seed(0)
    net = Net()
    x, y = question(2000, seed=1)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.02)
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(net(x), y).backward()
        optimizer.step()
    return net
