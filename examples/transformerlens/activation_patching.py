"""Activation patching: replace an activation by its value from a run on another prompt."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

import hookline

CLEAN, CORRUPTED = "The capital of France is", "The capital of Germany is"


def patch(resid: Tensor, hook: hookline.HookPoint, cache: hookline.ActivationCache, pos: int | None = None) -> Tensor:
    """Replace the activation by the cached one, at one position or at all of them."""
    where = slice(None) if pos is None else slice(pos, pos + 1)
    resid[:, where] = cache[hook.name][:, where]
    return resid


@torch.no_grad()
def main() -> dict[str, str]:
    """Print and return the answer of each run."""
    model = hookline.load("tinyworld")
    _, cache = model.run_with_cache(CLEAN)
    country = model.get_token_position(" France", CLEAN)
    name = "blocks.1.hook_resid_post"
    runs = {
        "clean": (CLEAN, []),
        "corrupted": (CORRUPTED, []),
        "corrupted, all of block 1 patched": (CORRUPTED, [(name, partial(patch, cache=cache))]),
        "corrupted, the country patched": (CORRUPTED, [(name, partial(patch, cache=cache, pos=country))]),
        "corrupted, the last word patched": (
            CORRUPTED,
            [(name, partial(patch, cache=cache, pos=len(model.to_str_tokens(CLEAN)) - 1))],
        ),
    }
    answers = {}
    for kind, (prompt, fwd_hooks) in runs.items():
        answers[kind] = model.to_string(model.run_with_hooks(prompt, fwd_hooks=fwd_hooks)[0, -1].argmax())
        print(f"{kind:34} {prompt}{answers[kind]}")
    return answers


if __name__ == "__main__":
    main()
