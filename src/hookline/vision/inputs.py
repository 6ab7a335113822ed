"""Inputs: prompts and images as the keyword inputs of a model, made by its processor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hookline.errors import HooklineError, how_many
from hookline.text.tokenizer import Side
from hookline.vision.images import as_image, is_one_image, sizes_of

if TYPE_CHECKING:
    from PIL.Image import Image


class Inputs(dict[str, Any]):
    """Keyword inputs of a model, `model(**inputs)`, that also record the sizes of the original images."""

    sizes: list[list[tuple[int, int]]] | None = None
    """Height and width of each image: one list per prompt."""


def placeholder_of(processor: Any) -> str:
    """The text that marks the place of an image in a prompt, such as "<image>"."""
    token = image_place(processor)
    if token is None:
        raise HooklineError(f"{type(processor).__name__} has no image placeholder (image_token)")
    return token


def image_place(processor: Any) -> str | None:
    """The same, or None if it has none."""
    # Prompts for Gemma 3 have the token that begins an image; in older versions of transformers, `image_token` differs.
    is_gemma3 = any(kind.__name__ == "Gemma3Processor" for kind in type(processor).__mro__)
    token = getattr(processor, "boi_token" if is_gemma3 else "image_token", None)
    return token if isinstance(token, str) else None


def framed_placeholder(processor: Any) -> str:
    """The image placeholder with the tokens that must surround it, such as "<|vision_start|>"."""
    token = placeholder_of(processor)
    around = [getattr(processor, f"vision_{end}_token", None) for end in ("start", "end")]
    if token == "<|image_pad|>":  # always framed, but only some processors have the tokens as attributes
        around = ["<|vision_start|>", "<|vision_end|>"]
    return f"{around[0]}{token}{around[1]}" if all(around) else token


def images_per_prompt(images: Any, places: Sequence[int] | None, placeholder: str = "") -> list[list[Image]]:
    """The images of each prompt; `places` is the number of placeholders in each, None if there are no prompts.

    The counts are checked before any image is opened.
    """
    nested = _nested(images, places)
    for row, (row_images, count) in enumerate(zip(nested, places or (), strict=False)):
        if len(row_images) != count:
            where = f"prompt {row} has" if len(nested) > 1 else "the prompt has"
            raise HooklineError(
                f"{where} {how_many(count, 'image placeholder')}, but got {how_many(len(row_images), 'image')}: write "
                f"{placeholder!r} where each image belongs"
            )
    many = len(nested) > 1 and places is not None
    return [
        [as_image(image, f"image {i}" + (f" of prompt {row}" if many else "")) for i, image in enumerate(row_images)]
        for row, row_images in enumerate(nested)
    ]


def _nested(images: Any, places: Sequence[int] | None) -> list[list[Any]]:
    image_list = [images] if is_one_image(images) else list(images)
    if not image_list:
        raise HooklineError("images is empty: omit it for a prompt without images")
    lists = [not is_one_image(image) for image in image_list]
    if any(lists) and not all(lists):
        raise HooklineError("images mixes images and lists of images: pass one list per prompt")
    if places is None:
        if any(lists):
            raise HooklineError("images contains lists: a model without text takes a flat list of images")
        return [[image] for image in image_list]
    if all(lists):
        if len(image_list) != len(places):
            raise HooklineError(
                f"got {how_many(len(places), 'prompt')} but {len(image_list)} lists of images: pass one list per prompt"
            )
        return [list(row) for row in image_list]
    if len(places) == 1:
        return [image_list]
    if any(count != 1 for count in places) or len(image_list) != len(places):
        raise HooklineError(
            f"{how_many(len(places), 'prompt')} with {', '.join(map(str, places))} image placeholders, but a flat list "
            f"of {how_many(len(image_list), 'image')}: pass one list per prompt, images=[[…], […]]"
        )
    return [[image] for image in image_list]


def encode_prompts(
    processor: Any,
    prompts: Sequence[str],
    images: Any,
    *,
    prepend_bos: bool | None = None,
    padding_side: Side | None = None,
) -> Inputs:
    """Run the processor on prompts and images; the tensors are on the CPU."""
    token = placeholder_of(processor)
    rows = images_per_prompt(images, [prompt.count(token) for prompt in prompts], framed_placeholder(processor))
    if not any(rows):
        raise HooklineError("no prompt has an image: omit images")
    if not all(rows) and any(kind.__name__ == "PaliGemmaProcessor" for kind in type(processor).__mro__):
        # It inserts BOS after the last image; without an image it inserts BOS into the text.
        raise HooklineError(
            f"prompt {rows.index([])} has no image but others do: {type(processor).__name__} garbles the text of such "
            "a prompt. Call to_inputs separately for prompts with and without images"
        )
    options: dict[str, Any] = {"return_tensors": "pt", "padding": len(prompts) > 1}
    if padding_side not in ("left", "right", None):
        raise HooklineError(f'padding_side must be "left" or "right", not {padding_side!r}')
    if padding_side is not None:
        options["padding_side"] = padding_side
    texts = list(prompts)
    if prepend_bos is not None:
        options["add_special_tokens"] = False
        texts = [_with_bos(processor.tokenizer) + text for text in texts] if prepend_bos else texts
    made = _call(processor, texts, rows, options)
    if prepend_bos is None and any(extra := _extra_bos(made, texts, processor.tokenizer)):
        texts = [
            text if twice else _with_bos(processor.tokenizer) + text for text, twice in zip(texts, extra, strict=True)
        ]
        made = _call(processor, texts, rows, options | {"add_special_tokens": False})
    made.pop("labels", None)
    return _with_sizes(made, rows)


def _call(processor: Any, texts: list[str], rows: list[list[Image]], options: dict[str, Any]) -> Any:
    try:
        return processor(text=texts, images=rows, **options)
    except ValueError as error:
        raise HooklineError(f"{type(processor).__name__} rejected these prompts and images: {error}") from error


def _with_bos(tokenizer: Any) -> str:
    if tokenizer.bos_token is None:
        raise HooklineError("prepend_bos=True, but this tokenizer has no beginning-of-sequence token")
    return str(tokenizer.bos_token)


def _extra_bos(made: Any, texts: Sequence[str], tokenizer: Any) -> list[bool]:
    """For each text, whether the tokenizer added a BOS token to one that a chat template or the processor had added."""
    if tokenizer.bos_token_id is None:
        return [False] * len(texts)
    is_bos = (made["input_ids"] == tokenizer.bos_token_id) & made["attention_mask"].bool()
    counts = is_bos.sum(1).tolist()
    return [n > max(1, text.count(tokenizer.bos_token)) for n, text in zip(counts, texts, strict=True)]


def encode_images(processor: Any, images: Any) -> Inputs:
    """Run an image processor on images, for a model without text."""
    rows = images_per_prompt(images, None)
    return _with_sizes(processor(images=[row[0] for row in rows], return_tensors="pt"), rows)


def _with_sizes(made: Mapping[str, Any], rows: list[list[Image]]) -> Inputs:
    inputs = Inputs(made)
    inputs.sizes = sizes_of(rows)
    return inputs
