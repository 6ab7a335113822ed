"""Sources of activations to train an autoencoder on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, TypeAlias

import torch
from jaxtyping import Float
from numpy import ndarray
from torch import Tensor

from hookline.errors import HooklineError, a_type
from hookline.sae.sae_config import check_count
from hookline.store import Rows, Store, open_store

Data: TypeAlias = Store | str | Path | Tensor | ndarray | Iterable[Any]
BATCH_SIZE = 1024
Place: TypeAlias = tuple[int, int]
"""The number of an epoch, and of a batch in it."""


@dataclass(frozen=True)
class Source:
    """Batches of activations, for one or more epochs."""

    d_in: int
    hook_name: str | None
    epoch: Callable[[int], Iterable[Tensor]]
    """Returns all batches once, in the order of an epoch."""
    repeats: bool = True
    """Whether there is more than one epoch."""
    is_of_heads: bool = False
    model_name: str | None = None

    def checked(self, batch: Tensor) -> Float[Tensor, "row d_in"]:
        """A batch as rows; an error if it has another width."""
        batch = batch.flatten(-2) if self.is_of_heads else batch
        if batch.shape[-1] != self.d_in:
            raise HooklineError(f"a batch has the width {batch.shape[-1]}, but earlier ones have {self.d_in}")
        batch = batch.detach().flatten(0, -2)
        return batch if batch.dtype == torch.float64 else batch.float()


def bad_rows(x: Float[Tensor, "row d_in"]) -> str:
    """The end of an error message: how many rows are not finite; empty if all are."""
    bad = int((~x.isfinite().all(1)).sum())
    return f": {bad} of {len(x)} rows in this batch of activations have values that are not finite" if bad else ""


def placed_batches(
    epoch: Callable[[int], Iterable[Mapping[str, Tensor]]], *, repeats: bool, start: Place | None = None
) -> Iterator[tuple[Place, Mapping[str, Tensor]]]:
    """Yield batches with their places, epoch after epoch; those before `start` are left out.

    Epochs that repeat need not be read to be left out; batches that are given once are.
    """
    number = start[0] if start is not None and repeats else 0
    while number == 0 or repeats:
        is_empty, index = True, 0
        for batch in epoch(number):
            if all(x.numel() for x in batch.values()):
                is_empty = False
                if start is None or (number, index) >= start:
                    yield (number, index), batch
                index += 1
        if is_empty:
            raise HooklineError("there are no activations to train on")
        number += 1


def joint_source(
    data: Store | str | Path, points: str | Sequence[str] | None, batch_size: int | None, seed: int
) -> tuple[dict[str, Source], Callable[[int], Iterable[Mapping[str, Tensor]]]]:
    """The source of each of several points of a store, and a function that reads the batches of an epoch at all."""
    if not isinstance(data, Store | str | Path):
        raise HooklineError(f"train_many takes a store, or its path, not {a_type(data)}")
    store = open_store(data)
    names, size = store.select(points), batch_size or BATCH_SIZE
    sources = {name: source_of(store, name, batch_size, seed) for name in names}

    def epoch(number: int) -> Iterator[Mapping[str, Tensor]]:
        return (rows.activations for rows in store.batches(size, names, shuffle=True, seed=seed, epoch=number))

    return sources, epoch


def source_of(data: Data, point: str | None, batch_size: int | None, seed: int) -> Source:
    """The batches of a store or a tensor of activations, or an iterable of batches as given."""
    if batch_size is not None:
        check_count("batch_size", batch_size)
    if isinstance(data, Store | str | Path):
        return _of_store(open_store(data), point, batch_size or BATCH_SIZE, seed)
    if isinstance(data, Tensor | ndarray):
        return _of_tensor(_tensor_of(data, point), point, batch_size or BATCH_SIZE, seed)
    if batch_size is not None:
        raise HooklineError("batch_size applies to a store or a tensor; batches are used as they are")
    if not isinstance(data, Iterable):
        raise HooklineError(f"activations must be a store, a tensor or an iterable of batches, not {data!r}")
    return _of_batches(data, point)


def _of_store(store: Store, point: str | None, batch_size: int, seed: int) -> Source:
    name = _one_point(store.select(point), store.path)
    shape = store.points[name].shape
    if len(shape) not in (1, 2):
        raise HooklineError(f"a row of {name!r} has the shape {list(shape)}; expected a vector, or one vector per head")

    def epoch(number: int) -> Iterator[Tensor]:
        return (rows[name] for rows in store.batches(batch_size, [name], shuffle=True, seed=seed, epoch=number))

    model = store.manifest.about.model.get("id")
    return Source(torch.Size(shape).numel(), name, epoch, is_of_heads=len(shape) == 2, model_name=model)


def _of_tensor(data: Tensor, point: str | None, batch_size: int, seed: int) -> Source:
    rows = data.flatten(0, -2)

    def epoch(number: int) -> Iterator[Tensor]:
        random = torch.Generator().manual_seed(seed * 1_000_003 + number)
        order = torch.randperm(len(rows), generator=random).to(rows.device)
        return (rows[part] for part in order.split(batch_size))

    return Source(rows.shape[1], point, epoch)


def _of_batches(data: Iterable[Any], point: str | None) -> Source:
    batches = iter(data)
    first = next(batches, None)
    if first is None:
        raise HooklineError("there are no batches to train on")
    again = batches is not data

    def epoch(number: int) -> Iterator[Tensor]:
        items = iter(data) if again and number else chain([first], batches)
        return (_tensor_of(item, point) for item in items)

    return Source(_tensor_of(first, point).shape[-1], point, epoch, repeats=again)


def _tensor_of(item: Any, point: str | None) -> Tensor:
    if isinstance(item, Rows):
        item = item[_one_point(list(item.activations) if point is None else [point], "a batch of rows")]
    if isinstance(item, ndarray):
        item = torch.from_numpy(item)
    if not isinstance(item, Tensor) or item.ndim < 2 or not item.is_floating_point():
        shown = f"{list(item.shape)} of {item.dtype}" if isinstance(item, Tensor) else repr(item)
        raise HooklineError(f"activations must be a float tensor [row, d_in], not {shown}")
    return item


def _one_point(names: Sequence[str], where: str) -> str:
    if len(names) != 1:
        raise HooklineError(f"an autoencoder is trained at one point, but {where} has {names}: choose one with point=")
    return names[0]
