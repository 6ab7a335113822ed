"""HookedTransformer: TransformerLens's model class, around an unmodified transformers model."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from hookline.compat.transformer_lens._impl.flags import LensFlags
from hookline.compat.transformer_lens._impl.generation import LensGeneration
from hookline.compat.transformer_lens._impl.hooks import LensHooks, leave_out_hooks
from hookline.compat.transformer_lens._impl.kv_cache import HookedTransformerKeyValueCache
from hookline.compat.transformer_lens._impl.module_methods import OWN_STATE, OWN_TENSORS
from hookline.compat.transformer_lens._impl.pretrained import Pretrained
from hookline.compat.transformer_lens._impl.slices import Columns, Slice, SliceInput
from hookline.compat.transformer_lens._impl.tl_config import HookedTransformerConfig, to_native
from hookline.compat.transformer_lens._impl.tokens import (
    USE_DEFAULT_VALUE,
    LensText,
    LensTokens,
    get_attention_mask,
    prepared,
)
from hookline.compat.transformer_lens.cache import ActivationCache
from hookline.compat.transformer_lens.utils import lm_cross_entropy_loss
from hookline.engine import Hooked, compiling
from hookline.errors import HooklineError
from hookline.functions.signatures import parameters_of
from hookline.model import HookedModel
from hookline.text.loss import lm_loss
from hookline.text.tokenizer import Side
from hookline.types import Filter

Loss = Float[Tensor, ""] | Float[Tensor, "batch pos"]

_NOT_FROZEN = "past_kv_cache needs text or tokens, or a residual stream and a frozen cache: call its freeze() first"
_WEIGHTS = "load_state_dict writes weights into the model, and process_weights_(…) processes them there"
_DATA = "load a dataset, and tokenize it with to_tokens(…)"
NOT_HERE = {
    **dict.fromkeys(("fold_layer_norm", "center_writing_weights", "center_unembed", "fold_value_biases"), _WEIGHTS),
    "refactor_factored_attn_matrices": _WEIGHTS,
    "generate_stream": "generate(…) returns the whole text; hooks fire at every step",
    **dict.fromkeys(("sample_datapoint", "load_sample_training_dataset"), _DATA),
    "get_residual": "model(tokens, stop_at_layer=0) is the stream that enters the first layer",
}
"""Methods of TransformerLens that are not available, and what to use instead."""


_MADE_AGAIN = (*OWN_STATE, "_attached", "_points", "_last_inputs", "_text", "_refactored")


class Output(NamedTuple):
    """The result of `return_type="both"`."""

    logits: Float[Tensor, "batch pos d_vocab"]
    loss: Loss


class HookedTransformer(LensTokens, LensGeneration, LensFlags, LensHooks, Pretrained):
    """A language model with TransformerLens's methods.

        model = HookedTransformer.from_pretrained("gpt2")
        logits, cache = model.run_with_cache("When Mary and John went to the store")

    `HookedTransformer(cfg)` is a new toy model. The model of transformers inside is `model.module`.
    """

    _cache_class: type[ActivationCache] = ActivationCache

    def __init__(
        self,
        cfg: HookedTransformerConfig | dict[str, Any],
        tokenizer: Any = None,
        move_to_device: bool = True,
        default_padding_side: Side | None = None,
    ) -> None:
        if (loaded := self._take_loaded(cfg)) is not None:
            self._wrap(loaded, cfg)  # type: ignore[arg-type]
            self._take_tokenizer(tokenizer, default_padding_side)
            return
        from hookline.compat.transformer_lens._impl.native import NativeTransformer

        cfg = HookedTransformerConfig.unwrap(cfg)
        if tokenizer is None and cfg.tokenizer_name is not None:
            from transformers import AutoTokenizer

            tokenizer = AutoTokenizer.from_pretrained(cfg.tokenizer_name)
        if cfg.d_vocab == -1:
            if tokenizer is None:
                raise HooklineError("pass cfg.d_vocab, or a tokenizer")
            cfg.d_vocab = max(tokenizer.get_vocab().values()) + 1
            cfg.d_vocab_out = cfg.d_vocab if cfg.d_vocab_out == -1 else cfg.d_vocab_out
        module: nn.Module = NativeTransformer(to_native(cfg))
        self._wrap(module.to(cfg.device) if move_to_device else module, cfg)
        self._take_tokenizer(tokenizer, default_padding_side)

    def _take_tokenizer(self, tokenizer: Any, default_padding_side: Side | None) -> None:
        if tokenizer is not None:
            self.set_tokenizer(tokenizer, default_padding_side)
        elif default_padding_side is not None:
            raise HooklineError("default_padding_side needs a tokenizer")

    @property
    def text(self) -> LensText:
        """Conversion between text and tokens."""
        return LensText(self.tokenizer, self.cfg)

    def set_tokenizer(self, tokenizer: Any, default_padding_side: Side | None = None) -> None:
        """Set the tokenizer; its EOS token replaces a missing BOS or padding token."""
        self.tokenizer = prepared(tokenizer, default_padding_side)
        begins = self.tokenizer("")["input_ids"]
        self.cfg.tokenizer_prepends_bos = list(begins[:1]) == [self.tokenizer.bos_token_id]
        if "module" in vars(self):  # a subclass may be without one, and only convert text
            self._tell_tokenizer()

    def __getattr__(self, name: str) -> Any:
        if name in NOT_HERE:
            raise AttributeError(f"{name} is not available: {NOT_HERE[name]}")
        if "module" not in vars(self):
            constructor = f"{type(self).__name__}.__init__"
            raise AttributeError(f"there is no {name} yet: {constructor} must call HookedTransformer.__init__ first")
        return super().__getattr__(name)

    def __getstate__(self) -> dict[str, Any]:
        attributes = {name: value for name, value in vars(self).items() if name not in _MADE_AGAIN}
        tensors = {name: vars(self)[name] for name in OWN_TENSORS}
        return {**attributes, **super().__getstate__(), "_kept": self._attached.kept(), "_tensors": tensors}

    def __setstate__(self, state: dict[str, Any]) -> None:
        attached, tensors = state.pop("_kept"), state.pop("_tensors")
        super().__setstate__(state)
        self._begin_state()
        vars(self).update(tensors)
        self._points.permanent.raises_own = True
        self._attached.restore(attached)

    def forward(
        self,
        input: str | Sequence[str] | Tensor | None = None,
        return_type: Literal["logits", "loss", "both", "output"] | None = "logits",
        loss_per_token: bool = False,
        prepend_bos: bool | None = USE_DEFAULT_VALUE,
        padding_side: Side | None = USE_DEFAULT_VALUE,
        start_at_layer: int | None = None,
        tokens: Int[Tensor, "batch pos"] | None = None,
        shortformer_pos_embed: Tensor | None = None,
        attention_mask: Tensor | None = None,
        stop_at_layer: int | None = None,
        past_kv_cache: HookedTransformerKeyValueCache | None = None,
        **kwargs: Any,
    ) -> Any:
        """Return the logits, the loss, both or None, for text or tokens; with `stop_at_layer`, the stream at its input.

        `prepend_bos` applies to text. With `past_kv_cache` the run continues where the last one with it ended.
        """
        if shortformer_pos_embed is not None and self.cfg.positional_embedding_type != "shortformer":
            raise HooklineError("shortformer_pos_embed would have no effect: this model is not a shortformer")
        inputs: Any = input
        if start_at_layer is None and not isinstance(input, Tensor | None):
            inputs = self.to_tokens(input, prepend_bos, padding_side)
        elif prepend_bos:
            raise HooklineError("prepend_bos=True applies to text only: tokens are used as they are")
        if start_at_layer is None and isinstance(inputs, Tensor):
            inputs, attention_mask, positions = self._masked(inputs, attention_mask, padding_side)
            kwargs = positions | kwargs
        elif past_kv_cache is not None and (start_at_layer is None or not past_kv_cache.frozen):
            raise HooklineError(_NOT_FROZEN)
        kwargs |= {"start_at_layer": start_at_layer, "stop_at_layer": stop_at_layer, "tokens": tokens}
        kwargs |= {"return_type": "logits" if stop_at_layer is not None else return_type}
        kwargs |= {"attention_mask": attention_mask, "loss_per_token": loss_per_token}
        with ExitStack() as contexts:
            if past_kv_cache is not None:
                kwargs |= contexts.enter_context(past_kv_cache.resumed(self.module.config, inputs, attention_mask))
            if start_at_layer is not None:
                kwargs = self._positions(attention_mask) | kwargs if past_kv_cache is None else kwargs
                leave_out_hooks(self._points, start_at_layer)
            if shortformer_pos_embed is not None:
                rows = torch.arange(inputs.shape[1], device=inputs.device).expand(inputs.shape[:2])
                kwargs = {"position_ids": rows} | kwargs  # as many rows of positions as are given
                contexts.enter_context(Hooked.hooks(self, [("hook_pos_embed", lambda _: shortformer_pos_embed)]))
            output = HookedModel.__call__(self, inputs, **kwargs)
        return Output(*output) if kwargs["return_type"] == "both" else output

    def _loss(self, logits: Tensor, inputs: dict[str, Any], per_token: bool) -> Tensor:
        """The loss, also after earlier tokens, or with logits for fewer tokens than the prompt may have."""
        tokens, mask = inputs.get("input_ids"), inputs.get("attention_mask")
        if tokens is not None and mask is not None:
            inputs = {**inputs, "attention_mask": mask[:, -tokens.shape[1] :]}
        is_other = logits.ndim == 3 and logits.shape[-1] == self.cfg.d_vocab_out != self.cfg.d_vocab
        if not is_other or logits.shape[1] < 2 or tokens is None:
            return super()._loss(logits, inputs, per_token)
        if bool((tokens[:, 1:] >= logits.shape[-1]).any()):
            token, vocab_size = int(tokens[:, 1:].max()), logits.shape[-1]
            raise HooklineError(f"no loss: there are logits for {vocab_size} tokens, but the prompt has token {token}")
        return lm_loss(logits, tokens, inputs.get("attention_mask"), per_token=per_token)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "forward":
            how = "replace model.module.forward, or use hookline.hook(model.module)"
            raise HooklineError(f"forward of a HookedTransformer cannot be replaced, as accelerate does: {how}")
        super().__setattr__(name, value)

    def input_to_embed(
        self,
        input: str | Sequence[str] | Tensor,
        prepend_bos: bool | None = USE_DEFAULT_VALUE,
        padding_side: Side | None = USE_DEFAULT_VALUE,
        attention_mask: Tensor | None = None,
        past_kv_cache: HookedTransformerKeyValueCache | None = None,
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """The stream, the tokens, the positions of a shortformer, and the mask, for `start_at_layer=0`."""
        if past_kv_cache is not None and not past_kv_cache.frozen:
            raise HooklineError(_NOT_FROZEN)
        tokens = input if isinstance(input, Tensor) else self.to_tokens(input, prepend_bos, padding_side)
        ids, mask, _ = self._masked(tokens, attention_mask, padding_side)
        if mask is None and (past_kv_cache is not None or getattr(self.tokenizer, "padding_side", None) == "left"):
            mask = torch.ones_like(ids)
        position_embeddings: list[Tensor] = []
        positions = (
            [("hook_pos_embed", position_embeddings.append)]
            if self.cfg.positional_embedding_type == "shortformer"
            else []
        )
        with Hooked.hooks(self, positions):
            stream = self(ids, attention_mask=mask, stop_at_layer=0, past_kv_cache=past_kv_cache)
        if past_kv_cache is not None and mask is not None:
            mask = past_kv_cache.append_attention_mask(mask)
        return stream, ids, position_embeddings[0] if position_embeddings else None, mask

    @compiling.outside_compiler
    def _masked(
        self, ids: Tensor, mask: Tensor | None, side: Side | None
    ) -> tuple[Tensor, Tensor | None, dict[str, Tensor]]:
        """The tokens, their mask and their positions; left padding is detected."""
        if mask is None:
            ids, mask = self._inputs(ids, None, side)
        return ids, mask, self._positions(mask)

    def _positions(self, mask: Tensor | None) -> dict[str, Tensor]:
        """Position ids that count the tokens of the mask only, if one of them follows a masked one."""
        takes = "position_ids" in parameters_of(self.module)[0]
        if mask is None or not takes or bool((mask.cummin(1).values == mask).all()):
            return {}
        return {"position_ids": (mask.cumsum(1) - 1).clamp(min=0)}

    def _inputs(
        self, input: str | Sequence[str] | Tensor, prepend_bos: bool | None, padding_side: Side | None, *,
        has_mask: bool = False,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """The tokens and their mask; leading padding is masked if the padding side is left."""
        is_known = not isinstance(input, Tensor) or hasattr(input, "padding_mask")
        side = padding_side or (self.tokenizer.padding_side if self.tokenizer is not None else None)
        is_guessed = not has_mask and not is_known and side == "left" and self.tokenizer is not None
        ids, mask = super()._inputs(input, prepend_bos, padding_side, has_mask=has_mask or is_guessed)
        if is_guessed:
            guess = get_attention_mask(self.tokenizer, ids, self.cfg.default_prepend_bos, "left")
            mask = guess if not bool(guess.all()) else None
        return ids, mask

    def run_with_cache(  # type: ignore[override]
        self,
        *model_args: Any,
        names_filter: Filter = None,
        return_cache_object: bool = True,
        reset_hooks_end: bool = True,
        clear_contexts: bool = False,
        pos_slice: Slice | SliceInput = None,
        **kwargs: Any,
    ) -> tuple[Any, Any]:
        """The output and an ActivationCache; with `return_cache_object=False` a dict. Positions are columns."""
        if not reset_hooks_end:
            raise HooklineError("reset_hooks_end=False would continue caching: use add_caching_hooks")
        where = None if pos_slice is None else Columns(Slice.unwrap(pos_slice))
        chosen = self._to_cache(names_filter, kwargs.get("start_at_layer"), kwargs.get("stop_at_layer"))
        output, cache = super().run_with_cache(*model_args, names_filter=chosen, pos_slice=where, **kwargs)
        if chosen is None:
            start, stop = kwargs.get("start_at_layer"), kwargs.get("stop_at_layer")
            for key in list(cache):
                if not self._is_in_cache(key.removesuffix("_grad").partition("#")[0], start, stop):
                    del cache._tensors[key]
        cache.model = self
        if clear_contexts:
            self.clear_contexts()
        return output, cache if return_cache_object else dict(cache)

    loss_fn = staticmethod(lm_cross_entropy_loss)

    def __repr__(self) -> str:
        cfg = self.cfg
        return (
            f"{type(self).__name__}({cfg.model_name}: {cfg.n_layers} layers, {cfg.n_heads} heads, "
            f"d_model {cfg.d_model}, {len(self.hook_dict)} points)"
        )
