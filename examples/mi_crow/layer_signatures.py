"""Refer to a layer by its module's name, by its index, or by the module itself; list all layers."""

from __future__ import annotations

from torch import Tensor

import hookline


def main() -> tuple[list[str], dict[str, Tensor]]:
    """Print some layers; return the names of all, and what a hook received for each way to refer to block 0."""
    model = hookline.load("tinyworld")
    layers = [name for name, _ in model.module.named_modules() if name]
    print(f"{len(layers)} layers, such as {', '.join(layers[3:10])}")

    seen: dict[str, Tensor] = {}
    ways = {"name": "transformer.h.0", "number": 0, "module": model.module.transformer.h[0]}
    for way, signature in ways.items():

        def keep(activation: Tensor, way: str = way) -> None:
            seen[way] = activation

        unregister = model.add_hook(signature, keep)
        model("Hello, world!")
        unregister()
        print(f"by {way:7} {list(seen[way].shape)}")
    return layers, seen


if __name__ == "__main__":
    main()
