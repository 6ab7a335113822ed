"""One context for all hooks: on inputs and outputs, on layers, attention and MLPs.

A hook at a `.pre` point changes the input of a module, other hooks its output. All hooks fire inside the context, in
every call and at every step, and are removed after it. A point that does not exist raises an error before anything
runs.
"""

from __future__ import annotations

import torch
from torch import Tensor

import hookline

PROMPT = "The capital of France is"


@torch.no_grad()
def main() -> tuple[dict[str, int], bool, str]:
    """Print how often each hook fired; return that, whether the model is unchanged, and the error for a wrong name."""
    model = hookline.load("tinyworld")
    before = model(PROMPT)
    ran: dict[str, int] = {}

    def count(activation: Tensor, hook: hookline.HookPoint) -> None:
        ran[hook.name] = ran.get(hook.name, 0) + 1

    hooks = [
        ("lm.layer.2.pre", lambda resid: resid * 0.5),
        ("lm.layer.2.pre", count),
        ("lm.attn.2.out", count),
        ("lm.mlp.2.out", torch.zeros_like),
        ("lm.layer.2.post", count),
    ]
    with model.hooks(fwd_hooks=hooks):
        changed = model(PROMPT)
        model.generate(PROMPT, max_new_tokens=3, do_sample=False)
    for name, times in ran.items():
        print(f"{name:16} fired {times} times: once in a call, and at each step of a generation")
    as_before = bool(model(PROMPT).equal(before)) and not changed.equal(before)

    try:
        model.run_with_hooks(PROMPT, fwd_hooks=[("lm.mlp.9.out", count)])
    except hookline.UnknownPointError as error:
        message = str(error)
    print(f"layer 9: {message}")
    return ran, as_before, message


if __name__ == "__main__":
    main()
