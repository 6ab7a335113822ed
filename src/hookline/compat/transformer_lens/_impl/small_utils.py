"""Small functions of `transformer_lens.utils`: attributes by path, initialization, texts with a BOS token, devices."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from hookline.compat.transformer_lens._impl.lens_errors import LensValueError
from hookline.engine import Delegate

__all__ = [
    "ModelWithCfg",
    "TypedModuleList",
    "_apply_repetition_penalty",
    "enable_hf_retry",
    "calc_fan_in_and_fan_out",
    "get_matrix_corner",
    "get_nested_attr",
    "get_rotary_pct_from_config",
    "init_kaiming_normal_",
    "init_kaiming_uniform_",
    "init_xavier_normal_",
    "init_xavier_uniform_",
    "is_library_available",
    "logits_to_df",
    "move_to_and_update_config",
    "override_or_use_default_value",
    "select_compatible_kwargs",
    "set_nested_attr",
    "warn_if_mps",
]


T = TypeVar("T", bound=nn.Module)


class TypedModuleList(nn.ModuleList, Generic[T]):
    """A ModuleList whose elements have a known type."""


@runtime_checkable
class ModelWithCfg(Protocol):
    """A model with a `cfg`, for annotations."""

    cfg: Any

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Its weights."""

    def to(self, device_or_dtype: Any) -> Any:
        """Move it, or change its dtype."""


def enable_hf_retry() -> None:
    """Do nothing: huggingface_hub repeats requests that the server was too busy for."""


def _apply_repetition_penalty(
    logits: Float[Tensor, "batch d_vocab"], tokens: Int[Tensor, "batch pos"], penalty: float
) -> Float[Tensor, "batch d_vocab"]:
    """Make tokens that occur already less likely: positive logits are divided by the penalty, others multiplied."""
    old = logits.gather(-1, tokens)
    return logits.scatter(-1, tokens, torch.where(old > 0, old / penalty, old * penalty))


def get_nested_attr(obj: Any, attr_str: str) -> Any:
    """`obj.a.b` for "a.b"."""
    return operator.attrgetter(attr_str)(obj)


def set_nested_attr(obj: Any, attr_str: str, value: Any) -> None:
    """Set `obj.a.b` for "a.b"."""
    owner, _, name = attr_str.rpartition(".")
    setattr(get_nested_attr(obj, owner) if owner else obj, name, value)


def override_or_use_default_value(default_flag: Any, override: Any = None) -> Any:
    """The override, unless it is None."""
    return default_flag if override is None else override


def select_compatible_kwargs(kwargs_dict: dict[str, Any], callable: Callable[..., Any]) -> dict[str, Any]:
    """The arguments that a function has."""
    return {name: value for name, value in kwargs_dict.items() if name in inspect.getfullargspec(callable).args}


def is_library_available(name: str) -> bool:
    """Whether a package is installed."""
    return find_spec(name) is not None


def get_rotary_pct_from_config(config: Any) -> float:
    """The share of each head that rotary positions rotate, from a config of transformers."""
    rotary_pct = getattr(config, "rotary_pct", None)
    parameters = getattr(config, "rope_parameters", None) or {}
    return rotary_pct if rotary_pct is not None else parameters.get("partial_rotary_factor", 1.0)


def get_matrix_corner(tensor: Any, n: int = 3) -> Tensor:
    """The first entries along every axis."""
    corner = tensor[tuple(slice(n) for _ in range(tensor.ndim))]
    return corner.AB if hasattr(corner, "AB") else corner


def logits_to_df(logits: Float[Tensor, " d_vocab"], tokenizer: Any = None, top_k: int | None = None) -> Any:
    """Tokens with their logits and probabilities, the most likely first, as a table of pandas."""
    from pandas import DataFrame  # type: ignore[import-untyped]  # has no types

    log_probs = logits.detach().float().log_softmax(-1).cpu()
    order = log_probs.argsort(descending=True)[:top_k]
    table: dict[str, Any] = {"token_index": order.tolist()}
    if tokenizer is not None:
        table["token_string"] = [tokenizer.decode([token]) for token in order.tolist()]
    table |= {"logit": logits.detach().cpu()[order].tolist(), "log_prob": log_probs[order].tolist()}
    return DataFrame({**table, "probability": log_probs[order].exp().tolist()})


def calc_fan_in_and_fan_out(tensor: Tensor) -> tuple[int, int]:
    """The fan-in and fan-out of a vector, of a matrix [into, out], or of heads [head, into, out]."""
    shape = tensor.shape
    if len(shape) not in (1, 2, 3):
        raise LensValueError(f"fan-in and fan-out need a vector, a matrix or one matrix per head, not {list(shape)}")
    if len(shape) == 3:
        return shape[1], shape[0] * shape[2]
    return (1, shape[0]) if len(shape) == 1 else (shape[0], shape[1])


def init_xavier_uniform_(param: Tensor, gain: float = 1.0) -> Tensor:
    """Xavier initialization, uniform."""
    return _uniform(param, gain * (2 / sum(calc_fan_in_and_fan_out(param))) ** 0.5)


def init_xavier_normal_(param: Tensor, gain: float = 1.0) -> Tensor:
    """Xavier initialization, normal."""
    return nn.init.normal_(param, std=gain * (2 / sum(calc_fan_in_and_fan_out(param))) ** 0.5)


def init_kaiming_uniform_(
    param: Tensor, a: float = 0, nonlinearity: Any = "relu", gain: float = 1.0, mode: str = "fan_in"
) -> Tensor:
    """Kaiming initialization, uniform."""
    return _uniform(param, _kaiming(param, a, nonlinearity, gain, mode))


def init_kaiming_normal_(
    param: Tensor, a: float = 0, nonlinearity: Any = "relu", gain: float = 1.0, mode: str = "fan_in"
) -> Tensor:
    """Kaiming initialization, normal."""
    return nn.init.normal_(param, std=_kaiming(param, a, nonlinearity, gain, mode))


def _kaiming(param: Tensor, a: float, nonlinearity: Any, gain: float, mode: str) -> float:
    fans = calc_fan_in_and_fan_out(param)
    return gain * nn.init.calculate_gain(nonlinearity, a) / fans[mode != "fan_in"] ** 0.5


def _uniform(param: Tensor, deviation: float) -> Tensor:
    """A uniform distribution around 0 with this standard deviation."""
    return nn.init.uniform_(param, -deviation * 3**0.5, deviation * 3**0.5)


def move_to_and_update_config(model: Any, device_or_dtype: Any, print_details: bool = True) -> Any:
    """Move a model, or change its dtype; `model.cfg` follows. The `to` of a class of one's own may call it."""
    if isinstance(model, Delegate):
        return model.to(device_or_dtype, print_details)
    if not isinstance(device_or_dtype, torch.dtype):
        model.cfg.device = str(device_or_dtype)
    elif hasattr(model.cfg, "dtype"):
        model.cfg.dtype = device_or_dtype
    return nn.Module.to(model, device_or_dtype)


def warn_if_mps(device: Any) -> None:
    """Do nothing: hookline does not warn about devices."""
    del device
