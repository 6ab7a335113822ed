"""The cost of watching a training, relative to the same training in the same run.

    python benchmarks/training.py                    # a small residual network on the CPU
    python benchmarks/training.py --device cuda      # the shape of ResNet-18, batches of 32 images
    python benchmarks/training.py --smoke            # one quick round, to check that it runs

A step is forward, backward and an update. "due" is a step at which `watch` records, "between" one at which it only
counts; "by hand" records the same statistics of the same tensors with hooks of torch, and reads each at once.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import ExitStack

import torch
from timing import median, ratios
from torch import Tensor, nn

from hookline.training import find_nonfinite, watch


class Block(nn.Module):
    """Two convolutions with batch norms, and the connection around them."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, padding=1, bias=False)
        self.bn1, self.act1 = nn.BatchNorm2d(after), nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(after, after, 3, padding=1, bias=False)
        self.bn2, self.act2 = nn.BatchNorm2d(after), nn.ReLU(inplace=True)
        is_same = before == after and stride == 1
        self.shortcut = (
            nn.Identity()
            if is_same
            else nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))
        )

    def forward(self, x: Tensor) -> Tensor:
        """Run the block."""
        new = self.bn2(self.conv2(self.act1(self.bn1(self.conv1(x)))))
        return self.act2(new + self.shortcut(x))


def resnet(width: int, classes: int = 1000) -> nn.Module:
    """A network of the shape of ResNet-18, whose first layers have so many channels."""
    widths = [width, width, 2 * width, 4 * width, 8 * width]
    blocks = [
        Block(widths[stage] if first else widths[stage + 1], widths[stage + 1], 2 if first and stage else 1)
        for stage in range(4)
        for first in (True, False)
    ]
    stem = [nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
    pool = nn.MaxPool2d(3, 2, 1)
    return nn.Sequential(*stem, pool, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8 * width, classes))


class Training:
    """A network, a batch and an optimizer."""

    def __init__(self, device: str, width: int, batch: int, size: int) -> None:
        torch.manual_seed(0)
        self.module = resnet(width).to(device)
        self.images = torch.randn(batch, 3, size, size, device=device)
        self.labels = torch.randint(1000, (batch,), device=device)
        self.optimizer = torch.optim.SGD(self.module.parameters(), 0.01, momentum=0.9)

    def step(self) -> None:
        """One step."""
        self.optimizer.zero_grad()
        nn.functional.cross_entropy(self.module(self.images), self.labels).backward()
        self.optimizer.step()

    def by_hand(self) -> None:
        """One step that records with hooks of torch."""
        rows: list[float] = []

        def record(x: Tensor) -> None:
            x = x.detach()
            values = (x.mean(), x.std(), x.norm(), (x == 0).float().mean(), x.abs().max(), (~x.isfinite()).sum())
            rows.extend(value.item() for value in values)

        def forward(_module: nn.Module, _args: object, output: Tensor) -> None:
            record(output)
            output.register_hook(record)

        leaves = [module for module in self.module.modules() if not list(module.children())]
        handles = [leaf.register_forward_hook(forward) for leaf in leaves]
        try:
            self.step()
        finally:
            for handle in handles:
                handle.remove()
        for parameter in self.module.parameters():
            if parameter.grad is not None:
                record(parameter.grad)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--smoke", action="store_true")
    options = parser.parse_args()
    is_small = options.device == "cpu"
    shape = {"width": 8, "batch": 8, "size": 64} if is_small else {"width": 64, "batch": 32, "size": 224}
    trainings = {
        name: Training(options.device, **shape) for name in ("plain", "due", "between", "by hand", "nonfinite")
    }
    with ExitStack() as contexts:
        contexts.enter_context(watch(trainings["due"].module, every=1))
        contexts.enter_context(watch(trainings["between"].module, every=10**9))
        ways: dict[str, Callable[[], object]] = {
            "plain": trainings["plain"].step,
            "due": trainings["due"].step,
            "between": trainings["between"].step,
            "by hand": trainings["by hand"].by_hand,
            "find_nonfinite": lambda: _in_find(trainings["nonfinite"]),
        }
        trainings["between"].step()  # the first step is due
        found = ratios(ways, "plain", 1 if options.smoke else 15)
    print(f"{options.device}, {shape}")
    for name in ways:
        print(f"{name:16} {median(found[name])}")


def _in_find(training: Training) -> None:
    with find_nonfinite(training.module):
        training.step()


if __name__ == "__main__":
    main()
