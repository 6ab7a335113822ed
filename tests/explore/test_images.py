"""Prompts with images: the views, the edits and the script have the library's own numbers; bad images are reported."""

import base64
import contextlib
import io
import json
import struct
import zlib

import numpy as np
import pytest
import torch
from PIL import Image
from tiny_vision import processor_of, tiny_vision
from typer.testing import CliRunner

import hookline
from hookline import HooklineError, edits
from hookline.cli import app
from hookline.demo.tinysight import first_images
from hookline.experiments import ablation, images, logit_attribution, metrics, patching
from hookline.explore import explore, export_page, image_files
from hookline.explore.feature_views import FEATURE_VIEWS
from hookline.explore.image_files import data_url, decoded_image
from hookline.explore.live_edits import script
from hookline.explore.question import LiveEdit, Question
from hookline.explore.views import VIEWS, about_model, answer

PROMPT = "<image> What color is the circle?"
RED, GREEN = first_images()
URLS = {"images": (data_url(RED),), "other_images": (data_url(GREEN),)}
CIRCLE = (1, 2, 3, 7, 8, 9, 13, 14, 15)
EDITS = {
    "zero": LiveEdit("zero", "blocks.1.attn.hook_z", head=5),
    "zero at": LiveEdit("zero", "blocks.1.hook_resid_pre", pos=CIRCLE),
    "mean at": LiveEdit("mean", "blocks.1.hook_attn_out", pos=(38, 42)),
    "patch": LiveEdit("patch", "blocks.0.hook_resid_pre"),
    "patch one": LiveEdit("patch", "blocks.0.hook_resid_pre", pos=8),
    "patch region": LiveEdit("patch", "blocks.0.hook_resid_pre", pos=CIRCLE),
    "tower": LiveEdit("patch", "vision.blocks.1.hook_resid_post"),
    "tower at": LiveEdit("patch", "vision.blocks.1.hook_resid_post", pos=(8, 9)),
    "tower head": LiveEdit("zero", "vision.blocks.1.attn.hook_z", head=2),
    "projector": LiveEdit("scale", "projector.hook_out", amount=0.5),
    "steer": LiveEdit(
        "steer", "blocks.2.hook_resid_post", amount=2.0, positive="What is red?", negative="What is blue?"
    ),
}


@pytest.fixture(scope="module")
def model():
    return hookline.load("tinysight")


@pytest.fixture(scope="module")
def inputs(model):
    return tuple(model.to_inputs(PROMPT, images=[each]) for each in (RED, GREEN))


def ask(model, view, **more):
    data = answer(model, Question(view, PROMPT, **{"other": PROMPT, **URLS, **more}))
    json.dumps(data, allow_nan=False)
    return data


def unpacked(data) -> torch.Tensor:
    values = np.frombuffer(base64.b64decode(data["f32"]), "<f4").reshape(data["shape"])
    return torch.from_numpy(values.copy())


def printed(program: str) -> dict[str, float]:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(program, {})
    rows = (line.split(" ", 1) for line in out.getvalue().splitlines())
    return {eval(text): float(prob) for prob, text in rows}


def test_next_tokens_are_the_models(model) -> None:
    data = ask(model, "next")
    probs = model(PROMPT, images=[RED])[0, -1].softmax(-1)
    assert torch.equal(unpacked(data["before"]), probs[data["ids"]])
    assert (data["target"]["text"], data["versus"]["text"]) == (" red", " green")


def test_where_the_image_is(model, inputs) -> None:
    data = ask(model, "tokens")
    (layout,), grid = data["tokens"]["images"], model.image_grid(inputs[0])[0][0]
    assert (layout["start"], layout["stop"], layout["problem"]) == (1, 37, None)
    assert layout["positions"] == grid.positions.tolist()
    assert torch.equal(unpacked(layout["boxes"]), grid.boxes)
    assert layout["main"] == grid.main.tolist()
    boxes = model.patch_boxes(inputs[0])
    assert torch.equal(unpacked(data["tokens"]["tower"]).nan_to_num(-1), boxes.nan_to_num(-1))
    assert data["aligned"] == [[at, at] for at in range(43)]


def test_what_the_image_view_draws_is_the_librarys(model, inputs) -> None:
    (layout,) = ask(model, "tokens")["tokens"]["images"]
    found = images.attention(model, inputs[0], RED, pos=-2)
    pattern = unpacked(ask(model, "attention", layer=1, head=5)["values"])
    assert torch.equal(pattern[-2, layout["positions"]], found.values.sel(layer=1, head=5).values)
    lens, page = images.lens(model, inputs[0], RED, top=3), ask(model, "lens")
    row = page["layers"].index(2)
    words = [[page["words"][token] for token in page["cells"][row][pos][:3]] for pos in layout["positions"]]
    assert words == lens.tokens[lens.layers.index(2)]
    swept = patching.sweep(model, *inputs, metrics.logit_diff(" red", " green"), progress=False)
    values = unpacked(ask(model, "patching", measure="stream", target=" red", versus=" green")["values"])
    assert torch.equal(values, swept.normalized.values)


def test_heads_and_components(model, inputs) -> None:
    answers = {"target": " red", "versus": " green"}
    found = logit_attribution.direct_logit_attribution(model, inputs[0], " red", " green", of="heads")
    assert torch.equal(unpacked(ask(model, "heads", measure="attribution", **answers)["values"]), found.values)
    lost = ablation.ablate(model, inputs[0], metrics.logit_diff(" red", " green"), progress=False)
    values = unpacked(ask(model, "heads", measure="ablation", **answers)["values"])
    assert torch.allclose(values, lost.values - lost.info["clean"])
    parts = ask(model, "attribution", **answers)
    assert float(unpacked(parts["values"]).sum()) + parts["bias"] == pytest.approx(parts["logit"], rel=1e-4)


def test_points_of_the_vision_tower(model) -> None:
    cache = model.cache(PROMPT, images=[RED])
    data = ask(model, "point", point="vision.blocks.1.hook_resid_post")
    assert torch.equal(unpacked(data["values"]), cache["vision.blocks.1.hook_resid_post"][0])
    assert (data["stream"], data["rows"]) == ("image", 1)
    data = ask(model, "point", point="vision.blocks.1.attn.hook_pattern", head=3)
    assert torch.equal(unpacked(data["values"]), cache["vision.blocks.1.attn.hook_pattern"][0, 3])
    two = {"images": URLS["images"] + URLS["other_images"], "prompt": PROMPT.replace("<image>", "<image><image>")}
    data = answer(model, Question("point", point="vision.blocks.0.hook_resid_post", row=1, **two))
    other = model.cache(PROMPT, images=[GREEN])["vision.blocks.0.hook_resid_post"][0]
    assert torch.allclose(unpacked(data["values"]), other, atol=1e-5)
    with pytest.raises(HooklineError):
        ask(model, "point", point="vision.blocks.0.hook_resid_post", row=1)


def test_points_of_images_are_known_by_their_names(model) -> None:
    for point in model.hook_dict.values():
        assert LiveEdit("zero", point.name).is_in_tower == (point.stream == "image"), point.name


def test_the_region_of_the_circle_decides(model, inputs) -> None:
    data = ask(model, "next", edits=(EDITS["patch region"],))
    other = model.cache(**inputs[1], names_filter="blocks.0.hook_resid_pre")["blocks.0.hook_resid_pre"]
    hooks = [("blocks.0.hook_resid_pre", edits.replace(other, pos=CIRCLE))]
    probs = model.run_with_hooks(**inputs[0], fwd_hooks=hooks)[0, -1].softmax(-1)
    assert torch.equal(unpacked(data["after"]), probs[data["ids"]])
    assert data["texts"][0] == " green"
    assert ask(model, "generate", count=2, edits=(EDITS["patch region"],))["after"][0] == " green"


@pytest.mark.parametrize("name", EDITS)
def test_the_script_prints_the_same_numbers(model, name, tmp_path) -> None:
    asked = Question("next", PROMPT, PROMPT, edits=(EDITS[name],), **URLS)
    data = answer(model, asked)
    after = dict(zip(data["texts"], unpacked(data["after"]).tolist(), strict=True))
    RED.save(tmp_path / "red.png")
    paths = {URLS["images"][0]: str(tmp_path / "red.png")}
    for program in (script("tinysight", asked), script("tinysight", asked, paths)):
        found = printed(program)
        assert len(found) == 10
        assert all(prob == pytest.approx(after[text], abs=6e-5) for text, prob in found.items())
    assert "base64" in script("tinysight", asked)


@pytest.mark.parametrize("name", ["zero at", "patch region", "tower at", "projector", "steer"])
@pytest.mark.parametrize("view", [view for view in VIEWS if view not in ("patching", "scores", *FEATURE_VIEWS)])
def test_every_view_takes_such_edits(model, view, name) -> None:
    ask(model, view, edits=(EDITS[name],), point="vision.blocks.2.hook_resid_post", measure="attribution")


def test_patching_with_an_edit(model) -> None:
    ask(model, "patching", measure="heads", edits=(EDITS["zero"],))


LAYOUTS = ("llava", "qwen2_vl", "qwen2_5_vl", "gemma3", "llava_next", "smolvlm")


@pytest.mark.parametrize("family", LAYOUTS)
def test_other_families(family) -> None:
    module, processor, _ = tiny_vision(family)
    found = hookline.hook(module, processor)
    place = about_model(found, family)["placeholder"]["written"]
    urls = {"images": (data_url(RED),), "other_images": (data_url(GREEN),)}
    text = f"{place} what colour is the circle ?"
    tokens = answer(found, Question("tokens", text, text, **urls))["tokens"]
    (layout,), grid = tokens["images"], found.image_grid(text, images=[RED])[0][0]
    assert layout["positions"] == grid.positions.tolist()
    assert range(layout["start"], layout["stop"]) == found.image_token_range(0, text, images=[RED])
    more = {"point": "vision.blocks.0.hook_resid_post", "measure": "stream"}
    for view in VIEWS.keys() - FEATURE_VIEWS.keys() - {"scores"}:  # which need a probe: test_scores.py
        given = {**more, "measure": "attribution"} if view == "heads" else more
        json.dumps(answer(found, Question(view, text, text, **urls, **given)))


def test_a_model_without_image_tokens_says_so() -> None:
    module, processor, _ = tiny_vision("mllama")
    found = hookline.hook(module, processor)
    text = "<|image|> what colour is the circle ?"
    (layout,) = answer(found, Question("tokens", text, images=(data_url(RED),)))["tokens"]["images"]
    assert (layout["start"], layout["stop"]) == (None, None)
    assert "cross-attention" in layout["problem"]
    assert answer(found, Question("next", text, images=(data_url(RED),)))["ids"]


def test_the_tokens_of_a_layout_that_is_not_known(model, monkeypatch) -> None:
    def unknown(*_, **__):
        raise HooklineError("not known")

    for name in ("image_grid", "image_token_range", "patch_boxes"):
        monkeypatch.setattr(type(model), name, unknown)
    tokens = ask(model, "tokens")["tokens"]
    assert tokens["images"] == [{"start": 1, "stop": 37, "problem": "not known"}]
    assert tokens["tower"] is None


def test_a_language_model_takes_no_images() -> None:
    found = hookline.load("tinyworld")
    assert about_model(found, "tinyworld")["placeholder"] == {"token": "", "written": ""}
    with pytest.raises(HooklineError):
        answer(found, Question("next", "When Mary", images=URLS["images"]))


def png(width: int, height: int, content: bytes) -> bytes:
    """A PNG whose header has this size."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(content)) + chunk(b"IEND", b"")


def url(content: bytes, kind: str = "png") -> str:
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"


WHOLE = base64.b64decode(URLS["images"][0].partition(",")[2])
BAD = {
    "bomb": url(png(60_000, 60_000, b"\0" * 1000)),
    "truncated": url(WHOLE[:2000]),
    "no pixels": url(WHOLE[:40]),
    "garbage": url(b"this is no image"),
    "other type": url(WHOLE, "jpeg"),
    "svg": url(b"<svg/>", "svg+xml"),
    "tiff": url(b"II*\0", "tiff"),
    "html": "data:text/html;base64,PHA+",
    "address": "http://example.org/image.png",
    "path": "/etc/passwd",
    "not base64": "data:image/png;base64,%%%%",
    "padding": "data:image/png;base64,abc",
    "empty": "",
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_image_is_reported(model, name) -> None:
    with pytest.raises(HooklineError):
        answer(model, Question.of({"view": "next", "prompt": PROMPT, "images": [BAD[name]]}))


def test_an_image_that_is_too_large_is_reported(monkeypatch) -> None:
    monkeypatch.setattr(image_files, "MOST_IMAGE_BYTES", 1000)
    with pytest.raises(HooklineError, match="bytes"):
        decoded_image(url(WHOLE + b"\0"))


def test_an_image_with_16_bits_is_reported() -> None:
    with pytest.raises(HooklineError, match="8 bits"):
        data_url(Image.fromarray(np.zeros((4, 4), np.uint16)))


def test_transparency_is_noted(model) -> None:
    seen = RED.copy()
    seen.putalpha(128)
    made = io.BytesIO()
    seen.save(made, "PNG")
    (layout,) = ask(model, "tokens", images=(url(made.getvalue()),))["tokens"]["images"]
    assert "transparency" in layout["note"]
    assert "note" not in ask(model, "tokens")["tokens"]["images"][0]


@pytest.mark.parametrize(
    "given",
    [
        {"images": "all"},
        {"images": [3]},
        {"images": [URLS["images"][0]] * 99},
        {"images": [URLS["images"][0]] * 2},
        {"images": []},
        {"images": list(URLS["images"]), "prompt": "What color is the circle?"},
        {"images": list(URLS["images"]), "edits": [{"kind": "zero", "point": "blocks.0.hook_resid_pre", "pos": []}]},
        {"images": list(URLS["images"]), "edits": [{"kind": "zero", "point": "blocks.0.hook_resid_pre", "pos": ["1"]}]},
        {
            "images": list(URLS["images"]),
            "other": "What is red?",
            "edits": [{"kind": "patch", "point": "blocks.0.hook_resid_pre", "pos": [1, 2]}],
        },
    ],
)
def test_a_bad_question_is_reported(model, given) -> None:
    with pytest.raises(HooklineError):
        answer(model, Question.of({"view": "next", "prompt": PROMPT, **given}))


def test_positions_that_the_prompt_does_not_have_are_noted(model) -> None:
    edit = LiveEdit("zero", "blocks.0.hook_resid_pre", pos=(8, 99))
    (note,) = ask(model, "next", edits=(edit,))["notes"]
    assert "99" in note


def test_a_file_keeps_its_bytes_and_others_become_png(tmp_path) -> None:
    RED.save(tmp_path / "red.jpg")
    assert data_url(tmp_path / "red.jpg") == url((tmp_path / "red.jpg").read_bytes(), "jpeg")
    RED.save(tmp_path / "red.tiff")
    found = decoded_image(data_url(str(tmp_path / "red.tiff")))
    assert np.array_equal(np.asarray(found), np.asarray(RED))
    with pytest.raises(HooklineError):
        data_url(tmp_path / "nothing.png")


def test_a_page_has_its_images_inside(model, tmp_path) -> None:
    with torch.no_grad():
        path = export_page(model, tmp_path / "page.html", PROMPT, images=[RED], other_images=[GREEN])
    page = path.read_text()
    assert all(each in page for each in (URLS["images"][0], URLS["other_images"][0]))
    assert '"patching"' in page


def test_the_first_state_of_a_page(model, tmp_path) -> None:
    RED.save(tmp_path / "red.png")
    with explore(model, "What is red?", images=[tmp_path / "red.png"], browser=False) as found:
        server = found._server
        assert server.state["prompt"] == "<image> What is red?"
        assert server.session._paths == {server.state["images"][0]: str(tmp_path / "red.png")}
    with explore(model, PROMPT, PROMPT, images=[RED], browser=False) as found:
        assert found._server.state["otherImages"] == list(URLS["images"])


@pytest.mark.parametrize("more", [[], ["--image", "red.png", "--prompt", "What is red?"]])
def test_the_command_takes_images(more, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    RED.save(tmp_path / "red.png")
    result = CliRunner().invoke(app, ["explore", "tinysight", "--export", "page.html", *more])
    assert result.exit_code == 0, result.output
    assert "data:image/png" in (tmp_path / "page.html").read_text()


def test_the_command_reports_an_image_that_is_not_there() -> None:
    result = CliRunner().invoke(app, ["explore", "tinysight", "--export", "page.html", "--image", "nothing.png"])
    assert result.exit_code == 3


def test_the_place_of_an_image_is_written_as_the_model_needs_it() -> None:
    module = tiny_vision("qwen2_vl")[0]
    found = hookline.hook(module, processor_of("qwen2_vl"))
    place = {"token": "<|image_pad|>", "written": "<|vision_start|><|image_pad|><|vision_end|>"}
    assert about_model(found, "qwen")["placeholder"] == place
