"""collect: statistics of the inputs and outputs of modules over a data set, in bounded memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sized
from functools import partial
from itertools import product
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from hookline.engine import Hooked, HookPoint, Kind, Site, lens_of
from hookline.errors import HooklineError
from hookline.functions.signatures import parameters_of
from hookline.loading import hook
from hookline.model import HookedModel
from hookline.progress import progress_bar
from hookline.training.streaming import Accumulator
from hookline.training.training_mode import warn_if_changing
from hookline.types import Filter
from hookline.values.structures import map_tensors

Statistic: TypeAlias = Callable[[], Accumulator]

_SIDES = {"in": Kind.INPUT, "out": Kind.OUTPUT}


@torch.no_grad()
def collect(
    net: nn.Module | Hooked,
    filter: Filter,
    statistics: Mapping[str, Statistic | Mapping[str, Statistic]],
    data: Iterable[Any],
    *,
    progress: bool = True,
) -> dict[str, dict[str, Any]]:
    """Return statistics of the inputs and outputs of modules over a data set, by the path of the module.

        found = collect(net, nn.Linear, {"in": covariance, "out": absolute_max}, loader)
        found["fc1"]["in"]                                                        # [d, d]

    `filter` selects points, whose modules are meant, or is a class of modules. Rows are all axes but the last: for a
    text each token, without padding. `data` yields batches: what the network is called with, a tuple of arguments, or a
    dict of keywords; of pairs with a label, as a `DataLoader` yields them, the first is taken if the network takes one
    argument. Nothing is kept but the statistics: `covariance`, `second_moment`, `mean`, `absolute_max`, or others (see
    `streaming.py`); a dict of them under one side gives a dict.

    Examples:
        >>> from hookline.training import absolute_max, collect, mean
        >>> batches = [torch.randn(16, 4) for _ in range(3)]
        >>> statistics = collect(net, "fc*", {"in": {"mean": mean, "max": absolute_max}}, batches)
        >>> statistics["fc1"]["in"]["mean"].shape
        torch.Size([4])
    """
    if isinstance(data, Tensor):
        raise HooklineError("data yields batches, and a tensor would be run row by row: pass data.split(64)")
    hooked: Any = hook(net)  # type: ignore[arg-type]
    sides, modules = _checked(statistics), _modules(hooked, filter)
    warn_if_changing(hooked.index.root, "the network")
    results: dict[str, dict[str, dict[str, Accumulator]]] = {}
    hooks, silent = [], {*modules.values()}
    for (name, module), (side, kinds) in product(modules.items(), sides.items()):
        accumulators = {key: start() for key, start in kinds.items()}
        results.setdefault(name, {})[side] = accumulators
        hooks.append((_point(hooked, name, module, side), partial(_add, [*accumulators.values()], silent)))
    device = next((parameter.device for parameter in hooked.index.root.parameters()), torch.device("cpu"))
    total = len(data) if isinstance(data, Sized) else None
    with hooked.hooks(fwd_hooks=hooks), progress_bar(progress, total, " batches", "collect") as bar:
        for batch in data:
            _call(hooked, map_tensors(batch, lambda x: x.to(device)))
            bar.update()
    return {
        name: {side: _values(accumulators, statistics[side]) for side, accumulators in by_side.items()}
        for name, by_side in results.items()
        if modules[name] not in silent
    }


def _checked(statistics: Any) -> dict[str, dict[str, Statistic]]:
    """The statistics of each side, by name."""
    if not isinstance(statistics, Mapping) or not statistics or not {*statistics} <= {*_SIDES}:
        raise HooklineError(
            f'statistics= is a dict with the keys "in" and "out", such as {{"in": covariance}}, not {statistics!r}'
        )
    sides = {side: dict(chosen) if isinstance(chosen, Mapping) else {"": chosen} for side, chosen in statistics.items()}
    for side, chosen in sides.items():
        for statistic in chosen.values():
            if not _is_statistic(statistic):
                raise HooklineError(
                    f"statistics[{side!r}] is {statistic!r}: it must be mean, covariance, second_moment, absolute_max, "
                    f"or a function that returns an object with add(rows) and value()"
                )
    return sides


def _is_statistic(statistic: Any) -> bool:
    try:
        return callable(statistic().add)
    except (TypeError, AttributeError):
        return False


def _modules(hooked: Any, filter: Filter) -> dict[str, nn.Module]:
    """The modules that a filter of points means, by path."""
    chosen = {point.site.module for point in hooked.index.select(filter)}
    return {path: module for path, module in hooked.index.root.named_modules() if module in chosen}


def _point(hooked: Any, name: str, module: nn.Module, side: str) -> HookPoint:
    site = Site(module, _SIDES[side], lens_of(module, _SIDES[side]))
    return HookPoint.at_site(name or side, site, hooked.index.permanent)


def _add(accumulators: list[Accumulator], silent: set[nn.Module], x: Tensor, hook: HookPoint) -> None:
    """Take the rows of an activation, without those of padding."""
    if not x.ndim:
        raise HooklineError("the activation is a number, which has no rows")
    padding = hook.padding
    is_text = padding is not None and x.ndim > 2 and padding.shape == x.shape[:2]
    rows = (x[~padding.to(x.device)] if is_text else x).detach().reshape(-1, x.shape[-1])  # type: ignore[union-attr]
    if len(rows):
        silent.discard(hook.site.module)
        for accumulator in accumulators:
            accumulator.add(rows)


def _call(hooked: Any, batch: Any) -> None:
    """Call the network with a batch."""
    options: dict[str, Any] = {"return_type": None} if isinstance(hooked, HookedModel) else {}
    if isinstance(batch, Mapping):
        hooked(**batch, **options)
    elif isinstance(batch, tuple | list) and all(isinstance(part, Tensor) for part in batch):
        is_labeled = len(batch) == 2 and parameters_of(hooked.index.root)[1] == 1
        hooked(*(batch[:1] if is_labeled else batch), **options)
    else:
        hooked(batch, **options)


def _values(accumulators: dict[str, Accumulator], requested: Any) -> Any:
    values = {key: accumulator.value() for key, accumulator in accumulators.items()}
    return values if isinstance(requested, Mapping) else values[""]
