"""Positions by what is written there: the turns of a conversation, words, and sentences.

What they cover depends on the tokens of the text only, so that it is the same in a forward pass over the whole text and
in a generation with a cache, where each position has the text up to it.
"""

from __future__ import annotations

import re
import threading
from bisect import bisect_left
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

import torch

from hookline.errors import HooklineError, how_many
from hookline.text.characters import Characters, characters_of, decoded
from hookline.text.forward_pass import ForwardPass, Span, tokenizers
from hookline.text.known_chats import KnownChat, Recent, known_chat
from hookline.text.parsed_chats import parsed_chat
from hookline.text.token_positions import Lacking, Mask, Meaning, text_so_far, whole_number
from hookline.text.tokenizer import version

_SENTENCE = re.compile(r"""\S.*?(?:[.?!]+["'”’)\]]*(?=\s|\Z)|\Z)""", re.DOTALL)


class _Latest(threading.local):
    """What was found in the current forward pass: every point of the model asks for the same."""

    def __init__(self) -> None:
        self.text: ForwardPass | None = None
        self.rows: dict[Hashable, list[_Row]] = {}

    def of(self, text: ForwardPass) -> dict[Hashable, list[_Row]]:
        """What was found in a pass."""
        if self.text is not text:
            self.text, self.rows = text, {}
        return self.rows


_latest = _Latest()


class Prompt(NamedTuple):
    """Which of the tokens of a text are the prompt."""

    length: int
    is_answered: bool
    """Whether a generation continues it."""


class _Row(NamedTuple):
    """One row of the text so far."""

    columns: list[int]
    """Those that are not padding."""
    ids: tuple[int, ...]
    prompt: Prompt
    covered: dict[int, frozenset[int]]
    """The indices of the tokens that are covered, in the text up to a column."""


@dataclass(frozen=True)
class TextMeaning(Meaning):
    """Positions that are found in the tokens of each text."""

    @property
    def counts_from_the_end(self) -> bool:
        """Whether a position may be covered or not as the text goes on."""
        return True

    def places(self, tokenizer: Any, ids: tuple[int, ...], prompt: Prompt) -> list[range | list[int]]:
        """The indices of the tokens at each place that is meant, whichever is selected.

        The tokens after the prompt are being written.
        """
        raise NotImplementedError

    def number(self) -> int | None:
        """Which of the places is selected; None for all."""
        raise NotImplementedError

    def covered(self, tokenizer: Any, ids: tuple[int, ...], prompt: Prompt) -> frozenset[int]:
        """The indices of the tokens that are covered."""
        places, number = self.places(tokenizer, ids, prompt), self.number()
        if number is not None:
            places = [places[number]] if number in range(-len(places), len(places)) else []
        return frozenset(index for place in places for index in place)

    def mask(self, text: ForwardPass, span: Span) -> Mask:
        """True at the columns of this pass that are covered."""
        start, ends = span.positions.start, self._ends(text, span)
        mask = torch.zeros(span.rows, len(ends), dtype=torch.bool)
        for number, row in enumerate(self._rows(text, span)):
            for end, covered in row.covered.items():
                columns = [row.columns[index] for index in covered if row.columns[index] in span.positions]
                mask[number, [column - start for column in columns if ends[column - start] == end]] = True
        return mask

    def lacking(self, text: ForwardPass, span: Span) -> Lacking:
        """The rows that have no such position so far."""
        tokenizer = tokenizer_of(text, self)
        return {
            (number, 0): f"{self!r} in row {number}{self.hint(tokenizer, row.ids, row.prompt)}"
            for number, row in enumerate(self._rows(text, span))
            if not any(row.covered.values())
        }

    def _ends(self, text: ForwardPass, span: Span) -> list[int]:
        return text.ends(span) if self.counts_from_the_end else [span.width] * len(span.positions)

    def _rows(self, text: ForwardPass, span: Span) -> list[_Row]:
        rows, key = _latest.of(text), (self, span.positions, None if span.tokens is None else version(span.tokens))
        if key not in rows or key[-1] is None:
            tokenizer, ends = tokenizer_of(text, self), set(self._ends(text, span))
            stop = text.prompt if text.generation is None else text.generation.prompt
            is_answered = text.generation is not None
            rows[key] = [
                self._row(tokenizer, columns, ids, Prompt(bisect_left(columns, stop or span.width), is_answered), ends)
                for columns, ids in _texts_in(self, text, span)
            ]
        return rows[key]

    def _row(self, tokenizer: Any, columns: list[int], ids: tuple[int, ...], prompt: Prompt, ends: set[int]) -> _Row:
        lengths = {end: bisect_left(columns, end) for end in ends}
        covered = {end: self.covered(tokenizer, ids[:length], prompt) for end, length in lengths.items()}
        return _Row(columns, ids, prompt, covered)

    def hint(self, tokenizer: Any, ids: tuple[int, ...], prompt: Prompt) -> str:
        """What the row has instead, for a message."""
        places = self.places(tokenizer, ids, prompt)
        return f", which has {how_many(len(places), 'such place')}" if places else ""


def tokenizer_of(text: ForwardPass, what: object) -> Any:
    """The tokenizer of the model that runs."""
    model = text.model()
    tokenizer = tokenizers.get(model) if model is not None else None
    if tokenizer is None:
        raise HooklineError(f"{what!r} needs a tokenizer: wrap the model as hookline.hook(model, tokenizer)")
    return tokenizer


def _texts_in(what: Meaning, text: ForwardPass, span: Span) -> list[tuple[list[int], tuple[int, ...]]]:
    """Each row of the text so far: the columns that are not padding, and their tokens."""
    whole = text_so_far(what, text, span, is_partly_known=True)
    rows = []
    for ids, real in zip(whole.tolist(), span.real().tolist(), strict=True):
        columns = [column for column, is_real in enumerate(real) if is_real]
        rows.append((columns, tuple(ids[column] for column in columns)))
    return rows


@dataclass(frozen=True)
class TurnMeaning(TextMeaning):
    """The content of the messages of a role, or of one of them."""

    role: str
    k: int | None = None

    @property
    def counts_from_the_end(self) -> bool:
        """No: the number of turns is known from the beginning."""
        return False

    def number(self) -> int | None:
        """Which of the messages of the role."""
        return self.k

    def places(self, tokenizer: Any, ids: tuple[int, ...], prompt: Prompt) -> list[range | list[int]]:
        """The tokens of each message of the role, in order."""
        turns = turns_of(tokenizer, ids, prompt)
        return [[index for index in tokens if index < len(ids)] for role, tokens in turns if role == self.role]

    def is_being_written(self, text: ForwardPass) -> list[bool]:
        """For each row of a generation, whether the turn that is being written is covered."""
        generation, tokenizer = text.generation, tokenizer_of(text, self)
        if self.role != "assistant" or generation is None or generation.tokens is None or generation.mask is None:
            return [False] * text.span.rows
        flags = []
        for ids, real in zip(generation.tokens, generation.mask.bool(), strict=True):
            prompt = tuple(ids[real].tolist())
            known = chat_of(tokenizer, prompt)
            count = sum(role == self.role for role, _ in known.turns(len(prompt), is_answered=True))
            flags.append(known.is_open(is_answered=True) and self.k in (None, -1, count - 1))
        return flags

    def hint(self, tokenizer: Any, ids: tuple[int, ...], prompt: Prompt) -> str:
        """The turns that the row has."""
        return ", whose turns are: " + ", ".join(repr(role) for role, _ in turns_of(tokenizer, ids, prompt))

    def __repr__(self) -> str:
        return f"turn({self.role!r})" if self.k is None else f"turn({self.role!r}, {self.k})"


def turns_of(tokenizer: Any, ids: tuple[int, ...], prompt: Prompt) -> list[tuple[str, list[int]]]:
    """The role and the tokens of each turn; the last may be the one that is being written."""
    known = chat_of(tokenizer, ids[: prompt.length])
    is_answered = prompt.is_answered or len(ids) > len(known.ids)
    turns = known.turns(prompt.length, is_answered=is_answered)
    if known.is_open(is_answered=is_answered) and prompt.length >= len(known.ids):
        new = range(len(known.ids), len(ids))
        turns[-1] = ("assistant", [index for index in new if is_written(tokenizer, ids[index])])
    return turns


def chat_of(tokenizer: Any, ids: Sequence[int]) -> KnownChat:
    """The conversation that a prompt is, or begins with."""
    known = found_chat(tokenizer, ids)
    if known is None:
        raise HooklineError(
            f"the turns of the text {decoded(tokenizer, ids)!r:.60} are unknown: it was not given as messages, and is "
            f'not what the chat template of this model makes. Pass [{{"role": "user", "content": "…"}}, …]'
        )
    return known


def found_chat(tokenizer: Any, ids: Sequence[int]) -> KnownChat | None:
    """The same; None if it is no conversation."""
    known = known_chat(tokenizer, ids)
    if known is not None and len(known.ids) == len(ids):
        return known
    # It may be another conversation, which went on in another way, or ended before.
    template = getattr(tokenizer, "chat_template", None)
    parsed = _parsed.made(tokenizer, (repr(template), *ids), lambda: (parsed_chat(tokenizer, ids),))[0]
    if parsed is None and known is not None and _has_more_turns(tokenizer, ids[len(known.ids) :]):
        return None
    return known if parsed is None else parsed


def _has_more_turns(tokenizer: Any, ids: Sequence[int]) -> bool:
    """Whether tokens after a conversation seem to have further turns: text after a special token."""
    is_special = [token_id in tokenizer.all_special_ids for token_id in ids]
    first = is_special.index(True) if True in is_special else len(ids)
    return any(is_written(tokenizer, token_id) for token_id in ids[first:])


_parsed = Recent(1 << 8)
_written = Recent(1 << 16)


def is_written(tokenizer: Any, token_id: int) -> bool:
    """Whether a token of an answer is text: not the end of the turn, padding, or space."""

    return token_id >= 0 and _written.made(tokenizer, token_id, lambda: _are_written(tokenizer, [token_id]))[0]


def written_ids(tokenizer: Any, count: int) -> list[bool]:
    """The same for all tokens of a vocabulary."""
    return _written.made(tokenizer, range(count), lambda: _are_written(tokenizer, range(count)))


def _are_written(tokenizer: Any, ids: Sequence[int]) -> list[bool]:
    special = {*tokenizer.all_special_ids}
    texts = tokenizer.batch_decode([[token_id] for token_id in ids], clean_up_tokenization_spaces=False)
    return [token_id not in special and bool(text.strip()) for token_id, text in zip(ids, texts, strict=True)]


@dataclass(frozen=True)
class SpanMeaning(TextMeaning):
    """The tokens of some words, at every place where they stand, or at one of them."""

    words: str
    k: int | None = None

    def number(self) -> int | None:
        """Which of the places."""
        return self.k

    def places(self, tokenizer: Any, ids: tuple[int, ...], prompt: Prompt) -> list[range | list[int]]:  # noqa: ARG002
        """The tokens at each place where the words are."""
        text = _characters(tokenizer, ids)
        words = self.words
        if words not in text.text:  # a tokenizer may change the case of letters, and spaces
            words = decoded(tokenizer, tokenizer(words, add_special_tokens=False)["input_ids"]).strip() or words
        starts = [match.start() for match in re.finditer(re.escape(words), text.text)]
        return [_overlapping(text, start, start + len(words)) for start in starts]

    def __repr__(self) -> str:
        return f"span({self.words!r})" if self.k is None else f"span({self.words!r}, {self.k})"


@dataclass(frozen=True)
class SentenceMeaning(TextMeaning):
    """The tokens of one sentence."""

    k: int

    def number(self) -> int:
        """Which sentence."""
        return self.k

    def places(self, tokenizer: Any, ids: tuple[int, ...], prompt: Prompt) -> list[range | list[int]]:
        """The tokens of each sentence: of the messages of a conversation, of any other text without special tokens."""
        text, places = _characters(tokenizer, ids), list[range | list[int]]()
        for first, last in _passages(tokenizer, ids, prompt.length):
            start, stop = text.ranges[first][0], text.ranges[last][1]
            for match in _SENTENCE.finditer(text.text[:stop], start):
                places.append(_overlapping(text, *_without_space(text.text, *match.span())))
        return places

    def __repr__(self) -> str:
        return f"sentence({self.k})"


def _passages(tokenizer: Any, ids: tuple[int, ...], count: int) -> list[tuple[int, int]]:
    """The first and the last token of each part of a text that has sentences."""
    known = found_chat(tokenizer, ids[:count])
    keys: list[Any] = [None if token_id in tokenizer.all_special_ids else 0 for token_id in ids]
    if known is not None:
        inside = [min(owners, default=None) for owners in known.owners[: len(ids)]]
        keys = [*inside, *[None if key is None else len(known.chat.messages) for key in keys[len(inside) :]]]
    bounds: dict[Any, tuple[int, int]] = {}
    for number, (key, group) in enumerate(groupby(enumerate(keys), key=lambda pair: pair[1])):
        indices = [index for index, _ in group]
        if key is not None:  # a message with space in it is one passage
            name = (key if known is not None else number,)
            bounds[name] = (bounds.get(name, (indices[0], 0))[0], indices[-1])
    return list(bounds.values())


def _without_space(text: str, start: int, stop: int) -> tuple[int, int]:
    return start, start + len(text[start:stop].rstrip())


def _characters(tokenizer: Any, ids: tuple[int, ...]) -> Characters:
    if -1 in ids:
        raise HooklineError("the text so far is unknown: in this kind of generation rows exchange their texts")
    return _texts.made(tokenizer, ids, lambda: characters_of(tokenizer, ids))


_texts = Recent(1 << 8)


def _overlapping(text: Characters, start: int, stop: int) -> list[int]:
    return [index for index, (first, last) in enumerate(text.ranges) if first < stop and last > start]


def turn(role: str, k: int | None = None) -> TextMeaning:
    """The content of the messages of a role, without headers: all of them, or the k-th, from the end if negative.

    The conversation is given as messages: see docs/chat.md. While a model answers, the assistant's last turn is the
    one being written.

    Examples:
        >>> from hookline.positions import turn
        >>> model.tokenizer.chat_template = "{% for m in messages %}{{ m.role + ': ' + m.content + ' ' }}{% endfor %}"
        >>> messages = [{"role": "user", "content": "The capital of France is"}]
        >>> name = "blocks.0.hook_resid_post"
        >>> model.cache(messages, names_filter=name, pos_slice=turn("user"))[name].shape
        torch.Size([1, 5, 128])
    """
    return TurnMeaning(_text("role", role), None if k is None else whole_number("k", k))


def span(words: str, k: int | None = None) -> TextMeaning:
    """The tokens that overlap these words, at every place where they are, or at the k-th, from the end if negative.

    Examples:
        >>> from hookline.positions import span
        >>> name = "blocks.0.hook_resid_post"
        >>> model.cache("The capital of France is", names_filter=name, pos_slice=span("capital of"))[name].shape
        torch.Size([1, 2, 128])
    """
    return SpanMeaning(_text("words", words), None if k is None else whole_number("k", k))


def sentence(k: int) -> TextMeaning:
    """The tokens of a sentence, which ends with ".", "?" or "!"; counted over the text, from the end if negative.

    Examples:
        >>> from hookline.positions import sentence
        >>> name = "blocks.0.hook_resid_post"
        >>> model.cache("Mary went home. John sat.", names_filter=name, pos_slice=sentence(-1))[name].shape
        torch.Size([1, 3, 128])
    """
    return SentenceMeaning(whole_number("sentence", k))


def as_json(meaning: TextMeaning) -> dict[str, Any]:
    """A position of these kinds as a JSON object."""
    match meaning:
        case TurnMeaning():
            return {"turn": meaning.role, "k": meaning.k}
        case SpanMeaning():
            return {"span": meaning.words, "k": meaning.k}
        case SentenceMeaning():
            return {"sentence": meaning.k}
    raise AssertionError(meaning)


def from_json(saved: Any) -> TextMeaning | None:
    """The position that such an object describes; None for any other value."""
    match saved:
        case {"turn": role}:
            made = turn(role, saved.get("k"))
        case {"span": words}:
            made = span(words, saved.get("k"))
        case {"sentence": k}:
            made = sentence(k)
        case _:
            return None
    return made if saved.keys() <= as_json(made).keys() else None


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise HooklineError(f"{name} must be a text that is not empty, not {value!r:.60}")
    return value
