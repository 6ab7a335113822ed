"""Fold value biases into the output bias: rows of a pattern sum to 1, so a value bias adds the same everywhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hookline.errors import HooklineError
from hookline.transformer.anatomy import Stack
from hookline.transformer.precision import upcast
from hookline.transformer.sites import head_counts
from hookline.weights.matrices import linear, without_first
from hookline.weights.processing.folding import as_wide, check_called
from hookline.weights.processing.readers import path_of, reading_of
from hookline.weights.processing.swaps import Swaps

if TYPE_CHECKING:
    from hookline.transformer.index import ModelPoints


def fold_value_biases(points: ModelPoints, swaps: Swaps, run: Callable[[], Any]) -> None:
    """Move the value biases through the output projection of each head into the output bias."""
    called = reading_of(points.root, (), run).called
    for stack in points.anatomy.stacks:
        for index, block in enumerate(stack.blocks):
            for part, attention in (("attn", block), ("cross_attn", block.cross)):
                name = f"{stack.name}.{index}.{part}.hook_v"
                if (
                    attention is not None
                    and attention.attn is not None
                    and _fold(points, name, attention.attn, attention.o, stack, swaps)
                ):
                    check_called(points.root, attention.attn, called)


def _fold(points: ModelPoints, name: str, attn: nn.Module, o: nn.Module | None, stack: Stack, swaps: Swaps) -> bool:
    """Fold the value bias of one attention module; returns whether there was one."""
    point = points.find(name)
    _, bias = linear(point.site.module)
    if bias is None:
        return False
    _check_mixing(points, attn, stack, name)
    if o is None:
        raise HooklineError(f"{name} has a bias, but no output projection was found to fold it into")
    matrix, output_bias = linear(o)
    lens, heads = without_first(point.site.lens), head_counts(attn, stack.config)[0]
    values = lens.get(bias)
    wide = upcast(matrix)
    value_bias = as_wide(values.repeat_interleave(heads // len(values), 0).flatten(), wide)
    if len(value_bias) != len(wide):
        raise HooklineError(f"{path_of(points.root, o)} reads more than the mixed values of the heads")
    swaps.put(o, "bias", value_bias @ wide if output_bias is None else value_bias @ wide + output_bias)
    swaps.put(point.site.module, "bias", lens.put(bias, torch.zeros_like(values)))
    return True


def _check_mixing(points: ModelPoints, attn: nn.Module, stack: Stack, name: str) -> None:
    """Raise unless patterns sum to 1 and the mixed values go straight into the output projection."""
    kind = stack.config.model_type
    if stack.architecture.attention_sinks or attn._parameters:
        raise HooklineError(f"{path_of(points.root, attn)} may have attention sinks: its patterns need not sum to 1")
    if stack.architecture.gated_values:
        raise HooklineError(f"{kind} has a gate, a norm or a factor between {name} and the output projection")
    if getattr(stack.config, "clip_qkv", None) is not None:
        raise HooklineError(f"{kind} clips its values including the bias, so the bias of {name} cannot be folded")
