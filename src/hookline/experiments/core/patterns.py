"""Attention patterns, read layer by layer while a model runs, so that they are never all in memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from hookline.errors import HooklineError
from hookline.experiments.core.sweep import SweepPoints
from hookline.model import HookedModel


def read_patterns(
    model: HookedModel,
    where: SweepPoints,
    read: Callable[[Float[Tensor, "batch head pos key"], int], Float[Tensor, "head ..."]],
    run: Callable[[], Any],
) -> Float[Tensor, "step layer head ..."]:
    """What `read` returns for the pattern of each layer, and the number of its step, during `run`."""
    readings: dict[str, list[Tensor]] = {name: [] for name in where.names}

    def note(pattern: Tensor, hook: Any) -> None:
        readings[hook.name].append(read(pattern.detach(), len(readings[hook.name])).float().cpu())

    with torch.no_grad(), model.hooks(fwd_hooks=[(name, note) for name in where.names]):
        run()
    heads = {name: len(by_step[0]) for name, by_step in readings.items() if by_step}
    if len(heads) < len(readings):
        raise HooklineError(f"{next(name for name in readings if name not in heads)!r} did not fire in this run")
    if len({*heads.values()}) > 1:
        raise HooklineError(f"the layers differ in their number of heads: {heads}. Select some with layers=…")
    return torch.stack([torch.stack(by_layer) for by_layer in zip(*readings.values(), strict=True)])
