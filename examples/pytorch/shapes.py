"""Images of circles, squares and triangles, and a small convolutional network that classifies them."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import trange

CLASSES = ("circle", "square", "triangle")
SIZE = 28


def images(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return noisy images `[count, 1, 28, 28]` of shapes with random position, size and rotation, and their labels."""
    generator = torch.Generator().manual_seed(seed)

    def uniform(low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(count, 1, 1, generator=generator)

    labels = torch.arange(count) % len(CLASSES)
    rows, columns = torch.meshgrid(torch.arange(SIZE), torch.arange(SIZE), indexing="ij")
    y, x = rows - uniform(10, SIZE - 11), columns - uniform(10, SIZE - 11)
    angle, size = uniform(0, 2 * math.pi), uniform(5, 7.5)
    inside = torch.stack([_depth(x, y, angle, size, sides) for sides in (math.inf, 4, 3)])
    shape = inside[labels, torch.arange(count)].add(0.5).clamp(0, 1)
    noise = 0.15 * torch.randn(count, SIZE, SIZE, generator=generator)
    return (uniform(0.6, 1) * shape + noise).unsqueeze(1), labels


def _depth(x: Tensor, y: Tensor, angle: Tensor, size: Tensor, sides: float) -> Tensor:
    """Return the signed distance of each pixel to the edge of a regular polygon, in pixels, positive inside.

    The polygon has the area of a circle of radius `size`.
    """
    if sides == math.inf:
        return size - torch.hypot(x, y)
    to_side = size * math.sqrt(math.pi / (sides * math.tan(math.pi / sides)))
    turns = [angle + 2 * math.pi * side / sides for side in range(int(sides))]
    return to_side - torch.stack([x * turn.cos() + y * turn.sin() for turn in turns]).amax(0)


class ShapeNet(nn.Module):
    """Two convolutions and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 5, padding=2)
        self.relu1 = nn.ReLU()
        self.pool1 = nn.MaxPool2d(2)
        self.conv2 = nn.Conv2d(8, 8, 5, padding=2)
        self.relu2 = nn.ReLU()
        self.pool2 = nn.AdaptiveMaxPool2d(1)
        self.fc = nn.Linear(8, len(CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        """Return one score per class."""
        x = self.pool1(self.relu1(self.conv1(x)))
        x = self.pool2(self.relu2(self.conv2(x)))
        return self.fc(x.flatten(1))


def train(steps: int = 300, *, progress: bool = False) -> ShapeNet:
    """Train a network on `steps` batches of images."""
    torch.manual_seed(0)
    net = ShapeNet()
    x, y = images(3000, seed=1)
    optimizer = torch.optim.AdamW(net.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, total_steps=steps)
    bar = trange(steps, desc="training", unit="batch", disable=not progress)
    for _ in bar:
        batch = torch.randint(len(x), (32,))
        loss = F.cross_entropy(net(x[batch]), y[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        bar.set_postfix(loss=f"{loss.item():.2f}", refresh=False)
    return net.eval()
