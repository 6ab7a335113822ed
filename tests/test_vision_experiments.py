"""Experiments on texts with pictures, against plain runs with hooks."""

import pytest
import tiny_vision
import torch
import transformers

import hookline
from hookline import HookedModel, HooklineError
from hookline.anatomy.roles import find_anatomy
from hookline.experiments import ablation, attribution, logits, metrics, patching, steering, tracing
from hookline.loss import lm_loss
from hookline.rerun.baseline import Baseline
from hookline.rerun.ways import Way

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")  # transformers' own
WAYS = {"paligemma": Way.JOINED, "gemma3": Way.JOINED, "qwen3_vl": Way.PLAIN, "mllama": Way.PLAIN}
"""How variants are run, where it is not by resuming: pictures seen both ways, features added on the way, tiles."""
QUICK = ("llava", "qwen2_5_vl", "paligemma", "mllama")


@pytest.fixture(autouse=True)
def _quiet():
    transformers.logging.set_verbosity_error()


def seeing(kind: str) -> HookedModel:
    module = tiny_vision.module_of(kind)
    return HookedModel(module, None, find_anatomy(module))


def pair(kind: str) -> tuple[dict, dict]:
    """The same text with two pictures."""
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
    if kind != "mllama":  # whose text gets nothing of the picture before its first cross-attention
        assert swept.values[0].std() > 0


@pytest.mark.parametrize("kind", QUICK)
def test_how_variants_are_run(kind) -> None:
    inputs = pair(kind)[0]
    tokens, _ = inputs.pop("input_ids"), inputs.pop("attention_mask")
    assert Baseline(seeing(kind), tokens, inputs=inputs).way == WAYS.get(kind, Way.RESUMED)


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
    with pytest.raises(HooklineError, match="sweep them apart"):
        patching.sweep(model, clean, corrupted, metric, points=["vision.attn.z", "z"], over=("layer", "head"))


def test_tiles_are_refused() -> None:
    model, (clean, corrupted) = seeing("llava_next"), pair("llava_next")
    with pytest.raises(HooklineError, match="3 rows in one run"):
        patching.sweep(model, clean, corrupted, metric, points="vision.layer.pre")


def test_other_experiments() -> None:
    model, (clean, corrupted) = seeing("llava"), pair("llava")
    effects = ablation.ablate(model, clean, metric, of="heads")

    def silence(z) -> None:
        z[:, :, 3] = 0

    zeroed = model.run_with_hooks(**clean, fwd_hooks=[("blocks.1.attn.hook_z", silence)])
    assert float(effects.values[1, 3]) == pytest.approx(float(metric(zeroed)), abs=1e-5)
    parts = logits.attribute(model, clean, tokens=70, pos=-1)
    assert float(parts.values.sum()) + float(parts.info["bias"]) == pytest.approx(
        float(model(**clean)[0, -1, 70]), abs=1e-4
    )
    assert logits.logit_lens(model, clean).shape == (3, clean["input_ids"].shape[1])
    gradients = attribution.attribute(model, clean, corrupted, metric)
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


def test_resampled_from_the_same_text_with_another_picture() -> None:
    model, (one, other) = seeing("llava"), pair("llava")
    found = ablation.ablate(model, one, metric, of="heads", by="resample", data=[other])
    assert found.shape == (2, 4)
    with pytest.raises(HooklineError, match="no other text"):
        ablation.ablate(model, one, metric, of="heads", by="resample", data=[one])


def test_what_is_no_prompt() -> None:
    model, both = seeing("llava"), tiny_vision.inputs_of("llava", rows=2)
    with pytest.raises(HooklineError, match="for one text"):
        ablation.ablate(model, both, metric, of="heads")
    with pytest.raises(HooklineError, match="missing"):
        ablation.ablate(model, {"pixel_values": both["pixel_values"]}, metric, of="heads")


def picture_first(kind: str) -> tuple[dict, dict]:
    """The same with the picture at the very beginning: what it does may reach back from there."""

    def cut(inputs: dict) -> dict:
        length = inputs["input_ids"].shape[1]
        return {name: x[:, 4:] if x.shape == (1, length) else x for name, x in inputs.items()}

    return tuple(cut(inputs) for inputs in pair(kind))


@pytest.mark.parametrize("kind", ["qwen3_vl", "gemma3", "paligemma", "qwen2_5_vl", "llava"])
def test_a_picture_at_the_beginning(kind) -> None:
    model, (clean, corrupted) = seeing(kind), picture_first(kind)
    swept = patching.sweep(model, clean, corrupted, metric, points="resid_pre", over=("layer",))
    name = "blocks.0.hook_resid_pre"
    _, cache = model.run_with_cache(**clean, names_filter=name)
    patched = model.run_with_hooks(**corrupted, fwd_hooks=[(name, lambda x: cache[name])])
    assert float(swept.values[0]) == pytest.approx(float(metric(patched)), abs=1e-5)
    if kind != "qwen3_vl":  # whose pictures come in at later layers too
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
    found = ablation.ablate(model, inputs, metric, points="vision.resid_pre", over=("layer", "pos"), layer=[0])
    assert found.shape == (1, patches)

    def silence(x) -> None:
        x[:, patches - 1] = 0

    zeroed = model.run_with_hooks(**inputs, fwd_hooks=[(name, silence)])
    assert float(found.values[0, -1]) == pytest.approx(float(metric(zeroed)), abs=1e-5)
    mean = ablation.ablate(model, inputs, metric, points="vision.z", over=("layer", "head"), by="mean")
    assert mean.shape[1] == model._anatomy.towers[0].blocks[0].attn.num_heads
    with pytest.raises(HooklineError, match="a place in the text"):
        ablation.ablate(model, inputs, metric, points="vision.z", over=("layer", "head"), pos=-1)
    curve = ablation.cumulative(model, inputs, metric, ablation.ranking(mean))
    assert curve.info["choice"]["points"] == "vision.z"
    effects = attribution.attribute(model, *pair(kind), metric, points="vision.layer.pre")
    assert effects.shape[1] == patches


def test_the_whole_picture_is_ablated() -> None:
    model, (inputs, _) = seeing("llava"), pair("llava")
    found = ablation.ablate(model, inputs, metric, of="mlps", pos=hookline.image_tokens)
    seen = inputs["input_ids"][0] == tiny_vision.IMAGE

    def silence(x) -> None:
        x[:, seen] = 0

    zeroed = model.run_with_hooks(**inputs, fwd_hooks=[("blocks.1.hook_mlp_out", silence)])
    assert float(found.values[1]) == pytest.approx(float(metric(zeroed)), abs=1e-5)


def test_what_pictures_cannot_be_in() -> None:
    model, (inputs, _) = seeing("llava"), pair("llava")
    place = int((inputs["input_ids"][0] == tiny_vision.IMAGE).nonzero()[0])
    with pytest.raises(HooklineError, match="the subject is a picture"):
        tracing.trace(model, inputs, subject=[place], metric=metric)
    with pytest.raises(HooklineError, match="restores activations of the text"):
        tracing.trace(model, inputs, subject=[1], metric=metric, points="vision.layer.post")
    with pytest.raises(HooklineError, match="of what sees"):
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
    labels = [each["input_ids"].masked_fill(each["input_ids"] == tiny_vision.IMAGE, -100) for each in inputs]
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
