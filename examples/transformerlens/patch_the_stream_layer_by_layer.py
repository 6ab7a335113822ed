"""Patch each layer's residual stream from a clean run into a corrupted one: which layer brings Paris back?

Patched at all positions every layer does, for then the rest of the model simply runs on the clean prompt: that
tells nothing about causes. Patched at one position, it tells where the answer is at that depth.
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
    """Print and return the probability of Paris, with each layer patched, at each place."""
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
