"""AfterPoint: runs of a network from a point on. The modules before it are not run, but return what they returned.

Which modules those are is not known from the network's structure: one pass shows in which order modules return. That
skipping them changes nothing is then proved on two batches, by comparing the target with that of a run in full; if it
differs, or the network fails, every run is in full.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hookline.engine import Hooked, HookPoint, Kind, Skipping
from hookline.errors import HooklineError
from hookline.experiments.networks.network_inputs import NetworkInputs
from hookline.hooks.hooked_module import HookedModule

_LEAST_SHARE = 0.25
"""The share of a network's modules before a point from which skipping them is tried."""


class AfterPoint:
    """How a network runs from a point on, with other values there."""

    def __init__(self, net: Hooked, inputs: NetworkInputs, point: HookPoint, before: Sequence[str]) -> None:
        self.net, self.inputs, self.point = net, inputs, point
        self._returned = dict(inputs.call(net.cache, names_filter=list(before))) if before else {}
        self.is_empty = True
        """Whether the modules before the point may return tensors without values, since nobody reads them."""

    def run(self, value: Tensor, copies: int) -> Any:
        """The output for another value at the point, of `copies` batches one after the other."""
        modules = {self.net.index.find(name).site.module: x for name, x in self._returned.items()}
        gives = {module: _returning(self._of_copies(x, copies)) for module, x in modules.items()}
        gives[self.point.site.module] = _returning(value.clone)
        batch = self.inputs.copies(copies).changed(torch.clone)
        with Skipping(self.net.index.root, gives):
            return batch.call(self.net)

    def _of_copies(self, x: Tensor, copies: int) -> Callable[[], Tensor]:
        if self.is_empty and x.is_floating_point():
            return lambda: x.new_full((), torch.nan).expand(len(x) * copies, *x.shape[1:])
        return lambda: x.repeat(copies, *[1] * (x.ndim - 1))


def _returning(made: Callable[[], Tensor]) -> Callable[..., Tensor]:
    return lambda args, kwargs: made()  # noqa: ARG005


def proved(
    net: Hooked,
    inputs: NetworkInputs,
    point: HookPoint,
    value: Tensor,
    is_same: Callable[[Any], bool],
) -> AfterPoint | None:
    """How the network runs from a point on, if a run on `value`, two batches, passes `is_same`; None if it does not."""
    if not _is_plain(net, point):
        return None
    before, count = _before(net, inputs, point)
    if not before or count < _LEAST_SHARE * len(list(net.module.modules())):
        return None
    after = AfterPoint(net, inputs, point, before)
    for after.is_empty in (True, False):
        try:
            if is_same(after.run(value, 2)):
                return after
        except (RuntimeError, ValueError, TypeError, LookupError, AttributeError, AssertionError, HooklineError):
            continue  # a module that does not return one tensor, or is written to in place
    return None


def _is_plain(net: Hooked, point: HookPoint) -> bool:
    """Whether the point is all that one module returns, in a network where nothing else acts or is random."""
    if type(net) is not HookedModule or net.index.active_hooks() or any(x.training for x in net.module.modules()):
        return False
    return (
        point.site.kind is Kind.OUTPUT and point.only is None and point.name in net.hook_dict and point.name != "output"
    )


def _before(net: Hooked, inputs: NetworkInputs, point: HookPoint) -> tuple[list[str], int]:
    """The outermost modules that return before the point's module does, and how many modules are in them and in it."""
    order: list[str] = []

    def note(_: Tensor, hook: HookPoint) -> None:
        order.append(hook.name)

    names = [name for name, other in net.hook_dict.items() if other.site.kind is Kind.OUTPUT and name != "output"]
    inputs.changed(torch.clone).call(net.run_with_hooks, fwd_hooks=[(names, note)])
    calls = Counter(order)
    returned = [name for name in order[: order.index(point.name)] if calls[name] == 1]
    paths = {*returned, point.name}
    outermost = [name for name in returned if not any(name.startswith(f"{path}.") for path in paths)]
    modules = [net.index.find(name).site.module for name in (*outermost, point.name)]
    return outermost, sum(_size(module) for module in modules)


def _size(module: nn.Module) -> int:
    return len(list(module.modules()))
