"""Gradient surgery: change gradients during training.

Two uses. *Protect* the output of a layer along one direction: the direction is projected out of the gradient that
reaches the layer, so training cannot change it. *Forget* a nuisance variable: the gradient of a head that predicts it
is reversed where it enters the encoder, which then learns to remove the variable.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from tiny import Net, question
from torch import Tensor, nn
from torch.nn import functional as F

import hookline


def without(direction: Tensor) -> Callable[[Tensor], Tensor]:
    """Return a hook that projects a unit vector out of each row."""

    def project(grad: Tensor) -> Tensor:
        return grad - (grad @ direction)[:, None] * direction

    return project


def protect(*, surgery: bool) -> dict[str, float]:
    """Measure how far training moves `fc1` along a direction, and orthogonally to it."""
    torch.manual_seed(0)
    net = hookline.hook(Net())
    x, y = question(500, seed=1)
    direction = F.normalize(torch.ones(5), dim=0)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    before = net.cache(x, names_filter="fc1")["fc1"]
    with net.hooks(bwd_hooks=[("fc1", without(direction))] if surgery else []):
        for _ in range(200):
            optimizer.zero_grad()
            F.cross_entropy(net(x), y).backward()
            optimizer.step()
    moved = net.cache(x, names_filter="fc1")["fc1"] - before
    accuracy = (net(x).argmax(1) == y).float().mean().item()
    along = moved @ direction
    return {"along": along.norm().item(), "across": without(direction)(moved).norm().item(), "accuracy": accuracy}


class TwoHeads(nn.Module):
    """An encoder, a head for the task, and a head that predicts a nuisance variable."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 4))
        self.task = nn.Linear(4, 2)
        self.nuisance = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the scores of both heads."""
        code = self.encoder(x)
        return self.task(code), self.nuisance(code)


def two_labels(count: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return inputs, whether the first feature is positive, and whether the second one is."""
    x = torch.randn(count, 10, generator=torch.Generator().manual_seed(seed))
    return x, (x[:, 0] > 0).long(), (x[:, 1] > 0).long()


def forget(*, surgery: bool) -> dict[str, float]:
    """Measure the accuracy of each head after training both."""
    torch.manual_seed(0)
    net = hookline.hook(TwoHeads())
    x, task, nuisance = two_labels(1000, seed=1)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    with net.hooks(bwd_hooks=[("nuisance.input", torch.neg)] if surgery else []):
        for _ in range(300):
            scores, read = net(x)
            optimizer.zero_grad()
            (F.cross_entropy(scores, task) + F.cross_entropy(read, nuisance)).backward()
            optimizer.step()
    x, task, nuisance = two_labels(1000, seed=2)
    (scores, read), cache = net.run_with_cache(x, names_filter="encoder")
    return {
        "task": (scores.argmax(1) == task).float().mean().item(),
        "nuisance": (read.argmax(1) == nuisance).float().mean().item(),
        "fresh reader": _best_linear_reader(cache["encoder"], nuisance),
    }


def _best_linear_reader(code: Tensor, label: Tensor) -> float:
    """Return the accuracy of a linear probe that is fitted to these labels."""
    inputs = F.pad(code, (0, 1), value=1.0)
    weights = torch.linalg.lstsq(inputs, 2.0 * label - 1).solution
    return ((inputs @ weights > 0) == label).float().mean().item()


def main() -> dict[str, dict[str, float]]:
    """Train with and without surgery, for each use."""
    torch.set_num_threads(1)
    results = {
        "free": protect(surgery=False),
        "protected": protect(surgery=True),
        "both heads": forget(surgery=False),
        "one reversed": forget(surgery=True),
    }
    print("protect: how far fc1 moved along the direction and orthogonally to it, and the accuracy")
    for name in ("free", "protected"):
        print(f"  {name:13}" + "  ".join(f"{key} {value:8.4f}" for key, value in results[name].items()))
    print("forget: the accuracy of each head, and of a linear probe for the nuisance (chance is 0.5)")
    for name in ("both heads", "one reversed"):
        print(f"  {name:13}" + "  ".join(f"{key} {value:.3f}" for key, value in results[name].items()))
    return results


if __name__ == "__main__":
    main()
