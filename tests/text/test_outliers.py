"""Outlying positions are found, left out of means and variances, and told of."""

import logging
import math

import devices
import pytest
import torch
from stores import tinyworld
from tiny_models import causal_lm
from torch import Tensor

import hookline
from hookline import HooklineError, sae
from hookline.edits import load as load_edits
from hookline.edits import mean
from hookline.edits import save as save_edits
from hookline.experiments import ablation, contrast, metrics, steering
from hookline.text.outliers import Outlying, RowMean, bound_of, factor_of, is_outlying, outlying, row_norms

POINT = "blocks.1.hook_resid_post"
TOKENS = torch.randint(3, 60, (4, 9), generator=torch.Generator().manual_seed(0))


def rows(count: int = 200, sinks: tuple[int, ...] = (3, 77, 150), width: int = 12) -> Tensor:
    """Ordinary rows, and some that are hundreds of times as large, all in about one direction."""
    random = torch.Generator().manual_seed(0)
    x = torch.randn(count, width, generator=random)
    x[list(sinks)] = 500 * (torch.ones(width) + 0.01 * torch.randn(len(sinks), width, generator=random))
    return x


@pytest.fixture(scope="module")
def sunk():
    """A model in which the stream is hundreds of times as large at the first position."""
    module = causal_lm("gpt2")
    with torch.no_grad():
        module.transformer.wpe.weight[0] *= 3000
    return hookline.hook(module)


def test_outlying_rows_are_found_wherever_they_are() -> None:
    found, told = outlying(row_norms(rows()), "exclude")
    assert found.nonzero().flatten().tolist() == [3, 77, 150]
    assert (told.count, told.of) == (3, 200)
    assert told.largest > 100 * told.median
    assert "3 of 200 rows (1.5%) outlying: norms up to 1," in str(told)
    assert "none of 200" in str(outlying(row_norms(rows(sinks=())), "exclude")[1])


def test_how_much_is_outlying_can_be_said() -> None:
    norms = torch.tensor([1.0, 1.0, 1.0, 6.0, 30.0])
    assert outlying(norms, "exclude")[0].tolist() == [False, False, False, False, True]
    assert outlying(norms, 5)[0].tolist() == [False, False, False, True, True]
    assert not outlying(norms, "include")[0].any()
    for wrong in ("leave", 1, 0.5, True, None, float("nan")):
        with pytest.raises(HooklineError, match='"exclude", "include", or'):
            factor_of(wrong)


def test_what_has_no_ordinary_rows_has_no_outlying_ones() -> None:
    for norms in (torch.tensor([]), torch.tensor([7.0]), torch.tensor([0.0, 0.0, 3.0])):
        assert not outlying(norms, "exclude")[0].any()
    assert bound_of(torch.tensor([0.0, 0.0, 3.0]), "exclude") == math.inf
    broken = torch.tensor([1.0, 1.0, 1.0, torch.inf, torch.nan])
    assert not is_outlying(broken, 10.0).any(), "those are errors, and stay to be seen"


def test_norms_are_of_whole_rows_in_enough_precision() -> None:
    assert row_norms(torch.full((2, 3, 4), 60000.0, dtype=torch.float16)).isfinite().all()
    assert row_norms(torch.ones(2, 3, 4), 2).tolist() == [[2.0] * 3] * 2
    assert row_norms(torch.tensor([-2.0, 3.0])).tolist() == [2.0, 3.0]


def test_an_ordinary_model_has_none() -> None:
    model = tinyworld()
    _, cache = model.run_with_cache(["When Mary and John went to the store", "The dog sat on the mat. It was"])
    for name, x in cache.items():
        if x.is_floating_point() and model.point(name).axes.startswith("b p"):
            real = x[:, :7].flatten(0, 1)
            assert not outlying(row_norms(real), "exclude")[0].any(), name


def test_the_mean_edit(sunk, caplog) -> None:
    x = sunk.cache(TOKENS, names_filter=POINT)[POINT]
    assert x[:, 0].norm(dim=-1).min() > 50 * x[:, 1:].norm(dim=-1).max()
    ordinary = x[:, 1:].mean((0, 1))

    def after(edit: object) -> Tensor:
        return sunk.run_with_cache(TOKENS, names_filter=POINT, fwd_hooks=[(POINT, edit)])[1][POINT]

    with caplog.at_level(logging.INFO, "hookline"):
        found = after(mean(x))
    assert f"mean at {POINT!r}: left out 4 of 36 rows" in caplog.text
    assert torch.allclose(found[:, 1:], ordinary.expand_as(found[:, 1:]), atol=1e-5)
    assert torch.equal(found[:, 0], x[:, 0]), "no mean of others stands in for a sink"
    named = after(mean(x, pos=0))
    assert torch.allclose(named[:, 0], ordinary.expand_as(named[:, 0]), atol=1e-5), "what is named is replaced"
    every = after(mean(x, outliers="include"))
    assert torch.allclose(every, x.double().mean((0, 1)).float().expand_as(every), rtol=1e-4)
    over = torch.ones(4, 9, dtype=torch.bool)
    over[:, 5:] = False
    assert torch.allclose(after(mean(x, over=over))[:, 1:], x[:, 1:5].mean((0, 1)).expand(4, 8, -1), atol=1e-5)


def test_the_mean_edit_of_heads(sunk) -> None:
    point = "blocks.1.attn.hook_k"
    x = sunk.cache(TOKENS, names_filter=point)[point].clone()
    x[2, 4] *= 1000
    found = sunk.run_with_cache(TOKENS, names_filter=point, fwd_hooks=[(point, mean(x, head=1))])[1][point]
    keep = torch.ones(4, 9, dtype=torch.bool)
    keep[2, 4] = False
    assert torch.allclose(found[..., 1, :], x[keep][:, 1].mean(0).expand(4, 9, -1), atol=1e-5)


def test_the_mean_edit_in_a_file(tmp_path) -> None:
    for outliers in ("exclude", "include", 5.0):
        edit = mean(torch.randn(2, 3, 4), outliers=outliers)
        save_edits(tmp_path / str(outliers), [(POINT, edit)])
        assert load_edits(tmp_path / str(outliers)) == [(POINT, edit)]
    with pytest.raises(HooklineError, match="outliers"):
        mean(torch.zeros(3), outliers="keep")


def ablated(model, **options) -> hookline.experiments.result.Result:
    metric = metrics.prob(5)
    return ablation.ablate(model, TOKENS, metric, points="resid_post", over="layer", method="mean", **options)


def test_mean_ablation(sunk) -> None:
    found = ablated(sunk)
    told = found.info["outlying"][POINT]
    assert (told["count"], told["of"], told["factor"]) == (4, 36, 10.0)
    x = sunk.cache(TOKENS, names_filter=POINT)[POINT]

    def by_hand(new: Tensor, start: int) -> Tensor:
        def replace(x: Tensor) -> None:
            x[:, start:] = new

        return sunk.run_with_hooks(TOKENS, fwd_hooks=[(POINT, replace)])[:, -1].softmax(-1)[:, 5].mean()

    assert torch.isclose(found.values[1], by_hand(x[:, 1:].mean((0, 1)), 1), rtol=1e-4)
    every = ablated(sunk, outliers="include")
    assert torch.isclose(every.values[1], by_hand(x.mean((0, 1)), 0), rtol=1e-4)
    assert every.info["outliers"] == "include"
    assert "outlying" not in every.info
    named = ablated(sunk, positions=[0, 1, 2, 3, 4, 5, 6, 7, 8])
    assert torch.isclose(named.values[1], by_hand(x[:, 1:].mean((0, 1)), 0), rtol=1e-4), "what is named is replaced"
    with pytest.raises(HooklineError, match="another experiment"):
        ablated(sunk, outliers="include", resume=found)


def test_mean_ablation_with_data_and_per_position(sunk) -> None:
    data = torch.randint(3, 60, (6, 9), generator=torch.Generator().manual_seed(1))
    given, own = ablated(sunk, data=data), ablated(sunk, data=TOKENS)
    assert torch.allclose(own.values, ablated(sunk).values, rtol=1e-4), "run twice, since there are outlying ones"
    assert given.info["outlying"][POINT]["of"] == 54
    apart = ablated(sunk, data=data, per_position=True)
    assert "outlying" not in apart.info, "at the first position all are alike"
    plain = ablated(sunk, data=data, per_position=True, outliers="include")
    assert torch.equal(apart.values, plain.values)


def test_ordinary_models_give_what_they_gave() -> None:
    model = tinyworld()
    prompt, metric = "Mary went to the garden with", metrics.prob(" Tom")
    for per_position, data in ((False, None), (True, [prompt, "John sat on the bench near his"])):
        options = {"method": "mean", "per_position": per_position, "data": data}
        found, every = (
            ablation.ablate(model, prompt, metric, outliers=each, **options) for each in ("exclude", "include")
        )
        assert torch.equal(found.values, every.values)
        assert "outlying" not in found.info


def test_outliers_are_about_means(sunk) -> None:
    with pytest.raises(HooklineError, match="outliers needs"):
        ablation.ablate(sunk, TOKENS, metrics.prob(5), method="zero", outliers="include")


def test_pairs_take_them_too(sunk) -> None:
    both = [(TOKENS[0], TOKENS[1])]
    found = contrast.ablate_differing(sunk, both, metric=metrics.prob(5), heads=[(0, 1)], method="mean", outliers=2.0)
    assert found.alone.info["outliers"] == 2.0


def test_steering_vectors_over_all_positions(sunk) -> None:
    one, other = TOKENS[:2], TOKENS[2:]
    found = steering.contrast_vectors(sunk, one, other, layers=[1], pos=None)
    x = sunk.cache(TOKENS, names_filter=POINT)[POINT][:, 1:].mean(1)
    assert torch.allclose(found.at(1), x[:2].mean(0) - x[2:].mean(0), atol=1e-4)
    assert "4 of 36 rows" in found.info["outlying"]
    every = steering.contrast_vectors(sunk, one, other, layers=[1], pos=None, outliers="include")
    assert "outlying" not in every.info
    assert not torch.allclose(every.at(1), found.at(1), atol=1e-2)


TRAIN = {"d_sae": 24, "steps": 60, "batch_size": 50, "progress": False}


def test_training_leaves_them_out() -> None:
    x = rows()
    found = sae.train(x, **TRAIN)
    assert found.outlying.count == 60 // 4 * 3, "each time they come up"
    assert f"left out: {found.outlying}" in repr(found)
    assert found.sae.b_dec.norm() < 5, "the mean of ordinary rows"
    every = sae.train(x, **TRAIN, outliers="include")
    assert every.outlying.count == 0
    assert "left out" not in repr(every)

    def explained(trained: sae.Training) -> float:
        ordinary = x[row_norms(x) < 50]
        missed = (trained.sae(ordinary) - ordinary).detach().pow(2).sum()
        return 1 - float(missed / (ordinary - ordinary.mean(0)).pow(2).sum())

    assert explained(found) > explained(every) + 0.1


def test_training_without_any_is_what_it_was() -> None:
    x = rows(sinks=())
    one, other = (sae.train(x, **TRAIN, outliers=outliers) for outliers in ("exclude", "include"))
    assert torch.equal(one.sae.W_dec, other.sae.W_dec)
    assert one.history == other.history
    assert one.outlying.count == 0
    assert one.outlying.of == 60 * 50


def test_quality_is_told_with_and_without(tmp_path) -> None:
    model = tinyworld()
    point = "blocks.1.hook_resid_post"
    some = ["Mary went to the garden with Tom", "The dog sat on the mat and looked"]
    trained = sae.train(
        hookline.harvest(model, some, point, tmp_path, progress=False), point, **TRAIN, device=devices.DEVICE
    ).sae
    before = sae.evaluate(trained, model, some)
    assert before.outlying == Outlying(0, before.outlying.of, 0.0, before.outlying.median)
    assert before.explained_variance == before.explained_variance_of_all
    assert before == sae.evaluate(trained, model, some, outliers="include") or before.outlying.factor == 10

    def sink(x: Tensor) -> None:
        x[:, 0] = 300

    with model.hooks([(point, sink)]):
        found, every = (sae.evaluate(trained, model, some, outliers=each) for each in ("exclude", "include"))
        x = model.cache(some, names_filter=point)[point]
    assert found.outlying.count == 2
    assert every.explained_variance == every.explained_variance_of_all == found.explained_variance_of_all
    assert found.explained_variance != found.explained_variance_of_all
    assert "with 2 of" in repr(found)
    assert found.loss == every.loss
    assert found.loss_spliced != every.loss_spliced, "where they are left out, they stay as they are"
    assert x.shape[0] == 2


def test_a_store_tells_of_them(sunk, tmp_path) -> None:
    store = hookline.harvest(sunk, TOKENS, POINT, tmp_path, progress=False)
    assert len(store) == 36, "a harvest keeps every row"
    found = store.outlying(POINT)
    assert found.rows.tolist() == [0, 9, 18, 27]
    assert store.rows().position[found.rows].tolist() == [0] * 4
    assert "4 of 36 rows (11.1%) outlying" in str(found)
    assert store.outlying(POINT, "include").count == 0


@pytest.mark.parametrize("per_position", [False, True])
def test_a_mean_of_batches_of_different_lengths(per_position) -> None:
    torch.manual_seed(0)
    batches = [1 + torch.rand(n, 2, 3) for n in (4, 6, 6, 5, 6)]
    batches[2][3] *= 1000
    mean = RowMean("exclude", per_position=per_position)
    for batch in batches:
        mean.add(batch)
    assert mean.finds_outliers()
    assert mean.outlying.count == 1
    for batch in batches:
        mean.add(batch)
    for position in range(6):
        rows = [x[position] for number, x in enumerate(batches) if len(x) > position and (number, position) != (2, 3)]
        if per_position:
            torch.testing.assert_close(mean.value[position], torch.stack(rows).mean(0))
    if not per_position:
        others = torch.cat([*batches[:2], batches[2][:3], batches[2][4:], *batches[3:]])
        torch.testing.assert_close(mean.value, others.mean(0, keepdim=True))
