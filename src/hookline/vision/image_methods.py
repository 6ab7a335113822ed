"""What people ask of a model that takes pictures: its inputs, its chats, and where the pictures are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from hookline.engine.signatures import parameters_of
from hookline.errors import HooklineError
from hookline.text.image_tokens import mask_in
from hookline.text.tokenizer import Side, Text, check_no_mapping, shown_prompt
from hookline.vision.grid import ImageGrid
from hookline.vision.images import Pictures, as_dtype, is_picture, picture_of, sizes_of
from hookline.vision.inputs import Inputs, framed_place, of_pictures, place_of, processed
from hookline.vision.layouts import Seen
from hookline.vision.locate import grids_in, places_in
from hookline.vision.tower_layouts import patch_boxes


class Seeing:
    """Pictures of a model that takes them. A mixin: it needs the model's module, processor, text and device."""

    module: nn.Module
    processor: Any
    tokenizer: Any
    _last_inputs: Inputs | None

    @property
    def text(self) -> Text:
        """The tokenizer's side of things."""
        raise NotImplementedError

    @property
    def _device(self) -> torch.device:
        raise NotImplementedError

    def _text_inputs(self, prompt: Any, prepend_bos: bool | None, padding_side: Side | None) -> dict[str, Any]:
        raise NotImplementedError

    def _positions(self, mask: Tensor | None) -> dict[str, Tensor]:
        raise NotImplementedError

    def to_inputs(
        self,
        prompt: str | Sequence[str] | None = None,
        images: Pictures | None = None,
        *,
        prepend_bos: bool | None = None,
        padding_side: Side | None = None,
    ) -> Inputs:
        """Prompts and pictures as keyword inputs, for `model(**inputs)`; without pictures, those of the text alone.

            inputs = model.to_inputs("<image> What is this?", images=["cat.png"])
            logits = model(**inputs)

        A picture is a PIL image, an array (height × width × 3, uint8 or floats from 0 to 1), or a path. One prompt
        takes a list of pictures, several prompts a list for each; each picture needs its place in the prompt. They are
        on the model's device, floats in its type.
        """
        if images is None:
            return Inputs(self._text_inputs(prompt, prepend_bos, padding_side))
        self._check_takes_pictures()
        if self._only_sees:
            inputs = self._of_pictures_alone(prompt, images, prepend_bos, padding_side)
        else:
            prompts = self._prompts(prompt)
            inputs = processed(self.processor, prompts, images, prepend_bos=prepend_bos, padding_side=padding_side)
            self.text.check_ids(inputs["input_ids"])
        self._finish(inputs)
        self._remember(inputs)
        return inputs

    def example_inputs(self) -> Inputs | None:
        """A prompt with a picture, to try things on; None for a model that takes none, or has nothing to make it by."""
        if not self._can_make_inputs:
            return None
        shades = torch.linspace(0, 1, 48 * 64 * 3).mul(97).sin().abs().view(48, 64, 3)
        if self._only_sees:
            return self.to_inputs(images=[shades])
        return self.to_inputs(f"{framed_place(self.processor)} What is this? It is here.", images=[shades])

    def _with_pictures(
        self, prompt: Any, images: Pictures, prepend_bos: bool | None, padding_side: Side | None, given: dict[str, Any]
    ) -> Inputs:
        """The inputs of a run with pictures; none of them may be given in another way too."""
        inputs = self.to_inputs(prompt, images, prepend_bos=prepend_bos, padding_side=padding_side)
        twice = [name for name in inputs if name in given]
        if twice:
            raise HooklineError(f"images make all inputs, but these are given beside them: {', '.join(twice)}")
        return inputs

    def _of_pictures_alone(self, prompt: Any, images: Any, *of_text: Any) -> Inputs:
        if prompt is not None or any(option is not None for option in of_text):
            raise HooklineError(f"{type(self.module).__name__} takes pictures and no text: model(images=[…])")
        return of_pictures(getattr(self.processor, "image_processor", self.processor), images)

    def _prompts(self, prompt: Any) -> list[str]:
        check_no_mapping(prompt)
        place = place_of(self.processor)
        prompts = [prompt] if isinstance(prompt, str) else prompt
        if isinstance(prompt, Tensor):
            raise HooklineError("pictures go in with text, of which the processor makes the tokens: give the prompt")
        if prompt is None or not prompts or not all(isinstance(each, str) and each for each in prompts):
            raise HooklineError(
                f"pictures go in with a prompt that has {place!r} where each belongs, not {shown_prompt(prompt)}"
            )
        return list(prompts)

    def _finish(self, inputs: Inputs) -> None:
        """Where they are needed, in the type they are needed in, and no more of them than the model takes."""
        taken = parameters_of(self.module)[0]
        for name in [name for name in inputs if "pixel_values" in taken and name not in taken]:
            del inputs[name]
        dtype = next(each.dtype for each in self.module.parameters() if each.is_floating_point())
        for name, value in inputs.items():
            inputs[name] = as_dtype(value, self._device, dtype)
        if not self._counts_in_three(inputs):
            inputs.update(self._positions(inputs.get("attention_mask")))

    def _counts_in_three(self, inputs: Inputs) -> bool:
        """Whether positions have a time, a row and a column, that the model itself works out from its inputs."""
        config: Any = self.module.config
        rope = getattr(config.get_text_config(), "rope_parameters", None) or {}
        return "image_grid_thw" in inputs and "mrope_section" in rope

    def _check_takes_pictures(self) -> None:
        """Say what is missing, if it is."""
        name = type(self.module).__name__
        if not self._sees:
            raise HooklineError(f"images were given, but {name} takes none: {self._takes()}")
        if not self._can_make_inputs:
            maker = "AutoImageProcessor" if self._only_sees else "AutoProcessor"
            raise HooklineError(
                f"{name} was wrapped without what makes inputs of pictures: wrap it as hookline.hook(model, "
                f"transformers.{maker}.from_pretrained(…)), or give pixel_values="
            )

    def _check_prompt(self, prompt: Any) -> None:
        """What is given as the prompt must be none of what goes in by another name, or wants something beside it."""
        check_no_mapping(prompt)
        if self._only_sees:
            raise HooklineError(
                f"{type(self.module).__name__} takes pictures and no text: model(images=[…]), or model(pixel_values=…) "
                "with what a processor has made of them"
            )
        given = list(prompt) if isinstance(prompt, list | tuple) else [prompt]
        if self._sees and any(_is_pixels(each) for each in given):
            raise HooklineError("pictures go in beside a prompt: model(prompt, images=[…])")
        self._check_no_places([each for each in given if isinstance(each, str)])

    def _check_no_places(self, prompts: list[str]) -> None:
        """Without pictures, a text that has places for them would run on what stands in their place."""
        place = getattr(self.processor, "image_token", None)
        if not self._sees or not isinstance(place, str):
            return
        found = next((each for each in prompts if place in each), None)
        if found is not None:
            raise HooklineError(
                f"the prompt {found!r} has a place for a picture, {place!r}, but no pictures are given: images=[…]. "
                "To run it without them all the same, give its tokens, model.to_tokens(prompt)"
            )

    @property
    def _sees(self) -> bool:
        """Whether the model takes pictures, alone or with text."""
        config: Any = self.module.config
        return "pixel_values" in parameters_of(self.module)[0] or getattr(config, "vision_config", None) is not None

    @property
    def _can_make_inputs(self) -> bool:
        """Whether there is a processor of pictures and text; or, of a model without text, of pictures."""
        is_whole = hasattr(self.processor, "image_processor") and hasattr(self.processor, "tokenizer")
        return is_whole or (self._only_sees and hasattr(self.processor, "preprocess"))

    @property
    def _only_sees(self) -> bool:
        """Whether the model takes pictures and no text."""
        taken = parameters_of(self.module)[0]
        return "pixel_values" in taken and "input_ids" not in taken

    def _takes(self) -> str:
        main = str(getattr(self.module, "main_input_name", "input_ids"))
        return "it is a model of text" if main == "input_ids" else f"it takes {main}="

    def to_chat(self, messages: str | Sequence[Mapping[str, Any]], images: int | Sequence[Any] = 0) -> str:
        """A question, with places for `images` pictures before it, as the model's chat template writes it.

            model.generate(model.to_chat("What is this?", images=1), images=["cat.png"])

        `images` may be the pictures themselves. In place of a question there may be messages, as transformers takes
        them: dicts with "role" and "content". What is given is text, for `to_inputs`, `generate` and the rest.
        """
        owner = self.processor if getattr(self.processor, "chat_template", None) else self.tokenizer
        if not getattr(owner, "chat_template", None):
            raise HooklineError("there is no chat template: neither the processor nor the tokenizer has one")
        n = images if isinstance(images, int) else 1 if is_picture(images) else len(images)
        if isinstance(messages, str):
            parts = [*[{"type": "image"}] * n, {"type": "text", "text": messages}]
            messages = [{"role": "user", "content": parts if owner is self.processor or n else messages}]
        elif n:
            raise HooklineError('messages have their pictures in them, as {"type": "image"}: leave images out')
        text: str = owner.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=False)
        if n and text.count(place_of(self.processor)) != n:
            raise HooklineError(
                f"the chat template writes {text.count(place_of(self.processor))} places for {n} pictures: write the "
                f"prompt yourself, with {place_of(self.processor)!r} where each picture belongs"
            )
        return self._without_second_bos(text)

    def _without_second_bos(self, text: str) -> str:
        """Where template and tokenizer both put the token of the beginning first, leave it to the tokenizer."""
        bos = self.tokenizer.bos_token
        if bos is None or not text.startswith(bos):
            return text
        ids = self.tokenizer(text)["input_ids"]
        return text.removeprefix(bos) if list(ids[:2]) == [self.tokenizer.bos_token_id] * 2 else text

    def image_token_mask(
        self, inputs: Mapping[str, Any] | Tensor | str | Sequence[str], images: Pictures | None = None
    ) -> Bool[Tensor, "batch pos"]:
        """True where a picture is, of inputs, of tokens, or of prompts and their `images`."""
        tokens = inputs if isinstance(inputs, Tensor) else self._as_inputs(inputs, images).get("input_ids")
        if not isinstance(tokens, Tensor):
            raise HooklineError("there are no input_ids among these inputs: a model without text has no such positions")
        return mask_in(tokens[None] if tokens.ndim == 1 else tokens, self.module.config)

    def image_token_range(
        self,
        picture: int = 0,
        inputs: Mapping[str, Any] | str | Sequence[str] | None = None,
        row: int = 0,
        *,
        images: Pictures | None = None,
    ) -> range:
        """The positions of one picture in a row of the inputs: of the last that had pictures, if none are given.

        They go from its first token to its last, also where other tokens are between them, as in models that cut
        pictures into tiles: `image_token_mask` has the picture's own tokens only.
        """
        given = self._last_inputs if inputs is None else self._as_inputs(inputs, images)
        if given is None:
            raise HooklineError("no inputs with pictures were made or run so far: give inputs=model.to_inputs(…)")
        rows = places_in(self.module.config, self.processor, given, getattr(given, "sizes", None))
        if row not in range(-len(rows), len(rows)):
            raise HooklineError(f"row {row} is asked for, but the inputs have {len(rows)}")
        if picture not in range(-len(rows[row]), len(rows[row])):
            raise HooklineError(f"picture {picture} is asked for, but row {row} has {len(rows[row])}")
        found = rows[row][picture].tolist()
        return range(found[0], found[-1] + 1)

    def image_grid(
        self, inputs: Mapping[str, Any] | str | Sequence[str], images: Pictures | None = None
    ) -> list[list[ImageGrid]]:
        """Which place in a picture each of its positions stands for: a list for each prompt, of its pictures' grids.

            inputs = model.to_inputs("<image> What is this?", images=[picture])
            grid = model.image_grid(inputs)[0][0]
            grid.positions_in((0, 0, 0.5, 0.5))        # all positions that look at the upper left quarter

        Of inputs that `to_inputs` did not make, the pictures are needed as well where their sizes matter. A model
        without text has one row for each picture, and its positions are those of its own stream.
        """
        given = self._as_inputs(inputs, images)
        return grids_in(self.module.config, self.processor, given, getattr(given, "sizes", None))

    def patch_boxes(
        self, inputs: Mapping[str, Any] | str | Sequence[str] | None, images: Pictures | None = None
    ) -> Float[Tensor, "row patch 4"]:
        """The box of the picture that each position of the vision tower looks at, in the tower's own order.

            boxes = model.patch_boxes(inputs)
            boxes[0, 5]         # left, top, right, bottom: of cache["vision.blocks.0.hook_resid_post"][0, 5]

        Boxes are as in `image_grid`, with NaN for a class token. A tower that takes all pictures in one row (Qwen) has
        one row of boxes, each a part of its own picture.
        """
        given = self._as_inputs(inputs, images)
        if "pixel_values" not in given:
            raise HooklineError("there is no picture in these inputs: give model.to_inputs(prompt, images=[…])")
        return patch_boxes(Seen(self.module.config, self.processor, dict(given), getattr(given, "sizes", None), 0))

    def _as_inputs(self, inputs: Any, images: Pictures | None) -> Mapping[str, Any]:
        if isinstance(inputs, str) or not isinstance(inputs, Mapping):
            return self.to_inputs(inputs, images)
        if images is None:
            return inputs
        given = Inputs(inputs)
        nested: Any = [images] if is_picture(images) else images
        rows = [[each] if is_picture(each) else each for each in nested]
        given.sizes = sizes_of([[picture_of(picture) for picture in row] for row in rows])
        return given

    def _remember(self, inputs: Mapping[str, Any]) -> None:
        """Keep what says where pictures are, of inputs that have some; not the pictures themselves."""
        if "pixel_values" not in inputs or not isinstance(inputs.get("input_ids"), Tensor):
            return
        kept = Inputs({name: _without_data(value) for name, value in inputs.items() if isinstance(value, Tensor)})
        same = self._last_inputs is not None and self._last_inputs["input_ids"] is inputs["input_ids"]
        kept.sizes = getattr(inputs, "sizes", None) or (self._last_inputs.sizes if same else None)  # type: ignore[union-attr]
        self._last_inputs = kept


def _without_data(value: Tensor) -> Tensor:
    return value.detach().to("meta") if value.is_floating_point() else value


def _is_pixels(given: Any) -> bool:
    """Whether it is a picture, or several, and not text or tokens."""
    return type(given).__module__.startswith("PIL.") or getattr(given, "ndim", 0) > 2
