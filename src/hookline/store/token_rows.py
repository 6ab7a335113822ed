"""Tokens: one example as token ids, with the other columns of its row, and without padding."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hookline.errors import HooklineError


@dataclass(frozen=True)
class Tokens:
    """The token ids of one example, from a row with columns."""

    ids: Tensor
    is_masked: bool = False
    """Whether an attention_mask marked the padding."""
    extra: dict[str, Tensor] = field(default_factory=dict)
    """The columns with one integer per token, such as token_type_ids."""
    others: tuple[str, ...] = ()
    """The names of all other columns."""


def as_tokens(item: Any) -> Tensor | Tokens:
    """Convert an item that is not text to token ids, and check it."""
    if not isinstance(item, Mapping):
        return _ids(item)
    row = {name: value for name, value in item.items() if value is not None and name != "labels"}
    ids, mask = _ids(row.pop("input_ids", None)), row.pop("attention_mask", None)
    real = torch.ones(len(ids), dtype=torch.bool) if mask is None else _checked_mask(ids, mask)
    columns = {name: _numbers(value) for name, value in row.items()}
    extra = {name: x for name, x in columns.items() if x is not None and x.shape == ids.shape and _is_whole(x)}
    others = tuple(name for name in columns if name not in extra)
    cut = {name: x[real].long().contiguous() for name, x in extra.items()}
    return Tokens(ids[real].contiguous(), mask is not None, cut, others)


def raw(example: str | Tensor | Tokens) -> bytes:
    """The bytes of an example, for its checksum."""
    if isinstance(example, str):
        return example.encode("utf-8", "surrogatepass")
    if isinstance(example, Tokens):
        return raw(example.ids) + b"".join(name.encode() + raw(x) for name, x in sorted(example.extra.items()))
    return (
        repr((example.dtype, tuple(example.shape))).encode() + example.reshape(-1).view(torch.uint8).numpy().tobytes()
    )


def _ids(given: Any) -> Tensor:
    ids = _numbers(given)
    if ids is None:
        raise HooklineError(f"an example is a text or one row of token ids, not {_advice(given)}")
    if ids.ndim != 1 or (len(ids) and not _is_whole(ids)):
        raise HooklineError(
            f"an example is a text or one row of token ids, not {list(ids.shape)} numbers of {ids.dtype}"
        )
    return ids.long().contiguous()


def _advice(given: Any) -> str:
    """A description of the input, and what to do about it."""
    if isinstance(given, Mapping):
        return f"columns {list(given)}: choose one with column=…"
    if not isinstance(given, list | tuple):
        return f"{given!r:.60}" + (": decode it first" if isinstance(given, bytes) else "")
    if given and all(isinstance(each, Mapping) and "role" in each for each in given):
        return "a chat: convert it to text with tokenizer.apply_chat_template(messages, tokenize=False)"
    if isinstance(given, tuple):
        return f"{len(given)} items in a tuple: choose one with column=0 …"
    return f"a list of {len(given)} items ({given[0]!r:.40} …): pass one example at a time, not batches"


def _numbers(given: Any) -> Tensor | None:
    if given is None or isinstance(given, str | bytes | Mapping):
        return None
    try:
        return torch.as_tensor(given).cpu()
    except (TypeError, ValueError, RuntimeError):  # texts, or rows of different lengths
        return None


def _is_whole(x: Tensor) -> bool:
    return not (x.is_floating_point() or x.is_complex() or x.dtype == torch.bool)


def _checked_mask(ids: Tensor, given: Any) -> Tensor:
    mask = _numbers(given)
    mask = mask.bool() if mask is not None else torch.zeros(0, dtype=torch.bool)
    places = mask.nonzero().flatten()
    if mask.shape != ids.shape or (len(places) and int(places[-1] - places[0]) + 1 != len(places)):
        raise HooklineError("an attention_mask must be as long as the tokens and may mask padding only at the ends")
    return mask
