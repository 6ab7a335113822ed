"""Add your own point: place a HookPoint in your model, and every method accepts its name."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import hookline


class Gated(hookline.HookedRootModule):
    """A layer with a gate, whose activation is a point."""

    def __init__(self) -> None:
        super().__init__()
        self.value, self.gate = nn.Linear(4, 4), nn.Linear(4, 4)
        self.hook_openness = hookline.HookPoint()
        self.setup()

    def forward(self, x: Tensor) -> Tensor:
        """Return the gated value."""
        return self.value(x) * self.hook_openness(self.gate(x).sigmoid())


@torch.no_grad()
def main() -> tuple[Tensor, Tensor, Tensor]:
    """Print how open the gate is; return that, and the output with the gate closed and fully open."""
    torch.manual_seed(0)
    model, x = Gated(), torch.randn(1, 4)
    _, cache = model.run_with_cache(x)
    print("gate:", [f"{share:.2f}" for share in cache["hook_openness"][0].tolist()])
    shut = model.run_with_hooks(x, fwd_hooks=[("hook_openness", torch.zeros_like)])
    wide = model.run_with_hooks(x, fwd_hooks=[("hook_openness", torch.ones_like)])
    print("closed:", shut[0].tolist(), "\nfully open:", [f"{value:.2f}" for value in wide[0].tolist()])
    return cache["hook_openness"], shut, wide - model.value(x)


if __name__ == "__main__":
    main()
