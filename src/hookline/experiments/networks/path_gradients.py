"""Integrated gradients: the gradient along the line from a baseline to the inputs, or to an activation."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from hookline.errors import HooklineError
from hookline.experiments.networks.image_result import axes_of, image_among, network_result
from hookline.experiments.networks.network_inputs import NetworkInputs
from hookline.experiments.networks.network_runs import (
    Stacks,
    Varied,
    VariedActivation,
    VariedInputs,
    attributing,
    run_noting,
    target_gradients,
    wrapped,
)
from hookline.experiments.networks.network_target import NetworkTarget, Target


def integrated_gradients(
    net: Any, inputs: Any, target: Target = None, at: Any = None, baseline: Any = 0.0, steps: int = 32
) -> Any:
    """Integrated gradients of the inputs, or of the activation at a point: they sum to f(x) − f(baseline).

        >>> result = networks.integrated_gradients(net, x, target=1, baseline=0.5)
        >>> result.values.shape
        torch.Size([1, 4])

    The gradient is averaged over `steps` points of the line from the baseline to the value, by Gauss-Legendre's rule.
    `baseline` is a number or a tensor like the inputs, or one for each in the form of the inputs. With `at` it is a
    number, a tensor of the activation's shape, or token ids of the input's shape, whose activation is taken. `info` has
    the `error`: how far the sum is from f(x) − f(baseline), at most over the rows.
    """
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise HooklineError(f"steps is a positive integer, got {steps!r}")
    wrapper, batch = wrapped(net), NetworkInputs.of(inputs)
    places = batch.need_floating() if at is None else []
    with attributing(wrapper):
        batch = batch.changed(torch.clone)
        varied: Varied
        if at is None:
            varied = VariedInputs(wrapper, batch, places)
            given = batch.like(baseline, "baseline")
            starts = [_start(given[place], x) for place, x in zip(places, varied.values, strict=True)]
        else:
            varied = activation = VariedActivation(wrapper, batch, at)
            starts = [_start_at(activation, baseline)]
        chosen = NetworkTarget(target, varied.output, varied.rows)
        stacks = Stacks(wrapper, varied, chosen, starts)
        values = _integrated(varied, starts, chosen, stacks, steps)
        error = _error(varied, starts, chosen, values)
    info = {"about": "integrated gradients", "target": chosen.text, "steps": steps, "error": error}
    if at is not None:
        axes = axes_of(activation.point, values[0])
        return network_result(values[0], "integrated_gradients", info | {"at": activation.point.name}, axes=axes)
    results = {
        place: network_result(value, "integrated_gradients", info, images=image_among([batch.values[place]]))
        for place, value in zip(places, values, strict=True)
    }
    return batch.packed(results)


def _start(baseline: Any, x: Tensor) -> Tensor:
    """The baseline of a tensor."""
    value = torch.as_tensor(0.0 if baseline is None else baseline)
    try:
        return value.detach().to(x).expand(x.shape).clone()
    except RuntimeError as error:
        raise HooklineError(
            f"baseline has the shape {list(value.shape)}, and does not fit a value of shape {list(x.shape)}"
        ) from error


def _start_at(varied: VariedActivation, baseline: Any) -> Tensor:
    """The baseline of an activation; for token ids it is the activation that they have."""
    activation, ids = varied.values[0], _ids_place(varied.inputs, baseline)
    if ids is None:
        return _start(baseline, activation)
    tokens = varied.inputs.values[ids]
    other = baseline.to(tokens).expand(tokens.shape).clone()
    with torch.no_grad():
        return run_noting(varied.net, varied.inputs.with_values([ids], [other]), varied.point)[1]


def _ids_place(inputs: NetworkInputs, baseline: Any) -> int | None:
    """The integer input that a baseline has the shape of, if it is token ids."""
    if not isinstance(baseline, Tensor) or baseline.is_floating_point() or not baseline.ndim:
        return None
    places = [
        place
        for place, value in enumerate(inputs.values)
        if isinstance(value, Tensor) and not value.is_floating_point() and value.shape[-1:] == baseline.shape[-1:]
    ]
    names = inputs.names or ()
    if "input_ids" in names and names.index("input_ids") in places:
        return names.index("input_ids")
    if len(places) > 1 and names:
        candidates = ", ".join(repr(names[place]) for place in places)
        raise HooklineError(
            f"a baseline of token ids may be for {candidates}: pass the activation that the baseline has at the point, "
            f"from net.cache(…)"
        )
    if places:
        return places[0]
    shapes = [list(value.shape) for value in inputs.values if isinstance(value, Tensor)]
    raise HooklineError(f"a baseline of token ids has the shape of the input, {shapes}, not {list(baseline.shape)}")


def _integrated(
    varied: Varied, starts: list[Tensor], target: NetworkTarget, stacks: Stacks, steps: int
) -> list[Tensor]:
    """The change of each value times its average gradient on the way."""
    nodes, weights = np.polynomial.legendre.leggauss(steps)
    ways = [x - start for x, start in zip(varied.values, starts, strict=True)]
    sums = [torch.zeros_like(way, dtype=torch.promote_types(way.dtype, torch.float32)) for way in ways]

    def run(part: Any) -> list[Tensor]:
        leaves = [_on_the_way(start, way, (1 + nodes[list(part)]) / 2) for start, way in zip(starts, ways, strict=True)]
        output = varied.run(leaves, len(part))
        gradients = target_gradients(target.per_group(output, len(part)), leaves)
        parts = [gradient.unflatten(0, (len(part), -1)) for gradient in gradients]
        return [
            torch.einsum("s...,s->...", x.to(total), _like(weights[list(part)] / 2, total))
            for x, total in zip(parts, sums, strict=True)
        ]

    for _, parts in stacks.parts(steps, run):
        sums = [total + part for total, part in zip(sums, parts, strict=True)]
    return [total * way for total, way in zip(sums, ways, strict=True)]


def _on_the_way(start: Tensor, way: Tensor, fractions: np.ndarray) -> Tensor:
    """The values at some fractions of the way, one batch after the other, as a new leaf."""
    shares = _like(fractions, way).reshape(-1, *[1] * way.ndim)
    return (start + shares * way).flatten(0, 1).detach().requires_grad_()


def _like(numbers: np.ndarray, x: Tensor) -> Tensor:
    return torch.as_tensor(numbers, dtype=x.dtype, device=x.device)


def _error(varied: Varied, starts: list[Tensor], target: NetworkTarget, values: list[Tensor]) -> float:
    """How far the sum over all values is from the change of the target, at most over the rows."""
    with torch.no_grad():
        change = target.per_group(varied.output)[0] - target.per_group(varied.run(starts))[0]
    sums = torch.stack([value.flatten(1).sum(1) for value in values]).sum(0)
    return float((change.to(sums) - (sums if change.ndim else sums.sum())).abs().max())
