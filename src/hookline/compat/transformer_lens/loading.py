"""Loading for `HookedTransformer.from_pretrained`: short names, first layers only, processed weights."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hookline.compat.transformer_lens.aliases import checkpoint_revision, official_name
from hookline.errors import HooklineError, HooklineWarning, users_level
from hookline.load import load
from hookline.transformer.hub import EMBEDDED, as_hookline_error, find_model

if TYPE_CHECKING:
    from hookline.compat.transformer_lens.hooked_transformer import HookedTransformer


def get_device() -> torch.device:
    """The GPU if there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def dtype_of(dtype: torch.dtype | str) -> torch.dtype:
    """A dtype by its name."""
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype):
        raise HooklineError(f"dtype={dtype!r} is not a torch dtype: use float32, bfloat16, float16 or float64")
    return found


def refuse(**options: Any) -> None:
    """Raise for the first of these options that is set, with an alternative."""
    for name, (is_set, instead) in options.items():
        if is_set:
            raise HooklineError(f"{name} is not supported here: {instead}")


def from_name(
    name: str,
    *,
    device: torch.device | str | None,
    dtype: torch.dtype,
    first_n_layers: int | None,
    checkpoint_value: int | None,
    checkpoint_index: int | None,
    **kwargs: Any,
) -> tuple[nn.Module, Any]:
    """A model and its tokenizer, from a short name, a hub id, a folder, or the package itself."""
    where = name if name in EMBEDDED or Path(name).is_dir() else official_name(name)
    if checkpoint_value is not None or checkpoint_index is not None:
        kwargs["revision"] = checkpoint_revision(where, checkpoint_value, checkpoint_index)
    if first_n_layers is not None:
        kwargs["config"] = _shortened(where, first_n_layers, kwargs)
    with _without_report(first_n_layers is not None):
        model = load(where, device=device, dtype=dtype, **kwargs)
    return model.module, model.tokenizer


@contextmanager
def _without_report(wanted: bool) -> Iterator[None]:
    """Suppress transformers' report of unused weights, which are those of the omitted layers."""
    from transformers.utils import logging

    level = logging.get_verbosity()
    if wanted:
        logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)


def _shortened(name: str, n_layers: int, kwargs: dict[str, Any]) -> Any:
    """The config of the model with only its first layers."""
    from transformers import AutoConfig

    options = {
        key: kwargs[key] for key in ("revision", "trust_remote_code", "cache_dir", "local_files_only") if key in kwargs
    }
    where = find_model(name, kwargs)
    with as_hookline_error(name):
        options |= {"local_files_only": True} if where.is_cached_only else {}
        config = kwargs.get("config") or AutoConfig.from_pretrained(where.path, **options)
    whole = config.num_hidden_layers
    if n_layers not in range(1, whole + 1):
        raise HooklineError(f"first_n_layers={n_layers} is out of range: {name} has {whole} layers")
    for key, value in list(vars(config).items()):
        if key in ("layer_types", "mlp_layer_types", "attention_layers") and isinstance(value, list):
            setattr(config, key, value[:n_layers])
    config.num_hidden_layers = n_layers
    return config


def from_memory(module: nn.Module, *, device: torch.device | str | None, dtype: torch.dtype) -> nn.Module:
    """The model on that device; a copy only if the dtype differs."""
    if next(module.parameters()).dtype != dtype:
        module = copy.deepcopy(module).to(dtype)
    return module if device is None else module.to(device)


def process(model: HookedTransformer, **options: bool) -> None:
    """Process the weights; steps that are not exact on this model are skipped with a warning."""
    if model.processing is not None:
        raise HooklineError(
            "the weights are already processed, by this HookedTransformer or another around the same model: "
            "restore_weights() there first, or pass a copy of hf_model"
        )
    if not any(options.values()):
        return
    try:
        done = model.process_weights(**{name: None if is_on else False for name, is_on in options.items()})
        left_out = "; ".join(f"{name}: {why}" for name, why in done.left_out)
    except HooklineError as error:  # nothing of it is exact here
        left_out = str(error)
    if left_out:
        warnings.warn(f"left out, since it would not be exact: {left_out}", HooklineWarning, stacklevel=users_level())
