"""Patching a region of an image: all positions that cover it, together, from one run into another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Unpack

import torch
from torch import Tensor

from hookline.errors import HooklineError, how_many
from hookline.experiments.core.continuations import continued
from hookline.experiments.core.measure import CellOptions, Options, measured
from hookline.experiments.core.prompts import check_pair, prompt_positions, prompts_of
from hookline.experiments.core.sweep import CellBuilder, SweepPoints, Values, axis_index, make_cells, sweep_points
from hookline.experiments.images.placed import place_image
from hookline.experiments.images.placed import positions as positions_of
from hookline.experiments.patching import Direction, both_runs, check_patch_direction
from hookline.experiments.result import Result
from hookline.functions.listed_options import lists
from hookline.model import HookedModel
from hookline.rerun.baseline import Baseline
from hookline.vision.grid import Box

ImagePrompts = Mapping[str, Any] | Sequence[Mapping[str, Any]]
"""The inputs that `model.to_inputs(text, images=…)` returns for one text, or a list of such inputs."""


@lists(CellOptions, Options)
def patch(
    model: HookedModel,
    clean: ImagePrompts,
    corrupted: ImagePrompts,
    metric: Any,
    *,
    box: Box | Sequence[Box] | None = None,
    positions: Sequence[int] | Sequence[Sequence[int]] | None = None,
    which: int = 0,
    others: bool = False,
    points: str | Sequence[str] = "resid_pre",
    layers: Sequence[int] | None = None,
    direction: Direction = "denoise",
    **options: Unpack[CellOptions],
) -> Result:
    """Patch a region of an image, all its positions together, at each layer: `result.values[layer]`.

        red, blue = (model.to_inputs(prompt, images=[image]) for image in (red_circle, blue_circle))
        lead = metrics.logit_diff(" red", " blue")
        images.patch(model, red, blue, lead, box=(0.1, 0.1, 0.5, 0.5)).normalized.plot()
        images.patch(model, red, blue, lead, box=(0.1, 0.1, 0.5, 0.5), others=True)     # everything else in the image

    The region is a `box` (left, top, right, bottom, as fractions of the image) or a list of prompt `positions`; by
    default it is the whole image. `others` patches the rest of the image instead. For several pairs of prompts, pass
    one `box` (or `positions`) for all, or a list with one per pair. `which` is the index of the image in its prompt.
    The other options are those of `patching.sweep`: "denoise" puts clean activations into the corrupted run, and
    `result.normalized` is 1 where the patch restores the full effect of the clean input.
    """
    check_patch_direction(direction)
    how, where = Options.of(options), sweep_points(model, points, ("layer",), layers)
    _check_points(where)
    pair = [prompts_of(model, clean), prompts_of(model, corrupted)]
    check_pair(model, *pair)  # before comparing their image grids
    inputs = [[prompts] if isinstance(prompts, Mapping) else list(prompts) for prompts in (clean, corrupted)]
    parts = _parts(model, list(zip(*inputs, strict=True)), box, positions, which, others=others)
    metric, pair = continued(model, metric, *pair)
    parts = [part for part in parts for _ in range(pair[0].copies)]
    both = both_runs(model, pair, metric, where.names, direction)
    info = both.info | {"positions": parts[0] if len(parts) == 1 else parts}
    bases, prompts = both.reader.bases, both.reader.prompts
    rows = zip(both.given, bases, parts, strict=True)
    replacements = [_mixed(values, base, where, part) for values, base, part in rows]
    grid = CellBuilder(make_cells(where, bases, both.labels), replacements, bases, prompts).grid()
    return measured(both.reader, grid, info, how, f"{both.source} {parts}")


def _check_points(where: SweepPoints) -> None:
    for point in where.points.values():
        if point.stream == "image" or "p" not in point.axes.split()[1:]:
            raise HooklineError(
                f"{point.name!r} has no prompt positions: images.patch needs a language-model point such as "
                "points='resid_pre'. For the vision tower use patching.sweep"
            )


def _parts(
    model: HookedModel, pairs: Sequence[Any], box: Any, positions: Any, which: int, *, others: bool
) -> list[list[int]]:
    """The positions to patch in each prompt."""
    if box is not None and positions is not None:
        raise HooklineError("pass either box or positions, not both")
    by_box, parts = positions is None, []
    for row, (pair, region) in enumerate(zip(pairs, _for_each(box if by_box else positions, len(pairs)), strict=True)):
        if by_box or others:
            _check_same_places(model, pair, which, row)
        if by_box:
            part = positions_of(model, pair[0], region, which=which)
        else:
            part = prompt_positions(model, prompts_of(model, pair[0]), region, "positions")[0]
        if others:
            part = [position for position in positions_of(model, pair[0], which=which) if position not in part]
        if not part:
            raise HooklineError("others=True leaves nothing to patch: these positions cover the whole image")
        parts.append(part)
    return parts


def _for_each(regions: Any, n: int) -> list[Any]:
    """One entry per prompt, from a single entry or a list."""
    regions = regions.tolist() if isinstance(regions, Tensor) else regions
    if regions is None or (len(regions) and not isinstance(regions[0], Sequence | Tensor)):
        return [regions] * n
    if len(regions) != n:
        raise HooklineError(
            f"box or positions has {len(regions)} entries for {how_many(n, 'prompt')}: pass one for all, or one each"
        )
    return list(regions)


def _check_same_places(model: HookedModel, pair: Sequence[Mapping[str, Any]], which: int, row: int) -> None:
    """Raise unless each position covers the same region in both images."""
    first, second = (place_image(model, inputs, which=which).grid for inputs in pair)
    if first.positions.tolist() != second.positions.tolist() or not torch.allclose(
        first.boxes, second.boxes, atol=1e-3, equal_nan=True
    ):
        raise HooklineError(
            f"the images of pair {row} have different grids: clean has {first!r}, corrupted {second!r}. Use two images "
            "of the same size"
        )


def _mixed(values: Values, base: Baseline, where: SweepPoints, part: list[int]) -> dict[str, Tensor]:
    """The activations of a run, with those of the other run at some positions: a region is one change, not many."""
    mixed = {}
    for point in where.points.values():
        axis, before = axis_index(point, "pos"), base.kept[point.name]
        index = torch.tensor(part, device=before.device)
        mixed[point.name] = before.index_copy(axis, index, values[point.name].to(before).index_select(axis, index))
    return mixed
