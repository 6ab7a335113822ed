"""Experiments over images: their numbers against plain caches and hooks, and their drawings by what is in them."""

import importlib.util
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pytest
import tiny_vision
import torch
import transformers
from matplotlib import pyplot

import hookline
from hookline import HooklineError
from hookline.demo.tinysight import SIDE, Shape, draw
from hookline.experiments import images, metrics, patching
from hookline.experiments.result import Result

matplotlib.use("Agg")
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
CIRCLE = Shape("circle", "red", x=14, y=14, size=15)
SQUARE = Shape("square", "blue", x=36, y=35, size=13)
BOX = tuple(side / SIDE for side in CIRCLE.box)
QUESTION = "<image> What colour is the circle?"
FAMILIES = ("llava", "qwen2_5_vl", "llava_next", "idefics3", "gemma3", "paligemma")
ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _quiet():
    transformers.logging.set_verbosity_error()
    yield
    pyplot.close("all")


@pytest.fixture(scope="module")
def model() -> Any:
    return hookline.load("tinysight")


@pytest.fixture(scope="module")
def red() -> Any:
    return draw([CIRCLE, SQUARE])


@pytest.fixture(scope="module")
def green() -> Any:
    return draw([Shape("circle", "green", x=14, y=14, size=15), SQUARE])


@pytest.fixture
def inputs(model, red) -> Any:
    return model.to_inputs(QUESTION, images=[red])


@pytest.fixture
def others(model, green) -> Any:
    return model.to_inputs(QUESTION, images=[green])


def tiny(name: str) -> Any:
    return hookline.hook(tiny_vision.module_of(name), tiny_vision.processor_of(name))


def noise(height: int, width: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def asked(model: Any, *images: Any) -> Any:
    places = " and ".join([model.processor.image_token] * len(images))
    return model.to_inputs(f"what is {places} here ?", images=list(images))


def panels(figure: Any) -> list[Any]:
    """The drawings of a figure, without its bar."""
    return [ax for ax in figure.axes if ax.get_visible() and ax.images and ax.get_xlim() == (0, 1)]


# positions


def test_positions_are_those_of_the_grid(model, inputs) -> None:
    grid = model.image_grid(inputs)[0][0]
    assert images.positions(model, inputs) == grid.positions.tolist()
    there = images.positions(model, inputs, BOX)
    assert there == grid.positions_in(BOX)
    rest = images.positions(model, inputs, BOX, others=True)
    assert sorted(there + rest) == grid.positions.tolist()
    assert not set(there) & set(rest)


def test_the_second_image_of_a_prompt() -> None:
    model = tiny("qwen2_5_vl")
    one, two = noise(16, 16), noise(16, 24, seed=1)
    inputs = asked(model, one, two)
    first, second = model.image_grid(inputs)[0]
    assert images.positions(model, inputs, which=1) == second.positions.tolist() != first.positions.tolist()
    assert images.lens(model, inputs, two, which=1).placed.grid.shape == second.shape
    with pytest.raises(HooklineError, match=r"pass.*image"):
        images.lens(model, inputs, one, which=1)
    with pytest.raises(HooklineError, match="prompt has 2"):
        images.positions(model, inputs, which=2)


def test_what_is_no_image(model, inputs, red) -> None:
    with pytest.raises(HooklineError, match="not str"):
        images.positions(model, QUESTION)
    with pytest.raises(HooklineError, match="from 0 to 1"):
        images.positions(model, inputs, (1.2, 1.2, 1.5, 1.5))
    llava = tiny("llava")  # sees the middle only
    with pytest.raises(HooklineError, match="covers"):
        images.positions(llava, asked(llava, noise(16, 48)), (0, 0, 0.2, 1))
    with pytest.raises(HooklineError, match="anything else"):
        images.positions(model, inputs, (0, 0, 1, 1), others=True)
    both = model.to_inputs([QUESTION, QUESTION], images=[red, red])
    with pytest.raises(HooklineError, match="got 2"):
        images.attention(model, both)
    with pytest.raises(HooklineError, match=r"pass.*image"):
        images.attention(model, inputs, red.resize((30, 60)))
    text = hookline.load("tinyworld")
    with pytest.raises(HooklineError, match="vision-language model"):
        images.positions(text, text.to_inputs("The cat sat"))


@pytest.mark.parametrize("look", [images.lens, images.attention, images.positions])
def test_images_seen_by_cross_attention(look) -> None:
    model = tiny("mllama")
    inputs = model.to_inputs(f"{model.processor.image_token} what is", images=[noise(16, 16)])
    with pytest.raises(HooklineError, match="cross-attention"):
        look(model, inputs)


# the lens


@pytest.mark.parametrize("kind", FAMILIES)
def test_the_lens_is_norm_and_unembedding(kind) -> None:
    model, image = tiny(kind), noise(24, 32)
    inputs = asked(model, image)
    found = images.lens(model, inputs, image, top=3)
    n = len(model.blocks)
    assert found.layers == ["embed", *range(n)]
    assert found.probs.axes == ("layer", "patch", "rank")
    _, cache = model.run_with_cache(**inputs)
    where = model.image_grid(inputs)[0][0].positions
    assert found.probs.coords["patch"] == where.tolist()
    language = model.module.model.language_model if hasattr(model.module.model, "language_model") else None
    norm = (language or model.module.model.text_model).norm
    streams = [cache["blocks.0.hook_resid_pre"], *(cache[f"blocks.{layer}.hook_resid_post"] for layer in range(n))]
    for row, stream in enumerate(streams):
        logits = model.module.lm_head(norm(stream))[0, where]
        expected = logits.softmax(-1).topk(3)
        torch.testing.assert_close(found.probs.values[row], expected.values.detach(), atol=1e-5, rtol=1e-4)
        named = [[model.to_string([each]) for each in some] for some in expected.indices.tolist()]
        assert found.tokens[row] == named


def test_the_lens_sees_the_colour_where_the_shape_is(model, inputs, red) -> None:
    found = images.lens(model, inputs, red, layers=[1, -1])
    assert found.layers == [1, 3]
    ((token, prob),) = found.at(3, 14 / SIDE, 14 / SIDE)
    assert token == " red"
    assert prob == pytest.approx(
        float(found.probs.sel(layer=3, rank=0, patch=found.placed.grid.position(0.3, 0.3)).values)
    )
    assert found.at(3, 0.05, 0.95)[0][0] != " red"
    assert "' red' ×" in repr(found)


def test_a_lens_is_drawn_with_a_token_in_each_part(model, inputs, red) -> None:
    found = images.lens(model, inputs, red)
    figure = found.plot()
    assert len(panels(figure)) == 5
    assert [ax.get_title(loc="left") for ax in panels(figure)][:2] == ["embed", "after layer 0"]
    for ax, tokens in zip(panels(figure), found.tokens, strict=True):
        assert [text.get_text() for text in ax.texts] == [each[0].strip() for each in tokens]
    (ax,) = panels(found.plot(3))
    sizes = [text.get_fontsize() for text in ax.texts]
    assert min(sizes) >= 3.5
    figure = found.plot([0, "embed"])
    assert [ax.get_title(loc="left") for ax in panels(figure)] == ["after layer 0", "embed"]


def test_words_fit_into_their_parts(model, inputs, red) -> None:
    found = images.lens(model, inputs, red, layers=1)
    long = [[["unreadableness" if at % 2 else "a"] for at in range(36)]]
    figure = replace(found, tokens=long).plot()
    (ax,) = panels(figure)
    assert {text.get_text() for text in ax.texts} == {"a", "unreadabl…"}
    figure.draw_without_rendering()
    room = ax.get_window_extent().width / 6
    assert 0.6 * room < max(text.get_window_extent().width for text in ax.texts) < room
    assert ax.texts[0].get_fontsize() > ax.texts[1].get_fontsize()


def test_a_lens_without_an_image_to_draw_on(model, inputs) -> None:
    assert len(panels(images.lens(model, inputs, layers=2).plot())) == 1


def test_lenses_that_are_refused(model, inputs, red) -> None:
    for layer, match in (
        (4, "no label 4"),
        ("first", "no label .first."),
        ([1, 1], "distinct"),
        ([], "distinct"),
    ):
        with pytest.raises(HooklineError, match=match):
            images.lens(model, inputs, red, layers=layer)
    with pytest.raises(HooklineError, match="top is"):
        images.lens(model, inputs, red, top=0)
    found = images.lens(model, inputs, red, layers=[1, 2])
    with pytest.raises(HooklineError, match="no label 3"):
        found.plot(3)
    with pytest.raises(HooklineError, match="covers"):
        images.lens(*_cropped()).at(0, 0.01, 0.5)
    vit = tiny("vit")
    with pytest.raises(HooklineError, match="no text"):
        images.lens(vit, vit.to_inputs(images=[noise(16, 16)]))


def _cropped() -> tuple[Any, Any, Any]:
    """A model that looks at the center of a wide image."""
    model, image = tiny("llava"), noise(16, 48)
    return model, asked(model, image), image


# attention


@pytest.mark.parametrize("kind", FAMILIES)
def test_attention_is_the_pattern_there(kind) -> None:
    model, image = tiny(kind), noise(24, 32)
    inputs = asked(model, image)
    where = model.image_grid(inputs)[0][0].positions
    _, cache = model.run_with_cache(**inputs)
    for pos in (-1, int(where[-1]) + 1):
        found = images.attention(model, inputs, image, pos=pos)
        patterns = torch.stack(
            [cache[f"blocks.{layer}.attn.hook_pattern"][0, :, pos] for layer in range(len(model.blocks))]
        )
        torch.testing.assert_close(found.values.values, patterns[..., where].detach())
        torch.testing.assert_close(found.share.values, patterns[..., where].detach().sum(-1))
    some = images.attention(model, inputs, image, layers=1, head=[2, 3])
    assert some.values.coords["layer"] == [1]
    torch.testing.assert_close(some.values.values[0], images.attention(model, inputs).values.values[1, 2:4])


@pytest.mark.parametrize("kind", FAMILIES)
def test_attention_in_a_generation_is_that_of_the_longer_prompt(kind) -> None:
    model, image = tiny(kind), noise(24, 32)
    inputs = asked(model, image)
    found = images.attention(model, inputs, image, new_tokens=3)
    said = model.generate(**inputs, max_new_tokens=3, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    assert found.values.axes == ("step", "layer", "head", "patch")
    assert len(found.values.coords["step"]) == len(said)
    torch.testing.assert_close(found.values.values[0], images.attention(model, inputs).values.values)
    if kind != "paligemma":  # which reads its prompt in both directions
        check_second_step(model, inputs, said, found)


def check_second_step(model: Any, inputs: Any, said: torch.Tensor, found: images.ImageAttention) -> None:
    """What the new token's position looks at is what it looks at as the last of a longer prompt."""
    assert len(said) > 1
    longer = {name: x for name, x in inputs.items() if name != "position_ids"}
    fills = {"input_ids": said[:1], "attention_mask": torch.tensor([1])}
    fills |= dict.fromkeys(("mm_token_type_ids", "token_type_ids"), torch.tensor([0]))
    for name in fills.keys() & longer.keys():
        longer[name] = torch.cat([longer[name], fills[name][None].to(longer[name])], 1)
    _, cache = model.run_with_cache(**longer)
    where = found.placed.grid.positions
    expected = torch.stack([cache[f"blocks.{n}.attn.hook_pattern"][0, :, -1, where] for n in range(len(model.blocks))])
    torch.testing.assert_close(found.values.values[1], expected.detach(), atol=1e-5, rtol=1e-4)


def test_a_window_of_keys_ends_at_the_newest(monkeypatch) -> None:
    text = tiny_vision.CONFIGS["gemma3"]["text_config"] | {"sliding_window": 8}
    monkeypatch.setitem(tiny_vision.CONFIGS["gemma3"], "text_config", text)
    model, image = tiny("gemma3"), noise(16, 16)
    inputs = asked(model, image)
    assert inputs["input_ids"].shape[1] > 8
    found = images.attention(model, inputs, image, new_tokens=3)
    said = model.generate(**inputs, max_new_tokens=3, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    check_second_step(model, inputs, said, found)
    assert found.values.values[1, 0, :, 0].eq(0).all(), "the window has left the beginning of the image behind"
    assert found.values.values[1, 1, :, 0].gt(0).all()


def test_heads_that_look_at_a_part(model, inputs, red) -> None:
    found = images.attention(model, inputs, red)
    inside = [found.placed.grid.positions.tolist().index(each) for each in images.positions(model, inputs, BOX)]
    torch.testing.assert_close(found.on(BOX).values, found.values.values[..., inside].sum(-1))
    top = found.top(4, box=BOX)
    assert len(top) == 4
    assert top[0].value == float(found.on(BOX).values.max())
    assert found.top(1)[0].value == float(found.share.values.max())
    assert top[0].value > 0.9, "some head looks at the circle that is asked about"
    with pytest.raises(HooklineError, match="from 0 to 1"):
        found.on((1.1, 1.1, 1.2, 1.2))
    llava = tiny("llava")  # sees the middle only
    with pytest.raises(HooklineError, match="covers"):
        images.attention(llava, asked(llava, noise(16, 48))).on((0, 0, 0.2, 1))


def test_attention_is_drawn(model, inputs, red) -> None:
    found = images.attention(model, inputs, red)
    assert len(panels(found.plot())) == 4 * 8
    figure = found.plot(1)
    assert len(panels(figure)) == 8
    share = float(found.share.sel(layer=1, head=5).values)
    assert panels(figure)[5].get_title(loc="left") == f"L1H5 · {share:.0%} here"
    (ax,) = panels(found.plot(1, 5, smooth=True))
    assert len(ax.images) == 2
    assert len(panels(found.mean("head").plot())) == 4
    assert len(panels(found.plot([0, 1], [2, 3], vmax=0.5))) == 4
    steps = images.attention(model, inputs, red, new_tokens=1)
    assert panels(steps.plot(layer=1, head=5))[0].get_title(loc="left").startswith("0: red · L1H5")


def test_the_darkest_part_is_the_one_looked_at_most(model, inputs, red) -> None:
    found = images.attention(model, inputs, red)
    (ax,) = panels(found.plot(0, 0))
    (cells,) = ax.collections
    colours = cells.get_facecolor()
    most = int(found.values.sel(layer=0, head=0).values.argmax())
    assert colours[:, 3].argmax() == most
    x0, y0, x1, y1 = found.placed.grid.boxes[most].tolist()
    corners = cells.get_paths()[most].get_extents()
    assert (corners.x0, corners.y0, corners.x1, corners.y1) == pytest.approx((x0, y0, x1, y1))


def test_attention_that_is_refused(model, inputs, red) -> None:
    for options, match in (
        ({"pos": 99}, "43 tokens"),
        ({"pos": 3, "new_tokens": 2}, "omit pos=3"),
        ({"new_tokens": -1}, "0 or more"),
        ({"layers": 7}, "layer 7"),
        ({"head": 9}, "no label 9"),
    ):
        with pytest.raises(HooklineError, match=match):
            images.attention(model, inputs, red, **options)
    found = images.attention(model, inputs, red)
    with pytest.raises(HooklineError, match="no axis 'step'"):
        found.plot(step=0)
    with pytest.raises(HooklineError, match="positive"):
        found.plot(vmax=0.0)
    with pytest.raises(HooklineError, match="patch"):
        found.mean("patch")
    wide = images.ImageAttention(
        Result(torch.rand(13, 4, 36), ("layer", "head", "patch"), {
            "layer": list(range(13)), "head": list(range(4)), "patch": found.values.coords["patch"]}), found.placed,
    )  # fmt: skip
    with pytest.raises(HooklineError, match="52 panels"):
        wide.plot()
    vit = tiny("vit")
    with pytest.raises(HooklineError, match="tower_attention"):
        images.attention(vit, vit.to_inputs(images=[noise(16, 16)]))


@pytest.mark.parametrize("kind", ["llava", "paligemma", "gemma3", "vit", "clip", "siglip", "dinov2"])
def test_patches_of_the_tower_lie_where_they_are_drawn(kind) -> None:
    """Changing the pixels of one place changes one patch of what enters the tower's first layer."""
    model, image = tiny(kind), noise(32, 32)
    make = (
        (lambda each: model.to_inputs(images=[each]))
        if kind in tiny_vision.ENCODERS
        else (lambda each: asked(model, each))
    )
    inputs = make(image)
    found = images.tower_attention(model, inputs, image, at=(0.5, 0.5))
    grid = found.placed.grid
    _, top, right, _ = grid.extent  # DINOv2's processor crops
    corner = grid.position(right - 0.001, top + 0.001)
    assert corner == int(grid.positions[grid.main[0, -1]]), "rows go from left to right"
    name = "vision.blocks.0.hook_resid_pre"
    before = model.cache(**inputs, names_filter=name)[name][0]
    for token in (0, 6, len(grid) - 1):
        x0, y0, x1, y1 = (round(32 * each) for each in grid.boxes[token].tolist())
        changed = image.copy()
        x, y = (x0 + x1) // 2, (y0 + y1) // 2
        changed[y - 1 : y + 1, x - 1 : x + 1] = 255 - changed[y - 1 : y + 1, x - 1 : x + 1]
        after = model.cache(**make(changed), names_filter=name)[name][0]
        assert int((after - before).abs().amax(-1).argmax()) == int(grid.positions[token])


@pytest.mark.parametrize("kind", ["llava", "vit"])
def test_attention_of_the_tower_is_its_pattern(kind) -> None:
    model, image = tiny(kind), noise(16, 16)
    inputs = model.to_inputs(images=[image]) if kind == "vit" else asked(model, image)
    name = "vision.blocks.1.attn.hook_pattern"
    pattern = model.cache(**inputs, names_filter=name)[name][0].detach()
    whole = images.tower_attention(model, inputs, image)
    torch.testing.assert_close(whole.values.sel(layer=1).values, pattern[:, 0, 1:])
    corner = images.tower_attention(model, inputs, image, at=(0.99, 0.99), layers=1)
    torch.testing.assert_close(corner.values.values[0], pattern[:, -1, 1:])
    assert len(panels(corner.plot())) == 4


def test_towers_that_are_refused() -> None:
    siglip, image = tiny("siglip"), noise(16, 16)
    with pytest.raises(HooklineError, match="class token"):
        images.tower_attention(siglip, siglip.to_inputs(images=[image]), image)
    qwen = tiny("qwen2_5_vl")
    with pytest.raises(HooklineError, match=r"vision-tower patches"):
        images.tower_attention(qwen, asked(qwen, image), image)


# overlays


def test_a_sweep_over_positions_is_drawn_on_the_image(model, inputs, others, red) -> None:
    swept = patching.sweep(model, inputs, others, metrics.logit_diff(" red", " green")).normalized
    on = images.place_image(model, inputs, red)
    figure = images.overlay(swept, on)
    assert [ax.get_title(loc="left") for ax in panels(figure)] == [f"layer {n}" for n in range(4)]
    (cells,) = panels(figure)[0].collections
    covers = cells.get_facecolor()[:, 3]
    values = swept.sel(layer=0).values[on.grid.positions].abs()
    assert int(covers.argmax()) == int(values.argmax())
    (ax,) = panels(images.overlay(swept.sel(layer=0), on, smooth=True, title="circle"))
    assert len(ax.images) == 2
    assert len(panels(images.overlay(swept.values[:2, on.grid.positions], on, vmin=0.0, vmax=1.0))) == 2
    assert len(panels(images.overlay(images.lens(model, inputs, red).probs.isel(rank=0), on))) == 5


@pytest.mark.parametrize(("kind", "size"), [("llava_next", (18, 32)), ("llava", (16, 48)), ("qwen2_5_vl", (24, 40))])
def test_a_smooth_overlay_has_each_value_in_the_middle_of_its_place(kind, size) -> None:
    model, image = tiny(kind), noise(*size)
    on = images.place_image(model, asked(model, image), image)
    values = torch.rand(len(on.grid))
    (ax,) = panels(images.overlay(values, on, smooth=True, vmin=-1.0, vmax=1.0, cmap="gray"))
    colours = next(each for each in ax.images if each.get_zorder() == 0)
    left, right, bottom, top = colours.get_extent()
    pixels = colours.get_array()
    for token in on.grid.main.flatten().tolist():
        x0, y0, x1, y1 = on.grid.boxes[token].tolist()
        across, down = ((x0 + x1) / 2 - left) / (right - left), ((y0 + y1) / 2 - top) / (bottom - top)
        grey = pixels[int(down * pixels.shape[0]), int(across * pixels.shape[1]), 0]
        assert float(grey) == pytest.approx((float(values[token]) + 1) / 2, abs=0.05)


def test_overlays_that_are_refused(model, inputs, others, red) -> None:
    on = images.place_image(model, inputs, red)
    metric = metrics.logit_diff(" red", " green")
    swept = patching.sweep(model, inputs, others, metric, layers=[0])
    with pytest.raises(HooklineError, match="the axis"):
        images.overlay(swept.isel(pos=slice(0, 20)), on)
    tower = patching.sweep(model, inputs, others, metric, points="vision.layer.pre", layers=[0])
    with pytest.raises(HooklineError, match="vision tower"):
        images.overlay(tower, on)
    with pytest.raises(HooklineError, match="'pos' or 'patch'"):
        images.overlay(swept.isel(pos=3), on)
    with pytest.raises(HooklineError, match="has 36 tokens"):
        images.overlay(torch.rand(43), on)
    with pytest.raises(HooklineError, match="not both"):
        images.overlay(swept, on, center=0.0, vmax=1.0)
    with pytest.raises(HooklineError, match="below"):
        images.overlay(swept, on, vmin=1.0, vmax=0.0)


# patching


def by_hand(model: Any, source: Any, target: Any, name: str, where: list[int], metric: Any) -> float:
    _, cache = model.run_with_cache(**source, names_filter=name)

    def put(x: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        x[:, where] = cache[name][:, where]
        return x

    return float(metric(model.run_with_hooks(**target, fwd_hooks=[(name, put)])))


@pytest.mark.quick_for("qwen2_5_vl", "paligemma")
@pytest.mark.parametrize("kind", ["llava", "qwen2_5_vl", "paligemma", "llava_next"])
@pytest.mark.parametrize("point", ["resid_pre", "mlp_out"])
def test_patching_a_part_is_what_a_hook_does(kind, point) -> None:
    model = tiny(kind)
    clean, corrupted = (asked(model, noise(24, 32, seed)) for seed in (0, 1))

    def metric(logits):
        return logits[:, -1, 70] - logits[:, -1, 90]

    box = (0.0, 0.0, 0.6, 0.6)
    there, rest = (images.positions(model, clean, box, others=others) for others in (False, True))
    for where, options in (
        (there, {"box": box}),
        (rest, {"box": box, "others": True}),
        ([3, 5], {"positions": [5, 3]}),
    ):
        found = images.patch(model, clean, corrupted, metric, points=point, **options)
        assert found.axes == ("layer",)
        assert found.info["positions"] == where
        for layer in range(2):
            expected = by_hand(model, clean, corrupted, f"blocks.{layer}.hook_{point}", where, metric)
            assert float(found.values[layer]) == pytest.approx(expected, abs=1e-5)
    noised = images.patch(model, clean, corrupted, metric, points=point, box=box, direction="noise", layers=[1])
    expected = by_hand(model, corrupted, clean, f"blocks.1.hook_{point}", there, metric)
    assert float(noised.values[0]) == pytest.approx(expected, abs=1e-5)


def test_the_whole_image_is_all_there_is_before_the_first_layer(model, inputs, others) -> None:
    found = images.patch(model, inputs, others, metrics.logit_diff(" red", " green"), layers=[0])
    assert float(found.normalized.values[0]) == pytest.approx(1.0, abs=1e-4)


def test_the_shape_decides_and_the_ground_does_not(model, inputs, others) -> None:
    lead = metrics.logit_diff(" red", " green")
    shape, ground = (
        images.patch(model, inputs, others, lead, box=BOX, others=rest).normalized.values for rest in (False, True)
    )
    assert shape[0] > 0.9
    assert ground.abs().max() < 0.1
    assert shape[-1] < 0.1, "by the last layer the answer has been read"


def test_several_pairs_with_a_part_each(model, inputs, others) -> None:
    lead = metrics.logit_diff(" red", " green")
    moved = [
        model.to_inputs(QUESTION, images=[draw([Shape("circle", colour, x=34, y=30, size=15)])])
        for colour in ("red", "green")
    ]
    there = tuple(side / SIDE for side in Shape("circle", "red", x=34, y=30, size=15).box)
    found = images.patch(model, [inputs, moved[0]], [others, moved[1]], lead, box=[BOX, there], per_example=True)
    assert found.axes == ("layer", "example")
    alone = images.patch(model, *moved, lead, box=there)
    torch.testing.assert_close(found.values[:, 1], alone.values, atol=1e-4, rtol=1e-4)
    both = [images.positions(model, inputs, BOX), images.positions(model, moved[0], there)]
    again = images.patch(model, [inputs, moved[0]], [others, moved[1]], lead, positions=both, per_example=True)
    torch.testing.assert_close(found.values, again.values)


def test_patches_that_are_refused(model, inputs, others, red) -> None:
    lead = metrics.logit_diff(" red", " green")
    for options, match in (
        ({"box": BOX, "positions": [3]}, "either box or positions"),
        ({"positions": []}, "0 entries"),
        ({"positions": [99]}, "has 43"),
        ({"positions": range(1, 37), "others": True}, "cover the whole image"),
        ({"box": [BOX, BOX]}, "2 entries for 1 prompt"),
        ({"box": (0.5, 0.5, 0.1, 0.1)}, "a box is"),
        ({"points": "vision.layer.pre"}, "no prompt positions"),
        ({"direction": "both"}, "direction is"),
        ({"batchsize": 3}, "batch_size"),
    ):
        with pytest.raises(HooklineError, match=match):
            images.patch(model, inputs, others, lead, **options)
    qwen = tiny("qwen2_5_vl")
    wide, high = (asked(qwen, noise(*size)) for size in ((16, 24), (24, 16)))
    with pytest.raises(HooklineError, match="different grids"):
        images.patch(qwen, wide, high, lambda logits: logits[:, -1, 70], box=(0, 0, 0.5, 0.5))


# the example


def test_look_into_an_image(tmp_path) -> None:
    path = ROOT / "examples" / "vision" / "look_into_an_image.py"
    spec = importlib.util.spec_from_file_location("look_into_an_image", path)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    found = script.main(tmp_path)
    assert found.shape.values[0] > 0.9
    assert found.ground.values.abs().max() < 0.1
    assert found.token == " red"
    assert found.head.value > 0.9
    assert sorted(each.name for each in tmp_path.iterdir()) == ["attention.png", "lens.png", "sweep.png"]
    assert all(each.read_bytes().startswith(b"\x89PNG") for each in tmp_path.iterdir())
