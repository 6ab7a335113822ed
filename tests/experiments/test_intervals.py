"""Statistics over examples: closed forms, coverage on synthetic data, and what experiments keep for them."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from hookline import HooklineError
from hookline.experiments import ablation, attribution, contrast, logit_attribution, logit_lens, metrics, patching
from hookline.experiments.result import Result
from hookline.experiments.results import student_t
from hookline.experiments.results.intervals import interval
from hookline.experiments.results.paired_tests import p_values

TENSORS_ON_CPU = True

PROMPTS = [
    "When Mary and John went to the store, John gave a drink to",
    "When Tom and Anna went to the park, Tom gave a book to",
    "When Kate and Paul went to the store, Paul gave a drink to",
]
LEAD = metrics.logit_diff([" Mary", " Anna", " Kate"], [" John", " Tom", " Paul"])


def of_examples(values: torch.Tensor, **info) -> Result:
    """A result over layers, as an experiment returns it: means with the examples beside them."""
    axes, coords = ("layer", "example"), {"layer": range(values.shape[0]), "example": range(values.shape[1])}
    return Result(values, axes, coords, "lead", info).mean("example")


def draws(cells: int, n: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(cells, n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# Student's t


def test_one_two_and_three_degrees_of_freedom_have_closed_forms() -> None:
    t = torch.tensor([0.0, 0.1, 1.0, 4.0, 60.0, math.inf], dtype=torch.float64)
    angle = torch.atan(t / math.sqrt(3))
    expected = {
        1.0: 1 - 2 / math.pi * torch.atan(t),
        2.0: 1 - torch.where(t.isinf(), 1.0, t / (2 + t**2).sqrt()),
        3.0: 1 - 2 / math.pi * (angle + angle.sin() * angle.cos()),
    }
    for freedom, p in expected.items():
        torch.testing.assert_close(student_t.two_sided(t, torch.full_like(t, freedom)), p, atol=1e-12, rtol=1e-9)


def test_many_degrees_of_freedom_are_a_normal_distribution() -> None:
    t = torch.tensor([0.3, 1.96, 4.0], dtype=torch.float64)
    normal = 2 * torch.special.ndtr(-t)
    torch.testing.assert_close(student_t.two_sided(t, torch.full_like(t, 1e7)), normal, rtol=1e-5, atol=0)


def test_quantiles_are_those_of_tables() -> None:
    freedom = torch.tensor([1.0, 2.0, 9.0, 30.0, 0.0])
    expected = torch.tensor([12.7062, 4.3027, 2.2622, 2.0423, math.nan], dtype=torch.float64)
    torch.testing.assert_close(student_t.quantile(0.975, freedom), expected, rtol=1e-4, atol=0, equal_nan=True)


# Intervals


@pytest.mark.parametrize(("method", "n"), [("bootstrap", 8), ("bootstrap", 20), ("bootstrap", 200), ("normal", 200)])
@pytest.mark.parametrize("level", [0.95, 0.8])
def test_an_interval_has_the_true_mean_in_its_share_of_cases(method, n, level) -> None:
    low, high = interval(3 + 2 * draws(2000, n), level, method)
    assert float(((low <= 3) & (high >= 3)).double().mean()) == pytest.approx(level, abs=0.025)


@pytest.mark.parametrize("n", [2, 3, 5, 7])
def test_an_interval_of_few_examples_is_that_of_student_t(n) -> None:
    low, high = interval(3 + 2 * draws(2000, n), 0.95, "bootstrap")
    assert float(((low <= 3) & (high >= 3)).double().mean()) == pytest.approx(0.95, abs=0.02)


@pytest.mark.parametrize("n", [4, 20])
@pytest.mark.parametrize("scale", [1e-300, 1e300])
def test_very_small_and_very_large_values_have_the_same_interval(n, scale) -> None:
    examples = torch.rand(3, n, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for method in ("bootstrap", "normal"):
        for bound, expected in zip(
            interval(examples * scale / n, 0.9, method), interval(examples / n, 0.9, method), strict=True
        ):
            torch.testing.assert_close(bound / scale, expected)


@pytest.mark.parametrize("repeats", [1, 4])  # all sign flips, the t test
@pytest.mark.parametrize("values", [[1.0, 2.0, math.inf], [math.inf] * 3, [-math.inf, 1.0, math.inf]])
def test_a_cell_with_an_infinite_example_has_no_statistics(values, repeats) -> None:
    examples = torch.tensor([values * 2, [1.0, 2.0, 3.0] * 2]).repeat(1, repeats)
    result = of_examples(examples)
    statistics = [result.std(), result.sem(), *result.interval(), *result.interval(method="normal")]
    statistics += [result.compare(0.0).p, result.compare(result).p]
    for statistic in statistics:
        assert statistic.values.isnan().tolist() == [True, False]
    assert not result.compare(result).difference.values[0].isfinite()


def test_a_skewed_distribution_is_covered_as_well() -> None:
    low, high = interval(draws(2000, 100).exp(), 0.95, "bootstrap")
    mean = math.exp(0.5)
    assert float(((low <= mean) & (mean <= high)).double().mean()) == pytest.approx(0.93, abs=0.03)


def test_the_bootstrap_is_that_of_a_loop_over_resamples() -> None:
    examples = draws(3, 400)
    low, high = interval(examples, 0.9, "bootstrap")
    random = np.random.default_rng(1)
    means = np.stack([examples.numpy()[:, random.integers(0, 400, 400)].mean(1) for _ in range(4000)])
    expected = np.quantile(means, [0.05, 0.95], axis=0)
    np.testing.assert_allclose([low.numpy(), high.numpy()], expected, atol=0.012)


def test_resamples_are_the_same_in_every_cell_and_every_call() -> None:
    examples = draws(1, 30)
    low, high = interval(torch.cat([examples, examples * 2, examples + 1]), 0.95, "bootstrap")
    torch.testing.assert_close(low[1], low[0] * 2, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(high[2], high[0] + 1, rtol=1e-5, atol=1e-5)
    assert torch.equal(interval(examples, 0.95, "bootstrap")[0], interval(examples, 0.95, "bootstrap")[0])


def test_cells_without_an_example_are_those_of_the_other_examples() -> None:
    examples = draws(3, 40)
    examples[1, 25:] = math.nan
    examples[2, 1:] = math.nan
    result = of_examples(examples)
    assert result.values[1] == pytest.approx(float(examples[1, :25].mean()))
    assert result.std().values[1] == pytest.approx(float(examples[1, :25].std()))
    assert result.sem().values[1] == pytest.approx(float(examples[1, :25].std()) / 5)
    for method in ("bootstrap", "normal"):
        low, high = result.interval(method=method)
        alone = [x.item() for x in of_examples(examples[1:2, :25]).interval(method=method)]
        assert [low.values[1].item(), high.values[1].item()] == pytest.approx(alone, abs=0.1)
        assert bool(low.values[2].isnan())
    assert bool(result.std().values[2].isnan())


def test_the_normal_interval_is_a_multiple_of_the_standard_error() -> None:
    result = of_examples(draws(4, 50))
    low, high = result.interval(0.95, "normal")
    torch.testing.assert_close(high.values - result.values, 1.959964 * result.sem().values)
    torch.testing.assert_close(low.values + high.values, 2 * result.values)


@pytest.mark.parametrize("ask", [{"level": 95}, {"level": 0}, {"level": True}, {"method": "bayes"}])
def test_what_an_interval_refuses(ask) -> None:
    with pytest.raises(HooklineError):
        of_examples(draws(2, 5)).interval(**ask)


# Comparisons


@pytest.mark.parametrize("n", [8, 12, 13, 100])
def test_without_an_effect_a_share_of_the_level_is_significant(n) -> None:
    p = of_examples(draws(3000, n)).compare(of_examples(draws(3000, n, seed=1))).p.values
    for level in (0.05, 0.2):
        assert float((p < level).double().mean()) == pytest.approx(level, abs=0.02)


def test_the_t_test_of_two_examples_has_a_closed_form() -> None:
    ours, theirs = torch.tensor([[3.0, 5.0]]), torch.tensor([[1.0, 4.0]])
    compared = of_examples(ours).compare(of_examples(theirs), test="t")
    assert compared.p.values[0] == pytest.approx(1 - 2 / math.pi * math.atan(3.0))  # differences 2 and 1: t = 3
    assert compared.difference.values[0] == pytest.approx(1.5)


def test_all_signs_of_few_examples_are_tried() -> None:
    differences = torch.tensor([[1.0, 2.0, 3.0, 4.0, 5.0], [1.0, -1.0, 2.0, -2.0, 0.0], [0.0, 0.0, 0.0, 0.0, 0.0]])
    assert p_values(differences, "sign-flip").tolist() == pytest.approx([2 / 32, 1.0, 1.0])
    assert of_examples(differences).compare(0.0).p.values.tolist() == pytest.approx([2 / 32, 1.0, 1.0])


def test_pairs_count() -> None:
    base = 10 * draws(1, 60)
    near, other = of_examples(base + 0.1 + 0.01 * draws(1, 60, seed=2)), of_examples(base)
    assert near.compare(other).p.item() < 1e-20
    low, high = (near - other).interval()
    assert 0.09 < low.item() < high.item() < 0.11


def test_a_constant_difference_is_certain_and_none_is_chance() -> None:
    examples = draws(1, 30)
    result = of_examples(torch.cat([examples, examples]))
    assert of_examples(torch.full((1, 30), 2.0)).compare(1.0).p.item() == 0
    assert result.compare(result).p.values.tolist() == [1, 1]


def test_other_prompts_are_refused() -> None:
    result = of_examples(draws(2, 6), prompts=[1, 2, 3, 4, 5, 6])
    for other in (of_examples(draws(2, 6), prompts=[1, 2, 3, 4, 6, 5]), of_examples(draws(2, 5))):
        with pytest.raises(HooklineError):
            result.compare(other)
        assert (result - other if other.by_example.shape == result.by_example.shape else result).axes == ("layer",)
    with pytest.raises(HooklineError):
        result.compare(replace(result, by_example=None))
    with pytest.raises(HooklineError):
        result.compare(0.0, test="anova")
    with pytest.raises(HooklineError):
        of_examples(draws(2, 30)).compare(0.0, test="sign-flip")


# Examples follow the values


def test_arithmetic_keeps_the_pairs() -> None:
    ours, theirs = draws(3, 40) + 5, draws(3, 40, seed=1) + 3
    a, b = of_examples(ours), of_examples(theirs)
    torch.testing.assert_close((a - b).std().values, (ours - theirs).std(-1))
    torch.testing.assert_close((a + b).std().values, (ours + theirs).std(-1))
    torch.testing.assert_close((-a * 2.0).std().values, 2 * ours.std(-1))
    for combined in (a * b, a / b, abs(-a)):
        torch.testing.assert_close(combined.by_example.values.mean(-1), combined.values)


def test_a_quotient_of_means_has_the_spread_of_the_delta_method() -> None:
    """As often repeated draws of both means have it."""
    repeats, n = 4000, 50
    x, y = draws(repeats, n), draws(repeats, n, seed=1)
    ours, theirs = 5 + x, 3 + 0.5 * x + y
    true = (ours.mean(-1) / theirs.mean(-1)).std()
    found = (of_examples(ours[:200]) / of_examples(theirs[:200])).sem().values.mean()
    assert float(found) == pytest.approx(float(true), rel=0.05)


def test_selecting_and_averaging_keep_examples() -> None:
    values = draws(3, 20)
    result = of_examples(values)
    assert result.sel(layer=1).std().item() == pytest.approx(float(values[1].std()))
    assert result[1:].sem().values.tolist() == pytest.approx((values[1:].std(-1) / 20**0.5).tolist())
    assert result.mean("layer").std().item() == pytest.approx(float(values.mean(0).std()))
    assert result.mean().interval()[0].axes == ()


def test_files_have_the_examples(tmp_path) -> None:
    result = patching_of_three()
    result.save(tmp_path / "sweep.safetensors")
    again = Result.load(tmp_path / "sweep.safetensors")
    assert torch.equal(again.std().values, result.std().values)
    assert torch.equal(again.normalized.interval()[1].values, result.normalized.interval()[1].values)
    assert again.by_example.info["clean"].axes == ("example",)


def test_a_table_has_columns_of_them() -> None:
    pandas = pytest.importorskip("pandas")
    result = of_examples(draws(3, 20))
    table = result.to_dataframe()
    assert isinstance(table, pandas.DataFrame)
    assert list(table) == ["layer", "value", "std", "sem", "low", "high"]
    assert ((table["low"] < table["value"]) & (table["value"] < table["high"])).all()
    assert list(replace(result, by_example=None).to_dataframe()) == ["layer", "value"]
    assert list(result.compare(0.0).to_dataframe())[-1] == "p"


# Experiments


def patching_of_three() -> Result:
    import hookline

    model = hookline.load("tinyworld")
    corrupted = [text.replace(first, other) for text, first, other in zip(
        PROMPTS, ("John gave", "Tom gave", "Paul gave"), ("Mary gave", "Anna gave", "Kate gave"), strict=True
    )]  # fmt: skip
    return patching.sweep(model, PROMPTS, corrupted, LEAD, points="z", over=("layer", "head"), layers=[2, 3])


EXPERIMENTS = {
    "ablation": lambda model, prompts, lead: ablation.ablate(model, prompts, lead, of="mlps"),
    "cumulative": lambda model, prompts, lead: ablation.cumulative(model, prompts, lead, ["L3H4", "L2H1"]),
    "patching": lambda model, prompts, lead: patching.sweep(model, prompts, prompts, lead, points="z", over="layer"),
    "attribution": lambda model, prompts, lead: attribution.attribution_patching(
        model, prompts, [prompt.replace(" a ", " the ") for prompt in prompts], lead, over="layer", check=0
    ),
    "logit lens": lambda model, prompts, lead: logit_lens.logit_lens(model, prompts, " Mary", pos=-1),
    "logit attribution": lambda model, prompts, lead: logit_attribution.direct_logit_attribution(
        model, prompts, " Mary", " John"
    ),
    "contrast": lambda model, prompts, lead: contrast.head_differences(
        model, [(prompt, prompt.replace(" a ", " the ")) for prompt in prompts]
    ),
}


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_the_values_of_examples_are_those_of_single_prompts(tinyworld, name) -> None:
    several = EXPERIMENTS[name](tinyworld, PROMPTS, LEAD)
    leads = zip(LEAD.answer, LEAD.wrong, strict=True)
    alone = [
        EXPERIMENTS[name](tinyworld, [prompt], metrics.logit_diff(*answers)).values
        for prompt, answers in zip(PROMPTS, leads, strict=True)
    ]
    values = torch.stack(alone, -1)
    torch.testing.assert_close(several.by_example.values, values, atol=2e-4, rtol=1e-4)
    torch.testing.assert_close(several.std().values, values.double().std(-1), atol=2e-4, rtol=1e-3)
    assert several.std().axes == several.axes
    low, high = several.interval()
    assert bool(((low.values <= several.values + 1e-6) & (several.values <= high.values + 1e-6)).all())


def test_examples_beside_means_are_those_of_per_example(tinyworld) -> None:
    whole = ablation.ablate(tinyworld, PROMPTS, [LEAD, "kl"], of="mlps", per_example=True)
    mean = ablation.ablate(tinyworld, PROMPTS, [LEAD, "kl"], of="mlps")
    assert torch.equal(mean.by_example.values, whole.values)
    assert torch.equal(whole.std().values, mean.std().values)
    assert torch.equal(whole.mean("example").interval()[0].values, mean.interval()[0].values)
    assert mean.sel(metric="kl").std().axes == ("layer",)


def test_an_effect_is_paired_with_the_unmodified_run(tinyworld) -> None:
    whole = ablation.ablate(tinyworld, PROMPTS, LEAD, of="mlps", per_example=True)
    effect = ablation.ablate(tinyworld, PROMPTS, LEAD, of="mlps").effect
    changes = whole.values - whole.info["clean"].values
    torch.testing.assert_close(effect.std().values, changes.double().std(-1))
    torch.testing.assert_close(effect.values, changes.mean(-1))


def test_normalized_examples_have_the_normalized_mean() -> None:
    result = patching_of_three()
    normalized = result.normalized
    torch.testing.assert_close(normalized.by_example.values.mean(-1), normalized.values, atol=1e-5, rtol=1e-5)
    assert normalized.sel(layer=3, head=4).std().item() < 0.2 < result.sel(layer=3, head=4).std().item()


def test_two_heads_are_compared(tinyworld) -> None:
    result = ablation.ablate(tinyworld, PROMPTS, LEAD)
    compared = result.sel(layer=3, head=4).compare(result.sel(layer=0, head=0))
    assert compared.p.item() == 0.25  # the least of three examples
    assert "sign flips, 3 examples" in repr(compared)


def test_one_number_for_all_prompts_has_no_spread(tinyworld) -> None:
    result = ablation.ablate(tinyworld, PROMPTS, lambda logits: logits[:, -1, 5].mean(), of="mlps")
    assert result.by_example is None
    for ask in (result.std, result.sem, result.interval, lambda: result.compare(0.0)):
        with pytest.raises(HooklineError, match="per_example"):
            ask()
    with pytest.raises(HooklineError, match="per_example"):
        ablation.ablate(tinyworld, PROMPTS[:1], lambda logits: logits[:, -1, 5], of="mlps").std()


def test_a_resumed_experiment_has_the_examples(tinyworld) -> None:
    whole = ablation.ablate(tinyworld, PROMPTS, LEAD, of="mlps")
    values, examples = whole.values.clone(), whole.by_example.values.clone()
    values[2:], examples[2:] = math.nan, math.nan
    part = replace(whole, values=values, complete=False, by_example=replace(whole.by_example, values=examples))
    again = ablation.ablate(tinyworld, PROMPTS, LEAD, of="mlps", resume=part)
    torch.testing.assert_close(again.std().values, whole.std().values, rtol=1e-4, atol=1e-5)
    old = ablation.ablate(tinyworld, PROMPTS, LEAD, of="mlps", resume=replace(part, by_example=None))
    torch.testing.assert_close(old.values, whole.values)
    assert old.by_example is None  # only the means of some cells are known


# Plots


@pytest.fixture
def pyplot():
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    from matplotlib import pyplot

    yield pyplot
    pyplot.close("all")


def test_a_line_has_a_band_and_bars_have_whiskers(pyplot) -> None:
    result = of_examples(draws(4, 30))
    low, high = result.interval()
    (band,) = result.plot().collections
    assert band.get_datalim(band.axes.transData).y1 == pytest.approx(float(high.values.max()))
    heads = Result(draws(4, 30), ("head", "example"), {"head": range(4), "example": range(30)}).mean("example")
    ax = heads.plot()
    (whiskers,) = ax.collections
    ends = [segment[:, 1].tolist() for segment in whiskers.get_segments()]
    assert ends == [pytest.approx([x, y]) for x, y in zip(*(x.values.tolist() for x in (low, high)), strict=True)]
    assert not replace(heads, by_example=None).plot(ax=pyplot.subplots()[1]).collections


def test_cells_within_noise_are_hatched(pyplot) -> None:
    values = draws(6, 30)
    values[0] += 5
    heads = {"layer": range(2), "head": range(3), "example": range(30)}
    result = Result(values.reshape(2, 3, 30), tuple(heads), heads, "lead").mean("example")
    low, high = result.interval()
    noise = int(((low.values < 0) & (high.values > 0)).sum())
    ax = result.plot()
    (hatches,) = ax.collections
    assert 3 <= len(hatches.get_paths()) == noise <= 5
    assert hatches.get_hatch()
    assert "noise" in ax.get_title(loc="left")
    assert not abs(result).plot().collections  # attention and other values from 0 up have no middle


def test_pages_have_them_as_well() -> None:
    result = of_examples(draws(4, 30))
    assert '"low"' in str(result.plot_html())
    assert '"low"' not in str(replace(result, by_example=None).plot_html())


def test_sizes_of_circuits_are_on_a_logarithmic_axis(pyplot) -> None:
    sizes = [0.0, 0.001, 0.01, 0.1, 1.0]
    curve = Result(torch.rand(5), ("size",), {"size": sizes})
    ax = curve.plot()
    assert ax.get_xscale() == "symlog"
    at = ax.transData.transform([(size, 0.0) for size in sizes[1:]])[:, 0]
    np.testing.assert_allclose(np.diff(at), np.diff(at)[0], rtol=0.01)
    assert Result(torch.rand(2), ("size",), {"size": [0.0, 1.0]}).plot().get_xscale() == "linear"
