"""Contrasting prompts: which heads differ between the two prompts of each pair, and which of them matter."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, Unpack

import torch
from jaxtyping import Float
from torch import Tensor

from hookline.engine import HookPoint
from hookline.errors import HooklineError
from hookline.experiments.ablation import Components, Selection
from hookline.experiments.core.continuations import continued
from hookline.experiments.core.labels import Label, about, number_text, said_points
from hookline.experiments.core.measure import BatchOptions, Options, measured
from hookline.experiments.core.prompts import Prompt, Prompts, prompts_of, warn_of_dropout
from hookline.experiments.core.replacements import Method, Replacement
from hookline.experiments.core.sweep import Grid, SweepPoints, axis_index, sweep_points
from hookline.experiments.metrics import Accuracy
from hookline.experiments.result import Result
from hookline.functions.listed_options import lists
from hookline.model import HookedModel
from hookline.pages.text_tables import table
from hookline.text.outliers import Outliers
from hookline.text.token_positions import Meaning, Positions, is_one_per_row, last

__all__ = ["Importance", "ablate_differing", "head_differences"]

Pairs: TypeAlias = Sequence[tuple[str, str]] | Sequence[tuple[Tensor, Tensor]]
Order: TypeAlias = Literal["raises", "lowers", "changes"]
SIDES: list[Label] = ["first", "second"]


def __dir__() -> list[str]:
    return __all__


def head_differences(
    model: HookedModel,
    pairs: Pairs,
    *,
    points: str | Sequence[str] = "z",
    over: str | Sequence[str] = ("layer", "head"),
    layers: Sequence[int] | None = None,
    pos: Positions = last,
    relative: bool = False,
    per_example: bool = False,
) -> Result:
    """How far apart activations are in the two prompts of each pair: `result.values[layer, head]`.

        >>> contrast.head_differences(model, [(clean, corrupted)]).top(1)
        layer  head  value
        3      4     4.293

    The value is the norm of the difference, averaged over pairs, or with `per_example` for each pair; `relative`
    divides by the mean norm of the two. Activations are read at the last position, so prompts may differ in length; or
    at `pos` (as in `run_with_cache`: an index, `token(" Paris")`, …), or with `pos=None` at all positions together, for
    prompts of the same length. At `vision.*` points, all patches of all images are compared together.
    """
    both, where = _checked(pairs), sweep_points(model, points, over, layers)
    if {"pos", "src"} & {*where.inner}:
        raise HooklineError(
            f"over={where.over!r}: positions are selected by pos=…; pos=None compares all positions together"
        )
    warn_of_dropout(model)
    differences = torch.stack([_apart(model, pair, where, pos, relative=relative) for pair in both], -1)
    labels = {
        axis: where.coords.get(axis, list(range(n))) for axis, n in zip(where.over, differences.shape, strict=False)
    }
    labels["example"] = list(range(len(both)))
    name = "relative difference" if relative else "difference"
    info = about(model, f"{said_points(points)} of the two prompts of each pair")
    info["prompts"] = [checksum for prompt, _ in both for checksum in prompts_of(model, prompt).checksums]
    result = Result(differences, tuple(labels), labels, name, info)
    return result if per_example else result.mean("example")


def _checked(pairs: Any) -> list[tuple[Any, Any]]:
    both = list(pairs) if isinstance(pairs, Iterable) and not isinstance(pairs, str | Tensor) else []
    if not both or not all(isinstance(pair, tuple | list) and len(pair) == 2 for pair in both):
        raise HooklineError(f"pairs is a list of pairs of prompts, [(one, another), …], got {pairs!r}")
    return [(a, b) for a, b in both]


def _apart(
    model: HookedModel, pair: tuple[Any, Any], where: SweepPoints, pos: Positions, *, relative: bool
) -> Float[Tensor, "*grid"]:
    """The norms of the differences within one pair."""
    encoded_prompts = [prompts_of(model, prompt) for prompt in pair]
    tokens = [prompts.tokens for prompts in encoded_prompts]
    if any(len(ids) != 1 for ids in tokens):
        raise HooklineError(f"a prompt of a pair is one text, got {[list(ids.shape) for ids in tokens]} tokens")
    first, second = (_cached(model, prompts, where, pos) for prompts in encoded_prompts)
    norms = []
    for point in where.points.values():
        a, b = first[point.name].float(), second[point.name].float()
        if a.shape != b.shape:
            raise HooklineError(
                f"{point.name!r} has the shapes {list(a.shape)} and {list(b.shape)} in the two prompts of a pair, "
                f"which have {tokens[0].shape[1]} and {tokens[1].shape[1]} tokens: use images of one size, or "
                f"compare at one position, pos=-1, points whose shapes do not depend on the length"
            )
        apart, *sizes = (_norm(x, point, where.inner, _pos_at(point, pos)) for x in (a - b, a, b))
        mean = (sizes[0] + sizes[1]) / 2
        norms.append(torch.where(mean > 0, apart / mean, 0.0) if relative else apart)
    return where.laid_out(norms, where.inner)


def _cached(model: HookedModel, prompt: Prompts, where: SweepPoints, pos: Positions) -> dict[str, Tensor]:
    """The activations of a prompt: points with the same positions in one run."""
    activations: dict[str, Tensor] = {}
    for stream in {point.stream == "image" for point in where.points.values()}:
        points = [point for point in where.points.values() if (point.stream == "image") == stream]
        names, at = [point.name for point in points], _pos_at(points[0], pos)
        with torch.no_grad():
            activations |= dict(model.cache(**prompt.one(0), names_filter=names, pos_slice=at))
    return activations


def _pos_at(point: HookPoint, pos: Positions) -> Positions:
    """Where a point is read: the last token is not a patch, so images are compared as a whole."""
    return None if point.stream == "image" and isinstance(pos, Meaning) and pos == last else pos


def _norm(x: Tensor, point: HookPoint, inner: list[str], pos: Positions) -> Tensor:
    """The norm over all axes but the `inner` ones; rows are images or tiles of one prompt."""
    letters, kept_axes = point.axes.split()[1:], []
    for axis in inner:
        place = axis_index(point, axis)
        is_after = "p" in letters and letters.index("p") < place and is_one_per_row(pos)
        kept_axes.append(place if is_after else place + 1)
    gone = [at for at in range(x.ndim) if at not in kept_axes]
    x = torch.linalg.vector_norm(x, dim=gone) if gone else x.abs()
    return x.permute([sorted(kept_axes).index(place) for place in kept_axes])


@dataclass(frozen=True, eq=False, repr=False)
class Importance:
    """The effect of ablating heads that differ between pairs of prompts; prints as a table."""

    heads: list[tuple[int, int]]
    """In the order of their effect."""
    alone: Result
    """The metric over `prompt` (first, second) and `head`, with each head ablated."""
    together: Result
    """The metric over `prompt` and `count`, with the first `count` heads ablated."""
    differences: Result | None = None
    """The result of `head_differences`, if the heads were selected by it."""

    def __repr__(self) -> str:
        names = [f"L{layer}H{head}" for layer, head in self.heads]
        rows = [["without", *map(str, SIDES)], ["nothing", *_column(self.together, 0)]]
        rows += [[name, *_column(self.alone, at)] for at, name in enumerate(names)]
        rows += [[f"the first {count}", *_column(self.together, count)] for count in range(2, len(names) + 1)]
        return f"{self.together.name}, over {len(names)} heads\n{table(rows, '>')}"


def _column(result: Result, at: int) -> list[str]:
    return [number_text(x) for x in result.values[:, at].tolist()]


@lists(BatchOptions, Options)
def ablate_differing(
    model: HookedModel,
    pairs: Pairs,
    answers: Any = None,
    *,
    metric: Any = None,
    heads: int | Sequence[tuple[int, int]] = 8,
    order: Order = "raises",
    method: Method = "zero",
    data: Prompt | None = None,
    outliers: Outliers = "exclude",
    **options: Unpack[BatchOptions],
) -> Importance:
    """Ablate heads that differ between pairs of prompts, individually and jointly, and measure on both prompts.

        >>> found = contrast.ablate_differing(model, [(clean, corrupted)], metric=metric, heads=2)
        >>> found.heads             # ablating the first raises the metric on the second prompts most
        [(3, 4), (0, 4)]

    `answers` are the correct answers, one per pair: the metric is then the accuracy; or pass any `metric` of the
    logits. `heads` is how many of the most different heads are tried (see `head_differences`), or a list of heads. They
    are ordered greedily: the first is the head whose ablation `raises` the metric on the second prompts most (or
    `lowers`, or `changes` it), the next the one that does so in addition to the first, and so on. `method`, `data` and
    `outliers` are as in `ablation.ablate`. Options: batch_size, progress.
    """
    both = _checked(pairs)
    for name in ("resume", "per_example"):
        if name in options:
            raise HooklineError(f"ablate_differing has no option {name!r}: ablation.ablate has")
    how = Options.of(options)
    if (answers is None) == (metric is None):
        raise HooklineError("pass either the correct answers of all pairs, answers=[…], or metric=…")
    metric = metric if answers is None else Accuracy(answers)
    if order not in ("raises", "lowers", "changes"):
        raise HooklineError(f'order is "raises", "lowers" or "changes", got {order!r}')
    differences, chosen = None, heads
    if isinstance(heads, int):
        if isinstance(heads, bool) or heads < 1:
            raise HooklineError(f"heads is a number, at least 1, or a list of (layer, head), got {heads!r}")
        differences = head_differences(model, both)
        chosen = [tuple(cell.labels.values()) for cell in differences.top(heads)]  # type: ignore[misc]
    whole = Replacement(method, data, outliers=outliers)
    sides = [_Side(model, [pair[side] for pair in both], metric, whole, how) for side in (0, 1)]
    keys = [sides[0].components.key(head) for head in chosen]  # type: ignore[union-attr]
    if len(set(keys)) < len(keys) or not keys:
        raise HooklineError(f"heads is a number, or a list of (layer, head) without duplicates, got {heads!r}")
    keys = _ordered(keys, sides[1], order)
    labels: list[Label] = [f"L{layer}H{head}" for layer, head in keys]
    counts: list[Label] = list(range(len(keys) + 1))

    def result(cells: list[list[Any]], axis: str, names: list[Label], **info: Any) -> Result:
        values = torch.stack([side.values(cells) for side in sides])
        coords = {"prompt": SIDES, axis: names}
        return Result(values, ("prompt", axis), coords, sides[0].name, whole.info() | info)

    alone = result([[key] for key in keys], "head", labels)
    together = result([keys[:count] for count in range(len(keys) + 1)], "count", counts, heads=labels)
    return Importance([(int(layer), int(head)) for layer, head in keys], alone, together, differences)


def _ordered(keys: list[Any], side: _Side, order: Order) -> list[Any]:
    """Order heads greedily by their effect in addition to those before."""
    chosen: list[Any] = []
    left = list(keys)
    while left:
        gains = side.values([[*chosen, key] for key in left]) - side.whole
        score = {"raises": gains, "lowers": -gains, "changes": gains.abs()}[order]
        chosen.append(left.pop(int(score.argmax())))
    return chosen


def _together(model: HookedModel, texts: Sequence[Any]) -> Prompts:
    """Texts or tokens of any lengths as rows of one batch."""
    encoded_texts = [prompts_of(model, text) for text in texts]
    return Prompts.of_rows(
        [prompts.tokens[0] for prompts in encoded_texts],
        [inputs for prompts in encoded_texts for inputs in prompts.more],
    )


class _Side:
    """The first or the second prompts of all pairs, and the metric on them without some heads."""

    def __init__(self, model: HookedModel, texts: list[Any], metric: Any, whole: Replacement, how: Options) -> None:
        metric, (prompts,) = continued(model, metric, _together(model, texts))
        self.components = Components.found(model, prompts, Selection("heads", None, ("layer",), None), whole, None)
        self.reader, self.how = self.components.reader(metric), how
        if len(self.reader.metrics) > 1:
            raise HooklineError(f"ablate_differing needs one metric, got {len(self.reader.metrics)}")
        self.name = next(iter(self.reader.metrics))
        self.whole = self.reader.baseline.mean().cpu()

    def values(self, cells: Sequence[Sequence[Any]]) -> Float[Tensor, " cell"]:
        """The metric without the heads of each cell."""
        grid = Grid(
            ("cell",), {"cell": list(range(len(cells)))}, [self.components.builder.variant_for(keys) for keys in cells]
        )
        result = measured(self.reader, grid, {}, self.how)
        if not result.complete:
            raise KeyboardInterrupt  # the order depends on all of them
        return result.values
