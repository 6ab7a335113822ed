"""Pairs of prompts: which heads differ between the two of each pair, and which of those matter."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from hookline.engine.points import HookPoint
from hookline.errors import HooklineError
from hookline.experiments.core.component_grid import Choice, Units
from hookline.experiments.core.continuations import continued
from hookline.experiments.core.labels import Label, about, said_points
from hookline.experiments.core.measure import Options, measured
from hookline.experiments.core.prompts import Prompt, Prompts, prompts_of, warn_of_dropout
from hookline.experiments.core.replacements import By, Replacement
from hookline.experiments.core.sweep import Grid, Places, places
from hookline.experiments.metrics import Rank, Read
from hookline.experiments.result import Result
from hookline.model import HookedModel
from hookline.rerun.changes import index_of
from hookline.text.outliers import Outliers
from hookline.text.token_positions import Meaning, Positions, is_one_per_row, last

Pairs: TypeAlias = Sequence[tuple[str, str]] | Sequence[tuple[Tensor, Tensor]]
Order: TypeAlias = Literal["raises", "lowers", "changes"]
SIDES: list[Label] = ["first", "second"]


@dataclass(frozen=True, eq=False, repr=False)
class Right(Rank):
    """Whether the answer is the likeliest token: 1 or 0, so that the average is the share of right answers."""

    name = "right"
    example = 'pairs.right(" Paris")'

    def __call__(self, logits: Float[Tensor, "batch pos vocab"]) -> Float[Tensor, " batch"]:
        """1 or 0 in each row; NaN where a logit is."""
        rank = super().__call__(logits)
        return (rank == 0).to(rank).masked_fill(rank.isnan(), math.nan)

    def of_tokens(self, read: Mapping[str, Read]) -> Float[Tensor, " batch"]:
        """Whether each of its tokens is the likeliest after those before it: what greedy generation would write."""
        found = []
        for there, ids in read["answer"]:
            is_right = (there.argmax(-1) == ids).all().to(there.dtype)
            found.append(is_right.masked_fill(there.isnan().any(), math.nan))
        return torch.stack(found)


right = Right


def compare(
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

        pairs.compare(model, [(question, question_after_an_opinion), …]).top(5)

    It is the norm of the difference, averaged over pairs, or with `per_example` for each; `relative` to the norms of
    the two. Activations are those at the last position, so prompts may differ in length; at another one (`pos` is as in
    `run_with_cache`: an index, `token(" Paris")`, …), or with `pos=None` at all of them together, if there are as many.
    At `vision.*` points it is all patches of all images and tiles together, or with `pos` given, those of each of them.
    """
    both, where = _checked(pairs), places(model, points, over, layers)
    inner = [axis for axis in where.over if axis not in where.coords]
    if {"pos", "src"} & {*inner}:
        raise HooklineError(
            f"over={where.over!r}: pairs are compared at pos=…, or with pos=None at all positions together"
        )
    warn_of_dropout(model)
    found = torch.stack([_apart(model, pair, where, inner, pos, relative=relative) for pair in both], -1)
    labels = {
        axis: where.coords.get(axis, list(range(size))) for axis, size in zip(where.over, found.shape, strict=False)
    }
    name = "relative difference" if relative else "difference"
    info = about(model, f"{said_points(points)} of the two prompts of each pair")
    if not per_example:
        return Result(found.mean(-1), where.over, labels, name, info)
    return Result(found, (*where.over, "example"), {**labels, "example": list(range(len(both)))}, name, info)


def _checked(pairs: Any) -> list[tuple[Any, Any]]:
    both = list(pairs) if isinstance(pairs, Iterable) and not isinstance(pairs, str | Tensor) else []
    if not both or not all(isinstance(pair, tuple | list) and len(pair) == 2 for pair in both):
        raise HooklineError(f"pairs are a list of two prompts each, [(one, another), …], not {pairs!r}")
    return [(a, b) for a, b in both]


def _apart(
    model: HookedModel, pair: tuple[Any, Any], where: Places, inner: list[str], pos: Positions, *, relative: bool
) -> Float[Tensor, "*grid"]:
    """The norms of the differences within one pair."""
    given = [prompts_of(model, prompt) for prompt in pair]
    tokens = [each.tokens for each in given]
    if any(len(each) != 1 for each in tokens):
        raise HooklineError(f"each prompt of a pair is one text, not {[list(each.shape) for each in tokens]} tokens")
    caches = {seen: [_cached(model, each, where, pos, of_images=seen) for each in given] for seen in (False, True)}
    norms = []
    for point in where.points.values():
        of_images = point.stream == "image"
        a, b = (cache[point.name].float() for cache in caches[of_images])
        if a.shape != b.shape and of_images:
            raise HooklineError(
                f"{point.name!r} has the shapes {list(a.shape)} and {list(b.shape)} in the two prompts of a pair: give "
                f"images of one size, as many in each"
            )
        if a.shape != b.shape:
            raise HooklineError(
                f"the prompts of a pair have {tokens[0].shape[1]} and {tokens[1].shape[1]} tokens, and {point.name!r} "
                f"the shapes {list(a.shape[1:])} and {list(b.shape[1:])}: compare them at one position, pos=-1, and at "
                f"points whose shapes do not depend on the length"
            )
        where_read = _pos_of(pos, of_images=of_images)
        apart, *sizes = (_norm(x, point, inner, where_read) for x in (a - b, a, b))
        mean = (sizes[0] + sizes[1]) / 2
        norms.append(torch.where(mean > 0, apart / mean, 0.0) if relative else apart)
    if len({x.shape for x in norms}) > 1:
        raise HooklineError(f"the points differ in how many {' and '.join(inner)}s they have: compare them apart")
    outer = [axis for axis in where.over if axis in where.coords]
    x = torch.stack(norms).reshape([*(len(where.coords[axis]) for axis in outer), *norms[0].shape])
    axes = [*outer, *inner]
    return x.permute([axes.index(axis) for axis in where.over])


def _cached(model: HookedModel, prompt: Prompts, where: Places, pos: Positions, *, of_images: bool) -> Any:
    """What a prompt has at the points of images, or at the others."""
    names = [point.name for point in where.points.values() if (point.stream == "image") == of_images]
    if not names:
        return {}
    with torch.no_grad():
        return model.cache(**prompt.one(0), names_filter=names, pos_slice=_pos_of(pos, of_images=of_images))


def _pos_of(pos: Positions, *, of_images: bool) -> Positions:
    """Where a point is read: the last token is no patch, so images are compared as a whole."""
    return None if of_images and isinstance(pos, Meaning) and pos == last else pos


def _norm(x: Tensor, point: HookPoint, inner: list[str], pos: Positions) -> Tensor:
    """Over all axes but those that are gone along; rows are images or tiles of one prompt."""
    places_kept = []
    for axis in inner:
        place = next(at for at, each in enumerate(index_of(point, **{axis: 0})) if isinstance(each, int))
        letters = point.axes.split()[1:]
        is_after = "p" in letters and letters.index("p") < place and is_one_per_row(pos)
        places_kept.append(place if is_after else place + 1)
    gone = [at for at in range(x.ndim) if at not in places_kept]
    x = torch.linalg.vector_norm(x, dim=gone) if gone else x.abs()
    return x.permute([sorted(places_kept).index(place) for place in places_kept])


@dataclass(frozen=True, eq=False, repr=False)
class Importance:
    """What heads that differ between pairs of prompts are there for; prints as a table."""

    heads: list[tuple[int, int]]
    """In the order of what they matter."""
    alone: Result
    """The metric over `prompt` (first, second) and `head`, without each of them."""
    together: Result
    """The metric over `prompt` and `count`: without the first so many of them, from none on."""
    differences: Result | None = None
    """How much each head of the model differs, if the heads were found by that."""

    def __repr__(self) -> str:
        names = [f"L{layer}H{head}" for layer, head in self.heads]
        rows = [["without", *map(str, SIDES)], ["nothing", *_column(self.together, 0)]]
        rows += [[name, *_column(self.alone, at)] for at, name in enumerate(names)]
        for count in range(2, len(names) + 1):
            rows.append([f"the first {count}", *_column(self.together, count)])
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [f"{row[0]:<{widths[0]}}  {row[1]:>{widths[1]}}  {row[2]:>{widths[2]}}" for row in rows]
        return "\n".join([f"{self.together.name}, over {len(names)} heads", *lines])


def _column(result: Result, at: int) -> list[str]:
    return [f"{x:.4g}" for x in result.values[:, at].tolist()]


def matter(
    model: HookedModel,
    pairs: Pairs,
    answers: Any = None,
    *,
    metric: Any = None,
    heads: int | Sequence[tuple[int, int]] = 8,
    order: Order = "raises",
    by: By = "zero",
    data: Prompt | None = None,
    outliers: Outliers = "exclude",
    **options: Any,
) -> Importance:
    """Switch off heads that differ between pairs of prompts, each alone and together, and measure on both prompts.

        found = pairs.matter(model, [(question, question_after_a_wrong_opinion), …], answers=[" Paris", …])
        found.heads[:2]                       # without these the second prompts get the most right answers
        print(found)

    `answers` are the right ones, one for each pair: the metric is then the share of right answers; or give any `metric`
    of the logits. `heads` is how many of those that differ most are tried (see `compare`), or which. The first is the
    one that, switched off, `raises` the metric on the second prompts most (or `lowers`, or `changes` it); the next the
    one that does so beside the first; and so on. What stands in their place, `by`, `data` and `outliers`, is
    as in `ablation.ablate`. Options: batch_size, progress.
    """
    both = _checked(pairs)
    how = _options(options)
    if (answers is None) == (metric is None):
        raise HooklineError("give the right answers of all pairs, answers=[…], or a metric=…: one of the two")
    metric = metric if answers is None else Right(answers)
    if order not in ("raises", "lowers", "changes"):
        raise HooklineError(f'order is "raises", "lowers" or "changes", what heads do to the metric, not {order!r}')
    differences = compare(model, both) if isinstance(heads, int) else None
    chosen = _chosen(differences, heads)
    whole = Replacement(by, data, outliers=outliers)
    sides = [_Side(model, [pair[side] for pair in both], metric, whole, how) for side in (0, 1)]
    keys = [sides[0].units.key(head) for head in chosen]
    if len(set(keys)) < len(keys) or not keys:
        raise HooklineError(f"heads are several (layer, head), each once, or how many: not {heads!r}")
    keys = _ordered(keys, sides[1], order)
    alone = torch.stack([side.values([[key] for key in keys]) for side in sides])
    together = torch.stack([side.values([keys[:count] for count in range(len(keys) + 1)]) for side in sides])
    labels: list[Label] = [f"L{layer}H{head}" for layer, head in keys]
    return Importance(
        [(int(layer), int(head)) for layer, head in keys],
        Result(alone, ("prompt", "head"), {"prompt": SIDES, "head": labels}, sides[0].name, whole.info()),
        Result(
            together,
            ("prompt", "count"),
            {"prompt": SIDES, "count": list(range(len(keys) + 1))},
            sides[0].name,
            {**whole.info(), "heads": labels},
        ),
        differences,
    )


def _ordered(keys: list[Any], side: _Side, order: Order) -> list[Any]:
    """Each the one that does most beside those before it."""
    chosen: list[Any] = []
    left = list(keys)
    while left:
        gains = side.values([[*chosen, key] for key in left]) - side.whole
        score = {"raises": gains, "lowers": -gains, "changes": gains.abs()}[order]
        chosen.append(left.pop(int(score.argmax())))
    return chosen


def _options(options: dict[str, Any]) -> Options:
    for name in ("resume", "per_example"):
        if name in options:
            raise HooklineError(f"matter takes batch_size and progress, but no {name}: ablation.ablate does")
    return Options.of(options)


def _chosen(differences: Result | None, heads: Any) -> list[Any]:
    if differences is None:
        return list(heads)
    if isinstance(heads, bool) or heads < 1:
        raise HooklineError(f"heads is how many are tried, from 1 on, or a list of (layer, head), not {heads!r}")
    return [tuple(cell.labels.values()) for cell in differences.top(heads)]


def _together(model: HookedModel, texts: Sequence[Any]) -> Prompts:
    """Texts or tokens, of any lengths, as rows."""
    given = [prompts_of(model, text) for text in texts]
    rows = [each.tokens[0] for each in given]
    masks = [torch.ones_like(row, dtype=torch.bool) for row in rows]
    more = tuple(inputs for each in given for inputs in each.more)
    return Prompts(pad_sequence(rows, batch_first=True), pad_sequence(masks, batch_first=True), more)


class _Side:
    """The first or the second prompts of all pairs, and what a metric says of them without some heads."""

    def __init__(self, model: HookedModel, texts: list[Any], metric: Any, whole: Replacement, how: Options) -> None:
        metric, (prompts,) = continued(model, metric, _together(model, texts))
        self.units = Units.found(model, prompts, Choice("heads", None, ("layer",), None), whole, None)
        self.reader, self.how = self.units.reader(metric), how
        if len(self.reader.metrics) > 1:
            raise HooklineError(f"heads matter by one metric, not by {len(self.reader.metrics)}: choose one")
        self.name = next(iter(self.reader.metrics))
        self.whole = self.reader.baseline.mean().cpu()

    def values(self, cells: Sequence[Sequence[Any]]) -> Float[Tensor, " cell"]:
        """The metric without the heads of each cell."""
        grid = Grid(("cell",), {"cell": list(range(len(cells)))}, [self.units.together(keys) for keys in cells])
        result = measured(self.reader, grid, {}, self.how)
        if not result.complete:
            raise KeyboardInterrupt  # what comes next is chosen by all of them
        return result.values
