"""Identity: what tells one model from another, so that a store never mixes the activations of two."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as every_module

from hookline.actions import HookAction
from hookline.errors import describe
from hookline.hooks import Hook
from hookline.model import HookedModel
from hookline.store.activations import device_of
from hookline.store.fingerprint import fingerprint
from hookline.store.sums import tensor_sum
from hookline.taps import Tap, active
from hookline.verbs import Hooked


def identity(model: Hooked) -> dict[str, Any]:
    """What the activations depend on beside the data: the model, its tokenizer, how and with which hooks it runs."""
    module = model.module
    config = getattr(module, "config", None)
    device = device_of(model).type
    autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    return {
        "id": model.cfg.model_name if isinstance(model, HookedModel) else type(module).__name__,
        "class": type(module).__name__,
        "config": _digest(_settings(config) if isinstance(model, HookedModel) else repr(module)),
        "weights": weights_digest(module),
        "tokenizer": tokenizer_digest(model.tokenizer) if isinstance(model, HookedModel) else None,
        "attention": model.cfg.attn_implementation if isinstance(model, HookedModel) else None,
        "device": device,
        "autocast": None if autocast is None else str(autocast).removeprefix("torch."),
        "hooks": _hooks(model),
    }


def _settings(config: Any) -> str:
    """Without what says nothing of the computation."""
    settings = {key: value for key, value in config.to_dict().items() if key not in _IDLE}
    return json.dumps(settings, sort_keys=True, default=str)


_IDLE = ("_name_or_path", "transformers_version", "architectures", "dtype", "torch_dtype")


def weights_digest(module: nn.Module) -> str:
    """Of the names, shapes and values of all parameters and buffers. Each is read once, where it is."""
    found = hashlib.blake2b(digest_size=16)
    for name, x in chain(module.named_parameters(), module.named_buffers()):
        found.update(f"{name} {tensor_sum(x)}".encode())
    return found.hexdigest()


def tokenizer_digest(tokenizer: Any) -> str | None:
    """Of what a tokenizer makes of text; without a tokenizer there is none."""
    if tokenizer is None:
        return None
    fast = getattr(tokenizer, "backend_tokenizer", None)
    if fast is None:
        return _digest(json.dumps([tokenizer.get_vocab(), str(tokenizer.special_tokens_map)], sort_keys=True))
    settings = json.loads(fast.to_str())
    # Both are of the last call, not of the tokenizer.
    return _digest(json.dumps({**settings, "truncation": None, "padding": None}, sort_keys=True))


def _hooks(model: Hooked) -> list[str]:
    """What changes activations on their way: our forward hooks that are enabled, other people's, and patched modules.

    Each by its place, its name and its fingerprint. Detectors only read, and are left out.
    """
    actions = chain(model._points.standing.hooks(), *(run.actions for run in active.get()))
    ours = [
        (each.point.name, each.hook)
        for each in actions
        if isinstance(each, HookAction) and each.dir == "fwd" and each.is_enabled() and not each.only_reads
    ]
    known = {id(model): "the model", id(model.module): "the model's module"}
    if isinstance(model, HookedModel) and model.tokenizer is not None:
        known[id(model.tokenizer)] = "the tokenizer"
    return [f"{where}: {_described(hook, known)}" for where, hook in chain(ours, _foreign(model.module))]


def _described(hook: Any, known: dict[int, str]) -> str:
    name = type(hook).__name__ if isinstance(hook, Hook) else re.sub(r" \([^()]*:\d+\)$", "", describe(hook))
    return f"{name} ({fingerprint(hook, known)})"


def _foreign(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Other people's torch hooks, and forward methods that were put in a module's place."""
    for path, part in module.named_modules():
        patched = [part.__dict__["forward"]] if "forward" in part.__dict__ else []
        for hook in chain(part._forward_pre_hooks.values(), part._forward_hooks.values(), patched):
            if not isinstance(hook, Tap) and _package(hook) not in _HARMLESS:
                yield f"torch's {path or 'model'}", hook
    for hook in chain(every_module._global_forward_pre_hooks.values(), every_module._global_forward_hooks.values()):
        yield "torch's every module", hook


_HARMLESS = ("torch", "transformers", "accelerate", "hookline")
"""Whose torch hooks take notes or move tensors about, and change no activation that is not in the weights anyway."""


def _package(hook: Any) -> str:
    inner = hook
    while hasattr(inner, "func"):  # functools.partial, however often
        inner = inner.func
    return str(getattr(inner, "__module__", None) or type(inner).__module__).partition(".")[0]


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
