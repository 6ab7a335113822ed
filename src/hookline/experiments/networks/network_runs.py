"""Runs of a network for attribution: with gradients, without traces, and several variants of the batch at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from hookline.engine import Hooked, HookPoint
from hookline.errors import HooklineError, a_type
from hookline.experiments.core.prompts import warn_of_dropout
from hookline.experiments.networks.after_point import AfterPoint, proved
from hookline.experiments.networks.network_inputs import NetworkInputs
from hookline.experiments.networks.network_target import NetworkTarget, is_per_row
from hookline.loading import hook
from hookline.transformer.memory.halving import BatchFitter

_BYTES_PER_THREAD, _MOST_BYTES_ON_CPU, _MOST_BYTES = 2**18, 2**22, 2**26
_ROWS_AT_ONCE = 64
"""How much of what is varied goes through the network at once; its activations are many times as large. On a CPU they
should stay in its caches, which is twice as fast for a small CNN, but for matrix products there should be many rows.
Elsewhere they should fit into memory; if not, they are halved."""


def wrapped(net: Any) -> Hooked:
    """The wrapper of a network."""
    if not isinstance(net, nn.Module | Hooked):
        raise HooklineError(f"net is an nn.Module or a wrapper (hookline.hook), not {a_type(net)}")
    return net if isinstance(net, Hooked) else hook(net)


@contextmanager
def attributing(net: Hooked, *, with_grad: bool = True) -> Iterator[None]:
    """A block for runs that leave nothing behind: buffers and random state are as before, and gradients are on.

    Callers may be in `torch.no_grad()` or `torch.inference_mode()`.
    """
    root = net.module
    warn_of_dropout(net)  # type: ignore[arg-type]
    if with_grad and any(parameter.is_inference() for parameter in root.parameters()):
        raise HooklineError(
            "this network was made in torch.inference_mode(), so torch cannot compute gradients through it: make or "
            "load it outside of that block"
        )
    buffers = [
        (module, name, buffer, buffer.clone())
        for module in root.modules()
        if module.training
        for name, buffer in module.named_buffers(recurse=False)
    ]
    devices = {parameter.device.index for parameter in root.parameters() if parameter.is_cuda}
    with torch.random.fork_rng(devices), ExitStack() as stack:
        if any(_is_compiled(module) for module in root.modules()):
            stack.enter_context(net.hooks(fwd_hooks=[("output", _read)]))  # compiled code then runs uncompiled
        if torch.is_inference_mode_enabled() and with_grad:
            stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.set_grad_enabled(with_grad))
        try:
            yield
        finally:
            with torch.no_grad():
                for module, name, buffer, before in buffers:
                    _put_back(module, name, buffer, before)


def _put_back(module: nn.Module, name: str, buffer: Tensor, before: Tensor) -> None:
    """Give a buffer its values of before. Others are not written to: the caller may have a graph that needs them."""
    if getattr(module, name) is not buffer:
        setattr(module, name, buffer)
    if not torch.equal(buffer, before):
        buffer.copy_(before)


def _is_compiled(module: nn.Module) -> bool:
    return type(module).__name__ == "OptimizedModule" or module._compiled_call_impl is not None


def _read(_: Tensor) -> None:
    """A hook that does nothing."""


def _learning(root: nn.Module) -> list[nn.Module]:
    """The norms that use the statistics of a batch, and update their running statistics."""
    return [
        module for module in root.modules() if module.training and isinstance(module, nn.modules.batchnorm._NormBase)
    ]


def usable(x: Tensor) -> Tensor:
    """A tensor that autograd can save; those made in inference mode are copied."""
    return x.clone() if x.is_inference() else x


def leaf_of(x: Tensor) -> Tensor:
    """A new leaf of the graph with these values."""
    return usable(x.detach()).detach().requires_grad_()


class Varied(Protocol):
    """What is varied, inputs or an activation, and how the network runs on other values of it."""

    @property
    def values(self) -> list[Tensor]:
        """What is varied."""

    @property
    def rows(self) -> int:
        """The size of the batch."""

    @property
    def output(self) -> Any:
        """The output for the values as they are."""

    def run(self, values: Sequence[Tensor], copies: int = 1) -> Any:
        """The output for other values, of `copies` batches one after the other."""

    def skip(self, values: Sequence[Tensor], is_same: Callable[[Any], bool]) -> None:
        """Leave out of later runs what they have in common, if `is_same` of the output for these two batches."""


@dataclass
class VariedInputs:
    """The floating-point inputs of a network, or those at `places`."""

    net: Hooked
    inputs: NetworkInputs
    places: list[int]

    @property
    def values(self) -> list[Tensor]:
        """What is varied."""
        return [self.inputs.values[place] for place in self.places]

    @property
    def rows(self) -> int:
        """The size of the batch."""
        return self.inputs.rows

    @cached_property
    def output(self) -> Any:
        """The output for the values as they are."""
        with torch.no_grad():
            return self.inputs.changed(torch.clone).call(self.net)

    def run(self, values: Sequence[Tensor], copies: int = 1) -> Any:
        """See `Varied`. Networks may write to their inputs, so they get clones."""
        batch = self.inputs.copies(copies).with_values(self.places, [value.clone() for value in values])
        return batch.call(self.net)

    def skip(self, values: Sequence[Tensor], is_same: Callable[[Any], bool]) -> None:
        """See `Varied`: runs on other inputs have nothing in common."""


class VariedActivation:
    """The activation at one point of a network."""

    def __init__(self, net: Hooked, inputs: NetworkInputs, at: Any) -> None:
        self.net, self.inputs, self.point = net, inputs, point_at(net, at)
        self._after: AfterPoint | None = None

    @property
    def rows(self) -> int:
        """The size of the batch."""
        return self.inputs.rows

    @cached_property
    def _run(self) -> tuple[Any, Tensor]:
        with torch.no_grad():
            return run_noting(self.net, self.inputs, self.point)

    @property
    def values(self) -> list[Tensor]:
        """What is varied."""
        return [self._run[1]]

    @property
    def output(self) -> Any:
        """The output for the activation as it is."""
        return self._run[0]

    def run(self, values: Sequence[Tensor], copies: int = 1) -> Any:
        """See `Varied`."""
        if self._after is not None:
            return self._after.run(values[0], copies)
        hooks = [(key_of(self.point), lambda activation: values[0].clone())]  # noqa: ARG005
        batch = self.inputs.copies(copies).changed(torch.clone)
        return batch.call(self.net.run_with_hooks, fwd_hooks=hooks)

    def skip(self, values: Sequence[Tensor], is_same: Callable[[Any], bool]) -> None:
        """See `Varied`: the modules before the point do the same in all runs."""
        self._after = proved(self.net, self.inputs, self.point, values[0], is_same)


def point_at(net: Hooked, at: Any) -> HookPoint:
    """The one point that `at` names."""
    points = net.index.select(at)
    if at is None or len(points) != 1:
        raise HooklineError(
            f"at is one point, but {at!r} matches {len(points)}: {[point.name for point in points][:8]}"
        )
    return points[0]


def key_of(point: HookPoint) -> HookPoint | str:
    """A point as hooks name it: runs with names are planned once."""
    return point if point.is_renamed else point.name


def run_noting(net: Hooked, inputs: NetworkInputs, point: HookPoint, *, as_leaf: bool = False) -> tuple[Any, Tensor]:
    """The output, and the activation at a point; with `as_leaf` it is a leaf that the output is computed from."""
    activations: list[Tensor] = []

    def note(x: Tensor) -> Tensor | None:
        activations.append(leaf_of(x) if as_leaf else x.detach().clone())
        return activations[-1].clone() if as_leaf else None

    output = inputs.changed(torch.clone).call(net.run_with_hooks, fwd_hooks=[(key_of(point), note)])
    if len(activations) != 1:
        raise wrong_count(point, len(activations))
    return output, activations[0]


def checked_dim(dim: int, x: Tensor) -> int:
    """An axis of an activation that is not the batch."""
    if isinstance(dim, bool) or not isinstance(dim, int) or not -x.ndim <= dim < x.ndim or dim % x.ndim == 0:
        raise HooklineError(f"dim is an axis of the activation {list(x.shape)} after the batch, not {dim!r}")
    return dim % x.ndim


def wrong_count(point: HookPoint, calls: int) -> HooklineError:
    """The error for a point that does not fire exactly once per forward pass."""
    if not calls:
        return HooklineError(
            f"{point.name!r} did not fire for these inputs: its module was not called, or passed no tensor"
        )
    return HooklineError(
        f"{point.name!r} fires {calls} times per forward pass: name one call, '{point.name}#0' to "
        f"'{point.name}#{calls - 1}'"
    )


def target_gradients(values: Tensor, leaves: Sequence[Tensor]) -> list[Tensor]:
    """The gradient of the sum of some values with respect to each leaf."""
    if not values.requires_grad:
        raise HooklineError(
            "the target has no gradient: it does not depend on the inputs or the point, or the network detaches it or "
            "computes under torch.no_grad()"
        )
    gradients = torch.autograd.grad(values.sum(), list(leaves), allow_unused=True)
    if all(gradient is None for gradient in gradients):
        raise HooklineError(
            "the target does not depend on the inputs, or on the activation at the point: it has no gradient there"
        )
    return [torch.zeros_like(x) if grad is None else grad for x, grad in zip(leaves, gradients, strict=True)]


class Stacks:
    """How many variants of a batch run at once: as many as fit, if rows do not depend on each other; else one."""

    def __init__(self, net: Hooked, varied: Varied, target: NetworkTarget, other: Sequence[Tensor]) -> None:
        self._fit = BatchFitter("variants")
        is_separate = not _learning(net.module) and self._are_separate(varied, target, other)
        self._most = max(1, _at_once(varied)) if is_separate else 1

    def parts(self, count: int, run: Any) -> Iterator[tuple[Sequence[int], Any]]:
        """Call `run` on parts of the numbers below `count`, and yield each part with what it returned."""
        for start in range(0, count, self._most):
            yield from self._fit.parts(range(start, min(start + self._most, count)), run)

    def _are_separate(self, varied: Varied, target: NetworkTarget, other: Sequence[Tensor]) -> bool:
        """Whether two batches that run as one have the outputs that each has alone.

        The first is halfway to the other values: those may be zeros, which many a network that scales by the largest
        value of the batch leaves as they are.
        """
        rows = varied.rows
        if any(not x.ndim or len(x) != rows for x in varied.values) or not is_per_row(varied.output, rows):
            return False
        halfway = [_halfway(blank, x) for blank, x in zip(other, varied.values, strict=True)]
        both = [torch.cat([first, x]) for first, x in zip(halfway, varied.values, strict=True)]
        try:
            with torch.no_grad():
                output, first_output = varied.run(both, 2), varied.run(halfway)
        except (RuntimeError, ValueError, IndexError, AssertionError, HooklineError):  # a network for one size of batch
            return False
        if not is_per_row(output, 2 * rows) or not is_per_row(first_output, rows):
            return False
        alone = torch.cat([target.per_group(first_output), target.per_group(varied.output)])
        both_values = target.per_group(output, 2)
        if not all(map(_are_close, alone, both_values)):
            return False
        with torch.no_grad():
            varied.skip(both, lambda output: _are_close(both_values, target.per_group(output, 2)))
        return True


def _halfway(other: Tensor, x: Tensor) -> Tensor:
    return torch.lerp(other, x, 0.5) if x.is_floating_point() else other


def _at_once(varied: Varied) -> int:
    """How many variants should run at once."""
    nbytes = sum(x.nbytes for x in varied.values) or 1
    if varied.values[0].device.type != "cpu":
        return _MOST_BYTES // nbytes
    in_caches = _BYTES_PER_THREAD * torch.get_num_threads() // nbytes
    return max(in_caches, min(_ROWS_AT_ONCE // varied.rows, _MOST_BYTES_ON_CPU // nbytes))


def _are_close(values: Tensor, others: Tensor) -> bool:
    """Whether values differ by rounding only; NaN is not close to anything."""
    tolerance = 1e-3 if values.dtype in (torch.float32, torch.float64) else 3e-2
    scale = max(float(values.abs().max()), float(others.abs().max()))
    return bool((values - others).abs().max() <= tolerance * scale)
