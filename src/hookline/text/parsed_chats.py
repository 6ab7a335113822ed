"""Conversations that were rendered before: a text is taken apart where the chat template writes between contents.

What is found is rendered again, and is right if that gives the text.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, pairwise
from typing import Any, NamedTuple

from hookline.errors import HooklineError
from hookline.text.characters import characters_of
from hookline.text.chats import Chat, Templates
from hookline.text.known_chats import KnownChat, Recent, exact_chat, remember_chat

_SHAPES = (
    ("system", "user", "assistant", "user", "assistant"),
    ("user", "assistant", "user", "assistant"),
    ("system", "user"),
    ("user",),
    ("user", "user", "assistant", "assistant"),
    ("user", "assistant", "assistant", "user"),
    ("user", "assistant", "tool", "assistant"),
    ("user", "assistant", "tool", "assistant", "user"),
)
_PLACES = tuple(chr(code) for code in range(0x40000, 0x40005))
"""Contents to be found again: code points that Unicode has not assigned."""


class _Markers(NamedTuple):
    """What a template writes before, between and after the contents of some roles."""

    before: dict[str, str]
    """Before the first message, by its role."""
    between: dict[tuple[str, str], list[str]]
    """Between two messages, by their roles: the last message may be written in another way than those before it."""
    after: dict[str, list[str]]
    """After the last message, by its role: with and without the beginning of an answer."""
    special: frozenset[str]
    """The special tokens in these: a content that seems to have one is several messages."""


def parsed_chat(tokenizer: Any, ids: Sequence[int]) -> KnownChat | None:
    """The conversation that these tokens are, perhaps with a part of the answer; None if the template makes none."""
    templates = Templates(tokenizer)
    if not templates.can_render():
        return None
    markers = _known_markers.made(tokenizer, repr(tokenizer.chat_template), lambda: _markers(templates))
    text, ranges = characters_of(tokenizer, ids)
    bos = tokenizer.bos_token or ""
    doubled = len(bos) if bos and text.startswith(bos * 2) else 0
    openings = [text.rfind(end) + len(end) for end in markers.after.get("user", []) if end and end in text]
    for stop in [len(text), *sorted(openings, reverse=True)]:
        chat = _parsed(templates, markers, text[doubled:stop])
        if chat is not None and (stop == len(text) or chat.is_open):
            part = ids[: sum(end <= stop for _, end in ranges)]
            return exact_chat(tokenizer, part) or remember_chat(tokenizer, part, chat)
    return None


_known_markers = Recent(8)


def _parsed(templates: Templates, markers: _Markers, text: str) -> Chat | None:
    """The conversation that a text is; None if it may be several, such as with and without a merged system prompt."""
    chats = dict[tuple[str, ...], Chat]()
    for role, start in markers.before.items():
        for messages in _taken_apart(markers, text, role, len(start)) if text.startswith(start) else ():
            if not any(token in message["content"] for message in messages for token in markers.special):
                chat = _rendering(templates, messages, text)
                chats |= {} if chat is None else {tuple(message["role"] for message in messages): chat}
    return next(iter(chats.values())) if len(chats) == 1 else None


def _rendering(templates: Templates, messages: list[dict[str, Any]], text: str) -> Chat | None:
    for is_open in (False, True):
        try:
            chat = Chat.of(templates, messages, is_open=is_open)
        except HooklineError:
            continue
        if chat == text:
            return chat
    return None


def _markers(templates: Templates) -> _Markers:
    before, between, after = dict[str, str](), dict[tuple[str, str], list[str]](), dict[str, list[str]]()
    for roles in _SHAPES:
        pieces = [pieces for is_open in (False, True) if (pieces := _pieces(templates, roles, is_open=is_open))]
        for first, *rest, last in pieces:
            before.setdefault(roles[0], first)
            for pair, marker in zip(pairwise(roles), rest, strict=True):
                markers = between.setdefault(pair, [])
                markers += [] if marker in markers else [marker]
            ends = after.setdefault(roles[-1], [])
            ends += [] if last in ends else [last]
    written = [*before.values(), *chain(*between.values()), *chain(*after.values())]
    special = {token for token in templates.tokenizer.all_special_tokens if any(token in text for text in written)}
    return _Markers(before, between, after, frozenset(special))


def _pieces(templates: Templates, roles: Sequence[str], *, is_open: bool) -> list[str]:
    """What is written around the contents; empty if the template does not write each content once, in order."""
    messages = [{"role": role, "content": place} for role, place in zip(roles, _PLACES, strict=False)]
    try:
        text = str(Chat.of(templates, messages, is_open=is_open))
    except HooklineError:
        return []
    places = [text.find(place) for place in _PLACES[: len(roles)]]
    if -1 in places or places != sorted(places) or any(text.count(place) != 1 for place in _PLACES[: len(roles)]):
        return []
    starts = [0, *(place + 1 for place in places)]
    return [text[start:stop] for start, stop in zip(starts, [*places, len(text)], strict=True)]


def _taken_apart(markers: _Markers, text: str, role: str, start: int) -> list[list[dict[str, Any]]]:
    """The messages of a text whose first message, of a role, begins at `start`; more than one way if ends differ."""
    messages: list[dict[str, Any]] = []
    while True:
        found = [
            (text.find(marker, start), -len(marker), next_role)
            for (before, next_role), written in markers.between.items()
            for marker in written
            if before == role and marker and marker in text[start:]
        ]
        ends = [end for end in markers.after.get(role, []) if text.endswith(end) and len(text) - len(end) >= start]
        stop, size, next_role = min(found, default=(len(text), 0, ""))
        if not next_role:
            return [[*messages, {"role": role, "content": text[start : len(text) - len(end)]}] for end in ends]
        messages.append({"role": role, "content": text[start:stop]})
        if not text[stop - size :] and ends:  # the marker is the beginning of an answer
            return [messages]
        role, start = next_role, stop - size
