"""Unmasked padding: token ids without a mask that begin or end with padding tokens."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

from hookline.errors import HooklineWarning, users_level
from hookline.model import HookedModel
from hookline.store.examples import Example
from hookline.store.token_rows import Tokens


def warn_of_padding(
    model: HookedModel, examples: Sequence[Example], texts: Sequence[Tensor], first: int, warned: set[str]
) -> None:
    """Warn once per harvest if token ids without a mask look padded: they are stored as they are."""
    if "padding" in warned:
        return
    bare = [row for row, each in enumerate(examples) if isinstance(each, Tensor) or _is_unmasked(each)]
    suspects = [row for row in bare if _looks_padded(model, texts[row])] or _padded_in_batch(model, bare, texts)
    if suspects:
        warned.add("padding")
        warnings.warn(
            f"example {first + suspects[0]} looks padded, and its padding is stored as if it were text: pass examples "
            f"as {{'input_ids': …, 'attention_mask': …}} (with a mask of ones if it is text), or the texts themselves",
            HooklineWarning,
            stacklevel=users_level(),
        )


def _is_unmasked(example: Example) -> bool:
    return isinstance(example, Tokens) and not example.is_masked


def _looks_padded(model: HookedModel, ids: Tensor) -> bool:
    """Whether it begins or ends with padding. If the padding token also ends texts, it must appear twice."""
    tokenizer = model.tokenizer
    pad = tokenizer.pad_token_id if tokenizer is not None else getattr(model.module.config, "pad_token_id", None)
    if pad is None or not len(ids):
        return False
    is_for_padding_only = tokenizer is not None and pad not in (tokenizer.eos_token_id, tokenizer.bos_token_id)
    least = 1 if is_for_padding_only else 2
    return any(part == [pad] * least for part in (ids[:least].tolist(), ids[-least:].tolist()))


def _padded_in_batch(model: HookedModel, bare: list[int], texts: Sequence[Tensor]) -> list[int]:
    """The first row that looks padded in a batch of rows of the same length."""
    rows = [texts[row] for row in bare]
    if model.tokenizer is None or len(rows) < 2 or len({len(row) for row in rows}) != 1 or not len(rows[0]):
        return []
    row = model.text.padded_row(torch.stack(rows))
    return [] if row is None else [bare[row]]
