"""Identity: what tells one model from another, so that a store never mixes the activations of two."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as every_module

from hookline.engine.hooked import Hooked
from hookline.engine.taps import active
from hookline.errors import describe
from hookline.hooks import Hook
from hookline.model import HookedModel
from hookline.store.activations import device_of
from hookline.store.checksums import tensor_sum
from hookline.store.external_hooks import changing, is_harmless, torch_hooks
from hookline.store.fingerprint import detailed
from hookline.store.modules import modules_digests
from hookline.store.tokenizing import tokenizer_digest


def identity(model: Hooked) -> dict[str, Any]:
    """What the activations depend on beside the data: the model, its tokenizer, how and with which hooks it runs."""
    module, known = model.module, _known(model)
    config = getattr(module, "config", None)
    device = device_of(model).type
    autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    return {
        "id": model.cfg.model_name if isinstance(model, HookedModel) else type(module).__name__,
        "class": type(module).__name__,
        "config": _digest(_settings(config) if isinstance(model, HookedModel) else repr(module)),
        "weights": weights_digest(module),
        "modules": modules_digests(module, known),
        "tokenizer": tokenizer_digest(model.tokenizer) if isinstance(model, HookedModel) else None,
        "attention": model.cfg.attn_implementation if isinstance(model, HookedModel) else None,
        "device": device,
        "autocast": None if autocast is None else str(autocast).removeprefix("torch."),
        "hooks": hooks_of(model, known),
    }


def _settings(config: Any) -> str:
    """Without what says nothing of the computation."""
    settings = {key: value for key, value in config.to_dict().items() if key not in _IDLE}
    return json.dumps(settings, sort_keys=True, default=str)


_IDLE = ("_name_or_path", "transformers_version", "architectures", "dtype", "torch_dtype", "use_cache")


def weights_digest(module: nn.Module) -> str:
    """Of the names, shapes and values of all parameters and buffers. Each is read once, where it is."""
    found = hashlib.blake2b(digest_size=16)
    for name, x in chain(module.named_parameters(), module.named_buffers()):
        found.update(f"{name} {tensor_sum(x)}".encode())
    return found.hexdigest()


def hooks_of(model: Hooked, known: Mapping[int, str]) -> list[dict[str, Any]]:
    """What changes activations on their way: our forward hooks that are enabled, other people's, and patched modules.

    Each by its place, its name and its fingerprint.
    """
    actions = changing(chain(model._points.standing.hooks(), *(run.actions for run in active.get())))
    ours = [(each.point.listed, each.hook) for each in actions]
    return [_described(where, hook, known) for where, hook in chain(ours, _foreign(model.module))]


def _described(where: str, hook: Any, known: Mapping[int, str]) -> dict[str, Any]:
    name = type(hook).__name__ if isinstance(hook, Hook) else re.sub(r" \([^()]*:\d+\)$", "", describe(hook))
    return {"at": where, "hook": name, **asdict(detailed(hook, known))}


def _foreign(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Other people's torch hooks, and forward methods that were put in a module's place."""
    for path, part in module.named_modules():
        patched = [part.__dict__["forward"]] if "forward" in part.__dict__ else []
        for hook in chain(torch_hooks(part), (each for each in patched if not is_harmless(each))):
            yield f"torch's {path or 'model'}", hook
    for hook in chain(every_module._global_forward_pre_hooks.values(), every_module._global_forward_hooks.values()):
        yield "torch's every module", hook


def _known(model: Hooked) -> dict[int, str]:
    """What is compared by itself: the model, its modules, its configuration, its tokenizer."""
    module = model.module
    config = getattr(module, "config", None)
    parts = {id(part): f"the module {path!r}" for path, part in module.named_modules()}
    inner = vars(config) if hasattr(config, "to_dict") else {}
    configs = {id(each): f"the configuration {name!r}" for name, each in inner.items() if hasattr(each, "to_dict")}
    known = parts | configs | {id(model): "the model"}
    if hasattr(config, "to_dict"):
        known[id(config)] = "the configuration"
    if isinstance(model, HookedModel) and model.tokenizer is not None:
        known[id(model.tokenizer)] = "the tokenizer"
    return known


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
