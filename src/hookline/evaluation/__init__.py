"""Edits under evaluation: models for lm-eval (`hookline.evaluation.lm_harness`) and Inspect (`.inspect_provider`).

Both are that library's own model for transformers, with edits attached while it runs; without edits the results are
the same. They need `pip install "hookline[lm-eval]"` and `pip install "hookline[inspect]"`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

from hookline import edits as edit_files
from hookline.model import HookedModel

Edits = str | os.PathLike[str] | Iterable[tuple[Any, Any]] | None
"""The folder of `hookline.edits.save`, or pairs `(name, edit or function)`."""


def edits_for(model: HookedModel, edits: Edits) -> list[tuple[Any, Any]]:
    """Return the pairs for `fwd_hooks=`; names that the model does not have raise an error."""
    pairs = edit_files.load(edits) if isinstance(edits, str | os.PathLike) else list(edits or ())
    if pairs:
        model.plan(fwd_hooks=pairs)
    return pairs
