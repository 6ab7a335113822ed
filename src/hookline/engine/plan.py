"""Plans: the points, modules, shapes and bytes of a run, known before it runs."""

from __future__ import annotations

import copy
import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from hookline.engine._recording.recorder import Recorder
from hookline.engine._torch.fake_tensors import FakeTensorMode, need_fake_tensors
from hookline.engine._torch.hooks_on_modules import hooks_after, hooks_before, hooks_on_gradients
from hookline.engine._undo.modes import GradMode
from hookline.engine.actions import Record
from hookline.engine.names import Points
from hookline.engine.points import HookPoint
from hookline.engine.runs import Run
from hookline.engine.taps import captures_outputs
from hookline.errors import HooklineError, how_many


@dataclass(frozen=True)
class Row:
    """One point of a plan, and its use: "hook", "cache" or "".

    Shape, dtype and calls are known if the plan was made with an input.
    """

    name: str
    module: str
    use: str
    axes: str = ""
    shape: tuple[int, ...] | None = None
    dtype: torch.dtype | None = None
    calls: int | None = None
    compiled: str = ""
    """How it runs where compiled runs are on: "table", "traced", "read", or "eager" and why."""

    def with_calls(self, tensors: Sequence[Tensor]) -> Row:
        """Return the row with the shape and dtype of these tensors, one for each call."""
        if not tensors:
            return replace(self, calls=0)
        return replace(self, shape=tuple(tensors[0].shape), dtype=tensors[0].dtype, calls=len(tensors))

    @property
    def nbytes(self) -> int:
        """Bytes of all its calls in one forward pass."""
        if self.shape is None or self.dtype is None:
            return 0
        return torch.Size(self.shape).numel() * self.dtype.itemsize * (self.calls or 0)

    def cells(self) -> tuple[str, ...]:
        """The row as text."""
        shape = str(list(self.shape)) if self.shape is not None else "?" if self.calls is None else "does not fire"
        times = f"  ×{self.calls}" if self.calls is not None and self.calls > 1 else ""
        return self.name, self.module, self.use, self.axes, shape + times, self.compiled


@dataclass(frozen=True)
class Plan(Sequence[Row]):
    """The points of a run, printed as a table."""

    rows: tuple[Row, ...]
    modules: int
    estimate: Callable[[], Any] | None = field(default=None, repr=False, compare=False)
    """Works out `memory`, where that is known."""

    def __getitem__(self, index: Any) -> Any:
        return self.rows[index]

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def nbytes(self) -> int:
        """Upper bound on the memory of the cache: points that share a tensor are counted separately."""
        return sum(row.nbytes for row in self.rows if row.use == "cache")

    @cached_property
    def memory(self) -> Any:
        """What the run needs in memory, of a language model's plan with an input; printed as a table.

        It takes a forward pass on tensors without data.
        """
        if self.estimate is None:
            raise HooklineError("the memory is known of a language model's plan with an input: model.plan(…, input=…)")
        return self.estimate()

    def __str__(self) -> str:
        table = [("point", "module", "use", "axes", "shape", "compiled"), *(row.cells() for row in self.rows)]
        columns = [column for column in zip(*table, strict=True) if any(column[1:])]
        widths = [max(map(len, column)) for column in columns]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in zip(*columns, strict=True)
        ]
        foot = f"{how_many(len(self), 'point')} at {how_many(self.modules, 'module')}"
        return "\n".join([*lines, f"{foot}, at most {self.nbytes:,} bytes cached" if self.nbytes else foot])

    __repr__ = __str__


def make_plan(points: Points, uses: Sequence[tuple[HookPoint, str]], input: Any) -> Plan:
    """Return the plan for some points of a model, each with its use."""
    rows = [Row(point.name, type(point.site.module).__name__, use, point.axes) for point, use in uses]
    if input is not None:
        calls = _shapes(points, [point for point, _ in uses], input)
        rows = [row.with_calls(calls.get(row.name, [])) for row in rows]
    return Plan(tuple(rows), len({point.site.module for point, _ in uses}))


def _shapes(points: Points, wanted: list[HookPoint], input: Any) -> dict[str, list[Tensor]]:
    """Run an empty copy of the model on tensors that have shapes but no data; return the tensors of each point."""
    recorder = Recorder(wanted, skips_missing=True)
    log = logging.getLogger(FakeTensorMode.__module__)  # which would print what is raised here
    was_disabled, log.disabled = log.disabled, True
    try:
        _run_empty(points, wanted, recorder, *_arguments(input))
    except Exception as error:  # whatever the model does that needs data
        why = str(error).strip().partition("\n")[0]
        raise HooklineError(
            f"the shapes are not known without running this model on this input ({type(error).__name__}: {why}); "
            f"leave the input out, or run it: net.run_with_cache(…)"
        ) from error
    finally:
        log.disabled = was_disabled
    return recorder.by_point()


def _run_empty(
    points: Points, wanted: list[HookPoint], recorder: Recorder, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    copied = empty_copy(points.root, mode)
    names = points.of_copy(copied)
    records = [Record(names.find(point.name), recorder) for point in wanted]
    with Run(copied, records), GradMode(False), mode:
        copied(*args, **kwargs)


def empty_copy(root: nn.Module, mode: FakeTensorMode) -> nn.Module:
    """Return a copy of the modules without data and without hooks, but for those by which the model reads outputs."""
    need_fake_tensors()
    memo: dict[int, Any] = {}
    for tensor in (*root.parameters(), *root.buffers()):
        memo[id(tensor)] = mode.from_tensor(tensor) if not tensor.is_meta else _on_cpu(tensor, mode)
    for module in root.modules():
        for hooks in (hooks_after(module), hooks_before(module), hooks_on_gradients(module)):
            memo[id(hooks)] = OrderedDict((key, hook) for key, hook in hooks.items() if captures_outputs(hook))
    return copy.deepcopy(root, memo)


def _on_cpu(tensor: Tensor, mode: FakeTensorMode) -> Tensor:
    """A tensor on the meta device as one without data on the CPU, where operations are those of a real run."""
    with mode:
        found = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
    return nn.Parameter(found, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else found


def _arguments(input: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments in `input`: a tensor, a tuple of arguments, a dict of keywords, or `(tuple, dict)` for both."""
    if isinstance(input, dict):
        return (), input
    if isinstance(input, tuple) and len(input) == 2 and isinstance(input[0], tuple) and isinstance(input[1], dict):
        return input
    return (input if isinstance(input, tuple) else (input,)), {}
