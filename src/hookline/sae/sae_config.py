"""What an autoencoder is like: its kind, its sizes, and what is done to activations before and after."""

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
    """The configuration of a sparse autoencoder, in the words of `cfg.json`.

    `hook_name` is the point that it was trained at. `metadata` and `extra` are the other fields of the file: they have
    no effect, and are written back.
    """

    architecture: Architecture
    d_in: int
    d_sae: int
    k: int | None = None
    """How many features are active, of "topk"."""
    dtype: str = "float32"
    apply_b_dec_to_input: bool = True
    normalize_activations: Normalization = "none"
    reshape_activations: Reshaping = "none"
    """ "hook_z": the activations have an axis of heads, and one feature is of all heads together."""
    rescale_acts_by_decoder_norm: bool = False
    """Of "topk": the k largest are chosen by what they add, and a feature counts how much it adds."""
    hook_name: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, kinds in _WORDS.items():
            if getattr(self, name) not in kinds:
                known = ", ".join(map(repr, kinds))
                raise HooklineError(f"{name} is {getattr(self, name)!r}; what is known is {known}")
        for name in ("d_in", "d_sae"):
            if not is_count(getattr(self, name)):
                raise HooklineError(f"{name} is a whole number from 1 on, not {getattr(self, name)!r}")
        for name in ("apply_b_dec_to_input", "rescale_acts_by_decoder_norm"):
            if not isinstance(getattr(self, name), bool):
                raise HooklineError(f"{name} is true or false, not {getattr(self, name)!r}")
        self._check_topk()
        dtype_of(self.dtype)

    def as_data(self) -> tuple[Any, ...]:
        """The fields that affect the computation, without the dtype (the weights have it) and the provenance."""
        return tuple((each.name, getattr(self, each.name)) for each in fields(self) if each.name not in _NO_EFFECT)

    def _check_topk(self) -> None:
        is_topk = self.architecture == "topk"
        if is_topk and not (is_count(self.k) and self.k <= self.d_sae):  # type: ignore[operator]
            raise HooklineError(f'of a "topk" autoencoder k is from 1 to d_sae ({self.d_sae}), not {self.k!r}')
        if not is_topk and (self.k is not None or self.rescale_acts_by_decoder_norm):
            raise HooklineError(
                f'k and rescale_acts_by_decoder_norm are of "topk" autoencoders; this one is {self.architecture!r}'
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
    """Whether it is a whole number from 1 on."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def dtype_of(name: Any) -> torch.dtype:
    """The dtype that "float32", "torch.bfloat16" … stand for."""
    known = {str(each).removeprefix("torch."): each for each in DTYPES}
    if not isinstance(name, str) or name.removeprefix("torch.") not in known:
        raise HooklineError(f"dtype is {name!r}; what is known is {', '.join(map(repr, known))}")
    return known[name.removeprefix("torch.")]


DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
