"""The keyword inputs of a model, made from text, token ids, images, or keyword inputs that were given."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch import Tensor, nn

from hookline.engine import compiling
from hookline.errors import HooklineError, warn
from hookline.functions.signatures import parameters_of
from hookline.text.ragged import warn_of_ragged
from hookline.text.token_methods import TokenHelpers
from hookline.text.tokenizer import Side, shown_prompt
from hookline.transformer.cfg import cfg_of, device_of
from hookline.transformer.index import ModelPoints
from hookline.transformer.losses import image_positions
from hookline.transformer.wrapped import WrappedTransformer


class CheckedTokens:
    """Token ids that were checked for a model: the same tensor is not checked again in the next run."""

    def __init__(self, tokens: Tensor, embed: nn.Embedding, is_in_place: Callable[[], bool]) -> None:
        self._tokens, self._version, self._is_in_place = ref(tokens), tokens._version, is_in_place
        self._embed, self._sizes, self._device = embed, embed.weight.shape, tokens.device
        self._shape = tokens.shape  # `tokens.data = …` counts as no write

    def are(self, tokens: Tensor) -> bool:
        """Whether it is that tensor, nobody wrote to it, and the model has the same embedding, on the same device."""
        is_same = self._tokens() is tokens and self._version == tokens._version and self._shape == tokens.shape
        if not is_same or not self._is_in_place():
            return False
        weight = self._embed._parameters["weight"]
        return weight is not None and weight.shape == self._sizes and weight.device == self._device


class ModelInputs(WrappedTransformer, TokenHelpers):
    """Builds the keyword inputs of a model. A base of `HookedModel`, which adds what images need."""

    tokenizer: Any

    @property
    def device(self) -> torch.device:
        """The device that the model takes tokens on, also if its weights are offloaded."""
        return device_of(self.module, self.anatomy)

    if TYPE_CHECKING:  # from `vision.image_methods`

        def _check_prompt(self, prompt: Any) -> None: ...

        def _are_pixels(self, prompt: Any) -> bool: ...

        def _with_images(
            self,
            prompt: Any,
            images: Any,
            prepend_bos: bool | None,
            padding_side: Side | None,
            keywords: dict[str, Any],
        ) -> Any: ...

        def _remember(self, inputs: Mapping[str, Any]) -> None: ...

        def _read(self, prompt: Any, images: Any, *, is_open: bool = False) -> tuple[Any, Any]: ...

    @compiling.outside_compiler
    def _prepared(
        self,
        input: Any,
        keywords: dict[str, Any],
        attention_mask: Tensor | None = None,
        prepend_bos: bool | None = None,
        padding_side: Side | None = None,
        images: Any = None,
    ) -> dict[str, Any]:
        """The keyword inputs of the model, from a prompt, its images, and keyword inputs that were given."""
        is_alone = not keywords and attention_mask is None and prepend_bos is None and padding_side is None
        is_tokens = is_alone and images is None and type(input) is Tensor
        if is_tokens and (checked := vars(self).get("_checked_tokens")) is not None and checked.are(input):
            return {"input_ids": input}
        if input is None and images is None and not keywords:
            raise HooklineError("no input was given: pass text or token ids, or keyword inputs such as input_ids=…")
        if self._are_pixels(input):
            if "pixel_values" in keywords:
                raise HooklineError("the images were given twice: as the input and as pixel_values")
            with_pixels = {**keywords, "pixel_values": input.to(self.device)}
            return self._prepared(None, with_pixels, attention_mask, prepend_bos, padding_side, images)
        inputs = dict(keywords)
        prompt, images = self._read(input, images)
        has_text = images is not None or not (prompt is None or isinstance(prompt, Tensor))
        if not has_text and (prepend_bos is not None or padding_side is not None):
            raise HooklineError("prepend_bos and padding_side apply to text, and no text was given")
        if images is not None:
            if attention_mask is not None:
                raise HooklineError("images come with their own attention_mask: leave attention_mask out")
            inputs |= self._with_images(prompt, images, prepend_bos, padding_side, keywords)
        elif prompt is not None:
            if "input_ids" in keywords:
                raise HooklineError("the tokens were given twice: as the input and as input_ids")
            ids, mask = self._inputs(prompt, prepend_bos, padding_side, has_mask=attention_mask is not None)
            inputs["input_ids"] = ids
            if attention_mask is None:
                inputs |= {} if "position_ids" in keywords else self._positions(mask)
                attention_mask = mask
        if attention_mask is not None:
            inputs["attention_mask"] = attention_mask
        if inputs.get("attention_mask") is not None:
            inputs["attention_mask"] = checked_mask(inputs["attention_mask"], inputs, self._points)
        self._remember(inputs)
        if is_tokens and len(inputs) == 1 and inputs["input_ids"] is input:
            vars(self)["_checked_tokens"] = self._checked_now(input)
        return inputs

    def _checked_now(self, tokens: Tensor) -> CheckedTokens | None:
        """A note that these tokens were checked; None if it could not be seen that they, or the model, changed."""
        embed = self.anatomy.main.embed
        if tokens.is_inference() or type(embed) is not nn.Embedding or (len(tokens) > 1 and self.tokenizer is not None):
            return None
        return CheckedTokens(tokens, embed, self._points.lineage([embed]).is_same)

    def _warn_if_ragged(self, input: Any, mask: Tensor | None) -> None:
        if mask is not None and input is not None and not isinstance(input, Tensor):
            warn_of_ragged(mask, is_causal=self.anatomy.main.name != "encoder")

    @compiling.outside_compiler
    def _inputs(
        self,
        input: str | Sequence[str] | Tensor,
        prepend_bos: bool | None,
        padding_side: Side | None,
        *,
        has_mask: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Token ids and the attention mask of a prompt, on the model's device; no mask if nothing is padded."""
        prompt = input if isinstance(input, str | Tensor) else self.text.prompts(input)
        self._check_prompt(prompt)
        if isinstance(prompt, Tensor):
            ids, mask = self._checked_ids(prompt, has_mask=has_mask)
        elif not isinstance(prompt, str | Sequence):
            raise HooklineError(f"the input must be text, texts or a tensor of token ids, not {shown_prompt(prompt)}")
        elif not isinstance(prompt, str) and any(
            isinstance(part, int | Sequence) and not isinstance(part, str) for part in prompt
        ):
            raise HooklineError(f"token ids must be a tensor, torch.tensor(…), not a list: {prompt!r}")
        else:
            ids, mask = self.text.encode(prompt, prepend_bos=prepend_bos, padding_side=padding_side)
            mask = None if mask.all() else mask
        return ids.to(self.device), mask.to(self.device) if mask is not None else None

    def _checked_ids(self, tokens: Tensor, *, has_mask: bool) -> tuple[Tensor, Tensor | None]:
        """Rows of token ids, and the mask that `to_tokens` attached to them, unless they were changed since."""
        ids = tokens[None] if tokens.ndim == 1 else tokens
        if ids.ndim != 2:
            raise HooklineError(f"tokens must be one row or a batch of rows, not of shape {tuple(tokens.shape)}")
        self.text.check_ids(ids)
        mask: Tensor | None = getattr(ids, "padding_mask", None)
        if mask is not None and self.text.is_padded(ids, mask):
            return ids, mask
        row = self.text.padded_row(ids) if not has_mask and len(ids) > 1 and self.tokenizer is not None else None
        if row is not None:
            warn(
                f"row {row} of these tokens looks padded, but there is no attention_mask: pass one, or pass the texts. "
                f"(Tokens returned by to_tokens carry their mask; tensors computed from them do not.)",
            )
        return ids, None

    def _text_inputs(self, prompt: Any, prepend_bos: bool | None, padding_side: Side | None) -> dict[str, Any]:
        ids, mask = self._inputs(prompt, prepend_bos, padding_side)
        inputs = {"input_ids": ids, "attention_mask": mask if mask is not None else torch.ones_like(ids)}
        return inputs | self._positions(mask)

    def _positions(self, mask: Tensor | None) -> dict[str, Tensor]:
        """Position ids that start at the first token of left-padded text, if the model takes position ids."""
        if mask is None or mask[:, 0].all() or "position_ids" not in parameters_of(self._points.root)[0]:
            return {}
        return {"position_ids": (mask.cumsum(1) - 1).clamp(min=0)}

    def _decoder_inputs(self, decoder_input: Any, inputs: dict[str, Any]) -> dict[str, Any]:
        """The inputs of the decoder, if the model has one; its start token by default."""
        if not self.anatomy.is_encoder_decoder:
            if decoder_input is not None:
                raise HooklineError("decoder_input needs an encoder-decoder model, and this model is not one")
            return {}
        if decoder_input is not None:
            if "decoder_input_ids" in inputs:
                raise HooklineError("the decoder's tokens were given twice: as decoder_input and as decoder_input_ids")
            ids, mask = self._inputs(decoder_input, None, None)
            return {"decoder_input_ids": ids, **({} if mask is None else {"decoder_attention_mask": mask})}
        if any(name in inputs for name in ("decoder_input_ids", "decoder_inputs_embeds", "labels")):
            return {}
        rows = next((x.shape[0] for x in inputs.values() if isinstance(x, Tensor)), 1)
        configs = (self.module.config, self.module.generation_config)
        starts = (getattr(config, "decoder_start_token_id", None) for config in configs)
        start = next((token_id for token_id in starts if token_id is not None), None)
        if start is None:
            raise HooklineError("pass decoder_input: the config of this model has no decoder_start_token_id")
        return {"decoder_input_ids": torch.full((rows, 1), start, device=self.device)}

    def _image_positions(self, tokens: Tensor) -> Tensor | None:
        return image_positions(self._points, tokens)

    def _check_room(self, length: int) -> None:
        """Raise if a text of this length exceeds the learned position embeddings."""
        n_ctx = cfg_of(self.module, self.anatomy).n_ctx
        if self.anatomy.main.pos_embed is not None and n_ctx is not None and length > n_ctx:
            raise HooklineError(f"the prompt and the new tokens are {length} tokens, but the context is {n_ctx}")

    def _for_plan(self, input: Any) -> Any:
        if input is None or isinstance(input, dict):
            return input
        if self._are_pixels(input):
            return {"pixel_values": input}
        inputs = self._text_inputs(input, None, None)
        return inputs | self._decoder_inputs(None, inputs)


def checked_mask(mask: Tensor, inputs: dict[str, Any], points: ModelPoints) -> Tensor:
    """The mask; raises if it is over tokens and does not have their shape. Masks with more axes are the model's."""
    ids = inputs.get("input_ids", inputs.get("inputs_embeds"))
    if mask.ndim > 2 or ids is None or inputs.get("past_key_values") is not None or mask.shape == ids.shape[:2]:
        return mask
    rows = len(mask) * (getattr(points.anatomy.config, "num_codebooks", None) or 1)  # MusicGen has a row for each
    if ids.ndim == 2 and mask.ndim == 2 and ids.shape == (rows, mask.shape[1]):
        return mask
    raise HooklineError(f"attention_mask has the shape {list(mask.shape)}, but the tokens are {list(ids.shape[:2])}")
