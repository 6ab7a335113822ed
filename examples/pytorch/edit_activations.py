"""Edit activations: ablate neurons, add noise, mask inputs, perturb adversarially.

Each edit is a hook of one or two lines; the model is not changed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from tiny import question, train
from torch import Tensor
from torch.nn import functional as F

import hookline

Edit = Callable[[Tensor], Tensor | None]


def switch_off(h: Tensor, neuron: int) -> None:
    """Zero one neuron, in place."""
    h[:, neuron] = 0


def add_noise(h: Tensor, size: float) -> Tensor:
    """Add noise of a given size, the same at every call."""
    return h + size * torch.randn(h.shape, generator=torch.Generator().manual_seed(0))


def hide(x: Tensor, feature: int) -> None:
    """Mask one feature of the input."""
    x[:, feature] = 0


def main() -> dict[str, list[float]]:
    """Print and return the accuracy under each kind of edit."""
    torch.set_num_threads(1)
    module = train()
    net = hookline.hook(module)
    x, y = question(1000, seed=2)

    def accuracy(point: str, edit: Edit) -> float:
        with torch.no_grad():
            answers = net.run_with_hooks(x, fwd_hooks=[(point, edit)]).argmax(1)
        return (answers == y).float().mean().item()

    # The sign of the gradient at the input is the direction in which each feature increases the loss.
    _, cache = net.run_with_cache(
        x, names_filter="input", incl_bwd=True, loss_fn=lambda scores: F.cross_entropy(scores, y)
    )
    worst = cache["input_grad"].sign()
    chance = torch.randn(x.shape, generator=torch.Generator().manual_seed(0)).sign()

    results = {
        "unedited": [accuracy("input", lambda _: None)],
        "neuron 0…4 off": [accuracy("act", partial(switch_off, neuron=neuron)) for neuron in range(5)],
        "noise of 0.5, 1, 2, 4": [accuracy("act", partial(add_noise, size=size)) for size in (0.5, 1, 2, 4)],
        "input 0…9 hidden": [accuracy("input", partial(hide, feature=feature)) for feature in range(10)],
        "pushed by ±0.2 at random": [accuracy("input", lambda x: x + 0.2 * chance)],
        "pushed by ±0.2 with intent": [accuracy("input", lambda x: x + 0.2 * worst)],
    }
    for name, values in results.items():
        print(f"{name:27} {' '.join(f'{value:.2f}' for value in values)}")
    return results


if __name__ == "__main__":
    main()
