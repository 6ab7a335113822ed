"""Read and edit gradients: a backward hook receives the gradient at its point."""

from __future__ import annotations

import torch
from torch import Tensor

import hookline

PROMPT = "The cat sat on the mat."
LAYER = "blocks.2.hook_resid_post"


def scale(grad: Tensor, hook: hookline.HookPoint) -> Tensor:
    """Scale the gradient by a tenth."""
    return grad * 0.1


def main() -> tuple[Tensor, Tensor, Tensor]:
    """Print the gradient at a layer; return it, and the gradient of an earlier weight without and with scaling."""
    model = hookline.load("tinyworld")
    weight = model.module.transformer.h[2].mlp.c_proj.weight

    _, cache = model.run_with_cache(PROMPT, return_type="loss", incl_bwd=True, names_filter=LAYER)
    grad = cache[f"{LAYER}_grad"]
    print(f"gradient of the loss at {LAYER}: {list(grad.shape)}, norm at each position:")
    for token, norm in zip(model.to_str_tokens(PROMPT), grad[0].norm(dim=-1), strict=True):
        print(f"  {token:6} {norm:.3f}")

    plain = torch.autograd.grad(model(PROMPT, return_type="loss"), weight)[0]
    loss = model.run_with_hooks(PROMPT, bwd_hooks=[(LAYER, scale)], return_type="loss")
    scaled = torch.autograd.grad(loss, weight)[0]
    print(f"gradient of an earlier weight: norm {plain.norm():.4f}; with the hook {scaled.norm():.4f}")
    return grad, plain, scaled


if __name__ == "__main__":
    main()
