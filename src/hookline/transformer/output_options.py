"""Options of a model's forward that add to its output object or select another, which logits alone cannot show."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def ignored_option(options: Mapping[str, Any], config: Any, *, is_own: bool, is_default: bool, starts: bool) -> str:
    """Return the first option that a call would ignore, as it was written; "" if there is none.

    `is_own` says that the call returns the model's own output, and `is_default` that it does so if there are labels.
    With `starts`, at a layer, no cache of keys and values is made. What is off, and what the model does by itself, is
    not ignored.
    """
    has_output = is_own or (is_default and options.get("labels") is not None)
    makes_cache = not starts and (has_output or getattr(config, "use_cache", False))
    for name, value in options.items():
        if name == "use_cache":
            is_ignored = bool(value) and not makes_cache and options.get("past_key_values") is None
        elif name == "return_dict":
            is_ignored = value is False and not is_own  # the loss is found by its name
        else:
            is_ignored = name.startswith(("output_", "return_")) and bool(value) and not has_output
        if is_ignored:
            return f"{name}={value!r}"
    return ""
