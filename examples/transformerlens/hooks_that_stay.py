"""Hooks that stay until they are removed: temporary and permanent hooks, their order, and how to remove them."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

import hookline


def main() -> dict[str, list[str]]:
    """Print and return which hooks fired at each stage."""
    model = hookline.load("tinyworld")
    fired: list[str] = []

    def named(name: str) -> Callable[[Tensor], None]:
        def hook(z: Tensor) -> None:
            fired.append(name)

        return hook

    stages: dict[str, list[str]] = {}

    def run(stage: str) -> None:
        fired.clear()
        model("Hello, world")
        stages[stage] = list(fired)
        print(f"{stage:38} {', '.join(fired) or 'nothing'}")

    point = model.blocks[3].attn.hook_z
    point.add_hook(named("temporary"), dir="fwd")
    point.add_hook(named("permanent"), dir="fwd", is_permanent=True)
    undo = point.add_hook(named("first"), prepend=True)
    run("all three, one of them prepended")
    undo()
    run("one of them removed")
    with model.hooks(fwd_hooks=[(point, named("context"))]):
        run("inside a context")
    run("after the context")
    model.remove_all_hook_fns()
    run("after remove_all_hook_fns()")
    model.remove_all_hook_fns(including_permanent=True)
    run("after including_permanent=True")
    return stages


if __name__ == "__main__":
    main()
