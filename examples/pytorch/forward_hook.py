"""Forward hooks: read the input and the output of a layer."""

from __future__ import annotations

from typing import Any

import torch
from tiny import Net
from torch import Tensor, nn

import hookline


def main() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Print the shapes at `fc1`; return the tensors that hookline and a torch hook received."""
    torch.manual_seed(0)
    module, x = Net(), torch.randn(3, 10)
    net = hookline.hook(module)
    seen: dict[str, Tensor] = {}

    def look(value: Tensor, hook: hookline.HookPoint) -> None:
        print(f"  {hook.name:10} {list(value.shape)}")
        seen[hook.name] = value

    print("hookline, by name:")
    net.run_with_hooks(x, fwd_hooks=[("fc1.input", look), ("fc1", look)])

    by_hand: dict[str, Tensor] = {}

    def torch_hook(layer: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        print(f"  {type(layer).__name__} input {list(args[0].shape)}, output {list(output.shape)}")
        by_hand.update({"fc1.input": args[0], "fc1": output})

    print("torch, by hand:")
    handle = module.fc1.register_forward_hook(torch_hook)
    module(x)
    handle.remove()

    same = all(torch.equal(seen[name], by_hand[name]) for name in seen)
    print(f"same numbers: {same}; hooks left on fc1: {len(module.fc1._forward_hooks)}")
    return seen, by_hand


if __name__ == "__main__":
    main()
