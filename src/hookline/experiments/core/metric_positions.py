"""Which positions of the logits a metric reads, found by dyeing them with NaN and following the dye."""

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

from hookline.engine.torch_hooks import TorchHooks
from hookline.experiments.metrics import MetricFunction, checked, upcast
from hookline.transformer.contexts import GradMode

# Operations of which every output depends on its inputs so that NaN goes through, where an index or a condition is
# a constant. All others (comparisons, argmax, nan_to_num …) may hide it.
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
    """The positions of the logits that a metric looks at: all of them, where that cannot be told for sure.

    What stands at the others makes no difference to it, as long as the logits keep their shape. It is found by
    trials: positions are dyed with NaN, and the dye is followed through every operation of the metric. A metric is
    called up to about fifty times; few are enough for one that reads a single position.
    """
    width = logits.shape[1]
    logits, everywhere = logits.detach(), list(range(width))
    before, again = (checked(metric(logits.clone()), len(logits)) for _ in range(2))
    trial = _Trial(metric, logits, before)
    if width == 1 or not torch.equal(before, again) or not trial.can_tell():
        return torch.ones(width, dtype=torch.bool)
    read = {width - 1} if not trial.is_read(everywhere[:-1]) else _by_halves(trial, everywhere)
    if trial.is_read([at for at in everywhere if at not in read]):
        return torch.ones(width, dtype=torch.bool)
    return torch.tensor([at in read for at in everywhere])


def _by_halves(trial: _Trial, everywhere: list[int]) -> set[int]:
    """The positions that are read; when there are too many to try, groups with one in them."""
    middle = len(everywhere) // 2
    groups, read = deque([everywhere[:middle], everywhere[middle:]]), set()
    while groups:
        group = groups.popleft()
        if trial.count < _MOST_TRIALS and not trial.is_read(group):
            continue
        if len(group) == 1 or trial.count >= _MOST_TRIALS:
            read.update(group)
        else:
            groups += [group[: len(group) // 2], group[len(group) // 2 :]]
    return read


class _Trial:
    """A metric and the value it has, to be tried with some positions dyed."""

    def __init__(self, metric: MetricFunction, logits: Tensor, value: Tensor) -> None:
        self.metric, self.logits, self.value, self.count = metric, logits, value, 0

    def can_tell(self) -> bool:
        """Whether the dye shows at all, and nothing that it reaches can decide what else is read."""
        dye = self._dyed(slice(None))
        return dye.shows and not dye.decides

    def is_read(self, positions: list[int]) -> bool:
        """Whether the metric looks at any of these."""
        return bool(positions) and self._dyed(positions).shows

    def _dyed(self, positions: Any) -> _Dye:
        self.count += 1
        with torch._C._InferenceMode(False), GradMode(False):  # whose exits no interrupt can skip
            logits = self.logits.clone()
            logits[:, positions] = math.nan
            dye = _Dye()
            try:
                with TorchHooks(), _Exits(dye), dye:  # without hooks: compiled code runs uncompiled
                    value = self.metric(logits)
            except Exception:  # whatever a metric raises at the sight of NaN, it has seen it
                dye.shows = dye.decides = True
                return dye
        dye.shows |= not isinstance(value, Tensor) or not torch.equal(upcast(value), self.value)
        return dye


class _Dye(TorchDispatchMode):
    """Follows NaN through the operations of a metric.

    An operation that may hide it is opaque: if it is given NaN, the dye shows. What comes out of it is marked, as is
    all that is made from that: without a trace of NaN it still depends on the logits. It `decides` where it could
    choose what else is read: as a Python value, a shape, or an index or condition on what is dyed.
    """

    def __init__(self) -> None:
        super().__init__()
        self.shows = self.decides = False
        self.marked: dict[int, Tensor] = {}  # by memory; kept alive, so that no other tensor comes to lie there

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        name = func.overloadpacket.__name__
        is_open = func.namespace == "aten" and (name.rstrip("_") in _PASSES_NAN or name in _READS_SHAPE)
        marked = [x for x in inputs if self.is_marked(x)]
        dyed = [x for x in inputs if _has_nan(x)] if marked or not is_open else []
        places = {_memory(x) for x in inputs}
        out = func(*args, **(kwargs or {}))
        outputs = tree_leaves(out)
        if is_open and not marked and name not in _READS_SHAPE and not all(map(_is_floats, outputs)):
            is_open = not any(map(_has_nan, inputs))  # made whole numbers of what is dyed
            dyed = [] if is_open else inputs
        if marked or (dyed and not is_open):
            self._mark(func, outputs, places, is_open=is_open, marked=marked, dyed=dyed)
        return out

    def _mark(
        self, func: Any, outputs: list[Any], places: set[int], *, is_open: bool, marked: list[Any], dyed: list[Any]
    ) -> None:
        self.shows |= bool(dyed) and not is_open
        is_mixed = bool(marked) and any(not self.is_marked(x) for x in dyed)
        is_shape = torch.Tag.dynamic_output_shape in func.tags
        is_view = not is_open and any(isinstance(x, Tensor) and _memory(x) in places for x in outputs)
        is_value = not all(isinstance(x, Tensor) for x in outputs)
        self.decides |= is_mixed or is_shape or is_view or is_value or func._schema.is_mutable
        self.marked.update({_memory(x): x for x in outputs if isinstance(x, Tensor)})

    def is_marked(self, x: Tensor) -> bool:
        """Whether something opaque made it."""
        return _memory(x) in self.marked

    def follows(self, x: Any) -> bool:
        """Whether it is a tensor that comes from the dyed logits."""
        return isinstance(x, Tensor) and (self.is_marked(x) or _has_nan(x))


class _Exits(TorchFunctionMode):
    """Sees what leaves torch by other ways than an operation: lists, arrays, memory."""

    def __init__(self, dye: _Dye) -> None:
        super().__init__()
        self.dye = dye

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        out = func(*args, **(kwargs or {}))
        if _leaves_torch(func, out) and any(map(self.dye.follows, before)):
            self.dye.decides = True
        return out


def _leaves_torch(func: Any, out: Any) -> bool:
    if isinstance(out, (Tensor, *_SHAPES)):
        return getattr(func, "__name__", "") == "data_ptr"
    if isinstance(out, list | tuple):
        kinds: Any = Tensor if isinstance(out, list) else (Tensor, *_SHAPES)
        return not all(isinstance(each, kinds) for each in out)
    return True


def _memory(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


def _is_floats(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


def _has_nan(x: Tensor) -> bool:
    return x.is_floating_point() and bool(x.isnan().any())
