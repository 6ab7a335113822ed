"""Replacements for ablated activations: zeros, a mean, or the activation of another text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from hookline.engine.points import HookPoint
from hookline.errors import HooklineError
from hookline.experiments.core.continuations import longer
from hookline.experiments.core.means import Mean
from hookline.experiments.core.prompts import Prompt, Prompts, prompts_of
from hookline.experiments.core.sweep import Values
from hookline.model import HookedModel
from hookline.rerun.baseline import Baseline
from hookline.rerun.image_inputs import in_one_row
from hookline.text.outliers import Outliers, Outlying, factor_of

Method: TypeAlias = Literal["zero", "mean", "resample"]


@dataclass(frozen=True, eq=False)
class Replacement:
    """How activations are replaced: see `ablation.ablate`."""

    method: Method = "zero"
    data: Prompt | None = None
    per_position: bool = False
    seed: int | None = None
    outliers: Outliers = "exclude"
    left_out: dict[str, Outlying] = field(default_factory=dict)
    """The outlying positions that the mean excludes, by point; filled in by `values`."""

    def __post_init__(self) -> None:
        if self.method not in ("zero", "mean", "resample"):
            raise HooklineError(f'method is "zero", "mean" or "resample", got {self.method!r}')
        if self.method == "zero" and self.data is not None:
            raise HooklineError('method="zero" needs no data: remove it, or use method="mean" or method="resample"')
        if self.method != "mean" and self.per_position:
            raise HooklineError(f'per_position needs method="mean", got method={self.method!r}')
        if self.method != "resample" and self.seed is not None:
            raise HooklineError(f'seed needs method="resample", got method={self.method!r}')
        factor_of(self.outliers)  # it checks them
        if self.method != "mean" and self.outliers != "exclude":
            raise HooklineError(f'outliers needs method="mean", got method={self.method!r}')

    def values(
        self,
        model: HookedModel,
        points: Sequence[HookPoint],
        bases: Sequence[Baseline],
        prompts: Prompts,
        *,
        at_all_positions: bool = True,
    ) -> list[Values]:
        """The replacement at each point, for every prompt, in the shape of the activation.

        With `at_all_positions`, a mean does not replace outlying positions, which it excludes. Positions that the
        caller names are always replaced.
        """
        for point in points:
            if not bases[0].kept[point.name].is_floating_point():
                raise HooklineError(
                    f"{point.name!r} has integer values, {bases[0].kept[point.name].dtype}, which cannot be ablated"
                )
        if self.method == "zero":
            return [{point.name: torch.zeros_like(base.kept[point.name]) for point in points} for base in bases]
        data = None if self.data is None else prompts_of(model, self.data)
        if self.method == "mean":
            self._check_mean(points, None if data is None else len(data), len(prompts))
            means = self._means(model, points, bases, data)
            return [
                {point.name: means[point.name].laid_out(base, keeps=at_all_positions) for point in points}
                for base in bases
            ]
        chosen = _others(prompts, data, 0 if self.seed is None else self.seed)
        if data is None:
            return [bases[row].kept for row in chosen]
        like = [_continued_as(prompts, row, data.only(other)) for row, other in enumerate(chosen)]
        return [found for text in like for found in _runs(model, points, text, [0])]

    def info(self) -> dict[str, Any]:
        """The entries of a result's `info` about the replacement."""
        said: dict[str, Any] = {"by": self.method}
        if self.outliers != "exclude":
            said["outliers"] = self.outliers
        if self.left_out:
            said["outlying"] = {name: each.to_dict() for name, each in self.left_out.items()}
        return said

    def _means(
        self, model: HookedModel, points: Sequence[HookPoint], bases: Sequence[Baseline], data: Prompts | None
    ) -> dict[str, Mean]:
        """The mean at each point without outlying positions; if there are any, the texts are run a second time."""

        def texts() -> Iterable[Values]:
            return [base.kept for base in bases] if data is None else _runs(model, points, data, range(len(data)))

        means = {point.name: Mean(point, self.outliers, per_position=self.per_position) for point in points}
        for text in texts():
            for name, mean in means.items():
                mean.add(text[name])
        again = {name: mean for name, mean in means.items() if mean.judge()}
        for text in texts() if again else ():
            for name, mean in again.items():
                mean.add(text[name])
        self.left_out.update({name: mean.outlying for name, mean in again.items()})
        return means

    def _check_mean(self, points: Sequence[HookPoint], n_data: int | None, n_prompts: int) -> None:
        for point in points:
            letters = point.axes.split()
            if "p" not in letters or "k" in letters:
                raise HooklineError(
                    f'{point.name!r} (axes {point.axes}) has no mean over texts: use method="zero" or method="resample"'
                )
        if n_data is None and n_prompts == 1 and self.per_position:
            raise HooklineError("the mean of one prompt at each position is the prompt itself: pass data=[texts]")


def _runs(
    model: HookedModel, points: Sequence[HookPoint], data: Prompts, rows: Iterable[int]
) -> Iterable[dict[str, Tensor]]:
    """The activations of each of these texts at the points."""
    names = [point.name for point in points]
    for row in rows:
        with torch.no_grad():
            cache = model.cache(**data.one(row), names_filter=names)
        yield {point.name: in_one_row(cache[point.name], point)[0] for point in points}


def _others(prompts: Prompts, data: Prompts | None, seed: int) -> list[int]:
    """For each prompt, a random other text of the same length."""
    generator = torch.Generator().manual_seed(seed)
    source = prompts if data is None else data
    chosen = []
    for row in range(len(prompts)):
        tokens = prompts.row(row)
        able = [each for each in range(len(source)) if _is_other(source, each, prompts, row)]
        if not able:
            whose = "the prompts" if data is None else "data"
            raise HooklineError(
                f"{whose} contain no other text of {tokens.shape[1]} tokens to resample prompt {row} from: "
                f"pass data=[texts] of the same length as the prompts"
            )
        chosen.append(able[int(torch.randint(len(able), (), generator=generator))])
    return chosen


def _is_other(source: Prompts, number: int, prompts: Prompts, row: int) -> bool:
    """Whether a prompt has the same length as another, and a different text or different images.

    Continuations are not compared, but must be the same where both have one.
    """
    one, another = source.one(number), prompts.one(row)
    text = next(iter(one))
    if one.keys() != another.keys() or source.length(number) != prompts.length(row):
        return False
    length = prompts.length(row)
    if source.own and not torch.equal(one[text][:, length:], another[text][:, length:]):
        return False
    if not torch.equal(one[text][:, :length], another[text][:, :length]):
        return True
    more = {name: x for name, x in one.items() if isinstance(x, Tensor) and x.shape[:2] != one[text].shape}
    return any(not torch.equal(x, another[name]) for name, x in more.items())


def _continued_as(prompts: Prompts, row: int, data: Prompts) -> Prompts:
    """A text of data with the continuation of a prompt of the same length."""
    after = prompts.row(row)[:, prompts.length(row) :]
    if not after.shape[1]:
        return data
    tokens = torch.cat([data.tokens, after], 1)
    more = tuple(longer(inputs, data.width, after.shape[1]) for inputs in data.more)
    return Prompts(tokens, torch.ones_like(tokens, dtype=torch.bool), more)
