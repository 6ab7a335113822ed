"""The conversations that were tokenized, by their tokens: a forward pass has tokens only."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from functools import cached_property
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import numpy as np

from hookline.errors import HooklineError
from hookline.text.characters import ranges_in
from hookline.text.chats import Chat

_Value = TypeVar("_Value")


class Recent:
    """Values by key, the most recent ones only, for each tokenizer as long as it is there."""

    def __init__(self, most: int) -> None:
        self._most, self._lock = most, threading.Lock()
        self._values: WeakKeyDictionary[Any, dict[Hashable, Any]] = WeakKeyDictionary()

    def of(self, tokenizer: Any) -> dict[Any, Any]:
        """A copy of the values of a tokenizer, the oldest first."""
        with self._lock:
            return dict(self._values.get(tokenizer, {}))

    def get(self, tokenizer: Any, key: Hashable) -> Any:
        """The value of a key; None if there is none."""
        return self._values.get(tokenizer, {}).get(key)

    def put(self, tokenizer: Any, key: Hashable, value: Any) -> None:
        """Note a value, as the newest."""
        with self._lock:
            values = self._values.setdefault(tokenizer, {})
            values.pop(key, None)
            values[key] = value
            if len(values) > self._most:
                values.pop(next(iter(values)))

    def made(self, tokenizer: Any, key: Hashable, make: Callable[[], _Value]) -> _Value:
        """The value of a key, made once."""
        value: _Value | None = self.get(tokenizer, key)
        if value is None:
            value = make()
            self.put(tokenizer, key, value)
        return value


class KnownChat:
    """A conversation and its tokens."""

    def __init__(self, chat: Chat, ids: Sequence[int], tokenizer: Any) -> None:
        self.chat, self.ids, self._tokenizer = chat, tuple(ids), tokenizer

    @cached_property
    def owners(self) -> list[frozenset[int]]:
        """For each token the numbers of the messages that it shares a visible character with."""
        visible = [-1 if x.isspace() else owner for x, owner in zip(self.chat, self.chat.owners, strict=True)]
        ranges = ranges_in(self._tokenizer, self.chat, self.ids)
        return [frozenset(visible[start:stop]) - {-1} for start, stop in ranges]

    @cached_property
    def tokens_of(self) -> list[list[int]]:
        """The indices of the tokens of each message."""
        tokens: list[list[int]] = [[] for _ in self.chat.roles]
        for index, owners in enumerate(self.owners):
            for number in owners:
                tokens[number].append(index)
        return tokens

    def turns(self, count: int, *, is_answered: bool) -> list[tuple[str, list[int]]]:
        """The role and the tokens of each message that begins in the first `count` tokens.

        The last is the one that is being written, without tokens, if there is one.
        """
        chat = self.chat
        messages = [message["role"] for message in chat.messages]
        tokens = [[index for index in of_message if index < count] for of_message in self.tokens_of[: len(messages)]]
        if count < len(self.ids):
            while tokens and not tokens[-1]:
                tokens.pop()
        turns = list(zip(messages, tokens, strict=False))
        if self.is_open(is_answered=is_answered) and count >= len(self.ids):
            turns.append(("assistant", []))
        return turns

    def is_open(self, *, is_answered: bool) -> bool:
        """Whether the last turn is the one that is being written.

        A template may give the same text with and without the beginning of an answer: then it is if `is_answered`.
        """
        return self.chat.is_open or (is_answered and self._is_open_anyway)

    @cached_property
    def _is_open_anyway(self) -> bool:
        """Whether the template gives the same text with and without the beginning of an answer."""
        chat = self.chat
        try:
            return chat.templates.render(chat.messages, is_open=True) == chat
        except HooklineError:
            return False


_chats = Recent(1 << 14)
_sizes = Recent(1 << 14)
"""The lengths of their keys."""


def remember_chat(tokenizer: Any, ids: Sequence[int], chat: Chat) -> KnownChat:
    """Note the tokens of a conversation."""
    key = _key(ids)
    known: KnownChat | None = _chats.get(tokenizer, key)
    if known is None or not known.chat.is_like(chat):
        known = KnownChat(chat, ids, tokenizer)
    _chats.put(tokenizer, key, known)
    _sizes.put(tokenizer, len(key), len(key))
    return known


def exact_chat(tokenizer: Any, ids: Sequence[int]) -> KnownChat | None:
    """The conversation that these tokens are; None if there is none."""
    known: KnownChat | None = _chats.get(tokenizer, _key(ids))
    return known


def known_chat(tokenizer: Any, ids: Sequence[int]) -> KnownChat | None:
    """The conversation that these tokens are, begin with, or are the beginning of; None if there is none."""
    key = _key(ids)
    if (whole := _chats.get(tokenizer, key)) is not None:
        return whole
    sizes = sorted((size for size in _sizes.of(tokenizer) if size < len(key)), reverse=True)
    for size in sizes:
        if (prefix := _chats.get(tokenizer, key[:size])) is not None:
            return prefix
    longer = [known for other, known in _chats.of(tokenizer).items() if other.startswith(key)]
    return longer[-1] if longer else None


def _key(ids: Sequence[int]) -> bytes:
    return np.asarray(ids, dtype=np.int64).tobytes()
