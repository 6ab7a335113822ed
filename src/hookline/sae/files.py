"""Autoencoders in files: a folder with `cfg.json` and `sae_weights.safetensors`. Nothing in a file is run."""

from __future__ import annotations

import json
import math
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from hookline.errors import HooklineError
from hookline.sae.config import SAEConfig, shapes_of
from hookline.sae.layout import config_of, fields_of, has_scaling_factor

if TYPE_CHECKING:
    from hookline.sae.autoencoder import SparseAutoencoder

CONFIG, WEIGHTS = "cfg.json", "sae_weights.safetensors"


def read(folder: Path, norm_scaling_factor: float | None = None) -> tuple[SAEConfig, dict[str, Tensor]]:
    """The configuration and the weights in a folder."""
    fields = _fields(folder)
    try:
        cfg = config_of(fields)
    except HooklineError as error:
        raise HooklineError(f"{folder / CONFIG} cannot be used: {error}") from None
    weights = _weights(folder / WEIGHTS, cfg, is_scaled=has_scaling_factor(fields))
    return _folded(folder, cfg, weights, norm_scaling_factor)


def write(folder: Path, sae: SparseAutoencoder) -> None:
    """Write both files, each whole or not at all."""
    from safetensors.torch import save

    if folder.is_file():
        raise HooklineError(f"an autoencoder is saved to a folder, but {folder} is a file")
    cfg = replace(sae.cfg, dtype=str(sae.dtype).removeprefix("torch."))
    try:
        text = json.dumps(fields_of(cfg), indent=1).encode()
    except TypeError as error:
        raise HooklineError(f"the metadata of the configuration cannot be written as JSON: {error}") from None
    weights = {name: x.detach().cpu().contiguous() for name, x in sae.state_dict().items()}
    folder.mkdir(parents=True, exist_ok=True)
    _put(folder / WEIGHTS, save(weights))
    _put(folder / CONFIG, text)


def _put(path: Path, data: bytes) -> None:
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        unfinished.write_bytes(data)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def _fields(folder: Path) -> dict[str, Any]:
    try:
        fields = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise HooklineError(
            f"there is no autoencoder in {folder}: that is a folder with {CONFIG} and {WEIGHTS}"
        ) from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise HooklineError(f"{folder / CONFIG} is no JSON: {error}") from None
    return fields


def _weights(path: Path, cfg: SAEConfig, *, is_scaled: bool) -> dict[str, Tensor]:
    found = _tensors(path)
    if "log_threshold" in found and "threshold" not in found:
        found["threshold"] = found.pop("log_threshold").exp()
    scale = found.pop("scaling_factor", found.pop("finetuning_scaling_factor", None))
    wanted = shapes_of(cfg)
    if set(found) != set(wanted):
        raise HooklineError(
            f"{path} has the tensors {', '.join(sorted(found))}; of a {cfg.architecture!r} autoencoder they are "
            f"{', '.join(sorted(wanted))}"
        )
    for name, shape in wanted.items():
        if tuple(found[name].shape) != shape:
            raise HooklineError(
                f"{path}: {name} has the shape {list(found[name].shape)}, but with d_in={cfg.d_in} and "
                f"d_sae={cfg.d_sae} in {CONFIG} it is {list(shape)}"
            )
        if not found[name].is_floating_point():
            raise HooklineError(f"{path}: {name} is of {found[name].dtype}, and should be of floats")
    return _scaled(path, found, scale, is_scaled=is_scaled)


def _tensors(path: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        return load(path.read_bytes())
    except FileNotFoundError:
        raise HooklineError(f"{path.parent} has a {CONFIG}, but no {path.name}") from None
    except SafetensorError as error:
        raise HooklineError(f"{path} cannot be read, it is damaged or no safetensors file: {error}") from None


def _scaled(path: Path, weights: dict[str, Tensor], scale: Tensor | None, *, is_scaled: bool) -> dict[str, Tensor]:
    """The factor by which features are scaled before they are decoded, folded into their directions."""
    is_one = scale is None or bool((scale == 1).all())
    if is_scaled != (scale is not None) and not (is_one and scale is not None):
        has = "there is none" if scale is None else "there is one that is not 1"
        raise HooklineError(f"{path}: {CONFIG} has finetuning_scaling_factor={is_scaled}, but {has}")
    if scale is not None and scale.shape != weights["W_dec"].shape[:1]:
        raise HooklineError(f"{path}: the scaling factor has the shape {list(scale.shape)}, not one for each feature")
    return weights if is_one or scale is None else weights | {"W_dec": weights["W_dec"] * scale[:, None]}


def _folded(
    folder: Path, cfg: SAEConfig, weights: dict[str, Tensor], factor: float | None
) -> tuple[SAEConfig, dict[str, Tensor]]:
    """With the factor that activations were multiplied by in training made part of the weights."""
    if cfg.normalize_activations != "expected_average_only_in":
        if factor is not None:
            raise HooklineError(
                f"norm_scaling_factor is for activations that were scaled in training, but {folder / CONFIG} has "
                f"normalize_activations={cfg.normalize_activations!r}"
            )
        return cfg, weights
    if factor is None:
        raise HooklineError(
            f"the autoencoder in {folder} was trained on activations scaled to an expected norm, and the factor is not "
            f"in its files: load(path, norm_scaling_factor=…), which is √d_in / their mean norm, or 1.0 if it has been "
            f"folded in already"
        )
    if not math.isfinite(factor) or factor <= 0:
        raise HooklineError(f"norm_scaling_factor is a number above 0, not {factor!r}")
    new = {name: weights[name].float() / factor for name in ("W_dec", "b_dec")}
    new["W_enc"] = weights["W_enc"].float() * factor
    return replace(cfg, normalize_activations="none"), weights | new
