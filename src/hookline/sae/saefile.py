"""Autoencoder files: a folder with `cfg.json` and `sae_weights.safetensors`, in SAELens's current and older formats.

Current (version 6): the fields that affect the computation are at the top level, the provenance is in `metadata`.
Older: all fields are at the top level, some under other names, and top-k is an activation function of a "standard"
autoencoder. No code in a file is executed.
"""

from __future__ import annotations

import json
import os
import sys
import zlib
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hookline.errors import HooklineError
from hookline.files.tensorfile import make_folder, read_json, read_tensors, write_bytes, write_tensors
from hookline.sae.sae_config import DTYPES, SAEConfig, check_bool, dtype_of, shapes_of

CONFIG, WEIGHTS = "cfg.json", "sae_weights.safetensors"
_KIND = "sae"
_SCALES = ("scaling_factor", "finetuning_scaling_factor")
_OLDER = {
    "hook_point": "hook_name",
    "hook_point_head_index": "hook_head_index",
    "hook_point_layer": "hook_layer",
    "activation_fn_str": "activation_fn",
    "meta": "metadata",
}
_METADATA = (
    *("model_name", "model_class_name", "hook_name", "hook_layer", "hook_head_index", "model_from_pretrained_kwargs"),
    *("prepend_bos", "exclude_special_tokens", "neuronpedia_id", "context_size", "seqpos_slice", "dataset_path"),
    *("sae_lens_version", "sae_lens_training_version"),
)
_OURS = tuple(field.name for field in fields(SAEConfig) if field.name not in ("hook_name", "metadata", "extra"))
FORMAT = "6.0.0"
"""The version of SAELens in whose format files are written."""


def read(
    folder: Path, norm_scaling_factor: float | None = None, dtype: torch.dtype | None = None, *, check: bool = True
) -> tuple[SAEConfig, dict[str, Tensor]]:
    """Read the config and the weights in a folder, in the requested dtype or that of the config.

    Files written by hookline have checksums in the metadata of the weights, which SAELens ignores.
    """
    try:
        content = read_json(folder / CONFIG)
    except (FileNotFoundError, NotADirectoryError):
        raise HooklineError(f"there is no autoencoder in {folder}: expected {CONFIG} and {WEIGHTS}") from None
    if not os.path.exists(folder / WEIGHTS):
        raise HooklineError(f"{folder} has a {CONFIG}, but no {WEIGHTS}")
    tensors, about = read_tensors(folder / WEIGHTS, _KIND, called="an autoencoder's weights", writer=None, check=check)
    if check and about.get("cfg", _sum(content)) != _sum(content):
        raise HooklineError(
            f"{folder / CONFIG} does not match the checksum in {WEIGHTS}: it was changed or damaged. "
            f"load(path, check=False) skips this check"
        )
    try:
        cfg, is_scaled = config_of(content)
        cfg = cfg if dtype is None else replace(cfg, dtype=str(dtype).removeprefix("torch."))
        cfg, weights = _folded(cfg, checked_weights(tensors, cfg, is_scaled=is_scaled), norm_scaling_factor)
        return cfg, {name: _cast(name, x, dtype_of(cfg.dtype)) for name, x in weights.items()}
    except HooklineError as error:
        raise HooklineError(f"the autoencoder in {folder} cannot be used: {error}") from None


def write(folder: Path, cfg: SAEConfig, weights: Mapping[str, Tensor]) -> None:
    """Write both files, each atomically."""
    cfg = replace(cfg, dtype=str(weights["W_enc"].dtype).removeprefix("torch."))
    try:
        text = json.dumps(fields_of(cfg), indent=1).encode()
        total = _sum(json.loads(text))  # as it will be read back
    except (TypeError, ValueError, RecursionError) as error:
        raise HooklineError(f"the metadata of the config cannot be written as JSON: {error}") from None
    for name, x in weights.items():
        _check_finite(f"the autoencoder cannot be saved to {folder}: {name}", x)
    make_folder(folder, "an autoencoder")
    write_tensors(folder / WEIGHTS, _KIND, weights, {"cfg": total})
    write_bytes(folder / CONFIG, text, "the autoencoder")


def config_of(content: Any) -> tuple[SAEConfig, bool]:
    """Convert the contents of a `cfg.json` to a config, and whether features are scaled before decoding.

    Some older files have such a scaling factor.
    """
    if not isinstance(content, dict):
        raise HooklineError(f"a config must be a JSON object, not {content!r}")
    settings: dict[str, Any] = {}
    for name, value in content.items():
        _merge(settings, {_OLDER.get(name) or name: value})
    missing = [name for name in ("d_in", "d_sae") if name not in settings]
    if missing:
        raise HooklineError(f"it has no {' and no '.join(missing)}; its fields are {', '.join(map(repr, content))}")
    metadata = _metadata(settings)
    values = {"architecture": "standard"} | {name: settings.pop(name) for name in _OURS if name in settings}
    if "reshape_activations" not in values and str(metadata["hook_name"]).endswith("_z"):
        values["reshape_activations"] = "hook_z"
    norm = values.get("normalize_activations")
    if norm is None or isinstance(norm, bool):
        values["normalize_activations"] = "expected_average_only_in" if norm else "none"
    _use_activation(values, settings.pop("activation_fn", "relu"), settings.pop("activation_fn_kwargs", None) or {})
    is_scaled = settings.pop("finetuning_scaling_factor", None)
    check_bool("finetuning_scaling_factor", is_scaled is not None and is_scaled)
    settings.pop("device", None)
    return SAEConfig(**values, hook_name=metadata.pop("hook_name"), metadata=metadata, extra=settings), bool(is_scaled)


def fields_of(cfg: SAEConfig) -> dict[str, Any]:
    """Convert a config to the contents of a `cfg.json`: the inverse of `config_of`."""
    ours = {name: getattr(cfg, name) for name in _OURS if getattr(cfg, name) is not None}
    if cfg.architecture != "topk":
        del ours["rescale_acts_by_decoder_norm"]
    metadata = {"sae_lens_version": FORMAT, "sae_lens_training_version": None, **cfg.metadata}
    if _major(metadata["sae_lens_version"]) < 6:
        metadata["sae_lens_version"] = FORMAT
    return {**cfg.extra, **ours, "device": "cpu", "metadata": {**metadata, "hook_name": cfg.hook_name}}


def _merge(into: dict[str, Any], more: Mapping[str, Any]) -> None:
    """Add fields; raise if one has another value already."""
    for name, value in more.items():
        if into.setdefault(name, value) != value:
            raise HooklineError(f"it has two values for {name}: {into[name]!r} and {value!r}")


def _metadata(settings: dict[str, Any]) -> dict[str, Any]:
    """Take the metadata out of the fields, wherever they are; `hook_name` is always there."""
    inner = settings.pop("metadata", None)
    if inner is not None and not isinstance(inner, dict):
        raise HooklineError(f"metadata must be a JSON object, not {inner!r}")
    metadata = {name: settings.pop(name) for name in _METADATA if name in settings}
    _merge(metadata, inner or {})
    point = metadata.setdefault("hook_name", None)
    if point is not None and not isinstance(point, str):
        raise HooklineError(f"hook_name must be the name of a point, not {point!r}")
    if metadata.get("hook_head_index") is not None:
        raise HooklineError(
            f"it is for one head (hook_head_index={metadata['hook_head_index']!r}) of {point!r}, which is not supported"
        )
    return metadata


def _use_activation(values: dict[str, Any], function: Any, options: Any) -> None:
    """Take the activation function into account, which is where older files have top-k."""
    architecture = values["architecture"]
    if function == "relu" and architecture != "topk":
        if options:
            raise HooklineError(f"the activation function relu takes no options, but got {options!r}")
        return
    if function not in ("relu", "topk") or architecture not in ("standard", "topk"):
        raise HooklineError(f"the activation function {function!r} is not supported for {architecture!r} autoencoders")
    if not isinstance(options, dict) or set(options) - {"k"}:
        raise HooklineError(f"the activation function topk takes only k, but got {options!r}")
    values["architecture"] = "topk"
    _merge(values, options)


def _major(version: Any) -> int:
    first = str(version).split(".")[0]
    return int(first) if first.isdecimal() and len(first) < 9 else 0


def _sum(content: Any) -> str:
    return f"crc32:{zlib.crc32(json.dumps(content, sort_keys=True).encode()):08x}"


def _check_finite(what: str, x: Tensor) -> None:
    bad = int((~x.isfinite()).sum())
    if bad:
        raise HooklineError(f"{what} has {bad} values that are not finite (NaN or infinite), of {x.numel()}")


def _cast(name: str, x: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast to a dtype; raise if values overflow."""
    new = x.to(dtype)
    if not bool(new.isfinite().all()):
        largest, limit = float(x.abs().max()), torch.finfo(dtype).max
        raise HooklineError(
            f"{name} has values up to {largest:g}, which overflow {dtype} (max {limit:g}): use a wider dtype="
        )
    return new


def checked_weights(
    tensors: dict[str, Tensor], cfg: SAEConfig, *, is_scaled: bool = False, file: str = WEIGHTS
) -> dict[str, Tensor]:
    """The weights in a file, by today's names.

    A factor that scales features before decoding is folded into their directions.
    """
    for name, x in tensors.items():
        if x.dtype not in DTYPES.values():
            raise HooklineError(f"{name} has dtype {x.dtype}; expected a float dtype")
        _check_finite(name, x)
    if "log_threshold" in tensors and "threshold" not in tensors:
        tensors["threshold"] = tensors.pop("log_threshold").exp()
    scales = [tensors.pop(name) for name in _SCALES if name in tensors]
    if len(scales) > 1:
        raise HooklineError(f"{file} has both {' and '.join(_SCALES)}: remove one of them")
    shapes, expected_shapes = {name: tuple(x.shape) for name, x in tensors.items()}, shapes_of(cfg)
    if scales:
        shapes[_SCALES[0]], expected_shapes[_SCALES[0]] = tuple(scales[0].shape), (cfg.d_sae,)
    if shapes != expected_shapes:
        raise HooklineError(
            f"{file} has the tensors {_listed(shapes)}; a {cfg.architecture!r} autoencoder with d_in={cfg.d_in} and "
            f"d_sae={cfg.d_sae} has {_listed(expected_shapes)}"
        )
    if is_scaled != bool(scales) and not (scales and bool((scales[0] == 1).all())):
        has = "there is one that is not 1" if scales else "there is none"
        raise HooklineError(f"{CONFIG} has finetuning_scaling_factor={is_scaled}, but {has}")
    return tensors | {"W_dec": tensors["W_dec"] * scales[0][:, None]} if scales else tensors


def _listed(shapes: Mapping[str, tuple[int, ...]]) -> str:
    return ", ".join(f"{name} {list(shape)}" for name, shape in sorted(shapes.items()))


def _folded(cfg: SAEConfig, weights: dict[str, Tensor], factor: float | None) -> tuple[SAEConfig, dict[str, Tensor]]:
    """Fold the factor by which activations were multiplied in training into the weights."""
    if cfg.normalize_activations != "expected_average_only_in":
        if factor is not None:
            raise HooklineError(
                f"norm_scaling_factor applies to activations that were scaled in training, but {CONFIG} has "
                f"normalize_activations={cfg.normalize_activations!r}"
            )
        return cfg, weights
    if factor is None:
        raise HooklineError(
            "it was trained on activations scaled to an expected norm, and the factor is not in its files: use "
            "load(path, norm_scaling_factor=…), which is √d_in / their mean norm, or 1.0 if it is already folded in"
        )
    if isinstance(factor, bool) or not isinstance(factor, int | float) or not 0 < factor <= sys.float_info.max:
        raise HooklineError(f"norm_scaling_factor must be a positive number, not {factor!r}")
    new = {name: weights[name].double() / factor for name in ("W_dec", "b_dec")}
    new["W_enc"] = weights["W_enc"].double() * factor
    return replace(cfg, normalize_activations="none"), weights | new
