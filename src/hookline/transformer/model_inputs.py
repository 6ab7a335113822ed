"""A model's keyword inputs, from text, token ids, images, or keyword inputs that were given."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hookline.engine.signatures import parameters_of
from hookline.errors import HooklineError, HooklineWarning, users_level
from hookline.text.ragged import warn_of_ragged
from hookline.text.token_methods import TokenHelpers
from hookline.text.tokenizer import Side, shown_prompt
from hookline.transformer.cfg import cfg_of, device_of
from hookline.transformer.losses import image_positions
from hookline.transformer.roles import Anatomy
from hookline.transformer.wrapped import WrappedTransformer


class ModelInputs(WrappedTransformer, TokenHelpers):
    """Builds the keyword inputs of a model. A base of `HookedModel`, which adds what images need."""

    tokenizer: Any

    @property
    def _anatomy(self) -> Anatomy:
        return self._points.anatomy

    @property
    def _device(self) -> torch.device:
        return device_of(self.module, self._anatomy)

    if TYPE_CHECKING:  # from `vision.image_methods`

        def _check_prompt(self, prompt: Any) -> None: ...

        def _with_images(
            self, prompt: Any, images: Any, prepend_bos: bool | None, padding_side: Side | None, given: dict[str, Any]
        ) -> Any: ...

        def _remember(self, inputs: Mapping[str, Any]) -> None: ...

    def _prepared(
        self,
        input: Any,
        given: dict[str, Any],
        attention_mask: Tensor | None = None,
        prepend_bos: bool | None = None,
        padding_side: Side | None = None,
        images: Any = None,
    ) -> dict[str, Any]:
        """The model's keyword inputs, from a prompt, its images, and keyword inputs that were given."""
        inputs = dict(given)
        if images is not None:
            if attention_mask is not None:
                raise HooklineError("images come with their own attention_mask: leave attention_mask out")
            inputs |= self._with_images(input, images, prepend_bos, padding_side, given)
        elif input is not None:
            if isinstance(input, Tensor) and not (prepend_bos is None and padding_side is None):
                raise HooklineError("prepend_bos and padding_side apply to text, and the input is token ids")
            if "input_ids" in given:
                raise HooklineError("the tokens were given twice: as the input and as input_ids")
            ids, mask = self._inputs(input, prepend_bos, padding_side, has_mask=attention_mask is not None)
            inputs["input_ids"] = ids
            if attention_mask is None:
                inputs |= {} if "position_ids" in given else self._positions(mask)
                attention_mask = mask
        elif not (prepend_bos is None and padding_side is None):
            raise HooklineError("prepend_bos and padding_side apply to text, and none was given")
        if attention_mask is not None:
            inputs["attention_mask"] = attention_mask
        if inputs.get("attention_mask") is not None:
            inputs["attention_mask"] = checked_mask(inputs["attention_mask"], inputs)
        self._remember(inputs)
        return inputs

    def _warn_if_ragged(self, input: Any, mask: Tensor | None) -> None:
        if mask is not None and input is not None and not isinstance(input, Tensor):
            warn_of_ragged(mask, is_causal=self._anatomy.main.name != "encoder")

    def _inputs(
        self,
        input: str | Sequence[str] | Tensor,
        prepend_bos: bool | None,
        padding_side: Side | None,
        *,
        has_mask: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        self._check_prompt(input)
        if not isinstance(input, str | Sequence | Tensor):
            raise HooklineError(
                f"the input is text, several texts, or a tensor of token ids, not {shown_prompt(input)}"
            )
        if not isinstance(input, str | Tensor) and any(
            isinstance(each, int | Sequence) and not isinstance(each, str) for each in input
        ):
            raise HooklineError(f"token ids are given as a tensor, torch.tensor(…), not as a list: {input!r}")
        if not isinstance(input, Tensor):
            ids, mask = self.text.encode(input, prepend_bos=prepend_bos, padding_side=padding_side)
            return ids.to(self._device), None if mask.all() else mask.to(self._device)
        ids = input[None] if input.ndim == 1 else input
        if ids.ndim != 2:
            raise HooklineError(f"tokens are one row, or a batch of rows, not a tensor of shape {tuple(input.shape)}")
        self.text.check_ids(ids)
        known: Tensor | None = getattr(ids, "padding_mask", None)  # of what `to_tokens` gave
        if known is not None and not self.text.is_padded(ids, known):
            known = None  # it was written to
        if known is None and not has_mask:
            self._warn_of_padding(ids)
        return ids.to(self._device), known.to(self._device) if known is not None else None

    def _warn_of_padding(self, ids: Tensor) -> None:
        """Tokens are taken as they are; but those that look padded are probably meant to be masked."""
        row = self.text.padded_row(ids) if len(ids) > 1 and self.tokenizer is not None else None
        if row is not None:
            warnings.warn(
                f"row {row} of these tokens looks padded, but there is no attention_mask: pass one, or the texts "
                f"themselves. (What to_tokens gives remembers its padding, but not what is made from that.)",
                HooklineWarning,
                stacklevel=users_level(),
            )

    def _text_inputs(self, prompt: Any, prepend_bos: bool | None, padding_side: Side | None) -> dict[str, Any]:
        ids, mask = self._inputs(prompt, prepend_bos, padding_side)
        given = {"input_ids": ids, "attention_mask": mask if mask is not None else torch.ones_like(ids)}
        return given | self._positions(mask)

    def _positions(self, mask: Tensor | None) -> dict[str, Tensor]:
        """Where text is padded on the left, positions count from its first token, in models that can be told so."""
        if mask is None or mask[:, 0].all() or "position_ids" not in parameters_of(self._points.root)[0]:
            return {}
        return {"position_ids": (mask.cumsum(1) - 1).clamp(min=0)}

    def _decoder_inputs(self, decoder_input: Any, inputs: dict[str, Any]) -> dict[str, Any]:
        """What goes into the decoder of a model that has one."""
        if not self._anatomy.is_encoder_decoder:
            if decoder_input is not None:
                raise HooklineError("decoder_input needs an encoder-decoder model, and this model is not one")
            return {}
        if decoder_input is not None and "decoder_input_ids" in inputs:
            raise HooklineError("the decoder's tokens are given twice: as decoder_input, and as decoder_input_ids")
        if decoder_input is not None:
            ids, mask = self._inputs(decoder_input, None, None)
            return {"decoder_input_ids": ids, **({} if mask is None else {"decoder_attention_mask": mask})}
        if any(name in inputs for name in ("decoder_input_ids", "decoder_inputs_embeds", "labels")):
            return {}
        config: Any = self.module.config
        rows = next((x.shape[0] for x in inputs.values() if isinstance(x, Tensor)), 1)
        start = getattr(config, "decoder_start_token_id", None)
        start = start if start is not None else getattr(self.module.generation_config, "decoder_start_token_id", None)
        if start is None:
            raise HooklineError("give decoder_input: this model does not say what its decoder starts with")
        return {"decoder_input_ids": torch.full((rows, 1), start, device=self._device)}

    def _image_positions(self, tokens: Tensor) -> Tensor | None:
        return image_positions(self._points, tokens)

    def _check_room(self, length: int) -> None:
        """Learned position embeddings end at n_ctx."""
        cfg = cfg_of(self.module, self._anatomy)
        if self._anatomy.main.pos_embed is not None and cfg.n_ctx is not None and length > cfg.n_ctx:
            raise HooklineError(
                f"the prompt and the new tokens are {length} tokens, but this model's context is {cfg.n_ctx}"
            )

    def _for_plan(self, input: Any) -> Any:
        if input is None or isinstance(input, dict):
            return input
        ids, mask = self._inputs(input, None, None)
        inputs = {"input_ids": ids, "attention_mask": mask if mask is not None else torch.ones_like(ids)}
        return inputs | self._decoder_inputs(None, inputs)


def checked_mask(mask: Tensor, inputs: dict[str, Any]) -> Tensor:
    """A mask over the tokens must be as they are; one laid out for the attention itself is the model's matter."""
    ids = inputs.get("input_ids", inputs.get("inputs_embeds"))
    if mask.ndim > 2 or ids is None or inputs.get("past_key_values") is not None:
        return mask
    if mask.shape != ids.shape[:2]:
        raise HooklineError(
            f"attention_mask has the shape {list(mask.shape)}, but the tokens are {list(ids.shape[:2])}"
        )
    return mask
