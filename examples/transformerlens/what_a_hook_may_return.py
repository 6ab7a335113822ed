"""What a hook may return: a tensor replaces the activation, None keeps it, including in-place changes.

In some libraries, a hook that edits in place and does not return the tensor has no effect, or breaks the run. Here both
ways of editing work, and a result that does not fit raises an error.
"""

from __future__ import annotations

import torch
from torch import Tensor

import hookline


def returns_a_tensor(z: Tensor, *, hook: hookline.HookPoint) -> Tensor:
    """Replace the activation by another tensor of the same shape."""
    return torch.zeros_like(z)


def returns_none(z: Tensor, hook: hookline.HookPoint) -> None:
    """Change nothing."""


def writes_in_place(z: Tensor) -> None:
    """Edit in place without returning. A hook may also omit its second argument."""
    z.zero_()


def writes_and_returns(z: Tensor, hook: hookline.HookPoint) -> Tensor:
    """Edit in place and return: the usual pattern, with the same effect."""
    z[:] = 0
    return z


def returns_another_shape(z: Tensor) -> Tensor:
    """Return one head instead of all: an error, because the shape differs."""
    return z[:, :, 0]


@torch.no_grad()
def main() -> tuple[dict[str, float], hookline.HookError]:
    """Print and return how much each hook changes the logits, and the error of the last one."""
    model = hookline.load("tinyworld")
    plain = model("The cat sat")
    moved = {}
    for hook in (returns_a_tensor, returns_none, writes_in_place, writes_and_returns):
        logits = model.run_with_hooks("The cat sat", fwd_hooks=[("blocks.3.attn.hook_z", hook)])
        moved[hook.__name__] = (logits - plain).abs().max().item()
        print(f"{hook.__name__:22} changes the logits by {moved[hook.__name__]:.2f}")
    try:
        model.run_with_hooks("The cat sat", fwd_hooks=[("blocks.3.attn.hook_z", returns_another_shape)])
    except hookline.HookError as error:
        print(f"{'returns_another_shape':22} raises: {error}")
        return moved, error
    raise AssertionError("a wrong shape went through")


if __name__ == "__main__":
    main()
