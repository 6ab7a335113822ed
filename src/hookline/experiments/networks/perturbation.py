"""Perturbation: what changes when windows of the inputs, or channels at a point, are replaced."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import ceil
from typing import Any

import torch
from torch import Tensor

from hookline.errors import HooklineError
from hookline.experiments.core.labels import Label
from hookline.experiments.networks.image_result import ImageResult, image_among, network_result
from hookline.experiments.networks.network_inputs import NetworkInputs
from hookline.experiments.networks.network_runs import (
    Stacks,
    VariedActivation,
    VariedInputs,
    attributing,
    checked_dim,
    wrapped,
)
from hookline.experiments.networks.network_target import NetworkTarget, Target
from hookline.progress import progress_bar


def occlusion(
    net: Any,
    inputs: Any,
    target: Target = None,
    window: Any = None,
    stride: Any = None,
    *,
    baseline: Any = 0.0,
    progress: bool = False,
) -> Any:
    """How much the target falls when a window of the inputs is replaced by the baseline: f(whole) − f(occluded).

        >>> networks.occlusion(net, x, target=1, window=2, stride=1).values.shape
        torch.Size([1, 4])

    `window` and `stride` are sizes along the last axes: `(8, 8)` slides over height and width and covers all channels,
    `(1, 8, 8)` takes channels one by one; one number is for all axes behind the channels, or for the last one.
    The stride is the window's size unless it is given. Each value of the result is the mean over the windows that cover
    it. Several inputs are occluded one at a time; `window` may then be a tuple or dict in their form, with None for
    inputs that stay whole.
    """
    wrapper, batch = wrapped(net), NetworkInputs.of(inputs)
    windows = _of_inputs(batch, window, "window")
    strides, baselines = _of_inputs(batch, stride, "stride"), batch.like(baseline, "baseline")
    places = [place for place, size in enumerate(windows) if size is not None and _is_occludable(batch.values[place])]
    if not places:
        raise HooklineError("window is needed: a size along the last axes, such as window=(8, 8)")
    results: dict[int, Any] = {}
    with attributing(wrapper, with_grad=False):
        batch = batch.changed(torch.clone)
        for place in places:
            varied = VariedInputs(wrapper, batch, [place])
            boxes = _windows(varied.values[0], windows[place], strides[place])
            chosen = NetworkTarget(target, varied.output, varied.rows)
            values = _occluded(wrapper, varied, boxes, chosen, baselines[place], progress)
            info = {"about": "occlusion", "target": chosen.text, "windows": len(boxes)}
            axes = ("batch", "pos") if values.ndim == 2 and not varied.values[0].is_floating_point() else None
            images = image_among([batch.values[place]])
            results[place] = network_result(values, "occlusion", info, images=images, axes=axes)
    return batch.packed(results)


def _is_occludable(x: Any) -> bool:
    return isinstance(x, Tensor) and x.ndim > 1


def _of_inputs(batch: NetworkInputs, sizes: Any, what: str) -> list[Any]:
    """The sizes for each input; a tuple of numbers is for all of them."""
    if isinstance(sizes, tuple | list) and all(isinstance(size, int) for size in sizes):
        return [tuple(sizes)] * len(batch.values)
    return batch.like(sizes, what)


def _windows(x: Tensor, window: Any, stride: Any) -> list[tuple[slice, ...]]:
    """The windows of a tensor [batch, …], along all axes after the batch; the last ones are cut off at the edge."""
    sizes = _sizes(x, window, "window")
    steps = sizes if stride is None else _sizes(x, stride, "stride")
    if len(steps) != len(sizes):
        raise HooklineError(f"window {window!r} and stride {stride!r} are for different numbers of axes")
    whole = [[slice(None)]] * (x.ndim - 1 - len(sizes))
    along = []
    for length, size, step in zip(x.shape[-len(sizes) :], sizes, steps, strict=True):
        if size > length or step > size:
            why = (
                f"a window of {size} is longer than the axis of {length}"
                if size > length
                else (f"a stride of {step} leaves out values between windows of {size}")
            )
            raise HooklineError(f"{why}: window {window!r}, stride {stride!r}, for an input of shape {list(x.shape)}")
        starts = range(0, ceil((length - size) / step) * step + 1, step)
        along.append([slice(start, start + size) for start in starts])
    return list(product(*whole, *along))


def _sizes(x: Tensor, sizes: Any, what: str) -> tuple[int, ...]:
    if isinstance(sizes, int):
        sizes = (sizes,) * max(1, x.ndim - 2 if x.ndim > 3 else 1)
    sizes = tuple(sizes) if isinstance(sizes, tuple | list) else (sizes,)
    if not sizes or len(sizes) >= x.ndim or any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in sizes):
        raise HooklineError(
            f"{what} has one positive size for each of the last axes of an input of shape {list(x.shape)}, without the "
            f"batch, not {sizes!r}"
        )
    return sizes


def _occluded(
    wrapper: Any, varied: VariedInputs, boxes: Sequence[Any], target: NetworkTarget, baseline: Any, progress: bool
) -> Tensor:
    """The mean change by the windows that cover each value."""
    x = varied.values[0]
    blank = _blank(x, baseline)
    whole = target.per_row(varied.output)[0]
    total = torch.zeros(x.shape, dtype=torch.promote_types(whole.dtype, torch.float32), device=whole.device)
    covers = torch.zeros(x.shape[1:], device=whole.device)

    def run(part: Any) -> Tensor:
        stacked = x.repeat(len(part), *[1] * (x.ndim - 1))
        copies = stacked.unflatten(0, (len(part), -1))
        for copy, number in zip(copies, part, strict=True):
            copy[:, *boxes[number]] = blank[:, *boxes[number]]
        return target.per_row(varied.run([stacked], len(part)), len(part))

    with torch.no_grad(), progress_bar(progress, len(boxes), "windows") as bar:
        for part, values in Stacks(wrapper, varied, target, [blank]).parts(len(boxes), run):
            for number, value in zip(part, values, strict=True):
                total[:, *boxes[number]] += (whole - value).to(total).reshape(-1, *[1] * (x.ndim - 1))
                covers[boxes[number]] += 1
            bar.update(len(part))
    return total / covers


def _blank(x: Tensor, baseline: Any) -> Tensor:
    """What windows are replaced by."""
    value = torch.as_tensor(0 if baseline is None else baseline)
    if not x.is_floating_point() and value.is_floating_point() and (value != value.round()).any():
        raise HooklineError(
            f"this input is integers: its baseline is one too, such as the id of a mask, not {baseline!r}"
        )
    try:
        return value.to(x).expand(x.shape)
    except RuntimeError as error:
        raise HooklineError(f"baseline has the shape {list(value.shape)}, the input {list(x.shape)}") from error


def ablate_channels(
    net: Any, inputs: Any, at: Any, target: Target = None, dim: int = 1, *, progress: bool = False
) -> ImageResult:
    """How much the target changes when one channel at a point is zero: f(zeroed) − f(whole), for each row and channel.

        >>> networks.ablate_channels(net, x, at="fc1", target=1).shape
        (1, 8)

    `dim` is the axis of the channels: -1 for the units of [batch, position, unit]; of an attention pattern
    ("attn.pattern"), axis 1 has the heads. `result.mean("batch").top()` ranks them.
    """
    wrapper, batch = wrapped(net), NetworkInputs.of(inputs)
    with attributing(wrapper, with_grad=False), torch.no_grad():
        varied = VariedActivation(wrapper, batch.changed(torch.clone), at)
        x = varied.values[0]
        axis, chosen = checked_dim(dim, x), NetworkTarget(target, varied.output, varied.rows)
        whole = chosen.per_row(varied.output)[0]

        def run(part: Any) -> Tensor:
            stacked = x.repeat(len(part), *[1] * (x.ndim - 1))
            for copy, channel in zip(stacked.unflatten(0, (len(part), -1)), part, strict=True):
                copy.select(axis, channel).zero_()
            return chosen.per_row(varied.run([stacked], len(part)), len(part)) - whole

        stacks = Stacks(wrapper, varied, chosen, [torch.zeros_like(x)])
        with progress_bar(progress, x.shape[axis], "channels") as bar:
            effects = []
            for part, values in stacks.parts(x.shape[axis], run):
                effects.append(values)
                bar.update(len(part))
    info = {"about": "channels zeroed", "target": chosen.text, "at": varied.point.name}
    values = torch.cat(effects).T.float()
    coords: dict[str, list[Label]] = {"batch": list(range(len(values))), "channel": list(range(values.shape[1]))}
    return ImageResult(values, ("batch", "channel"), coords, "effect", info)
