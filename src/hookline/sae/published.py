"""Published autoencoders by name: releases as SAELens's registry lists them, on the hub or in a local folder."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hookline.errors import HooklineError
from hookline.files.tensorfile import BAD_CONTENT, read_tensors, reason
from hookline.sae.autoencoder import SparseAutoencoder
from hookline.sae.hub_files import downloaded, read_arrays
from hookline.sae.sae_config import SAEConfig
from hookline.sae.saefile import checked_weights

_FILE = "pretrained_saes.yaml"
_FORMATS = (None, "sae_lens", "gemma_2", "gemma_3")
"""The formats that can be read: that of SAELens, and those of Gemma Scope and Gemma Scope 2."""


@dataclass(frozen=True)
class Release:
    """A release: where its autoencoders are, and their names."""

    name: str
    repo_id: str
    model: str
    paths: Mapping[str, str]
    """The folder of each autoencoder in the repository, by its id."""
    format: str | None = None
    scales: Mapping[str, float] | None = None
    """The factors by which activations were scaled in training, by id."""
    overrides: Mapping[str, Any] | None = None


def releases(registry: str | Path | None = None) -> dict[str, Release]:
    """The releases of a registry, a YAML file in SAELens's format; by default that of an installed sae_lens."""
    import yaml  # type: ignore[import-untyped]  # comes with transformers

    path = Path(registry) if registry is not None else _installed()
    try:
        loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
        content = yaml.load(path.read_text(encoding="utf-8"), Loader=loader)
        return {str(name): _release(str(name), release) for name, release in content.items()}
    except (OSError, yaml.YAMLError, *BAD_CONTENT) as error:
        raise HooklineError(f"{path} cannot be read as a registry of autoencoders: {reason(error)}") from error


def _installed() -> Path:
    spec = find_spec("sae_lens")
    if spec is None or spec.origin is None:
        raise HooklineError(
            f"release names are listed in SAELens's {_FILE}: pass registry=, the path of such a file, or install it "
            f"with pip install sae-lens. A hub id (owner/name) and the folder in it need no registry"
        )
    return Path(spec.origin).parent / _FILE


def _release(name: str, release: Mapping[str, Any]) -> Release:
    saes = release["saes"]
    scales = {str(sae["id"]): float(sae["norm_scaling_factor"]) for sae in saes if "norm_scaling_factor" in sae}
    paths = {str(sae["id"]): str(sae["path"]) for sae in saes}
    overrides = release.get("config_overrides")
    return Release(name, release["repo_id"], release["model"], paths, release.get("conversion_func"), scales, overrides)


def published(
    release: str,
    sae_id: str,
    *,
    registry: str | Path | None = None,
    folder: str | Path | None = None,
    revision: str | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
) -> SparseAutoencoder:
    """Load a published autoencoder by the names under which SAELens lists it.

        sae = hookline.sae.published("gpt2-small-res-jb", "blocks.8.hook_resid_pre")
        sae = hookline.sae.published("jbloom/GPT2-Small-SAEs-Reformatted", "blocks.8.hook_resid_pre")   # a hub id

    `release` is a name in the registry (see `releases`), or a hub id, and then `sae_id` is a folder in it. With
    `folder`, a copy of the repository, nothing is downloaded. `revision` is a branch, tag or commit on the hub. Files
    are kept in the hub's cache, and are read from there with HF_HUB_OFFLINE=1. Formats: SAELens's own, and those of
    Gemma Scope.
    """
    if folder is None and Path(release).is_dir():
        raise HooklineError(
            f"{release} is a folder: use SparseAutoencoder.load({str(Path(release) / sae_id)!r}), or pass the name of "
            f"a release and folder={release!r}"
        )
    if folder is not None and revision is not None:
        raise HooklineError(f"revision={revision!r} is one on the hub, but files are read from folder={str(folder)!r}")
    listing = Release(release, release, "", {sae_id: sae_id}) if "/" in release else _found(release, registry)
    if sae_id not in listing.paths:
        near = get_close_matches(sae_id, list(listing.paths), n=4, cutoff=0.3) or list(listing.paths)[:4]
        raise HooklineError(f"{release!r} has no autoencoder {sae_id!r}; it has {', '.join(map(repr, near))}, …")
    if listing.format not in _FORMATS:
        raise HooklineError(
            f"{release!r} has files in the format {listing.format!r}, which hookline does not read: load it with "
            f"sae_lens.SAE.from_pretrained, save it with save_model, and use SparseAutoencoder.load"
        )
    path = listing.paths[sae_id]
    if Path(path).is_absolute() or ".." in Path(path).parts:
        raise HooklineError(f"{sae_id!r} of {release!r} is at {path!r}, which is not a folder in the repository")
    where = Path(folder) / path if folder is not None else downloaded(listing.repo_id, [f"{path}/*"], revision) / path
    if listing.format in ("gemma_2", "gemma_3"):
        return _of_gemma_scope(where, listing, path).to(device=device, dtype=dtype)
    sae = SparseAutoencoder.load(
        where, device=device, dtype=dtype, norm_scaling_factor=(listing.scales or {}).get(sae_id)
    )
    sae.cfg = _overridden(sae.cfg, listing.overrides or {})
    return sae


def _found(release: str, registry: str | Path | None) -> Release:
    every = releases(registry)
    if release not in every:
        near = get_close_matches(release, list(every), n=4, cutoff=0.4)
        hint = f"did you mean {', '.join(map(repr, near))}?" if near else "hookline.sae.releases() lists them"
        raise HooklineError(f"there is no release {release!r}: {hint}")
    return every[release]


def _overridden(cfg: SAEConfig, overrides: Mapping[str, Any]) -> SAEConfig:
    """A config with what the registry says instead of the file: provenance, and how activations are normalized."""
    ours = {field.name for field in fields(SAEConfig)} - {"metadata", "extra", *_CHANGED}
    if wrong := sorted(ours & overrides.keys()):
        raise HooklineError(f"the registry changes {', '.join(wrong)} of the config, which is not supported")
    rest = {name: value for name, value in overrides.items() if name not in _CHANGED}
    changed = {name: value for name, value in overrides.items() if name in _CHANGED}
    return replace(cfg, **changed, metadata={**cfg.metadata, **rest})


_CHANGED = ("hook_name", "normalize_activations")


def _of_gemma_scope(where: Path, release: Release, path: str) -> SparseAutoencoder:
    """An autoencoder of Gemma Scope: its weights are in one file, and everything else is in its path."""
    is_second = release.format == "gemma_3"
    file = where / ("params.safetensors" if is_second else "params.npz")
    arrays = {f"W_{name[2:]}" if name.startswith("w_") else name: x for name, x in _arrays(file).items()}
    layer = re.search(r"layer_(\d+)", path)
    words = re.split("[-/]", path if is_second else release.repo_id)
    site = next((name for word, name in _SITES.items() if word in words), None)
    if layer is None or site is None:
        raise HooklineError(f"{release.repo_id}/{path} is not of the residual stream, MLP or attention of a layer")
    if "W_enc" not in arrays or arrays["W_enc"].ndim != 2:
        raise HooklineError(f"{file} has no matrix W_enc: it has {', '.join(arrays) or 'nothing'}")
    d_in, d_sae = arrays["W_enc"].shape
    cfg = SAEConfig(
        *("jumprelu", d_in, d_sae),
        apply_b_dec_to_input=False,
        reshape_activations="hook_z" if site.endswith("hook_z") else "none",
        hook_name=f"blocks.{layer[1]}.{site}",
        metadata={"model_name": release.model, "prepend_bos": True},
    )
    try:
        weights = checked_weights(arrays, cfg, file="it")
    except HooklineError as error:
        raise HooklineError(f"{file} cannot be used: {error}") from None
    sae = SparseAutoencoder(cfg)
    sae.load_state_dict({name: x.float() for name, x in weights.items()})
    return sae


_SITES = {
    **{"res": "hook_resid_post", "mlp": "hook_mlp_out", "att": "attn.hook_z"},
    **{"resid_post": "hook_resid_post", "mlp_out": "hook_mlp_out", "attn_out": "attn.hook_z"},
}
"""The sites of an autoencoder, by the word in the name of a Gemma Scope repository, or of a Gemma Scope 2 folder."""


def _arrays(file: Path) -> dict[str, Tensor]:
    """The arrays of a file of weights."""
    if file.suffix == ".safetensors":
        return read_tensors(file, "sae", called="an autoencoder's weights", writer=None)[0]
    return read_arrays(file)
