"""Rules of relevance: torch functions that are not linear pass gradients on as a linear function with the same value.

While `Rules` is active, every torch function that is called with activations is looked up in a table. A norm is divided
by a constant, an activation function is its input times a constant, a product of two activations is shared equally
between them, and what only gates others (a softmax, a sigmoid, the choice of experts) is a constant. What follows is
linear as it is. No rule knows an architecture.

The linear functions of a run are recorded, in order, and can be run again on other activations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from hookline.engine import attention
from hookline.errors import HooklineError
from hookline.transformer.precision import upcast

Attention: TypeAlias = Literal["frozen", "split", "gradient"]
Function: TypeAlias = Callable[..., Any]
Linear: TypeAlias = Callable[..., Any]
"""A linear function of those arguments of a call that are activations; in the run, its value is that of the call."""
Rule: TypeAlias = Callable[[Function, Sequence[Any], list[int], Any], Linear | None]
"""From a function, its arguments, the indices of those that are activations, and its value."""


def _constant(_function: Function, _args: Sequence[Any], _active: list[int], value: Any) -> Linear:
    return lambda *_: value


def _identity(_function: Function, args: Sequence[Any], active: list[int], value: Tensor) -> Linear:
    x = args[active[0]].detach()
    ratio = torch.where(x == 0, torch.zeros_like(value), value / x)
    return lambda x, *_: x * ratio


def _power(function: Function, args: Sequence[Any], active: list[int], value: Tensor) -> Linear:
    is_whole = active == [0] and isinstance(args[1], int | float) and args[1] >= 1
    return (_identity if is_whole else _constant)(function, args, active, value)


def _shared(function: Function, args: Sequence[Any], active: list[int], _value: Tensor) -> Linear | None:
    """A product of several activations: each factor gets an equal share, times the others as they are."""
    if len(active) < 2:
        return None
    constants = [x.detach() if at in active else x for at, x in enumerate(args)]

    def linear(*inputs: Tensor) -> Any:
        terms = [function(*constants[:at], x, *constants[at + 1 :]) for at, x in zip(active, inputs, strict=True)]
        return sum(terms) / len(terms)

    return linear


def _product_taylor(function: Function, args: Sequence[Any], active: list[int], value: Tensor) -> Linear | None:
    """A product of several activations to first order; the rest of its value is a constant."""
    if len(active) < 2:
        return None
    constants = [x.detach() if at in active else x for at, x in enumerate(args)]

    def linear(*inputs: Tensor) -> Any:
        terms = [function(*constants[:at], x, *constants[at + 1 :]) for at, x in zip(active, inputs, strict=True)]
        return sum(terms) - (len(terms) - 1) * value

    return linear


def _quotient(function: Function, args: Sequence[Any], active: list[int], value: Tensor) -> Linear | None:
    if active == [0]:
        return None
    below = args[1].detach()
    return (lambda x, *_: function(x, below)) if 0 in active else _constant(function, args, active, value)


def _normalized(
    x: Tensor, shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, epsilon: float | None, *, center: bool
) -> Linear:
    axes = tuple(range(-len(shape), 0))

    def centered(x: Tensor) -> Tensor:
        return upcast(x) - upcast(x).mean(axes, keepdim=True) if center else upcast(x)

    epsilon = torch.finfo(x.dtype).eps if epsilon is None else epsilon
    scale = (centered(x.detach()).square().mean(axes, keepdim=True) + epsilon).rsqrt()

    def linear(x: Tensor) -> Tensor:
        normalized = centered(x) * scale
        normalized = normalized if weight is None else normalized * weight
        return (normalized if bias is None else normalized + bias).to(x.dtype)

    return linear


def _layer_norm(_function: Function, args: Sequence[Any], _active: list[int], _value: Tensor) -> Linear:
    x, shape, weight, bias, epsilon = [*args, *(None, None, 1e-5)[len(args) - 2 :]][:5]
    return _normalized(x, shape, weight, bias, epsilon, center=True)


def _rms_norm(_function: Function, args: Sequence[Any], _active: list[int], _value: Tensor) -> Linear:
    x, shape, weight, epsilon = [*args, *(None, None)[len(args) - 2 :]][:4]
    return _normalized(x, shape, weight, None, epsilon, center=False)


def _softmax_taylor(_function: Function, args: Sequence[Any], _active: list[int], value: Tensor) -> Linear:
    """The softmax to first order; the rest of its value is a constant."""
    before = args[0].detach()
    axis = args[1] if len(args) > 1 and isinstance(args[1], int) else -1

    def linear(x: Tensor) -> Tensor:
        moved = torch.where(before.isneginf(), torch.zeros_like(before), x - before).to(value.dtype)
        return value + value * (moved - (moved * value).sum(axis, keepdim=True))

    return linear


def _mixed(function: Function, args: Sequence[Any], active: list[int], value: Tensor) -> Linear:
    """A fused attention call with a fixed pattern is linear in the values."""
    if 2 not in active:
        return _constant(function, args, active, value)
    query, key = args[0].detach(), args[1].detach()
    return lambda *inputs: function(query, key, inputs[active.index(2)], *args[3:])


def _named(functions: str, *more: Function) -> list[Function]:
    """These functions in `torch`, `torch.nn.functional` and as methods of a tensor, as far as they exist."""
    candidates = [getattr(home, name, None) for name in functions.split() for home in (torch, F, Tensor)]
    return [*dict.fromkeys(function for function in (*candidates, *more) if function is not None)]


_SOFTMAX = _named("softmax log_softmax gumbel_softmax _softmax")
_PRODUCTS = _named("matmul bmm mm einsum", Tensor.__matmul__, Tensor.__rmatmul__)
"""Products of matrices, which are attention if both are activations; gates are multiplied number by number."""
_FUSED = F.scaled_dot_product_attention


def _fused(*args: Any) -> Tensor:
    return _FUSED(**attention.FusedCall(*args)._asdict())


_RULES: dict[Function, Rule] = {
    **dict.fromkeys(
        _named("relu relu6 gelu silu tanh leaky_relu elu selu celu mish hardswish hardtanh softsign"), _identity
    ),
    **dict.fromkeys(
        _named("square abs erf clamp clamp_min clamp_max clip normalize tanhshrink sinh arctan"), _identity
    ),
    **dict.fromkeys(_named("sigmoid hardsigmoid logsigmoid softplus exp exp2 expm1 log log2 log1p cos sin"), _constant),
    **dict.fromkeys(_named("sqrt rsqrt reciprocal var std norm var_mean std_mean logsumexp cumprod prod"), _constant),
    **dict.fromkeys(_named("topk argmax argmin sort argsort gt lt ge le eq ne"), _constant),
    **dict.fromkeys([torch.linalg.vector_norm, torch.linalg.norm, Tensor.__rpow__, Tensor.__rtruediv__], _constant),
    **dict.fromkeys([Tensor.__gt__, Tensor.__lt__, Tensor.__ge__, Tensor.__le__, torch.special.expit], _constant),
    **dict.fromkeys(_named("pow", Tensor.__pow__), _power),
    **dict.fromkeys(_named("mul multiply", Tensor.__mul__, Tensor.__rmul__), _shared),
    **dict.fromkeys([*_PRODUCTS, torch.baddbmm, Tensor.baddbmm], _shared),
    **dict.fromkeys(_named("div divide true_divide", Tensor.__truediv__), _quotient),
    **dict.fromkeys(_SOFTMAX, _constant),
    F.layer_norm: _layer_norm,
    torch.layer_norm: _layer_norm,
    F.rms_norm: _rms_norm,
    torch.rms_norm: _rms_norm,
    _FUSED: _mixed,
}


class Rules(TorchFunctionMode):
    """Applies the rules to every torch function, and keeps the linear functions that took their places.

    `attention` is "frozen" (patterns are constants, as in RelP), "split" (products of queries and keys, and of patterns
    and values, are shared equally, and the softmax is taken to first order, as in AttnLRP) or "gradient" (all of it is
    taken to first order).
    """

    def __init__(self, attention: Attention = "frozen") -> None:
        super().__init__()
        self.attention = attention
        self._tape: list[tuple[Rule, Linear]] = []
        self._rest: Iterator[tuple[Rule, Linear]] | None = None  # of the tape, while it is replayed
        self._inputs: list[Tensor] = []  # of the activation modules that are running

    @contextmanager
    def replayed(self) -> Iterator[None]:
        """Use the linear functions of the run that was recorded, on the activations of this one."""
        self._rest = iter(self._tape)
        try:
            with self:
                yield
        finally:
            self._rest = None

    def hooks(self, module: nn.Module) -> list[tuple[str, Callable[..., Any]]]:
        """Hooks for modules that compute an activation function in several steps: the rule is for all of them."""
        hooks: list[tuple[str, Callable[..., Any]]] = []
        for name, submodule in module.named_modules():
            if name and _is_activation(submodule):
                hooks += [(f"{name}.input", self._enter), (name, self._left_by(submodule))]
        return hooks

    def _enter(self, x: Tensor, hook: Any) -> None:  # noqa: ARG002
        self._inputs.append(x)

    def _left_by(self, module: nn.Module) -> Callable[..., Any]:  # noqa: ARG002
        def leave(y: Tensor) -> Tensor:
            try:
                return self._linear(_identity, lambda _: y.detach(), self._inputs[-1:])
            finally:
                self._inputs.pop()

        return leave

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Call a function, by its rule if there is one."""
        kwargs = kwargs or {}
        if any(isinstance(x, nn.Parameter) for x in (*args, *kwargs.values())):  # only activations are variables
            args = tuple(_plain(x) for x in args)
            kwargs = {name: _plain(x) for name, x in kwargs.items()}
        rule = _RULES.get(func)
        if rule is None or self._inputs:
            return func(*args, **kwargs)
        if func is _FUSED:
            call = attention.FusedCall(*args, **kwargs)
            return self._linear(_mixed, _fused, call) if self.attention == "frozen" else self._stepwise(call)
        if self.attention != "frozen" and func in _SOFTMAX:
            rule = _softmax_taylor
        if self.attention == "gradient" and func in _PRODUCTS:
            rule = _product_taylor
        names = list(kwargs)

        def function(*values: Any) -> Any:
            return func(*values[: len(args)], **dict(zip(names, values[len(args) :], strict=True)))

        return self._linear(rule, function, [*args, *kwargs.values()])

    def _stepwise(self, call: attention.FusedCall) -> Tensor:
        with self:
            return call.mix(torch.softmax(call.scores(None), -1))

    def _linear(self, rule: Rule, function: Function, args: Sequence[Any]) -> Any:
        """Call a function; its gradient, and in a replay its value, is that of the linear function of its rule."""
        active = [at for at, x in enumerate(args) if isinstance(x, Tensor) and x.requires_grad]
        if not active or not torch.is_grad_enabled():
            return function(*args)
        with torch.no_grad():
            value = function(*args)
        linear = rule(function, args, active, value)
        if linear is None:
            return function(*args)
        if self._rest is not None:
            before, linear = next(self._rest, (None, linear))
            if before is not rule:
                raise HooklineError(
                    "relevance cannot be checked: with other activations, the model calls other functions. Use "
                    "attribution.attribution_patching"
                )
            return linear(*(args[at] for at in active))
        self._tape.append((rule, linear))
        output = linear(*(args[at] for at in active))
        return with_value(value, output)


class _WithValue(torch.autograd.Function):
    """The first tensor, with the gradient of the second."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, linear: Tensor) -> Tensor:  # noqa: ARG004
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:  # noqa: ARG004
        return None, gradient


def with_value(value: Any, linear: Any) -> Any:
    """The value of a function, with the gradient of a linear one."""
    return value if linear is value else _WithValue.apply(value, linear.to(value.dtype))


def _plain(x: Any) -> Any:
    return x.detach() if isinstance(x, nn.Parameter) else x


@torch.no_grad()
def _is_activation(module: nn.Module) -> bool:
    """Whether a module without weights is a function of each number by itself, and 0 at 0: found by calling it."""
    if module._modules or module._parameters or module._buffers or isinstance(module, nn.Dropout | nn.Identity):
        return False
    x = torch.tensor([[0.0, 0.3, -1.2, 2.5, -0.4, 1.1]])
    try:
        whole, parts = module.forward(x.clone()), [module.forward(column.clone()) for column in x.split(1, -1)]
    except Exception:  # it takes other arguments
        return False
    is_tensor = isinstance(whole, Tensor) and whole.shape == x.shape
    return is_tensor and bool(whole[0, 0] == 0) and torch.allclose(whole, torch.cat(parts, -1))
