"""Images as input: what goes in, what comes of it, and what is said when it cannot."""

from __future__ import annotations

import pickle
import re
from pathlib import Path
from typing import Any

import devices
import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from releases import without_torchvision
from tiny_models import causal_lm
from tiny_vision import ENCODERS, IMAGE, VISION_LANGUAGE, inputs_of, module_of, place_of, processor_of, tiny_vision
from typer.testing import CliRunner

import hookline
from hookline import at
from hookline.cli import app
from hookline.errors import HooklineError
from hookline.positions import image_tokens, turn
from hookline.vision.images import as_image
from hookline.vision.inputs import images_per_prompt

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # in PaliGemma's own
IN_STREAM = [name for name in VISION_LANGUAGE if name != "mllama"]


def noise(height: int = 20, width: int = 28, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


@pytest.fixture(scope="module")
def llava() -> Any:
    module, processor, _ = tiny_vision("llava")
    return hookline.hook(module, processor)


def seeing(name: str) -> Any:
    return hookline.hook(module_of(name), processor_of(name))


def place(model: Any) -> str:
    return place_of(model.processor)


# Images


def test_all_that_is_an_image(tmp_path) -> None:
    array = noise()
    Image.fromarray(array).save(tmp_path / "a.png")
    tensor = torch.from_numpy(array)
    kinds = [array, Image.fromarray(array), str(tmp_path / "a.png"), tmp_path / "a.png"]
    kinds += [array / 255, (array / 255).astype(np.float32), array.transpose(2, 0, 1)]
    kinds += [tensor, tensor.permute(2, 0, 1), tensor.float() / 255, (tensor.double() / 255).permute(2, 0, 1)]
    for given in kinds:
        image = as_image(given)
        assert image.mode == "RGB"
        assert np.array_equal(np.asarray(image), array)


@pytest.mark.parametrize("mode", ["L", "1", "P", "RGBA", "LA", "CMYK", "YCbCr", "RGB"])
def test_every_mode_of_eight_bits(mode) -> None:
    given = Image.fromarray(noise()).convert(mode)
    assert np.array_equal(np.asarray(as_image(given)), np.asarray(given.convert("RGB")))


def test_grey_arrays() -> None:
    grey = noise()[..., 0]
    for given in (grey, grey[..., None], grey[None], torch.from_numpy(grey)):
        assert np.array_equal(np.asarray(as_image(given)), np.repeat(grey[..., None], 3, 2))


@pytest.mark.parametrize("turned", range(1, 9))
def test_a_file_that_says_how_it_is_turned(tmp_path, turned) -> None:
    exif = Image.Exif()
    exif[0x0112] = turned
    Image.fromarray(noise(20, 28)).save(tmp_path / "a.png", exif=exif)
    with Image.open(tmp_path / "a.png") as given:
        assert given.size == (28, 20)
        upright = ImageOps.exif_transpose(given)
        assert as_image(given) == as_image(tmp_path / "a.png") == as_image(upright) == upright
    assert upright.size == ((28, 20) if turned < 5 else (20, 28))


def test_alpha_is_left_out() -> None:
    clear = np.concatenate([noise(), np.zeros((20, 28, 1), np.uint8)], 2)
    for given in (clear, Image.fromarray(clear)):
        assert np.array_equal(np.asarray(as_image(given)), noise())


def test_what_is_no_image(tmp_path) -> None:
    (tmp_path / "a.png").write_text("not an image")
    Image.fromarray(noise(99, 99)).save(tmp_path / "whole.png")
    (tmp_path / "cut.png").write_bytes((tmp_path / "whole.png").read_bytes()[:900])
    for given, message in (
        (str(tmp_path / "none.png"), "does not exist"),
        (tmp_path, "does not exist"),
        (tmp_path / "a.png", "png"),
        (tmp_path / "cut.png", "png"),
        ("https://a.b/c.png", "not downloaded"),
        (None, "NoneType"),
        (7, "an int"),
        (noise()[None], r"list\(array\)"),
        (np.zeros(5, np.uint8), "expected height"),
        (np.zeros((8, 9, 5), np.uint8), "no axis of 1, 3 or 4"),
        (np.zeros((3, 9, 3), np.uint8), "first or last"),
        (np.zeros((0, 9, 3), np.uint8), "is empty"),
        (noise().astype(np.int64), "array of int64"),
        (noise().astype(np.float32), "expected 0 to 1"),
        (np.full((5, 5, 3), np.nan), "expected 0 to 1"),
        (np.full((5, 5, 3), -0.5), "floats from -0.5 to -0.5"),
        (Image.fromarray(np.full((4, 5), 40000, np.uint16)), "more than 8 bits"),
        (Image.fromarray(np.ones((4, 5), np.float32)), "more than 8 bits"),
        (Image.new("La", (4, 5)), "PIL mode 'La'"),
    ):
        with pytest.raises(HooklineError, match=message) as error:
            as_image(given, "image 3")
        assert str(error.value).startswith("image 3")


def test_images_and_places_are_matched() -> None:
    a, b = noise(), noise(seed=1)
    assert [len(row) for row in images_per_prompt(a, [1])] == [1]
    assert [len(row) for row in images_per_prompt([a, b], [2])] == [2]
    assert [len(row) for row in images_per_prompt([[a, b]], [2])] == [2]
    assert [len(row) for row in images_per_prompt([a, b], [1, 1])] == [1, 1]
    assert [len(row) for row in images_per_prompt([[a, b], []], [2, 0])] == [2, 0]
    for images, places, message in (
        ([], [1], "images is empty"),
        ([a, [b]], [1, 1], "mixes"),
        ([[a]], [1, 1], "2 prompts but 1 lists"),
        ([a, b], [1], "1 image placeholder.* 2 images"),
        (a, [0], "no image placeholders.* 1 image.* '<image>'"),
        ([[a], [a]], [1, 2], "prompt 1 has 2"),
        ([a, b], [2, 0], "2, 0 image placeholders"),
        ([a], [1, 1], "1, 1 image placeholders.* 1 image"),
    ):
        with pytest.raises(HooklineError, match=message):
            images_per_prompt(images, places, "<image>")


# Runs


@pytest.mark.parametrize("name", VISION_LANGUAGE)
def test_a_prompt_with_images_is_what_the_processor_makes_of_it(name) -> None:
    model = seeing(name)
    text, image = f"what is {place(model)} here ?", noise()
    made = model.processor(text=text, images=[[Image.fromarray(image)]], return_tensors="pt").to(devices.DEVICE)
    made.pop("labels", None)  # PaliGemma's, for training
    if name == "mllama":  # its processor and its tokenizer both put a beginning first
        made = model.processor(
            text=text, images=[[Image.fromarray(image)]], return_tensors="pt", add_special_tokens=False
        ).to(devices.DEVICE)
    with torch.no_grad():
        wanted = model.module(**made).logits
        assert torch.equal(model(text, images=[image]), wanted)
        assert torch.equal(model(text, images=image), wanted)
        assert torch.equal(model(**model.to_inputs(text, images=image)), wanted)
        assert torch.equal(model.run_with_hooks(text, images=image), wanted)
        logits, cache = model.run_with_cache(text, images=image)
        assert torch.equal(logits, wanted)
        assert cache["blocks.0.hook_resid_pre"].shape[:2] == wanted.shape[:2]
        assert not torch.allclose(model(text, images=255 - image), wanted)


@pytest.mark.parametrize("name", [name for name in VISION_LANGUAGE if name != "mllama"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_rows_of_a_batch_are_as_they_are_alone(name, side) -> None:
    model = seeing(name)
    one, two = f"what is {place(model)} here ?", f"{place(model)} and {place(model)} are"
    images, texts = [[noise()], [noise(40, 20), noise(16, 16)]], [one, two]
    if name != "paligemma":  # that takes no prompt without an image among others
        images, texts = [*images, []], [*texts, "what is red ?"]
    inputs = model.to_inputs(texts, images=images, padding_side=side)
    with torch.no_grad():
        together = model(**inputs)
        for row, text in enumerate(texts):
            alone = model(text, images=images[row]) if images[row] else model(text)
            here = together[row][inputs["attention_mask"][row].bool()]
            assert torch.allclose(here, alone[0], atol=2e-5), row


@pytest.mark.parametrize("name", VISION_LANGUAGE)
def test_generation_with_images_under_hooks(name) -> None:
    model = seeing(name)
    texts = [f"what is {place(model)} here ?", f"{place(model)} and the colour of {place(model)} ?"]
    images = [[noise()], [noise(40, 20), noise(16, 16)]]
    seen: list[int] = []
    with model.hooks([("blocks.1.hook_resid_post", lambda x: seen.append(x.shape[1]))]):
        ids = model.generate(
            **model.to_inputs(texts, images=images, padding_side="left"), max_new_tokens=3, do_sample=False
        )
    assert seen[1:] == [1] * (len(seen) - 1)
    assert seen[0] + len(seen) == ids.shape[1]
    texts_out = model.generate(texts, 3, images=images, do_sample=False)
    assert texts_out == model.tokenizer.batch_decode(ids, skip_special_tokens=True)
    alone = model.generate(texts[0], 3, images=images[0], do_sample=False)
    assert isinstance(alone, str)

    def push(x: torch.Tensor) -> torch.Tensor:
        return x + 20 * torch.randn(x.shape[-1], generator=torch.Generator().manual_seed(1))

    with model.hooks([("blocks.1.hook_resid_post", push)]):  # other tokens, which need not show in the texts
        pushed = model.generate(
            **model.to_inputs(texts, images=images, padding_side="left"), max_new_tokens=3, do_sample=False
        )
    assert not torch.equal(pushed, ids)


def test_plans_take_images(llava) -> None:
    table = llava.points(None, "what is <image> ?", images=[noise()])
    _, cache = llava.run_with_cache("what is <image> ?", images=[noise()])
    assert {row.name: row.shape for row in table} == {name: tuple(value.shape) for name, value in cache.items()}
    plan = llava.plan("blocks.0.hook_resid_pre", input="what is <image> ?", images=[noise()])
    assert plan.rows[0].shape == (1, 20, 32)  # 16 of the image, and 4 of the text
    assert plan.nbytes == 20 * 32 * 4


def test_the_cache_alone_and_the_stream(llava) -> None:
    cache = llava.cache("<image> red", images=[noise()], names_filter="blocks.0.hook_resid_pre")
    stream = llava("<image> red", images=[noise()], stop_at_layer=0)
    assert torch.equal(cache["blocks.0.hook_resid_pre"], stream)
    loss = llava("<image> red", "loss", images=[noise()], loss_per_token=True)
    assert loss.shape == (1, stream.shape[1] - 1)


def test_pixels_take_the_models_type() -> None:
    model = hookline.hook(module_of("llava").to(torch.bfloat16), processor_of("llava"))
    inputs = model.to_inputs("<image> red", images=noise())
    assert inputs["pixel_values"].dtype == torch.bfloat16
    assert inputs["input_ids"].dtype == torch.long
    assert model(**inputs).dtype == torch.bfloat16


@pytest.mark.parametrize("name", ENCODERS)
def test_a_model_that_only_sees(name) -> None:
    model = seeing(name)
    images = [noise(), noise(40, 20)]
    pixels = model.processor(images=[Image.fromarray(each) for each in images], return_tensors="pt").to(devices.DEVICE)[
        "pixel_values"
    ]
    with torch.no_grad():
        wanted = model.module(pixel_values=pixels)[0]
        assert torch.equal(model(images=images), wanted)
        assert torch.equal(model(pixel_values=pixels), wanted)
        assert torch.equal(model(None, images=images[0]), model(images=[images[0]]))
    with pytest.raises(HooklineError, match="no text"):
        model("what ?", images=images)
    with pytest.raises(HooklineError, match="contains lists"):
        model(images=[images])
    with pytest.raises(HooklineError, match="vision-language model"):
        model.image_token_mask(torch.ones(1, 4, dtype=torch.long))
    for given in (None, processor_of("llava").tokenizer):
        with pytest.raises(HooklineError, match="AutoImageProcessor"):
            hookline.hook(model.module, given)(images=images)
    whole = processor_of("llava")  # with a tokenizer, that is of no use here
    whole.image_processor = model.processor
    assert torch.equal(hookline.hook(model.module, whole)(images=images), wanted)


# Where images are


@pytest.mark.parametrize("name", IN_STREAM)
def test_image_tokens_are_where_the_mask_says(name) -> None:
    model = seeing(name)
    texts = [f"what is {place(model)} here ?", f"{place(model)} and {place(model)}"]
    inputs = model.to_inputs(texts, images=[[noise()], [noise(40, 20), noise(16, 16)]])
    mask = model.image_token_mask(inputs)
    assert mask.dtype == torch.bool
    assert torch.equal(mask, inputs["input_ids"] == IMAGE)
    assert torch.equal(mask, model.image_token_mask(inputs["input_ids"]))
    assert torch.equal(mask, model.image_token_mask(texts, images=[[noise()], [noise(40, 20), noise(16, 16)]]))
    kept: list[torch.Tensor] = []
    hooks = [("blocks.0.hook_resid_pre", at(image_tokens, lambda x: x * 0))]
    hooks += [("blocks.0.hook_resid_pre", lambda x: kept.append((x == 0).all(-1)))]
    model.run_with_hooks(**inputs, fwd_hooks=hooks)
    assert torch.equal(kept[0], mask)
    changed = (model(**inputs, stop_at_layer=0) - model(**_other_images(inputs), stop_at_layer=0)).abs().amax(-1) > 0
    assert not (changed & ~mask).any()
    assert changed.sum() > mask.sum() / 2  # all but the ends of rows, in some models


def test_positions_in_the_tower_are_places_in_images(llava) -> None:
    point, text = "vision.blocks.1.hook_resid_post", "red " * 16  # as many tokens as the tower has positions
    zeroed = llava.run_with_cache(
        f"<image> {text}", images=[noise()], fwd_hooks=[(point, at([0, 5], torch.zeros_like))]
    )
    empty = (zeroed[1][point] == 0).all(-1)[0]
    assert empty.nonzero().flatten().tolist() == [0, 5]
    for where in (hookline.last, image_tokens, hookline.token(4)):
        for name in (point, "model.vision_tower.encoder.layers.1"):
            with pytest.raises(HooklineError, match="image patches"):
                llava.run_with_hooks("<image> red", images=[noise()], fwd_hooks=[(name, at(where, torch.zeros_like))])
    with pytest.raises(hookline.HookError, match="patches"):
        llava.run_with_hooks("<image> red", images=[noise()], fwd_hooks=[(point, lambda x, hook: hook.positions)])
    texts = ["<image> red", "<image> red red"]
    _, cache = llava.run_with_cache(texts, images=[noise(), noise()])
    assert not hasattr(cache[point], "padding_mask")
    vit = seeing("vit")
    cache = vit.cache(images=[noise()], names_filter="vision.blocks.0.hook_resid_post", pos_slice=[0])
    assert cache["vision.blocks.0.hook_resid_post"].shape == (1, 1, 40)


def test_a_token_that_is_made_is_no_image() -> None:
    """A model that writes the token of images: there is none at the place of what it wrote."""
    model = seeing("llava")
    seen: list[int] = []

    def edit(x: torch.Tensor, hook: Any) -> torch.Tensor:
        seen.append(hook.step)
        return x * 0

    def always(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.one_hot(torch.full(x.shape[:2], IMAGE), x.shape[-1]).to(x)

    with model.hooks([("lm_head", always), ("blocks.0.hook_resid_pre", at(image_tokens, edit))]):
        inputs = model.to_inputs("what is <image>", images=noise())
        made = model.generate(**inputs, max_new_tokens=3, do_sample=False)
    assert made[0, -3:].tolist() == [IMAGE] * 3
    assert seen == [0]


def test_images_of_a_later_turn_are_found() -> None:
    model = seeing("llava")
    first = model.to_inputs("what is <image>", images=noise())
    later = model.to_inputs("and <image>", images=noise(seed=1), prepend_bos=False)
    masks: list[torch.Tensor] = []

    def keep(x: torch.Tensor) -> torch.Tensor:
        masks.append((x == 0).all(-1))
        return x

    edits = [("blocks.0.hook_resid_pre", at(image_tokens, torch.zeros_like)), ("blocks.0.hook_resid_pre", keep)]
    with torch.no_grad(), model.hooks(edits):
        kept = model.module(**first, use_cache=True).past_key_values
        whole = torch.ones(1, first["input_ids"].shape[1] + later["input_ids"].shape[1], dtype=torch.long)
        model.module(**{**later, "attention_mask": whole}, past_key_values=kept)
    assert torch.equal(masks[0], model.image_token_mask(first))
    assert torch.equal(masks[1], model.image_token_mask(later))


def _other_images(inputs: dict[str, Any]) -> dict[str, Any]:
    return {**inputs, "pixel_values": inputs["pixel_values"].flip(-1)}


def test_the_last_inputs_with_images(llava) -> None:
    fresh = hookline.hook(llava.module, llava.processor)
    with pytest.raises(HooklineError, match=r"inputs.*images"):
        fresh.image_token_range(0)
    llava("what <image> is <image>", images=[noise(), noise(40, 20)])
    llava("what is red")  # has none
    assert llava.image_token_range(0) == range(2, 18)
    assert llava.image_token_range(1) == llava.image_token_range(-1) == range(19, 35)
    inputs = llava.to_inputs(["<image> red", "red <image>"], images=[noise(), noise()], padding_side="right")
    assert llava.image_token_range(0, inputs, row=1) == range(2, 18)
    assert llava.image_token_range(0, "red red <image>", images=noise()) == range(3, 19)
    with pytest.raises(HooklineError, match="image 2"):
        llava.image_token_range(2, inputs)
    with pytest.raises(HooklineError, match="row 5"):
        llava.image_token_range(0, inputs, row=5)
    assert llava._last_inputs["pixel_values"].is_meta


def test_images_side_by_side_are_told_apart(llava) -> None:
    inputs = llava.to_inputs("<image><image> red", images=[noise(), noise()])
    assert llava.image_token_range(0, inputs) == range(1, 17)
    assert llava.image_token_range(1, inputs) == range(17, 33)


@pytest.mark.parametrize("name", ["mllama", "whisper"])
def test_models_without_such_positions_say_so(name) -> None:
    module, processor, inputs = tiny_vision(name)
    model = hookline.hook(module, processor)
    message = "cross-attention, in the layers" if name == "mllama" else "vision-language model"
    tokens = inputs["input_ids" if name == "mllama" else "decoder_input_ids"]
    with pytest.raises(HooklineError, match=message):
        model.image_token_mask(tokens)
    where = "blocks.0.hook_resid_pre" if name == "mllama" else "decoder.0.hook_resid_pre"
    with pytest.raises(HooklineError, match=message):
        model.run_with_hooks(**inputs, fwd_hooks=[(where, at(image_tokens, torch.zeros_like))])
    if name == "mllama":
        with pytest.raises(HooklineError, match=message):
            model.image_grid("what is <|image|> ?", images=noise())


# Chats


@pytest.mark.parametrize("name", VISION_LANGUAGE)
def test_chats(name) -> None:
    model = seeing(name)
    text = model.to_chat("what is it ?", images=2)
    assert text.count(place(model)) == 2
    assert text == model.to_chat("what is it ?", images=[noise(), noise()])
    inputs = model.to_inputs(text, images=[noise(), noise(40, 20)])
    assert inputs["input_ids"].eq(model.tokenizer.bos_token_id).sum() == (2 if name == "paligemma" else 1)
    messages = [{"role": "user", "content": [{"type": "text", "text": "red"}, {"type": "image"}]}]
    assert place(model) in model.to_chat(messages)
    assert "what is it ?" in model.to_chat("what is it ?")
    with pytest.raises(HooklineError, match="omit images"):
        model.to_chat(messages, images=1)


@pytest.mark.parametrize("name", VISION_LANGUAGE)
def test_messages_with_images(name) -> None:
    """Images in the messages are images of the prompt; turns cover the words, not the images."""
    model, image = seeing(name), noise()
    bare = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what is it ?"}]}]
    messages = [{"role": "user", "content": [{"type": "image", "image": image}, bare[0]["content"][1]]}]
    inputs = model.to_inputs(messages)
    text = model.text.prompts(bare)
    expected = model.to_inputs(str(text), images=[image], prepend_bos=False)
    assert torch.equal(inputs["input_ids"], expected["input_ids"])
    assert torch.equal(model(messages), model(**expected))
    assert torch.equal(model(bare, images=[image]), model(**expected))
    positions = model.cache(messages, names_filter="blocks.0.hook_resid_post", pos_slice=turn("user"))
    words = model.tokenizer("what is it ?", add_special_tokens=False)["input_ids"]
    assert positions["blocks.0.hook_resid_post"].shape[1] == len(words)
    if not model.anatomy.is_encoder_decoder:
        answer = model.generate(messages, 2, do_sample=False)
        assert isinstance(answer, str)
        assert model.generate([messages, messages], 2, do_sample=False) == [answer, answer]
    with pytest.raises(HooklineError, match="images"):
        model(messages, images=[image])


def test_a_chat_without_a_template(llava) -> None:
    model = hookline.hook(module_of("llava"), processor_of("llava"))
    model.processor.chat_template = None
    with pytest.raises(HooklineError, match="chat"):
        model.to_chat("what ?", images=1)
    model.processor.chat_template = "{{ messages[0]['role'] }}"
    with pytest.raises(HooklineError, match="0 placeholders"):
        model.to_chat("what ?", images=1)


def test_a_chat_of_text(llava) -> None:
    model = hookline.hook(causal_lm("llama", vocab_size=200), llava.tokenizer)
    with pytest.raises(HooklineError, match="chat"):
        model.to_chat("what ?")


def test_one_beginning_however_it_came_about(llava) -> None:
    bos = llava.tokenizer.bos_token_id
    for texts in (["<bos> <image> red", "<image> is red"], ["<image> red", "<image>"]):
        inputs = llava.to_inputs(texts, images=[noise(), noise()])
        assert inputs["input_ids"].eq(bos).sum(1).tolist() == [1, 1]
        assert inputs["input_ids"][:, 0].eq(bos).all()
    assert not llava.to_inputs("<image> red", images=noise(), prepend_bos=False)["input_ids"].eq(bos).any()
    twice = llava.to_inputs("<image> red", images=noise(), prepend_bos=True)["input_ids"]
    assert twice.tolist() == llava.to_inputs("<image> red", images=noise())["input_ids"].tolist()


# What cannot be


def test_errors_of_runs(llava) -> None:
    image = noise()
    for call, message in (
        (lambda: llava("what is red ?", images=[image]), "'<image>'"),
        (lambda: llava("<image> <image>", images=[image]), "2 image placeholders"),
        (lambda: llava("<image>", images=[image, image]), "2 images"),
        (lambda: llava("red", images=[]), "images is empty"),
        (lambda: llava(["red", "red"], images=[[], []]), "no prompt has an image"),
        (lambda: llava(images=[image]), "'<image>'"),
        (lambda: llava(torch.ones(1, 3, dtype=torch.long), images=[image]), "pass the prompt as text"),
        (lambda: llava("<image>", images=["none.png"]), "image 0: file 'none.png'"),
        (lambda: llava(["<image>", "<image>"], images=[image, "none.png"]), "image 0 of prompt 1"),
        (lambda: llava("<image>", images=image, pixel_values=torch.ones(1)), "omit them: pixel_values"),
        (lambda: llava("<image>", images=image, attention_mask=torch.ones(1, 3)), "leave attention_mask out"),
        (lambda: llava("<image>", images=image, start_at_layer=1), "do not apply with start_at_layer"),
        (lambda: llava.generate("red", images=image), "no image placeholders"),
        (lambda: llava.generate(), "no input was given: pass text or token ids"),
        (lambda: llava.generate("red", input_ids=torch.ones(1, 3, dtype=torch.long)), "given twice"),
        (lambda: llava.run_with_cache("red", images=image), "no image placeholders"),
        (lambda: llava.to_inputs("<image>", image, padding_side="up"), 'padding_side must be "left" or "right"'),
    ):
        with pytest.raises(HooklineError, match=message):
            call()


def test_a_text_among_images_that_a_processor_would_garble() -> None:
    model = seeing("paligemma")
    texts = ["<image> what is", "what is red"]
    with pytest.raises(HooklineError, match=r"prompt 1.* PaliGemmaProcessor"):
        model.to_inputs(texts, images=[[noise()], []])
    with pytest.raises(HooklineError, match="prompt 0"):
        model(texts[::-1], images=[[], [noise()]])
    assert model(texts[1]).shape[1] == 3


@pytest.mark.parametrize("name", VISION_LANGUAGE)
def test_images_that_were_forgotten(name) -> None:
    model = seeing(name)
    text = f"what {place(model)} colour"
    for call in (
        *(lambda: model(text), lambda: model(["what", text]), lambda: model(text, "loss"), lambda: model.cache(text)),
        *(lambda: model.generate(text, 1), lambda: model.generate(["red", text], 1), lambda: model.to_inputs(text)),
        *(lambda: model.run_with_cache(text), lambda: model.run_with_hooks(text), lambda: model.points(None, text)),
        *(lambda: model.verify(text), lambda: model.baseline(text), lambda: model.image_token_mask(text)),
        *(lambda: model.image_token_range(0, text), lambda: model.image_grid(text)),
    ):
        with pytest.raises(HooklineError, match="images="):
            call()
    with torch.no_grad():
        assert torch.equal(model(model.to_tokens(text)), model(input_ids=model.to_tokens(text)))
        assert model("what colour").shape[0] == 1
    alone = hookline.hook(model.module, model.tokenizer)  # has nothing to make inputs of images with
    assert alone(text).shape[0] == 1


def test_texts_without_an_image_have_no_grid(llava) -> None:
    for given in ("what is red", ["what", "red"], llava.to_inputs("what is red")):
        with pytest.raises(HooklineError, match="no image"):
            llava.image_grid(given)
        with pytest.raises(HooklineError, match="no image"):
            llava.image_token_range(0, given)
        assert not llava.image_token_mask(given).any()


def test_keyword_inputs_in_place_of_a_prompt(llava) -> None:
    inputs = llava.to_inputs("what is <image>", images=noise())
    for given in (
        inputs,
        dict(inputs),
        llava.processor(text="what <image>", images=noise(), return_tensors="pt").to(devices.DEVICE),
    ):
        for call in (
            *(lambda x: llava(x), lambda x: llava.run_with_cache(x), lambda x: llava.generate(x, 3)),
            *(lambda x: llava(x, images=noise()), lambda x: llava.to_tokens(x), lambda x: llava.to_inputs(x)),
        ):
            with pytest.raises(HooklineError, match=r"input_ids.* model\(\*\*inputs\)") as error:
                call(given)
            assert "tensor" not in str(error.value)
    for given in ([inputs["input_ids"]], [noise(16, 16)[0, 0]], 7.5):
        with pytest.raises(HooklineError) as error:
            llava(given)
        assert len(str(error.value)) < 130


def test_images_in_place_of_a_prompt(llava) -> None:
    image = Image.fromarray(noise())
    for given in (image, [image], noise(), [noise()], torch.zeros(1, 3, 16, 16)):
        with pytest.raises(HooklineError, match=r"model\(prompt, images="):
            llava(given)
        for name in ENCODERS:
            model = hookline.hook(module_of(name))
            calls = (
                [model.to_inputs] if isinstance(given, torch.Tensor) else [model, model.run_with_cache, model.to_inputs]
            )
            for call in calls:
                with pytest.raises(HooklineError, match=r"no text.*pixel_values="):
                    call(given)


def test_the_place_to_type_is_named_in_the_models_words() -> None:
    model = seeing("qwen2_vl")
    with pytest.raises(HooklineError, match=r"'<\|vision_start\|><\|image_pad\|><\|vision_end\|>'"):
        model("what ?", images=noise())
    with pytest.raises(HooklineError, match="'<start_of_image>'"):
        seeing("gemma3")("what ?", images=noise())


def test_models_that_take_no_images(llava) -> None:
    model = hookline.hook(causal_lm("llama", vocab_size=200), llava.tokenizer)
    assert model.processor is None
    with pytest.raises(HooklineError, match="LlamaForCausalLM"):
        model("<image> red", images=noise())
    with pytest.raises(HooklineError, match="takes none"):
        model.generate("<image> red", images=noise())
    with pytest.raises(HooklineError, match="input_features="):
        hookline.hook(module_of("whisper"))("red", images=noise())


def test_a_model_wrapped_with_a_tokenizer_alone(llava) -> None:
    model = hookline.hook(llava.module, llava.tokenizer)
    assert model.processor is None
    with pytest.raises(HooklineError, match="AutoProcessor"):
        model("<image> red", images=noise())
    with pytest.raises(HooklineError, match="AutoProcessor"):
        hookline.hook(llava.module, llava.processor.image_processor)("<image> red", images=noise())
    inputs = inputs_of("llava")
    assert model.image_token_mask(inputs).sum(1).tolist() == [16, 16]
    assert model.image_token_range(0, inputs) == range(4, 20)
    with pytest.raises(HooklineError, match="depend"):
        model.image_grid(inputs)


# The way in


def test_tokenizer_and_processor(llava) -> None:
    assert llava.processor.tokenizer is llava.tokenizer
    fresh = seeing("llava")  # the module itself cannot be pickled any more once transformers has hooked it
    again = pickle.loads(pickle.dumps(fresh))
    assert again.processor.image_token == "<image>"
    assert torch.equal(again("<image> red", images=noise()), fresh("<image> red", images=noise()))


def test_loading_brings_the_processor(tmp_path: Path, llava) -> None:
    llava.module.save_pretrained(tmp_path)
    llava.processor.save_pretrained(tmp_path)
    model = hookline.load(tmp_path)
    assert type(model.processor).__name__ == "LlavaProcessor"
    with torch.no_grad():
        inputs = model.to_inputs(
            "<image> red", images=noise()
        )  # transformers may choose a processor that resizes otherwise
        wanted = llava.module(**inputs).logits
        assert torch.allclose(model("<image> red", images=noise()), wanted, atol=1e-6 + devices.rounding())


def test_loading_a_model_that_only_sees(tmp_path: Path) -> None:
    vit = seeing("vit")
    vit.module.save_pretrained(tmp_path)
    vit.processor.save_pretrained(tmp_path)
    with without_torchvision():
        model = hookline.load(tmp_path)
    with torch.no_grad():
        wanted = vit(**model.to_inputs(images=[noise()]))  # as above
        assert torch.allclose(model(images=[noise()]), wanted, atol=1e-6 + devices.rounding())


def test_loading_without_a_processor_leaves_the_tokenizer(tmp_path: Path, llava) -> None:
    llava.module.save_pretrained(tmp_path)
    llava.tokenizer.save_pretrained(tmp_path)
    model = hookline.load(tmp_path)
    assert model.processor is None
    assert model.to_tokens("red").shape == (1, 2)


def test_text_goes_in_as_before(llava) -> None:
    inputs = llava.to_inputs(["what is red ?", "red"], padding_side="left")
    assert {*inputs} == {"input_ids", "attention_mask", "position_ids"}
    with torch.no_grad():
        assert torch.equal(llava(**inputs), llava(["what is red ?", "red"], padding_side="left"))


@pytest.mark.slow
def test_points_of_the_tower_are_proved_with_images(llava) -> None:
    def tried(report: Any) -> set[str]:
        assert report.failed() == []
        return {verdict.name for verdict in report.verdicts if verdict.status == "proved"}

    seen = tried(llava.verify("what is <image> ?", images=[noise()]))
    assert seen == tried(llava.verify(llava.to_inputs("what is <image> ?", images=[noise()])))
    assert seen == tried(llava.verify())  # with an image of its own
    of_text = tried(llava.verify("what is red ?"))
    assert {name for name in seen - of_text if not name.startswith(("vision.", "projector."))} == set()
    assert "vision.blocks.0.hook_resid_post" in seen - of_text
    with pytest.raises(HooklineError, match=r"verify\(images="):
        hookline.hook(module_of("vit")).verify()


def test_the_model_in_the_package_sees() -> None:
    from hookline.demo.tinysight import SIDE, patches_of, random_image

    model = hookline.load("tinysight")
    for seed in range(5):
        shapes, image = random_image(seed)
        prompt = f"<image> What colour is the {shapes[0].kind}?"
        inputs = model.to_inputs(prompt, images=[image])
        with torch.no_grad():
            answer = int(model(**inputs)[0, -1].argmax())
        assert model.to_string([answer]) == f" {shapes[0].colour}"
        (grid,) = model.image_grid(inputs)[0]
        left, top, right, bottom = (side / SIDE for side in shapes[0].box)
        around = grid.positions_in((left, top, right, bottom))
        assert {int(grid.positions[patch]) for patch in patches_of(shapes[0])} <= set(around)


@pytest.mark.parametrize(
    "command", [pytest.param(["verify"], marks=pytest.mark.slow), ["points", "vision.blocks.*.attn.hook_z"]]
)
def test_commands_on_a_model_that_sees(command) -> None:
    verb, *names = command
    result = CliRunner().invoke(app, [verb, "tinysight", *names])
    assert result.exit_code == 0, result.output
    assert re.search(r"vision\.blocks\.2\.attn\.hook_z +(proved|b p h e +\[1, 37, 4, 24\])", result.output)


@pytest.mark.parametrize("kind", ["qwen2_vl", "idefics3", "vit"])
def test_an_example_is_made(kind) -> None:
    model = seeing(kind)
    inputs = model.example_inputs()
    assert inputs is not None
    assert "pixel_values" in inputs
    assert any(name.startswith("vision.") for name in model.cache(**inputs))


@pytest.mark.parametrize("kind", ["png", "jpeg", "gif", "bmp", "tiff", "ppm"])
@pytest.mark.filterwarnings("ignore::UserWarning")  # PIL's, of damage that it reads around
def test_damaged_files_are_read_or_refused(kind, tmp_path) -> None:
    path, random = tmp_path / f"a.{kind}", np.random.default_rng(0)
    Image.fromarray(noise()).save(path)
    whole = path.read_bytes()
    refused = 0
    for number in range(150):
        data = bytearray(whole[: random.integers(len(whole))] if number % 3 == 0 else whole)
        for at_byte in random.integers(0, max(1, min(len(data), 60)), 4 if data else 0):
            data[at_byte] ^= 1 << random.integers(8)
        path.write_bytes(data)
        try:
            as_image(path, "the image")
        except HooklineError:
            refused += 1
    assert refused > 20
