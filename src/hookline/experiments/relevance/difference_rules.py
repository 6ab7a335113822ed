"""Rules between two runs: torch functions pass gradients on as linear functions that are exact for their difference.

A function of one run is compared with the same call of another run, which was recorded. An activation function has the
slope of the line between its two values, a product takes the mean of the other factor, a norm is the product of its
input and of the reciprocal of its size, and a softmax takes logarithmic means. Multiplied by the difference of the
inputs of two runs, they give the difference of their outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hookline.errors import HooklineError
from hookline.experiments.relevance import relevance_rules as zero
from hookline.experiments.relevance.relevance_rules import Function, Linear, Rule, Rules, with_value
from hookline.transformer.precision import upcast


class Call(NamedTuple):
    """A call of a function in one of the runs."""

    function: Function
    args: Sequence[Any]
    value: Any


def _elementwise(call: Call, reference: Call, active: list[int]) -> Linear | None:
    """A function of each number has the slope between its values, and its derivative where they are close."""
    at, value, far = active[0], call.value, reference.value
    x, other = call.args[at].detach(), reference.args[at]
    if len(active) > 1 or not isinstance(value, Tensor) or value.shape != x.shape or not value.is_floating_point():
        return lambda *_: value
    apart = upcast(x) - upcast(other)
    is_near = apart.abs() <= 1e-3 * (upcast(x).abs() + upcast(other).abs())
    with torch.enable_grad():
        middle = ((upcast(x) + upcast(other)) / 2).requires_grad_()
        args = [middle if nth == at else _constant(arg) for nth, arg in enumerate(call.args)]
        made = call.function(*args)
        (slope,) = torch.autograd.grad(made.sum(), middle) if made.requires_grad else (torch.zeros_like(middle),)
    between = (upcast(value) - upcast(far)) / torch.where(is_near, torch.ones_like(apart), apart)
    slope = torch.where(is_near, slope, between)
    return lambda x: x * slope.to(x.dtype)


def _product(call: Call, reference: Call, active: list[int]) -> Linear | None:
    if len(active) < 2:
        return None
    mean = [(_constant(x) + reference.args[at]) / 2 if at in active else x for at, x in enumerate(call.args)]

    def linear(*inputs: Tensor) -> Any:
        parts = zip(active, inputs, strict=True)
        return sum(call.function(*mean[:at], x, *mean[at + 1 :]) for at, x in parts)

    return linear


def _quotient(call: Call, reference: Call, active: list[int]) -> Linear | None:
    if 1 not in active:
        return None
    above = (_constant(call.args[0]) + reference.args[0]) / 2
    one, other = 1 / call.args[1].detach(), 1 / reference.args[1]

    def linear(*inputs: Tensor) -> Any:
        divisor_part = inputs[-1] * (-one * other * above)
        return divisor_part + inputs[0] * (one + other) / 2 if 0 in active else divisor_part

    return linear


def _layer_norm(call: Call, reference: Call, _active: list[int]) -> Linear:
    x, shape, weight, _, epsilon = [*call.args, *(None, None, 1e-5)[len(call.args) - 2 :]][:5]
    return _norm(x, reference.args[0], shape, weight, epsilon, is_centered=True)


def _rms_norm(call: Call, reference: Call, _active: list[int]) -> Linear:
    x, shape, weight, epsilon = [*call.args, *(None, None)[len(call.args) - 2 :]][:4]
    epsilon = torch.finfo(x.dtype).eps if epsilon is None else epsilon
    return _norm(x, reference.args[0], shape, weight, epsilon, is_centered=False)


def _norm(
    x: Tensor, far: Tensor, shape: Sequence[int], weight: Tensor | None, epsilon: float, *, is_centered: bool
) -> Linear:
    axes = tuple(range(-len(shape), 0))

    def centered(x: Tensor) -> Tensor:
        return upcast(x) - upcast(x).mean(axes, keepdim=True) if is_centered else upcast(x)

    centered_x, other = centered(x.detach()), centered(far)
    one, two = ((values.square().mean(axes, keepdim=True) + epsilon).rsqrt() for values in (centered_x, other))
    slope, total = -((one * two) ** 2) / (one + two), centered_x + other  # of the reciprocal, in the mean square

    def linear(x: Tensor) -> Tensor:
        moved = centered(x)
        change = moved * (one + two) / 2 + total / 2 * slope * (moved * total).mean(axes, keepdim=True)
        return (change if weight is None else change * weight).to(x.dtype)

    return linear


def _softmax(call: Call, reference: Call, _active: list[int]) -> Linear:
    axis = next((x for x in call.args[1:] if isinstance(x, int) and not isinstance(x, bool)), -1)
    one, two = upcast(call.value), upcast(reference.value)
    is_near = (one - two).abs() <= 1e-4 * (one + two)
    ratio = torch.where(is_near, torch.full_like(one, torch.e), one.clamp(min=1e-38) / two.clamp(min=1e-38)).log()
    mean = torch.where(is_near, (one + two) / 2, (one - two) / ratio)  # logarithmic
    is_seen = upcast(call.args[0].detach()) > -1e30

    def linear(x: Tensor) -> Tensor:
        moved = torch.where(is_seen, upcast(x), torch.zeros_like(one))
        total = (moved * mean).sum(axis, keepdim=True) / mean.sum(axis, keepdim=True)
        return (mean * (moved - total)).to(call.value.dtype)

    return linear


_RULES: dict[Rule, Callable[[Call, Call, list[int]], Linear | None]] = {
    **dict.fromkeys((zero._identity, zero._constant, zero._power), _elementwise),
    **dict.fromkeys((zero._shared, zero._product_taylor), _product),
    **{zero._quotient: _quotient, zero._softmax_taylor: _softmax},
    **{zero._layer_norm: _layer_norm, zero._rms_norm: _rms_norm},
}


class DifferenceRules(Rules):
    """Applies the rules to every torch function of a run, given the calls of another, which is recorded before."""

    def __init__(self) -> None:
        super().__init__("gradient")
        self._calls: list[Call] = []
        self._left: Iterator[Call] | None = None

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Record the calls of the other run."""
        self._calls, self._left = [], None
        with self:
            yield
        self._left = iter(self._calls)

    def _left_by(self, module: nn.Module) -> Callable[..., Any]:
        def leave(_: Tensor) -> Tensor:
            try:
                return self._linear(zero._identity, module.forward, self._inputs[-1:])
            finally:
                self._inputs.pop()

        return leave

    def _linear(self, rule: Rule, function: Function, args: Sequence[Any]) -> Any:
        with torch.no_grad():
            value = function(*args)
        call = Call(function, args, value)
        if self._left is None:
            self._calls.append(Call(function, [_constant(x) for x in args], _constant(value)))
            return value
        reference = next(self._left, None)
        if reference is None or _shapes(reference.args) != _shapes(args):
            raise HooklineError(
                "the two runs call other functions, so that they cannot be compared: use rules='zero', or "
                "attribution.attribution_patching"
            )
        active = [at for at, x in enumerate(args) if isinstance(x, Tensor) and x.requires_grad]
        if not active or not torch.is_grad_enabled():
            return value
        linear = _RULES[rule](call, reference, active)
        return function(*args) if linear is None else with_value(value, linear(*(args[at] for at in active)))


def _constant(x: Any) -> Any:
    return x.detach() if isinstance(x, Tensor) else x


def _shapes(args: Sequence[Any]) -> list[Any]:
    return [x.shape if isinstance(x, Tensor) else None for x in args]
