"""Rank heads by how much the loss on the answer increases when they are ablated, and compare layers."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

import hookline

PROMPT, TARGET = "When Mary and John went to the store, John gave a drink to", " Mary"


def zero_head(z: Tensor, head: int) -> None:
    """Set the output of one head to zero."""
    z[:, :, head] = 0


@torch.no_grad()
def main() -> tuple[float, dict[tuple[int, int], float]]:
    """Print the ranking and a bar for each layer; return the loss with all heads, and its increase without each."""
    model = hookline.load("tinyworld")
    text = PROMPT + TARGET

    def loss_of_target(**hooks: object) -> float:
        return model.run_with_hooks(text, return_type="loss", loss_per_token=True, **hooks)[0, -1].item()

    whole = loss_of_target()
    importance = {
        (layer, head): loss_of_target(fwd_hooks=[(("z", layer), partial(zero_head, head=head))]) - whole
        for layer in range(model.cfg.n_layers)
        for head in range(model.cfg.n_heads)
    }
    ranking = dict(sorted(importance.items(), key=lambda item: -item[1]))
    print(f"loss on “{TARGET.strip()}” with all heads: {whole:.3f}. Increase without head")
    for (layer, head), more in list(ranking.items())[:6]:
        print(f"  {layer}.{head}  {more:+.3f}")
    print("sum of the increases by layer:")
    for layer in range(model.cfg.n_layers):
        total = sum(max(more, 0) for (where, _), more in ranking.items() if where == layer)
        print(f"  {layer}  {total:.3f} {'█' * round(10 * total)}")
    return whole, ranking


if __name__ == "__main__":
    main()
