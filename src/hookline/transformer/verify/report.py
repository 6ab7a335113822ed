"""verify: the verdict on every point of a model."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, get_args

from hookline.progress import progress_bar
from hookline.transformer.memory.halving import BatchFitter, is_out_of_memory
from hookline.transformer.verify.checks import CHECKS, Check
from hookline.transformer.verify.probe import Probe

if TYPE_CHECKING:
    from hookline.transformer.wrapped import WrappedTransformer

Status = Literal["proved", "unavailable", "failed"]


@dataclass(frozen=True)
class Verdict:
    """The status of one point, and the reason if it is not proved."""

    name: str
    status: Status
    why: str = ""


@dataclass(frozen=True, repr=False)
class Report:
    """The verdicts on all points of a model; `print` it for a table."""

    architecture: str
    verdicts: tuple[Verdict, ...]

    def failed(self) -> list[Verdict]:
        """The points that failed a check."""
        return [verdict for verdict in self.verdicts if verdict.status == "failed"]

    def to_json(self) -> dict[str, Any]:
        """The verdicts as values for JSON, and how many there are of each status."""
        return {"architecture": self.architecture, "counts": self._counts(), "points": list(map(asdict, self.verdicts))}

    def __str__(self) -> str:
        return "\n".join([*_table(self.verdicts), self._summary()])

    def __repr__(self) -> str:
        """The counts, and the points that failed."""
        failures = [f"  {line}" for line in _table(self.failed())]
        return "\n".join([f"<Report of {self._summary()}; print it to see every point>", *failures])

    def _counts(self) -> dict[str, int]:
        statuses = [verdict.status for verdict in self.verdicts]
        return {status: statuses.count(status) for status in get_args(Status)}

    def _summary(self) -> str:
        return f"{self.architecture}: {', '.join(f'{count} {status}' for status, count in self._counts().items())}"


def _table(verdicts: Sequence[Verdict]) -> list[str]:
    width = max((len(verdict.name) for verdict in verdicts), default=0)
    return [f"{verdict.name:<{width}}  {verdict.status:<11}  {verdict.why}".rstrip() for verdict in verdicts]


def verify_model(model: WrappedTransformer, inputs: dict[str, Any], *, progress: bool = False) -> Report:
    """Check every point of `model` on `inputs`, the keyword arguments of its forward."""
    probe = Probe(model, inputs)
    total = 2 * len(CHECKS) + probe.zeroing_runs()  # about: a check that fails is repeated point by point
    what = f"verifying {len(probe.names)} points"
    with progress_bar(progress, total, " runs", what) as bar:
        probe.on_run = bar.update
        failed = _failures(probe)
    verdicts = []
    for name, spec in model.index.specs.items():
        if spec.site is None:
            verdicts.append(Verdict(name, "unavailable", spec.why))
        elif probe.is_untested(name):
            verdicts.append(Verdict(name, "unavailable", "not tested: the inputs have no image"))
        else:
            verdicts.append(Verdict(name, "failed" if name in failed else "proved", failed.get(name, "")))
    return Report(probe.anatomy.kind, tuple(verdicts))


def _failures(probe: Probe) -> dict[str, str]:
    """Every point that fails a check, with the reason of the first failure."""
    failed: dict[str, str] = {}
    # Points on request are tested apart: a norm and per-head inputs cannot be edited together.
    on_request = {name: probe.model.index.specs[name].is_on_request for name in probe.names}
    fit = BatchFitter("layers")
    for check, is_apart in itertools.product(CHECKS, (False, True)):
        names = [name for name in probe.names if on_request[name] == is_apart and name not in failed]
        by_layer = [list(group) for _, group in itertools.groupby(names, lambda name: _LAYER.match(name)[0])]  # type: ignore[index]
        for _, failures in fit.parts(by_layer, partial(_failing, check, probe, names)):
            failed = dict(failures) | failed
    return failed


_LAYER = re.compile(r"(.*?\.\d+\.)?")


def _failing(check: Check, probe: Probe, every: list[str], layers: Sequence[list[str]]) -> list[tuple[str, str]]:
    """The points of some layers that fail a check; `every` lists all points under test."""
    names = [name for layer in layers for name in layer]
    # The output of a layer is compared with the input of the next, so the last of these layers needs that too.
    after = every[every.index(names[-1]) + 1 :][:1]
    return list(_checked(check, probe, names + [name for name in after if name.endswith("hook_resid_pre")]))


def _checked(check: Check, probe: Probe, names: list[str]) -> Iterator[tuple[str, str]]:
    """Check all points at once; if that raises, one by one, to find the point that raises."""
    try:
        yield from list(check(probe, names))
    except Exception as error:  # any error counts as a failure of the point, except running out of memory
        if is_out_of_memory(error):
            raise
        if len(names) == 1:
            cause = getattr(error, "original_error", None) or error  # a hook's name and line say nothing of the model
            yield names[0], f"raises {type(cause).__name__}: {str(cause).partition(chr(10))[0]}"
            return
        for name in names:
            yield from _checked(check, probe, [name])
