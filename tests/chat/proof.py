"""What a turn must cover, found in another way than by the library: contents that only have words of their own.

Every word of every message is `w` and a number that occurs once, so where it is in the text is plain to see. Contents
that are hard for templates (repeated, empty, with markers in them) are checked against a conversation with the same
shape and such words.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hookline import HookedModel, HooklineError
from hookline.positions import turn
from hookline.text.given_texts import columns_in

Messages = Sequence[Mapping[str, Any]]

USER, ASSISTANT, SYSTEM = "user", "assistant", "system"


def message(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


def conversations() -> dict[str, list[dict[str, Any]]]:
    """Conversations of several shapes; each word is in one message only."""
    one = message(USER, "w10 w11? w12.")
    answered = [one, message(ASSISTANT, "w20, w21\n\nw22 é w23 🙂 w24")]
    return {
        "one question": [one],
        "with an answer": answered,
        "going on": [*answered, message(USER, "w30 w31")],
        "with a system prompt": [message(SYSTEM, "w40 w41."), *answered, message(USER, "w30 w31")],
        "with space around": [message(USER, "  w10 w11\n"), message(ASSISTANT, "\nw20 "), message(USER, " w30 ")],
        "with thinking": [
            *[one, message(ASSISTANT, "<think>\nw50 w51\n</think>\n\nw20 w21"), message(USER, "w30")],
            message(ASSISTANT, "<think>w60</think>w61 w62"),
        ],
        "with a command": [message(USER, "w10 w11 /no_think"), message(ASSISTANT, "w20"), message(USER, "w30")],
        "of one letter each": [message(USER, "w1"), message(ASSISTANT, "w2"), message(USER, "w3")],
        "with an empty answer": [one, message(ASSISTANT, ""), message(USER, "w30")],
        "as parts": [
            message(USER, [{"type": "text", "text": "w10 w11"}]),
            message(ASSISTANT, [{"type": "text", "text": "w20"}]),
        ],
    }


_WORD = re.compile(r"w\d+")


def wrong_turns(model: HookedModel, messages: Messages) -> list[str]:
    """What is wrong with the turns of a conversation whose words are all different; [] if nothing is."""
    ids = tokens_of(model, messages)
    if model.tokenizer.decode(ids[0], clean_up_tokenization_spaces=False) != str(model.text.prompts(messages)):
        return ["the tokens do not give the text: a tokenizer of bytes is needed"]
    ranges = ranges_of(model, ids[0].tolist())
    text, problems, seen = str(model.text.prompts(messages)).encode(), [], dict[str, int]()
    for one in messages:
        role, k = one["role"], seen.get(one["role"], 0)
        seen[role] = k + 1
        mine = {word.encode() for word in _WORD.findall(content_of(one))}
        others = {word.encode() for other in messages if other is not one for word in _WORD.findall(content_of(other))}
        places = [(m.group(), m.span()) for m in re.finditer(rb"w\d+", text)]
        need = [span for word, span in places if word in mine]
        never = [span for word, span in places if word in others]
        covered = set(columns_in(turn(role, k), model.module, ids)[0][0].nonzero().flatten().tolist())
        for index, (start, stop) in enumerate(ranges):
            if any(start < end and stop > begin for begin, end in need) and index not in covered:
                problems.append(f"{role} {k}: token {index} is missing")
            is_others = any(start < end and stop > begin for begin, end in never)
            if is_others and index in covered and not any(start < end and stop > begin for begin, end in need):
                problems.append(f"{role} {k}: token {index} is another message's")
            shared = {*text[start:stop].decode(errors="ignore")} & {*content_of(one)} - {*" \n"}
            if index in covered and not shared and text[start:stop].isascii():
                problems.append(f"{role} {k}: token {index}, {text[start:stop]!r}, is not of the content")
    return problems


def tokens_of(model: HookedModel, messages: Messages) -> torch.Tensor:
    """The tokens, however many they are."""
    return torch.tensor([model.text.ids(model.text.prompts(messages), None)])


def content_of(one: Mapping[str, Any]) -> str:
    content = one["content"]
    return content if isinstance(content, str) else " ".join(part.get("text", "") for part in content)


def ranges_of(model: HookedModel, ids: list[int]) -> list[tuple[int, int]]:
    """The bytes of each token of a byte-level tokenizer: those that its tokens have without the ones after it."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    byte_of, ranges, at = {character: byte for byte, character in bytes_to_unicode().items()}, [], 0
    special = {*model.tokenizer.all_special_tokens}
    for token in model.tokenizer.convert_ids_to_tokens(ids):
        size = len(token.encode()) if token in special else len([byte_of[character] for character in token])
        ranges.append((at, at + size))
        at += size
    return ranges


def tried(model: HookedModel, template: str) -> dict[str, list[str] | None]:
    """For each conversation, what is wrong with its turns; None if the template rejects it."""
    model.tokenizer.chat_template = template
    outcomes: dict[str, list[str] | None] = {}
    for name, messages in conversations().items():
        try:
            model.text.prompts(messages)
        except HooklineError:
            outcomes[name] = None
            continue
        try:
            outcomes[name] = wrong_turns(model, messages)
        except HooklineError as error:
            outcomes[name] = [str(error)]
    return outcomes
