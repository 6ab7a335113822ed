"""Models without weights: built as `from_pretrained` builds them, with their parameters on the meta device.

Nothing of the weights is read but the names, shapes and dtypes in the headers of the safetensors files. Buffers that no
file has, such as the frequencies of rotary embeddings, are computed as usual. `load_weights` fills some parameters
later, through transformers' own loading, so renamed, merged, split and converted weights come out as they do there.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from safetensors import safe_open
from torch import Tensor, nn

from hookline.errors import HooklineError

_DTYPES = {
    **{"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16},
    **{"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8},
    **{"BOOL": torch.bool, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2},
}


@dataclass(frozen=True)
class Checkpoint:
    """The files of a model without weights, and how transformers would load them."""

    files: tuple[str, ...]
    loading: Any
    """transformers' own description: dtypes, names that changed, conversions, quantization."""
    missing: frozenset[str] = field(default_factory=frozenset)
    """Parameters that no file has, such as an unembedding that is tied to the embedding."""

    def keys(self) -> dict[str, str]:
        """The name of every tensor, and the file that it is in."""
        file_of_key: dict[str, str] = {}
        for file in self.files:
            with safe_open(file, framework="pt") as opened:
                file_of_key |= dict.fromkeys(opened.keys(), file)
        return file_of_key


_checkpoints: WeakKeyDictionary[nn.Module, Checkpoint] = WeakKeyDictionary()


def from_pretrained_empty(cls: Any, path: str | Path, **kwargs: Any) -> nn.Module:
    """`cls.from_pretrained(path, **kwargs)`, but with all parameters on the meta device."""
    if kwargs.get("gguf_file") is not None:
        raise HooklineError(f"{kwargs['gguf_file']} can only be read as a whole: load it without device='meta'")
    checkpoints: list[Checkpoint] = []
    if hasattr(cls, "_model_mapping"):  # an Auto class
        cls = cls._model_mapping[type(kwargs.get("config") or _config(path, kwargs))]

    def headers_only(model: Any, _: Any, files: Any, loading: Any, *args: Any, **options: Any) -> Any:
        if not files or not all(str(file).endswith(".safetensors") for file in files):
            raise HooklineError(f"{path} has no safetensors files, and only those can be read in part")
        info, index = cls._load_pretrained_model(model, _shapes(files), files, _on_meta(loading), *args, **options)
        checkpoints.append(Checkpoint(tuple(map(str, files)), loading, frozenset(info.missing_keys)))
        missing = sorted(info.missing_keys - model.all_tied_weights_keys.keys())
        if missing:
            raise HooklineError(f"the files of {path} do not have {', '.join(missing[:4])} ({len(missing)} in all)")
        return info, index

    # A class of the same name, since transformers looks conversions up by it; only how it loads is different.
    likewise: Any = type(cls.__name__, (cls,), {"_load_pretrained_model": staticmethod(headers_only)})
    likewise.__module__ = cls.__module__
    with quiet_loading():
        model = likewise.from_pretrained(path, **kwargs)
    model.__class__ = cls
    _checkpoints[model] = checkpoints[0]
    return model


def _on_meta(loading: Any) -> Any:
    """The same loading, with every step on the meta device."""
    rules = copy.deepcopy(loading.weight_mapping or [])
    for rule in rules:
        if getattr(rule, "force_cpu", False):  # for steps that need too much memory on a GPU
            rule.force_cpu = False
    return replace(loading, device_map={"": "meta"}, weight_mapping=rules)


def _config(path: str | Path, options: Mapping[str, Any]) -> Any:
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(path, trust_remote_code=options.get("trust_remote_code", False))


def _shapes(files: Iterable[str]) -> dict[str, Tensor]:
    """Every tensor of the files, on the meta device."""
    shapes: dict[str, Tensor] = {}
    for file in files:
        with safe_open(file, framework="pt") as opened:
            for key in opened.keys():  # noqa: SIM118 - not a mapping
                part = opened.get_slice(key)
                dtype = _DTYPES.get(part.get_dtype())
                if dtype is None:
                    raise HooklineError(f"{key!r} has the dtype {part.get_dtype()}, which cannot be read by layer")
                shapes[key] = torch.empty(part.get_shape(), dtype=dtype, device="meta")
    return shapes


def dtype_in(folder: str | Path) -> torch.dtype | None:
    """The dtype of the first float in the safetensors files of a folder; None if there is none."""
    for file in sorted(Path(folder).glob("*.safetensors")):
        for x in _shapes([str(file)]).values():
            if x.is_floating_point():
                return x.dtype
    return None


def checkpoint_of(model: nn.Module) -> Checkpoint | None:
    """The files of a model that was made without weights; None for any other model."""
    return _checkpoints.get(model)


def check_weights_there(embed: nn.Module) -> None:
    """Raise if a model was loaded without its weights, given its embedding or another first part."""
    weight = next(embed.parameters(), None)
    if weight is not None and weight.is_meta and not hasattr(embed, "_hf_hook"):  # accelerate loads offloaded weights
        raise HooklineError('the model is on the device "meta", without weights, and cannot be run: load it elsewhere')


def adopt(model: nn.Module, twin: nn.Module) -> Checkpoint:
    """Give a model on the meta device the files and the computed buffers of an equal one made by this module."""
    names, others = (dict(module.named_parameters()) for module in (model, twin))
    unlike = [name for name in {**names, **others} if _shape(names, name) != _shape(others, name)]
    if unlike:
        raise HooklineError(
            f"the model on the meta device is not the one in {twin.config.name_or_path}: {unlike[0]} is "  # type: ignore[union-attr]
            f"{_shape(names, unlike[0])} here, and {_shape(others, unlike[0])} there"
        )
    for path, part in twin.named_modules():
        for name, buffer in part._buffers.items():
            if buffer is not None and not buffer.is_meta:
                model.get_submodule(path)._buffers[name] = buffer.clone()
    _checkpoints[model] = _checkpoints[twin]
    return _checkpoints[model]


def _shape(named: Mapping[str, Tensor], name: str) -> Any:
    return list(named[name].shape) if name in named else "missing"


def targets_of(model: nn.Module, checkpoint: Checkpoint, keys: Iterable[str]) -> dict[str, str]:
    """The parameter that each tensor of the files becomes, or the first of several that it is split into."""
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    rules = checkpoint.loading.weight_mapping or []
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    state_dict, prefix, targets = model.state_dict(), model.base_model_prefix, dict[str, str]()
    for key in keys:
        name, _ = rename_source_key(key, renamings, converters, prefix, state_dict)  # type: ignore[arg-type]
        if name not in state_dict and key in state_dict:
            name, _ = rename_source_key(key, [], [], prefix, state_dict)  # type: ignore[arg-type]
        targets[key] = name
    return targets


def load_weights(model: nn.Module, checkpoint: Checkpoint, files: Mapping[str, str], device: torch.device) -> None:
    """Read these tensors (names and their files) into the parameters that they become, on a device."""
    opened: dict[str, Any] = {}
    for file in {*files.values()}:
        opened[file] = safe_open(file, framework="pt").__enter__()
    try:
        parts = {key: opened[file].get_slice(key) for key, file in files.items()}
        with quiet_loading():
            # Without `expected_keys` it would reserve memory on a GPU for the whole model.
            cls: Any = type(model)
            cls._load_pretrained_model(
                model, parts, None, replace(checkpoint.loading, device_map={"": device}), expected_keys=[]
            )
    finally:
        for reader in opened.values():
            reader.__exit__(None, None, None)
    _finish_loading(model)


def _finish_loading(model: Any) -> None:
    """Call transformers' initialization of modules whose parameters were read, as `from_pretrained` does in the end.

    It leaves parameters alone that were read, but for what an architecture always sets (a padding embedding to zero).
    """
    for module in model.modules():
        parameters = [parameter for parameter in module.parameters(recurse=False) if not parameter.is_meta]
        for parameter in parameters:
            parameter._is_hf_initialized = True
        if parameters:
            module._is_hf_initialized = False
    model.initialize_weights()


@contextmanager
def quiet_loading(is_hidden: bool = True) -> Iterator[None]:
    """Hide transformers' progress bar of loading."""
    from transformers.utils import logging

    was_shown = logging.is_progress_bar_enabled()
    if is_hidden:
        logging.disable_progress_bar()
    try:
        yield
    finally:
        if is_hidden and was_shown:
            logging.enable_progress_bar()
