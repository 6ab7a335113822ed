"""The config of an autoencoder: its architecture, its sizes, and how activations are normalized."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, TypeAlias, get_args

import torch

from hookline.errors import HooklineError

Architecture: TypeAlias = Literal["standard", "gated", "topk", "jumprelu"]
Normalization: TypeAlias = Literal["none", "layer_norm", "constant_norm_rescale", "expected_average_only_in"]
Reshaping: TypeAlias = Literal["none", "hook_z"]


@dataclass(frozen=True)
class SAEConfig:
    """The config of a sparse autoencoder, with the field names of `cfg.json`.

    `hook_name` is the point where it was trained. `metadata` and `extra` hold the other fields of the file: they have
    no effect, and are written back.
    """

    architecture: Architecture
    d_in: int
    d_sae: int
    k: int | None = None
    """The number of active features of a "topk" autoencoder."""
    dtype: str = "float32"
    apply_b_dec_to_input: bool = True
    normalize_activations: Normalization = "none"
    reshape_activations: Reshaping = "none"
    """ "hook_z": the activations have a head axis, and each feature spans all heads."""
    rescale_acts_by_decoder_norm: bool = False
    """For "topk": features are scaled by the norm of their decoder direction before the k largest are chosen."""
    hook_name: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, kinds in _WORDS.items():
            if getattr(self, name) not in kinds:
                expected = ", ".join(map(repr, kinds))
                raise HooklineError(f"{name} is {getattr(self, name)!r}; expected one of {expected}")
        for name in ("d_in", "d_sae"):
            check_count(name, getattr(self, name))
        for name in ("apply_b_dec_to_input", "rescale_acts_by_decoder_norm"):
            check_bool(name, getattr(self, name))
        dtype_of(self.dtype)
        if self.architecture != "topk" and (self.k is not None or self.rescale_acts_by_decoder_norm):
            raise HooklineError(
                f'k and rescale_acts_by_decoder_norm apply to "topk" autoencoders, not {self.architecture!r}'
            )
        if self.architecture == "topk" and not (is_count(self.k) and self.k <= self.d_sae):  # type: ignore[operator]
            raise HooklineError(f'a "topk" autoencoder needs k from 1 to d_sae ({self.d_sae}), not {self.k!r}')

    def as_data(self) -> tuple[Any, ...]:
        """The fields that affect the computation, without the dtype (the weights have it) and the provenance."""
        return tuple(
            (config_field.name, getattr(self, config_field.name))
            for config_field in fields(self)
            if config_field.name not in _NO_EFFECT
        )


_NO_EFFECT = ("dtype", "hook_name", "metadata", "extra")

_WORDS = {
    "architecture": get_args(Architecture),
    "normalize_activations": get_args(Normalization),
    "reshape_activations": get_args(Reshaping),
}


def shapes_of(cfg: SAEConfig) -> dict[str, tuple[int, ...]]:
    """The shapes of its weights, by name."""
    vectors = dict.fromkeys(_VECTORS[cfg.architecture], (cfg.d_sae,))
    return {"W_enc": (cfg.d_in, cfg.d_sae), "W_dec": (cfg.d_sae, cfg.d_in), "b_dec": (cfg.d_in,), **vectors}


_VECTORS: dict[str, tuple[str, ...]] = {
    "standard": ("b_enc",),
    "topk": ("b_enc",),
    "jumprelu": ("b_enc", "threshold"),
    "gated": ("b_gate", "b_mag", "r_mag"),
}


def is_count(value: Any) -> bool:
    """Whether it is a positive integer."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def is_number(value: Any) -> bool:
    """Whether it is a number, and not a boolean."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def check_count(name: str, value: Any) -> None:
    """Raise unless it is a positive integer."""
    if not is_count(value):
        raise HooklineError(f"{name} must be a positive integer, not {value!r}")


def check_bool(name: str, value: Any) -> None:
    """Raise unless it is a boolean."""
    if not isinstance(value, bool):
        raise HooklineError(f"{name} must be true or false, not {value!r}")


DTYPES = {
    str(dtype).removeprefix("torch."): dtype for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16)
}


def dtype_of(name: Any) -> torch.dtype:
    """Convert "float32", "torch.bfloat16" … to a dtype."""
    dtype = DTYPES.get(str(name).removeprefix("torch."))
    if dtype is None or not isinstance(name, str):
        raise HooklineError(f"dtype is {name!r}; expected one of {', '.join(map(repr, DTYPES))}")
    return dtype
