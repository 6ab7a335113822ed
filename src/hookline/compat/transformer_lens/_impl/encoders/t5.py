"""HookedEncoderDecoder: T5."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from hookline.compat.transformer_lens._impl.encoders.lens_encoder import EncoderWeights, LensEncoder
from hookline.compat.transformer_lens._impl.tl_config import HookedTransformerConfig
from hookline.engine import PermanentHooks
from hookline.errors import HooklineError
from hookline.transformer.anatomy import Anatomy
from hookline.transformer.index import ModelPoints
from hookline.weights.matrices import Weights

Tokens = Int[Tensor, "batch pos"]


class HookedEncoderDecoder(LensEncoder):
    """T5 with TransformerLens's methods and names. The model of transformers inside is `model.module`.

        model = HookedEncoderDecoder.from_pretrained("t5-small")
        logits, cache = model.run_with_cache("translate English to German: Hello")
        cache["decoder.0.cross_attn.hook_pattern"]

    Weights are stacked over the layers of the encoder, then those of the decoder.
    """

    _kind: ClassVar[str] = "T5ForConditionalGeneration"

    @staticmethod
    def _new(cfg: HookedTransformerConfig) -> nn.Module:
        from transformers import T5Config, T5ForConditionalGeneration

        options: dict[str, Any] = {"tie_word_embeddings": cfg.tie_word_embeddings, "d_ff": cfg.d_mlp}
        config = T5Config(
            vocab_size=cfg.d_vocab,
            d_model=cfg.d_model,
            d_kv=cfg.d_head,
            num_layers=cfg.n_layers,
            num_heads=cfg.n_heads,
            relative_attention_num_buckets=cfg.relative_attention_num_buckets or 32,
            relative_attention_max_distance=cfg.relative_attention_max_distance or 128,
            layer_norm_epsilon=cfg.eps,
            feed_forward_proj=f"{'gated-' if cfg.gated_mlp else ''}{cfg.act_fn}",
            **options | {"decoder_start_token_id": cfg.decoder_start_token_id or 0},
        )
        return T5ForConditionalGeneration(config)

    @staticmethod
    def _fits(module: nn.Module) -> bool:
        return getattr(getattr(module, "config", None), "model_type", None) in ("t5", "mt5") and hasattr(
            module, "lm_head"
        )

    @classmethod
    def _load(cls, name: str, **options: Any) -> nn.Module:
        from transformers import AutoModelForSeq2SeqLM

        return AutoModelForSeq2SeqLM.from_pretrained(name, **options)

    @property
    def weights(self) -> T5Weights:
        """The weights, stacked over the layers of both stacks; their names are also attributes of the model."""
        return T5Weights(self._points)

    def to_tokens(  # type: ignore[override]
        self, input: str | Sequence[str], move_to_device: bool = True, truncate: bool = True
    ) -> tuple[Tokens, Tokens]:
        """The tokens of text, and the attention mask."""
        encoding = self._encoded(input, move_to_device=move_to_device, truncate=truncate)
        return encoding["input_ids"], encoding["attention_mask"]

    def __call__(  # type: ignore[override]
        self,
        input: str | list[str] | Tokens,
        decoder_input: Tokens | None = None,
        return_type: Literal["logits"] | None = "logits",
        one_zero_attention_mask: Tokens | None = None,
    ) -> Float[Tensor, "batch pos d_vocab"] | None:
        """Logits for the decoder's tokens, or None. For text, the decoder starts with the padding token."""
        if return_type not in ("logits", None):
            raise HooklineError(f'return_type must be "logits" or None, not {return_type!r}')
        tokens, mask = self._inputs_of(input, one_zero_attention_mask)
        if decoder_input is None:
            if isinstance(input, Tensor):
                raise HooklineError("tokens need decoder_input, the tokens of the decoder: pass both, or text")
            decoder_input = torch.full((len(tokens), 1), self.tokenizer.pad_token_id)
        inputs = {"decoder_input_ids": decoder_input, "attention_mask": mask, "use_cache": False}
        output = self._whole(input_ids=tokens, **inputs)
        return output.logits if return_type == "logits" else None

    def _inputs_of(self, input: Any, mask: Tokens | None) -> tuple[Tokens, Tokens | None]:
        if isinstance(input, Tensor):
            return input, mask
        tokens, own_mask = self.to_tokens(input)
        return tokens, own_mask if mask is None else mask

    def generate(  # type: ignore[override]
        self,
        input: str | Tokens = "",
        one_zero_attention_mask: Tokens | None = None,
        max_new_tokens: int = 10,
        stop_at_eos: bool = True,
        eos_token_id: int | list[int] | None = None,
        do_sample: bool = True,
        top_k: int | None = None,
        top_p: float | None = None,
        temperature: float = 1.0,
        freq_penalty: float = 0.0,
        return_type: str | None = "input",
        verbose: bool = True,  # noqa: ARG002
    ) -> Any:
        """The decoder's tokens, from its start token on, or their text; hooks fire on every step."""
        if freq_penalty:
            raise HooklineError("freq_penalty is not supported here: use repetition_penalty of model.module.generate")
        tokens, mask = self._inputs_of(input, one_zero_attention_mask)
        options: dict[str, Any] = {"do_sample": do_sample}
        if do_sample:
            options |= {"top_k": top_k or 0, "top_p": top_p or 1.0, "temperature": temperature}
        end = eos_token_id if eos_token_id is not None else getattr(self.tokenizer, "eos_token_id", None)
        options |= {"eos_token_id": end} if stop_at_eos else {"min_new_tokens": max_new_tokens}
        mask = torch.ones_like(tokens) if mask is None else mask
        new = super().generate(tokens.to(self.device), max_new_tokens, attention_mask=mask.to(self.device), **options)
        if return_type == "str" or (return_type == "input" and isinstance(input, str)):
            return self.tokenizer.decode(new[0], skip_special_tokens=True)
        return new


class _OneStack(ModelPoints):
    """The points of one stack of an encoder-decoder model."""

    def __init__(self, points: ModelPoints, index: int) -> None:
        self._kept = replace(points.anatomy, stacks=(points.anatomy.stacks[index],))
        super().__init__(points.root, PermanentHooks(), self._kept)

    def _find(self) -> Anatomy:
        return self._kept


class T5Weights(EncoderWeights):
    """The weights of both stacks."""

    def _stacked(self, name: str) -> Tensor:
        stacks = [Weights(_OneStack(self._points, index)) for index in (0, 1)]
        return torch.cat([stack._stacked(name) for stack in stacks])

    def all_head_labels(self) -> list[str]:
        """The labels of TransformerLens: EL0H0, EL0H1, …, DL0H0, …"""
        stacks = {"E": _OneStack(self._points, 0), "D": _OneStack(self._points, 1)}
        return [f"{letter}{label}" for letter, points in stacks.items() for label in Weights(points).all_head_labels()]
