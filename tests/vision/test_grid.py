"""Boxes are what the model's tokens look at: proved by changing pixels and seeing which tokens change.

The attention of the vision tower is switched off first, so that a patch's features come from its own pixels alone.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from releases import transformers_is_before
from tiny_vision import ENCODERS, VISION_LANGUAGE, module_of, place_of, processor_of

import hookline
from hookline.errors import HooklineError
from hookline.vision.families import cells, visible_region

TENSORS_ON_CPU = True

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # in PaliGemma's own
KINDS = [name for name in VISION_LANGUAGE if name != "mllama"]
ATTENTION_OUT = ("attn.proj", "self_attn.out_proj", "attention.projection_layer")


def seeing(name: str, **options: Any) -> Any:
    """A model whose vision tower has no attention; options are of its image processor."""
    module, processor = module_of(name), processor_of(name)
    silenced = 0
    for path, part in module.named_modules():
        if path.endswith(ATTENTION_OUT) and "language_model" not in path and "text_model" not in path:
            torch.nn.init.zeros_(part.weight)
            torch.nn.init.zeros_(part.bias)
            silenced += 1
    assert silenced >= 2
    for key, value in options.items():
        setattr(processor.image_processor, key, value)
    return hookline.hook(module, processor)


def noise(height: int, width: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def prompt(model: Any, n: int = 1) -> str:
    return "what is " + " and ".join([place_of(model.processor)] * n) + " here ?"


def stream(model: Any, *images: np.ndarray) -> torch.Tensor:
    """What enters the first layer of the language model."""
    with torch.no_grad():
        return model(prompt(model, len(images)), images=list(images), stop_at_layer=0)[0]


def changes(model: Any, before: np.ndarray, after: np.ndarray) -> torch.Tensor:
    return (stream(model, before) - stream(model, after)).abs().amax(-1).cpu()


def check_looks(model: Any, height: int, width: int) -> None:
    """Change the middle of each token's box: of all tokens of the same look, this one changes most."""
    image = noise(height, width)
    (grid,) = model.image_grid(prompt(model), images=[image])[0]
    is_main = torch.zeros(len(grid), dtype=torch.bool)
    is_main[grid.main.flatten()] = True
    area = (grid.boxes[:, 2] - grid.boxes[:, 0]) * (grid.boxes[:, 3] - grid.boxes[:, 1])
    checked = 0
    for token in range(len(grid)):
        group = is_main == is_main[token]
        if grid.boxes[token].isnan().any() or area[token] < 0.5 * area[group].nanmedian():
            continue
        x0, y0, x1, y1 = (grid.boxes[token] * torch.tensor([width, height, width, height])).tolist()
        left, right = round(x0 + 0.3 * (x1 - x0)), round(x1 - 0.3 * (x1 - x0))
        top, bottom = round(y0 + 0.3 * (y1 - y0)), round(y1 - 0.3 * (y1 - y0))
        changed = image.copy()
        changed[top:bottom, left:right] = 255 * (image[top:bottom, left:right].mean() < 128)
        moved = changes(model, image, changed)
        assert moved[grid.positions][grid.boxes.isnan().any(1)].eq(0).all(), "what stands for no place changed"
        assert moved.nonzero().flatten().tolist() == [
            position for position in moved.nonzero().flatten().tolist() if position in grid.positions
        ]
        inside = moved[grid.positions].masked_fill(~group, -1)
        assert int(inside.argmax()) == token, (token, int(inside.argmax()))
        checked += 1
    assert checked >= 0.6 * len(grid)


# Large enough that a token's box has many pixels, and of a shape that no processor keeps.
SIZES = {"wide": (100, 190), "tall": (230, 120), "square": (111, 111)}


@pytest.mark.quick_for("llava", "qwen3_vl", "idefics3")
@pytest.mark.parametrize(
    "shape", ["wide", *(pytest.param(each, marks=pytest.mark.slow) for each in ("tall", "square"))]
)
@pytest.mark.parametrize("name", KINDS)
def test_a_token_looks_at_its_box(name, shape) -> None:
    check_looks(seeing(name), *SIZES[shape])


@pytest.mark.parametrize(
    ("name", "options", "shape"),
    [
        ("gemma3", {"do_pan_and_scan": True}, "wide"),  # without effect: its processor has the last word
        ("internvl", {"crop_to_patches": False}, "tall"),  # the same
        ("internvl", {"max_patches": 1}, "wide"),
        ("internvl", {"min_patches": 4, "max_patches": 12}, "wide"),
        ("idefics3", {"do_image_splitting": False}, "wide"),
        ("llava", {"do_center_crop": False, "size": {"height": 16, "width": 16}}, "wide"),
        ("llava", {"size": {"shortest_edge": 20}}, "tall"),
    ],
)
def test_options_of_the_processor_are_followed(name, options, shape) -> None:
    if "crop_to_patches" in options and transformers_is_before("5.17"):
        pytest.skip("older processors do not say which options of their own take precedence: it is an error")
    check_looks(seeing(name, **options), *SIZES[shape])


def test_a_processor_that_pads_to_a_square() -> None:
    from transformers import LlavaImageProcessorPil

    model = seeing("llava")
    square = {"height": 16, "width": 16}
    model.processor.image_processor = LlavaImageProcessorPil(size={"shortest_edge": 16}, crop_size=square, do_pad=True)
    check_looks(model, *SIZES["wide"])
    (grid,) = model.image_grid(prompt(model), images=[noise(20, 80)])[0]
    assert grid.boxes[0].isnan().all()  # above the image
    assert grid.extent == (0, 0, 1, 1)


def test_a_grid_that_is_shrunk_to_fewer_tokens() -> None:
    model = seeing("llava_onevision")
    model.module.config.vision_aspect_ratio = model.processor.vision_aspect_ratio = "anyres_max_1"
    (grid,) = model.image_grid(prompt(model), images=[noise(64, 64)])[0]
    assert grid.shape == (4, 4)  # of 8 x 8
    check_looks(model, 64, 64)
    check_looks(model, *SIZES["wide"])


# Sizes that are not resized, for the main grid: there, one pixel belongs to one token exactly.
EXACT = {
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl"), (24, 40)),
    **{"llava": (16, 23), "paligemma": (16, 16), "gemma3": (16, 16), "internvl": (32, 16)},
    **{"llava_next": (32, 32), "llava_onevision": (16, 48), "idefics3": (32, 48), "smolvlm": (32, 48)},
}


@pytest.mark.quick_for("llava_next", "qwen3_vl")
@pytest.mark.parametrize("name", KINDS)
def test_one_pixel_belongs_to_one_token(name) -> None:
    model = seeing(name)
    height, width = EXACT[name]
    image = noise(height, width)
    (grid,) = model.image_grid(prompt(model), images=[image])[0]
    main = grid.positions[grid.main.flatten()]
    left, top, right, bottom = grid.extent
    for seed in range(25):
        y, x = np.random.default_rng(seed).integers(0, (height, width))
        changed = image.copy()
        changed[y, x] = 255 * (image[y, x] < 128)
        moved = changes(model, image, changed).nonzero().flatten()
        hit = [position for position in moved.tolist() if position in main]
        middle = ((x + 0.5) / width, (y + 0.5) / height)
        if not (left <= middle[0] <= right and top <= middle[1] <= bottom):
            assert hit == []
            continue
        assert hit == [grid.position(*middle)]
        assert grid.position(*middle) in grid.positions_in((x / width, y / height, (x + 1) / width, (y + 1) / height))
        around = (x / width - 0.3, y / height - 0.3, x / width + 0.3, y / height + 0.3)
        near = grid.positions_in(tuple(min(max(side, 0), 1) for side in around))
        assert set(moved.tolist()) <= set(near)


@pytest.mark.parametrize("name", KINDS)
def test_several_images_of_a_prompt_keep_apart(name) -> None:
    model = seeing(name)
    one, two = noise(40, 60), noise(64, 32, seed=1)
    inputs = model.to_inputs(prompt(model, 2), images=[one, two])
    first, second = model.image_grid(inputs)[0]
    assert model.image_token_mask(inputs)[0].nonzero().flatten().tolist() == [
        *first.positions.tolist(),
        *second.positions.tolist(),
    ]
    moved = (stream(model, one, two) - stream(model, one, 255 - two)).abs().amax(-1).nonzero().flatten().tolist()
    assert moved
    assert set(moved) <= set(second.positions.tolist())
    assert model.image_token_range(1, inputs) == range(int(second.positions[0]), int(second.positions[-1]) + 1)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_batch_has_the_grids_of_its_rows(name, side) -> None:
    model = seeing(name)
    images = [[noise(40, 60)], [noise(64, 32), noise(16, 16)], []]
    prompts = [prompt(model), prompt(model, 2), "what is the colour ?"]
    if name == "paligemma":  # takes no prompt without an image among others
        images, prompts = images[:2], prompts[:2]
    inputs = model.to_inputs(prompts, images=images, padding_side=side)
    grids = model.image_grid(inputs)
    assert [len(row) for row in grids] == [1, 2, 0][: len(prompts)]
    for row in (0, 1):
        offset = int(inputs["attention_mask"][row].nonzero()[0])
        for here, alone in zip(grids[row], model.image_grid(prompts[row], images=images[row])[0], strict=True):
            assert torch.equal(here.positions, alone.positions + offset)
            assert torch.equal(here.boxes.nan_to_num(-1), alone.boxes.nan_to_num(-1))
    with torch.no_grad():
        whole = model(**inputs, stop_at_layer=0)
    for row in (0, 1):
        offset = int(inputs["attention_mask"][row].nonzero()[0])
        alone = stream(model, *images[row])
        assert torch.allclose(whole[row, offset : offset + len(alone)], alone, atol=1e-5)


@pytest.mark.parametrize("size", [(16, 16), (16, 40)])
@pytest.mark.parametrize("name", ENCODERS)
def test_an_encoders_own_positions(name, size) -> None:
    module, processor = module_of(name), processor_of(name)
    for path, part in module.named_modules():
        if path.endswith((*ATTENTION_OUT, "attention.o_proj", "attention.output.dense")):
            torch.nn.init.zeros_(part.weight)
            torch.nn.init.zeros_(part.bias)
    model = hookline.hook(module, processor)
    image = noise(*size)
    ((grid,),) = model.image_grid(None, images=[image])
    assert grid.shape == (4, 4)
    for token in grid.main.flatten().tolist():
        x0, y0, x1, y1 = (grid.boxes[token] * torch.tensor([size[1], size[0]] * 2)).round().int().tolist()
        changed = image.copy()
        changed[y0:y1, x0:x1] = 255 * (image[y0:y1, x0:x1].mean() < 128)
        with torch.no_grad():
            moved = (model(images=[image]) - model(images=[changed]))[0].abs().amax(-1)
        assert int(moved.argmax()) == int(grid.positions[token])


# Two images of sizes that their processors keep or crop; DINOv2's shrinks them a little.
OF_TOWERS = {
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl"), ((24, 40), (40, 16))),
    **dict.fromkeys(("paligemma", "gemma3", "vit", "siglip"), ((16, 16), (16, 16))),
    **{"llava": ((16, 23), (24, 16)), "clip": ((16, 23), (24, 16)), "dinov2": ((18, 30), (22, 18))},
}


@pytest.mark.parametrize("name", OF_TOWERS)
def test_a_patch_of_the_tower_looks_at_its_box(name) -> None:
    """A change of the pixels in a box changes that patch of what enters the tower's first layer, and no other."""
    model = hookline.hook(module_of(name), processor_of(name))
    images = [noise(*size, seed=seed) for seed, size in enumerate(OF_TOWERS[name])]
    text = None if name in ENCODERS else prompt(model, 2)

    def entering(given: list[np.ndarray]) -> torch.Tensor:
        point = "vision.blocks.0.hook_resid_pre"
        with torch.no_grad():
            return model.cache(**model.to_inputs(text, images=given), names_filter=point)[point].flatten(0, 1)

    before, boxes = entering(images), model.patch_boxes(text, images=images).flatten(0, 1)
    assert len(before) == len(boxes)
    share = [60, 40] if name.startswith("qwen") else [len(boxes) // 2] * 2
    owners = torch.arange(2).repeat_interleave(torch.tensor(share)).tolist()
    for patch, (which, box) in enumerate(zip(owners, boxes, strict=True)):
        if box.isnan().any():
            assert patch % share[0] == 0, "the class token comes first"
            continue
        height, width = images[which].shape[:2]
        x0, y0, x1, y1 = (box * torch.tensor([width, height] * 2)).round().int().tolist()
        changed = [each.copy() for each in images]
        changed[which][y0:y1, x0:x1] = 255 - changed[which][y0:y1, x0:x1]
        moved = (entering(changed) - before).abs().amax(-1)
        assert int(moved.argmax()) == patch
        assert moved.count_nonzero() == 1 or name == "dinov2"


def test_patches_that_are_not_known() -> None:
    model = seeing("idefics3")
    with pytest.raises(HooklineError, match=r"'idefics3'.* qwen2_vl"):
        model.patch_boxes(prompt(model), images=[noise(32, 48)])
    llava = seeing("llava")
    with pytest.raises(HooklineError, match="no image"):
        llava.patch_boxes("what is red")
    inputs = llava.to_inputs(prompt(llava), images=[noise(16, 16)])
    assert torch.equal(llava.patch_boxes(inputs)[0, 1:], llava.image_grid(inputs)[0][0].boxes)
    with pytest.raises(HooklineError, match=r"2 images.* 1"):
        llava.patch_boxes(inputs, images=[noise(16, 16)] * 2)


def test_boxes_and_positions_lead_back_to_each_other() -> None:
    model = seeing("qwen2_vl")
    (grid,) = model.image_grid(prompt(model), images=[noise(24, 40)])[0]
    assert grid.shape == (3, 5)
    assert len(grid) == 15
    for position in grid.positions:
        x0, y0, x1, y1 = grid.box(position)
        assert grid.position((x0 + x1) / 2, (y0 + y1) / 2) == position
    assert grid.position(0, 0) == grid.positions[0]
    assert grid.position(1, 1) == grid.positions[-1]
    assert grid.positions_in((0, 0, 1, 1)) == grid.positions.tolist()
    assert grid.positions_in((0, 0, 0.2, 1 / 3)) == [int(grid.positions[0])]


def test_a_map_over_the_image() -> None:
    model = seeing("llava")
    (grid,) = model.image_grid(prompt(model), images=[noise(16, 32)])[0]
    assert torch.equal(grid.as_map(range(16)), torch.arange(16.0).view(4, 4))
    painted = grid.as_map(range(16), size=(16, 32))
    assert painted[:, :8].isnan().all()
    assert painted[:, 24:].isnan().all()
    assert torch.equal(painted[0, 8:24], torch.arange(4.0).repeat_interleave(4))
    with pytest.raises(HooklineError, match="covers"):
        grid.position(0.1, 0.5)
    with pytest.raises(HooklineError, match=r"got shape \[20\]"):
        grid.as_map(range(20))
    with pytest.raises(HooklineError, match=r"part.*image"):
        grid.box(0)
    with pytest.raises(HooklineError, match="from 0 to 1"):
        grid.position(8, 8)
    with pytest.raises(HooklineError, match="8, 8"):
        grid.position(8, 8)


def test_boxes_are_fractions() -> None:
    model = seeing("qwen2_vl")
    (grid,) = model.image_grid(prompt(model), images=[noise(24, 40)])[0]
    for box in (
        *((0.5, 0, 0.5, 1), (0.6, 0, 0.5, 1), (0, 1, 1, 0), (10, 10, 20, 20), (-3, -3, 9, 9), (0, 0, 1, 24)),
        *((-0.1, 0, 1, 1), (0, 0, 1), (0, 0, 1, float("nan"))),
    ):
        with pytest.raises(HooklineError, match="box"):
            grid.positions_in(box)
    assert grid.positions_in((0, 0, 1 + 1e-9, 1)) == grid.positions.tolist()  # a rounding
    assert grid.positions_in(torch.tensor([0, 0, 0.2, 1 / 3])) == [int(grid.positions[0])]


def test_a_map_of_tiles_is_of_the_tiles() -> None:
    model = seeing("idefics3")
    (grid,) = model.image_grid(prompt(model), images=[noise(32, 48)])[0]
    assert grid.shape == (4, 6)
    across = grid.as_map(grid.boxes[:, 0])
    assert torch.equal(across, across[:1].expand(4, 6))
    assert across[0].diff().gt(0).all()
    down = grid.as_map(grid.boxes[:, 1])
    assert torch.equal(down, down[:, :1].expand(4, 6))
    assert down[:, 0].diff().gt(0).all()


@pytest.mark.parametrize("name", KINDS)
def test_inputs_of_the_processor_itself_need_the_images_where_sizes_matter(name) -> None:
    model = seeing(name)
    image = noise(40, 60)
    made = model.to_inputs(prompt(model), images=[image])
    (grid,) = model.image_grid(made)[0]
    plain = dict(made)
    (again,) = model.image_grid(plain, images=[image])[0]
    assert torch.equal(grid.boxes.nan_to_num(-1), again.boxes.nan_to_num(-1))
    if name in ("llava", "idefics3", "smolvlm", "internvl"):
        with pytest.raises(HooklineError, match="image sizes"):
            model.image_grid(plain)
    else:
        (again,) = model.image_grid(plain)[0]
        assert torch.equal(grid.boxes.nan_to_num(-1), again.boxes.nan_to_num(-1))


@pytest.mark.parametrize("name", [*KINDS, *ENCODERS])
def test_as_many_images_as_the_inputs_have(name) -> None:
    is_encoder = name in ENCODERS
    model = hookline.hook(module_of(name), processor_of(name)) if is_encoder else seeing(name)
    one, two = noise(40, 60), noise(40, 60, seed=1)
    text = (None, None) if is_encoder else (prompt(model), prompt(model, 2))
    for given, others in (([one], [one, two]), ([one, two], [one])):
        plain = dict(model.to_inputs(text[len(given) - 1], images=given))
        with pytest.raises(HooklineError, match=r"made from|would produce"):
            model.image_grid(plain, images=others)
        assert model.image_grid(plain, images=given)


@pytest.mark.parametrize("name", ["llava_next", "llava_onevision"])
def test_other_images_than_those_of_the_inputs(name) -> None:
    model = seeing(name)
    plain = dict(model.to_inputs(prompt(model), images=[noise(40, 60)]))
    with pytest.raises(HooklineError, match=r"60 × 40.* 40 × 60"):
        model.image_grid(plain, images=[noise(60, 40)])


def test_errors_instead_of_wrong_boxes() -> None:
    model = seeing("internvl")
    inputs = model.to_inputs(prompt(model), images=[noise(40, 60)])
    model.processor.image_processor.max_patches = 2
    with pytest.raises(HooklineError, match="would produce"):
        model.image_grid(inputs)
    cut = {name: value[:, :6] if name == "input_ids" else value for name, value in inputs.items()}
    with pytest.raises(HooklineError, match="would produce"):
        model.image_grid(cut, images=[noise(40, 60)])


def test_cells_beside_the_image_have_no_box() -> None:
    boxes = cells((-0.5, 0, 1.5, 1), 1, 4)
    assert boxes[[0, 3]].isnan().all()
    assert boxes[[1, 2]].tolist() == [[0, 0, 0.5, 1], [0.5, 0, 1, 1]]


@pytest.mark.parametrize("size", [(16, 32), (33, 17), (100, 30), (7, 9)])
@pytest.mark.parametrize("name", ["llava", "vit", "dinov2", "siglip"])
def test_the_part_that_is_left_after_cropping(name, size) -> None:
    """An image whose colours are its coordinates: what is left of it says where it was."""
    image_processor = getattr(processor_of(name), "image_processor", processor_of(name))
    height, width = size
    x = np.broadcast_to((np.arange(width) + 0.5) / width * 255, size)
    y = np.broadcast_to(((np.arange(height) + 0.5) / height * 255)[:, None], size)
    ramp = np.stack([x, y, x], -1).round().astype(np.uint8)
    left, top, right, bottom = visible_region(image_processor, size)
    seen = image_processor(images=[ramp], return_tensors="pt", do_normalize=False)["pixel_values"][0]
    across, down = seen[0].mean(0), seen[1].mean(1)
    wanted = torch.linspace(left, right, 2 * len(across) + 1)[1::2].clamp(0.5 / width, 1 - 0.5 / width)
    assert (across - wanted).abs().max() < 0.03 + 0.3 / width
    wanted = torch.linspace(top, bottom, 2 * len(down) + 1)[1::2].clamp(0.5 / height, 1 - 0.5 / height)
    assert (down - wanted).abs().max() < 0.03 + 0.3 / height


@pytest.mark.parametrize("size", [(300, 3), (5, 400)])
@pytest.mark.parametrize("name", ["llava_next", "llava_onevision"])
def test_a_very_long_image_has_only_its_coarse_grid(name, size):
    model = seeing(name)
    (grid,) = model.image_grid(prompt(model), images=[noise(*size)])[0]
    assert min(grid.shape) > 0
    assert grid.extent == (0.0, 0.0, 1.0, 1.0)
    left, top, right, bottom = grid.box(grid.position(0.6, 0.6))
    assert left <= 0.6 < right
    assert top <= 0.6 < bottom
