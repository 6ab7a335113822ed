"""The embedded vision-language model: its folder, its pictures, its accuracy on held-out ones, and where it looks."""

from collections import Counter
from dataclasses import replace
from itertools import product
from pathlib import Path
from random import Random

import numpy as np
import pytest
import sight_check
import sight_pairs
import sight_rows
import sight_tasks
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import hookline
from hookline import HooklineError
from hookline.demo import tinysight
from hookline.demo.tinysight import COLOURS, GRID, KINDS, SIDE, Shape, patches_of, picture, pixels, random_picture

FOLDER = Path(hookline.__file__).parent / "demo" / "assets" / "tinysight"
CIRCLE = Shape("circle", "red", x=12, y=12, size=15)
SQUARE = Shape("square", "blue", x=36, y=36, size=12)


@pytest.fixture(scope="module")
def loaded():
    return sight_check.load(FOLDER)


@pytest.fixture(scope="module")
def model(loaded):
    return loaded[0]


@pytest.fixture(scope="module")
def processor(loaded):
    return loaded[1]


def test_the_folder_is_small():
    assert sum(file.stat().st_size for file in FOLDER.iterdir()) <= 6_000_000


def test_the_shape(model, processor):
    config = model.config
    assert (config.model_type, config.vision_config.model_type, config.text_config.model_type) == (
        "llava", "clip_vision_model", "llama",
    )  # fmt: skip
    assert config.text_config.vocab_size == len(processor.tokenizer)
    assert config.image_seq_length == GRID**2
    assert config.vision_feature_layer == -1
    assert model.dtype == torch.float32


@pytest.mark.parametrize("form", [sight_tasks.prompt, sight_tasks.chat])
@pytest.mark.parametrize("task", sight_check.BARS)
def test_held_out_pictures(model, processor, task, form):
    examples = sight_check.held_out(task, 200)
    assert sight_check.accuracy(model, processor, examples, form) >= sight_check.BARS[task]


def test_a_question_without_bos(model, processor):
    examples = sight_check.held_out("colour", 100)
    batch = sight_check.inputs(processor, examples, sight_tasks.prompt)
    is_bos = batch["input_ids"] == processor.tokenizer.bos_token_id
    batch["attention_mask"] = batch["attention_mask"].masked_fill(is_bos, 0)
    found = sight_check.said(model, batch)
    assert (found == sight_check.answers(processor, examples)).float().mean() >= sight_check.BARS["colour"]


@pytest.mark.parametrize("task", ["colour", "shape", "count"])
def test_every_phrasing_is_understood(model, processor, task):
    asked, right = Counter(), Counter()
    examples = sight_check.held_out(task, 150)
    found = sight_check.said(model, sight_check.inputs(processor, examples, sight_tasks.prompt))
    for each, hit in zip(examples, found == sight_check.answers(processor, examples), strict=True):
        phrasing = " ".join(word for word in each.question.text.split() if word.strip("?") not in (*KINDS, *COLOURS))
        asked[phrasing] += 1
        right[phrasing] += bool(hit)
    assert len(asked) > 1
    assert all(right[phrasing] >= 0.9 * count for phrasing, count in asked.items()), (right, asked)


def test_an_answer_is_one_word_and_then_the_end(model, processor):
    batch = processor(text="<image> What colour is the circle?", images=picture([CIRCLE, SQUARE]), return_tensors="pt")
    made = model.generate(**batch, max_new_tokens=5, do_sample=False)[0, batch["input_ids"].shape[1] :]
    assert processor.tokenizer.decode(made) == " red</s>"


def test_the_chat_template_writes_what_was_learned(model, processor):
    content = [{"type": "image"}, {"type": "text", "text": "What shape is blue?"}]
    text = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
    assert text == sight_tasks.chat("What shape is blue?")
    batch = processor(text=text, images=picture([CIRCLE, SQUARE]), return_tensors="pt")
    assert processor.tokenizer.decode(sight_check.said(model, batch)) == " square"


def test_pictures_go_in_as_they_are(processor):
    image = picture([CIRCLE], seed=4)
    batch = processor(text="<image> Where is the circle?", images=image, return_tensors="pt")
    expected = torch.tensor(pixels([CIRCLE], seed=4)).permute(2, 0, 1) / 127.5 - 1
    torch.testing.assert_close(batch["pixel_values"][0], expected)
    assert (batch["input_ids"] == processor.image_token_id).sum() == GRID**2


@example("<pad> and </s> after")
@example("naïve 🤗 日本語 e\u0301")
@settings(deadline=None)
@given(st.text())
def test_any_text_comes_back(processor, text):
    words = processor.tokenizer
    assert words.decode(words(text, add_special_tokens=False)["input_ids"]) == text


@pytest.mark.parametrize("word", [*KINDS, *COLOURS, *sight_tasks.NUMBERS, *sight_tasks.PLACES])
def test_every_answer_is_one_token(processor, word):
    assert len(processor.tokenizer(f" {word}", add_special_tokens=False)["input_ids"]) == 1


@pytest.fixture(scope="module")
def exchange(model, processor):
    """Of 100 pairs of pictures, alike but for the asked shape's colour: all that the tests of patching need."""
    return Exchange(model, processor, count=100)


class Exchange:
    def __init__(self, model, processor, count):
        self.hooked = hookline.hook(model, processor.tokenizer)
        pairs = sight_check.recoloured(count)
        self.before, after = ([pair[at] for pair in pairs] for at in (0, 1))
        self.batch, self.other = (
            sight_check.inputs(processor, some, sight_tasks.prompt) for some in (self.before, after)
        )
        self.right, self.other_colour = (sight_check.answers(processor, some) for some in (self.before, after))
        self.is_image = self.batch["input_ids"] == processor.image_token_id
        self.on_shape = torch.stack([sight_check.covered([each.asked]) for each in self.before])
        self.on_ground = ~torch.stack([sight_check.covered(each.shapes) for each in self.before])

    @torch.no_grad()
    def said(self, patches):
        """The answers with these patches' image tokens, as they enter the decoder, taken from the other pictures."""
        _, cache = self.hooked.run_with_cache(**self.other, names_filter="blocks.0.hook_resid_pre")
        where = torch.zeros_like(self.is_image)
        where[self.is_image] = patches.flatten()

        def swap(resid, hook):
            return torch.where(where[:, :, None], cache[hook.name], resid)

        logits = self.hooked.run_with_hooks(**self.batch, fwd_hooks=[("blocks.0.hook_resid_pre", swap)])
        return logits[:, -1].argmax(-1)


def test_the_tokens_of_a_shape_hold_its_colour(exchange):
    assert (exchange.said(exchange.on_shape) == exchange.other_colour).float().mean() >= sight_check.MOVED


def test_the_tokens_of_the_ground_do_not(exchange):
    unpatched = exchange.said(torch.zeros_like(exchange.on_ground))
    assert (unpatched == exchange.right).float().mean() >= sight_check.BARS["colour"]
    assert (exchange.said(exchange.on_ground) == unpatched).float().mean() >= sight_check.UNMOVED


def test_the_check_says_the_same_of_patching(exchange, model, processor):
    moved, unmoved = sight_check.patching(model, processor, count=len(exchange.before)).values()
    assert moved == pytest.approx((exchange.said(exchange.on_shape) == exchange.other_colour).float().mean().item())
    assert unmoved >= sight_check.UNMOVED


def test_a_picture_is_the_same_for_the_same_seed():
    (shapes, image), (again, image_again) = random_picture(7), random_picture(7)
    assert shapes == again
    assert image.tobytes() == image_again.tobytes() != random_picture(8)[1].tobytes()


@given(st.integers(0, 10_000))
@settings(deadline=None)
def test_random_shapes_have_patches_of_their_own(seed):
    shapes = tinysight.random_shapes(Random(seed))
    patches = [patch for shape in shapes for patch in patches_of(shape)]
    assert len(set(patches)) == len(patches)
    assert len({shape.kind for shape in shapes}) == len({shape.colour for shape in shapes}) == len(shapes)


@pytest.mark.parametrize("kind", KINDS)
def test_a_colour_changes_the_patches_of_its_shape_alone(kind):
    shape = replace(CIRCLE, kind=kind)
    changed = (pixels([SQUARE, shape], 5) != pixels([SQUARE, replace(shape, colour="green")], 5)).any(-1)
    assert (changed <= shape.mask()).all()
    rows, columns = np.nonzero(changed)
    assert sorted({int(row) // 8 * GRID + int(column) // 8 for row, column in zip(rows, columns, strict=True)}) == (
        patches_of(shape)
    )


def test_no_two_kinds_are_the_same_at_any_size():
    for size in tinysight.SIZES:
        masks = {Shape(kind, "red", 24, 24, size).mask().tobytes() for kind in KINDS}
        assert len(masks) == len(KINDS)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"kind": "star"}, "circle, square"),
        ({"colour": "pink"}, "red, green"),
        ({"x": SIDE}, "fit"),
        ({"size": 0}, "fit"),
    ],
)
def test_what_cannot_be_drawn_is_refused(change, said):
    with pytest.raises(HooklineError, match=said):
        replace(CIRCLE, **change)


@pytest.mark.parametrize("count", [0, 4])
def test_a_wrong_number_of_shapes_is_refused(count):
    with pytest.raises(HooklineError, match="1 to 3"):
        random_picture(1, count)


def test_held_out_pairs_are_never_seen_together():
    rng = Random(3)
    for pair in (sight_pairs.pair(rng) for _ in range(300)):
        for shapes in product(*zip(pair.first, pair.second, strict=True)):
            assert sight_tasks.is_seen(shapes)
    assert not any(sight_tasks.is_seen(each.shapes) for each in sight_check.held_out("new pair: colour", 50))


def test_a_mixture_has_each_shape_whole():
    rng = Random(4)
    for pair in (sight_pairs.pair(rng) for _ in range(200)):
        shapes, is_second = sight_pairs.mix(rng, pair)
        assert len({shape.kind for shape in shapes}) == len({shape.colour for shape in shapes}) == len(shapes)
        for at, shape in enumerate(shapes):
            assert {is_second[patch] for patch in pair.patches(at)} == {shape is pair.second[at]}


def test_questions_of_a_row_do_not_see_each_other(processor):
    asked = [sight_tasks.colour(CIRCLE)[0], sight_tasks.kind(SQUARE)[0]]
    rows = sight_rows.Writer(processor.tokenizer).batch(Random(0), [asked], "cpu")
    first, second = (rows.tokens[0] == processor.tokenizer.eos_token_id).nonzero().flatten().tolist()
    assert rows.visible[0, 0, second].sum() == rows.positions[0, second] + 1
    assert not rows.visible[0, 0, second, first]
    answers = rows.targets[rows.targets != sight_rows.NO_TARGET]
    assert processor.tokenizer.decode(answers) == " red</s> square</s>"
