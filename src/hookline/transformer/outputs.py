"""The outputs of models: which tensor of an output counts as its result."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from hookline.errors import HooklineError, a_type

_OUTCOMES = ("logits", "prediction_logits", "logits_per_image", "last_hidden_state")


def has_outcome(output: Any) -> bool:
    """Whether an output has one of those that `outcome` returns; not that of a question answerer, a backbone, …"""
    return isinstance(output, Tensor) or (isinstance(output, Mapping) and any(name in output for name in _OUTCOMES))


def outcome(output: Any) -> Tensor:
    """The logits; image-text similarities of CLIP-like models; else the last hidden state."""
    if isinstance(output, Tensor):  # a wrapped model inside another wrapper, such as peft
        return output
    for name in _OUTCOMES:
        if name in output:
            # Not by ModelOutput's own method, which makes a copy of everything.
            return dict.__getitem__(output, name) if isinstance(output, dict) else output[name]
    description = f"{a_type(output)} has {', '.join(output)}"
    raise HooklineError(f"{description}, none of which is the output of a language model: call model.module instead")
