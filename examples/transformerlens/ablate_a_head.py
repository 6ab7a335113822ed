"""Ablate one attention head and see the answer change."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

import hookline

PROMPT = "When Mary and John went to the store, John gave a drink to"


def zero_head(z: Tensor, hook: hookline.HookPoint, head: int) -> Tensor:
    """Set the output of one head to zero at every position: z is [batch, position, head, d_head]."""
    z[:, :, head] = 0
    return z


@torch.no_grad()
def main() -> dict[str, dict[str, float]]:
    """Print and return the probabilities of both names with all heads, without head 3.4, and without another head."""
    model = hookline.load("tinyworld")
    hooks = {
        "all heads": [],
        "without 3.4": [("blocks.3.attn.hook_z", partial(zero_head, head=4))],
        "without 2.4": [("blocks.2.attn.hook_z", partial(zero_head, head=4))],
    }
    results = {}
    for kind, fwd_hooks in hooks.items():
        chances = model.run_with_hooks(PROMPT, fwd_hooks=fwd_hooks)[0, -1].softmax(-1)
        results[kind] = {name: chances[model.to_single_token(name)].item() for name in (" Mary", " John")}
        print(f"{kind:12}" + "".join(f"{name:>8} {chance:6.1%}" for name, chance in results[kind].items()))
    return results


if __name__ == "__main__":
    main()
