"""Tiny models of transformers as networks of programs: how they are built, and what they get."""

from __future__ import annotations

import warnings
from contextlib import suppress
from functools import cache
from typing import Any

import tiny_models
import tiny_vision
import torch
from fuzz.changes import Text
from fuzz.program import Language, Run
from torch import Tensor, nn
from transformers.utils import logging

FAMILIES = {
    "causal": tuple(tiny_models.CAUSAL),
    "encoder": tuple(tiny_models.ENCODERS),
    "seq2seq": tuple(tiny_models.SEQ2SEQ),
    "vision": (*tiny_vision.ENCODERS, *tiny_vision.VISION_LANGUAGE),
}
PAD, BATCH, LENGTH = 0, 2, 7


def build(network: Language) -> nn.Module:
    """The model in eval mode. Programs share it, as building one takes longer than running a program."""
    return built(network.kind, network.family, network.dtype, network.attention)


@cache
def built(kind: str, family: str, dtype: str, attention: str) -> nn.Module:
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")
        logging.set_verbosity_error()
        makers = {
            "causal": tiny_models.causal_lm,
            "encoder": tiny_models.encoder,
            "seq2seq": tiny_models.seq2seq,
            "vision": tiny_vision.module_of,
        }
        module: Any = makers[family](kind)
        if attention != module.config._attn_implementation:
            with suppress(ValueError):  # some have only one way
                module.set_attn_implementation(attention)
        module.to(getattr(torch, dtype)).eval()
    assert isinstance(module, nn.Module)
    return module


def inputs(network: Language, run: Run) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Keyword arguments for one run: token ids, and a mask where the batch is padded."""
    options, dtype = dict(run.options), getattr(torch, network.dtype)
    batch, length = options.get("batch", BATCH), options.get("length", LENGTH)
    if network.family == "vision":
        given = tiny_vision.inputs_of(network.kind, rows=batch, seed=run.seed)
    else:
        given = tiny_models.inputs(build(network), run.seed, batch, length)
    given = {name: x.to(dtype) if x.is_floating_point() else x.clone() for name, x in given.items()}
    if "padding" in options:
        mask = mask_of(run)
        given["input_ids"] = given["input_ids"].masked_fill(mask == 0, PAD)
        given["attention_mask"] = mask
    return (), given


@cache
def first_state(network: Language) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The parameters and buffers of a model, and clones of them as they were at first."""
    module = build(network)
    named = (*module.named_parameters(), *module.named_buffers())
    return dict(named), {name: x.detach().clone() for name, x in named}


@cache
def draws(network: Language) -> bool:
    """Whether a model draws random numbers, in eval mode too."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        before = torch.manual_seed(0).get_state()
        build(network)(**inputs(network, Run())[1])
        return not torch.equal(before, torch.get_rng_state())


def text(mask: Tensor) -> Text:
    """Where the tokens of each row are, from a mask that is 1 for tokens."""
    return Text((mask.cumsum(-1) - 1).masked_fill(mask == 0, -1), mask.sum(-1))


def mask_of(run: Run) -> Tensor:
    """The mask of a padded batch."""
    options = dict(run.options)
    return padding(options["padding"], options.get("batch", BATCH), options.get("length", LENGTH))


def padding(side: str, batch: int, length: int) -> Tensor:
    """A mask of 1 for tokens: each row has another number of them, the first row all."""
    lengths = torch.tensor([max(2, length - 2 * row) for row in range(batch)])
    columns = torch.arange(length)
    mask = columns >= (length - lengths)[:, None] if side == "left" else columns < lengths[:, None]
    return mask.long()
