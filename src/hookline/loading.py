"""Entry points: `hook` wraps a module in memory, and `load` loads a model by name."""

from __future__ import annotations

import re
import sys
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Unpack, overload

import torch
from torch import nn

from hookline.engine import Delegate, Hooked, compiling
from hookline.errors import HooklineError, a_type, warn
from hookline.functions.listed_options import check_names, lists, option_names
from hookline.hooks.hooked_module import HookedModule, HookedRootModule
from hookline.model import HookedModel
from hookline.model_options import LoadOptions
from hookline.transformer.anatomy import Anatomy
from hookline.transformer.empty import dtype_in, from_pretrained_empty, quiet_loading
from hookline.transformer.find_anatomy import find_anatomy, language_of, tower_of, unknown_anatomy
from hookline.transformer.hub import EMBEDDED, ModelSource, as_hookline_error, check_transformers, find_model
from hookline.transformer.sharded import prepare_sharded


@overload
def hook(module: HookedRootModule, tokenizer: Any = None) -> HookedRootModule: ...  # type: ignore[overload-overlap]
@overload
def hook(module: nn.Module | HookedModule, tokenizer: Any = None) -> HookedModule: ...
@compiling.outside_compiler
def hook(module: nn.Module | HookedModule, tokenizer: Any = None) -> Hooked:
    """Wrap any nn.Module, so that everything in it can be read, edited and undone by name.

        >>> net = hookline.hook(torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU()))
        >>> output, cache = net.run_with_cache(torch.ones(1, 4))
        >>> cache["0"].shape
        torch.Size([1, 8])

    A language model of transformers becomes a `HookedModel`, with classic names, text in and logits out. For a
    vision-language model pass its processor instead of a tokenizer; for a vision model, its image processor. The module
    is neither copied nor changed, and runs exactly as before while nothing is hooked.

    If a model is wrapped in DistributedDataParallel, DataParallel, DeepSpeed or `torch.compile`, the `module` of the
    result is the model inside, and calls go through the given wrapper.
    """
    if isinstance(module, Hooked):
        return module
    if not isinstance(module, nn.Module):
        raise HooklineError(f"hookline.hook takes an nn.Module, not {type(module).__name__}")
    prepare_sharded(module)
    model = _model_inside(module)
    anatomy = find_anatomy(model) if _is_model(model) else None
    if anatomy is not None:
        _warn_of_dropped_caps(model, anatomy)
        text, processor = _text_and_more(tokenizer)
        hooked: HookedModule = HookedModel(model, text, anatomy, processor)
        if model is not module:
            vars(hooked)["_outer"] = module
        return hooked
    hint = unknown_anatomy(model) if _is_language_model(model) else _model_deeper_in(module)
    if tokenizer is not None:
        raise HooklineError(
            f"a tokenizer or processor was given, but {type(module).__name__} is not a supported language or vision "
            f"model: hookline.hook(module) hooks any module's input and output by name{'. ' + hint if hint else ''}"
        )
    hooked = HookedModule(module)
    hooked.index.hint = lambda name: hint if _CLASSIC.match(name) else ""
    return hooked


_CLASSIC = re.compile(r"(blocks|encoder|decoder)\.-?\d|hook_|ln_final\.|unembed\.|lm\.|vision\.|projector\.")
"""Names of a language model's points, which a plain module does not have."""


_WRAPPERS = {
    "DistributedDataParallel": "module",
    "DataParallel": "module",
    "DeepSpeedEngine": "module",
    "OptimizedModule": "_orig_mod",
}
"""Wrapper modules, and the attribute that has the wrapped module."""


def _model_inside(module: nn.Module) -> nn.Module:
    """The model of transformers inside known wrappers; the module itself if there is none."""
    model = module
    while not _is_model(model):
        name = _WRAPPERS.get(type(model).__name__)
        if name is None or name not in model._modules:
            return module
        model = model._modules[name]  # type: ignore[assignment]
        model = model.module if isinstance(model, Delegate) else model
    return model


def _warn_of_dropped_caps(model: nn.Module, anatomy: Anatomy) -> None:
    """Warn of attention scores without their soft cap, which some versions of transformers leave out with sdpa."""
    config = anatomy.config
    cap = getattr(config, "attn_logit_softcapping", None)
    is_theirs = type(model).__module__.startswith("transformers.")
    if cap is not None and is_theirs and getattr(config, "_attn_implementation", None) == "sdpa":
        warn(
            f"attention of {type(model).__name__} has a soft cap ({cap}), which sdpa leaves out: activations differ "
            f"from those of the trained model. Load it with attn_implementation='eager'"
        )


def _model_deeper_in(module: nn.Module) -> str:
    """Advice for a module that contains a model of transformers."""
    for path, submodule in module.named_modules():
        if path and _is_model(submodule) and find_anatomy(submodule) is not None:
            return (
                f"{type(module).__name__} contains {a_type(submodule)}: hookline.hook(module.{path}, tokenizer) "
                f"has its classic names. Hooks placed there also fire when the whole module is called"
            )
    return ""


def _text_and_more(preprocessor: Any) -> tuple[Any, Any]:
    """The tokenizer and the processor in what was given as either; an image processor has no tokenizer."""
    if hasattr(preprocessor, "tokenizer"):
        return preprocessor.tokenizer, preprocessor
    return (None, preprocessor) if hasattr(preprocessor, "preprocess") else (preprocessor, None)


def _is_model(module: nn.Module) -> bool:
    return _is_language_model(module) or _is_image_model(module)


def _is_language_model(module: nn.Module) -> bool:
    """Whether it is a model of transformers that takes tokens."""
    if not all(hasattr(module, name) for name in ("config", "get_input_embeddings", "get_output_embeddings")):
        return False
    try:
        embed = module.get_input_embeddings()  # type: ignore[operator]
    except NotImplementedError:
        return False
    # It may have an adapter around it; an audio model has one embedding for each of its vocabularies.
    return isinstance(getattr(embed, "base_layer", embed), nn.Embedding | nn.ModuleList)


def _is_image_model(module: nn.Module) -> bool:
    """Whether it is a model of transformers that takes images; perhaps also text, as CLIP does."""
    if not hasattr(module, "config"):
        return False
    takes_both = tower_of(module) is not None and language_of(module) is not None
    return takes_both or getattr(module, "main_input_name", None) == "pixel_values"


@lists(LoadOptions)
@compiling.outside_compiler
def load(
    name: str | Path,
    *,
    device: str | torch.device | None = None,
    dtype: torch.dtype | str | None = None,
    **options: Unpack[LoadOptions],
) -> HookedModel:
    """A model from a hub id, a local folder or a GGUF file, with its tokenizer or processor, wrapped.

        >>> hookline.load("tinyworld")
        HookedModel(gpt2: 4 layers, 8 heads, d_model 128, 117 points)

    "tinyworld" and "tinysight", which takes images, are in the package. `options` are those of transformers'
    `from_pretrained` (`attn_implementation=…`, `device_map=…`, `distributed_config=…`, `gguf_file=…`); to change the
    model's configuration, pass `config`. With `device="meta"` no weights are read: such a model can be planned
    (`model.plan(…)`) and harvested by layer.
    """
    kwargs: dict[str, Any] = {**options}
    check_names("load", kwargs, ("device", "dtype", *option_names(LoadOptions)))
    spread = [option for option in ("distributed_config", "device_map") if kwargs.get(option) is not None]
    if spread and find_spec("accelerate") is None:
        raise HooklineError(f'{spread[0]} needs accelerate: pip install "hookline[distributed]"')
    _check_where(name, device, kwargs)
    check_transformers()
    where = find_model(name, kwargs)
    with quiet_loading(name in EMBEDDED), as_hookline_error(name):
        kwargs |= where.options
        cls, is_empty = _class_for(where.path, kwargs), device is not None and torch.device(device).type == "meta"
        make = partial(from_pretrained_empty, cls) if is_empty else cls.from_pretrained
        if name in EMBEDDED and not is_empty:
            make = partial(_complete, make)
        module = make(where.path, dtype=dtype, **kwargs).eval()
        processor = _processor_for(where.path, module, kwargs)
    model = hook(module.to(device) if device is not None and not is_empty else module, processor)
    assert isinstance(model, HookedModel)  # otherwise `hook` raises, with the reason
    return model


def _check_where(name: str | Path, device: Any, kwargs: dict[str, Any]) -> None:
    """Raise for a device that cannot be used here, and for options that a model of the package does not have."""
    try:
        torch.empty(0, device=device)
    except (AssertionError, RuntimeError) as error:  # torch without CUDA asserts
        reason = str(error).splitlines()[0]
        raise HooklineError(f"device={str(device)!r} cannot be used here ({reason}): try device='cpu'") from error
    ignored = [key for key in ("revision", "subfolder", "gguf_file") if kwargs.get(key) is not None]
    if name in EMBEDDED and ignored:
        raise HooklineError(f"{name!r} is in the package, so {ignored[0]}= has no effect: leave it out")


def _complete(from_pretrained: Any, path: Path, **kwargs: Any) -> nn.Module:
    """A model of the package; raises if it would have random weights, under module names of another version."""
    module, about = from_pretrained(path, **kwargs, output_loading_info=True)
    missing = sorted({*about["missing_keys"]} - {*getattr(module, "all_tied_weights_keys", ())})
    if missing:
        from transformers import __version__ as version

        raise HooklineError(
            f"{path.name} has no {missing[0]} ({len(missing)} in all) under the names of transformers {version}: "
            f"install a version that this version of hookline supports"
        )
    return module


def outline(name: str | Path, *, dtype: torch.dtype | str | None = None) -> HookedModel:
    """A model without weights and without a tokenizer, from its config alone: nothing else is read or downloaded."""
    if isinstance(dtype, str) and not isinstance(getattr(torch, dtype, None), torch.dtype):
        raise HooklineError(f"dtype must be the name of a dtype of torch, such as 'bfloat16', not {dtype!r}")
    folder = Path(name).expanduser()
    path, options = ModelSource(folder) if (folder / "config.json").is_file() else find_model(name, {})
    with as_hookline_error(name):
        cls, config = _class_for(path, dict(options)), _config_for(path, dict(options))
        if getattr(config, "quantization_config", None) is not None:
            raise HooklineError(f"{name} is quantized, and the size of quantized weights is not known from the config")
        weights_dtype = dtype or config.dtype or dtype_in(path) or torch.float32
        with torch.device("meta"):
            module = (getattr(cls, "_from_config", None) or cls.from_config)(config, dtype=weights_dtype).eval()
    model = hook(module)
    assert isinstance(model, HookedModel)  # otherwise `hook` raises, with the reason
    return model


_LOCATION = ("gguf_file", "revision", "trust_remote_code", "token", "cache_dir", "subfolder", "local_files_only")
"""Options of `from_pretrained` that say where a model is, and so where its tokenizer and config are."""
_OWN_MODELS = "hookline.compat.transformer_lens._impl.native"
"""The module that registers a model type of our own with transformers. By name: it imports this one."""


def _processor_for(name: str | Path, module: nn.Module, kwargs: dict[str, Any]) -> Any:
    """What makes inputs for the model: a processor if it takes images and there is one, else a tokenizer."""
    import transformers  # slow to import, and only needed here

    options = {key: kwargs[key] for key in _LOCATION if key in kwargs}
    if _is_image_model(module) and not _is_language_model(module):
        return transformers.AutoImageProcessor.from_pretrained(name, **options)
    if getattr(module.config, "vision_config", None) is not None and "gguf_file" not in kwargs:
        try:
            return transformers.AutoProcessor.from_pretrained(name, **options)
        except ImportError as error:
            raise HooklineError(f"the processor of {name} needs a library that is not installed: {error}") from error
        except (OSError, ValueError):  # a folder without a processor still takes text
            pass
    return transformers.AutoTokenizer.from_pretrained(name, **options)


def _class_for(name: str | Path, kwargs: dict[str, Any]) -> Any:
    """The class that the model was saved from; if that is unknown, a class for language models."""
    import transformers

    if "gguf_file" in kwargs or kwargs.get("trust_remote_code"):
        return transformers.AutoModelForCausalLM
    config = kwargs.get("config") or _config_for(name, {key: kwargs[key] for key in _LOCATION if key in kwargs})
    for architecture in config.architectures or ():
        if hasattr(transformers, architecture):
            return getattr(transformers, architecture)
    if getattr(config, "vision_config", None) is not None:
        return transformers.AutoModelForImageTextToText
    is_pair = getattr(config, "is_encoder_decoder", False)
    return transformers.AutoModelForSeq2SeqLM if is_pair else transformers.AutoModelForCausalLM


def _config_for(name: str | Path, options: dict[str, Any]) -> Any:
    """The config of a model; a type that transformers does not know may be ours."""
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(name, **options)
    except ValueError:
        if _OWN_MODELS in sys.modules:
            raise
        import_module(_OWN_MODELS)
        return AutoConfig.from_pretrained(name, **options)
