"""Patch the residual stream of a token, a head, or the MLP output of a token from another run, with one interface.

Each edit has a location (a role and a layer) and a function; all of them are passed to the same method.
"""

from __future__ import annotations

import torch
from torch import Tensor

import hookline
from hookline import at, last, token

CLEAN, CORRUPTED = "The capital of France is", "The capital of Germany is"


@torch.no_grad()
def main() -> dict[str, float]:
    """Print and return how much of the answer each edit restores: 0 is the corrupted run, 1 the clean run."""
    model = hookline.load("tinyworld")
    paris, berlin = model.to_single_token(" Paris"), model.to_single_token(" Berlin")
    logits, clean = model.run_with_cache(CLEAN)

    def logit_diff(logits: Tensor) -> float:
        return (logits[0, -1, paris] - logits[0, -1, berlin]).item()

    def from_clean(activation: Tensor, hook: hookline.HookPoint) -> Tensor:
        return clean[hook.name]

    def head_from_clean(z: Tensor, hook: hookline.HookPoint) -> None:
        z[:, :, 7] = clean[hook.name][:, :, 7]

    edits = {
        "stream at the country, layer 1": (("lm.layer.post", 1), at(token(" Germany"), from_clean)),
        "head 7 of layer 3": (("lm.attn.z", 3), head_from_clean),
        "MLP at the last token, layer 3": (("lm.mlp.out", 3), at(last, from_clean)),
        "attention and MLP, layer 3": ([("lm.attn.out", 3), ("lm.mlp.out", 3)], at(last, from_clean)),
    }
    best, worst = logit_diff(logits), logit_diff(model(CORRUPTED))
    results = {}
    for name, edit in edits.items():
        patched = model.run_with_hooks(CORRUPTED, fwd_hooks=[edit])
        results[name] = (logit_diff(patched) - worst) / (best - worst)
        print(f"{name:32} {results[name]:5.2f}")
    return results


if __name__ == "__main__":
    main()
