"""Loading for `HookedTransformer.from_pretrained`: short names, first layers only, processed weights."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hookline.compat.transformer_lens.aliases import checkpoint_revision, get_official_model_name
from hookline.errors import HooklineError
from hookline.load import load
from hookline.transformer.hub import EMBEDDED, as_hookline_error, find_model


def get_device() -> torch.device:
    """The GPU if there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def dtype_of(dtype: torch.dtype | str) -> torch.dtype:
    """A dtype by its name."""
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype):
        raise HooklineError(f"dtype={dtype!r} is not a torch dtype: use float32, bfloat16, float16 or float64")
    return found


def refuse(**options: str | None) -> None:
    """Raise for the first of these options that has a reason, which says what to do instead."""
    for name, reason in options.items():
        if reason is not None:
            raise HooklineError(f"{name} is not supported here: {reason}")


def from_name(
    name: str,
    device: torch.device | str | None,
    dtype: torch.dtype,
    first_n_layers: int | None = None,
    checkpoint_value: int | None = None,
    checkpoint_index: int | None = None,
    **kwargs: Any,
) -> tuple[nn.Module, Any]:
    """A model and its tokenizer, from a short name, a hub id, a folder, or the package itself."""
    where = name if name in EMBEDDED or Path(name).is_dir() else get_official_model_name(name)
    if checkpoint_value is not None or checkpoint_index is not None:
        kwargs["revision"] = checkpoint_revision(where, checkpoint_value, checkpoint_index)
    if first_n_layers is not None:
        kwargs["config"] = _shortened(where, first_n_layers, kwargs)
    with _without_report() if first_n_layers is not None else nullcontext():
        model = load(where, device=device, dtype=dtype, **kwargs)
    return model.module, model.tokenizer


@contextmanager
def _without_report() -> Iterator[None]:
    """Suppress transformers' report of unused weights, which are those of the omitted layers."""
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)


def _shortened(name: str, n_layers: int, kwargs: dict[str, Any]) -> Any:
    """The config of the model with only its first layers."""
    from transformers import AutoConfig

    names = ("revision", "trust_remote_code", "cache_dir", "local_files_only")
    where = find_model(name, kwargs)
    options = {key: kwargs[key] for key in names if key in kwargs}
    options |= {"local_files_only": True} if where.is_cached_only else {}
    with as_hookline_error(name):
        config = kwargs.get("config") or AutoConfig.from_pretrained(where.path, **options)
    if n_layers not in range(1, config.num_hidden_layers + 1):
        raise HooklineError(f"first_n_layers={n_layers} is out of range: {name} has {config.num_hidden_layers} layers")
    for key in ("layer_types", "mlp_layer_types", "attention_layers"):
        if isinstance(value := getattr(config, key, None), list):
            setattr(config, key, value[:n_layers])
    config.num_hidden_layers = n_layers
    return config


def from_memory(module: nn.Module, device: torch.device | str | None, dtype: torch.dtype) -> nn.Module:
    """The model on that device; a copy only if the dtype differs."""
    if next(module.parameters()).dtype != dtype:
        module = copy.deepcopy(module).to(dtype)
    return module if device is None else module.to(device)
