"""When a hook fails, the error names the hook and its point, and the model is unchanged."""

from __future__ import annotations

import torch
from torch import Tensor

import hookline


def broken(activation: Tensor, hook: hookline.HookPoint) -> Tensor:
    """A hook with a mistake in it."""
    return activation @ torch.ones(7)


@torch.no_grad()
def main() -> tuple[hookline.HookError, bool]:
    """Print the error; return it, and whether the model's output is the same as before."""
    model = hookline.load("tinyworld")
    before = model("Hello, world!")
    try:
        model.run_with_hooks("Hello, world!", fwd_hooks=[("transformer.h.0.attn.c_attn", broken)])
    except hookline.HookError as error:
        failed = error
    print(f"point: {failed.point.name}\nhook: {failed.hook.__name__}\nerror: {failed.original_error!r}")
    same = bool(model("Hello, world!").equal(before))
    print(f"the model is unchanged: {same}")
    return failed, same


if __name__ == "__main__":
    main()
