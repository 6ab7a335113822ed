"""Transcoder files: folders in the formats of circuit-tracer and of SAELens.

circuit-tracer: `config.yaml`, which names the points, with `layer_3.safetensors` for each layer, or, for a cross-layer
transcoder, `W_enc_3.safetensors` and `W_dec_3.safetensors`. SAELens: `cfg.json` and `sae_weights.safetensors` for one
layer, or a folder of such folders. No code in a file is executed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import yaml  # type: ignore[import-untyped]  # transformers needs it, too
from torch import Tensor

from hookline.errors import HooklineError
from hookline.files.tensorfile import make_folder, read_json, read_tensors, taking_apart, write_bytes, write_tensors
from hookline.sae.hub_files import downloaded, is_hub_id, read_arrays

if TYPE_CHECKING:
    from hookline.sae.transcoders import Transcoder, TranscoderOrigin

CONFIG, SAELENS_CONFIG, SAELENS_WEIGHTS = "config.yaml", "cfg.json", "sae_weights.safetensors"
_KIND = "transcoder"
_SET, _CROSS = "transcoder_set", "cross_layer_transcoder"
_THRESHOLD = "activation_function.threshold"
_ARCHITECTURES = {
    "transcoder": (False, False),
    "skip_transcoder": (False, True),
    "jumprelu_transcoder": (True, False),
    "jumprelu_skip_transcoder": (True, True),
}
"""SAELens's names: whether there is a threshold, and whether there is a skip connection."""

Found: TypeAlias = list[tuple[int, dict[str, Tensor], dict[str, Any]]]
"""The layer, the weights and the other arguments of each transcoder."""


def read_transcoders(folder: Path, *, check: bool = True) -> tuple[Found, dict[str, Any]]:
    """The transcoders in a folder, and where they were trained: the fields of a `TranscoderOrigin`."""
    try:
        with taking_apart(str(folder)):
            if (folder / CONFIG).is_file():
                return _read_circuit_tracer(folder, check)
            if (folder / SAELENS_CONFIG).is_file():
                return _read_saelens([folder], check)
            inner = sorted(path.parent for path in folder.glob(f"*/{SAELENS_CONFIG}"))
            if inner:
                return _read_saelens(inner, check)
    except (OSError, yaml.YAMLError) as error:
        raise HooklineError(f"the transcoders in {folder} cannot be read: {error}") from error
    raise HooklineError(
        f"there are no transcoders in {folder}: expected {CONFIG} with layer_0.safetensors, … (circuit-tracer), or "
        f"{SAELENS_CONFIG} with {SAELENS_WEIGHTS} (SAELens), in it or in its folders"
    )


def folder_of(path: str | Path, revision: str | None = None) -> Path:
    """The folder itself, or that of a hub id in the local cache, with the files that it needs."""
    if not is_hub_id(path):
        if revision is not None:
            raise HooklineError(f"revision={revision!r} is one on the hub, but {str(path)!r} is a path here")
        return Path(path)
    owner, name, *inner = str(path).split("/")
    repository, within = f"{owner}/{name}", "/".join([*inner, ""])
    folder = downloaded(repository, [f"{within}{CONFIG}", f"{within}*{SAELENS_CONFIG}"], revision) / within
    if not (folder / CONFIG).is_file():
        patterns = _saelens_weights(folder, str(path))
    elif "transcoders" in (_config(folder) or {}):
        return folder  # its files are in other repositories
    else:
        patterns = ["layer_*.safetensors", "W_*.safetensors"]
    return downloaded(repository, [within + pattern for pattern in patterns], revision) / within


def _saelens_weights(folder: Path, path: str) -> list[str]:
    """The files of weights that belong to the configs of a folder in SAELens's format."""
    configs = [*folder.glob(SAELENS_CONFIG), *folder.glob(f"*/{SAELENS_CONFIG}")]
    kinds = {str(read_json(config).get("architecture")) for config in configs}
    if not kinds & _ARCHITECTURES.keys():
        raise HooklineError(
            f"{path!r} has no transcoders: expected {CONFIG} (circuit-tracer), or {SAELENS_CONFIG} with one of the "
            f"architectures {', '.join(_ARCHITECTURES)} (SAELens), but there is "
            f"{', '.join(sorted(kinds)) or 'no such file, or only in deeper folders'}"
        )
    return [(config.parent / SAELENS_WEIGHTS).relative_to(folder).as_posix() for config in configs]


def _config(folder: Path) -> Any:
    with (folder / CONFIG).open(encoding="utf-8") as file:
        return yaml.safe_load(file)


def write_transcoders(folder: Path, transcoders: Sequence[Transcoder], origin: TranscoderOrigin, format: str) -> None:
    """Write a folder in one of the formats; each file whole or not at all."""
    if format not in ("circuit-tracer", "saelens"):
        raise HooklineError(f'format is "circuit-tracer" or "saelens", got {format!r}')
    for transcoder in transcoders:
        for name, x in transcoder.named_parameters():
            _check(x, f"the transcoders cannot be saved to {folder}: {name} of layer {transcoder.layer}")
    make_folder(folder, "transcoders")
    if format == "saelens":
        _write_saelens(folder, transcoders, origin)
    else:
        _write_circuit_tracer(folder, transcoders, origin)


def _read_circuit_tracer(folder: Path, check: bool) -> tuple[Found, dict[str, Any]]:
    config = _config(folder)
    if not isinstance(config, dict) or config.get("model_kind") not in (_SET, _CROSS):
        raise HooklineError(f"{folder / CONFIG} must have a model_kind, {_SET} or {_CROSS}")
    is_cross = config["model_kind"] == _CROSS
    if config.get("activation", "relu") not in ("relu", "jumprelu", "jump_relu", None):
        raise HooklineError(
            f"{folder / CONFIG} has the activation {config['activation']!r}, which is not supported: features are "
            f"ReLU, or JumpReLU with a threshold"
        )
    if "transcoders" in config:
        return _listed(config["transcoders"], folder, is_cross, check), _origin(config)
    layers = _layers(folder, "W_enc_{}" if is_cross else "layer_{}")
    arguments: Found = []
    for layer in layers:
        names = [f"W_enc_{layer}", f"W_dec_{layer}"] if is_cross else [f"layer_{layer}"]
        tensors: dict[str, Tensor] = {}
        for name in names:
            tensors |= _tensors(folder / f"{name}.safetensors", check)
        weights = {name.removesuffix(f"_{layer}") if is_cross else name: x for name, x in tensors.items()}
        arguments.append((layer, _as_ours(weights), {"writes": range(layer, len(layers))} if is_cross else {}))
    return arguments, _origin(config)


def _as_ours(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights of a layer in circuit-tracer's layout, as those of a `Transcoder`."""
    weights["W_enc"] = weights["W_enc"].T
    if _THRESHOLD in weights:
        weights["threshold"] = weights.pop(_THRESHOLD)
    if "threshold" in weights:
        weights["threshold"] = weights["threshold"].expand_as(weights["b_enc"])
    return weights


def _listed(paths: Sequence[str], folder: Path, is_cross: bool, check: bool) -> Found:
    """The transcoders of files that a config lists by layer: hf://owner/name/file?revision=…, or in its folder."""
    if is_cross:
        raise HooklineError(f"{folder / CONFIG} lists the files of a {_CROSS}, which is not supported")
    arguments: Found = []
    for layer, path in enumerate(paths):
        if path.startswith("hf://"):
            owner, name, inner = path.removeprefix("hf://").split("/", 2)
            inner, _, revision = inner.partition("?revision=")
            file = downloaded(f"{owner}/{name}", [inner], revision or None) / inner
        else:
            file = folder / path
            if Path(path).is_absolute() or ".." in Path(path).parts:
                raise HooklineError(f"{folder / CONFIG} lists {path!r}, which is not in its folder")
        if file.suffix == ".npz":  # of Gemma Scope
            weights = {name: _check(x, f"{name} in {file}") for name, x in read_arrays(file).items()}
        else:
            weights = _as_ours(_tensors(file, check))
        arguments.append((layer, weights, {}))
    return arguments


def _origin(config: dict[str, Any]) -> dict[str, Any]:
    ours = {"model_kind", "feature_input_hook", "feature_output_hook", "model_name", "hookline_weights", "transcoders"}
    return {
        "reads": str(config["feature_input_hook"]),
        "writes": str(config["feature_output_hook"]),
        "model_name": config.get("model_name"),
        "weights": config.get("hookline_weights"),
        "extra": {key: value for key, value in config.items() if key not in ours},
    }


def _layers(folder: Path, pattern: str) -> list[int]:
    """The layers that there are files of; raises if one is missing in between."""
    form = re.compile(pattern.format(r"(\d+)") + r"\.safetensors")
    layers = sorted(int(match[1]) for path in folder.iterdir() if (match := form.fullmatch(path.name)))
    if not layers or layers != list(range(len(layers))):
        first_file = f"{pattern.format(0)}.safetensors"
        raise HooklineError(f"{folder} needs a file for every layer, {first_file} and so on, but has those of {layers}")
    return layers


def _write_circuit_tracer(folder: Path, transcoders: Sequence[Transcoder], origin: TranscoderOrigin) -> None:
    layers = [transcoder.layer for transcoder in transcoders]
    if layers != list(range(len(layers))):
        raise HooklineError(
            f"circuit-tracer's format needs a transcoder for every layer from 0 on, but there are {layers}: use "
            f'format="saelens"'
        )
    is_cross = any(transcoder.writes != (transcoder.layer,) for transcoder in transcoders)
    for transcoder in transcoders:
        weights = {name: x.detach() for name, x in transcoder.named_parameters()}
        weights["W_enc"] = weights["W_enc"].T
        if not is_cross:
            weights["W_dec"] = weights["W_dec"][:, 0]
            if "threshold" in weights:
                weights[_THRESHOLD] = weights.pop("threshold")
            write_tensors(folder / f"layer_{transcoder.layer}.safetensors", _KIND, weights, {})
            continue
        if transcoder.writes != tuple(range(transcoder.layer, len(layers))) or transcoder.W_skip is not None:
            raise HooklineError(
                "circuit-tracer's cross-layer format has features that write to their own and all later layers, "
                "without skip connections"
            )
        decoder = {f"W_dec_{transcoder.layer}": weights.pop("W_dec")}
        encoder = {f"{name}_{transcoder.layer}": x for name, x in weights.items()}
        write_tensors(folder / f"W_enc_{transcoder.layer}.safetensors", _KIND, encoder, {})
        write_tensors(folder / f"W_dec_{transcoder.layer}.safetensors", _KIND, decoder, {})
    config = {
        **origin.extra,
        "model_kind": _CROSS if is_cross else _SET,
        "feature_input_hook": origin.reads,
        "feature_output_hook": origin.writes,
        **({"model_name": origin.model_name} if origin.model_name else {}),
        **({"hookline_weights": origin.weights} if origin.weights else {}),
    }
    write_bytes(folder / CONFIG, yaml.safe_dump(config, sort_keys=False).encode(), "the transcoders")


def _read_saelens(folders: Sequence[Path], check: bool) -> tuple[Found, dict[str, Any]]:
    arguments: Found = []
    origins: list[dict[str, Any]] = []
    for folder in folders:
        config = read_json(folder / SAELENS_CONFIG)
        metadata = config.get("metadata") or {}
        kind = config.get("architecture", "standard")
        if kind not in _ARCHITECTURES:
            raise HooklineError(f"{folder} has a {kind!r}, not one of {', '.join(_ARCHITECTURES)}")
        if config.get("normalize_activations", "none") not in ("none", None):
            raise HooklineError(f"{folder} normalizes activations ({config['normalize_activations']}): not supported")
        weights = _tensors(folder / SAELENS_WEIGHTS, check)
        has = "threshold" in weights, "W_skip" in weights
        if has != _ARCHITECTURES[kind]:
            raise HooklineError(f"{folder} has a {kind!r}, but its weights are {', '.join(weights)}")
        points = [metadata.get(name) or config.get(name) for name in ("hook_name", "hook_name_out")]
        places = [re.fullmatch(r"blocks\.(\d+)\.(.+)", str(point)) for point in points]
        if places[0] is None or places[1] is None or places[0][1] != places[1][1]:
            raise HooklineError(
                f"{folder / SAELENS_CONFIG} needs hook_name and hook_name_out, points of one layer such as "
                f"blocks.3.mlp.hook_in and blocks.3.hook_mlp_out, but has {points}"
            )
        about = metadata.get("model_name") or config.get("model_name"), metadata.get("hookline_weights")
        origins.append(dict(zip(_FIELDS, (places[0][2], places[1][2], *about), strict=True)))
        arguments.append((int(places[0][1]), weights, {}))
    if any(origin != origins[0] for origin in origins):
        raise HooklineError(f"the transcoders in {folders[0].parent} are of different models or points: {origins}")
    if len({layer for layer, _, _ in arguments}) != len(arguments):
        raise HooklineError(
            f"{folders[0].parent} has two transcoders of one layer: {[layer for layer, _, _ in arguments]}"
        )
    return arguments, origins[0]


_FIELDS = ("reads", "writes", "model_name", "weights")


def _write_saelens(folder: Path, transcoders: Sequence[Transcoder], origin: TranscoderOrigin) -> None:
    for transcoder in transcoders:
        if transcoder.writes != (transcoder.layer,):
            raise HooklineError('SAELens has no cross-layer transcoders: use format="circuit-tracer"')
        weights = {name: x.detach() for name, x in transcoder.named_parameters()}
        weights["W_dec"] = weights["W_dec"][:, 0]
        has = transcoder.threshold is not None, transcoder.W_skip is not None
        config = {
            "architecture": next(name for name, parts in _ARCHITECTURES.items() if parts == has),
            **{"d_in": transcoder.d_in, "d_sae": transcoder.d_sae, "d_out": transcoder.d_out},
            **{"dtype": str(transcoder.W_enc.dtype).removeprefix("torch."), "device": "cpu"},
            **{"apply_b_dec_to_input": False, "normalize_activations": "none", "reshape_activations": "none"},
            "metadata": {
                "sae_lens_version": "6.0.0",
                "model_name": origin.model_name,
                "hook_name": f"blocks.{transcoder.layer}.{origin.reads}",
                "hook_name_out": f"blocks.{transcoder.layer}.{origin.writes}",
                **({"hookline_weights": origin.weights} if origin.weights else {}),
            },
        }
        inner = folder / f"layer_{transcoder.layer}"
        make_folder(inner, "transcoders")
        write_tensors(inner / SAELENS_WEIGHTS, _KIND, weights, {})
        write_bytes(inner / SAELENS_CONFIG, json.dumps(config, indent=1).encode(), "the transcoders")


def _tensors(path: Path, check: bool) -> dict[str, Tensor]:
    if not path.exists():
        raise HooklineError(f"{path} is missing")
    tensors, _ = read_tensors(path, _KIND, called="a transcoder's weights", writer=None, check=check)
    return {name: _check(x, f"{name} in {path}") for name, x in tensors.items()}


def _check(x: Tensor, what: str) -> Tensor:
    if not x.is_floating_point() or not bool(x.isfinite().all()):
        raise HooklineError(f"{what} has values that are not finite floats")
    return x
