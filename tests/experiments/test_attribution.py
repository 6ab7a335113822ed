"""Attribution patching: against gradients taken by hand, against true patching, and what it costs."""

import pytest
import torch
from experiment_models import lead, tokens
from tiny_models import causal_lm, encoder
from torch.utils.flop_counter import FlopCounterMode

import hookline
from hookline import HooklineError
from hookline.experiments import metrics, patching
from hookline.experiments.attribution import attribution_patching
from hookline.experiments.core.integration import Line
from hookline.experiments.core.prompts import prompts_of

METRIC = metrics.logit_diff(5, 7)
CLEAN = "When Mary and John went to the store, John gave a drink to"
CORRUPTED = "When Mary and John went to the store, Mary gave a drink to"
LEAD = metrics.logit_diff(" Mary", " John")
KINDS = ("gpt2", "llama", "gemma2", "mixtral", "gptj")


GRIDS = [
    ("resid_pre", ("layer", "pos")),
    ("resid_pre", ("pos", "layer")),
    ("z", ("layer", "head")),
    ("z", ("head", "layer", "pos")),
    ("v", ("layer", "head")),
    ("mlp_out", ("layer",)),
    (["attn_out", "mlp_out"], ("layer", "pos")),
    ("pattern", ("layer", "head", "pos", "src")),
]


@pytest.mark.parametrize(("points", "over"), GRIDS)
@pytest.mark.parametrize("direction", ["denoise", "noise"])
def test_axes_and_labels_are_those_of_a_sweep(models, points, over, direction) -> None:
    given = models["llama"], tokens(0, 2), tokens(1, 2), METRIC
    how = {"points": points, "over": over, "direction": direction, "per_example": True}
    estimate, true = attribution_patching(*given, **how, check=0), patching.sweep(*given, **how)
    assert (estimate.axes, estimate.coords, estimate.name) == (true.axes, true.coords, true.name)
    for key in ("clean", "corrupted"):
        torch.testing.assert_close(estimate.info[key].values, true.info[key].values, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_the_gradient_times_the_difference(models, kind) -> None:
    model, clean, corrupted = models[kind], tokens(0), tokens(1)
    result = attribution_patching(model, clean, corrupted, METRIC, points="z", over=("layer", "head"), check=0)
    _, given = model.run_with_cache(clean)
    names = [f"blocks.{layer}.attn.hook_z" for layer in range(4)]
    logits, there = model.run_with_cache(
        corrupted, names_filter=names, incl_bwd=True, loss_fn=lambda logits: lead(logits).sum()
    )
    for layer, name in enumerate(names):
        effect = ((given[name] - there[name]) * there[f"{name}_grad"]).sum((0, 1, 3))
        torch.testing.assert_close(result.values[layer], lead(logits).detach() + effect, atol=1e-4, rtol=1e-4)


@pytest.mark.quick_for("gpt2")
@pytest.mark.quick_for("resid_pre")
@pytest.mark.parametrize(
    "kind",  # where experts change, there are jumps
    [
        kind if kind in ("gpt2", "llama") else pytest.param(kind, marks=pytest.mark.slow)
        for kind in KINDS
        if kind != "mixtral"
    ],
)
@pytest.mark.parametrize("points", ["resid_pre", "z"])
def test_steps_add_up_to_patching_all_of_a_point(models, kind, points) -> None:
    given = models[kind], tokens(0), tokens(1), METRIC
    how = {"points": points, "over": ("layer",)}
    estimate = attribution_patching(*given, **how, steps=200, check=0)
    true = patching.sweep(*given, **how)
    spread = true.values - true.info["corrupted"]
    torch.testing.assert_close(estimate.values, true.values, atol=0.02 * spread.abs().max().item(), rtol=0)


def test_steps_along_the_inputs_add_up_in_the_first_layer(models) -> None:
    given = models["llama"], tokens(0), tokens(1), METRIC
    result = attribution_patching(*given, steps=100, along="inputs", check=0)
    clean, corrupted = result.info["clean"], result.info["corrupted"]
    effect = (result.values[0] - corrupted).sum().item()
    assert effect == pytest.approx(clean - corrupted, abs=0.02 * abs(clean - corrupted))
    assert not torch.allclose(result.values, attribution_patching(*given, check=0).values)


def test_the_error_is_that_of_true_patching(tinyworld) -> None:
    given = tinyworld, CLEAN, CORRUPTED, LEAD
    how = {"points": "z", "over": ("layer", "head")}
    result, true = attribution_patching(*given, **how, check=12, seed=3), patching.sweep(*given, **how)
    sample = result.info["sample"]
    assert result.info["checked"] == len(sample) == 12
    for cell in sample:
        at = {"layer": cell["layer"], "head": cell["head"]}
        assert cell["true"] == pytest.approx(true.sel(**at).item(), abs=1e-3)
        assert cell["estimate"] == pytest.approx(result.sel(**at).item(), abs=1e-4)
    pairs = torch.tensor([[cell["estimate"], cell["true"]] for cell in sample])
    assert result.info["mean_abs_error"] == pytest.approx((pairs[:, 0] - pairs[:, 1]).abs().mean().item(), abs=1e-4)
    assert result.info["correlation"] == pytest.approx(torch.corrcoef(pairs.T)[0, 1].item(), abs=1e-4)
    assert [cell["chosen"] for cell in sample] == ["top"] * 6 + ["random"] * 6
    largest = (result - result.info["corrupted"]).top(6)
    assert [cell.labels for cell in largest] == [{"layer": cell["layer"], "head": cell["head"]} for cell in sample[:6]]
    for half, some in (("top", pairs[:6]), ("random", pairs[6:])):
        error = (some[:, 0] - some[:, 1]).abs().mean().item()
        assert result.info[f"{half}_mean_abs_error"] == pytest.approx(error, abs=1e-4)
        assert result.info[f"{half}_correlation"] == pytest.approx(torch.corrcoef(some.T)[0, 1].item(), abs=1e-3)
    assert attribution_patching(*given, **how, check=12, seed=4).info["sample"] != sample
    assert attribution_patching(*given, **how, check=12, seed=3).info["sample"] == sample


def test_it_finds_the_head_that_patching_finds(tinyworld) -> None:
    result = attribution_patching(tinyworld, CLEAN, CORRUPTED, LEAD, points="z", over=("layer", "head"))
    assert result.top(1, by="value")[0].labels == {"layer": 3, "head": 4}
    assert result.info["correlation"] > 0.95


def test_steps_make_it_better(tinyworld) -> None:
    given = tinyworld, CLEAN, CORRUPTED, LEAD
    plain, fine = attribution_patching(*given), attribution_patching(*given, steps=8)
    assert fine.info["mean_abs_error"] < 0.2 * plain.info["mean_abs_error"]
    assert (fine.info["steps"], fine.info["along"]) == (8, "activations")


def test_several_prompts_with_padding_are_as_one_by_one(tinyworld) -> None:
    clean = [CLEAN, "When Alice and Bob went to the park, Bob gave a book to"]
    corrupted = [CORRUPTED, "When Alice and Bob went to the park, Alice gave a book to"]
    clean[1], corrupted[1] = (f"So, {text[0].lower()}{text[1:]}" for text in (clean[1], corrupted[1]))
    metric = metrics.logit_diff([" Mary", " Bob"], [" John", " Alice"])
    every = attribution_patching(tinyworld, clean, corrupted, metric, per_example=True, check=8)
    both = attribution_patching(tinyworld, clean, corrupted, metric, check=0)
    torch.testing.assert_close(both.values, every.values.mean(-1))
    for row, pair in enumerate(zip(clean, corrupted, strict=True)):
        one = attribution_patching(tinyworld, *pair, metrics.logit_diff(metric.answer[row], metric.wrong[row]), check=0)
        padded = every.isel(example=row).values
        n = one.shape[1]
        start = 0 if torch.allclose(padded[:, :n], one.values, atol=1e-3) else padded.shape[1] - n
        torch.testing.assert_close(padded[:, start : start + n], one.values, atol=1e-3, rtol=1e-3)
    for cell in every.info["sample"]:
        true = patching.sweep(tinyworld, clean, corrupted, metric).sel(layer=cell["layer"], pos=cell["pos"])
        assert cell["true"] == pytest.approx(true.item(), abs=1e-3)


def test_several_metrics_and_one_number_for_all_prompts(models) -> None:
    given = models["gpt2"], tokens(0, 2), tokens(1, 2)
    several = attribution_patching(*given, {"kl": "kl", "lead": METRIC, "mean": lambda logits: lead(logits).mean()})
    assert several.axes == ("metric", "layer", "pos")
    torch.testing.assert_close(several.sel(metric="lead").values, several.sel(metric="mean").values)
    with pytest.raises(hookline.HooklineError, match="per_example"):
        attribution_patching(*given, lambda logits: lead(logits).mean(), per_example=True)
    alone = attribution_patching(*given, "kl")
    torch.testing.assert_close(several.sel(metric="kl").values, alone.values)
    assert several.info["correlation"].sel(metric="kl").item() == pytest.approx(alone.info["correlation"], abs=1e-4)


def test_an_encoder() -> None:
    model = hookline.hook(encoder("bert", head=True))
    given = model, tokens(0), tokens(1), METRIC
    estimate = attribution_patching(*given, over=("layer",), steps=100)
    torch.testing.assert_close(estimate.values, patching.sweep(*given, over=("layer",)).values, atol=0.05, rtol=0.05)


def test_weights_that_are_not_trained_and_no_grad(models) -> None:
    module = causal_lm("gpt2").requires_grad_(False)
    given = tokens(0), tokens(1), METRIC
    with torch.no_grad():
        frozen = attribution_patching(hookline.hook(module), *given)
    torch.testing.assert_close(frozen.values, attribution_patching(models["gpt2"], *given).values)
    assert all(parameter.grad is None for parameter in models["gpt2"].parameters())


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
@pytest.mark.parametrize("direction", ["denoise", "noise"])
def test_the_whole_grid_costs_less_than_four_runs(models, kind, direction) -> None:
    model, clean, corrupted = models[kind], tokens(0), tokens(1)
    with torch.no_grad(), FlopCounterMode(display=False) as one:
        model(clean)
    with FlopCounterMode(display=False) as all_cells:
        attribution_patching(model, clean, corrupted, METRIC, direction=direction, check=0)
    assert all_cells.get_total_flops() <= 4 * one.get_total_flops()


def test_a_result_is_kept_and_drawn(models, tmp_path) -> None:
    result = attribution_patching(models["gpt2"], tokens(0), tokens(1), METRIC)
    result.save(tmp_path / "attribution.safetensors")
    again = type(result).load(tmp_path / "attribution.safetensors")
    assert again.info["sample"] == result.info["sample"]


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"steps": 0}, "steps is"),
        ({"steps": True}, "steps is"),
        ({"steps": 1, "along": "inputs"}, "worse estimate"),
        ({"along": "inputs"}, "needs steps"),
        ({"along": "weights", "steps": 2}, "along is"),
        ({"check": -1}, "check is"),
        ({"direction": "both"}, "direction is"),
        ({"points": []}, "needs points"),
        ({"over": ("layer", "head")}, "no axis"),
        ({"layers": [9]}, "layer 9"),
        ({"resume": None}, "resume"),
    ],
)
def test_bad_input(models, asked, said) -> None:
    with pytest.raises(hookline.HooklineError, match=said):
        attribution_patching(models["gpt2"], tokens(0), tokens(1), METRIC, **asked)


def test_metrics_that_cannot_be_differentiated(models) -> None:
    with pytest.raises(hookline.HooklineError, match=r"rank.*gradient"):
        attribution_patching(models["gpt2"], tokens(0), tokens(1), metrics.rank(5))
    with pytest.raises(hookline.HooklineError, match="NaN"):
        attribution_patching(models["gpt2"], tokens(0), tokens(1), lambda logits: logits[:, -1, 0] * float("nan"))


def test_prompts_of_different_length(models) -> None:
    with pytest.raises(hookline.HooklineError, match="Row 0"):
        attribution_patching(models["gpt2"], tokens(0), tokens(1, length=6), METRIC)


def test_a_gradient_that_says_nothing_is_refused() -> None:
    model = hookline.load("tinyworld")
    clean = "When Mary and John went to the store, John gave a drink to"
    corrupted = "When Mary and John went to the store, Mary gave a drink to"
    mary, john = model.to_single_token(" Mary"), model.to_single_token(" John")

    def clamped(logits: torch.Tensor) -> torch.Tensor:
        return (logits[:, -1, mary] - logits[:, -1, john]).clamp(min=0)

    with pytest.raises(HooklineError, match="0 everywhere"):
        attribution_patching(model, clean, corrupted, clamped)
    with torch.inference_mode(), pytest.raises(HooklineError, match="inference_mode"):
        attribution_patching(model, clean, corrupted, clamped)


def test_masked_scores_do_not_change(tinyworld) -> None:
    metric = metrics.logit_diff(" Mary", " John")
    found = attribution_patching(tinyworld, CLEAN, CORRUPTED, metric, points="attn_scores", over=("layer", "head"))
    assert bool(found.values.isfinite().all())
    assert found.info["top_correlation"] > 0.5


def test_gradients_where_a_module_returns_its_argument() -> None:
    """A norm that is the identity, and dropout that is off: the gradient of what they pass on is not lost."""
    module = causal_lm("gpt2")
    for block in module.transformer.h:
        block.ln_2 = torch.nn.Identity()
    model = hookline.hook(module)
    names = ["blocks.1.hook_mlp_in", "transformer.h.1.ln_2", "transformer.h.1.mlp.dropout"]
    line = Line(model, prompts_of(model, tokens(0)), names, None, "activations")
    line.start()
    found = line.gradients({"lead": lead}, {}, {})["lead"]
    for name in names:
        seen = []
        with model.hooks(bwd_hooks=[(name, lambda x, seen=seen: seen.append(x.clone()))]):
            lead(model(tokens(0))).sum().backward()
        assert seen[0].abs().max() > 1e-4
        torch.testing.assert_close(found[name], seen[0])
