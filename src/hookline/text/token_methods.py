"""Methods of a model for its tokens: from text, back to text, and the position of a token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from jaxtyping import Int
from torch import Tensor

from hookline.errors import HooklineError
from hookline.text.tokenizer import Side, Text


class TokenHelpers:
    """Text and tokens of a language model: a mixin that needs the model's `text` and `device`."""

    @property
    def text(self) -> Text:
        """The model's tokenizer, with its checks."""
        raise NotImplementedError

    @property
    def device(self) -> torch.device:
        """The device that the model takes tokens on."""
        raise NotImplementedError

    def to_tokens(
        self, text: str | Sequence[str], *, prepend_bos: bool | None = None, padding_side: Side | None = None
    ) -> Int[Tensor, "batch pos"]:
        """Token ids of one prompt or several, padded to one length, on the model's device.

            >>> model.to_tokens("The capital of France is")
            tensor([[410, 718, 799, 541, 765]])

        By default the tokenizer adds the special tokens that it adds by itself (for many models a BOS token, for GPT-2
        none); `prepend_bos=True` puts the BOS token before each text instead, False adds nothing. `padding_side`
        defaults to the tokenizer's.
        The returned tensor itself remembers its padding, which is masked when the model runs on it; a tensor derived
        from it needs an `attention_mask`.
        """
        ids, mask = self.text.encode(text, prepend_bos=prepend_bos, padding_side=padding_side)
        ids = ids.to(self.device)
        if not mask.all():
            ids.padding_mask = mask  # type: ignore[attr-defined]
        return ids

    def to_string(self, tokens: Any) -> Any:
        """The text of a row of ids, or a list of texts for several rows.

        Examples:
            >>> model.to_string(model.to_tokens("Hello, world!")[0])
            'Hello, world!'
        """
        if isinstance(tokens, Tensor) and tokens.ndim == 2:
            return [self.text.decode(row) for row in tokens]
        return self.text.decode(tokens)

    def to_str_tokens(self, input: str | Sequence[str] | Tensor, *, prepend_bos: bool | None = None) -> Any:
        """Each token of a prompt as text; for several prompts, a list of such lists.

        Examples:
            >>> model.to_str_tokens("The capital of France is")
            ['The', ' capital', ' of', ' France', ' is']
        """
        prompt = self.text.prompts(input)
        if not isinstance(prompt, str | Tensor):
            return [self.to_str_tokens(text, prepend_bos=prepend_bos) for text in prompt]
        ids = self.to_tokens(prompt, prepend_bos=prepend_bos)[0] if isinstance(prompt, str) else prompt.reshape(-1)
        return [self.text.decode([token]) for token in ids.tolist()]

    def to_single_token(self, text: str) -> int:
        """The id of a text that is a single token; an error that shows the tokens otherwise."""
        return self.text.single(text)

    def get_token_position(
        self, token: str | int, input: str | Tensor, *, mode: Literal["first", "last"] = "first"
    ) -> int:
        """The position of a token in a prompt.

        Examples:
            >>> model.get_token_position(" France", "The capital of France is")
            3
        """
        token_id = self.to_single_token(token) if isinstance(token, str) else token
        ids = (input.reshape(-1) if isinstance(input, Tensor) else self.to_tokens(input)[0]).tolist()
        if token_id not in ids:
            raise HooklineError(f"the token {token!r} is not in the prompt {self.to_str_tokens(input)}")
        return ids.index(token_id) if mode == "first" else len(ids) - 1 - ids[::-1].index(token_id)
