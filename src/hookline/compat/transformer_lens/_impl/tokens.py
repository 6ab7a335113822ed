"""Text and tokens with the defaults of TransformerLens: BOS is prepended by default."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from hookline.compat.transformer_lens._impl.lens_errors import LensAssertionError
from hookline.errors import HooklineError, warn
from hookline.text.chats import Chat
from hookline.text.tokenizer import Side, Text

USE_DEFAULT_VALUE = None
"""The default of `prepend_bos` and `padding_side`: the model's own."""


def prepared(tokenizer: Any, padding_side: Side | None) -> Any:
    """The tokenizer with all required special tokens and this padding side; a copy if it had to be changed."""
    if padding_side not in ("left", "right", None):
        raise HooklineError(f'default_padding_side must be "left" or "right", not {padding_side!r}')
    missing = [name for name in ("eos_token", "bos_token", "pad_token") if getattr(tokenizer, name) is None]
    if not missing and padding_side in (None, tokenizer.padding_side):
        return tokenizer
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.padding_side = padding_side or tokenizer.padding_side
    for name in missing:
        setattr(tokenizer, name, tokenizer.eos_token if name != "eos_token" else "<|endoftext|>")
    return tokenizer


def get_attention_mask(
    tokenizer: Any, tokens: Int[Tensor, "batch pos"], prepend_bos: bool, side: Side | None = None
) -> Int[Tensor, "batch pos"]:
    """A mask that is 0 at leading or trailing padding, on that side or the tokenizer's.

    If BOS is also the padding token, the last one on the left is BOS.
    """
    is_pad = (tokens == tokenizer.pad_token_id).long()
    if (side or tokenizer.padding_side) == "right":
        return 1 - is_pad.flip(1).cumprod(1).flip(1)
    begins = is_pad.cumprod(1)
    if prepend_bos and tokenizer.pad_token_id == tokenizer.bos_token_id:
        begins = begins * (begins.sum(1, keepdim=True) - begins.cumsum(1) > 0)
    return 1 - begins


def get_tokens_with_bos_removed(tokenizer: Any, tokens: Int[Tensor, "batch pos"]) -> Int[Tensor, "batch pos-1"]:
    """The tokens without the BOS token of each row, which follows the padding on the left if there is any."""
    if tokenizer.padding_side == "right":
        return tokens[..., 1:]
    rows = tokens.reshape(-1, tokens.shape[-1])
    first = (get_attention_mask(tokenizer, rows, prepend_bos=True, side="left") != 0).long().argmax(1)
    mask = torch.arange(rows.shape[1], device=tokens.device) != first[:, None]
    return rows[mask].reshape(*tokens.shape[:-1], -1)


def get_input_with_manually_prepended_bos(bos_token: str, input: str | list[str]) -> str | list[str]:
    """The text or texts with this BOS token before each."""
    return bos_token + input if isinstance(input, str) else [bos_token + text for text in input]


class LensText(Text):
    """A tokenizer that prepends BOS by default, and accepts empty text."""

    def __init__(self, tokenizer: Any, cfg: Any) -> None:
        super().__init__(tokenizer, n_ctx=cfg.n_ctx, n_ids=cfg.d_vocab)
        self.cfg = cfg

    def encode(
        self,
        text: str | Sequence[str],
        *,
        prepend_bos: bool | None = None,
        padding_side: Side | None = None,
        truncate: bool = True,
    ) -> tuple[Int[Tensor, "batch pos"], Int[Tensor, "batch pos"]]:
        """Token ids and their mask. Text longer than the context is truncated with a warning."""
        text = self.prompts(text)
        texts = [text] if isinstance(text, str) else list(text)
        if not texts or not all(isinstance(prompt, str) for prompt in texts):
            raise HooklineError(f"a prompt must be a string, or a list of strings, not {text!r}")
        side: Side = padding_side or self._needed().padding_side
        if side not in ("left", "right"):
            raise HooklineError(f'padding_side must be "left" or "right", not {side!r}')
        rows = [self.ids(prompt, prepend_bos) for prompt in texts]
        rows = [self._cut(row) for row in rows] if truncate else rows
        return self.padded(rows, side)

    def ids(self, text: str, prepend_bos: bool | None) -> list[int]:
        """The token ids of one text, after BOS by default."""
        by_default = None if isinstance(text, Chat) else self.cfg.default_prepend_bos
        return super().ids(text, by_default if prepend_bos is None else prepend_bos)

    def _needed(self) -> Any:
        if self.tokenizer is None:
            raise LensAssertionError(
                "this model has no tokenizer: pass token ids, or call model.set_tokenizer(tokenizer)"
            )
        return self.tokenizer

    def _cut(self, row: list[int]) -> list[int]:
        if self.n_ctx is None or len(row) <= self.n_ctx:
            return row
        message = f"a prompt of {len(row)} tokens was truncated to the context length of {self.n_ctx}"
        warn(message)
        return row[: self.n_ctx]


class LensTokens:
    """The token helpers of a HookedTransformer. A mixin: it needs the model's `text` and `cfg`."""

    text: Any
    tokenizer: Any
    cfg: Any

    def to_tokens(
        self,
        input: str | Sequence[str],
        prepend_bos: bool | None = USE_DEFAULT_VALUE,
        padding_side: Side | None = USE_DEFAULT_VALUE,
        move_to_device: bool = True,
        truncate: bool = True,
    ) -> Int[Tensor, "batch pos"]:
        """Token ids of one prompt or several, padded to one length. The tensor remembers its padding."""
        ids, mask = self.text.encode(input, prepend_bos=prepend_bos, padding_side=padding_side, truncate=truncate)
        ids = ids.to(self.cfg.device) if move_to_device else ids
        if not mask.all():
            ids.padding_mask = mask
        return ids

    def to_string(self, tokens: Any) -> Any:
        """The text of a row of ids, or of each row."""
        ids = tokens if isinstance(tokens, Tensor) else torch.as_tensor(np.array(tokens))
        if ids.ndim > 2:
            raise LensAssertionError(f"tokens must be one row or several, not a tensor of shape {list(ids.shape)}")
        if ids.ndim == 2:
            return [self.text.decode(row.tolist()) for row in ids]
        return self.text.decode(ids.reshape(-1).tolist())

    def to_str_tokens(
        self,
        input: str | Sequence[str] | Tensor | np.ndarray,
        prepend_bos: bool | None = USE_DEFAULT_VALUE,
        padding_side: Side | None = USE_DEFAULT_VALUE,
    ) -> Any:
        """The tokens of a prompt as text; one list per prompt."""
        if not isinstance(input, str | Tensor | np.ndarray):
            return [self.to_str_tokens(prompt, prepend_bos, padding_side) for prompt in input]
        tokens: Any = self.to_tokens(input, prepend_bos, padding_side)[0] if isinstance(input, str) else input
        ids = torch.as_tensor(tokens).squeeze()
        if ids.ndim > 1:
            raise LensAssertionError(f"to_str_tokens takes one row of tokens, not a tensor of shape {list(ids.shape)}")
        return [self.text.decode([token]) for token in ids.reshape(-1).tolist()]

    def to_single_token(self, string: str) -> int:
        """The id of a single-token text; raises if it is several tokens."""
        try:
            return self.text.single(string)
        except HooklineError as error:
            raise LensAssertionError(str(error)) from None

    def to_single_str_token(self, int_token: int) -> str:
        """The text of one token."""
        return self.text.decode([int(int_token)])

    def get_token_position(
        self,
        single_token: str | int | Tensor,
        input: str | Tensor,
        mode: str = "first",
        prepend_bos: bool | None = USE_DEFAULT_VALUE,
        padding_side: Side | None = USE_DEFAULT_VALUE,
    ) -> int:
        """The first or last position of a token in a prompt."""
        if mode not in ("first", "last"):
            raise HooklineError(f'mode must be "first" or "last", not {mode!r}')
        ids = self.to_tokens(input, prepend_bos, padding_side) if isinstance(input, str) else input
        if ids.ndim == 2 and len(ids) != 1:
            raise LensAssertionError(f"the prompt must be one row of tokens, not a tensor of shape {list(ids.shape)}")
        token_id = self.to_single_token(single_token) if isinstance(single_token, str) else int(single_token)
        places = (ids.reshape(-1) == token_id).nonzero().flatten().tolist()
        if not places:
            raise LensAssertionError(f"the token {single_token!r} is not in the prompt {self.to_str_tokens(ids)}")
        return places[0 if mode == "first" else -1]
