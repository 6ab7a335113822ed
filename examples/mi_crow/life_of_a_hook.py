"""The lifecycle of a hook: created, registered, disabled, enabled, unregistered."""

from __future__ import annotations

from torch import Tensor

import hookline


def main() -> list[int]:
    """Print and return how many activations the detector has captured after each stage."""
    model = hookline.load("tinyworld")
    captured: list[Tensor] = []
    enabled = True

    def detector(activation: Tensor, hook: hookline.HookPoint) -> None:  # created: nothing happens yet
        if enabled:
            captured.append(activation)

    counts = []

    def run(stage: str) -> None:
        model("Hello, world!")
        counts.append(len(captured))
        print(f"{stage:12} {counts[-1]} captured")

    run("created")
    unregister = model.add_hook("transformer.h.0.attn.c_attn", detector)
    try:
        run("registered")
        enabled = False
        run("disabled")
        enabled = True
        run("enabled")
    finally:
        unregister()
    run("unregistered")
    return counts


if __name__ == "__main__":
    main()
