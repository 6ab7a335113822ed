"""Measuring: the metrics of many variants of a few runs."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from difflib import get_close_matches
from typing import Any, Literal, Self, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor
from tqdm.auto import tqdm  # type: ignore[import-untyped]

from hookline.engine.halving import Fit
from hookline.engine.snapshots import snapshot
from hookline.errors import HooklineError
from hookline.experiments.core.labels import Label
from hookline.experiments.core.metric_positions import positions_read
from hookline.experiments.core.prompts import Prompts
from hookline.experiments.core.sweep import Grid
from hookline.experiments.metrics import value_of
from hookline.experiments.result import Result
from hookline.rerun.baseline import Baseline
from hookline.rerun.changes import Variant
from hookline.transformer.contexts import GradMode

Metrics: TypeAlias = Mapping[str, Callable[[Tensor], Any]]

_OTHERS = ("points", "over", "direction", "layers", "metric", "steps", "check", "seed", "window", "samples")
"""Arguments of some experiments, to suggest in error messages."""

_ROOM = 2**28
"""Bytes of logits that are held at a time."""


@dataclass(frozen=True)
class Options:
    """The options of every experiment with many cells."""

    per_example: bool = False
    """Keep the value of each prompt, as an axis `example`, instead of their mean."""
    batch_size: int | Literal["auto"] = "auto"
    """How many cells run at once; "auto" chooses by available memory."""
    progress: bool = True
    """Show a progress bar if it takes more than two seconds."""
    resume: Result | None = None
    """The result of an interrupted experiment: only its missing cells are measured."""

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Self:
        """From keyword arguments; an unknown one raises an error."""
        names = [field.name for field in fields(cls)]
        for name in given:
            if name not in names:
                others = [other for other in (*names, *_OTHERS) if other != name]  # another experiment may take it
                near = get_close_matches(name, others, n=1, cutoff=0.6)
                hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(names)}"
                raise HooklineError(f"this experiment has no option {name!r}: {hint}")
        return cls(**given)

    def __post_init__(self) -> None:
        is_number = isinstance(self.batch_size, int) and not isinstance(self.batch_size, bool)
        if self.batch_size != "auto" and not (is_number and self.batch_size >= 1):
            raise HooklineError(f'batch_size is "auto" or a positive number of cells, got {self.batch_size!r}')
        if not isinstance(self.resume, Result | None):
            raise HooklineError(f"resume= takes the Result of an interrupted experiment, got {self.resume!r}")


def padded_logits(bases: Sequence[Baseline], prompts: Prompts) -> Float[Tensor, "batch pos vocab"]:
    """The logits of all prompts in one tensor, zeros at padding."""
    if len(bases) == 1 and prompts.width == bases[0].logits.shape[0]:
        return bases[0].logits[None]
    first = bases[0].logits
    every = first.new_zeros(len(bases), prompts.width, first.shape[-1])
    for row, base in enumerate(bases):
        span = prompts.span(row)
        every[row, span.start : span.stop] = base.logits
    return every


class Reader:
    """Evaluates metrics on the logits of all prompts, at the positions that the metrics read."""

    def __init__(
        self, bases: Sequence[Baseline], prompts: Prompts, metrics: Metrics, *, all_read: bool = False
    ) -> None:
        self.bases, self.prompts, self.metrics = bases, prompts, metrics
        self.fit = Fit("cells")
        self._spans = [prompts.span(row) for row in range(len(prompts))]
        logits = padded_logits(bases, prompts)
        self.baseline = self.values_of(logits)
        read = torch.zeros(prompts.width, dtype=torch.bool)
        for metric in metrics.values():
            read |= positions_read(metric, logits).cpu()
        self.read: list[int] = list(range(prompts.width)) if all_read else read.nonzero().flatten().tolist()
        self._buffer = torch.full_like(logits, torch.nan)
        self._buffer[:, self.read] = logits[:, self.read]
        columns = [[each for each in self.read if each in span] or [span[-1]] for span in self._spans]
        self._columns = [torch.tensor(each, device=logits.device) for each in columns]
        self.positions = [[each - span.start for each in some] for some, span in zip(columns, self._spans, strict=True)]
        """For each prompt, the positions in its text that are read."""

    @property
    def sees_all(self) -> bool:
        """Whether every position is read."""
        return len(self.read) == self.prompts.width

    def values_of(self, logits: Float[Tensor, "batch pos vocab"]) -> Float[Tensor, "metric example"]:
        """The values of the metrics."""
        with GradMode(False):
            found = [value_of(metric, logits, name) for name, metric in self.metrics.items()]
        return torch.stack([each.expand(len(logits)) for each in found])

    def value(self, logits: Sequence[Float[Tensor, "pos vocab"]]) -> Float[Tensor, "metric example"]:
        """The values of the metrics, from the logits of each prompt at the positions that are read; may be NaN."""
        for row, (each, columns) in enumerate(zip(logits, self._columns, strict=True)):
            self._buffer[row].index_copy_(0, columns, each)
        found = []
        with GradMode(False):
            for name, metric in self.metrics.items():
                found.append(self._rows(metric(snapshot(self._buffer, is_ours=True)), name))
        return torch.stack(found) if len(found) > 1 else found[0][None]

    def _rows(self, value: Any, name: str) -> Float[Tensor, " example"]:
        """One number per prompt. NaN is allowed here: the metric may have read a position that is not known."""
        value, rows = torch.as_tensor(value).detach().float(), len(self.bases)
        if value.ndim and value.shape != (rows,):
            raise HooklineError(
                f"{name} returned shape {list(value.shape)} when an activation was changed: a metric returns one "
                f"number per prompt, of shape [{rows}], or one number"
            )
        return value.expand(rows)


def measured(reader: Reader, grid: Grid, info: dict[str, Any], how: Options, source: str = "") -> Result:
    """Measure every cell of a grid; tensors in `info` are values of metrics, by metric and prompt.

    `source` identifies where the changes come from: a result can only be resumed if it is the same.
    """
    if how.per_example:
        _check_by_row(reader)
    names, shape = list(reader.metrics), [len(labels) for labels in grid.coords.values()]
    each: dict[str, Any] = {"per_example": how.per_example, "copies": reader.prompts.copies}
    info = {
        key: packed(x.cpu(), {}, names, **each) if isinstance(x, Tensor) else x
        for key, x in {**info, "experiment": _identity(reader, grid, source)}.items()
    }

    def result(found: Tensor, *, complete: bool = True) -> Any:
        values = found.reshape(len(names), *shape, -1)
        return packed(values, grid.coords, names, **each, info=info, complete=complete)

    blank = torch.full((len(names), len(grid.variants), len(reader.bases)), torch.nan)
    before = _before(how.resume, result(blank), len(names))
    found, complete = measure(reader, grid.variants, how, skip=before)
    if how.resume is not None:
        old = how.resume.values.reshape(len(names), len(grid.variants), -1)
        old = old.repeat_interleave(reader.prompts.copies, -1) if how.per_example else old
        found = torch.where(found.isnan(), old.expand_as(found).to(found), found)
    return result(found, complete=complete)


def packed(
    values: Float[Tensor, "metric *grid example"],
    coords: Mapping[str, list[Label]],
    metrics: Sequence[str],
    *,
    per_example: bool,
    copies: int = 1,
    info: dict[str, Any] | None = None,
    complete: bool = True,
) -> Any:
    """Values as a result, with axes for several metrics and for examples if they are kept; otherwise a number.

    `coords` has the labels of the axes in between; it is empty for a value that is the same for all cells. `copies`
    rows next to each other are one example.
    """
    values = values.unflatten(-1, (-1, copies)).mean(-1) if copies > 1 and values.shape[-1] > 1 else values
    several = len(metrics) > 1
    labels: dict[str, list[Label]] = {"metric": list(metrics)} if several else {}
    labels |= coords
    labels |= {"example": list(range(values.shape[-1]))} if per_example else {}
    values = values if per_example else values.mean(-1)
    values = values if several else values[0]
    name = "metric" if several else metrics[0]
    return Result(values, tuple(labels), labels, name, info or {}, complete) if labels else float(values)


def _check_by_row(reader: Reader) -> None:
    logits = padded_logits(reader.bases, reader.prompts)
    for name, metric in reader.metrics.items():
        if len(logits) > 1 and torch.as_tensor(metric(snapshot(logits, is_ours=True))).ndim == 0:
            raise HooklineError(f"per_example=True, but {name} returns one number for all prompts, not [batch]")


def _before(old: Result | None, new: Result, n_metrics: int) -> list[bool] | None:
    """Which cells an earlier result of the same experiment already has."""
    if old is None:
        return None
    if old.axes != new.axes or any(old.coords[axis] != new.coords[axis] for axis in new.axes):
        raise HooklineError(f"resume= has other cells, over {old.axes}, than this experiment, over {new.axes}")
    _check_same(old, new)
    done = ~old.values.isnan()
    done = done.reshape(n_metrics, -1, len(old.coords["example"]) if "example" in old.axes else 1)
    return done.all(-1).all(0).tolist()


def _identity(reader: Reader, grid: Grid, source: str) -> str:
    """A checksum that identifies an experiment: its prompts, and the points it changes."""
    points = sorted({change.point.canonical_name for cell in grid.variants for variant in cell for change in variant})
    content = "\n".join([reader.prompts.checksum, source, *points])
    return f"{zlib.crc32(content.encode()):08x}"


def _check_same(old: Result, new: Result) -> None:
    """A resumed result must be of the same experiment."""
    known = {key: value for key, value in new.info.items() if key in old.info or key not in ("about", "model")}
    differing = [key for key, value in known.items() if not _is_alike(old.info.get(key), value)]
    if old.name != new.name:
        differing.append("metric")
    if differing:
        raise HooklineError(
            f"resume= is a result of another experiment (different {', '.join(sorted(differing))}): use the same "
            f"prompts, points, metric and options"
        )


def _is_alike(a: Any, b: Any) -> bool:
    if isinstance(b, Result):
        return isinstance(a, Result) and a.shape == b.shape and torch.allclose(a.values, b.values, 1e-3, 1e-4)
    if isinstance(b, float):
        return isinstance(a, int | float) and abs(a - b) <= 1e-3 * max(abs(a), abs(b)) + 1e-4
    return bool(a == b)


def measure(
    reader: Reader, variants: Sequence[Sequence[Variant]], how: Options, *, skip: Sequence[bool] | None = None
) -> tuple[Float[Tensor, "metric variant example"], bool]:
    """The metrics of each variant, which is a list of changes for every prompt; and whether all were measured.

    An interrupt (Ctrl-C) ends it early; variants not measured, or skipped, are NaN.
    """
    values = torch.full((len(reader.metrics), len(variants), len(reader.bases)), torch.nan)
    wanted = [number for number in range(len(variants)) if skip is None or not skip[number]]
    bar = tqdm(total=len(wanted), disable=not how.progress, delay=2, leave=False, unit="cell")
    try:
        for numbers, logits in _blocks(reader, variants, wanted, how):
            found: list[Tensor] = []
            try:
                found.extend(reader.value(each) for each in zip(*logits, strict=True))
            finally:  # also if the block is interrupted
                if found:
                    values[:, numbers[: len(found)]] = torch.stack(found, 1).to(values)
            bar.update(len(numbers))
    except KeyboardInterrupt:
        return values, False
    finally:
        bar.close()
    _fill_in(reader, variants, [number for number in wanted if bool(values[:, number].isnan().any())], values, how)
    return values, True


def _fill_in(
    reader: Reader, variants: Sequence[Sequence[Variant]], numbers: list[int], values: Tensor, how: Options
) -> None:
    """Measure again, with all positions, where a metric read more positions than in the baseline."""
    if not numbers:
        return
    full = reader if reader.sees_all else Reader(reader.bases, reader.prompts, reader.metrics, all_read=True)
    full.fit = reader.fit
    for some, logits in _blocks(full, variants, numbers, how):
        found = torch.stack([full.value(each) for each in zip(*logits, strict=True)], 1)
        if bool(found.isnan().any()):
            names = [name for name, each in zip(reader.metrics, found, strict=True) if bool(each.isnan().any())]
            raise HooklineError(f"{names[0]} returned NaN when an activation was patched: it must return a number")
        values[:, some] = found.to(values)


def _blocks(
    reader: Reader, variants: Sequence[Sequence[Variant]], numbers: Sequence[int], how: Options
) -> Iterator[tuple[list[int], list[Tensor]]]:
    """Indices of some variants with the logits of each prompt, [variant, position, vocab], within the memory limit."""
    rows, vocab = len(reader.bases), reader.bases[0].logits.shape[-1]
    most = max(1, _ROOM // (4 * vocab * max(1, len(reader.read)) * rows))
    ordered = sorted(numbers, key=lambda number: _first(variants[number])) if len(numbers) > most else numbers
    for at in range(0, len(ordered), most):
        block = ordered[at : at + most]
        if rows == 1:
            for some, logits in _rerun(reader, 0, [variants[number][0] for number in block], how):
                yield [block[each] for each in some], [logits]
            continue
        found = []
        for row in range(rows):
            got: dict[int, Tensor] = {}
            for some, logits in _rerun(reader, row, [variants[number][row] for number in block], how):
                got |= dict(zip(some, logits, strict=True))
            found.append(torch.stack([got[each] for each in range(len(block))]))
        yield list(block), found


def _rerun(
    reader: Reader, row: int, variants: Sequence[Variant], how: Options
) -> Iterator[tuple[tuple[int, ...], Tensor]]:
    most = None if how.batch_size == "auto" else how.batch_size
    return reader.bases[row].rerun(variants, positions=reader.positions[row], most_rows=most, fit=reader.fit)


def _first(variant: Sequence[Variant]) -> int:
    """The first position where any prompt's changes show."""
    return min((change.first for changes in variant for change in changes), default=0)
