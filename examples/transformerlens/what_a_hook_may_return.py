"""What happens to what a hook returns: a tensor replaces, None keeps, and what was written in place counts.

In some libraries a hook that forgets to return undoes its own work, or breaks the run. Here both ways of editing
work, and what cannot be meant raises.
"""

from __future__ import annotations

import torch
from torch import Tensor

import hookline


def returns_a_tensor(z: Tensor, *, hook: hookline.HookPoint) -> Tensor:
    """Another tensor of the same shape takes the activation's place."""
    return torch.zeros_like(z)


def returns_none(z: Tensor, hook: hookline.HookPoint) -> None:
    """Nothing is changed."""


def writes_in_place(z: Tensor) -> None:
    """What is written counts, though nothing is returned. A hook may also leave out its second argument."""
    z.zero_()


def writes_and_returns(z: Tensor, hook: hookline.HookPoint) -> Tensor:
    """The usual pattern; the same."""
    z[:] = 0
    return z


def returns_another_shape(z: Tensor) -> Tensor:
    """One head instead of all: an error, since the model could not go on."""
    return z[:, :, 0]


@torch.no_grad()
def main() -> tuple[dict[str, float], hookline.HookError]:
    """Print and return how far each hook moves the logits, and the error of the last."""
    model = hookline.load("tinyworld")
    plain = model("The cat sat")
    moved = {}
    for hook in (returns_a_tensor, returns_none, writes_in_place, writes_and_returns):
        logits = model.run_with_hooks("The cat sat", fwd_hooks=[("blocks.3.attn.hook_z", hook)])
        moved[hook.__name__] = (logits - plain).abs().max().item()
        print(f"{hook.__name__:22} moves the logits by {moved[hook.__name__]:.2f}")
    try:
        model.run_with_hooks("The cat sat", fwd_hooks=[("blocks.3.attn.hook_z", returns_another_shape)])
    except hookline.HookError as error:
        print(f"{'returns_another_shape':22} raises: {error}")
        return moved, error
    raise AssertionError("a wrong shape went through")


if __name__ == "__main__":
    main()
