"""`from_pretrained`: short names, checkpoints, first layers only, and weight processing."""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from hookline.compat.transformer_lens._impl.absent import DEVICES
from hookline.compat.transformer_lens._impl.aliases import get_official_model_name
from hookline.compat.transformer_lens._impl.checkpoints import Checkpoint, checkpoint_files, find_checkpoint
from hookline.compat.transformer_lens._impl.describe import NO_BOS, described, normalization
from hookline.compat.transformer_lens._impl.published import load_published, published_name
from hookline.compat.transformer_lens._impl.refactoring import refactor
from hookline.compat.transformer_lens._impl.tl_config import HookedTransformerConfig
from hookline.compat.transformer_lens._impl.toys import fold_norms_of_mlps
from hookline.compat.transformer_lens._impl.weights import LensWeights
from hookline.errors import HooklineError, warn
from hookline.experiments.core.prompts import warn_of_dropout
from hookline.loading import load
from hookline.model import HookedModel
from hookline.text.tokenizer import Side
from hookline.transformer.anatomy import Anatomy
from hookline.transformer.find_anatomy import find_anatomy, unknown_anatomy
from hookline.transformer.hub import EMBEDDED, as_hookline_error, find_model
from hookline.weights.processing.swaps import Swaps

_PROCESSING = (
    *("fold_ln", "center_writing_weights", "center_unembed", "refactor_factored_attn_matrices", "fold_value_biases"),
)
_loaded: ContextVar[tuple[HookedTransformerConfig, nn.Module] | None] = ContextVar("hookline_lens_loaded", default=None)
"""The module for the model that `from_pretrained` is making, with its config."""


def anatomy_of(module: nn.Module) -> Anatomy:
    """The anatomy of a causal language model; raises for other models."""
    anatomy = find_anatomy(module)
    if anatomy is None:
        raise HooklineError(unknown_anatomy(module))
    if anatomy.is_encoder_decoder or anatomy.main.name != "blocks":
        raise HooklineError(f"HookedTransformer needs a causal language model: {anatomy.kind} needs hookline.hook")
    return anatomy


class Pretrained(LensWeights):
    """Constructors of HookedTransformer and weight processing. A mixin."""

    _refactored: Swaps | None = None
    _no_bos: ClassVar[frozenset[str]] = NO_BOS

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if cls.__module__.startswith("hookline."):
            return
        ours = {name for base in cls.__mro__[1:] if base.__module__.startswith("hookline.") for name in vars(base)}
        private = {name for name in ours if re.match(r"_[^_]", name) and not hasattr(nn.Module, name)}
        of_instances = {"module", "_points", "_attached"}
        taken = sorted((of_instances | {"weights", "index", "anatomy", "text"} | private) & vars(cls).keys())
        if taken:
            raise HooklineError(f"{cls.__name__} defines {', '.join(taken)}, which HookedTransformer needs: rename it")

    def _wrap(self, module: nn.Module, cfg: HookedTransformerConfig) -> None:
        HookedModel.__init__(self, module, None, anatomy_of(module))
        self._begin_state()
        self._points.permanent.raises_own = True
        vars(self)["cfg"] = cfg
        self.cfg.device = self.device

    def _take_loaded(self, cfg: Any) -> nn.Module | None:
        """The module that `from_pretrained` has loaded for this model; None for a new toy model."""
        pending = _loaded.get()
        if pending is None:
            return None
        if cfg is not pending[0]:
            name = type(self).__name__
            raise HooklineError(f"{name}.__init__ must pass the cfg that it gets to HookedTransformer.__init__, itself")
        _loaded.set(None)
        return pending[1]

    @classmethod
    def _of_loaded(cls, module: nn.Module, cfg: HookedTransformerConfig, *args: Any, **kwargs: Any) -> Any:
        """A model around this module, made by the `__init__` of the class, as in TransformerLens."""
        _loaded.set((cfg, module))
        try:
            model = cls(cfg, *args, **kwargs)  # type: ignore[arg-type]
            if _loaded.get() is not None:
                raise HooklineError(f"{cls.__name__}.__init__ must call HookedTransformer.__init__")
        finally:
            _loaded.set(None)
        return model

    @classmethod
    def from_pretrained(
        cls,
        model_name: str,
        fold_ln: bool = True,
        center_writing_weights: bool = True,
        center_unembed: bool = True,
        refactor_factored_attn_matrices: bool = False,
        checkpoint_index: int | None = None,
        checkpoint_value: int | None = None,
        checkpoint_label: int | None = None,
        hf_model: nn.Module | None = None,
        device: str | torch.device | None = None,
        n_devices: int = 1,
        tokenizer: Any = None,
        move_to_device: bool = True,
        fold_value_biases: bool = True,
        default_prepend_bos: bool | None = None,
        default_padding_side: Side | None = None,
        dtype: torch.dtype | str = "float32",
        first_n_layers: int | None = None,
        n_ctx: int | None = None,
        **from_pretrained_kwargs: Any,
    ) -> Self:
        """Load a model by name or from a folder, or wrap one in memory, and process its weights.

        Steps that would not be exact on this model, such as centering with RMS norms, are skipped with a warning.
        `hf_model` is wrapped, not copied, unless its dtype differs.
        """
        refuse(
            n_devices=DEVICES if n_devices != 1 else None,
            n_ctx="the model's own context is used; shorter prompts need nothing" if n_ctx is not None else None,
            checkpoint_label=None
            if None in (checkpoint_label, checkpoint_value)
            else "it is checkpoint_value; pass one",
        )
        load_dtype = _dtype_of(from_pretrained_kwargs.pop("torch_dtype", dtype))
        value = checkpoint_label if checkpoint_value is None else checkpoint_value
        options = {"first_n_layers": first_n_layers, **from_pretrained_kwargs}
        if hf_model is not None:
            ignored = options | {"checkpoint_value": value, "checkpoint_index": checkpoint_index}
            refuse(**{name: "hf_model is taken as it is" for name, option in ignored.items() if option is not None})
        checkpoint = find_checkpoint(model_name, value, checkpoint_index)
        where = None if not move_to_device or "device_map" in options else device or get_device()
        if hf_model is None and (hub_name := published_name(model_name)) is not None:
            text = (tokenizer, default_prepend_bos, default_padding_side)
            model = cls._published(hub_name, where, load_dtype, *text, checkpoint, **options)
        else:
            if hf_model is not None:
                module = _from_memory(hf_model, device if move_to_device else None, load_dtype)
            else:
                module, loaded_tokenizer = _from_name(model_name, where, load_dtype, checkpoint=checkpoint, **options)
                tokenizer = loaded_tokenizer if tokenizer is None else tokenizer
            name = model_name.rpartition("/")[2]
            model = cls._of_module(module, name, tokenizer, default_prepend_bos, default_padding_side)
            warn_of_dropout(model)  # hf_model may be in training mode; TransformerLens has no dropout
        note_checkpoint(model.cfg, checkpoint)
        model.process_weights_(
            fold_ln, center_writing_weights, center_unembed, refactor_factored_attn_matrices, fold_value_biases
        )
        return model

    @classmethod
    def _of_module(
        cls, module: nn.Module, name: str, tokenizer: Any, prepend_bos: bool | None, padding_side: Side | None
    ) -> Self:
        """The model around a module of transformers."""
        anatomy = anatomy_of(module)
        prepends = anatomy.config.model_type not in cls._no_bos if prepend_bos is None else prepend_bos
        cfg = described(module, anatomy, model_name=name, default_prepend_bos=prepends)
        model = cls._of_loaded(module, cfg, tokenizer, move_to_device=False, default_padding_side=padding_side)
        if tokenizer is not None:
            model.cfg.tokenizer_name = tokenizer.name_or_path
        return model

    @classmethod
    def _published(
        cls,
        name: str,
        device: str | torch.device | None,
        dtype: torch.dtype,
        tokenizer: Any,
        prepend_bos: bool | None,
        padding_side: Side | None,
        checkpoint: Checkpoint | None = None,
        first_n_layers: int | None = None,
        **others: Any,
    ) -> Self:
        """A model that was published in TransformerLens's own format."""
        refuse(**dict.fromkeys(others, "this model is not in the format of transformers"))
        file = None if checkpoint is None else checkpoint_files(name)[checkpoint.value]
        cfg, state = load_published(name, dtype, first_n_layers, file)
        cfg.model_name, cfg.default_prepend_bos = name.rpartition("/")[2], prepend_bos is not False
        cfg.device = device or "cpu"
        model: Self = cls(cfg, tokenizer, default_padding_side=padding_side)  # type: ignore[call-arg, arg-type]
        model.load_state_dict(state)
        return model

    @classmethod
    def from_pretrained_no_processing(cls, model_name: str, *args: bool, **kwargs: Any) -> Self:
        """`from_pretrained` without weight processing, unless an option of `process_weights_` requests it."""
        processing = dict(zip(_PROCESSING, args, strict=False))
        return cls.from_pretrained(model_name, **(dict.fromkeys(_PROCESSING, False) | processing | kwargs))

    def process_weights_(
        self,
        fold_ln: bool = True,
        center_writing_weights: bool = True,
        center_unembed: bool = True,
        refactor_factored_attn_matrices: bool = False,
        fold_value_biases: bool = True,
    ) -> None:
        """Process the weights as `from_pretrained` does; steps that are not exact are skipped with a warning."""
        if self.processing is not None:
            how = "restore_weights() of the HookedTransformer that did it, or pass a copy of hf_model"
            raise HooklineError(f"the weights of this model are already processed: call {how}")
        steps = {"fold_ln": fold_ln, "center_writing_weights": center_writing_weights}
        steps |= {"center_unembed": center_unembed, "fold_value_biases": fold_value_biases}
        if any(steps.values()):
            self._process({name: None if is_on else False for name, is_on in steps.items()})
        if refactor_factored_attn_matrices:
            swaps = Swaps()
            if (error := self._step("refactor_factored_attn_matrices", swaps)) is not None:
                super().restore_weights()
                raise error
            vars(self)["_refactored"] = swaps
        self.cfg.normalization_type = normalization(self.module, self.anatomy)

    def _do(self, name: str, swaps: Swaps) -> None:
        if name == "refactor_factored_attn_matrices":
            return refactor(self, swaps)  # type: ignore[arg-type]
        super()._do(name, swaps)
        if name == "fold_ln":
            fold_norms_of_mlps(self.module, swaps)
        return None

    def _process(self, steps: dict[str, bool | None]) -> None:
        try:
            done = self.process_weights(**steps)
            left_out = "; ".join(f"{name}: {why}" for name, why in done.left_out)
        except HooklineError as error:  # no step is exact here
            left_out = str(error)
        if left_out:
            message = f"left out, since it would not be exact: {left_out}"
            warn(message)

    def restore_weights(self) -> None:
        """Restore the unprocessed weights."""
        if self._refactored is not None:
            self._refactored.undo()
            vars(self)["_refactored"] = None
        super().restore_weights()
        self.cfg.normalization_type = normalization(self.module, self.anatomy)

    def save_pretrained(self, *args: Any, **kwargs: Any) -> Any:
        """Save the transformers model; raises while its weights are processed."""
        if self.processing is not None or self._refactored is not None:
            raise HooklineError("the weights are processed: call restore_weights() first, or save state_dict()")
        return self.module.save_pretrained(*args, **kwargs)  # type: ignore[operator]

    def load_and_process_state_dict(self, state_dict: Mapping[str, Tensor], **processing: bool) -> None:
        """`load_state_dict`, then `process_weights_` with its options. Missing weights are unchanged.

        Weights of norms are folded into a model whose norms have none (`normalization_type="LNPre"`).
        """
        self.restore_weights()
        if self._keeps_folded(state_dict) and processing.get("fold_ln", True):
            state_dict, processing = self._folded(state_dict, processing), dict.fromkeys(_PROCESSING, False)
        unexpected = self.load_state_dict(state_dict, strict=False).unexpected_keys
        if unexpected:
            raise HooklineError(f"unexpected weights for this model: {unexpected}")
        self.process_weights_(**processing)

    def _keeps_folded(self, state: Mapping[str, Tensor]) -> bool:
        """Whether this is a toy model without weights of norms, and these weights have some."""
        kind = self.cfg.normalization_type
        return kind in ("LNPre", "RMSPre") and any(name.endswith((".ln1.w", "ln_final.w")) for name in state)

    def _folded(self, state: Mapping[str, Tensor], processing: dict[str, bool]) -> dict[str, Tensor]:
        """The weights as a model with weights of norms has them after processing."""
        from hookline.compat.transformer_lens._impl.hooked_transformer import HookedTransformer

        cfg = copy.copy(self.cfg)
        cfg.normalization_type = (cfg.normalization_type or "").removesuffix("Pre")
        cfg.tokenizer_name, cfg.seed = None, None
        with torch.random.fork_rng(devices=[]):
            model = HookedTransformer(cfg)
        model.load_and_process_state_dict(state, **processing)
        return model.state_dict()


def get_device() -> str:
    """The GPU if there is one; Apple's only if the environment variable TRANSFORMERLENS_ALLOW_MPS is 1."""
    if torch.cuda.is_available():
        return "cuda"
    is_allowed = os.environ.get("TRANSFORMERLENS_ALLOW_MPS") == "1"
    return "mps" if is_allowed and torch.backends.mps.is_available() and torch.backends.mps.is_built() else "cpu"


def note_checkpoint(cfg: HookedTransformerConfig, checkpoint: Checkpoint | None) -> None:
    """Say in the config which checkpoint of its training a model is."""
    if checkpoint is not None:
        cfg.from_checkpoint, cfg.checkpoint_label_type = True, checkpoint.label_type
        cfg.checkpoint_index, cfg.checkpoint_value = checkpoint.index, checkpoint.value


def _dtype_of(dtype: torch.dtype | str) -> torch.dtype:
    """A dtype by its name."""
    torch_dtype = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(torch_dtype, torch.dtype):
        raise HooklineError(f"dtype={dtype!r} is not a torch dtype: use float32, bfloat16, float16 or float64")
    return torch_dtype


def refuse(**options: str | None) -> None:
    """Raise for the first of these options that has a reason, which says what to do instead."""
    for name, reason in options.items():
        if reason is not None:
            raise HooklineError(f"{name} is not supported here: {reason}")


def _from_name(
    name: str,
    device: torch.device | str | None,
    dtype: torch.dtype,
    first_n_layers: int | None = None,
    checkpoint: Checkpoint | None = None,
    **kwargs: Any,
) -> tuple[nn.Module, Any]:
    """A model and its tokenizer, from a short name, a hub id, a folder, or the package itself."""
    where = name if name in EMBEDDED or Path(name).is_dir() else get_official_model_name(name)
    if checkpoint is not None:
        kwargs["revision"] = checkpoint.revision(where)
    if first_n_layers is not None:
        kwargs["config"] = _shortened(where, first_n_layers, kwargs)
    with _without_report() if first_n_layers is not None else nullcontext():
        model = load(where, device=device, dtype=dtype, **kwargs)
    return model.module, model.tokenizer


@contextmanager
def _without_report() -> Iterator[None]:
    """Suppress transformers' report of unused weights, which are those of the omitted layers."""
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)


def _shortened(name: str, n_layers: int | None, kwargs: dict[str, Any]) -> Any:
    """The config of the model, with only its first layers."""
    from transformers import AutoConfig

    names = ("revision", "trust_remote_code", "cache_dir", "local_files_only")
    where = find_model(name, kwargs)
    options = {key: kwargs[key] for key in names if key in kwargs}
    options |= where.options
    with as_hookline_error(name):
        config = kwargs.get("config") or AutoConfig.from_pretrained(where.path, **options)
    if n_layers is None:
        return config
    if n_layers not in range(1, config.num_hidden_layers + 1):
        raise HooklineError(f"first_n_layers={n_layers} is out of range: {name} has {config.num_hidden_layers} layers")
    for key in ("layer_types", "mlp_layer_types", "attention_layers"):
        if isinstance(value := getattr(config, key, None), list):
            setattr(config, key, value[:n_layers])
    config.num_hidden_layers = n_layers
    return config


def empty_model(
    name: str,
    config: Any,
    dtype: torch.dtype,
    first_n_layers: int | None,
    checkpoint: Checkpoint | None = None,
    **kwargs: Any,
) -> nn.Module:
    """The model of that name without its weights, on no device."""
    from transformers import AutoConfig, AutoModelForCausalLM

    where = name if name in EMBEDDED or Path(name).is_dir() else get_official_model_name(name)
    if isinstance(config, dict):
        config = AutoConfig.for_model(**config)
    if checkpoint is not None:
        kwargs["revision"] = checkpoint.revision(where)
    config = _shortened(where, first_n_layers, kwargs | ({} if config is None else {"config": config}))
    with torch.device("meta"), as_hookline_error(name):
        return AutoModelForCausalLM.from_config(config, dtype=dtype)


def _from_memory(module: nn.Module, device: torch.device | str | None, dtype: torch.dtype) -> nn.Module:
    """The model on that device; a copy only if the dtype differs."""
    if next(module.parameters()).dtype != dtype:
        module = copy.deepcopy(module).to(dtype)
    return module if device is None else module.to(device)
