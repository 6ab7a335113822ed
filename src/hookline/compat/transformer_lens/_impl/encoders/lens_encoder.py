"""What HookedEncoder and HookedEncoderDecoder have in common."""

from __future__ import annotations

from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from hookline.compat.transformer_lens._impl.aliases import get_official_model_name
from hookline.compat.transformer_lens._impl.describe import described
from hookline.compat.transformer_lens._impl.encoders.encoder_points import LensEncoderPoints
from hookline.compat.transformer_lens._impl.flags import LensFlags
from hookline.compat.transformer_lens._impl.hooks import LensHooks
from hookline.compat.transformer_lens._impl.lens_errors import check
from hookline.compat.transformer_lens._impl.moving import LensMoves
from hookline.compat.transformer_lens._impl.pretrained import get_device, refuse
from hookline.compat.transformer_lens._impl.tl_config import HookedTransformerConfig
from hookline.compat.transformer_lens.cache import ActivationCache
from hookline.compat.transformer_lens.FactoredMatrix import FactoredMatrix
from hookline.engine import open_runs
from hookline.errors import HooklineError
from hookline.model import HookedModel
from hookline.text.forward_pass import begin_pass
from hookline.transformer.find_anatomy import find_anatomy, unknown_anatomy
from hookline.transformer.hub import as_hookline_error
from hookline.types import Filter
from hookline.weights.matrices import Weights


class EncoderWeights(Weights):
    """The weights of an encoder."""

    _matrix = FactoredMatrix


class LensEncoder(LensMoves, LensFlags, LensHooks, HookedModel):
    """A transformers model under the names of TransformerLens, with its weights unchanged."""

    cfg: HookedTransformerConfig = None  # type: ignore[assignment]  # set for each model
    _cache_class: type[ActivationCache] = ActivationCache
    _points_class = LensEncoderPoints
    _kind: ClassVar[str]
    """The models that the class is for, in words."""

    def __init__(
        self, cfg: HookedTransformerConfig | dict[str, Any], tokenizer: Any = None, move_to_device: bool = True
    ) -> None:
        cfg, tokenizer = self._made(cfg, tokenizer)
        module = self._new(cfg).eval().to(cfg.dtype)
        self._wrap(module.to(cfg.device) if move_to_device else module, tokenizer, cfg)

    def _wrap(
        self, module: nn.Module, tokenizer: Any, cfg: HookedTransformerConfig | None, **extra_fields: Any
    ) -> None:
        anatomy = find_anatomy(module)
        if anatomy is None:
            raise HooklineError(unknown_anatomy(module))
        if not self._fits(module):
            raise HooklineError(f"{type(self).__name__} is for {self._kind}: hookline.hook(model) wraps {anatomy.kind}")
        super().__init__(module, tokenizer, anatomy)
        self._points.permanent.raises_own = True
        vars(self)["cfg"] = described(module, anatomy, **extra_fields) if cfg is None else cfg
        self.cfg.device = self.device

    @property
    def weights(self) -> EncoderWeights:
        """The weights, stacked over layers; their names are also attributes of the model."""
        return EncoderWeights(self._points)

    @staticmethod
    def _new(cfg: HookedTransformerConfig) -> nn.Module:
        """A new transformers model, with its initial weights."""
        raise NotImplementedError

    @staticmethod
    def _fits(module: nn.Module) -> bool:
        """Whether the class is for this model."""
        raise NotImplementedError

    @classmethod
    def _load(cls, name: str, **options: Any) -> nn.Module:
        """The model of transformers by name or from a folder."""
        raise NotImplementedError

    @classmethod
    def from_pretrained(
        cls,
        model_name: str,
        checkpoint_index: int | None = None,
        checkpoint_value: int | None = None,
        hf_model: nn.Module | None = None,
        device: str | torch.device | None = None,
        tokenizer: Any = None,
        move_to_device: bool = True,
        dtype: torch.dtype = torch.float32,
        **from_pretrained_kwargs: Any,
    ) -> Self:
        """Load a model by name or from a folder, or wrap one in memory (`hf_model`). Weights are not processed."""
        quantized = [name for name in ("load_in_8bit", "load_in_4bit") if from_pretrained_kwargs.get(name)]
        checkpoint = checkpoint_index if checkpoint_value is None else checkpoint_value
        refuse(
            checkpoint_value=None if checkpoint is None else "pass revision=…, as for transformers",
            **dict.fromkeys(quantized, "pass quantization_config=…, as for transformers"),
        )
        load_dtype = from_pretrained_kwargs.pop("torch_dtype", dtype)
        if hf_model is None:
            from transformers import AutoTokenizer

            name = get_official_model_name(model_name)
            with as_hookline_error(name):
                hf_model = cls._load(name, dtype=load_dtype, **from_pretrained_kwargs)
                tokenizer = AutoTokenizer.from_pretrained(name) if tokenizer is None else tokenizer
            hf_model = hf_model.eval().to(device or get_device()) if move_to_device else hf_model.eval()
        elif device is not None and move_to_device:
            hf_model = hf_model.to(device)
        model = cls.__new__(cls)
        model._wrap(hf_model, tokenizer, None, model_name=model_name.rpartition("/")[2])
        if tokenizer is not None:
            model.cfg.tokenizer_name = tokenizer.name_or_path
        return model

    def _made(self, cfg: Any, tokenizer: Any) -> tuple[HookedTransformerConfig, Any]:
        """The config of a new model, with its vocabulary, and the tokenizer."""
        if isinstance(cfg, str):
            raise HooklineError(f"{type(self).__name__} takes a config: from_pretrained({cfg!r}) loads a model")
        cfg = HookedTransformerConfig.unwrap(cfg)
        if tokenizer is None and cfg.tokenizer_name is not None:
            from transformers import AutoTokenizer

            tokenizer = AutoTokenizer.from_pretrained(cfg.tokenizer_name)
        if cfg.d_vocab == -1:
            check(tokenizer is not None, "pass cfg.d_vocab, or a tokenizer")
            cfg.d_vocab = max(tokenizer.get_vocab().values()) + 1
            cfg.d_vocab_out = cfg.d_vocab if cfg.d_vocab_out == -1 else cfg.d_vocab_out
        return cfg, tokenizer

    def _encoded(self, text: Any, pair: Any = None, *, move_to_device: bool, truncate: bool) -> Any:
        """What the tokenizer returns for text, or for pairs of texts."""
        if self.tokenizer is None:
            raise HooklineError("this model has no tokenizer: pass tokens, or set model.tokenizer")
        limit = {"truncation": True, "max_length": self.cfg.n_ctx} if truncate and self.cfg.n_ctx else {}
        encoding = self.tokenizer(text, pair, return_tensors="pt", padding=True, **limit)
        return encoding.to(self.device) if move_to_device else encoding

    def _whole(self, **inputs: Any) -> Any:
        """All that the transformers model returns."""
        inputs = {name: value for name, value in inputs.items() if value is not None}
        inputs = {name: value.to(self.device) if isinstance(value, Tensor) else value for name, value in inputs.items()}
        self._check_options(inputs)
        if open_runs() or self._points.permanent.steps:
            begin_pass(self._points.root, inputs, is_only=all(run.is_one_pass for run in open_runs()))
        return self._forward(**inputs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The same as calling the model."""
        return self(*args, **kwargs)

    def run_with_cache(
        self, *model_args: Any, names_filter: Filter = None, return_cache_object: bool = True, **kwargs: Any
    ) -> tuple[Any, Any]:
        """The output and an ActivationCache; with `return_cache_object=False` a dict."""
        chosen = self._to_cache(names_filter, None, None)
        output, cache = super().run_with_cache(*model_args, names_filter=chosen, **kwargs)
        if chosen is None:
            for key in [key for key in cache if not self._is_usual(key.removesuffix("_grad").partition("#")[0])]:
                del cache._tensors[key]
        return output, cache if return_cache_object else dict(cache)

    def __repr__(self) -> str:
        cfg = self.cfg
        return f"{type(self).__name__}({cfg.model_name}: {cfg.n_layers} layers, {cfg.n_heads} heads)"
