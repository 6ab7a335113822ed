"""Hooks on several layers, several hooks on one layer in order, and a hook that acts only sometimes."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

import hookline

PROMPTS = ["The capital of France is", "The capital of Germany is"]


@torch.no_grad()
def main() -> tuple[dict[str, Tensor], list[str]]:
    """Print what each detector captured; return that, and the two answers, one of which was changed."""
    model = hookline.load("tinyworld")
    seen: dict[str, Tensor] = {}

    def detect(name: str) -> Callable[[Tensor], None]:
        def keep(activation: Tensor) -> None:
            seen[name] = activation

        return keep

    def silence_germany(activation: Tensor) -> None:
        for row, prompt in enumerate(PROMPTS):
            if "Germany" in prompt:
                activation[row] = 0

    hooks = [
        ("transformer.h.0", detect("layer 0")),
        ("transformer.h.3", detect("layer 3, before")),
        ("transformer.h.3", silence_germany),
        ("transformer.h.3", detect("layer 3, after")),
    ]
    logits = model.run_with_hooks(PROMPTS, fwd_hooks=hooks)
    for name, activation in seen.items():
        print(f"{name:16} norm of each row: {', '.join(f'{row.norm():.1f}' for row in activation)}")
    answers = [model.to_string(row) for row in logits[:, -1].argmax(-1)]
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        print(f"{prompt} …{answer!r}")
    return seen, answers


if __name__ == "__main__":
    main()
