"""Clip the gradient inside the network while it trains.

A few targets are far off, and their gradients disrupt training. A backward hook that clips the gradient where it
enters the network limits every step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hookline

LIMIT = 0.2


def clip_norm(grad: Tensor) -> Tensor:
    """Return the gradient, scaled down to norm `LIMIT` if it is larger."""
    return grad * (LIMIT / grad.norm()).clamp(max=1)


def clip_norm_in_place(grad: Tensor) -> None:
    """Do the same in place."""
    grad.mul_((LIMIT / grad.norm()).clamp(max=1))


@dataclass
class Training:
    """The norm of the gradient at each step, and the error on clean data after the last."""

    norms: list[float] = field(default_factory=list)
    error: float = 0.0


def train(clip: Callable[[Tensor], Tensor | None] | None, steps: int = 300) -> Training:
    """Fit noisy targets by gradient descent."""
    torch.manual_seed(0)
    net = hookline.hook(nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1)))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    result = Training()

    def measure(grad: Tensor) -> None:
        result.norms.append(grad.norm().item())

    hooks = [clip, measure] if clip else [measure]
    with net.hooks(bwd_hooks=[("output", hook) for hook in hooks]):
        for _ in range(steps):
            x, y = batch()
            y[torch.rand(len(y)) < 0.02] *= 100
            optimizer.zero_grad()
            F.mse_loss(net(x), y).backward()
            optimizer.step()
    with torch.no_grad():
        x, y = batch(2000)
        result.error = F.mse_loss(net(x), y).item()
    return result


def batch(count: int = 64) -> tuple[Tensor, Tensor]:
    """Return inputs and targets without noise."""
    x = torch.randn(count, 4)
    return x, x.sum(1, keepdim=True).sin()


def main() -> dict[str, Training]:
    """Train without clipping, with a hook that returns the clipped gradient, and with one that clips in place."""
    torch.set_num_threads(1)
    ways = {"not clipped": None, "clipped by return": clip_norm, "clipped in place": clip_norm_in_place}
    results = {name: train(clip) for name, clip in ways.items()}
    print(f"{'gradient':18}  {'largest norm':>12}  {'error on clean data':>20}")
    for name, result in results.items():
        print(f"{name:18}  {max(result.norms):12.2f}  {result.error:20.3f}")
    return results


if __name__ == "__main__":
    main()
