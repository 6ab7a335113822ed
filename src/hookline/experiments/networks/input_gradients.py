"""Gradients of the inputs: saliency, with noise (SmoothGrad), and guided backpropagation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hookline.errors import HooklineError
from hookline.experiments.networks.image_result import image_among, network_result
from hookline.experiments.networks.network_inputs import NetworkInputs
from hookline.experiments.networks.network_runs import (
    Stacks,
    VariedInputs,
    attributing,
    leaf_of,
    target_gradients,
    wrapped,
)
from hookline.experiments.networks.network_target import NetworkTarget, Target


def saliency(
    net: Any, inputs: Any, target: Target = None, noise: float = 0.0, samples: int = 1, *, seed: int = 0
) -> Any:
    """The absolute gradient of the target with respect to each input value; with `noise`, SmoothGrad.

        >>> networks.saliency(net, x, target=1).shape
        (1, 4)

    With `samples` above 1 it is the mean over copies of the input with normally distributed `noise` added, a standard
    deviation in the input's unit, drawn with this `seed`. The result has the shape of the inputs; for a tuple or dict
    of inputs it is a tuple or dict of results, with None for inputs that are integers.
    """
    if isinstance(samples, bool) or not isinstance(samples, int) or samples < 1 or noise < 0:
        raise HooklineError(f"samples is a positive integer and noise is not negative, got {samples!r} and {noise!r}")
    if samples > 1 and noise == 0:
        raise HooklineError("samples without noise are all the same: pass noise=, a standard deviation")
    wrapper, batch = wrapped(net), NetworkInputs.of(inputs)
    places = batch.need_floating()
    with attributing(wrapper):
        varied = VariedInputs(wrapper, batch.changed(torch.clone), places)
        info: dict[str, Any] = {"about": "saliency"} | ({"noise": noise, "samples": samples} if noise else {})
        if noise:
            chosen = NetworkTarget(target, varied.output, varied.rows)
            values = _smoothed(varied, Stacks(wrapper, varied, chosen, _zeros(varied)), chosen, noise, samples, seed)
        else:
            chosen, gradients = _gradients(varied, target)
            values = [gradient.abs() for gradient in gradients]
    return _packed(batch, places, values, "saliency", info | {"target": chosen.text})


def _gradients(varied: VariedInputs, target: Target) -> tuple[NetworkTarget, list[Tensor]]:
    """The target, and its gradient with respect to what is varied, from one run."""
    leaves = [leaf_of(x) for x in varied.values]
    output = varied.run(leaves)
    chosen = NetworkTarget(target, output, varied.rows)
    return chosen, target_gradients(chosen.per_group(output), leaves)


def _smoothed(
    varied: VariedInputs, stacks: Stacks, target: NetworkTarget, noise: float, samples: int, seed: int
) -> list[Tensor]:
    """The mean of the absolute gradients at the inputs with noise."""
    random = torch.Generator().manual_seed(seed)
    sums = [torch.zeros_like(x, dtype=torch.promote_types(x.dtype, torch.float32)) for x in varied.values]

    def run(part: Any) -> list[Tensor]:
        leaves = [leaf_of(torch.cat([_noisy(x, noise, random) for _ in part])) for x in varied.values]
        gradients = target_gradients(target.per_group(varied.run(leaves, len(part)), len(part)), leaves)
        return [gradient.abs().unflatten(0, (len(part), -1)).sum(0) for gradient in gradients]

    for _, parts in stacks.parts(samples, run):
        sums = [total + part for total, part in zip(sums, parts, strict=True)]
    return [total / samples for total in sums]


def _noisy(x: Tensor, noise: float, random: torch.Generator) -> Tensor:
    drawn = torch.randn(x.shape, generator=random, dtype=torch.promote_types(x.dtype, torch.float32))
    return x + (noise * drawn).to(x)


def _zeros(varied: VariedInputs) -> list[Tensor]:
    return [torch.zeros_like(x) for x in varied.values]


def guided_backprop(net: Any, inputs: Any, target: Target = None) -> Any:
    """The gradient of the target with respect to the inputs, where every ReLU passes on only positive gradients.

        >>> mlp = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> networks.guided_backprop(mlp, x, target=1).shape
        (1, 4)

    That holds for `nn.ReLU`, in place or not, and for `relu` called as a function. A network without ReLU raises an
    error: there it would be the plain gradient.
    """
    wrapper, batch = wrapped(net), NetworkInputs.of(inputs)
    places = batch.need_floating()
    with attributing(wrapper):
        varied = VariedInputs(wrapper, batch.changed(torch.clone), places)
        leaves = [leaf_of(x) for x in varied.values]
        output = varied.run(leaves)
        chosen = NetworkTarget(target, output, varied.rows)
        value = chosen.per_group(output)
        if not _guide(value, lambda gradients: tuple(None if x is None else x.clamp(min=0) for x in gradients)):
            raise HooklineError(
                "guided backpropagation changes the gradient of ReLU, and no ReLU is computed on the way from these "
                "inputs to the target: saliency(…) is the plain gradient"
            )
        gradients = target_gradients(value, leaves)
    return _packed(
        batch, places, gradients, "guided_backprop", {"about": "guided backpropagation", "target": chosen.text}
    )


_OPAQUE = ("DifferentiableGraphBackward", "CompiledFunctionBackward")
"""The ends of the names of nodes that compute the gradient of several operations."""


def _guide(value: Tensor, change: Callable[[tuple[Any, ...]], tuple[Any, ...]]) -> int:
    """Change the gradients that reach each ReLU in the graph of a value; returns how many there are."""
    waiting, seen, count = [value.grad_fn], set[Any](), 0
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.name().endswith(_OPAQUE):
            raise HooklineError(
                "guided backpropagation cannot see the ReLUs of a part of this network that was scripted by torch.jit "
                "or compiled as a function: use the original there"
            )
        waiting += [before for before, _ in node.next_functions]
        if node.name() == "ReluBackward0":
            node.register_prehook(change)
            count += 1
    return count


def _packed(batch: NetworkInputs, places: list[int], values: list[Tensor], name: str, info: dict[str, Any]) -> Any:
    """One result for each input, in the form of the inputs."""
    results = {
        place: network_result(value, name, info, images=image_among([batch.values[place]]))
        for place, value in zip(places, values, strict=True)
    }
    return batch.packed(results)
