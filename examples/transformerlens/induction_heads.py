"""Find induction heads: when a token is repeated, they attend to the token after its first occurrence."""

from __future__ import annotations

import torch
from torch import Tensor

import hookline

HALF = 30


@torch.no_grad()
def main() -> tuple[Tensor, float, float]:
    """Print the induction heads; return all scores, and the loss on the repetition with and without these heads."""
    model = hookline.load("tinyworld")
    once = torch.randint(3, model.cfg.d_vocab, (8, HALF), generator=torch.Generator().manual_seed(0))
    tokens = torch.cat([once, once], dim=1)
    _, cache = model.run_with_cache(tokens, names_filter="blocks.*.attn.hook_pattern")

    queries = torch.arange(HALF, 2 * HALF)
    patterns = torch.stack([cache["pattern", layer] for layer in range(model.cfg.n_layers)])
    scores = patterns[:, :, :, queries, queries - HALF + 1].mean((1, 3))
    found = (scores > 0.5).nonzero().tolist()
    for layer, head in sorted(found, key=lambda at: -scores[tuple(at)]):
        print(f"head {layer}.{head}: {scores[layer, head]:.2f} of its attention")

    def silence(z: Tensor, hook: hookline.HookPoint) -> None:
        z[:, :, [head for layer, head in found if layer == hook.layer()]] = 0

    def loss(**hooks: object) -> float:
        losses = model.run_with_hooks(tokens, return_type="loss", loss_per_token=True, **hooks)
        return losses[:, HALF:].mean().item()

    whole, without = loss(), loss(fwd_hooks=[("blocks.*.attn.hook_z", silence)])
    print(f"loss on the repetition: {whole:.2f}; without these heads {without:.2f}")
    return scores, whole, without


if __name__ == "__main__":
    main()
