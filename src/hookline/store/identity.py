"""The identity of a harvest: what must stay the same for a store to be resumed.

The model (weights, config, modules as they print, tokenizer), the points, the data and the options are compared by
checksum, and so are hooks that are data: edits such as `zero(head=5)`, and spliced autoencoders. Any other hook is
code, which is never inspected: its author names its version with `harvest(…, hooks_tag="v3")`.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as every_module
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from hookline.engine import Hooked
from hookline.errors import HooklineError, StoreError, describe, warn
from hookline.files.tensorfile import BAD_CONTENT, reason
from hookline.hooks import Hook
from hookline.hooks.data_edits import DataEdit
from hookline.model import HookedModel
from hookline.store.manifest import About, Manifest, differences, versions
from hookline.text.token_positions import Meaning
from hookline.transformer.empty import check_weights_there

RULE = 2
"""The version of the rule; stores written under another one can be read, but not resumed."""

_NO_EFFECT = ("_name_or_path", "transformers_version", "architectures", "dtype", "torch_dtype", "use_cache")
"""Config entries that do not change what the model computes."""

_TABLE_WIDTH = 1024
"""How many integers are in a row of the table over which a tensor's checksum is computed."""

_HARMLESS = ("torch", "transformers", "accelerate", "hookline")
"""Packages whose torch hooks record or move tensors, but do not change activations."""


def identity(model: Hooked) -> dict[str, Any]:
    """What the activations depend on besides the points, the data and the options."""
    module, hooked_model = model.module, model if isinstance(model, HookedModel) else None
    device = input_device(model).type
    autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    return {
        "rule": RULE,
        "id": hooked_model.cfg.model_name if hooked_model else type(module).__name__,
        "class": type(module).__name__,
        "config": _config_digest(module.config) if hooked_model else None,
        "modules": _digest(repr(module)),
        "weights": weights_digest(module),
        "tokenizer": tokenizer_digest(hooked_model.tokenizer) if hooked_model else None,
        "attention": hooked_model.cfg.attn_implementation if hooked_model else None,
        "device": device,
        "compiled": None if hooked_model is None or hooked_model._graphs is None else str(hooked_model._graphs.options),
        "autocast": None if autocast is None else str(autocast).removeprefix("torch."),
        "hooks": [_described(*placed_hook) for placed_hook in chain(_own_hooks(model), _torch_hooks(module))],
    }


def input_device(model: Hooked) -> torch.device:
    """The device of the model's inputs."""
    if isinstance(model, HookedModel):
        return model.device
    return next((p.device for p in model.module.parameters()), torch.device("cpu"))


def with_weights(model: Any) -> Any:
    """The model; an error if it is on the meta device."""
    if isinstance(model, HookedModel):
        try:
            check_weights_there(model.anatomy.main.embed)
        except HooklineError as error:
            raise HooklineError(f"{error}, or harvest it by layer: harvest(…, by_layer=True)") from None
    elif isinstance(model, Hooked):
        check_weights_there(model.module)
    return model


def _config_digest(config: Any) -> str:
    settings = {key: value for key, value in config.to_dict().items() if key not in _NO_EFFECT}
    return _digest(json.dumps(settings, sort_keys=True, default=str))


def weights_digest(module: nn.Module) -> str:
    """A checksum of the names, shapes and values of all parameters and buffers. Each is read once, on its device.

    Weights that accelerate offloads are read from where it keeps them, so that the checksum is that of the same model
    in memory.
    """
    digest = hashlib.blake2b(digest_size=16)
    named = dict(chain(module.named_parameters(), module.named_buffers()))
    tied: Mapping[str, str] = getattr(module, "all_tied_weights_keys", None) or {}
    names = [name for name, x in named.items() if not (x.is_meta and tied.get(name) in named)]
    tensors = (_offloaded(module, name) if named[name].is_meta else named[name] for name in names)
    for name, checksum in zip(names, _checksums(tensors), strict=True):
        digest.update(f"{name} {checksum}".encode())
    return digest.hexdigest()


def _offloaded(root: nn.Module, name: str) -> Tensor:
    """A weight that accelerate loads when its module, or one around it, runs; on "meta" if there is none."""
    parts = name.split(".")
    for at in range(len(parts) - 1, -1, -1):
        hook = getattr(root.get_submodule(".".join(parts[:at])), "_hf_hook", None)
        for align_hook in getattr(hook, "hooks", (hook,)):
            weights_map = getattr(align_hook, "weights_map", None)
            with suppress(KeyError):
                if weights_map is not None:
                    return weights_map[".".join(parts[at:])]
    return getattr(root.get_submodule(".".join(parts[:-1])), parts[-1])


def tokenizer_digest(tokenizer: Any) -> str | None:
    """A checksum of a tokenizer's vocabulary and rules, or None without a tokenizer."""
    if tokenizer is None:
        return None
    fast = getattr(tokenizer, "backend_tokenizer", None)
    if fast is None:
        return _digest(json.dumps([tokenizer.get_vocab(), str(tokenizer.special_tokens_map)], sort_keys=True))
    # Padding and truncation are those of the last call.
    settings = json.loads(fast.to_str()) | {"truncation": None, "padding": None}
    return _digest(json.dumps(settings, sort_keys=True))


def _own_hooks(model: Hooked) -> list[tuple[str, Any]]:
    """The enabled forward hooks that may change activations, by place; at one place, in the order they fire."""
    actions = model.index.active_hooks()
    places = {action.tap: action.point.canonical_name for action in reversed(actions)}
    actions.sort(key=lambda action: (places[action.tap], action.tap.kind.value, action.stage))
    return [(action.point.canonical_name, action.hook) for action in actions]


def _torch_hooks(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Torch hooks that others registered, and `forward` methods replaced on a module."""
    for path, part in module.named_modules():
        replaced = [part.__dict__["forward"]] if "forward" in part.__dict__ else []
        for hook in chain(part._forward_pre_hooks.values(), part._forward_hooks.values(), replaced):
            if not _is_harmless(hook):
                yield f"torch module {path or 'model'}", hook
    for hook in chain(every_module._global_forward_pre_hooks.values(), every_module._global_forward_hooks.values()):
        yield "every torch module", hook


def _is_harmless(hook: Any) -> bool:
    while hasattr(hook, "func"):  # functools.partial, possibly nested
        hook = hook.func
    package = str(getattr(hook, "__module__", None) or type(hook).__module__).partition(".")[0]
    return package in _HARMLESS


def _described(place: str, hook: Any) -> dict[str, Any]:
    name = type(hook).__name__ if isinstance(hook, Hook) else re.sub(r" \([^()]*:\d+\)$", "", describe(hook))
    return {"at": place, "hook": name, "sum": content_digest(hook)}


def content_digest(hook: Any) -> str | None:
    """A checksum of a hook that is data; None for one that is code.

    Data are numbers, strings, tensors, positions, edits, collections of these, and objects whose own class has a
    method `as_data()` that returns such values.
    """
    try:
        return _digest(_content(hook))
    except _CodeError:
        return None


class _CodeError(Exception):
    """A value that is not data."""


def _content(value: Any) -> str:
    match value:
        case None | bool() | int() | float() | str() | slice() | range() | Meaning():
            return repr(value)
        case Tensor():
            return f"tensor {tensor_checksum(value)}"
        case tuple() | list():
            return f"[{', '.join(map(_content, value))}]"
        case dict():
            return f"{{{', '.join(f'{key!r}: {_content(element)}' for key, element in value.items())}}}"
        case DataEdit() if type(value).__module__ == DataEdit.__module__:
            return f"{value.kind} {_content({field.name: getattr(value, field.name) for field in fields(value)})}"
        # A subclass may override what the inherited method describes, so the method must be its own.
        case _ if "as_data" in vars(type(value)):
            return f"{type(value).__name__} {_content(value.as_data())}"
    raise _CodeError


def code_in(about: About) -> list[str]:
    """The hooks that are code, so that only a tag identifies them."""
    return [_label(hook) for hook in about.model["hooks"] if hook["sum"] is None]


def changes(current: About, stored: About) -> list[str]:
    """What differs between this harvest and the one in a store, as readable phrases."""
    if current.model["rule"] != stored.model.get("rule"):
        return ["it was started by an earlier version of hookline, so it can be read but not resumed"]
    # The id is only a name, and hooks have a phrase of their own.
    ours, theirs = ({**about.model, "id": "", "hooks": []} for about in (current, stored))
    hooks = _hook_changes(current.model["hooks"], stored.model["hooks"])
    return [*differences(ours, theirs), *hooks, *differences(current.options, stored.options)]


def check_same(current: About, manifest: Manifest, where: str) -> None:
    """StoreError if a store belongs to a different harvest; warn if it was started with other versions."""
    try:
        different = changes(current, manifest.about)
    except BAD_CONTENT as error:
        raise StoreError(f"the manifest of {where} is damaged: {reason(error)}") from error
    if different:
        raise StoreError(f"{where} belongs to a different harvest: {'; '.join(different)}. Harvest into another store")
    if different := differences(versions(), manifest.versions):
        warn(
            f"{where} was started with other versions, so its rows may differ in the last bits: {'; '.join(different)}"
        )


def _hook_changes(current: list[Any], stored: list[Any]) -> list[str]:
    ours, theirs = (", ".join(map(_label, hooks)) or "none" for hooks in (current, stored))
    if ours != theirs:
        return [f"hooks: {ours} here, but {theirs} in the store"]
    changed = [_label(one) for one, other in zip(current, stored, strict=True) if one["sum"] != other["sum"]]
    return [f"hooks: {label} has other values here than in the store" for label in changed]


def _label(hook: Mapping[str, Any]) -> str:
    return f"{hook['hook']} at {hook['at']!r}"


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def tensor_checksum(x: Tensor) -> str:
    """Returns a checksum of dtype, shape and all values; of a tensor on "meta", of dtype and shape."""
    return _checksums([x])[0]


def _checksums(tensors: Iterable[Tensor]) -> list[str]:
    """The checksums of several tensors. From a GPU, all sums are copied at once: each copy waits for the device."""
    described = [[(f"{part.dtype} {tuple(part.shape)}", _reduced(part)) for part in _plain_tensors(x)] for x in tensors]
    sums = _as_bytes([x for parts in described for _, reduced in parts for x in reduced])
    checksums = []
    for parts in described:
        checksum = hashlib.blake2b(digest_size=16)
        for about, reduced in parts:
            checksum.update(about.encode())
            for _ in reduced:
                checksum.update(next(sums))
        checksums.append(checksum.hexdigest())
    return checksums


def _as_bytes(tensors: Sequence[Tensor]) -> Iterator[bytes]:
    """The bytes of tensors, copied from each device at once."""
    raw = [x.contiguous().view(torch.uint8).reshape(-1) for x in tensors]
    copied = dict[torch.device, Iterator[Tensor]]()
    for device in {x.device for x in raw}:
        device_tensors = [x for x in raw if x.device == device]
        copied[device] = iter(
            torch.cat(device_tensors).cpu().split([len(x) for x in device_tensors])
            if device.type != "cpu"
            else device_tensors
        )
    for x in raw:
        yield next(copied[x.device]).numpy().tobytes()


def _plain_tensors(x: Tensor) -> Iterator[Tensor]:
    """The plain tensors that a tensor consists of: several if it is quantized, nested or distributed."""
    if is_traceable_wrapper_subclass(x):
        names, _ = x.__tensor_flatten__()
        for part in (getattr(x, name) for name in names):
            if isinstance(part, Tensor):  # a DTensor also has its mesh
                yield from _plain_tensors(part)
        return
    x = x.detach()
    if x.layout != torch.strided:
        x = x.to_dense()
    x = x.as_subclass(Tensor)
    if x.is_nested:
        for row in x.unbind():
            yield from _plain_tensors(row)
        return
    x = x.dequantize() if x.is_quantized else x
    yield x.resolve_conj().resolve_neg()


def _reduced(x: Tensor) -> tuple[Tensor, ...]:
    """View the bytes as a table of integers; returns the sums of its rows, the sums of its columns, and the remainder.

    They are computed on the tensor's device. A changed value changes the sum of its row, and two swapped values change
    the sums of their rows or columns.
    """
    if x.device.type == "meta" or not x.numel():
        return ()
    raw = x.reshape(-1).contiguous().view(torch.uint8)  # a column is one row that is not
    whole = raw.numel() // (8 * _TABLE_WIDTH) * 8 * _TABLE_WIDTH
    head = raw[:whole] if raw.storage_offset() % 8 == 0 else raw[:whole].clone()
    table = head.view(torch.int64).view(-1, _TABLE_WIDTH)
    return table.sum(0), table.sum(1), raw[whole:].clone()  # a view would keep all of `raw`
