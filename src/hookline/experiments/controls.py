"""Controls: whether a random direction, change or set of components of the same size would have done the same.

    result = controls.direction(model, prompts, metric, direction, layer=2, pos=-1)
    result.effect, result.control.low, result.control.high

Everything is measured in the same batches as the effect: a control of 20 draws takes less than twice as long. The
sweeps of `patching`, `ablation` and `steering` have a control of their own, `result.control`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from hookline.errors import HooklineError
from hookline.experiments.ablation import Of, Selection, prepared
from hookline.experiments.core.aligned import Aligned, PromptPositions
from hookline.experiments.core.continuations import continued
from hookline.experiments.core.labels import number_text
from hookline.experiments.core.measure import Options, Reader, measure, reader_of
from hookline.experiments.core.prompts import (
    Prompt,
    Prompts,
    baselines,
    check_language_model,
    prompts_of,
)
from hookline.experiments.core.random_changes import DRAWS, Control, extremes, random_variants
from hookline.experiments.core.replacements import Method, Replacement
from hookline.experiments.core.sweep import CellBuilder, Cells, layer_number
from hookline.experiments.steering import Directions
from hookline.hooks.data_edits import DataEdit
from hookline.model import HookedModel
from hookline.rerun.changes import Variant

__all__ = ["ControlComparison", "ablated", "contrast", "direction", "point_edit"]


def __dir__() -> list[str]:
    return __all__


@dataclass(frozen=True, eq=False, repr=False)
class ControlComparison:
    """The change of a metric by what was tested, and the range of the changes by random draws of the same size."""

    about: str
    effect: float
    control: Control
    draws: Float[Tensor, " draw"]
    """The change of the metric in each draw."""
    info: dict[str, Any] = field(default_factory=dict)

    @property
    def is_outside(self) -> bool:
        """Whether the effect is outside the range of the control."""
        return not self.control.low <= self.effect <= self.control.high

    def __repr__(self) -> str:
        ends = f"{number_text(self.control.low)} to {number_text(self.control.high)}"
        verdict = "outside" if self.is_outside else "inside"
        return (
            f"{self.about}: effect {number_text(self.effect)}, {verdict} the control's range, {ends} "
            f"({self.control.draws} {self.control.of})"
        )


def direction(
    model: HookedModel,
    prompts: Prompt,
    metric: Any,
    direction: Float[Tensor, " d"] | Directions,
    *,
    layer: int,
    pos: PromptPositions = None,
    coefficient: float = 1.0,
    points: str = "resid_post",
    draws: int = DRAWS,
    seed: int = 0,
    batch_size: int | Literal["auto"] = "auto",
) -> ControlComparison:
    """Add a direction at a layer, and compare its effect with those of random directions of the same norm.

        >>> vectors = steering.contrast_vectors(model, texts[1], texts[0])
        >>> metric = metrics.logit_diff(" Rome", " Paris")
        >>> found = controls.direction(model, texts[0], metric, vectors, layer=3, pos=-1)
        >>> found.is_outside
        True

    The effect is the metric with the direction, times the coefficient, minus that of the unmodified model, as a mean
    over the prompts. It is added at every position, or at `pos`, counted within each prompt. The range of the control
    has no change in it too: an effect is outside if it is larger than that of every draw in its direction.
    """
    check_language_model(model)
    number = layer_number(layer, model.cfg.n_layers)
    vectors = direction if isinstance(direction, Directions) else _bare(direction, number, points)
    point = vectors.point(model, number)
    prepared_runs = _Runs.of(model, prompts, metric, [point.name], pos)
    added = coefficient * vectors.fitting(model, number)
    tested = prepared_runs.added(point, added)
    drawn = random_variants([tested], _count(draws), seed)
    info = {"layer": number, "coefficient": coefficient}
    of = "random directions of equal norm"
    return prepared_runs.compared(f"direction at {point.name}", tested, drawn, of, info, batch_size)


def contrast(
    model: HookedModel,
    positive: Prompt,
    negative: Prompt,
    prompts: Prompt,
    metric: Any,
    *,
    layer: int,
    pos: PromptPositions = None,
    read: int = -1,
    coefficient: float = 1.0,
    points: str = "resid_post",
    draws: int = DRAWS,
    seed: int = 0,
    batch_size: int | Literal["auto"] = "auto",
) -> ControlComparison:
    """Add the difference of the means of two kinds of prompts, and compare it with that of shuffled labels.

        >>> metric = metrics.logit_diff(" Rome", " Paris")
        >>> found = controls.contrast(model, texts[1], texts[0], texts[0], metric, layer=3, pos=-1)
        >>> round(found.effect, 1)
        24.3

    The prompts of both kinds are shuffled, and divided again into two lists as long as these; the difference of their
    means is scaled to the norm of the tested one. Activations are read at position `read`, the last by default. Few
    prompts have few divisions: two prompts only the reverse one.
    """
    check_language_model(model)
    number = layer_number(layer, model.cfg.n_layers)
    point = _bare(torch.ones(model.cfg.d_model), number, points).point(model, number)
    sides = [_read(model, side, point.name, read) for side in (positive, negative)]
    rows, count = torch.cat(sides), len(sides[0])
    tested = rows[:count].mean(0) - rows[count:].mean(0)
    norm = tested.norm()
    if not bool(norm > 0):
        raise HooklineError(f"the two kinds of prompts have the same mean at {point.name!r}: there is no direction")
    generator = torch.Generator().manual_seed(seed)
    prepared_runs = _Runs.of(model, prompts, metric, [point.name], pos)
    drawn = []
    for _ in range(_count(draws)):
        order = _shuffled(len(rows), count, generator)
        other = rows[order[:count]].mean(0) - rows[order[count:]].mean(0)
        drawn.append(prepared_runs.added(point, coefficient * other * (norm / other.norm().clamp_min(1e-30))))
    info = {"layer": number, "coefficient": coefficient}
    changes = prepared_runs.added(point, coefficient * tested)
    of = "directions from shuffled labels, of equal norm"
    return prepared_runs.compared(f"difference of means at {point.name}", changes, drawn, of, info, batch_size)


def point_edit(
    model: HookedModel,
    prompts: Prompt,
    metric: Any,
    hook: tuple[str, DataEdit],
    *,
    draws: int = DRAWS,
    seed: int = 0,
    batch_size: int | Literal["auto"] = "auto",
) -> ControlComparison:
    """Compare the effect of an edit at a point with random changes, as large as it is at each position and head.

        >>> found = controls.point_edit(model, prompt, metrics.logit_diff(" Mary", " John"), ("z3", edits.zero(head=4)))
        >>> round(found.effect, 1), found.is_outside
        (-8.8, False)

    Positions and heads that the edit leaves unchanged stay so: here the random changes are of head 4, and as long as
    its activation.
    """
    if not isinstance(hook, tuple) or len(hook) != 2 or not isinstance(hook[1], DataEdit):
        raise HooklineError(f"an edit is a pair (point, edit), such as ('z3', edits.zero(head=4)), got {hook!r:.80}")
    check_language_model(model)
    selected = model.index.select(hook[0])
    if len(selected) != 1:
        raise HooklineError(f"{hook[0]!r} is {len(selected)} points: compare an edit at one point with its control")
    point = selected[0]
    prepared_runs = _Runs.of(model, prompts, metric, [point.name], None)
    new = []
    for row in range(len(prepared_runs.prompts)):
        with torch.no_grad():
            cache = model.run_with_cache(
                **prepared_runs.prompts.one(row), names_filter=point.name, fwd_hooks=[(point.name, hook[1])]
            )[1]
        new.append(cache[point.name][0])
    tested = prepared_runs.written(point, new)
    drawn = random_variants([tested], _count(draws), seed)
    of = "random changes of equal norm"
    return prepared_runs.compared(f"{hook[1]!r} at {point.name}", tested, drawn, of, {}, batch_size)


def ablated(
    model: HookedModel,
    prompts: Prompt,
    metric: Any,
    components: Sequence[Any],
    *,
    of: Of | None = None,
    method: Method = "zero",
    data: Prompt | None = None,
    draws: int = DRAWS,
    seed: int = 0,
    batch_size: int | Literal["auto"] = "auto",
) -> ControlComparison:
    """Ablate a set of components together, and compare it with random sets of as many other components.

        >>> metric = metrics.logit_diff(" Mary", " John")
        >>> controls.ablated(model, prompt, metric, ["L3H4"]).is_outside
        True

    Components are given as in `ablation.cumulative`; `of`, `method` and `data` are those of `ablation.ablate`.
    """
    replacement = Replacement(method, data, False, seed if method == "resample" else None)
    selection = Selection(of, None, ("layer",), None)
    found, reader, info = prepared(model, prompts, metric, selection, replacement, None)
    keys = [found.key(component) for component in components]
    others = [key for key in found.builder.cells.covered if key not in keys]
    if not keys or len({*keys}) < len(keys):
        raise HooklineError(f"components is a list of different components, got {list(components)!r:.80}")
    if len(others) < len(keys):
        raise HooklineError(
            f"{len(keys)} of {len(keys) + len(others)} components leave too few for random sets of the same size"
        )
    generator = torch.Generator().manual_seed(seed)
    drawn = []
    for _ in range(_count(draws)):
        chosen = torch.randperm(len(others), generator=generator)[: len(keys)].tolist()
        drawn.append(found.builder.variant_for([others[at] for at in chosen]))
    about = f"{len(keys)} {info['choice']['of']} ablated"
    sets = "random sets of as many others"
    return _compared(reader, about, found.builder.variant_for(keys), drawn, sets, {}, batch_size)


@dataclass(frozen=True, eq=False)
class _Runs:
    """The runs on the prompts that changes are made in, and the positions of these changes."""

    reader: Reader
    prompts: Prompts
    positions: Aligned | None

    @classmethod
    def of(cls, model: HookedModel, prompts: Prompt, metric: Any, names: list[str], pos: PromptPositions) -> _Runs:
        check_language_model(model)
        metric, (rows,) = continued(model, metric, prompts_of(model, prompts))
        bases = baselines(model, rows, keep=names)
        positions = None if pos is None else Aligned.of(model, rows, pos, apart=False, name="pos")
        return cls(reader_of(model, bases, rows, metric), rows, positions)

    def added(self, point: Any, vector: Tensor) -> list[Variant]:
        """For each prompt, the change that adds a vector at the positions."""
        return self.written(point, [base.kept[point.name] + vector.to(base.kept[point.name]) for base in self._bases])

    def written(self, point: Any, values: Sequence[Tensor]) -> list[Variant]:
        """For each prompt, the change to this value."""
        cells = Cells({}, {(): [(point, {})]})
        activations = [{point.name: value} for value in values]
        return CellBuilder(cells, activations, self._bases, self.prompts, self.positions).variant_for([()])

    @property
    def _bases(self) -> Sequence[Any]:
        return self.reader.bases

    def compared(self, *args: Any) -> ControlComparison:
        """The effect of a change, and those of others."""
        return _compared(self.reader, *args)


def _compared(
    reader: Reader,
    about: str,
    tested: list[Variant],
    drawn: list[list[Variant]],
    of: str,
    info: dict[str, Any],
    batch_size: int | Literal["auto"],
) -> ControlComparison:
    """Measure all of them in the same batches."""
    if len(reader.metrics) != 1:
        raise HooklineError(f"a control compares one metric, but there are {', '.join(reader.metrics)}: one at a time")
    if not any(tested):
        raise HooklineError(f"{about}: it changes nothing, so there is no effect to compare")
    values, is_complete = measure(reader, [tested, *drawn], Options(batch_size=batch_size))
    if not is_complete:
        raise KeyboardInterrupt
    clean = reader.baseline.cpu().mean(-1)
    means = values.mean(-1)
    low, high = (float(end - clean) for end in extremes(means[:, 1:], clean))
    changes = means - clean[:, None]
    (name,) = reader.metrics
    control = Control(low, high, len(drawn), of)
    return ControlComparison(
        f"{name}, {about}", float(changes[0, 0]), control, changes[0, 1:], {"clean": float(clean[0]), **info}
    )


def _bare(vector: Any, layer: int, points: str) -> Directions:
    if not isinstance(vector, Tensor) or vector.ndim != 1 or not vector.is_floating_point():
        raise HooklineError("a direction is a float tensor [d_model], or the Directions of contrast_vectors")
    return Directions(vector.detach()[None], [layer], points)


def _read(model: HookedModel, prompts: Prompt, name: str, position: int) -> Float[Tensor, "prompt d"]:
    """The activation of each prompt at one position."""
    texts, rows = prompts_of(model, prompts), []
    for row in range(len(texts)):
        with torch.no_grad():
            rows.append(model.cache(**texts.one(row), names_filter=name)[name][0, position])
    return torch.stack(rows).double()


def _shuffled(size: int, count: int, generator: torch.Generator) -> list[int]:
    """A random order in which the first `count` are others than before, unless all are."""
    while True:
        order: list[int] = torch.randperm(size, generator=generator).tolist()
        if {*order[:count]} != {*range(count)}:
            return order


def _count(draws: Any) -> int:
    if isinstance(draws, bool) or not isinstance(draws, int) or draws < 1:
        raise HooklineError(f"draws is how many random draws the effect is compared with, at least 1, got {draws!r}")
    return draws
