"""cfg.json: the config of an autoencoder in SAELens's current and older formats.

Current (version 6): the fields that affect the computation are at the top level, the provenance is in `metadata`.
Older: all fields are at the top level, some under other names, and top-k is an activation function of a "standard"
autoencoder.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hookline.errors import HooklineError
from hookline.sae.sae_config import SAEConfig

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
_OURS = (
    *("architecture", "d_in", "d_sae", "k", "dtype", "apply_b_dec_to_input", "normalize_activations"),
    *("reshape_activations", "rescale_acts_by_decoder_norm"),
)
_READ = ("metadata", "device", "activation_fn", "activation_fn_kwargs", "finetuning_scaling_factor", *_OURS, *_METADATA)
FORMAT = "6.0.0"
"""The version of SAELens in whose format files are written."""


def config_of(fields: Any) -> SAEConfig:
    """Convert the contents of a `cfg.json` to a config."""
    if not isinstance(fields, dict):
        raise HooklineError(f"a config must be a JSON object, not {fields!r}")
    given = _by_todays_names(fields)
    missing = [name for name in ("d_in", "d_sae") if name not in given]
    if missing:
        raise HooklineError(f"it has no {' and no '.join(missing)}; its fields are {', '.join(map(repr, fields))}")
    metadata = _metadata(given)
    hook_name = metadata.pop("hook_name", None)
    values = {name: given[name] for name in _OURS if name in given}
    values |= {"architecture": given.get("architecture", "standard"), "dtype": given.get("dtype", "float32")}
    values |= _activation(given, values["architecture"])
    values["normalize_activations"] = _normalization(given.get("normalize_activations"))
    is_z = "reshape_activations" not in given and str(hook_name).endswith("_z")
    values["reshape_activations"] = "hook_z" if is_z else given.get("reshape_activations", "none")
    extra = {name: value for name, value in given.items() if name not in _READ}
    return SAEConfig(**values, hook_name=hook_name, metadata=metadata, extra=extra)


def fields_of(cfg: SAEConfig) -> dict[str, Any]:
    """Convert a config to the contents of a `cfg.json`: the inverse of `config_of`."""
    ours = {name: getattr(cfg, name) for name in _OURS if getattr(cfg, name) is not None}
    if cfg.architecture != "topk":
        del ours["rescale_acts_by_decoder_norm"]
    metadata = {"sae_lens_version": FORMAT, "sae_lens_training_version": None, **cfg.metadata}
    if _major(metadata["sae_lens_version"]) < 6:
        metadata["sae_lens_version"] = FORMAT
    return {**cfg.extra, **ours, "device": "cpu", "metadata": {**metadata, "hook_name": cfg.hook_name}}


def has_scaling_factor(fields: Mapping[str, Any]) -> bool:
    """Whether the config says that features are scaled before decoding, as in some older files."""
    given = fields.get("finetuning_scaling_factor")
    if given is not None and not isinstance(given, bool):
        raise HooklineError(f"finetuning_scaling_factor must be true or false, not {given!r}")
    return bool(given)


def _by_todays_names(fields: Mapping[str, Any]) -> dict[str, Any]:
    given: dict[str, Any] = {}
    for name, value in fields.items():
        today = _OLDER.get(name, name)
        _check_agree(today, given.get(today, value), value)
        given[today] = value
    return given


def _check_agree(name: str, one: Any, other: Any) -> None:
    """Merge two sources of fields; raise if they disagree."""
    if one != other:
        raise HooklineError(f"it has two values for {name}: {one!r} and {other!r}")


def _metadata(given: Mapping[str, Any]) -> dict[str, Any]:
    inner = given.get("metadata")
    if inner is not None and not isinstance(inner, dict):
        raise HooklineError(f"metadata must be a JSON object, not {inner!r}")
    outer = {name: given[name] for name in _METADATA if name in given}
    for name in outer.keys() & (inner or {}).keys():
        _check_agree(name, outer[name], (inner or {})[name])
    metadata = outer | (inner or {})
    point = metadata.get("hook_name")
    if point is not None and not isinstance(point, str):
        raise HooklineError(f"hook_name must be the name of a point, not {point!r}")
    if metadata.get("hook_head_index") is not None:
        raise HooklineError(
            f"it is for one head (hook_head_index={metadata['hook_head_index']!r}) of {point!r}, which is not supported"
        )
    return metadata


def _activation(given: Mapping[str, Any], architecture: Any) -> dict[str, Any]:
    """The architecture and k, taking the activation function into account."""
    function, options = given.get("activation_fn", "relu"), given.get("activation_fn_kwargs") or {}
    if function == "relu" and architecture != "topk":
        if options:
            raise HooklineError(f"the activation function relu takes no options, but got {options!r}")
        return {}
    if function not in ("relu", "topk") or architecture not in ("standard", "topk"):
        raise HooklineError(f"the activation function {function!r} is not supported for {architecture!r} autoencoders")
    if not isinstance(options, dict) or set(options) - {"k"}:
        raise HooklineError(f"the activation function topk takes only k, but got {options!r}")
    k = given.get("k", options.get("k"))
    _check_agree("k", k, options.get("k", k))
    return {"architecture": "topk", "k": k}


def _normalization(given: Any) -> Any:
    if given is None or given is False:
        return "none"
    return "expected_average_only_in" if given is True else given


def _major(version: Any) -> int:
    first = str(version).split(".")[0]
    return int(first) if first.isdecimal() and len(first) < 9 else 0
