"""Inputs: prompts and pictures, as the keyword inputs that a model takes, made by its own processor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hookline.errors import HooklineError
from hookline.text.tokenizer import Side
from hookline.vision.images import is_picture, picture_of, sizes_of

if TYPE_CHECKING:
    from PIL.Image import Image


class Inputs(dict[str, Any]):
    """Keyword inputs of a model that remember how large the pictures were: `model(**inputs)`."""

    sizes: list[list[tuple[int, int]]] | None = None
    """Height and width of each picture, in a list for each prompt."""


def place_of(processor: Any) -> str:
    """The text that stands for a picture in a prompt, and is to be typed."""
    place = getattr(processor, "image_token", None)
    if not isinstance(place, str):
        raise HooklineError(f"{type(processor).__name__} has no text that stands for a picture in a prompt")
    return place


def shown_place(processor: Any) -> str:
    """The same as an error shows it, with what belongs around it."""
    return repr(framed_place(processor))


def framed_place(processor: Any) -> str:
    """The text that stands for a picture, with what belongs around it."""
    place = place_of(processor)
    around = [getattr(processor, f"vision_{end}_token", None) for end in ("start", "end")]
    if place == "<|image_pad|>":  # all models that have it want it framed, but only some of their processors know
        around = ["<|vision_start|>", "<|vision_end|>"]
    return f"{around[0]}{place}{around[1]}" if all(around) else place


def rows_of(images: Any, places: Sequence[int] | None, shown: str = "") -> list[list[Image]]:
    """The pictures of each prompt, whose numbers of places are `places`; None if there are no prompts.

    They are checked against the places before any of them is opened.
    """
    nested = _nested(images, places)
    for row, (pictures, wanted) in enumerate(zip(nested, places or (), strict=False)):
        if len(pictures) != wanted:
            where = f"prompt {row} has" if len(nested) > 1 else "the prompt has"
            raise HooklineError(
                f"{where} {_count(wanted, 'place')} for pictures, but {_count(len(pictures), 'picture')} "
                f"{'is' if len(pictures) == 1 else 'are'} given for it: put {shown} where each picture belongs"
            )
    many = len(nested) > 1 and places is not None
    return [
        [picture_of(each, f"picture {i}" + (f" of prompt {row}" if many else "")) for i, each in enumerate(pictures)]
        for row, pictures in enumerate(nested)
    ]


def _nested(images: Any, places: Sequence[int] | None) -> list[list[Any]]:
    given = [images] if is_picture(images) else list(images)
    if not given:
        raise HooklineError("images is an empty list: leave it out if there is no picture")
    lists = [not is_picture(each) for each in given]
    if any(lists) and not all(lists):
        raise HooklineError("images has pictures and lists of pictures in it: give one list for each prompt")
    if places is None:
        if any(lists):
            raise HooklineError("images has lists in it: a model without text takes a list of pictures")
        return [[each] for each in given]
    if all(lists):
        if len(given) != len(places):
            raise HooklineError(f"{len(places)} prompts, but {len(given)} lists of pictures: give one for each prompt")
        return [list(each) for each in given]
    if len(places) == 1:
        return [given]
    if any(wanted != 1 for wanted in places) or len(given) != len(places):
        raise HooklineError(
            f"{len(places)} prompts with {', '.join(map(str, places))} places for pictures, and a list of "
            f"{_count(len(given), 'picture')}: give a list for each prompt, images=[[…], […]]"
        )
    return [[each] for each in given]


def _count(n: int, thing: str) -> str:
    return f"{n or 'no'} {thing}{'' if n == 1 else 's'}"


def processed(
    processor: Any,
    prompts: Sequence[str],
    images: Any,
    *,
    prepend_bos: bool | None = None,
    padding_side: Side | None = None,
) -> Inputs:
    """What the processor makes of prompts and pictures, on the CPU."""
    place = place_of(processor)
    rows = rows_of(images, [prompt.count(place) for prompt in prompts], shown_place(processor))
    if not any(rows):
        raise HooklineError("no prompt has a picture: leave images out")
    if not all(rows) and _wants_a_picture_each(processor):
        raise HooklineError(
            f"prompt {rows.index([])} has no picture and others have one: {type(processor).__name__} garbles the text "
            "of such a prompt. Make the inputs of those with pictures and of those without by themselves"
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
    inputs = Inputs({name: value for name, value in made.items() if name != "labels"})
    inputs.sizes = sizes_of(rows)
    return inputs


def _wants_a_picture_each(processor: Any) -> bool:
    """PaliGemma's puts the token of the beginning after the last picture, and after six letters if there is none."""
    return any(kind.__name__ == "PaliGemmaProcessor" for kind in type(processor).__mro__)


def _call(processor: Any, texts: list[str], rows: list[list[Image]], options: dict[str, Any]) -> Any:
    try:
        return processor(text=texts, images=rows, **options)
    except ValueError as error:
        raise HooklineError(f"{type(processor).__name__} refuses these prompts and pictures: {error}") from error


def _with_bos(tokenizer: Any) -> str:
    if tokenizer.bos_token is None:
        raise HooklineError("prepend_bos=True, but this tokenizer has no beginning-of-sequence token")
    return str(tokenizer.bos_token)


def _extra_bos(made: Any, texts: Sequence[str], tokenizer: Any) -> list[bool]:
    """Of which texts the tokenizer has put a beginning before one that was there: a chat's, or the processor's own."""
    if tokenizer.bos_token_id is None:
        return [False] * len(texts)
    is_bos = (made["input_ids"] == tokenizer.bos_token_id) & made["attention_mask"].bool()
    counts = is_bos.sum(1).tolist()
    return [n > max(1, text.count(tokenizer.bos_token)) for n, text in zip(counts, texts, strict=True)]


def of_pictures(processor: Any, images: Any) -> Inputs:
    """What an image processor makes of pictures, for a model without text."""
    rows = rows_of(images, None)
    inputs = Inputs(processor(images=[row[0] for row in rows], return_tensors="pt"))
    inputs.sizes = sizes_of(rows)
    return inputs
