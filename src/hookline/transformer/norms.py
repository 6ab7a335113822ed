"""Derived points of a norm: its denominator, and the normalized activation before weight and bias.

The formula of a norm class is determined by running it: `(x - mean) / scale * gain + bias`, with or without
subtracting the mean, with `weight` or `1 + weight` as the gain.
"""

from __future__ import annotations

import copy
import itertools
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor, nn

from hookline.engine import Derived, Kind, Site, lens_of, saved_at
from hookline.transformer.precision import upcast

_EPSILON = ("eps", "variance_epsilon", "epsilon", "norm_eps")


@dataclass(frozen=True)
class Norm:
    """A norm module and its formula."""

    module: nn.Module
    subtracts_mean: bool
    offset: int
    """Added to the weight: 0 or 1."""
    guess: float
    """Added to the mean square, unless the module has its own epsilon."""

    def current_epsilon(self) -> float:
        """The number that is added to the mean square now."""
        attributes = vars(self.module)
        for name in _EPSILON:
            if attributes.get(name) is not None:
                return float(attributes[name])
        return self.guess

    @property
    def epsilon(self) -> float:
        """The same, as an attribute."""
        return self.current_epsilon()

    @property
    def gain(self) -> Tensor | float:
        """The factor of the normalized activation."""
        weight = getattr(self.module, "weight", None)
        return 1.0 if weight is None else upcast(weight) + self.offset

    @property
    def bias(self) -> Tensor | float:
        """The bias; 0 if there is none."""
        bias = getattr(self.module, "bias", None)
        return 0.0 if bias is None else upcast(bias)

    def parts(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The denominator and the normalized activation, in float32 or wider."""
        return _parts(x, self.subtracts_mean, self.epsilon)

    def __hash__(self) -> int:
        return id(self.module)

    def parts_at(self, input: Site) -> tuple[Tensor, Tensor]:
        """The parts of the current input, computed once for all points of this norm."""
        saved, with_grad = saved_at(input), torch.is_grad_enabled()
        if (_parts, with_grad) not in saved.parts:
            saved.parts[_parts, with_grad] = self.parts(saved.x)
        return saved.parts[_parts, with_grad]


def _parts(x: Tensor, subtracts_mean: bool, epsilon: float) -> tuple[Tensor, Tensor]:
    wide = upcast(x)
    if subtracts_mean:
        wide = wide - wide.mean(-1, keepdim=True)
    scale = (wide.square().mean(-1, keepdim=True) + epsilon).sqrt()
    return scale, wide / scale


_Form: TypeAlias = tuple[bool, int, float]
_forms: dict[type[nn.Module], _Form] = {}


def norm_of(module: nn.Module | None, width: int | None = None) -> Norm | None:
    """The formula of a norm module; None if it is not a norm of a known form, or its data is loaded for each call.

    Without a width, only classes that were tried before are known.
    """
    if module is None:
        return None
    is_empty = any(parameter.is_meta for parameter in module.parameters())
    if is_empty and hasattr(module, "_hf_hook"):
        return None
    form = _forms.get(type(module))
    if form is None and width is not None:
        form = _try(_filled(module) if is_empty else module, width)
        if form is not None:
            _forms[type(module)] = form
    return Norm(module, *form) if form is not None else None


@torch.no_grad()
def _filled(module: nn.Module) -> nn.Module:
    """A copy with some weights, of a module that has none: the form is that of the class."""
    filled = copy.deepcopy(module).to_empty(device="cpu")
    for parameter in filled.parameters():
        parameter.copy_(torch.arange(parameter.numel()).view_as(parameter).cos().add(0.7))
    return filled


@torch.no_grad()
def _try(module: nn.Module, width: int) -> _Form | None:
    """The form whose output matches the module, on two vectors with nonzero mean, one of them small."""
    like = next(module.parameters(), torch.empty(0))
    x = (torch.arange(width, device=like.device, dtype=torch.float32) * 1.7).sin().add(0.5)
    x = torch.stack([x, x * 1e-3])[None]
    try:
        output = module.forward(x.to(like.dtype))
    except Exception:  # it does not take a single tensor: not a norm
        return None
    if not isinstance(output, Tensor) or output.shape != x.shape or output.is_meta:
        return None
    for form in itertools.product((True, False), (0, 1), (1e-5, 1e-6, 1e-8, 1e-12, 0.0)):
        norm = Norm(module, *form)
        guess = norm.parts(x.to(like.dtype))[1] * norm.gain + norm.bias
        error, size = (guess - output).norm(dim=-1), output.float().norm(dim=-1)
        if bool((error <= (1e-3 if like.dtype == torch.float32 else 3e-2) * size).all()):
            return form
    return None


@dataclass(frozen=True)
class _InNorm(Derived):
    """A point of a norm, derived at its output from its input."""

    can_wait, ignores_value = True, True
    index: ClassVar[int]
    norm: Norm
    input: Site

    @property
    def needs(self) -> tuple[Any, ...]:  # type: ignore[override]
        """The input of the norm, which part is computed, and how; somebody may change the epsilon."""
        return self.input, self.index, self.norm.subtracts_mean, self.norm.current_epsilon

    @staticmethod
    def compute(x: None, input: Tensor, index: int, subtracts_mean: bool, epsilon: float) -> Tensor:  # noqa: ARG004
        """One of the parts of the norm, in the dtype of the stream; the output has no part in it."""
        return _parts(input, subtracts_mean, epsilon)[index].to(input.dtype)

    def source(self, value: Any) -> Tensor:  # noqa: ARG002
        """The input of the norm."""
        return saved_at(self.input).x


@dataclass(frozen=True)
class NormScale(_InNorm):
    """`hook_scale`, the denominator. `b p 1`."""

    index = 0

    def computed(self, value: Any) -> Tensor:
        """The denominator, as computed for all points of the norm."""
        return self.norm.parts_at(self.input)[0].to(self.source(value).dtype)

    def changed(self, value: Tensor, before: Tensor, after: Tensor) -> Tensor:
        """The output of the norm with another denominator."""
        scale, normalized = self.norm.parts_at(self.input)
        return _moved(value, normalized * (scale / after - scale / before), self.norm)


@dataclass(frozen=True)
class Normalized(_InNorm):
    """`hook_normalized`, the activation before weight and bias. `b p d`."""

    index = 1

    def computed(self, value: Any) -> Tensor:
        """The normalized activation, after edits of `hook_scale`."""
        x = self.source(value)
        scale, normalized = self.norm.parts_at(self.input)
        edited = NormScale(self.norm, self.input).edited(x)
        return (normalized if edited is None else normalized * (scale / edited)).to(x.dtype)

    def is_as_computed(self, value: Any) -> bool:
        """Whether neither it nor the denominator was edited."""
        return super().is_as_computed(value) and NormScale(self.norm, self.input).is_as_computed(value)

    def changed(self, value: Tensor, before: Tensor, after: Tensor) -> Tensor:
        """The output of the norm with another normalized activation."""
        return _moved(value, upcast(after) - upcast(before), self.norm)


def _moved(output: Tensor, change: Tensor, norm: Norm) -> Tensor:
    """The output of a norm after a change of its normalized activation."""
    return output + (change * norm.gain).to(output.dtype)


def norm_sites(norm: Norm) -> dict[str, Site]:
    """The sites of `hook_scale` and `hook_normalized`."""
    into = Site(norm.module, Kind.INPUT, lens_of(norm.module, Kind.INPUT))
    return {
        "hook_scale": Site(norm.module, Kind.OUTPUT, NormScale(norm, into), stage=-2),
        "hook_normalized": Site(norm.module, Kind.OUTPUT, Normalized(norm, into), stage=-1),
    }
