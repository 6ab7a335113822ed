"""Attach one hook to every point that a filter selects; here the filter is a function of the name."""

from __future__ import annotations

from torch import Tensor

import hookline


def is_pattern(name: str) -> bool:
    """Return whether the point is an attention pattern."""
    return "attn" in name and "pattern" in name


def main() -> dict[str, tuple[int, ...]]:
    """Print and return the shape at each point where the hook fired."""
    model = hookline.load("tinyworld")
    seen: dict[str, tuple[int, ...]] = {}

    def look(activation: Tensor, hook: hookline.HookPoint) -> None:
        print(f"layer {hook.layer()}: at {hook.name} the shape is {list(activation.shape)}")
        seen[hook.name] = tuple(activation.shape)

    model.run_with_hooks("Hello, world", fwd_hooks=[(is_pattern, look)])
    return seen


if __name__ == "__main__":
    main()
