"""Gradients at a point: Grad-CAM, gradient times activation, and the gradient of one unit by the inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

from torch import Tensor
from torch.nn.functional import interpolate

from hookline.engine import HookPoint
from hookline.errors import HooklineError
from hookline.experiments.networks.image_result import axes_of, image_among, network_result
from hookline.experiments.networks.network_inputs import NetworkInputs
from hookline.experiments.networks.network_runs import (
    attributing,
    checked_dim,
    key_of,
    leaf_of,
    point_at,
    run_noting,
    target_gradients,
    wrapped,
    wrong_count,
)
from hookline.experiments.networks.network_target import NetworkTarget, Target


def grad_cam(
    net: Any, inputs: Any, at: Any, target: Target = None, *, dim: int = 1, size: Literal["map", "input"] = "map"
) -> Any:
    """Grad-CAM: the channels at a point, weighted by their mean gradients, summed, and cut off below 0.

        >>> images = torch.rand(1, 1, 8, 8)
        >>> cnn = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3))
        >>> networks.grad_cam(cnn, images, at="1", target=2).values.shape
        torch.Size([1, 6, 6])

    The result is at the size of the map; `size="input"` enlarges it, linearly, to that of the image. `.plot()` draws
    it over the image. `dim` is the axis of the channels: -1 for tokens, [batch, position, channel].
    """
    wrapper, batch = wrapped(net), NetworkInputs.of(inputs)
    if size not in ("map", "input"):
        raise HooklineError(f'size must be "map" or "input", got {size!r}')
    point = point_at(wrapper, at)
    chosen, activation, gradient = _activation_and_gradient(wrapper, batch, point, target)
    if activation.ndim < 3:
        raise HooklineError(
            f"Grad-CAM needs an activation with channels and places; {point.name!r} has the shape "
            f"{list(activation.shape)}: use gradient_x_activation"
        )
    channels_first = [x.movedim(checked_dim(dim, x), 1) for x in (activation, gradient)]
    weights = channels_first[1].flatten(2).mean(-1).reshape(*channels_first[1].shape[:2], *[1] * (activation.ndim - 2))
    heat = (weights * channels_first[0]).sum(1).clamp(min=0)
    images = image_among(batch.values)
    axes = {1: ("batch", "pos"), 2: ("batch", "height", "width"), 3: ("batch", "depth", "height", "width")}
    if size == "input":
        heat = _enlarged(heat, images)
    info = {"about": "Grad-CAM", "target": chosen.text, "at": point.name}
    return network_result(heat, "grad_cam", info, images=images, axes=axes.get(heat.ndim - 1))


def _enlarged(heat: Tensor, images: Tensor | None) -> Tensor:
    if images is None or heat.ndim != 3:
        raise HooklineError('size="input" is for maps of images, inputs of shape [batch, channel, height, width]')
    return interpolate(heat[:, None].float(), size=images.shape[-2:], mode="bilinear", align_corners=False)[:, 0]


def _activation_and_gradient(
    wrapper: Any, batch: NetworkInputs, point: HookPoint, target: Target
) -> tuple[NetworkTarget, Tensor, Tensor]:
    """The target, the activation at a point, and the gradient of the target there."""
    with attributing(wrapper):
        output, leaf = run_noting(wrapper, batch, point, as_leaf=True)
        chosen = NetworkTarget(target, output, batch.rows)
        return chosen, leaf.detach(), target_gradients(chosen.per_group(output), [leaf])[0]


def gradient_x_activation(net: Any, inputs: Any, at: Any, target: Target = None) -> Any:
    """The gradient of the target times the activation, for each unit at a point.

    >>> networks.gradient_x_activation(net, x, at="fc1", target=1).values.shape
    torch.Size([1, 8])
    """
    wrapper, batch = wrapped(net), NetworkInputs.of(inputs)
    point = point_at(wrapper, at)
    chosen, activation, gradient = _activation_and_gradient(wrapper, batch, point, target)
    info = {"about": "gradient times activation", "target": chosen.text, "at": point.name}
    return network_result(gradient * activation, "gradient_x_activation", info, axes=axes_of(point, activation))


def neuron_gradient(net: Any, inputs: Any, at: Any, unit: int | Sequence[int] | Callable[[Tensor], Tensor]) -> Any:
    """The gradient of one unit at a point with respect to the inputs.

        >>> networks.neuron_gradient(net, x, at="fc1", unit=3).values.shape
        torch.Size([1, 4])

    `unit` is its index after the batch, such as 3, or (3, 5, 5) for a channel at a place; or a function from the
    activation to one number per row, as `lambda x: x[:, 3].sum((1, 2))`.
    """
    wrapper, batch = wrapped(net), NetworkInputs.of(inputs)
    places, point = batch.need_floating(), point_at(wrapper, at)
    with attributing(wrapper):
        leaves = [leaf_of(batch.values[place]) for place in places]
        activations: list[Tensor] = []
        hooks = [(key_of(point), lambda x: activations.append(x))]
        batch.with_values(places, [x.clone() for x in leaves]).call(wrapper.run_with_hooks, fwd_hooks=hooks)
        if len(activations) != 1:
            raise wrong_count(point, len(activations))
        gradients = target_gradients(_unit(activations[0], unit), leaves)
    info = {"about": "gradient of a unit", "at": point.name, "unit": getattr(unit, "__name__", unit)}
    results = {
        place: network_result(gradient, "neuron_gradient", info, images=image_among([batch.values[place]]))
        for place, gradient in zip(places, gradients, strict=True)
    }
    return batch.packed(results)


def _unit(activation: Tensor, unit: Any) -> Tensor:
    """The values of a unit, one per row."""
    if callable(unit):
        values = unit(activation)
        if not isinstance(values, Tensor) or values.numel() not in (1, len(activation)):
            raise HooklineError(f"unit, as a function of the activation, returns one number per row, not {values!r}")
        return values
    index = (unit,) if isinstance(unit, int) else tuple(unit)
    if len(index) != activation.ndim - 1:
        raise HooklineError(
            f"the activation has the shape {list(activation.shape)}, so a unit has {activation.ndim - 1} indices after "
            f"the batch, not {len(index)}; or pass a function, as lambda x: x[:, 3].mean((1, 2))"
        )
    try:
        return activation[(slice(None), *index)]
    except (IndexError, TypeError) as error:
        raise HooklineError(f"unit {unit!r} is not in an activation of shape {list(activation.shape)}") from error
