"""Edits as data: what to do to an activation, as a value that prints, compares, saves and loads.

    >>> from hookline.edits import zero
    >>> logits = model.run_with_hooks(prompt, fwd_hooks=[("blocks.3.attn.hook_z", zero(head=5))])

Every edit takes `pos=`, `head=`, `neuron=` and `mask=`. See docs/hook-objects.md.
"""

from typing import TYPE_CHECKING, Any

from hookline.hooks import data_edits
from hookline.hooks.data_edits import EDITS
from hookline.hooks.data_edits import DataEdit as DataEdit
from hookline.hooks.editfile import load_edits as load
from hookline.hooks.editfile import save as save

if TYPE_CHECKING:  # with their arguments; to a type checker any other edit is Any
    zero, mean, replace, freeze = data_edits.Zero, data_edits.Mean, data_edits.Replace, data_edits.Freeze
    add, scale, noise = data_edits.Add, data_edits.Scale, data_edits.Noise
    project_out, reflect, cap = data_edits.ProjectOut, data_edits.Reflect, data_edits.Cap

__all__ = [*EDITS.keys(), "save", "load", "DataEdit"]  # griffe, which reads this for the site, fails on `*EDITS`


def __getattr__(name: str) -> Any:
    if name not in EDITS:
        raise AttributeError(f"module 'hookline.edits' has no attribute {name!r}; the edits are {', '.join(EDITS)}")
    return EDITS[name]


def __dir__() -> list[str]:
    return sorted([*EDITS, "save", "load", "DataEdit"])
