"""Replacements for ablated activations: zeros, a mean, or the activation of another text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from hookline.engine import HookPoint
from hookline.errors import HooklineError
from hookline.experiments.core.continuations import longer
from hookline.experiments.core.prompts import Prompt, Prompts, prompts_of
from hookline.experiments.core.sweep import Values
from hookline.hooks.fitting import kept_where_outlying
from hookline.model import HookedModel
from hookline.rerun.baseline import Baseline
from hookline.rerun.image_inputs import in_one_row
from hookline.text.outliers import Outliers, Outlying, RowMean, factor_of
from hookline.transformer.precision import upcast

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
        factor_of(self.outliers)  # raises if it is none of the allowed values
        needs = (("per_position", False, "mean"), ("outliers", "exclude", "mean"), ("seed", None, "resample"))
        for name, default, method in needs:
            if self.method != method and getattr(self, name) != default:
                raise HooklineError(f'{name} needs method="{method}", got method={self.method!r}')

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
            means = self._means(model, points, bases, data).items()
            keeps = at_all_positions
            return [{x.name: _laid_out(mean, x, base, keeps=keeps) for x, mean in means} for base in bases]
        chosen = _others(prompts, data, self.seed or 0)
        if data is None:
            return [bases[row].kept for row in chosen]
        like = [_continued_as(prompts, row, data.only(other)) for row, other in enumerate(chosen)]
        return [activations for text in like for activations in _runs(model, points, text)]

    def info(self) -> dict[str, Any]:
        """The entries of a result's `info` about the replacement."""
        said: dict[str, Any] = {"by": self.method}
        if self.outliers != "exclude":
            said["outliers"] = self.outliers
        if self.left_out:
            said["outlying"] = {name: outlying.to_dict() for name, outlying in self.left_out.items()}
        return said

    def _means(
        self, model: HookedModel, points: Sequence[HookPoint], bases: Sequence[Baseline], data: Prompts | None
    ) -> dict[HookPoint, RowMean]:
        """The mean at each point without outlying positions; if there are any, the texts are run a second time."""
        for point in points:
            if "p" not in point.axes.split() or "k" in point.axes.split():
                raise HooklineError(
                    f'{point.name!r} (axes {point.axes}) has no mean over texts: use method="zero" or method="resample"'
                )
        if data is None and len(bases) == 1 and self.per_position:
            raise HooklineError("the mean of one prompt at each position is the prompt itself: pass data=[texts]")
        means = {point: RowMean(self.outliers, per_position=self.per_position) for point in points}
        left = means
        while left:
            for text in [base.kept for base in bases] if data is None else _runs(model, points, data):
                for point, mean in left.items():
                    mean.add(upcast(text[point.name].movedim(_position(point), 0)))
            left = {point: mean for point, mean in left.items() if mean.bounds is None and mean.finds_outliers()}
        self.left_out.update({point.name: mean.outlying for point, mean in means.items() if mean.outlying.count})
        return means


def _laid_out(mean: RowMean, point: HookPoint, base: Baseline, *, keeps: bool) -> Tensor:
    """The mean in the shape of one text's activation; with `keeps`, outlying positions keep their value."""
    place, before, mean_value = _position(point), base.kept[point.name], mean.value
    length = before.shape[place]
    if mean.per_position and len(mean_value) < length:
        raise HooklineError(
            f"a prompt has {length} tokens, but no text of data has more than {len(mean_value)}, so there is no mean "
            f"at its last positions. Pass longer texts, or remove per_position"
        )
    assert mean.bounds is not None
    new = mean_value[:length].movedim(0, place).to(before).expand_as(before)
    bounds = mean.bounds[:length].to(before.device)
    return kept_where_outlying(new[None], before[None], point.axes, bounds)[0] if keeps else new


def _position(point: HookPoint) -> int:
    """The axis of positions, without the batch."""
    return point.axes.split()[1:].index("p")


def _runs(model: HookedModel, points: Sequence[HookPoint], data: Prompts) -> Iterator[dict[str, Tensor]]:
    """The activations of each text at the points."""
    for row in range(len(data)):
        with torch.no_grad():
            cache = model.cache(**data.one(row), names_filter=[point.name for point in points])
        yield {point.name: in_one_row(cache[point.name], point)[0] for point in points}


def _others(prompts: Prompts, data: Prompts | None, seed: int) -> list[int]:
    """For each prompt, a random other text of the same length."""
    generator = torch.Generator().manual_seed(seed)
    source = prompts if data is None else data
    chosen = []
    for row in range(len(prompts)):
        able = [number for number in range(len(source)) if _is_other(source, number, prompts, row)]
        if not able:
            raise HooklineError(
                f"{'the prompts' if data is None else 'data'} contain no other text of {prompts.row(row).shape[1]} "
                f"tokens to resample prompt {row} from: pass data=[texts] of the same length as the prompts"
            )
        chosen.append(able[int(torch.randint(len(able), (), generator=generator))])
    return chosen


def _is_other(source: Prompts, number: int, prompts: Prompts, row: int) -> bool:
    """Whether two prompts have the same length and the same continuation, and a different text or different images."""
    length, one, another = prompts.length(row), source.row(number), prompts.row(row)
    if source.length(number) != length or (source.own and not torch.equal(one[:, length:], another[:, length:])):
        return False
    images, others = _images(source, number), _images(prompts, row)
    if images.keys() != others.keys():
        return False
    is_same = torch.equal(one[:, :length], another[:, :length])
    return not is_same or any(not torch.equal(x, others[name]) for name, x in images.items())


def _images(prompts: Prompts, row: int) -> dict[str, Tensor]:
    """The inputs of a prompt besides those with one value per token."""
    more = prompts.more[row].items() if prompts.more else ()
    return {name: x for name, x in more if isinstance(x, Tensor) and x.shape[:2] != (1, len(prompts.spans[row]))}


def _continued_as(prompts: Prompts, row: int, data: Prompts) -> Prompts:
    """A text of data with the continuation of a prompt of the same length."""
    after = prompts.row(row)[0, prompts.length(row) :]
    more = [longer(inputs, data.width, len(after)) for inputs in data.more]
    return Prompts.of_rows([torch.cat([data.tokens[0], after])], more)
