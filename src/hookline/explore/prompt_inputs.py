"""The prompts of a question as the library takes them: text, or the inputs of a text with images."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

from torch import Tensor

from hookline.explore.image_files import decoded_image
from hookline.explore.question import Question
from hookline.model import HookedModel
from hookline.vision.inputs import Inputs, framed_placeholder, image_place

GivenPrompt: TypeAlias = "str | Inputs"

_MOST_RECENT = 4
_recent: WeakKeyDictionary[HookedModel, dict[Any, Inputs]] = WeakKeyDictionary()
"""Every view needs the same inputs, and a processor takes its time with a large image."""


def prompt_of(model: HookedModel, question: Question) -> GivenPrompt:
    """The first prompt, with its images."""
    return _given(model, question.prompt, question.images)


def other_of(model: HookedModel, question: Question) -> GivenPrompt:
    """The second prompt, with its images."""
    return _given(model, question.other, question.other_images)


def _given(model: HookedModel, text: str, images: Sequence[str]) -> GivenPrompt:
    if not images:
        return text
    cached_inputs, key = _recent.setdefault(model, {}), (text, tuple(images), model.cfg.device, model.cfg.dtype)
    if key not in cached_inputs:
        made = model.to_inputs(text, images=[decoded_image(url) for url in images])
        while len(cached_inputs) >= _MOST_RECENT:
            cached_inputs.pop(next(iter(cached_inputs)))
        cached_inputs[key] = made
    return cached_inputs[key]


def keywords(prompt: GivenPrompt | Tensor) -> dict[str, Any]:
    """The keyword arguments of a call: `model(**keywords(prompt))`."""
    return dict(prompt) if isinstance(prompt, Inputs) else {"input": prompt}


def tokens_in(model: HookedModel, prompt: GivenPrompt) -> Tensor:
    """The token ids of a prompt, [1, pos]."""
    return model.to_tokens(prompt) if isinstance(prompt, str) else prompt["input_ids"]


def placeholders(model: HookedModel) -> dict[str, str]:
    """What marks the place of an image in a prompt: the `token`, and `written` with what must surround it.

    Both are empty if the model takes no images, or has no processor.
    """
    token = image_place(model.processor)
    if not model.takes_images or token is None:
        return {"token": "", "written": ""}
    return {"token": token, "written": framed_placeholder(model.processor)}


def with_places(model: HookedModel, text: str, images: Sequence[Any]) -> str:
    """The text, with a place for each image in front if it has none."""
    place = placeholders(model)
    if not images or not place["token"] or place["token"] in text:
        return text
    return f"{place['written'] * len(images)} {text}".strip()
