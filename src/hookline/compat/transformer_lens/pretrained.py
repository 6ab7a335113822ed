"""`from_pretrained` with and without weight processing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from hookline.compat.transformer_lens import loading
from hookline.compat.transformer_lens.describe import NO_BOS, described, normalization
from hookline.compat.transformer_lens.refactoring import refactor
from hookline.compat.transformer_lens.tl_config import HookedTransformerConfig
from hookline.compat.transformer_lens.weights import LensWeights
from hookline.errors import HooklineError
from hookline.model import HookedModel
from hookline.text.tokenizer import Side
from hookline.transformer.roles import find_anatomy, unknown_anatomy
from hookline.weights.processing.swaps import Swaps


class Pretrained(LensWeights):
    """Constructors of HookedTransformer and weight processing. A mixin."""

    _refactored: Swaps | None = None
    _no_bos: ClassVar[frozenset[str]] = NO_BOS

    def set_tokenizer(self, tokenizer: Any, default_padding_side: Side | None = None) -> None:
        """Set the tokenizer."""
        raise NotImplementedError

    def _wrap(self, module: nn.Module, cfg: HookedTransformerConfig | None = None, **known: Any) -> None:
        anatomy = find_anatomy(module)
        if anatomy is None:
            raise HooklineError(unknown_anatomy(module))
        if anatomy.is_encoder_decoder or anatomy.main.name != "blocks":
            raise HooklineError(
                f"HookedTransformer needs a causal language model: use hookline.hook for {anatomy.kind}"
            )
        HookedModel.__init__(self, module, None, anatomy)
        self._points.permanent.raises_own = True
        known.setdefault("default_prepend_bos", anatomy.config.model_type not in self._no_bos)
        vars(self)["_cfg"] = described(module, anatomy, **known) if cfg is None else cfg
        self._cfg.device = self._device

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

        What is not exact on this model (centring, where norms keep the mean) is left out with a warning. `hf_model` is
        wrapped, not copied, unless it has another dtype.
        """
        loading.refuse(
            n_devices=(n_devices != 1, 'pass device_map="auto", as transformers takes it'),
            n_ctx=(n_ctx is not None, "the model's own context is used; shorter prompts need nothing"),
            first_n_layers=(first_n_layers is not None and hf_model is not None, "hf_model is taken as it is"),
        )
        if checkpoint_value is not None and checkpoint_label is not None:
            raise HooklineError("checkpoint_label is an alias of checkpoint_value: pass only one of them")
        value = checkpoint_label if checkpoint_value is None else checkpoint_value
        wanted = loading.dtype_of(from_pretrained_kwargs.pop("torch_dtype", dtype))
        if hf_model is not None:
            loading.refuse(
                checkpoints=(not (value is None and checkpoint_index is None), "hf_model is taken as it is"),
                from_pretrained_kwargs=(bool(from_pretrained_kwargs), "hf_model is taken as it is"),
            )
            module = loading.from_memory(hf_model, device=device if move_to_device else None, dtype=wanted)
        else:
            has_map = "device_map" in from_pretrained_kwargs or not move_to_device
            module, found = loading.from_name(
                model_name,
                device=None if has_map else device or loading.get_device(),
                dtype=wanted,
                first_n_layers=first_n_layers,
                checkpoint_value=value,
                checkpoint_index=checkpoint_index,
                **from_pretrained_kwargs,
            )
            tokenizer = found if tokenizer is None else tokenizer
        model = cls.__new__(cls)
        known: dict[str, Any] = {"model_name": model_name.rpartition("/")[2]}
        if default_prepend_bos is not None:
            known["default_prepend_bos"] = default_prepend_bos
        model._wrap(module, **known)
        if tokenizer is not None:
            model.set_tokenizer(tokenizer, default_padding_side)
            model._cfg.tokenizer_name = tokenizer.name_or_path
        elif default_padding_side is not None:
            raise HooklineError("default_padding_side needs a tokenizer")
        model.process_weights_(
            fold_ln, center_writing_weights, center_unembed, refactor_factored_attn_matrices, fold_value_biases
        )
        return model

    @classmethod
    def from_pretrained_no_processing(
        cls,
        model_name: str,
        fold_ln: bool = False,
        center_writing_weights: bool = False,
        center_unembed: bool = False,
        refactor_factored_attn_matrices: bool = False,
        fold_value_biases: bool = False,
        **from_pretrained_kwargs: Any,
    ) -> Self:
        """`from_pretrained` without weight processing."""
        return cls.from_pretrained(
            model_name,
            fold_ln,
            center_writing_weights,
            center_unembed,
            refactor_factored_attn_matrices,
            fold_value_biases=fold_value_biases,
            **from_pretrained_kwargs,
        )

    def process_weights_(
        self,
        fold_ln: bool = True,
        center_writing_weights: bool = True,
        center_unembed: bool = True,
        refactor_factored_attn_matrices: bool = False,
        fold_value_biases: bool = True,
    ) -> None:
        """Process the weights as `from_pretrained` does; steps that are not exact are skipped with a warning."""
        loading.process(
            self,  # type: ignore[arg-type]
            fold_ln=fold_ln,
            center_writing_weights=center_writing_weights,
            center_unembed=center_unembed,
            fold_value_biases=fold_value_biases,
        )
        if refactor_factored_attn_matrices:
            try:
                vars(self)["_refactored"] = refactor(self)  # type: ignore[arg-type]
            except HooklineError:
                super().restore_weights()
                raise
        self._cfg.normalization_type = normalization(self.module, self._anatomy)

    def restore_weights(self) -> None:
        """Restore the unprocessed weights."""
        if self._refactored is not None:
            self._refactored.undo()
            vars(self)["_refactored"] = None
        super().restore_weights()
        self._cfg.normalization_type = normalization(self.module, self._anatomy)

    def save_pretrained(self, *args: Any, **kwargs: Any) -> Any:
        """Save the transformers model; raises while its weights are processed."""
        if self.processing is not None or self._refactored is not None:
            raise HooklineError(
                "the weights are processed, so transformers would load a different model: "
                "restore_weights() first, or save state_dict()"
            )
        return self.module.save_pretrained(*args, **kwargs)  # type: ignore[operator]

    def load_and_process_state_dict(
        self,
        state_dict: Mapping[str, Tensor],
        fold_ln: bool = True,
        center_writing_weights: bool = True,
        center_unembed: bool = True,
        fold_value_biases: bool = True,
        refactor_factored_attn_matrices: bool = False,
    ) -> None:
        """`load_state_dict`, then `process_weights_`. Missing weights are unchanged."""
        self.restore_weights()
        unexpected = self.load_state_dict(state_dict, strict=False).unexpected_keys
        if unexpected:
            raise HooklineError(f"unexpected weights for this model: {unexpected}")
        self.process_weights_(
            fold_ln, center_writing_weights, center_unembed, refactor_factored_attn_matrices, fold_value_biases
        )
