"""One way to run with hooks, whatever they hook: inputs and outputs, layers, attention and MLPs, in one context.

A hook at a `.pre` point changes what a part is given, another what it gives. All are there inside the context, for
every call and every step, and gone after it. A place that does not exist is an error before anything runs.
"""

from __future__ import annotations

import torch
from torch import Tensor

import hookline

PROMPT = "The capital of France is"


@torch.no_grad()
def main() -> tuple[dict[str, int], bool, str]:
    """Print how often each hook ran; return that, whether the model is as before, and what a wrong name raises."""
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
        print(f"{name:16} ran {times} times: for one call, and for each step of a generation")
    as_before = bool(model(PROMPT).equal(before)) and not changed.equal(before)

    try:
        model.run_with_hooks(PROMPT, fwd_hooks=[("lm.mlp.9.out", count)])
    except hookline.UnknownPointError as error:
        message = str(error)
    print(f"layer 9: {message}")
    return ran, as_before, message


if __name__ == "__main__":
    main()
