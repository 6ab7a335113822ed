"""Patch one token's stream, one head, or one token's MLP output from another run: three edits, one interface.

Each edit says where it goes (a role and a layer) and what it does; all three go through the same verb.
"""

from __future__ import annotations

import torch
from torch import Tensor

import hookline
from hookline import at, last, token

CLEAN, CORRUPTED = "The capital of France is", "The capital of Germany is"


@torch.no_grad()
def main() -> dict[str, float]:
    """Print and return how far each edit brings the answer back: 0 is the corrupted run, 1 the clean one."""
    model = hookline.load("tinyworld")
    paris, berlin = model.to_single_token(" Paris"), model.to_single_token(" Berlin")
    logits, clean = model.run_with_cache(CLEAN)

    def lead(logits: Tensor) -> float:
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
    best, worst = lead(logits), lead(model(CORRUPTED))
    results = {}
    for name, edit in edits.items():
        patched = model.run_with_hooks(CORRUPTED, fwd_hooks=[edit])
        results[name] = (lead(patched) - worst) / (best - worst)
        print(f"{name:32} {results[name]:5.2f}")
    return results


if __name__ == "__main__":
    main()
