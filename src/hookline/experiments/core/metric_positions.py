"""Which positions of the logits a metric reads, found by NaN propagation."""

from __future__ import annotations

import math
from collections import deque
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hookline.engine import undo
from hookline.experiments.metrics import MetricFunction, checked_value
from hookline.transformer.precision import upcast

# Operations that pass NaN on from their inputs to their outputs, where an index or a condition is constant. All others
# (comparisons, argmax, nan_to_num …) may hide it.
_PASSES_NAN = frozenset(
    """add sub rsub mul div neg abs exp expm1 log log2 log10 log1p sqrt rsqrt reciprocal tanh sigmoid logaddexp xlogy
    sum mean logsumexp cumsum var std _softmax _log_softmax mm bmm mv dot nll_loss_forward nll_loss2d_forward mse_loss
    select slice index index_select gather take unbind split split_with_sizes diagonal view _unsafe_view reshape permute
    transpose t expand squeeze unsqueeze alias detach clone cat stack flip roll repeat _to_copy copy lift_fresh where
    masked_fill index_put fill zero""".split()  # noqa: SIM905 (as literals, it would be a page)
)
_READS_SHAPE = frozenset(
    "zeros_like ones_like full_like empty_like new_zeros new_ones new_full new_empty new_empty_strided".split()  # noqa: SIM905
)
_SHAPES = (torch.Size, torch.dtype, torch.device, torch.layout, torch.memory_format, int, str, type(None))
_MOST_TRIALS = 48


def positions_read(metric: MetricFunction, logits: Float[Tensor, "batch pos vocab"]) -> Bool[Tensor, " pos"]:
    """The positions of the logits that a metric reads; all of them if that cannot be determined.

    The values at other positions make no difference to the metric, as long as the logits keep their shape. The metric
    is called with NaN at some positions, and NaN is followed through its operations: up to about fifty times, and a few
    times for a metric that reads a single position.
    """
    width = logits.shape[1]
    logits, everywhere = logits.detach(), list(range(width))
    before, again = (checked_value(metric(logits.clone()), len(logits)) for _ in range(2))
    trial = _Trial(metric, logits, before)
    if width == 1 or not torch.equal(before, again) or not trial.can_tell():
        return torch.ones(width, dtype=torch.bool)
    read = {width - 1} if not trial.is_read(everywhere[:-1]) else _by_halves(trial, everywhere)
    if trial.is_read([at for at in everywhere if at not in read]):
        return torch.ones(width, dtype=torch.bool)
    return torch.tensor([at in read for at in everywhere])


def _by_halves(trial: _Trial, everywhere: list[int]) -> set[int]:
    """The positions that are read, found by bisection; after too many trials, whole groups that contain one."""
    groups, read = deque([everywhere]), set()
    while groups:
        group = groups.popleft()
        middle = len(group) // 2
        if trial.count >= _MOST_TRIALS or not middle:
            read.update(group)
        else:
            groups += [half for half in (group[:middle], group[middle:]) if trial.is_read(half)]
    return read


class _Trial:
    """Calls a metric with NaN at some positions, and compares with its value."""

    def __init__(self, metric: MetricFunction, logits: Tensor, value: Tensor) -> None:
        self.metric, self.logits, self.value = metric, logits, value
        self.count = 0

    def can_tell(self) -> bool:
        """Whether NaN shows in the metric at all, and never determines what else is read."""
        tracker = self._tracked(slice(None))
        return tracker.shows and not tracker.decides

    def is_read(self, positions: list[int]) -> bool:
        """Whether the metric reads any of these positions."""
        return bool(positions) and self._tracked(positions).shows

    def _tracked(self, positions: Any) -> _NanTracker:
        self.count += 1
        tracker = _NanTracker()
        with torch._C._InferenceMode(False), undo.GradMode(False):  # whose exits no interrupt can skip
            logits = self.logits.clone()
            logits[:, positions] = math.nan
            try:
                with (
                    undo.TorchHooks(),
                    undo.Modes(_Exits(tracker), tracker),
                ):  # without hooks: compiled code runs uncompiled
                    value = self.metric(logits)
            except Exception:  # an error that NaN causes shows that it was read
                tracker.shows = tracker.decides = True
                return tracker
        tracker.shows |= not isinstance(value, Tensor) or not torch.equal(upcast(value), self.value)
        return tracker


class _NanTracker(TorchDispatchMode):
    """Follows NaN through the operations of a metric.

    An operation that may hide NaN is opaque: if it receives NaN, NaN `shows`. Its output is marked, and so is all that
    is computed from it: it depends on the logits without containing NaN. NaN `decides` where it could determine what
    else is read: as a Python value, a shape, or an index or condition on values with NaN.
    """

    is_over = False

    def __init__(self) -> None:
        super().__init__()
        self.shows = self.decides = False
        self.marked: dict[int, Tensor] = {}  # by memory address; kept alive, so that no other tensor gets the address

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.is_over:
            return func(*args, **(kwargs or {}))
        inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        name = func.overloadpacket.__name__
        is_open = func.namespace == "aten" and (name.rstrip("_") in _PASSES_NAN or name in _READS_SHAPE)
        marked = [x for x in inputs if self.is_marked(x)]
        with_nan = [x for x in inputs if _has_nan(x)] if marked or not is_open else []
        places = {_memory(x) for x in inputs}
        out = func(*args, **(kwargs or {}))
        outputs = tree_leaves(out)
        are_floats = all(isinstance(x, Tensor) and x.is_floating_point() for x in outputs)
        if is_open and not marked and name not in _READS_SHAPE and not are_floats:
            is_open = not any(map(_has_nan, inputs))  # NaN was converted to integers
            with_nan = [] if is_open else inputs
        if marked or (with_nan and not is_open):
            self.shows |= bool(with_nan) and not is_open
            is_mixed = bool(marked) and any(not self.is_marked(x) for x in with_nan)
            is_shape = torch.Tag.dynamic_output_shape in func.tags
            is_view = not is_open and any(isinstance(x, Tensor) and _memory(x) in places for x in outputs)
            is_value = not all(isinstance(x, Tensor) for x in outputs)
            self.decides |= is_mixed or is_shape or is_view or is_value or func._schema.is_mutable
            self.marked.update({_memory(x): x for x in outputs if isinstance(x, Tensor)})
        return out

    def is_marked(self, x: Tensor) -> bool:
        """Whether a tensor was computed by an opaque operation, or from the output of one."""
        return _memory(x) in self.marked


class _Exits(TorchFunctionMode):
    """Detects values that leave torch other than through an operation: as lists, arrays, or memory addresses."""

    is_over = False

    def __init__(self, tracker: _NanTracker) -> None:
        super().__init__()
        self.tracker = tracker

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.is_over:
            return func(*args, **(kwargs or {}))
        before = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        out = func(*args, **(kwargs or {}))
        if _leaves_torch(func, out) and any(self.tracker.is_marked(x) or _has_nan(x) for x in before):
            self.tracker.decides = True
        return out


def _leaves_torch(func: Any, out: Any) -> bool:
    if isinstance(out, (Tensor, *_SHAPES)):
        return getattr(func, "__name__", "") == "data_ptr"
    if isinstance(out, list | tuple):
        kinds: Any = Tensor if isinstance(out, list) else (Tensor, *_SHAPES)
        return not all(isinstance(element, kinds) for element in out)
    return True


def _memory(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


def _has_nan(x: Tensor) -> bool:
    return x.is_floating_point() and bool(x.isnan().any())
