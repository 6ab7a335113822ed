"""Messages: tasks and images as chat prompts, with the model's chat template."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from hookline.errors import HooklineError
from hookline.model import HookedModel
from hookline.text.tokenizer import Side
from hookline.vision.image_methods import without_second_bos

# Models for which vlm-spectra puts the image before the text: SmolVLM and the LLaVA family. For these it also appends
# `assistant_prefill` to the rendered chat; for other models the chat template continues it.
IMAGE_FIRST = frozenset({"idefics3", "llava", "llava_next", "llava_onevision", "smolvlm"})

Template: TypeAlias = str | Callable[[str], str] | None
"""A template for a task: a text with {text} or {instruction}, or a function."""


class InputsError(HooklineError, ValueError):
    """Tasks, images or inputs that do not match."""


def rendered(task: str, template: Template) -> str:
    """The task formatted with the template."""
    if template is None:
        return task
    if callable(template):
        return template(task)
    try:
        return template.format(text=task, instruction=task, language="English")
    except (KeyError, IndexError) as error:
        raise HooklineError(
            f"the prompt template has an unknown field {error}: the fields are {{text}}, {{instruction}} and "
            "{language}, and other braces must be doubled"
        ) from error


def chat_of(hooked: HookedModel, task: str, *, has_image: bool, append_text: str, assistant_prefill: str | None) -> str:
    """The prompt: the task and the image placeholder, in the order of this model, and the start of the answer."""
    owner = hooked.processor if getattr(hooked.processor, "chat_template", None) else hooked.tokenizer
    if not getattr(owner, "chat_template", None):
        if has_image:
            raise HooklineError("no chat template for the image: write the prompt yourself and use model.hooked")
        return task + (assistant_prefill or "") + append_text
    config: Any = hooked.module.config
    is_image_first = config.model_type in IMAGE_FIRST
    parts = [{"type": "text", "text": task}, {"type": "image"}]
    parts = parts[::-1] if is_image_first else parts
    messages: list[dict[str, Any]] = [{"role": "user", "content": parts if has_image else task}]
    if is_image_first:
        append_text, assistant_prefill = (assistant_prefill or "") + append_text, None
    if assistant_prefill:
        messages.append({"role": "assistant", "content": assistant_prefill})
        text = owner.apply_chat_template(messages, tokenize=False, continue_final_message=True)
    else:
        text = owner.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return without_second_bos(hooked.tokenizer, str(text)) + append_text


def inputs_of(hooked: HookedModel, texts: Sequence[str], images: Sequence[Any] | None) -> Any:
    """The model's inputs; several prompts are padded on the left, for generation."""
    from transformers import BatchFeature

    prompts: Any = texts[0] if len(texts) == 1 else list(texts)
    prompt_images = None if images is None else [[image] for image in images] if len(texts) > 1 else list(images)
    side: Side | None = "left" if len(texts) > 1 else None
    return BatchFeature(dict(hooked.to_inputs(prompts, prompt_images, padding_side=side)))
