"""Collect the activations of several layers in one run.

The usual recipe, a dict that is filled by a hook on each layer, has a pitfall: an in-place layer overwrites tensors
that are already in the dict. A cache keeps the values as they were.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from tiny import Net
from torch import Tensor, nn

import hookline


def by_hand(module: nn.Module, x: Tensor, names: Iterable[str]) -> dict[str, Tensor]:
    """Collect the outputs of the named layers with torch hooks."""
    activations: dict[str, Tensor] = {}

    def keep_as(name: str) -> Callable[..., None]:
        def keep(layer: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
            activations[name] = output.detach()

        return keep

    handles = [module.get_submodule(name).register_forward_hook(keep_as(name)) for name in names]
    module(x)
    for handle in handles:
        handle.remove()
    return activations


def main() -> tuple[hookline.ActivationCache, dict[str, Tensor], dict[str, Tensor]]:
    """Print a cache; return it, the same layers by hand, and what each method keeps of an overwritten layer."""
    torch.manual_seed(0)
    module, x = Net(), torch.randn(1, 10)
    net = hookline.hook(module)

    _, cache = net.run_with_cache(x, names_filter=["fc1", "fc2"])
    collected = by_hand(module, x, ["fc1", "fc2"])
    print(cache)
    print(f"equal to those collected by hand: {all(torch.equal(cache[name], collected[name]) for name in collected)}")
    print(f"points without a filter: {', '.join(net.cache(x))}\n")

    module.act.inplace = True
    with torch.no_grad():
        kept = {
            "true": module.fc1(x),
            "hookline": net.cache(x, names_filter="fc1")["fc1"],
            "by hand": by_hand(module, x, ["fc1"])["fc1"],
        }
    print("fc1, followed by an in-place ReLU:")
    for way, value in kept.items():
        print(f"  {way:10} {', '.join(f'{number:+.2f}' for number in value[0])}")
    return cache, collected, kept


if __name__ == "__main__":
    main()
