"""Controls: planted causal directions and components are outside, idle ones inside; norms and sizes are equal."""

import copy

import pytest
import torch
from experiment_models import lead, tokens

import hookline
from hookline.edits import add, zero
from hookline.errors import HooklineError
from hookline.experiments import ablation, controls, metrics, patching, steering
from hookline.experiments.core.random_changes import random_variants
from hookline.experiments.result import Result

METRIC = metrics.logit_diff(5, 7)


@pytest.fixture(scope="module")
def planted(models):
    """A model whose logit difference reads the first direction of the stream, strongly, and no token the second."""
    module = copy.deepcopy(models["llama"].module)
    model = hookline.hook(module)
    with torch.no_grad():
        head = module.lm_head.weight
        head[:, 1] = 0.0
        head[5, 0], head[7, 0] = 3.0, -3.0
    return model


def unit(model, at: int) -> torch.Tensor:
    return torch.eye(model.cfg.d_model)[at]


def test_a_planted_direction_is_outside_and_an_idle_one_inside(planted) -> None:
    last_layer = planted.cfg.n_layers - 1
    for pos in (-1, None):
        options = {"layer": last_layer, "pos": pos, "coefficient": 0.5}
        causal = controls.direction(planted, tokens(0, 2), METRIC, unit(planted, 0), **options)
        idle = controls.direction(planted, tokens(0, 2), METRIC, unit(planted, 1), **options)
        assert causal.is_outside
        assert not idle.is_outside
        assert causal.control.low < 0 < causal.control.high
        assert (len(causal.draws), causal.control.draws) == (20, 20)
        assert causal.control.low == pytest.approx(min(0.0, float(causal.draws.min())), abs=1e-3)
        assert "outside" in repr(causal)
        assert "inside" in repr(idle)


def test_the_effect_is_that_of_the_hook(models) -> None:
    model, vector = models["llama"], torch.randn(models["llama"].cfg.d_model)
    prompts = tokens(1, 2)
    compared = controls.direction(model, prompts, lead, vector, layer=1, pos=-1, coefficient=2.0)
    with torch.no_grad():
        hooked = model.run_with_hooks(prompts, fwd_hooks=[("blocks.1.hook_resid_post", add(vector, 2.0, pos=-1))])
        plain = model(prompts)
    assert compared.effect == pytest.approx(float((lead(hooked) - lead(plain)).mean()), abs=1e-4)
    assert compared.info["clean"] == pytest.approx(float(lead(plain).mean()), abs=1e-4)
    again = controls.direction(model, prompts, lead, vector, layer=1, pos=-1, coefficient=2.0)
    other = controls.direction(model, prompts, lead, vector, layer=1, pos=-1, coefficient=2.0, seed=1)
    assert torch.equal(again.draws, compared.draws)
    assert not torch.equal(other.draws, compared.draws)


def test_random_changes_have_the_norms_of_those_they_stand_for(models) -> None:
    model, prompts = models["llama"], tokens(2, 2)
    for point, heads in (("resid_post", False), ("z", True)):
        name = f"blocks.1.{'attn.hook_z' if heads else 'hook_resid_post'}"
        bases = [model.baseline(prompts[row : row + 1], keep=[name]) for row in range(2)]
        values = [torch.randn_like(base.kept[name]) for base in bases]
        for value, base in zip(values, bases, strict=True):
            value[2] = base.kept[name][2]  # one position stays
        cells = [[[base.change(name, value)] for base, value in zip(bases, values, strict=True)]]
        first, second = random_variants(cells, 2, 0)
        directions = []
        for variant, value, base in zip(first, values, bases, strict=True):
            before = base.kept[name]
            moved = variant[0].value - before
            assert torch.allclose(moved.norm(dim=-1), (value - before).norm(dim=-1), atol=1e-4)
            assert torch.equal(variant[0].value[2], before[2])
            directions.append(moved / moved.norm(dim=-1, keepdim=True))
        assert torch.allclose(directions[0][0], directions[1][5], atol=1e-3), f"{point}: one direction everywhere"
        assert not torch.allclose(first[0][0].value, second[0][0].value)


def test_masked_keys_of_patterns_stay_masked(models) -> None:
    model = models["llama"]
    result = patching.sweep(model, tokens(3), tokens(4), METRIC, points="pattern", over=("layer", "head"))
    assert result.control.draws == 16, "as many as cells"
    name = "blocks.0.attn.hook_pattern"
    base, other = (model.baseline(tokens(seed), keep=[name]) for seed in (3, 4))
    (variant,) = random_variants([[[base.change(name, other.kept[name])]]], 1, 0)[0]
    above = torch.ones(7, 7).triu(1).bool()
    assert variant[0].value[:, above].eq(0).all()


def test_sweeps_print_and_keep_their_control(models, tmp_path) -> None:
    model, clean, corrupted = models["llama"], tokens(5), tokens(6)
    vectors = steering.Directions(torch.randn(4, model.cfg.d_model), [*range(4)])
    for result in (
        patching.sweep(model, clean, corrupted, METRIC),
        ablation.ablate(model, clean, METRIC),
        steering.sweep_layers(model, vectors, clean, METRIC),
    ):
        low, high, draws, _ = result.control
        assert draws == min(20, result.values.numel())
        assert low <= result.origin <= high, "no change is in the range"
        assert f"{draws} random changes" in repr(result)
        result.save(tmp_path / "x.safetensors")
        assert Result.load(tmp_path / "x.safetensors").control == result.control
        assert result.isel(layer=0).control == result.control
        shifted = (result - 2.0).control
        assert (shifted.low, shifted.high) == pytest.approx((low - 2.0, high - 2.0), abs=1e-4)
        reverse = (-result).control
        assert (reverse.low, reverse.high) == pytest.approx((-high, -low), abs=1e-4)
        for other in (abs(result), result - result):
            with pytest.raises(HooklineError, match="no control"):
                other.control


def test_the_cells_are_what_they_are_without_a_control(models) -> None:
    model, clean, corrupted = models["gpt2"], tokens(5, 2), tokens(6, 2)
    plain = patching.sweep(model, clean, corrupted, METRIC, control=0)
    assert "control_low" not in plain.info
    controlled = patching.sweep(model, clean, corrupted, METRIC, control=5)
    assert torch.allclose(plain.values, controlled.values, atol=1e-5)
    assert controlled.control.draws == 5
    scaled = controlled.normalized
    span = controlled.info["clean"] - controlled.info["corrupted"]
    ends = sorted((end - controlled.info["corrupted"]) / span for end in controlled.control[:2])
    assert [scaled.control.low, scaled.control.high] == pytest.approx(ends, abs=1e-4)
    for wrong in (-1, 2.5, True, "all"):
        with pytest.raises(HooklineError, match="control is"):
            patching.sweep(model, clean, corrupted, METRIC, control=wrong)
    several = patching.sweep(model, clean, corrupted, [METRIC, metrics.prob(5)], per_example=True)
    assert several.control.low.axes == ("metric", "example")
    assert bool((several.control.low.values <= several.control.high.values).all())
    picked = several.sel(metric=several.coords["metric"][1]).isel(example=0)
    assert isinstance(picked.control.low, float)
    assert picked.normalized.control.low <= picked.normalized.control.high


def test_an_interrupted_sweep_is_resumed_with_one_control(models) -> None:
    model, clean, corrupted = models["llama"], tokens(5), tokens(6)
    whole = patching.sweep(model, clean, corrupted, METRIC)
    part = patching.sweep(model, clean, corrupted, METRIC)
    part.values[1:] = torch.nan
    resumed = patching.sweep(model, clean, corrupted, METRIC, resume=part)
    assert torch.allclose(resumed.values, whole.values, atol=1e-5)
    assert resumed.control == whole.control


def test_edits_and_components(planted) -> None:
    prompts, last_layer = tokens(7, 2), planted.cfg.n_layers - 1
    name = f"blocks.{last_layer}.hook_resid_post"
    causal = controls.point_edit(planted, prompts, METRIC, (name, add(unit(planted, 0), 2.0)))
    with torch.no_grad():
        by_hand = planted.run_with_hooks(prompts, fwd_hooks=[(name, add(unit(planted, 0), 2.0))])
        difference = METRIC(by_hand) - METRIC(planted(prompts))
    assert causal.effect == pytest.approx(float(difference.mean()), abs=1e-4)
    assert causal.is_outside
    assert not controls.point_edit(planted, prompts, METRIC, (name, add(unit(planted, 1), 0.5))).is_outside
    swept = ablation.ablate(planted, prompts, METRIC)
    strongest = ablation.ranking(swept)[0]
    found = controls.ablated(planted, prompts, METRIC, [strongest], draws=30)
    assert found.effect == pytest.approx(strongest.value, abs=1e-4)
    changes = swept.values.flatten() - swept.info["clean"]
    assert all(float((changes - draw).abs().min()) < 1e-4 for draw in found.draws), "each draw is one other head"
    assert found.is_outside == (
        abs(strongest.value) > 0 and not found.control.low <= strongest.value <= found.control.high
    )


def test_shuffled_labels(planted) -> None:
    layer = 0
    name = f"blocks.{layer}.hook_resid_post"
    positive, negative = tokens(8, 5), tokens(9, 4)
    found = controls.contrast(planted, positive, negative, tokens(10, 2), METRIC, layer=layer, pos=-1)
    means = [planted.cache(side, names_filter=name)[name][:, -1].mean(0) for side in (positive, negative)]
    direct = controls.direction(planted, tokens(10, 2), METRIC, means[0] - means[1], layer=layer, pos=-1)
    assert found.effect == pytest.approx(direct.effect, abs=1e-4)
    assert len({round(float(draw), 6) for draw in found.draws}) > 10
    with pytest.raises(HooklineError, match="same mean"):
        controls.contrast(planted, positive, positive, tokens(10), METRIC, layer=layer)


def test_what_is_refused(models) -> None:
    model, prompts = models["llama"], tokens(0)
    vector = torch.randn(model.cfg.d_model)
    for wrong, match in (
        (lambda: controls.direction(model, prompts, METRIC, vector, layer=9), "out of range"),
        (lambda: controls.direction(model, prompts, METRIC, torch.ones(3), layer=0), "width 3"),
        (lambda: controls.direction(model, prompts, METRIC, 3.0, layer=0), "a direction is"),
        (lambda: controls.direction(model, prompts, METRIC, vector, layer=0, draws=0), "draws is"),
        (lambda: controls.direction(model, prompts, [METRIC, "loss"], vector, layer=0), "one metric"),
        (lambda: controls.direction(model, prompts, METRIC, 0 * vector, layer=0), "changes nothing"),
        (lambda: controls.point_edit(model, prompts, METRIC, zero()), "is a pair"),
        (lambda: controls.point_edit(model, prompts, METRIC, ("blocks.*.hook_resid_post", zero())), "4 points"),
        (lambda: controls.ablated(model, prompts, METRIC, []), "different components"),
        (lambda: controls.ablated(model, prompts, METRIC, [0, 1, 2], of="mlps"), "too few"),
    ):
        with pytest.raises(HooklineError, match=match):
            wrong()
