"""Test whether a head is necessary for a behavior, against a null hypothesis.

The behavior: after "When A and B went …, B gave a … to", the model prefers A. The null hypothesis: head 3.4 is like any
other head, so ablating it costs no more than ablating one of the other 31. Under this hypothesis, the probability that
its cost is the highest of all 32 is 1/32.
"""

from __future__ import annotations

from itertools import permutations, product

import torch
from torch import Tensor

import hookline

HEAD = (3, 4)
NAMES = ("Mary", "John", "Alice", "Bob", "Tom")
PROMPTS = [f"When {a} and {b} went to the park, {b} gave a book to" for a, b in permutations(NAMES, 2)]


@torch.no_grad()
def main() -> dict[tuple[int, int], float]:
    """Print the test; return, for each head, how much of the logit difference is lost without it."""
    model = hookline.load("tinyworld")
    words = torch.tensor([[model.to_single_token(f" {n}") for n in pair] for pair in permutations(NAMES, 2)])
    tokens = model.to_tokens(PROMPTS)

    def logit_diff(logits: Tensor) -> float:
        right, wrong = logits[:, -1].gather(1, words).unbind(1)
        return (right - wrong).mean().item()

    whole, cost = logit_diff(model(tokens)), {}
    for layer, head in product(range(model.cfg.n_layers), range(model.cfg.n_heads)):

        def zero(z: Tensor, head: int = head) -> None:
            z[:, :, head] = 0

        cost[layer, head] = whole - logit_diff(model.run_with_hooks(tokens, fwd_hooks=[(("z", layer), zero)]))

    null = sorted(value for head, value in cost.items() if head != HEAD)
    above = sum(value >= cost[HEAD] for value in null)
    print(f"mean logit difference over {len(PROMPTS)} prompts: {whole:.1f}")
    print(f"lost without 3.4: {cost[HEAD]:.1f}; without another head: {null[0]:.1f} to {null[-1]:.1f}")
    print(f"other heads that cost as much: {above}, so p = {(above + 1) / len(cost):.3f}")
    return cost


if __name__ == "__main__":
    main()
