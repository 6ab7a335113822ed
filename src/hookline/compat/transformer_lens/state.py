"""State dicts with TransformerLens's names: loading weights, and naming parameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from hookline.compat.transformer_lens.entries import Entry, all_entries, stored, weights_of
from hookline.errors import HooklineError

if TYPE_CHECKING:
    from hookline.compat.transformer_lens.hooked_transformer import HookedTransformer

_NOT_LEARNED = ("attn.mask", "attn.IGNORE", "attn.rotary_sin", "attn.rotary_cos", "attn.alibi")
"""Redundant entries of TransformerLens's state dicts."""


def load(model: HookedTransformer, state: Mapping[str, Tensor], *, strict: bool) -> tuple[list[str], list[str]]:
    """Load all given weights; returns the missing and the unexpected names.

    A weight may also go by its parameter's own name in the model.
    """
    own = {name: Entry(each, each) for name, each in stored(model.module)}
    known = own | all_entries(model)
    given = {name: value for name, value in state.items() if not _says_nothing(model, name)}
    told = {id(own[name].parameter) for name in given if name in own}
    if "pos_embed.W_pos" in given and "pos_embed.W_pos" in known:  # what more there may be is for padding
        told.add(id(known["pos_embed.W_pos"].parameter))
    missing = [n for n, entry in weights_of(model).items() if n not in given and id(entry.parameter) not in told]
    unexpected = [name for name in given if name not in known]
    if strict and (missing or unexpected):
        raise HooklineError(f"weights do not match: missing {missing}, unexpected {unexpected}")
    _check_tied(known, given)
    if model.cfg.gated_mlp:
        given = _without_bias_after_gate(known, given)
    of_model = [name for name in given if name in own]  # first: a part of it may be given by another name too
    for name in (*of_model, *(name for name in given if name in known and name not in own)):
        known[name].write(name, given[name])
    return missing, unexpected


def _says_nothing(model: HookedTransformer, name: str) -> bool:
    """TransformerLens keeps more than weights, and learned positions that it never reads beside those by distance."""
    is_unread = model.cfg.positional_embedding_type == "alibi" and name == "pos_embed.W_pos"
    return name.endswith(_NOT_LEARNED) or is_unread


def _without_bias_after_gate(known: dict[str, Entry], given: dict[str, Tensor]) -> dict[str, Tensor]:
    """TransformerLens adds a gated MLP's `b_in` to the product of its branches: it goes through W_out into `b_out`."""
    new = dict(given)
    for name in [name for name in given if name.endswith("mlp.b_in") and name in known and bool(given[name].any())]:
        out, bias = name.replace("b_in", "W_out"), name.replace("b_in", "b_out")
        if known[name].parameter is None and out in given and bias in given:
            new[bias] = given[bias] + given[name] @ given[out]
            new[name] = torch.zeros_like(given[name])
    return new


def _check_tied(known: dict[str, Entry], given: Mapping[str, Tensor]) -> None:
    embed, unembed = known["embed.W_E"], known.get("unembed.W_U")
    if unembed is None or unembed.parameter is not embed.parameter or not {"embed.W_E", "unembed.W_U"} <= set(given):
        return
    if not torch.allclose(given["embed.W_E"].T / embed.factor, given["unembed.W_U"]):
        raise HooklineError("the embedding and unembedding of this model are tied, but W_E and W_U differ")


def named_parameters(model: HookedTransformer) -> Iterator[tuple[str, nn.Parameter]]:
    """The model's own parameters; each that is a weight of TransformerLens's, laid out alike, goes by its name."""
    names: dict[int, list[str]] = {}
    for name, entry in all_entries(model).items():
        if entry.is_the_parameter:
            names.setdefault(id(entry.parameter), []).append(name)
    for own_name, parameter in model.module.named_parameters():
        yield names.get(id(parameter), [own_name])[0], parameter
