"""Autoencoder files: a folder with `cfg.json` and `sae_weights.safetensors`. No code in a file is executed."""

from __future__ import annotations

import json
import os
import sys
import zlib
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hookline.engine.tensorfile import make_folder, read_json, read_tensors, write_bytes, write_tensors
from hookline.errors import HooklineError
from hookline.sae.layout import config_of, fields_of
from hookline.sae.sae_config import DTYPES, SAEConfig, dtype_of, shapes_of

if TYPE_CHECKING:
    from hookline.sae.autoencoder import SparseAutoencoder

CONFIG, WEIGHTS = "cfg.json", "sae_weights.safetensors"
_KIND = "sae"
_SCALES = ("scaling_factor", "finetuning_scaling_factor")


def read(
    folder: Path, norm_scaling_factor: float | None = None, dtype: torch.dtype | None = None, *, check: bool = True
) -> tuple[SAEConfig, dict[str, Tensor]]:
    """Read the config and the weights in a folder, in the requested dtype or that of the config.

    Files written by hookline have checksums in the metadata of the weights, which SAELens ignores.
    """
    fields = _fields(folder)
    try:
        cfg, is_scaled = config_of(fields)
        cfg = cfg if dtype is None else replace(cfg, dtype=str(dtype).removeprefix("torch."))
    except HooklineError as error:
        raise HooklineError(f"{folder / CONFIG} cannot be used: {error}") from None
    found, about = _tensors(folder / WEIGHTS, check=check)
    if check and about.get("cfg", _sum(fields)) != _sum(fields):
        raise HooklineError(
            f"{folder / CONFIG} does not match the checksum in {WEIGHTS}: it was changed or damaged. "
            f"load(path, check=False) skips this check"
        )
    weights = _weights(folder / WEIGHTS, found, cfg, is_scaled=is_scaled)
    cfg, weights = _folded(folder, cfg, weights, norm_scaling_factor)
    return cfg, {name: _cast(folder / WEIGHTS, name, x, dtype_of(cfg.dtype)) for name, x in weights.items()}


def write(folder: Path, sae: SparseAutoencoder) -> None:
    """Write both files, each atomically."""
    cfg = replace(sae.cfg, dtype=str(sae.dtype).removeprefix("torch."))
    try:
        text = json.dumps(fields_of(cfg), indent=1).encode()
        total = _sum(json.loads(text))  # as it will be read back
    except (TypeError, ValueError, RecursionError) as error:
        raise HooklineError(f"the metadata of the config cannot be written as JSON: {error}") from None
    weights = sae.state_dict()
    for name, x in weights.items():
        _check_finite(f"the autoencoder cannot be saved to {folder}: {name}", x)
    make_folder(folder, "an autoencoder")
    write_tensors(folder / WEIGHTS, _KIND, weights, {"cfg": total})
    write_bytes(folder / CONFIG, text, "the autoencoder")


def _sum(fields: Any) -> str:
    return f"crc32:{zlib.crc32(json.dumps(fields, sort_keys=True).encode()):08x}"


def _check_finite(what: str, x: Tensor) -> None:
    bad = int((~x.isfinite()).sum())
    if bad:
        raise HooklineError(f"{what} has {bad} values that are not finite (NaN or infinite), of {x.numel()}")


def _cast(path: Path, name: str, x: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast to a dtype; raise if values overflow."""
    new = x.to(dtype)
    if not bool(new.isfinite().all()):
        largest, limit = float(x.abs().max()), torch.finfo(dtype).max
        raise HooklineError(
            f"{path}: {name} has values up to {largest:g}, which overflow {dtype} (max {limit:g}): use a wider dtype="
        )
    return new


def _fields(folder: Path) -> dict[str, Any]:
    try:
        return read_json(folder / CONFIG)
    except (FileNotFoundError, NotADirectoryError):
        raise HooklineError(f"there is no autoencoder in {folder}: expected {CONFIG} and {WEIGHTS}") from None


def _weights(path: Path, found: dict[str, Tensor], cfg: SAEConfig, *, is_scaled: bool) -> dict[str, Tensor]:
    for name, x in found.items():
        if x.dtype not in DTYPES.values():
            raise HooklineError(f"{path}: {name} has dtype {x.dtype}; expected a float dtype")
        _check_finite(f"{path}: {name}", x)
    if "log_threshold" in found and "threshold" not in found:
        found["threshold"] = found.pop("log_threshold").exp()
    scales = [found.pop(name) for name in _SCALES if name in found]
    if len(scales) > 1:
        raise HooklineError(f"{path} has both {' and '.join(_SCALES)}: remove one of them")
    wanted = shapes_of(cfg)
    if set(found) != set(wanted):
        raise HooklineError(
            f"{path} has the tensors {', '.join(sorted(found))}; a {cfg.architecture!r} autoencoder has "
            f"{', '.join(sorted(wanted))}"
        )
    for name, shape in wanted.items():
        if tuple(found[name].shape) != shape:
            raise HooklineError(
                f"{path}: {name} has the shape {list(found[name].shape)}, but with d_in={cfg.d_in} and "
                f"d_sae={cfg.d_sae} in {CONFIG} it should be {list(shape)}"
            )
    return _scaled(path, found, scales[0] if scales else None, is_scaled=is_scaled)


def _tensors(path: Path, *, check: bool) -> tuple[dict[str, Tensor], dict[str, str]]:
    if not os.path.exists(path):
        raise HooklineError(f"{path.parent} has a {CONFIG}, but no {path.name}")
    return read_tensors(path, _KIND, called="an autoencoder's weights", writer=None, check=check)


def _scaled(path: Path, weights: dict[str, Tensor], scale: Tensor | None, *, is_scaled: bool) -> dict[str, Tensor]:
    """Fold the factor by which features are scaled before decoding into their directions."""
    is_one = scale is not None and bool((scale == 1).all())
    if is_scaled != (scale is not None) and not is_one:
        has = "there is none" if scale is None else "there is one that is not 1"
        raise HooklineError(f"{path}: {CONFIG} has finetuning_scaling_factor={is_scaled}, but {has}")
    if scale is None:
        return weights
    if scale.shape != weights["W_dec"].shape[:1]:
        raise HooklineError(
            f"{path}: the scaling factor has the shape {list(scale.shape)}, expected one value per feature"
        )
    return weights | {"W_dec": weights["W_dec"] * scale[:, None]}


def _folded(
    folder: Path, cfg: SAEConfig, weights: dict[str, Tensor], factor: float | None
) -> tuple[SAEConfig, dict[str, Tensor]]:
    """Fold the factor by which activations were multiplied in training into the weights."""
    if cfg.normalize_activations != "expected_average_only_in":
        if factor is not None:
            raise HooklineError(
                f"norm_scaling_factor applies to activations that were scaled in training, but {folder / CONFIG} has "
                f"normalize_activations={cfg.normalize_activations!r}"
            )
        return cfg, weights
    if factor is None:
        raise HooklineError(
            f"the autoencoder in {folder} was trained on activations scaled to an expected norm, and the factor is not "
            f"in its files: use load(path, norm_scaling_factor=…), which is √d_in / their mean norm, or 1.0 if it is "
            f"already folded in"
        )
    if isinstance(factor, bool) or not isinstance(factor, int | float) or not 0 < factor <= sys.float_info.max:
        raise HooklineError(f"norm_scaling_factor must be a positive number, not {factor!r}")
    new = {name: weights[name].double() / factor for name in ("W_dec", "b_dec")}
    new["W_enc"] = weights["W_enc"].double() * factor
    return replace(cfg, normalize_activations="none"), weights | new
