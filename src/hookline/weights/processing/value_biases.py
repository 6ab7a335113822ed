"""Value biases: as a pattern's rows sum to 1, what they add is the same everywhere, so the output's bias may add it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hookline.errors import HooklineError
from hookline.transformer.anatomy import Stack
from hookline.transformer.sites import head_counts
from hookline.weights.matrices import linear, without_first
from hookline.weights.processing.folding import as_wide, check_called
from hookline.weights.processing.readers import path_of, reading_of
from hookline.weights.processing.swaps import Swaps

if TYPE_CHECKING:
    from hookline.transformer.index import ModelPoints


def fold_value_biases(points: ModelPoints, swaps: Swaps, run: Callable[[], Any]) -> None:
    """The values have no bias, and the output projection's has what it added, through each head's part of it."""
    called = reading_of(points.root, (), run).called
    for stack in points.anatomy.stacks:
        for index, block in enumerate(stack.blocks):
            found = [("attn", block.attn, block.o)]
            found += [("cross_attn", block.cross.attn, block.cross.o)] if block.cross is not None else []
            for part, attn, o in found:
                if attn is not None and _fold(points, f"{stack.name}.{index}.{part}.hook_v", attn, o, stack, swaps):
                    check_called(points.root, attn, called)


def _fold(points: ModelPoints, name: str, attn: nn.Module, o: nn.Module | None, stack: Stack, swaps: Swaps) -> bool:
    """Whether there was a bias to fold."""
    point = points.find(name)
    _, bias = linear(point.site.module)
    if bias is None:
        return False
    _check_mixing(points, attn, stack, name)
    if o is None:
        raise HooklineError(f"{name} has a bias, but no output projection is known that could take it")
    matrix, own = linear(o)
    lens, heads = without_first(point.site.lens), head_counts(attn, stack.config)[0]
    values = lens.get(bias)
    wide = matrix.float() if matrix.dtype != torch.float64 else matrix
    each = as_wide(values.repeat_interleave(heads // len(values), 0).flatten(), wide)
    if len(each) != len(wide):
        raise HooklineError(f"{path_of(points.root, o)} reads more than the heads' mixes of values")
    swaps.put(o, "bias", each @ wide if own is None else each @ wide + own)
    swaps.put(point.site.module, "bias", lens.put(bias, torch.zeros_like(values)))
    return True


def _check_mixing(points: ModelPoints, attn: nn.Module, stack: Stack, name: str) -> None:
    """The pattern's rows must sum to 1, and nothing may come between the values and the output projection."""
    kind = stack.config.model_type
    if stack.architecture.attention_sinks or attn._parameters:
        raise HooklineError(
            f"{path_of(points.root, attn)} has attention sinks, or the like: its patterns need not sum to 1"
        )
    if stack.architecture.gated_values:
        raise HooklineError(f"{kind} has a gate, a norm or a factor between {name} and the output projection")
    if getattr(stack.config, "clip_qkv", None) is not None:
        raise HooklineError(f"{kind} clips its values, bias and all: the bias of {name} cannot be taken out")
