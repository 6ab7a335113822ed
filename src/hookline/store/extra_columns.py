"""Columns of the data besides the tokens: a harvest passes those that the model accepts on, or refuses them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hookline.engine.signatures import parameters_of
from hookline.errors import HooklineError
from hookline.model import HookedModel
from hookline.store.examples import Example
from hookline.store.token_rows import Tokens

_TYPES = "token_type_ids"


def extra_columns(
    model: HookedModel, examples: Sequence[Example], texts: Sequence[Tensor], first: int
) -> dict[str, Tensor]:
    """The columns that the model accepts and that have one number per token, as [example, position].

    Other columns that it accepts are refused; columns that it does not accept are ignored.
    """
    takes = {*parameters_of(model.module)[0]}
    rows = [(row, each) for row, each in enumerate(examples) if isinstance(each, Tokens) and len(texts[row])]
    found: dict[str, dict[int, Tensor]] = {}
    for row, example in rows:
        _check(model, example, takes, first + row)
        for name in takes & {*example.extra}:
            found.setdefault(name, {})[row] = example.extra[name]
    some = [row for row, text in enumerate(texts) if len(text)]
    acting = {name: columns for name, columns in sorted(found.items()) if _acts(name, columns)}
    return {name: _padded(name, columns, texts, some, first) for name, columns in acting.items()}


def _check(model: HookedModel, example: Tokens, takes: set[str], number: int) -> None:
    unfit = {*example.others} | {name for name in example.extra if name.startswith("decoder_")}
    has_types = getattr(model.module.config, "type_vocab_size", None) is not None
    if not has_types and bool(example.extra.get(_TYPES, torch.zeros(1)).any()):  # some add the embedding of a token
        unfit.add(_TYPES)
    if refused := sorted(takes & unfit):
        raise HooklineError(
            f"example {number} has {', '.join(refused)}, which this model accepts but a harvest does not pass on: "
            f"remove it from the data, or use run_with_cache. A harvest passes on columns with one number per token, "
            f"such as position_ids, and token_type_ids if the model has token types"
        )


def _acts(name: str, columns: dict[int, Tensor]) -> bool:
    """Whether a column has an effect: token types that are all 0 are the default."""
    return name != _TYPES or any(bool(each.any()) for each in columns.values())


def _padded(name: str, columns: dict[int, Tensor], texts: Sequence[Tensor], some: list[int], first: int) -> Tensor:
    without = [row for row in some if row not in columns]
    if without and name != _TYPES:
        raise HooklineError(
            f"example {first + next(iter(columns))} has {name}, but example {first + without[0]} does not: pass it "
            f"for all examples or for none"
        )
    padded = torch.zeros(len(texts), max(map(len, texts)), dtype=torch.long)
    for row, column in columns.items():
        padded[row, : len(texts[row])] = column[: len(texts[row])]
    return padded
