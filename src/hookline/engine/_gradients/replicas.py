"""Models that `DistributedDataParallel` trains, and that are run around it: their gradients are not synchronized.

DDP averages gradients over processes only in the backward pass of its own forward. A wrapper of the model inside, made
before DDP or without it, runs that model directly; then `backward()` leaves other gradients in each process.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hookline.engine._torch.data_parallel import PARAMETERS, can_find_ddp, parameters_of_ddp, running_ddp
from hookline.engine._torch.graph_tasks import at_end_of_backward
from hookline.engine._torch.refcounts import references
from hookline.errors import warn
from hookline.values.structures import tensors_in


class _Replica:
    """What is known of a model that is not run by DDP."""

    def __init__(self) -> None:
        self.references = 0  # to its first parameter, when DDP was last looked for
        self.ddp: Callable[[], Any] = lambda: None  # a weak reference
        self.has_warned = False


_replicas: WeakKeyDictionary[nn.Module, _Replica] = WeakKeyDictionary()


def watch_gradients(root: nn.Module, called: Callable[..., Any], output: Any) -> None:
    """Warn when a backward pass from `output` accumulates gradients that DDP would have synchronized.

    `called` is what was called for it: `root`, or what the user has around it.
    """
    if not torch.is_grad_enabled() or not dist.is_available() or not dist.is_initialized() or not can_find_ddp():
        return
    if dist.get_world_size() == 1 or running_ddp(_ddp_class()) is not None:
        return
    outputs = [x for x in tensors_in(output) if x.requires_grad]
    first = next((parameter for parameter in root.parameters() if parameter.requires_grad), None)
    replica = _replicas.setdefault(root, _Replica())
    if not outputs or first is None or replica.has_warned:
        return
    if (holders := references(first)) != replica.references:  # DDP has a list of all parameters
        replica.references, ddp = holders, ddp_of(first)
        replica.ddp = (lambda: None) if ddp is None else ref(ddp)
    ddp = replica.ddp()
    if ddp is None or not ddp.require_backward_grad_sync:
        return
    if isinstance(called, nn.Module) and called is not root and any(module is ddp for module in called.modules()):
        return
    for x in outputs:
        x.register_hook(_Watch(replica, list(root.parameters())))


def ddp_of(parameter: nn.Parameter) -> Any:
    """The DDP that synchronizes the gradient of a parameter, found by what refers to it; None if there is none."""
    lists = [holder for holder in gc.get_referrers(parameter) if type(holder) is list]
    owners = gc.get_referrers(*lists) if lists else []
    owners += gc.get_referrers(*[owner for owner in owners if type(owner) is dict and PARAMETERS in owner])
    instances = [owner for owner in owners if issubclass(type(owner), _ddp_class())]
    return next((ddp for ddp in instances if any(parameters_of_ddp(ddp) is holder for holder in lists)), None)


class _Watch:
    """A hook on the gradient of an output, which looks at parameters before and after the backward pass."""

    def __init__(self, replica: _Replica, parameters: list[nn.Parameter]) -> None:
        self._replica, self._parameters = replica, parameters
        self._before: list[object] = []

    def __call__(self, grad: Tensor) -> None:  # noqa: ARG002
        self._before = self._gradients()
        at_end_of_backward(self._end)

    def _gradients(self) -> list[object]:
        grads = [parameter.grad for parameter in self._parameters]
        return [None if grad is None else (id(grad), grad._version) for grad in grads]

    def _end(self) -> None:
        if self._gradients() == self._before or self._replica.has_warned:
            return  # `torch.autograd.grad` accumulates nothing
        self._replica.has_warned = True
        warn(
            "these gradients are not synchronized: the model was run around the DistributedDataParallel that trains "
            "it, so each process has those of its own batch. Hook the wrapper, hookline.hook(ddp), and run that; or run"
            " ddp(…) in a context, with model.hooks(…)"
        )


def _ddp_class() -> Any:
    return torch.nn.parallel.DistributedDataParallel
