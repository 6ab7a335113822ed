"""Where each token is in the characters of a text."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import SequenceMatcher
from typing import Any, NamedTuple

from hookline.errors import HooklineError

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


class Characters(NamedTuple):
    """A text, and the range of characters of each of its tokens; tokens of one character have the same range."""

    text: str
    ranges: list[tuple[int, int]]


def decoded(tokenizer: Any, ids: Sequence[int]) -> str:
    """The text of tokens, with special tokens and as it is."""
    return str(tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))


def characters_of(tokenizer: Any, ids: Sequence[int]) -> Characters:
    """The text of tokens, and where each is in it."""
    text = decoded(tokenizer, ids)
    again = _encoded(tokenizer, text)
    if again is not None and again[0] == list(ids):
        return Characters(text, _without_gaps(again[1]))
    return _piece_by_piece(tokenizer, ids)


def ranges_in(tokenizer: Any, text: str, ids: Sequence[int]) -> list[tuple[int, int]]:
    """Where each token is in the text that it was made from; an empty range for tokens that were inserted."""
    again = _encoded(tokenizer, text)
    if again is None:
        characters = _piece_by_piece(tokenizer, ids)
        if characters.text != text:
            raise HooklineError(
                f"turns cannot be found: {type(tokenizer).__name__} has no offsets, and its tokens do not give the text"
            )
        return characters.ranges
    if again[0] == list(ids):
        return again[1]
    ranges = [(0, 0)] * len(ids)  # a processor put the tokens of an image in the place of one
    for at, place, count in SequenceMatcher(None, list(ids), again[0], autojunk=False).get_matching_blocks():
        ranges[at : at + count] = again[1][place : place + count]
    return ranges


def _encoded(tokenizer: Any, text: str) -> tuple[list[int], list[tuple[int, int]]] | None:
    """The tokens of a text with their ranges; None if the tokenizer cannot tell."""
    if not getattr(tokenizer, "is_fast", False):
        return None
    encoding = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    return list(encoding["input_ids"]), [(start, stop) for start, stop in encoding["offset_mapping"]]


def _without_gaps(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """With the spaces that some tokenizers leave out of a token that begins with them."""
    stops = [0, *(stop for _, stop in ranges)]
    return [(min(start, stops[number]), stop) for number, (start, stop) in enumerate(ranges)]


def _piece_by_piece(tokenizer: Any, ids: Sequence[int]) -> Characters:
    """From what each token adds to the text of the tokens before it."""
    text, ranges, first, done = "", list[tuple[int, int]](), 0, 0
    for number in range(len(ids)):
        before, now = decoded(tokenizer, ids[first:done]), decoded(tokenizer, ids[first : number + 1])
        if now.endswith(_INCOMPLETE) and number + 1 < len(ids) and number - done < 4:
            continue  # a character of several tokens
        piece = now[len(before) :]
        ranges += [(len(text), len(text) + len(piece))] * (number + 1 - done)
        text, first, done = text + piece, done, number + 1
    return Characters(text, ranges)
