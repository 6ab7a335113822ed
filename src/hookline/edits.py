"""Edits as data: what to do to an activation, as a value that prints, compares, saves and loads.

    >>> from hookline.edits import zero
    >>> logits = model.run_with_hooks(prompt, fwd_hooks=[("blocks.3.attn.hook_z", zero(head=5))])

Every edit takes `pos=`, `head=`, `neuron=` and `mask=`. See docs/hook-objects.md.
"""

from hookline.hooks.data_edits import DataEdit, add, freeze, mean, noise, project_out, reflect, replace, scale, zero
from hookline.hooks.editfile import load_edits as load
from hookline.hooks.editfile import save

__all__ = [
    "zero",
    "mean",
    "replace",
    "add",
    "scale",
    "noise",
    "freeze",
    "project_out",
    "reflect",
    "save",
    "load",
    "DataEdit",
]


def __dir__() -> list[str]:
    return sorted(__all__)
