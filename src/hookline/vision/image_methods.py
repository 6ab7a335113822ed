"""Methods of a vision-language model: inputs from images, chat prompts, and positions of images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from hookline.engine import Plan
from hookline.errors import HooklineError
from hookline.functions.signatures import parameters_of
from hookline.text.chats import Chat
from hookline.text.image_tokens import mask_in
from hookline.text.known_chats import remember_chat
from hookline.text.tokenizer import Side, Text, check_no_mapping, shown_prompt
from hookline.vision.families import LayoutInputs, patch_boxes
from hookline.vision.grid import ImageGrid
from hookline.vision.images import Images, as_image, is_one_image, sizes_of
from hookline.vision.inputs import (
    Inputs,
    encode_images,
    encode_prompts,
    framed_placeholder,
    image_place,
    placeholder_of,
)
from hookline.vision.locate import grids_in, places_in


class ImageMethods:
    """Methods for images; a mixin that uses the model's module, processor, text and device."""

    module: nn.Module
    processor: Any
    tokenizer: Any
    _last_inputs: Inputs | None

    if TYPE_CHECKING:  # from the model

        @property
        def text(self) -> Text:
            """The tokenizer, with its checks."""

        @property
        def device(self) -> torch.device:
            """The device that the model takes tokens on."""

        def _text_inputs(self, prompt: Any, prepend_bos: bool | None, padding_side: Side | None) -> dict[str, Any]: ...

        def _positions(self, mask: Tensor | None) -> dict[str, Tensor]: ...

    def to_inputs(
        self,
        prompt: str | Sequence[str] | None = None,
        images: Images | None = None,
        *,
        prepend_bos: bool | None = None,
        padding_side: Side | None = None,
    ) -> Inputs:
        """Convert prompts and images to keyword inputs for `model(**inputs)`; without images, convert the text only.

            inputs = model.to_inputs("<image> What is this?", images=["cat.png"])
            logits = model(**inputs)

        An image is a PIL image, an array (height × width × 3, uint8 or floats from 0 to 1), or a path. One prompt
        takes a list of images, several prompts take one list each, and each image needs a placeholder in its prompt.
        The tensors are on the model's device, with floats in its dtype.
        """
        prompt, images = self._read(prompt, images)
        if images is None:
            return Inputs(self._text_inputs(prompt, prepend_bos, padding_side))
        self._check_takes_images()
        if not self.is_vision_only:
            prompts = self._prompts(prompt)
            chats = [text for text in prompts if isinstance(text, Chat)]
            if chats and (prepend_bos or len(chats) < len(prompts)):
                raise HooklineError(
                    "messages bring their special tokens: leave out prepend_bos, and pass texts separately"
                )
            prepend_bos = False if chats else prepend_bos
            inputs = encode_prompts(self.processor, prompts, images, prepend_bos=prepend_bos, padding_side=padding_side)
            self.text.check_ids(inputs["input_ids"])
            for chat, ids, mask in zip(chats, inputs["input_ids"], inputs["attention_mask"], strict=False):
                remember_chat(self.tokenizer, ids[mask.bool()].tolist(), chat)
        elif (prompt, prepend_bos, padding_side) != (None, None, None):
            raise HooklineError(f"{type(self.module).__name__} takes images but no text: model(images=[…])")
        else:
            inputs = encode_images(getattr(self.processor, "image_processor", self.processor), images)
        self._finish(inputs)
        self._remember(inputs)
        return inputs

    def _read(self, prompt: Any, images: Images | None, *, is_open: bool = False) -> tuple[Any, Images | None]:
        """A prompt with conversations as texts, and its images, which may be in the messages."""
        if prompt is None or isinstance(prompt, str | Tensor):
            return prompt, images
        texts = self.text.prompts(prompt, is_open=is_open)
        parts = [texts] if isinstance(texts, str) else texts
        in_messages = [part.images() if isinstance(part, Chat) else [] for part in parts] if texts is not prompt else []
        if not any(in_messages):
            return texts, images
        if images is not None:
            raise HooklineError("the messages have images: leave out images")
        return texts, in_messages[0] if isinstance(texts, str) else in_messages

    def example_inputs(self) -> Inputs | None:
        """Inputs with a synthetic image; None if the model takes no images or was wrapped without a processor."""
        if not self._can_make_inputs:
            return None
        shades = torch.linspace(0, 1, 48 * 64 * 3).mul(97).sin().abs().view(48, 64, 3)
        if self.is_vision_only:
            return self.to_inputs(images=[shades])
        return self.to_inputs(f"{framed_placeholder(self.processor)} What is this? It is here.", images=[shades])

    def _with_images(
        self, prompt: Any, images: Images, prepend_bos: bool | None, padding_side: Side | None, kwargs: dict[str, Any]
    ) -> Inputs:
        """The inputs of a run with images; raises if any of them is also passed directly."""
        inputs = self.to_inputs(prompt, images, prepend_bos=prepend_bos, padding_side=padding_side)
        twice = [name for name in inputs if name in kwargs]
        if twice:
            raise HooklineError(f"images= already provides these inputs, omit them: {', '.join(twice)}")
        return inputs

    def _prompts(self, prompt: Any) -> list[str]:
        check_no_mapping(prompt)
        token = placeholder_of(self.processor)
        prompts = [prompt] if isinstance(prompt, str) else prompt
        if isinstance(prompt, Tensor):
            raise HooklineError("with images, pass the prompt as text: the processor tokenizes it")
        if prompt is None or not prompts or not all(isinstance(text, str) and text for text in prompts):
            raise HooklineError(
                f"images need a prompt with {token!r} where each image belongs, not {shown_prompt(prompt)}"
            )
        return list(prompts)

    def _finish(self, inputs: Inputs) -> None:
        """Move inputs to the model's device and dtype, drop those it does not take, and add position ids."""
        taken = parameters_of(self.module)[0]
        for name in [name for name in inputs if "pixel_values" in taken and name not in taken]:
            del inputs[name]
        dtype = next(parameter.dtype for parameter in self.module.parameters() if parameter.is_floating_point())
        for name, value in inputs.items():
            if isinstance(value, Tensor):
                inputs[name] = value.to(device=self.device, dtype=dtype if value.is_floating_point() else None)
        config: Any = self.module.config
        rope = getattr(config.get_text_config(), "rope_parameters", None) or {}
        if "image_grid_thw" not in inputs or "mrope_section" not in rope:  # else the model computes 3-D position ids
            inputs.update(self._positions(inputs.get("attention_mask")))

    def _check_takes_images(self) -> None:
        """Raise if the model takes no images or has no processor for them."""
        name, main = type(self.module).__name__, str(getattr(self.module, "main_input_name", "input_ids"))
        if not self.takes_images:
            why = "it is a language model" if main == "input_ids" else f"it takes {main}="
            raise HooklineError(f"got images, but {name} takes none: {why}")
        if not self._can_make_inputs:
            maker = "AutoImageProcessor" if self.is_vision_only else "AutoProcessor"
            raise HooklineError(
                f"{name} was wrapped without a processor for images: wrap it as hookline.hook(model, "
                f"transformers.{maker}.from_pretrained(…)), or pass pixel_values="
            )

    def _are_pixels(self, prompt: Any) -> bool:
        """Whether a prompt is the `pixel_values` of a model without text."""
        return isinstance(prompt, Tensor) and prompt.is_floating_point() and self.is_vision_only

    def _check_prompt(self, prompt: Any) -> None:
        """Raise if the prompt is really an image, a mapping, or a text with placeholders but no images."""
        check_no_mapping(prompt)
        if self.is_vision_only:
            raise HooklineError(
                f"{type(self.module).__name__} takes images but no text: model(images=[…]), or model(pixel_values=…) "
                "with the output of its image processor"
            )
        if isinstance(prompt, Tensor) and prompt.ndim <= 2:
            return  # token ids
        place = image_place(self.processor)
        for part in (prompt if isinstance(prompt, list | tuple) else [prompt]) if self.takes_images else ():
            if type(part).__module__.startswith("PIL.") or getattr(part, "ndim", 0) > 2:  # an image, or several
                raise HooklineError("pass images by keyword: model(prompt, images=[…])")
            if isinstance(part, str) and place is not None and place in part:
                raise HooklineError(
                    f"the prompt {part!r} has an image placeholder, {place!r}, but no images were passed: images=[…]. "
                    "To run it without images, pass its tokens, model.to_tokens(prompt)"
                )

    @property
    def takes_images(self) -> bool:
        """Whether the model takes images, with or without text."""
        config: Any = self.module.config
        return "pixel_values" in parameters_of(self.module)[0] or getattr(config, "vision_config", None) is not None

    @property
    def _can_make_inputs(self) -> bool:
        """Whether the processor can encode images, and text if the model takes text."""
        is_whole = hasattr(self.processor, "image_processor") and hasattr(self.processor, "tokenizer")
        return is_whole or (self.is_vision_only and hasattr(self.processor, "preprocess"))

    @property
    def is_vision_only(self) -> bool:
        """Whether the model takes images but no text."""
        taken = parameters_of(self.module)[0]
        return "pixel_values" in taken and "input_ids" not in taken

    def to_chat(self, messages: str | Sequence[Mapping[str, Any]], images: int | Sequence[Any] = 0) -> str:
        """Format a question, preceded by `images` image placeholders, with the model's chat template.

            model.generate(model.to_chat("What is this?", images=1), images=["cat.png"])

        `images` may also be the images themselves. Instead of a question, pass a list of messages as in transformers:
        dicts with "role" and "content". Returns text, for `to_inputs`, `generate` and so on.
        """
        owner = self.processor if getattr(self.processor, "chat_template", None) else self.tokenizer
        if not getattr(owner, "chat_template", None):
            raise HooklineError("no chat template: neither the processor nor the tokenizer has one")
        n = images if isinstance(images, int) else 1 if is_one_image(images) else len(images)
        if isinstance(messages, str):
            parts = [*[{"type": "image"}] * n, {"type": "text", "text": messages}]
            messages = [{"role": "user", "content": parts if owner is self.processor or n else messages}]
        elif n:
            raise HooklineError('messages contain their images as {"type": "image"}: omit images')
        text: str = owner.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=False)
        if n and text.count(token := placeholder_of(self.processor)) != n:
            raise HooklineError(
                f"the chat template writes {text.count(token)} placeholders for {n} images: write the prompt yourself, "
                f"with {token!r} where each image belongs"
            )
        return without_second_bos(self.tokenizer, text)

    def image_token_mask(
        self, inputs: Mapping[str, Any] | Tensor | str | Sequence[str], images: Images | None = None
    ) -> Bool[Tensor, "batch pos"]:
        """True at image-token positions, for inputs, for tokens, or for prompts with their `images`."""
        tokens = inputs if isinstance(inputs, Tensor) else self._as_inputs(inputs, images).get("input_ids")
        if not isinstance(tokens, Tensor):
            raise HooklineError("these inputs have no input_ids: a model without text has no image tokens")
        return mask_in(tokens[None] if tokens.ndim == 1 else tokens, self.module.config)

    def image_token_range(
        self,
        image: int = 0,
        inputs: Mapping[str, Any] | str | Sequence[str] | None = None,
        row: int = 0,
        *,
        images: Images | None = None,
    ) -> range:
        """The positions of one image in a row of the inputs; without `inputs`, in the last inputs that had images.

        The range goes from the first token of the image to the last, including other tokens in between, as in models
        that tile images; `image_token_mask` marks only the image's own tokens.
        """
        model_inputs = self._last_inputs if inputs is None else self._as_inputs(inputs, images)
        if model_inputs is None:
            raise HooklineError("no inputs with images have been made or run yet: pass inputs=model.to_inputs(…)")
        rows = places_in(LayoutInputs(self.module.config, self.processor, model_inputs))
        if row not in range(-len(rows), len(rows)):
            raise HooklineError(f"row {row} is out of range: the inputs have {len(rows)} rows")
        if image not in range(-len(rows[row]), len(rows[row])):
            raise HooklineError(f"image {image} is out of range: row {row} has {len(rows[row])} images")
        positions = rows[row][image].tolist()
        return range(positions[0], positions[-1] + 1)

    def image_grid(
        self, inputs: Mapping[str, Any] | str | Sequence[str], images: Images | None = None
    ) -> list[list[ImageGrid]]:
        """The region of the image that each token position covers: one list per prompt, with a grid per image.

            inputs = model.to_inputs("<image> What is this?", images=[image])
            grid = model.image_grid(inputs)[0][0]
            grid.positions_in((0, 0, 0.5, 0.5))        # all positions that cover the upper left quarter

        For inputs that `to_inputs` did not make, also pass the images if the layout depends on their sizes. A model
        without text has one row per image, and its positions are those of its own stream.
        """
        return grids_in(LayoutInputs(self.module.config, self.processor, self._as_inputs(inputs, images)))

    def patch_boxes(
        self, inputs: Mapping[str, Any] | str | Sequence[str] | None, images: Images | None = None
    ) -> Float[Tensor, "row patch 4"]:
        """The region of the image that each position of the vision tower covers, in the tower's order.

            boxes = model.patch_boxes(inputs)
            boxes[0, 5]         # left, top, right, bottom, for cache["vision.blocks.0.hook_resid_post"][0, 5]

        Boxes are as in `image_grid`, with NaN for a class token. A tower that packs all images into one row (Qwen) has
        one row of boxes, each relative to its own image.
        """
        model_inputs = self._as_inputs(inputs, images)
        if "pixel_values" not in model_inputs:
            raise HooklineError("these inputs have no image: pass model.to_inputs(prompt, images=[…])")
        return patch_boxes(LayoutInputs(self.module.config, self.processor, model_inputs))

    def _as_inputs(self, inputs: Any, images: Images | None) -> Mapping[str, Any]:
        if isinstance(inputs, str) or not isinstance(inputs, Mapping):
            return self.to_inputs(inputs, images)
        if images is None:
            return inputs
        sized_inputs = Inputs(inputs)
        nested: Any = [images] if is_one_image(images) else images
        rows = [[row] if is_one_image(row) else row for row in nested]
        sized_inputs.sizes = sizes_of([[as_image(image) for image in row] for row in rows])
        return sized_inputs

    def _remember(self, inputs: Mapping[str, Any]) -> None:
        """Keep what locates the images in these inputs, without the pixels."""
        if "pixel_values" not in inputs:
            return
        tensors = {name: x for name, x in inputs.items() if isinstance(x, Tensor)}
        if "input_ids" not in tensors:
            return
        meta_inputs = Inputs(
            {name: x.detach().to("meta") if x.is_floating_point() else x for name, x in tensors.items()}
        )
        last = self._last_inputs
        same = last is not None and last["input_ids"] is inputs["input_ids"]
        meta_inputs.sizes = getattr(inputs, "sizes", None) or (last.sizes if same else None)  # type: ignore[union-attr]
        self._last_inputs = meta_inputs


def with_shapes(model: Any, plan: Plan, inputs: Mapping[str, Any]) -> Plan:
    """The plan with the shapes that its points have in a run on these inputs; no activation is kept."""
    with torch.no_grad():
        _, cache = model.run_with_cache(**inputs, names_filter=[row.name for row in plan.rows], device="meta")
    calls: dict[str, list[Tensor]] = {}
    for name, value in cache.items():  # name#n is the n-th call of a module that ran several times
        calls.setdefault(name.partition("#")[0], []).append(value)
    return Plan(tuple(row.with_calls(calls.get(row.name, [])) for row in plan.rows), plan.modules)


def without_second_bos(tokenizer: Any, text: str) -> str:
    """The text without its BOS token if the tokenizer adds one as well."""
    bos = tokenizer.bos_token
    if bos is None or not text.startswith(bos):
        return text
    ids = tokenizer(text)["input_ids"]
    return text.removeprefix(bos) if list(ids[:2]) == [tokenizer.bos_token_id] * 2 else text
