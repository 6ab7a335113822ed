"""Inputs of a unit: one that excites it, found by gradient ascent, and those of a data set that excite it most."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hookline.errors import HooklineError
from hookline.experiments.core.labels import Label
from hookline.experiments.networks.image_result import ImageResult, image_among, network_result
from hookline.experiments.networks.network_inputs import NetworkInputs
from hookline.experiments.networks.network_runs import (
    attributing,
    checked_dim,
    point_at,
    run_noting,
    target_gradients,
    wrapped,
    wrong_count,
)
from hookline.functions.signatures import parameters_of


def maximize(
    net: Any,
    at: Any,
    channel: int,
    *,
    shape: Sequence[int],
    steps: int = 128,
    lr: float = 0.05,
    norm: float = 1e-3,
    jitter: int = 0,
    dim: int = 1,
    seed: int = 0,
) -> ImageResult:
    """An input that excites one channel at a point: gradient ascent on its mean activation, from noise.

        >>> result = networks.maximize(net, "fc1", 3, shape=(1, 4), steps=16)
        >>> result.info["activation"] > result.info["start"]
        True

    `shape` is that of the input, with its batch: (1, 3, 64, 64). Each of the `steps` is one of Adam with the rate `lr`.
    `norm` is the weight of a penalty, the mean square of the input; with `jitter` an image is shifted by up to that
    many pixels at each step. `info` has the mean activation at the `start` and at the end, without jitter.
    """
    _check_options(shape, steps, jitter)
    wrapper = wrapped(net)
    point, parameter = point_at(wrapper, at), next(wrapper.module.parameters(), torch.zeros(()))
    random = torch.Generator().manual_seed(seed)
    with attributing(wrapper):
        dtype = parameter.dtype if parameter.is_floating_point() else torch.float32
        x = (0.1 * torch.randn(tuple(shape), generator=random)).to(parameter.device, dtype).requires_grad_()
        optimizer, start = (
            torch.optim.Adam([x], lr=lr),
            float(_mean_activation(wrapper, point, x, channel, dim).detach()),
        )
        for _ in range(steps):
            activation = _mean_activation(wrapper, point, _shifted(x, jitter, random), channel, dim)
            loss = norm * x.square().mean() - activation
            x.grad = target_gradients(loss, [x])[0]
            optimizer.step()
        end = float(_mean_activation(wrapper, point, x.detach(), channel, dim).detach())
    info = {"about": "an input for a channel", "at": point.name, "channel": channel, "start": start, "activation": end}
    return network_result(x, "input", info)


def _check_options(shape: Any, steps: int, jitter: int) -> None:
    if not isinstance(shape, Sequence) or not all(isinstance(size, int) and size > 0 for size in shape) or not shape:
        raise HooklineError(f"shape is that of an input with its batch, such as (1, 3, 64, 64), not {shape!r}")
    if steps < 1 or jitter < 0:
        raise HooklineError(f"steps is positive and jitter is not negative, got {steps!r} and {jitter!r}")


def _shifted(x: Tensor, jitter: int, random: torch.Generator) -> Tensor:
    if not jitter:
        return x
    if x.ndim < 4:
        raise HooklineError(
            f"jitter shifts images, [batch, channel, height, width], not an input of shape {list(x.shape)}"
        )
    shifts = torch.randint(-jitter, jitter + 1, (2,), generator=random).tolist()
    return x.roll(shifts, (-2, -1))


def _mean_activation(wrapper: Any, point: Any, x: Tensor, channel: int, dim: int) -> Tensor:
    """The mean activation of a channel for an input, in the graph."""
    activations: list[Tensor] = []
    wrapper.run_with_hooks(x.clone(), fwd_hooks=[(point, activations.append)])
    if len(activations) != 1:
        raise wrong_count(point, len(activations))
    if len(activations[0]) != len(x):
        raise HooklineError(
            f"{point.name!r} has the shape {list(activations[0].shape)} for an input of shape {list(x.shape)}: shape "
            f"needs the batch first, as (1, 3, 64, 64)"
        )
    return _of_channel(activations[0], channel, dim).mean()


def _of_channel(activation: Tensor, channel: int, dim: int) -> Tensor:
    axis = checked_dim(dim, activation)
    try:
        return activation.select(axis, channel)
    except (IndexError, TypeError) as error:
        raise HooklineError(
            f"the activation has the shape {list(activation.shape)}, and no channel {channel!r} along axis {dim!r}"
        ) from error


def top_inputs(
    net: Any, data: Any, at: Any, channel: int, k: int = 8, *, dim: int = 1, batch_size: int = 64
) -> ImageResult:
    """The `k` rows of a data set that excite a channel at a point most: the largest activation at any place.

        >>> networks.top_inputs(net, torch.randn(20, 4), at="fc1", channel=3, k=2).axes
        ('row',)

    `data` is a tensor, which is run in batches of `batch_size`, or yields batches: tensors, tuples of arguments or
    dicts of keywords. The axis `row` names the rows by their numbers in the data, the strongest first.
    """
    if isinstance(k, bool) or not isinstance(k, int) or k < 1:
        raise HooklineError(f"k is a positive number of rows, got {k!r}")
    wrapper = wrapped(net)
    point, start = point_at(wrapper, at), 0
    values, rows, images = torch.empty(0), torch.empty(0, dtype=torch.long), list[Any]()
    with attributing(wrapper, with_grad=False), torch.no_grad():
        for inputs in _batches(data, batch_size):
            batch = NetworkInputs.of(inputs)
            _check_arguments(wrapper.module, batch)
            activation = run_noting(wrapper, batch, point)[1]
            of_rows = (
                _of_channel(activation, channel, dim).flatten(1).amax(1)
                if activation.ndim > 2
                else (_of_channel(activation, channel, dim))
            )
            if len(of_rows) != batch.rows:
                raise HooklineError(f"{point.name!r} has {len(of_rows)} rows for a batch of {batch.rows}")
            values = torch.cat([values, of_rows.float().cpu()])
            rows = torch.cat([rows, torch.arange(start, start + batch.rows)])
            of_batch = image_among(batch.values)
            images += [None] * batch.rows if of_batch is None else list(of_batch)
            best = values.argsort(descending=True, stable=True)[:k].tolist()
            values, rows, images = values[best], rows[best], [images[at] for at in best]
            start += batch.rows
    if not start:
        raise HooklineError("data has no batches: an iterator can be read only once")
    coords: dict[str, list[Label]] = {"row": rows.tolist()}
    info = {"about": "inputs that excite a channel", "at": point.name, "channel": channel, "rows": start}
    has_images = all(image is not None and image.shape == images[0].shape for image in images)
    return ImageResult(values, ("row",), coords, "activation", info, images=torch.stack(images) if has_images else None)


def _check_arguments(module: Any, batch: NetworkInputs) -> None:
    names, by_position = parameters_of(module)
    takes_any = any(name in ("args", "kwargs", "inputs") for name in names)
    if batch.names is None and by_position and len(batch.values) > by_position and not takes_any:
        raise HooklineError(
            f"a batch has {len(batch.values)} values, but forward takes {by_position}: yield the inputs only, as in "
            f"(x for x, _ in loader)"
        )


def _batches(data: Any, batch_size: int) -> Iterator[Any]:
    """The batches of a data set."""
    if isinstance(data, Tensor):
        yield from data.split(batch_size)
    elif isinstance(data, Iterable) and not isinstance(data, Mapping | str):
        yield from data
    else:
        raise HooklineError(f"data is a tensor or yields batches, such as a DataLoader, not {type(data).__name__}")
