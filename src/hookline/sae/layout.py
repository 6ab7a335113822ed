"""cfg.json: the config of an autoencoder in SAELens's current and older formats.

Current (version 6): the fields that affect the computation are at the top level, the provenance is in `metadata`.
Older: all fields are at the top level, some under other names, and top-k is an activation function of a "standard"
autoencoder.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from hookline.errors import HooklineError
from hookline.sae.sae_config import SAEConfig, check_bool

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
_OURS = tuple(each.name for each in fields(SAEConfig) if each.name not in ("hook_name", "metadata", "extra"))
FORMAT = "6.0.0"
"""The version of SAELens in whose format files are written."""


def config_of(content: Any) -> tuple[SAEConfig, bool]:
    """Convert the contents of a `cfg.json` to a config, and whether features are scaled before decoding.

    Some older files have such a scaling factor.
    """
    if not isinstance(content, dict):
        raise HooklineError(f"a config must be a JSON object, not {content!r}")
    given: dict[str, Any] = {}
    for name, value in content.items():
        _merge(given, {_OLDER.get(name) or name: value})
    missing = [name for name in ("d_in", "d_sae") if name not in given]
    if missing:
        raise HooklineError(f"it has no {' and no '.join(missing)}; its fields are {', '.join(map(repr, content))}")
    metadata = _metadata(given)
    values = {"architecture": "standard"} | {name: given.pop(name) for name in _OURS if name in given}
    if "reshape_activations" not in values and str(metadata["hook_name"]).endswith("_z"):
        values["reshape_activations"] = "hook_z"
    norm = values.get("normalize_activations")
    if norm is None or isinstance(norm, bool):
        values["normalize_activations"] = "expected_average_only_in" if norm else "none"
    _use_activation(values, given.pop("activation_fn", "relu"), given.pop("activation_fn_kwargs", None) or {})
    is_scaled = given.pop("finetuning_scaling_factor", None)
    check_bool("finetuning_scaling_factor", is_scaled is not None and is_scaled)
    given.pop("device", None)
    return SAEConfig(**values, hook_name=metadata.pop("hook_name"), metadata=metadata, extra=given), bool(is_scaled)


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


def _metadata(given: dict[str, Any]) -> dict[str, Any]:
    """Take the metadata out of the fields, wherever they are; `hook_name` is always there."""
    inner = given.pop("metadata", None)
    if inner is not None and not isinstance(inner, dict):
        raise HooklineError(f"metadata must be a JSON object, not {inner!r}")
    metadata = {name: given.pop(name) for name in _METADATA if name in given}
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
