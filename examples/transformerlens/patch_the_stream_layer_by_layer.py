"""Patch the residual stream after each layer from a clean run into a corrupted run: which layer restores "Paris"?

Patched at all positions, every layer does, because the rest of the model then runs on the clean activations; this says
nothing about causes. Patched at one position, it shows where the answer is at that layer.
"""

from __future__ import annotations

import torch
from torch import Tensor

import hookline
from hookline import at, last, token

CLEAN, CORRUPTED = "The Eiffel Tower is in", "The Belem Tower is in"
PLACES = {"all positions": None, "the landmark": token(" Belem"), "the last word": last}


@torch.no_grad()
def main() -> dict[str, list[float]]:
    """Print and return the probability of "Paris" with each layer patched at each of these positions."""
    model = hookline.load("tinyworld")
    paris = model.to_single_token(" Paris")
    logits, cache = model.run_with_cache(CLEAN)
    clean, corrupted = (x[0, -1].softmax(-1)[paris].item() for x in (logits, model(CORRUPTED)))
    print(f"Paris: {clean:.1%} after “{CLEAN}”, {corrupted:.1%} after “{CORRUPTED}”, and with one layer patched:\n")

    def from_clean(resid: Tensor, hook: hookline.HookPoint) -> Tensor:
        return cache[hook.name]

    def paris_with(layer: int, place: object) -> float:
        patched = model.run_with_hooks(CORRUPTED, fwd_hooks=[(("resid_post", layer), at(place, from_clean))])
        return patched[0, -1].softmax(-1)[paris].item()

    found = {}
    print(f"{'':14}" + "".join(f"{f'layer {layer}':>9}" for layer in range(model.cfg.n_layers)))
    for name, place in PLACES.items():
        found[name] = [paris_with(layer, place) for layer in range(model.cfg.n_layers)]
        print(f"{name:14}" + "".join(f"{chance:9.1%}" for chance in found[name]))
    return found


if __name__ == "__main__":
    main()
