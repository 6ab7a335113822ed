"""Hook the input or the output of a layer: mi-crow's PRE_FORWARD and FORWARD.

The name of a layer refers to its output, the name with `.input` to its input.
"""

from __future__ import annotations

import torch
from torch import Tensor

import hookline

LAYER = "transformer.h.0.attn.c_attn"


def double(activation: Tensor, hook: hookline.HookPoint) -> Tensor:
    """Double the activation."""
    return 2 * activation


@torch.no_grad()
def main() -> dict[str, Tensor]:
    """Print the shapes; return the layer's input and output, and its output with either of them doubled."""
    model = hookline.load("tinyworld")
    points = [f"{LAYER}.input", LAYER]
    plain = model.cache("Hello, world!", names_filter=points)
    results = {"input": plain[points[0]], "output": plain[points[1]]}
    for name, point in zip(("input doubled", "output doubled"), points, strict=True):
        with model.hooks(fwd_hooks=[(point, double)]):
            results[name] = model.cache("Hello, world!", names_filter=LAYER)[LAYER]
    for name, value in results.items():
        print(f"{name:15} {list(value.shape)}, norm {value.norm():6.2f}")
    return results


if __name__ == "__main__":
    main()
