"""From text to tokens and back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal
from weakref import ref

import torch
from jaxtyping import Int
from torch import Tensor

from hookline.errors import HooklineError, a_type
from hookline.text.chats import Chat, Templates, is_conversation
from hookline.text.known_chats import remember_chat

_FEW = 1024
"""Token ids that are checked on the host."""

Side = Literal["left", "right"]


class Text:
    """A tokenizer with padding and checks."""

    def __init__(self, tokenizer: Any, *, n_ctx: int | None, n_ids: int, processor: Any = None) -> None:
        self.tokenizer, self.n_ctx, self.n_ids = tokenizer, n_ctx, n_ids
        self.templates = Templates(tokenizer, processor)
        self._checked: tuple[Callable[[], Tensor | None], int] | None = None

    def encode(
        self, text: str | Sequence[str], *, prepend_bos: bool | None = None, padding_side: Side | None = None
    ) -> tuple[Int[Tensor, "batch pos"], Int[Tensor, "batch pos"]]:
        """Token ids and the mask that is 0 where a shorter prompt was padded."""
        check_no_mapping(text)
        text = self.prompts(text)
        texts = [text] if isinstance(text, str) else list(text)
        if not texts or not all(isinstance(prompt, str) and prompt for prompt in texts):
            raise HooklineError(f"a prompt must be a non-empty string, or a list of them, not {shown_prompt(text)}")
        rows = [self.ids(prompt, prepend_bos) for prompt in texts]
        _check_turns(texts, rows)
        width = max(map(len, rows))
        self.check_length(width)
        side: Side = padding_side or self._needed().padding_side
        if side not in ("left", "right"):
            raise HooklineError(f'padding_side must be "left" or "right", not {side!r}')
        return self.padded(rows, side)

    def ids(self, text: str, prepend_bos: bool | None) -> list[int]:
        """The token ids of one text."""
        tokenizer, is_chat = self._needed(), isinstance(text, Chat)
        if is_chat and prepend_bos:
            raise HooklineError("prepend_bos=True, but the chat template writes the special tokens of messages")
        ids = list(tokenizer(text, add_special_tokens=prepend_bos is None and not is_chat)["input_ids"])
        if prepend_bos:
            if tokenizer.bos_token_id is None:
                raise HooklineError("prepend_bos=True, but this tokenizer has no beginning-of-sequence token")
            ids = [tokenizer.bos_token_id, *ids]
        if not ids:
            raise HooklineError(f"the prompt {text!r} has no tokens")
        if isinstance(text, Chat):
            remember_chat(tokenizer, ids, text)
        return ids

    def prompts(self, prompt: Any, *, is_open: bool = False) -> Any:
        """A prompt, or several, with conversations as the text that the chat template makes of them."""
        if is_conversation(prompt) or (isinstance(prompt, list | tuple) and any(map(is_conversation, prompt))):
            self._needed()
        return self.templates.prompts(prompt, is_open=is_open)

    def padded(self, rows: list[list[int]], side: Side) -> tuple[Int[Tensor, "batch pos"], Int[Tensor, "batch pos"]]:
        """Rows of token ids as one tensor, and its mask."""
        width = max(map(len, rows))
        ids = torch.full((len(rows), width), self._pad_id(rows), dtype=torch.long)
        mask = torch.zeros_like(ids)
        for index, row in enumerate(rows):
            where = slice(width - len(row), None) if side == "left" else slice(None, len(row))
            ids[index, where], mask[index, where] = torch.tensor(row), 1
        return ids, mask

    def _pad_id(self, rows: list[list[int]]) -> int:
        tokenizer = self._needed()
        for token in (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.bos_token_id):
            if token is not None:
                return token
        return rows[0][0]  # any token will do: the mask hides it

    def is_padded(self, ids: Tensor, mask: Tensor) -> bool:
        """Whether all positions that the mask hides still have the padding token."""
        return bool((ids.cpu()[mask.cpu() == 0] == self._pad_id(ids.tolist())).all())

    def padded_row(self, ids: Tensor) -> int | None:
        """The first row that looks padded: unlike others, it ends in padding tokens, or begins with several."""
        pad = self.tokenizer.pad_token_id
        if pad is None:
            return None
        is_pad = ids.cpu() == pad
        suspects = is_pad[:, -1] if not bool(is_pad[:, -1].all()) else torch.zeros(len(ids), dtype=torch.bool)
        if ids.shape[1] > 1:
            begins = is_pad[:, :2].all(1)
            suspects = suspects | (begins if not bool(begins.all()) else torch.zeros_like(begins))
        return int(suspects.nonzero()[0]) if bool(suspects.any()) else None

    def check_length(self, length: int) -> None:
        """Raise an error if a prompt is empty or longer than the model's context."""
        if length == 0:
            raise HooklineError("the prompt is empty: pass at least one token")
        if self.n_ctx is not None and length > self.n_ctx:
            raise HooklineError(f"the prompt has {length} tokens, but this model's context is {self.n_ctx}")

    def check_ids(self, ids: Tensor) -> None:
        """Raise an error if an id is not in the model's embedding. The same tensor as last time is checked once."""
        if self._checked is not None and self._checked[0]() is ids and self._checked[1] == version(ids):
            return
        if ids.dtype not in (torch.int64, torch.int32, torch.int16, torch.uint8):
            raise HooklineError(f"token ids must be integers, not {ids.dtype}")
        self.check_length(ids.shape[-1])
        if ids.numel() <= _FEW:  # one copy from the device, and no kernel
            few = ids.flatten().tolist()
            low, high = min(few, default=0), max(few, default=0)
        else:
            low, high = torch.stack(torch.aminmax(ids)).tolist()  # one device synchronization, not two
        if low < 0 or high >= self.n_ids:
            raise HooklineError(
                f"token {low if low < 0 else high} is out of range: this model has 0 to {self.n_ids - 1}"
            )
        self._checked = None if (now := version(ids)) is None else (ref(ids), now)

    def decode(self, ids: Any) -> str:
        """The text of a row of ids. A tokenizer would leave out ids that it does not have."""
        tokenizer = self._needed()
        tokens = ids.flatten().tolist() if isinstance(ids, Tensor) else [ids] if isinstance(ids, int) else ids
        for token in tokens:
            if isinstance(token, float):
                raise HooklineError(f"token ids must be integers, not {token!r}")
            if isinstance(token, int) and not 0 <= token < self.n_ids and not 0 <= token < len(tokenizer):
                raise HooklineError(f"token {token} is out of range: this model has 0 to {self.n_ids - 1}")
        return tokenizer.decode(ids)

    def single(self, text: str) -> int:
        """The id of a text that is a single token."""
        return single_token(self._needed(), text)

    def _needed(self) -> Any:
        if self.tokenizer is None:
            raise HooklineError(
                "this model was wrapped without a tokenizer: pass token ids, or wrap it as "
                "hookline.hook(model, tokenizer)"
            )
        return self.tokenizer


def _check_turns(texts: Sequence[str], rows: Sequence[list[int]]) -> None:
    """Raise an error if conversations with other turns have the same tokens, by which their turns are known."""
    chats = dict[tuple[int, ...], tuple[int, Chat]]()
    for number, (text, ids) in enumerate(zip(texts, rows, strict=True)):
        if isinstance(text, Chat):
            other, chat = chats.setdefault(tuple(ids), (number, text))
            if not chat.is_like(text):
                raise HooklineError(
                    f"conversations {other} and {number} have other turns, but the chat template makes the same text "
                    f"of them, as if a content had the template's own markers in it: run them separately"
                )


def version(x: Tensor) -> int | None:
    """How often `x` was written to; None where torch does not count."""
    return None if x.is_inference() else x._version


def check_no_mapping(prompt: Any) -> None:
    """Raise an error if keyword inputs were passed as the prompt."""
    if not isinstance(prompt, Tensor) and isinstance(prompt, Mapping) and "role" in prompt:
        raise HooklineError("a conversation is a list of messages: put this message into a list")
    if not isinstance(prompt, Tensor) and isinstance(prompt, Mapping):
        raise HooklineError(
            f"these are keyword inputs ({', '.join(map(str, prompt))}), so pass them by keyword: model(**inputs), "
            "model.run_with_cache(**inputs), model.generate(**inputs)"
        )


def shown_prompt(prompt: Any) -> str:
    """A wrong prompt, as an error message shows it: text in full, anything else by its type."""
    if isinstance(prompt, list | tuple) and not all(isinstance(element, str) for element in prompt):
        return f"{a_type(prompt)} of {', '.join(dict.fromkeys(type(element).__name__ for element in prompt))}"
    return repr(prompt) if isinstance(prompt, str | int | float | list | tuple | None) else a_type(prompt)


def single_token(tokenizer: Any, text: str) -> int:
    """The id of a text that is a single token; an error that shows the tokens otherwise."""
    if tokenizer is None:
        raise HooklineError(f"the token {text!r} cannot be found without a tokenizer: pass its id")
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    if len(ids) != 1:
        raise HooklineError(
            f"{text!r} is {len(ids)} tokens, not one: {[tokenizer.decode([token_id]) for token_id in ids]}"
        )
    return int(ids[0])
