"""Identity: what tells one model from another, so that a store never mixes the activations of two."""

from __future__ import annotations

import hashlib
import json
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from hookline.actions import HookAction
from hookline.errors import describe
from hookline.model import HookedModel
from hookline.store.activations import device_of
from hookline.taps import active
from hookline.verbs import Hooked

_SAMPLES = 256
"""How many values of each parameter are looked at."""


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
    """Of the names and shapes of all parameters and buffers, and of some values of each, spread over it.

    A model that was trained on differs; one in which a few single weights were changed may not.
    """
    found = hashlib.blake2b(digest_size=16)
    for name, x in chain(module.named_parameters(), module.named_buffers()):
        found.update(f"{name} {x.dtype} {tuple(x.shape)}".encode())
        if type(x) in (Tensor, nn.Parameter) and x.device.type != "meta" and x.numel():
            flat = x.detach().reshape(-1)
            some = flat[:: max(1, flat.numel() // _SAMPLES)].cpu().contiguous()
            found.update(some.view(torch.uint8).numpy().tobytes())
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
    """The forward hooks that are enabled, by their points, their names and the tensors that they have."""
    actions = chain(model._points.standing.hooks(), *(run.actions for run in active.get()))
    hooks = [each for each in actions if isinstance(each, HookAction) and each.dir == "fwd" and each.is_enabled()]
    return [f"{hook.point.name}: {describe(hook.hook)}{_tensors(hook.hook)}" for hook in hooks]


def _tensors(hook: Any) -> str:
    """The sum of an edit's tensors; of one without any, nothing."""
    found = [x for x in getattr(hook, "__dict__", {}).values() if isinstance(x, Tensor)]
    raw = "".join(str((x.dtype, x.tolist())) for x in found)
    return f" ({_digest(raw)})" if found else ""


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
