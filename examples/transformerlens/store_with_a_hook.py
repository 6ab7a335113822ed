"""Store activations with your own hook. A cache does the same; neither needs a clone."""

from __future__ import annotations

import torch
from torch import Tensor

import hookline

POINTS = ["blocks.3.hook_resid_post", "blocks.3.attn.hook_pattern"]


@torch.no_grad()
def main() -> tuple[dict[str, Tensor], hookline.ActivationCache]:
    """Print what was stored; return it, and the same from a cache."""
    model = hookline.load("tinyworld")
    stored: dict[str, Tensor] = {}

    def store(activation: Tensor, hook: hookline.HookPoint) -> None:
        stored[hook.name] = activation

    model.run_with_hooks("The cat sat", fwd_hooks=[(POINTS, store)])
    cache = model.cache("The cat sat", names_filter=POINTS)
    for name, activation in stored.items():
        print(f"{name:28} {list(activation.shape)}, equal to the cached one: {activation.equal(cache[name])}")
    return stored, cache


if __name__ == "__main__":
    main()
