"""Causal tracing: patch the residual stream at every layer and position, to find where the answer is.

Recovery is 0 for the corrupted run and 1 for the clean run, measured by the logit difference of the two answers.
"""

from __future__ import annotations

import torch
from torch import Tensor

import hookline
from hookline import at

CLEAN, CORRUPTED = "The capital of France is", "The capital of Germany is"


@torch.no_grad()
def main() -> tuple[list[str], Tensor]:
    """Print the recovery at each layer and position; return the tokens and `[layer, position]`."""
    model = hookline.load("tinyworld")
    right, wrong = model.to_single_token(" Paris"), model.to_single_token(" Berlin")

    def logit_diff(logits: Tensor) -> Tensor:
        return logits[0, -1, right] - logits[0, -1, wrong]

    def from_clean(resid: Tensor, hook: hookline.HookPoint) -> Tensor:
        return cache[hook.name]

    logits, cache = model.run_with_cache(CLEAN)
    best, worst = logit_diff(logits), logit_diff(model(CORRUPTED))
    tokens = model.to_str_tokens(CLEAN)
    recovery = torch.zeros(model.cfg.n_layers, len(tokens))
    for layer in range(model.cfg.n_layers):
        for position in range(len(tokens)):
            patch = (f"blocks.{layer}.hook_resid_post", at(position, from_clean))
            logits = model.run_with_hooks(CORRUPTED, fwd_hooks=[patch])
            recovery[layer, position] = (logit_diff(logits) - worst) / (best - worst)

    print("after  " + "".join(f"{token:>9}" for token in tokens))
    for layer, row in enumerate(recovery):
        print(f"layer {layer}" + "".join(f"{value:9.2f}" for value in row))
    return tokens, recovery


if __name__ == "__main__":
    main()
