"""Experiments on texts with images, against plain runs with hooks."""

import pytest
import tiny_vision
import torch
import transformers

import hookline
from hookline import HookedModel, HooklineError
from hookline.experiments import (
    ablation,
    attribution,
    contrast,
    logit_attribution,
    logit_lens,
    metrics,
    patching,
    steering,
    tracing,
)
from hookline.rerun.baseline import Baseline
from hookline.rerun.strategy import Strategy
from hookline.text.image_tokens import image_token_id
from hookline.text.loss import lm_loss
from hookline.transformer.find_anatomy import find_anatomy

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")  # transformers' own
WAYS = {
    "paligemma": Strategy.FROM_LAYER,
    "gemma3": Strategy.FROM_LAYER,
    "qwen3_vl": Strategy.FULL,
    "mllama": Strategy.FULL,
}
"""How variants are run, where it is not by resuming: pictures seen both ways, features added on the way, tiles."""
QUICK = ("llava", "qwen2_5_vl", "paligemma", "mllama")


@pytest.fixture(autouse=True)
def _quiet():
    transformers.logging.set_verbosity_error()


def seeing(kind: str) -> HookedModel:
    module = tiny_vision.module_of(kind)
    return HookedModel(module, None, find_anatomy(module))


def pair(kind: str) -> tuple[dict, dict]:
    """The same text with two images."""
    one, other = (tiny_vision.inputs_of(kind, rows=1) for _ in range(2))
    other["pixel_values"] = 0.3 - other["pixel_values"]
    return one, other


def metric(given: torch.Tensor) -> torch.Tensor:
    return given[:, -1, 70] - given[:, -1, 90]


@pytest.mark.parametrize(
    "kind", [k if k in QUICK else pytest.param(k, marks=pytest.mark.slow) for k in tiny_vision.VISION_LANGUAGE]
)
def test_a_sweep_is_what_hooks_one_by_one_give(kind) -> None:
    model, (clean, corrupted) = seeing(kind), pair(kind)
    swept = patching.sweep(model, clean, corrupted, metric, points="resid_pre")
    heads = patching.sweep(model, clean, corrupted, metric, points="z", over=("layer", "head"), layers=[0])
    _, cache = model.run_with_cache(**clean)
    length = clean["input_ids"].shape[1]
    assert swept.shape == (len(model.blocks), length)

    def patched(name, *where) -> float:
        def put(x):
            x = x.clone()
            x[(0, *where)] = cache[name][(0, *where)]
            return x

        return float(metric(model.run_with_hooks(**corrupted, fwd_hooks=[(name, put)])))

    for layer, pos in ((0, 5), (1, 6), (1, length - 1)):
        assert float(swept.values[layer, pos]) == pytest.approx(
            patched(f"blocks.{layer}.hook_resid_pre", pos), abs=1e-5
        )
    assert float(heads.values[0, 2]) == pytest.approx(patched("blocks.0.attn.hook_z", slice(None), 2), abs=1e-5)
    assert swept.info["clean"] == pytest.approx(float(metric(model(**clean))), abs=1e-5)
    assert swept.info["corrupted"] == pytest.approx(float(metric(model(**corrupted))), abs=1e-5)
    if kind != "mllama":  # whose text gets nothing of the image before its first cross-attention
        assert swept.values[0].std() > 0


@pytest.mark.parametrize("kind", QUICK)
def test_how_variants_are_run(kind) -> None:
    inputs = pair(kind)[0]
    tokens, _ = inputs.pop("input_ids"), inputs.pop("attention_mask")
    assert Baseline(seeing(kind), tokens, inputs=inputs).strategy == WAYS.get(kind, Strategy.FROM_POSITION)


@pytest.mark.parametrize("kind", ["llava", "qwen2_5_vl"])
def test_the_vision_tower_can_be_swept(kind) -> None:
    model, (clean, corrupted) = seeing(kind), pair(kind)
    heads = patching.sweep(model, clean, corrupted, metric, points="vision.attn.z", over=("layer", "head"))
    name = "vision.blocks.1.attn.hook_z"
    _, cache = model.run_with_cache(**clean, names_filter=name)

    def put(z):
        z = z.clone()
        z[:, :, 2] = cache[name][:, :, 2]
        return z

    expected = float(metric(model.run_with_hooks(**corrupted, fwd_hooks=[(name, put)])))
    assert float(heads.values[1, 2]) == pytest.approx(expected, abs=1e-5)
    patches = patching.sweep(model, clean, corrupted, metric, points="vision.layer.pre", layers=[0])
    assert patches.shape == (1, cache[name].shape[1])
    with pytest.raises(HooklineError, match=r"sweep.*separately"):
        patching.sweep(model, clean, corrupted, metric, points=["vision.attn.z", "z"], over=("layer", "head"))


def two_images() -> tuple[dict, dict]:
    """A text with two images, and with two others."""
    first, second = (tiny_vision.inputs_of("llava", rows=1, seed=seed) for seed in (0, 1))
    ids = torch.cat([first["input_ids"], second["input_ids"][:, 1:]], 1)
    both = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    pixels = torch.cat([first["pixel_values"], second["pixel_values"]])
    return both | {"pixel_values": pixels}, both | {"pixel_values": 0.3 - pixels.flip(0)}


SEVERAL = {"llava": two_images, "llava_next": lambda: pair("llava_next"), "qwen2_5_vl": lambda: pair("qwen2_5_vl")}
"""Prompts whose images, or tiles of an image, are several rows of the tower; and one with all patches in a row."""


@pytest.mark.quick_for("llava_next")
@pytest.mark.parametrize("kind", SEVERAL)
def test_all_images_and_tiles_are_patched(kind) -> None:
    model, (clean, corrupted) = seeing(kind), SEVERAL[kind]()
    name = "vision.blocks.1.attn.hook_z"
    _, cache = model.run_with_cache(**clean, names_filter=name)
    rows, patches = cache[name].shape[:2]

    def patched(*where) -> float:
        def put(z) -> None:
            z[where] = cache[name][where]

        return float(metric(model.run_with_hooks(**corrupted, fwd_hooks=[(name, put)])))

    heads = patching.sweep(model, clean, corrupted, metric, points="vision.z", over=("layer", "head"))
    assert float(heads.values[1, 2]) == pytest.approx(patched(slice(None), slice(None), 2), abs=1e-5)
    each = patching.sweep(model, clean, corrupted, metric, points="vision.z", over=("layer", "pos"), layers=[1])
    assert each.shape == (1, rows * patches)
    assert float(each.values[0, patches + 1 if rows > 1 else 5]) == pytest.approx(
        patched(1, 1) if rows > 1 else patched(0, 5), abs=1e-5
    )
    whole = model.run_with_cache(**clean)[1]
    from_cache = patching.sweep(model, whole, corrupted, metric, points="vision.z", over=("layer", "head"))
    torch.testing.assert_close(from_cache.values, heads.values)
    if rows > 1:
        with pytest.raises(HooklineError, match=r"rows.*run"):
            patching.sweep(model, clean, corrupted, metric, points="vision.pattern", over=("layer", "head"))


@pytest.mark.quick_for("qwen2_5_vl")
@pytest.mark.parametrize("kind", SEVERAL)
def test_attribution_sums_over_images_and_averages_over_prompts(kind) -> None:
    model, (clean, corrupted) = seeing(kind), SEVERAL[kind]()
    names = [f"vision.blocks.{layer}.attn.hook_z" for layer in range(2)]
    given = model.run_with_cache(**clean, names_filter=names)[1]
    logits, own = model.run_with_cache(
        **corrupted, names_filter=names, incl_bwd=True, loss_fn=lambda logits: metric(logits).sum()
    )
    how = {"points": "vision.z", "layers": [0, 1]}
    by_head = attribution.attribution_patching(model, clean, corrupted, metric, over=("layer", "head"), check=0, **how)
    by_patch = attribution.attribution_patching(model, clean, corrupted, metric, over=("pos", "layer"), check=8, **how)
    for layer, name in enumerate(names):
        effects = (given[name] - own[name]) * own[f"{name}_grad"]
        before = metric(logits).item()
        torch.testing.assert_close(by_head.values[layer], before + effects.sum((0, 1, 3)), atol=1e-5, rtol=1e-4)
        by_hand = before + effects.sum((2, 3)).flatten()
        torch.testing.assert_close(by_patch.values[:, layer], by_hand, atol=1e-5, rtol=1e-4)
    for cell in by_patch.info["sample"]:
        row, patch = divmod(cell["pos"], given[names[0]].shape[1])

        def put(z, at=(row, patch), name=names[cell["layer"]]) -> None:
            z[at] = given[name][at]

        true = metric(model.run_with_hooks(**corrupted, fwd_hooks=[(names[cell["layer"]], put)]))
        assert cell["true"] == pytest.approx(float(true), abs=1e-5)
    several = ([clean, corrupted], [corrupted, clean])
    for steps in (None, 2):
        how |= {"over": ("layer", "head"), "steps": steps, "check": 0}
        twice = attribution.attribution_patching(model, *several, metric, **how)
        back = attribution.attribution_patching(model, corrupted, clean, metric, **how)
        there = attribution.attribution_patching(model, clean, corrupted, metric, **how)
        torch.testing.assert_close(twice.values, (there.values + back.values) / 2, atol=1e-5, rtol=1e-4)


def test_attribution_at_points_of_images_and_text_of_different_lengths() -> None:
    model, (one, other) = seeing("llava"), pair("llava")
    longer = [
        {**each, "input_ids": torch.cat([each["input_ids"], torch.tensor([[77, 78]])], 1)} for each in (one, other)
    ]
    longer = [{**each, "attention_mask": torch.ones_like(each["input_ids"])} for each in longer]
    lead = metrics.logit_diff(70, 90)
    names = ["vision.blocks.0.hook_resid_pre", "blocks.1.hook_resid_pre"]
    for steps in (None, 2):
        how = {"points": names, "over": ("point",), "per_example": True, "steps": steps, "check": 2}
        found = attribution.attribution_patching(model, [one, longer[0]], [other, longer[1]], lead, **how)
        for row, (clean, corrupted) in enumerate([(one, other), longer]):
            alone = attribution.attribution_patching(model, clean, corrupted, lead, **how)
            torch.testing.assert_close(found.values[:, row], alone.values[:, 0], atol=1e-5, rtol=1e-4)


@pytest.mark.quick_for("qwen2_5_vl")
@pytest.mark.parametrize("kind", SEVERAL)
def test_means_and_differences_are_of_all_images(kind) -> None:
    model, (clean, corrupted) = seeing(kind), SEVERAL[kind]()
    name = "vision.blocks.0.attn.hook_z"
    data = [model.run_with_cache(**each, names_filter=name)[1][name] for each in (clean, corrupted)]
    mean = torch.cat([each.flatten(0, 1) for each in data]).mean(0)

    def put(z) -> None:
        z[:, :, 1] = mean[1]

    expected = float(metric(model.run_with_hooks(**clean, fwd_hooks=[(name, put)])))
    how = {"points": "vision.z", "over": ("layer", "head"), "method": "mean"}
    found = ablation.ablate(model, clean, metric, data=[clean, corrupted], **how)
    assert float(found.values[0, 1]) == pytest.approx(expected, abs=1e-5)
    again = ablation.ablate(model, [clean, corrupted], metric, per_example=True, **how)
    assert float(again.values[0, 1, 0]) == pytest.approx(expected, abs=1e-5)
    apart = contrast.head_differences(model, [(clean, corrupted)], points="vision.z")
    norms = (data[0] - data[1]).pow(2).sum((0, 1, 3)).sqrt()
    torch.testing.assert_close(apart.values[0], norms)
    torch.testing.assert_close(
        contrast.head_differences(model, [(clean, corrupted)], points="vision.z", pos=None).values, apart.values
    )
    at_one = contrast.head_differences(model, [(clean, corrupted)], points="vision.z", pos=2)
    torch.testing.assert_close(at_one.values[0], (data[0] - data[1])[:, 2].pow(2).sum((0, 2)).sqrt())
    text = contrast.head_differences(model, [(clean, corrupted)])
    z = [model.run_with_cache(**each)[1]["z", 1][0, -1] for each in (clean, corrupted)]
    torch.testing.assert_close(text.values[1], (z[0] - z[1]).norm(dim=-1))


def test_images_of_other_sizes_are_refused_by_name() -> None:
    model, (one, _) = seeing("qwen2_5_vl"), pair("qwen2_5_vl")
    ids = torch.cat([one["input_ids"][:, :5], one["input_ids"][:, 7:]], 1)
    small = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "image_grid_thw": torch.tensor([[1, 4, 4]])}
    small |= {"mm_token_type_ids": (ids == tiny_vision.IMAGE).int(), "pixel_values": one["pixel_values"][:16]}
    how = {"points": "vision.resid_pre", "over": ("layer", "pos")}
    with pytest.raises(HooklineError, match=r"\[16, 24\]"):
        ablation.ablate(model, [one, small], metric, **how)
    with pytest.raises(HooklineError, match=r"images.*size"):
        contrast.head_differences(model, [(one, small)], points="vision.z")
    with pytest.raises(HooklineError, match=r"images.*size"):
        attribution.attribution_patching(model, [one, small], [one, small], metric, **how)


def test_other_experiments() -> None:
    model, (clean, corrupted) = seeing("llava"), pair("llava")
    effects = ablation.ablate(model, clean, metric, of="heads")

    def silence(z) -> None:
        z[:, :, 3] = 0

    zeroed = model.run_with_hooks(**clean, fwd_hooks=[("blocks.1.attn.hook_z", silence)])
    assert float(effects.values[1, 3]) == pytest.approx(float(metric(zeroed)), abs=1e-5)
    parts = logit_attribution.direct_logit_attribution(model, clean, tokens=70, pos=-1)
    assert float(parts.values.sum()) + float(parts.info["bias"]) == pytest.approx(
        float(model(**clean)[0, -1, 70]), abs=1e-4
    )
    assert logit_lens.logit_lens(model, clean).shape == (3, clean["input_ids"].shape[1])
    gradients = attribution.attribution_patching(model, clean, corrupted, metric)
    assert gradients.shape == (2, clean["input_ids"].shape[1])


def test_several_prompts_of_different_lengths() -> None:
    model, (one, other) = seeing("llava"), pair("llava")
    longer = other | {"input_ids": torch.cat([other["input_ids"], torch.tensor([[77, 78]])], 1)}
    longer["attention_mask"] = torch.ones_like(longer["input_ids"])

    def last(given):  # of each row: padding is after the text
        return torch.stack([given[0, -3, 70] if given.shape[0] > 1 else given[0, -1, 70], given[-1, -1, 70]])

    found = ablation.ablate(model, [one, longer], last, of="heads", per_example=True)
    alone = ablation.ablate(model, longer, lambda given: given[:, -1, 70], of="heads")
    torch.testing.assert_close(found.values[..., 1], alone.values)


def test_resampled_from_the_same_text_with_another_image() -> None:
    model, (one, other) = seeing("llava"), pair("llava")
    found = ablation.ablate(model, one, metric, of="heads", method="resample", data=[other])
    assert found.shape == (2, 4)
    with pytest.raises(HooklineError, match="other text"):
        ablation.ablate(model, one, metric, of="heads", method="resample", data=[one])


def test_what_is_no_prompt() -> None:
    model, both = seeing("llava"), tiny_vision.inputs_of("llava", rows=2)
    with pytest.raises(HooklineError, match="one text"):
        ablation.ablate(model, both, metric, of="heads")
    with pytest.raises(HooklineError, match="missing"):
        ablation.ablate(model, {"pixel_values": both["pixel_values"]}, metric, of="heads")


def image_first(kind: str) -> tuple[dict, dict]:
    """The same with the image at the very beginning: what it does may reach back from there."""

    def cut(inputs: dict) -> dict:
        length = inputs["input_ids"].shape[1]
        return {name: x[:, 4:] if x.shape == (1, length) else x for name, x in inputs.items()}

    return tuple(cut(inputs) for inputs in pair(kind))


@pytest.mark.parametrize("kind", ["qwen3_vl", "gemma3", "paligemma", "qwen2_5_vl", "llava"])
def test_an_image_at_the_beginning(kind) -> None:
    model, (clean, corrupted) = seeing(kind), image_first(kind)
    swept = patching.sweep(model, clean, corrupted, metric, points="resid_pre", over=("layer",))
    name = "blocks.0.hook_resid_pre"
    _, cache = model.run_with_cache(**clean, names_filter=name)
    patched = model.run_with_hooks(**corrupted, fwd_hooks=[(name, lambda x: cache[name])])
    assert float(swept.values[0]) == pytest.approx(float(metric(patched)), abs=1e-5)
    if kind != "qwen3_vl":  # whose images come in at later layers too
        assert float(swept.values[0]) == pytest.approx(swept.info["clean"], abs=1e-4)
    effects = ablation.ablate(model, clean, metric, of="heads")

    def silence(z) -> None:
        z[:, :, 1] = 0

    zeroed = model.run_with_hooks(**clean, fwd_hooks=[("blocks.0.attn.hook_z", silence)])
    assert float(effects.values[0, 1]) == pytest.approx(float(metric(zeroed)), abs=1e-5)


@pytest.mark.parametrize("kind", ["llava", "qwen2_5_vl"])
def test_parts_of_the_tower_are_ablated(kind) -> None:
    model, (inputs, _) = seeing(kind), pair(kind)
    name = "vision.blocks.0.hook_resid_pre"
    _, cache = model.run_with_cache(**inputs, names_filter=name)
    patches = cache[name].shape[1]
    found = ablation.ablate(model, inputs, metric, points="vision.resid_pre", over=("layer", "pos"), layers=[0])
    assert found.shape == (1, patches)

    def silence(x) -> None:
        x[:, patches - 1] = 0

    zeroed = model.run_with_hooks(**inputs, fwd_hooks=[(name, silence)])
    assert float(found.values[0, -1]) == pytest.approx(float(metric(zeroed)), abs=1e-5)
    mean = ablation.ablate(model, inputs, metric, points="vision.z", over=("layer", "head"), method="mean")
    assert mean.shape[1] == model.anatomy.towers[0].blocks[0].attn.num_heads
    with pytest.raises(HooklineError, match=r"position.*text"):
        ablation.ablate(model, inputs, metric, points="vision.z", over=("layer", "head"), positions=-1)
    curve = ablation.cumulative(model, inputs, metric, ablation.ranking(mean))
    assert curve.info["choice"]["points"] == "vision.z"
    effects = attribution.attribution_patching(model, *pair(kind), metric, points="vision.layer.pre")
    assert effects.shape[1] == patches


def test_the_whole_image_is_ablated() -> None:
    model, (inputs, _) = seeing("llava"), pair("llava")
    found = ablation.ablate(model, inputs, metric, of="mlps", positions=hookline.positions.image_tokens)
    seen = inputs["input_ids"][0] == tiny_vision.IMAGE

    def silence(x) -> None:
        x[:, seen] = 0

    zeroed = model.run_with_hooks(**inputs, fwd_hooks=[("blocks.1.hook_mlp_out", silence)])
    assert float(found.values[1]) == pytest.approx(float(metric(zeroed)), abs=1e-5)


def test_what_images_cannot_be_in() -> None:
    model, (inputs, _) = seeing("llava"), pair("llava")
    place = int((inputs["input_ids"][0] == tiny_vision.IMAGE).nonzero()[0])
    with pytest.raises(HooklineError, match="subject"):
        tracing.trace(model, inputs, subject=[place], metric=metric)
    with pytest.raises(HooklineError, match="language model"):
        tracing.trace(model, inputs, subject=[1], metric=metric, points="vision.layer.post")
    with pytest.raises(HooklineError, match="vision tower"):
        steering.contrast_vectors(model, inputs, inputs, points="vision.layer.post")
    with pytest.raises(HooklineError, match=r"images=\["):
        steering.generate(model, inputs, torch.zeros(32), layer=1)
    with pytest.raises(HooklineError, match=r"vision\.resid_pre, vision\.z"):
        ablation.ablate(model, inputs, metric, points="vision.nonsense")
    base = model.baseline(inputs)
    torch.testing.assert_close(base.logits, model(**inputs)[0])
    padded = inputs | {"attention_mask": inputs["attention_mask"].clone()}
    padded["attention_mask"][0, 0] = 0
    with pytest.raises(HooklineError, match="without padding"):
        model.baseline(padded)


@pytest.mark.parametrize(
    "kind", [k if k in QUICK else pytest.param(k, marks=pytest.mark.slow) for k in tiny_vision.VISION_LANGUAGE]
)
def test_the_loss_leaves_image_tokens_out_as_the_models_own_does(kind) -> None:
    model, inputs = seeing(kind), pair(kind)
    image = image_token_id(model.module.config)
    labels = [each["input_ids"].masked_fill(each["input_ids"] == image, -100) for each in inputs]
    with torch.no_grad():
        own = [float(model.module(**each, labels=y).loss) for each, y in zip(inputs, labels, strict=True)]
    result = patching.sweep(model, *inputs, "loss", points="mlp_out", over="layer")
    assert [result.info["clean"], result.info["corrupted"]] == pytest.approx(own, abs=1e-4)
    given = metrics.loss(inputs[0]["input_ids"])
    assert ablation.ablate(model, inputs[0], given, of="mlps").info["clean"] == pytest.approx(own[0], abs=1e-4)


def test_the_loss_of_image_tokens_outside_the_vocabulary() -> None:
    tokens, given = torch.tensor([[1, 30, 30, 5, 6]]), torch.randn(1, 5, 20)
    images = tokens == 30
    labels = tokens.masked_fill(images, -100)
    expected = torch.nn.functional.cross_entropy(given[0, :-1], labels[0, 1:])
    torch.testing.assert_close(metrics.loss(tokens, images=images)(given)[0], expected)
    torch.testing.assert_close(lm_loss(given, tokens, seen=images), expected)
