"""Backward hooks: read the gradients at the input and the output of a layer.

The gradient at `fc2` is that of the loss with respect to the output of fc2, and the gradient at `fc2.input` is that
with respect to its input. torch calls them `grad_output` and `grad_input`. The example gets them in three ways, which
agree.
"""

from __future__ import annotations

from typing import Any

import torch
from tiny import Net
from torch import Tensor, nn

import hookline

POINTS = ["fc2.input", "fc2"]


def main() -> dict[str, dict[str, Tensor]]:
    """Print the gradients at `fc2`; return those from each of the three ways."""
    torch.manual_seed(0)
    module, x = Net(), torch.randn(3, 10)
    net = hookline.hook(module)

    hooked: dict[str, Tensor] = {}

    def keep(grad: Tensor, hook: hookline.HookPoint) -> None:
        hooked[hook.name] = grad

    loss = net.run_with_hooks(x, bwd_hooks=[(POINTS, keep)]).sum()
    loss.backward()

    _, cache = net.run_with_cache(x, names_filter=POINTS, incl_bwd=True, loss_fn=torch.sum)
    cached = {name: cache[f"{name}_grad"] for name in POINTS}

    by_hand: dict[str, Tensor] = {}

    def torch_hook(layer: nn.Module, grad_input: tuple[Any, ...], grad_output: tuple[Any, ...]) -> None:
        by_hand.update({"fc2.input": grad_input[0], "fc2": grad_output[0]})

    handle = module.fc2.register_full_backward_hook(torch_hook)
    module(x).sum().backward()
    handle.remove()

    for name in POINTS:
        row = ", ".join(f"{number:+.3f}" for number in hooked[name][0])
        print(f"{name:10} {list(hooked[name].shape)}  first row: {row}")
    ways = {"bwd_hooks": hooked, "incl_bwd": cached, "torch": by_hand}
    same = all(torch.equal(hooked[name], way[name]) for way in ways.values() for name in POINTS)
    print(f"bwd_hooks, run_with_cache(incl_bwd=True) and a torch hook agree: {same}")
    return ways


if __name__ == "__main__":
    main()
