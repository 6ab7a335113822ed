"""Steer generation: add a direction to the residual stream at one word, at every step.

The direction is the difference between two countries in sentences about languages. It works in sentences about capitals
too, because the residual stream at that word represents the country, not the sentence.
"""

from __future__ import annotations

import torch
from torch import Tensor

import hookline
from hookline import HookedModel, at, token

STEERED = {"France": "Germany", "Italy": "Japan", "Spain": "Egypt"}
POINT = "transformer.h.1"


def country(model: HookedModel, name: str) -> Tensor:
    """Return the residual stream at a country's name in a sentence about languages: [d_model]."""
    prompt = f"People in {name} speak"
    return model.cache(prompt, names_filter=POINT, pos_slice=token(f" {name}"))[POINT][0]


@torch.no_grad()
def main() -> dict[str, tuple[str, str]]:
    """Print and return, for each country, what the model says about its capital, unsteered and steered."""
    model = hookline.load("tinyworld")
    results = {}
    for old, new in STEERED.items():
        direction = country(model, new) - country(model, old)

        def steer(resid: Tensor, direction: Tensor = direction) -> Tensor:
            return resid + direction

        prompt = f"The capital of {old} is"
        alone = model.generate(prompt, max_new_tokens=2, do_sample=False)
        with model.hooks(fwd_hooks=[(POINT, at(token(f" {old}"), steer))]):
            results[old] = alone, model.generate(prompt, max_new_tokens=2, do_sample=False)
        print("  →  ".join(results[old]))
    return results


if __name__ == "__main__":
    main()
