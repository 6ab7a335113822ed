"""Conversations: lists of messages, and the text that a chat template makes of them.

A `Chat` is that text, and remembers its messages. So a conversation is converted once, where a prompt is read, and is
a text from there on. `Templates.prompts` does it for every kind of prompt; what is no conversation is left as it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from functools import cached_property
from typing import Any, TypeAlias

from hookline.errors import HooklineError

Messages: TypeAlias = Sequence[Mapping[str, Any]]


class Chat(str):
    """The text of a conversation, with the messages that it was made from."""

    messages: tuple[Mapping[str, Any], ...]
    is_open: bool
    """Whether it ends with the beginning of the assistant's next message."""
    templates: Templates

    @classmethod
    def of(cls, templates: Templates, messages: Messages, *, is_open: bool) -> Chat:
        """The text that the template makes of messages."""
        text, taken = templates.rendered(messages, is_open=is_open)
        chat = cls(text)
        chat.messages = tuple(map(_copied, taken))  # the user may write to them
        chat.is_open, chat.templates = is_open, templates.pinned()
        return chat

    def is_like(self, other: Chat) -> bool:
        """Whether another conversation with the same text has the same turns."""
        same_text = self.is_open == other.is_open and self.roles == other.roles
        return same_text and [*map(_texts, self.messages)] == [*map(_texts, other.messages)]

    def __reduce__(self) -> tuple[Any, ...]:
        return str, (str(self),)

    @cached_property
    def owners(self) -> list[int]:
        """For each character the number of the message whose content it is from; -1 for what the template adds."""
        from hookline.text.content_marks import content_owners  # it renders chats

        return content_owners(self)

    @cached_property
    def roles(self) -> list[str]:
        """The role of each message, and of the one that is being written."""
        return [message["role"] for message in self.messages] + ["assistant"] * self.is_open

    def images(self) -> list[Any]:
        """The images in the messages, in order; not those that have a place only."""
        parts = [part for message in self.messages for part in content_parts(message)]
        keys = ("image", "path", "url")
        return [part[key] for part in parts if part.get("type") == "image" for key in keys if key in part]


def content_parts(message: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The parts of the content of a message: texts and images; for a plain text, none."""
    content = message.get("content")
    return [part for part in content if isinstance(part, Mapping)] if isinstance(content, list | tuple) else []


def _copied(message: Mapping[str, Any]) -> dict[str, Any]:
    copied, content = dict(message), message.get("content")
    if isinstance(content, list | tuple):
        copied["content"] = [dict(part) if isinstance(part, Mapping) else part for part in content]
    return copied


def _texts(message: Mapping[str, Any]) -> list[Any]:
    """What a message says; its other values, such as images, may be arrays, which cannot be compared."""
    content = message.get("content")
    return [content] if isinstance(content, str) else [part.get("text") for part in content_parts(message)]


def is_conversation(prompt: Any) -> bool:
    """Whether it is a list of messages."""
    if not isinstance(prompt, list | tuple) or not prompt:
        return False
    return all(isinstance(message, Mapping) and {"role", "content"} & {*message} for message in prompt)


class Templates:
    """The chat template of a model, which its processor has, or its tokenizer."""

    def __init__(self, tokenizer: Any, processor: Any = None) -> None:
        self.tokenizer = tokenizer
        self._owner = processor if getattr(processor, "chat_template", None) else tokenizer
        self._pinned: Any = None

    def pinned(self) -> Templates:
        """The same template, also when the tokenizer gets another one."""
        pinned = copy(self)
        pinned._pinned = self._pinned or getattr(self._owner, "chat_template", None)
        return pinned

    def prompts(self, prompt: Any, *, is_open: bool = False) -> Any:
        """A prompt, or a list of them, with conversations as texts; `is_open`: for the assistant to answer."""
        if is_conversation(prompt):
            return Chat.of(self, prompt, is_open=is_open)
        if isinstance(prompt, list | tuple) and any(map(is_conversation, prompt)):
            return [Chat.of(self, part, is_open=is_open) if is_conversation(part) else part for part in prompt]
        return prompt

    def rendered(self, messages: Messages, *, is_open: bool) -> tuple[str, Messages]:
        """What the template makes of messages, and the messages as it takes them.

        Some templates take contents as text only, and others as lists of parts only.
        """
        _check_messages(messages)
        forms = [messages, [*map(_in_parts, messages)], [*map(_as_text, messages)]]
        results, errors = list[tuple[str, Messages]](), list[HooklineError]()
        for form in [form for number, form in enumerate(forms) if not number or form != list(messages)]:
            try:
                results.append((self.render(form, is_open=is_open), form))
            except HooklineError as error:
                errors.append(error)
            else:
                if _comes_out(form, results[-1][0]):
                    return results[-1]
        if not results:
            raise errors[0]
        return results[0]

    def render(self, messages: Messages, *, is_open: bool) -> str:
        """What the template makes of messages in this form."""
        if not getattr(self._owner, "chat_template", None):
            raise HooklineError(
                "messages need a chat template, and this model's tokenizer has none: load the chat (instruct) version "
                "of the model, set model.tokenizer.chat_template, or pass the prompt as text"
            )
        try:
            from jinja2.exceptions import TemplateError
        except ImportError:
            raise HooklineError("messages need a chat template, which needs jinja2: pip install jinja2") from None
        options: dict[str, Any] = {}
        if isinstance(self._pinned, str) and self._pinned != self._owner.chat_template:
            options["chat_template"] = self._pinned
        try:
            text = self._owner.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=is_open, **options
            )
        except (TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            raise HooklineError(f"the chat template of this model rejects these messages: {error}") from error
        return str(text)

    def can_render(self) -> bool:
        """Whether there is a template."""
        return bool(getattr(self._owner, "chat_template", None))


def _in_parts(message: Mapping[str, Any]) -> Mapping[str, Any]:
    content = message.get("content")
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message


def _as_text(message: Mapping[str, Any]) -> Mapping[str, Any]:
    parts = content_parts(message)
    if not parts or any(part.get("type") != "text" for part in parts):
        return message
    return {**message, "content": "\n".join(part["text"] for part in parts)}


def _comes_out(messages: Messages, text: str) -> bool:
    """Whether something of each content is in the text, as it was written."""
    for message in messages:
        content: Any = message.get("content") or ""
        parts = [part["text"] for part in content_parts(message) if isinstance(part.get("text"), str)]
        words = (content if isinstance(content, str) else " ".join(parts)).split()
        is_repr = not isinstance(content, str) and repr(content) in text
        if is_repr or (words and not any(word in text for word in words)):
            return False
    return True


def _check_messages(messages: Messages) -> None:
    for number, message in enumerate(messages):
        if not isinstance(message.get("role"), str):
            raise HooklineError(
                f'message {number} has no role: a message is {{"role": "user", "content": "…"}}, got {list(message)}'
            )
        content = message.get("content")
        if content is not None and not isinstance(content, str | list | tuple):
            raise HooklineError(
                f"the content of message {number} is text, or a list of texts and images, not {content!r:.60}"
            )
        for part in content_parts(message):
            if part.get("type") == "text" and not isinstance(part.get("text"), str):
                raise HooklineError(
                    f'a part of the content of message {number} has no text: it is {{"type": "text", "text": "…"}}, '
                    f"not {part!r:.60}"
                )
