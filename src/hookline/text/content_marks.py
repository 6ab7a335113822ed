"""Which characters of a rendered conversation are from the content of which message.

The conversation is rendered a second time, with a mark in place of each character of the contents: a code point that
Unicode has not assigned, and another one for each character. Where the marks come out is where the contents are,
whatever the template does with them: trim, merge, repeat or leave out. If putting the characters back does not give
the text, the template looks at the characters (it cuts a thinking section off, for example), and marks are put on fewer
of them: one message at a time, without what may be a tag, on letters and digits only.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any, NamedTuple

from hookline.errors import HooklineError

if TYPE_CHECKING:
    from hookline.text.chats import Chat

_NOTHING = re.compile("(?!)")
_TAGS = re.compile(r"<[^<>\n]*>|\[[^\[\]\n]*\]|[/\\]\w+|<[|/]?|[|]?>")
_TAGS_AND_SIGNS = re.compile(rf"{_TAGS.pattern}|[\W_]")
_PATTERNS = (_NOTHING, _TAGS, _TAGS_AND_SIGNS)
_UNASSIGNED = range(0x40000, 0xE0000)


class _Mark(NamedTuple):
    """The character that a mark replaces: in a message, in a part of its content."""

    message: int
    part: int
    place: int
    character: str


class _Marks:
    """Contents with marks in them."""

    def __init__(self, text: str, unmarked: re.Pattern[str], marked: Set[str]) -> None:
        self._free = (code for code in _UNASSIGNED if chr(code) not in text)
        self._unmarked, self._marked, self.by_code = unmarked, marked, dict[str, _Mark]()

    def message(self, number: int, message: Mapping[str, Any]) -> dict[str, Any]:
        """A message with marks in its content."""
        content: Any = message.get("content")
        if isinstance(content, str):
            content = self._text(number, 0, content)
        elif content is not None:
            content = [
                {**part, "text": self._text(number, place, part["text"])} if _is_text(part) else part
                for place, part in enumerate(content)
            ]
        return {**message, "content": content} if "content" in message else dict(message)

    def _text(self, number: int, part: int, content: str) -> str:
        matches = [match for match in self._unmarked.finditer(content) if match.group() not in self._marked]
        kept = {index for match in matches for index in range(*match.span())}
        return "".join(
            character if index in kept or character.isspace() else self._mark(_Mark(number, part, index, character))
            for index, character in enumerate(content)
        )

    def _mark(self, mark: _Mark) -> str:
        code = next(self._free, None)
        if code is None:
            raise HooklineError(f"the conversation is too long to find its turns: over {len(_UNASSIGNED):,} characters")
        self.by_code[chr(code)] = mark
        return chr(code)


def _is_text(part: Any) -> bool:
    return isinstance(part, Mapping) and isinstance(part.get("text"), str)


def content_owners(chat: Chat) -> list[int]:
    """For each character of a conversation the number of its message; -1 for what the template adds."""
    numbers = range(len(chat.messages))
    owners = _owners(chat, numbers, _NOTHING)
    if owners is not None:
        return owners
    joined = [-1] * len(chat)
    for number in numbers:
        of_message = next(filter(None, (_of_message(chat, number, kept) for kept in _PATTERNS)), None)
        if of_message is None:
            raise HooklineError(
                f"turns cannot be found: the chat template changes the content of message {number} "
                f"({chat.messages[number].get('content')!r:.60}) in a way that depends on its characters"
            )
        joined = [now if now >= 0 else before for before, now in zip(joined, of_message, strict=True)]
    return joined


def _of_message(chat: Chat, number: int, unmarked: re.Pattern[str]) -> list[int] | None:
    """The owners for one message; tags and signs that the template does not look at are marked, too."""
    owners = _owners(chat, [number], unmarked)
    if owners is None or unmarked is _NOTHING:
        return owners
    marked, untried = set[str](), [sorted({*unmarked.findall(_text_of(chat.messages[number]))})]
    while untried:
        texts = untried.pop()
        with_these = _owners(chat, [number], unmarked, marked | {*texts}) if texts else None
        if with_these is not None:
            owners, marked = with_these, marked | {*texts}
        elif len(texts) > 1:
            untried += [texts[: len(texts) // 2], texts[len(texts) // 2 :]]
    return owners


def _text_of(message: Mapping[str, Any]) -> str:
    content = message.get("content") or ""
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content if _is_text(part))


def _owners(
    chat: Chat, numbers: Sequence[int], unmarked: re.Pattern[str], marked: Set[str] = frozenset()
) -> list[int] | None:
    """The same for some messages; None if the template treats marks in another way than characters.

    Texts that match `unmarked` are left as they are, except those in `marked`.
    """
    marks = _Marks(chat, unmarked, marked)
    messages = [
        marks.message(number, message) if number in numbers else message for number, message in enumerate(chat.messages)
    ]
    try:
        rendered = chat.templates.render(messages, is_open=chat.is_open)
    except HooklineError:
        return None
    if "".join(marks.by_code[code].character if code in marks.by_code else code for code in rendered) != chat:
        return None
    owners = [-1] * len(rendered)
    for place, code in enumerate(rendered):
        if (mark := marks.by_code.get(code)) is not None:
            owners[place] = mark.message
            _extend(owners, rendered, place, mark, chat.messages)
    return owners


def _extend(owners: list[int], rendered: str, place: int, mark: _Mark, messages: Sequence[Mapping[str, Any]]) -> None:
    """Also give a message the unmarked characters beside a mark that are those of its content."""
    content: Any = messages[mark.message]["content"]
    text = content if isinstance(content, str) else content[mark.part]["text"]
    for direction in (-1, 1):
        at, index = place + direction, mark.place + direction
        while at in range(len(rendered)) and index in range(len(text)) and rendered[at] == text[index]:
            if owners[at] >= 0:
                break
            owners[at] = mark.message
            at, index = at + direction, index + direction
