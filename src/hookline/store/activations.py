"""Run the model on a batch and return the activations as rows, one per token."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from hookline.engine.halving import Fit
from hookline.engine.hooked import Hooked
from hookline.engine.points import HookPoint
from hookline.errors import HooklineError, StoreError, UnknownPointError
from hookline.model import HookedModel
from hookline.store.identity import device_of
from hookline.store.manifest import Column
from hookline.store.selection import Batch
from hookline.store.shards import DTYPES, ROW
from hookline.store.writer import to_device
from hookline.transformer.dialects import other_names
from hookline.transformer.index import ModelPoints


def check_points(model: HookedModel, points: Sequence[HookPoint]) -> None:
    """Raise unless each point has one row per token of the data."""
    for point in points:
        axes = point.axes.split()
        if axes and ("p" in axes) == ("k" in axes):
            raise StoreError(
                f"{point.name!r} has the axes {point.axes!r}: a store needs one row of fixed shape per position. Use "
                f"run_with_cache instead"
            )
        if model._anatomy.is_encoder_decoder and not point.canonical_name.startswith("encoder."):
            raise StoreError(
                f"{point.name!r} is not in the encoder, and the data is fed to the encoder only: harvest encoder.…"
            )


def check_steady(module: nn.Module) -> None:
    """Raise if the model is stochastic, or changes with each pass: its harvest could not be resumed."""
    kinds = (nn.modules.dropout._DropoutNd, nn.modules.batchnorm._BatchNorm)
    for name, part in module.named_modules():
        if part.training and isinstance(part, kinds) and getattr(part, "p", 1):
            raise HooklineError(
                f"the model is in training mode, and {name!r} is a {type(part).__name__}: call model.eval() first, or "
                f"the activations would differ each time"
            )


def run_batch(model: Hooked, points: Sequence[HookPoint], batch: Batch, fit: Fit) -> dict[str, Tensor]:
    """The activations at each point as [row, …], with a row for each token or sample of the batch, stored or not.

    If memory runs out, the batch is run in parts, and their results are collected on the CPU.
    """
    examples = range(batch.shape[0])

    def run(some: Sequence[int]) -> dict[str, Tensor]:
        found = _run(model, points, batch, some)
        return found if len(some) == len(examples) else {name: x.cpu() for name, x in found.items()}

    found = [each for _, each in fit.parts(examples, run)]
    return found[0] if len(found) == 1 else {name: torch.cat([each[name] for each in found]) for name in found[0]}


def _run(model: Hooked, points: Sequence[HookPoint], batch: Batch, examples: Sequence[int]) -> dict[str, Tensor]:
    """The activations at each point in a run of some consecutive examples of a batch."""
    if len(examples) < batch.shape[0]:
        batch = batch.part(examples[0], examples[-1] + 1)
    device = device_of(model)
    args = tuple(to_device(x, device) for x in batch.args)
    kwargs: dict[str, Any] = {name: to_device(x, device) for name, x in batch.kwargs.items()}
    # A native point may fire several times, so then the pass must run to its end.
    stops = isinstance(model, HookedModel) and all(point.axes for point in points)
    cache = model.cache(*args, names_filter=points, stop_early=stops, **kwargs)
    axes = {point.name: point.axes for point in points}
    names = model._points
    return {names.canonical_name(name): _as_rows(name, x, axes.get(name, ""), batch) for name, x in cache.items()}


def _as_rows(name: str, x: Tensor, axes: str, batch: Batch) -> Tensor:
    names = axes.split()
    axis = names.index("p" if "p" in names else "k") if names else 1
    if len(batch.shape) == 2 and x.ndim > axis:
        x = x.movedim(axis, 1)
    if x.shape[: len(batch.shape)] != batch.shape:
        what = "token" if len(batch.shape) == 2 else "sample"
        raise StoreError(
            f"{name!r} has the shape {list(x.shape)}, but needs one row per {what} of a batch {list(batch.shape)}"
        )
    return x.flatten(0, len(batch.shape) - 1)


def names_of(model: Hooked, name: str) -> list[str]:
    """The other names of a stored point: in other dialects, and the path of its module."""
    points, others = model._points, list[str]()
    if isinstance(points, ModelPoints) and name in points.hook_dict:
        others += other_names(name, points._stacks)
    path = points._paths.get(points.find(name).site.module)
    if not path:
        return others
    for native in (path, f"{path}.input"):
        with suppress(UnknownPointError):
            if points.canonical_name(native) == name:
                others.append(native)
    return others


def column_of(x: Tensor, asked: str, name: str, dtype: torch.dtype | None, also: Sequence[str] = ()) -> Column:
    """How the rows of a point are stored. `also` are its other names."""
    if name in ROW:
        raise StoreError(f"a point cannot be stored as {name!r}: that name is reserved")
    stored = dtype if dtype is not None and x.is_floating_point() else x.dtype
    known = str(stored).removeprefix("torch.")
    if known not in DTYPES:
        raise StoreError(f"{name!r} has dtype {stored}, which cannot be stored; supported: {', '.join(DTYPES)}")
    others = tuple(each for each in also if each not in (name, asked))
    return Column(known, tuple(x.shape[1:]), asked if asked != name else "", others)
