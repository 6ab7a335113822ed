"""HookedEncoder: BERT."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from hookline.compat.transformer_lens._impl.encoders.lens_encoder import LensEncoder
from hookline.compat.transformer_lens._impl.lens_errors import LensValueError
from hookline.compat.transformer_lens._impl.tl_config import HookedTransformerConfig
from hookline.engine import Delegate
from hookline.errors import HooklineError

Tokens = Int[Tensor, "batch pos"]


class BertPart(Delegate):
    """A module of BERT, with the weights and modules inside it by TransformerLens's names."""

    def __init__(self, module: nn.Module, **named: Any) -> None:
        super().__init__(module)
        vars(self)["_named"] = named

    def __getattr__(self, name: str) -> Any:
        named = vars(self).get("_named", {})
        return named[name] if name in named else super().__getattr__(name)


class HookedEncoder(LensEncoder):
    """BERT with TransformerLens's methods and names. The model of transformers inside is `model.module`.

        model = HookedEncoder.from_pretrained("bert-base-cased")
        logits, cache = model.run_with_cache("The capital of France is [MASK].")

    `HookedEncoder(cfg)` is a new model, with transformers' initial weights.
    """

    _kind: ClassVar[str] = "BertForPreTraining and BertForMaskedLM"

    @staticmethod
    def _new(cfg: HookedTransformerConfig) -> nn.Module:
        from transformers import BertConfig, BertForPreTraining

        if cfg.n_heads * cfg.d_head != cfg.d_model:
            raise HooklineError(f"BERT has n_heads * d_head = d_model, not {cfg.n_heads} * {cfg.d_head}")
        options: dict[str, Any] = {"intermediate_size": cfg.d_mlp, "hidden_act": cfg.act_fn}
        config = BertConfig(
            vocab_size=cfg.d_vocab,
            hidden_size=cfg.d_model,
            num_hidden_layers=cfg.n_layers,
            num_attention_heads=cfg.n_heads,
            max_position_embeddings=cfg.n_ctx,
            layer_norm_eps=cfg.eps,
            tie_word_embeddings=cfg.tie_word_embeddings,
            **options,
        )
        return BertForPreTraining(config)

    @staticmethod
    def _fits(module: nn.Module) -> bool:
        return hasattr(getattr(module, "bert", None), "embeddings") and hasattr(
            getattr(module, "cls", None), "predictions"
        )

    @classmethod
    def _load(cls, name: str, **options: Any) -> nn.Module:
        from transformers import BertForPreTraining

        return BertForPreTraining.from_pretrained(name, **options)

    def __getattr__(self, name: str) -> Any:
        if name in ("embed", "pooler", "mlm_head", "nsp_head", "unembed") and "_points" in vars(self):
            return self._part(name)
        return super().__getattr__(name)

    def _part(self, name: str) -> nn.Module:
        module: Any = self.module
        head = module.cls
        parts = {"embed": module.bert.embeddings, "pooler": module.bert.pooler, "mlm_head": head.predictions.transform}
        parts |= {"unembed": head.predictions.decoder, "nsp_head": getattr(head, "seq_relationship", None)}
        if parts[name] is None:
            raise AttributeError(f"{type(self.module).__name__} has no {name}: load BertForPreTraining")
        if name == "unembed":
            return BertPart(parts[name], W_U=self.W_U, b_U=self.b_U)
        if name == "embed":
            embeddings = parts[name]
            types = BertPart(embeddings.token_type_embeddings, W_token_type=embeddings.token_type_embeddings.weight)
            inside: dict[str, Any] = {"token_type_embed": types, "ln": embeddings.LayerNorm}
            inside |= {"embed": BertPart(embeddings.word_embeddings, W_E=self.W_E)}
            return BertPart(embeddings, pos_embed=BertPart(embeddings.position_embeddings, W_pos=self.W_pos), **inside)
        return parts[name]

    def to_tokens(  # type: ignore[override]
        self, input: str | Sequence[str], move_to_device: bool = True, truncate: bool = True
    ) -> tuple[Tokens, Tokens, Tokens]:
        """The tokens of text, their token types, and the attention mask."""
        encoding = self._encoded(input, move_to_device=move_to_device, truncate=truncate)
        return encoding["input_ids"], encoding["token_type_ids"], encoding["attention_mask"]

    def __call__(  # type: ignore[override]
        self,
        input: str | list[str] | Tokens,
        return_type: Literal["logits", "predictions"] | None = "logits",
        token_type_ids: Tokens | None = None,
        one_zero_attention_mask: Tokens | None = None,
    ) -> Any:
        """Logits for every position; with `return_type="predictions"` the words for masked tokens, or None."""
        if return_type not in ("logits", "predictions", None):
            raise HooklineError(f'return_type must be "logits", "predictions" or None, not {return_type!r}')
        tokens, types, mask = self._inputs_of(input, token_type_ids, one_zero_attention_mask)
        output = self._whole(input_ids=tokens, token_type_ids=types, attention_mask=mask)
        logits = output["prediction_logits" if "prediction_logits" in output else "logits"]
        if return_type == "predictions":
            return self._predictions(tokens, logits)
        return logits if return_type == "logits" else None

    def _inputs_of(
        self, input: Any, types: Tokens | None, mask: Tokens | None
    ) -> tuple[Tokens, Tokens | None, Tokens | None]:
        if isinstance(input, Tensor):
            return input, types, mask
        tokens, own_types, own_mask = self.to_tokens(input)
        return tokens, own_types if types is None else types, own_mask if mask is None else mask

    def _predictions(self, tokens: Tokens, logits: Float[Tensor, "batch pos d_vocab"]) -> str | list[str]:
        """The most likely word for each masked token."""
        if self.tokenizer is None:
            raise HooklineError('return_type="predictions" needs a tokenizer')
        is_masked = tokens.to(logits.device) == self.tokenizer.mask_token_id
        words = self.tokenizer.decode(logits[is_masked].argmax(-1))
        if " " not in words:
            return words
        return [f"Prediction {index}: {word}" for index, word in enumerate(words.split(" "))]

    def encoder_output(
        self, tokens: Tokens, token_type_ids: Tokens | None = None, one_zero_attention_mask: Tokens | None = None
    ) -> Float[Tensor, "batch pos d_model"]:
        """The output of the last layer."""
        inputs = {"token_type_ids": token_type_ids, "attention_mask": one_zero_attention_mask}
        return self._whole(input_ids=tokens, output_hidden_states=True, **inputs).hidden_states[-1]

    def sentence_logits(
        self, tokens: Tokens, token_type_ids: Tokens, one_zero_attention_mask: Tokens | None = None
    ) -> Float[Tensor, "batch 2"]:
        """The logits of the next-sentence head: that the sentences are in sequence, and that they are not."""
        self._part("nsp_head")
        inputs = {"token_type_ids": token_type_ids, "attention_mask": one_zero_attention_mask}
        return self._whole(input_ids=tokens, **inputs).seq_relationship_logits


class BertNextSentencePrediction:
    """Whether the second of two sentences follows the first, by a HookedEncoder.

    nsp = BertNextSentencePrediction(HookedEncoder.from_pretrained("bert-base-cased"))
    nsp(["She went to the grocery store.", "She bought an apple."], return_type="predictions")
    """

    def __init__(self, model: HookedEncoder) -> None:
        self.model = model

    def to_tokens(
        self, input: list[str], move_to_device: bool = True, truncate: bool = True
    ) -> tuple[Tokens, Tokens, Tokens]:
        """The tokens of two sentences, their token types, and the attention mask."""
        if len(input) != 2:
            raise LensValueError(f"next sentence prediction needs two sentences, as a list, not {len(input)}")
        encoding = self.model._encoded(*input, move_to_device=move_to_device, truncate=truncate)
        return encoding["input_ids"], encoding["token_type_ids"], encoding["attention_mask"]

    def __call__(
        self,
        input: list[str] | Tokens,
        return_type: Literal["logits", "predictions"] | None = "logits",
        token_type_ids: Tokens | None = None,
        one_zero_attention_mask: Tokens | None = None,
    ) -> Any:
        """The two logits, or a sentence that says the prediction (`return_type="predictions"`), or None."""
        tokens, types, mask = self._inputs(input, token_type_ids, one_zero_attention_mask)
        return _as(return_type, self.model.sentence_logits(tokens, types, mask))

    forward = __call__

    def _inputs(self, input: Any, types: Tokens | None, mask: Tokens | None) -> tuple[Tokens, Tokens, Tokens | None]:
        if not isinstance(input, Tensor):
            tokens, own_types, own_mask = self.to_tokens(input)
            return tokens, own_types if types is None else types, own_mask if mask is None else mask
        if types is None:
            raise LensValueError(
                "tokens of two sentences need token_type_ids, 0 for the first and 1 for the second: pass them, or text"
            )
        return input, types, mask

    def run_with_cache(
        self,
        input: list[str] | Tokens,
        return_type: Literal["logits", "predictions"] | None = "logits",
        token_type_ids: Tokens | None = None,
        one_zero_attention_mask: Tokens | None = None,
        **kwargs: Any,
    ) -> tuple[Any, Any]:
        """What a call returns, and the activations; options are those of `HookedEncoder.run_with_cache`."""
        tokens, types, mask = self._inputs(input, token_type_ids, one_zero_attention_mask)
        inputs: dict[str, Any] = {"token_type_ids": types, "one_zero_attention_mask": mask}
        head_outputs: list[Tensor] = []
        head = self.model._part("nsp_head")
        with self.model.hooks([(head, lambda x: head_outputs.append(x))]):
            _, cache = self.model.run_with_cache(tokens, **inputs, **kwargs)
        return _as(return_type, head_outputs[0]), cache


def _as(return_type: str | None, logits: Float[Tensor, "batch 2"]) -> Any:
    if return_type == "predictions":
        is_next = int(torch.argmax(logits[0])) == 0
        return "The sentences are sequential" if is_next else "The sentences are NOT sequential"
    if return_type not in ("logits", None):
        raise HooklineError(f'return_type must be "logits", "predictions" or None, not {return_type!r}')
    return logits if return_type == "logits" else None
