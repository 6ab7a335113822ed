from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import tiny_models
import torch
from experiment_models import wrapped
from torch import Tensor

import hookline
from hookline import HooklineError, edits
from hookline.experiments import ablation, metrics
from hookline.experiments.result import Result

KINDS = ["gpt2", "llama", "gemma2", "mixtral", "gptj", "bert"]
PROMPT = "When Mary and John went to the store, John gave a drink to"
OTHERS = [
    "When Tom and Anna went to the park, Tom gave a book to",
    "When Kate and Paul went to the store, Paul gave a drink to",
]
LEAD = metrics.logit_diff(" Mary", " John")


def tokens(rows: int = 1, seed: int = 0, length: int = 8) -> Tensor:
    return torch.randint(3, 60, (rows, length), generator=torch.Generator().manual_seed(seed))


def lead(logits: Tensor) -> Tensor:
    return logits[:, -1, 5] - logits[:, -1, 9]


def name_of(model: hookline.HookedModel, layer: int, point: str) -> str:
    return f"{model.index.layer(layer)}.{point}"


def put(x: Tensor, value: Tensor | float, where: tuple) -> None:
    x[where] = value


def close(result: Result, values: Tensor) -> None:
    torch.testing.assert_close(result.values, values.float(), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_heads_are_what_a_loop_gives(kind) -> None:
    model, text = wrapped(kind), tokens(2)
    result = ablation.ablate(model, text, lead, per_example=True)
    n_heads = model.cfg.n_heads
    expected = torch.stack(
        [
            lead(
                model.run_with_hooks(
                    text, fwd_hooks=[(name_of(model, layer, "attn.hook_z"), partial(put, value=0, where=at))]
                )
            )
            for layer in range(model.cfg.n_layers)
            for head in range(n_heads)
            for at in [(slice(None), slice(None), head)]
        ]
    )
    close(result, expected.view(model.cfg.n_layers, n_heads, 2).detach())
    assert result.axes == ("layer", "head", "example")
    close(result.info["clean"], lead(model(text)).detach())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("of", ["attention", "mlps", "layers"])
def test_outputs_are_what_a_loop_gives(kind, of) -> None:
    model, text = wrapped(kind), tokens()
    points = {"attention": ["hook_attn_out"], "mlps": ["hook_mlp_out"]}.get(of, ["hook_attn_out", "hook_mlp_out"])
    result = ablation.ablate(model, text, lead, of=of)
    expected = [
        lead(model.run_with_hooks(text, fwd_hooks=[(name_of(model, layer, p), torch.zeros_like) for p in points]))
        for layer in range(model.cfg.n_layers)
    ]
    close(result, torch.cat(expected).detach())


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_neurons_of_a_layer_at_a_position(kind) -> None:
    model, text = wrapped(kind), tokens()
    result = ablation.ablate(model, text, lead, of="neurons", layers=-2, positions=[2, -1])
    assert result.axes == ("neuron",)
    for neuron in (0, 7, 79):
        hook = partial(put, value=0, where=(slice(None), [2, 7], neuron))
        logits = model.run_with_hooks(text, fwd_hooks=[(name_of(model, 2, "mlp.hook_post"), hook)])
        assert result.sel(neuron=neuron).item() == pytest.approx(lead(logits).item(), abs=1e-4)
    everywhere = ablation.ablate(model, text, lead, of="neurons", layers=[2])
    assert everywhere.axes == ("layer", "neuron")
    assert not torch.allclose(everywhere.values[0], result.values)


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
@pytest.mark.parametrize("per_position", [False, True])
def test_the_mean_is_that_of_the_data(kind, per_position) -> None:
    model, text, data = wrapped(kind), tokens(), tokens(3, seed=1)
    result = ablation.ablate(model, text, lead, method="mean", data=data, per_position=per_position)
    cache = model.cache(data)
    for layer, head in ((0, 1), (2, 3)):
        mean = cache["z", layer][:, :, head].mean(0 if per_position else (0, 1))
        hook = partial(put, value=mean, where=(slice(None), slice(None), head))
        logits = model.run_with_hooks(text, fwd_hooks=[(name_of(model, layer, "attn.hook_z"), hook)])
        assert result.sel(layer=layer, head=head).item() == pytest.approx(lead(logits).item(), abs=1e-4)


def test_without_data_the_mean_is_that_of_the_prompts() -> None:
    model, text = wrapped("gpt2"), tokens(3)
    own = ablation.ablate(model, text, lead, method="mean", of="mlps")
    close(own, ablation.ablate(model, text, lead, method="mean", of="mlps", data=text).values)


def test_resampled_is_another_text_and_the_seed_chooses_it() -> None:
    model, text, data = wrapped("llama"), tokens(), tokens(4, seed=1)
    cache, found = model.cache(data), set()
    for seed in range(8):
        result = ablation.ablate(model, text, lead, method="resample", data=data, seed=seed, of="mlps")
        again = ablation.ablate(model, text, lead, method="resample", data=data, seed=seed, of="mlps")
        assert torch.equal(result.values, again.values)
        choices = []
        for row in range(4):
            hook = partial(put, value=cache["mlp_out", 1][row], where=(slice(None),))
            choices.append(lead(model.run_with_hooks(text, fwd_hooks=[("blocks.1.hook_mlp_out", hook)])).item())
        near = min(range(4), key=lambda row: abs(choices[row] - result.values[1].item()))
        assert choices[near] == pytest.approx(result.values[1].item(), abs=1e-4)
        found.add(near)
    assert len(found) > 1


def test_resampling_from_the_prompts_never_gives_a_prompt_itself() -> None:
    model, text = wrapped("gpt2"), tokens(2)
    result = ablation.ablate(model, text, lead, method="resample", of="layers", per_example=True, layers=[0, 1, 2, 3])
    assert bool(((result - result.info["clean"]).values.abs() > 1e-4).all())


def test_points_and_axes_of_ones_own() -> None:
    model, text = wrapped("gpt2"), tokens()
    result = ablation.ablate(model, text, lead, points="mlp_out", over=("layer", "pos"))
    assert result.axes == ("layer", "pos")
    hook = partial(put, value=0, where=(slice(None), 5))
    logits = model.run_with_hooks(text, fwd_hooks=[("blocks.1.hook_mlp_out", hook)])
    assert result.values[1, 5].item() == pytest.approx(lead(logits).item(), abs=1e-4)
    named = ablation.ablate(model, text, lead, points=["hook_embed", "blocks.2.hook_resid_post"], over="point")
    expected = [lead(model.run_with_hooks(text, fwd_hooks=[(n, torch.zeros_like)])) for n in named.coords["point"]]
    close(named, torch.cat(expected).detach())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("of", ["heads", "mlps", "layers"])
def test_parts_ablated_together(kind, of) -> None:
    """Also at some positions only: at the others the part goes along with what was ablated before it."""
    model, text = wrapped(kind), tokens()
    points = {"heads": ["attn.hook_z"], "mlps": ["hook_mlp_out"]}.get(of, ["hook_attn_out", "hook_mlp_out"])
    order = [(2, 1), (0, 3), (1, 0)] if of == "heads" else [2, 0, 3]
    for pos in (None, [1, 6]):
        where = slice(None) if pos is None else pos
        curve = ablation.cumulative(model, text, lead, order, of=of, positions=pos)
        assert curve.shape == (2, 4)
        for row, some in enumerate((order, order[::-1])):
            for count in range(4):
                hooks = []
                for part in some[:count]:
                    layer, *head = part if isinstance(part, tuple) else (part,)
                    hook = partial(put, value=0, where=(slice(None), where, *head))
                    hooks += [(name_of(model, layer, point), hook) for point in points]
                expected = lead(model.run_with_hooks(text, fwd_hooks=hooks)).item()
                assert curve.values[row, count].item() == pytest.approx(expected, abs=2e-4)


def test_a_part_that_is_zero_already_stays_so_when_others_are_ablated() -> None:
    model = hookline.hook(tiny_models.causal_lm("opt"))  # with a ReLU
    text = tokens()
    post = model.cache(text)["post", 3][0]
    dead = next(neuron for neuron in range(post.shape[-1]) if not post[:, neuron].any())
    order = [{"layer": 0, "neuron": n} for n in range(60)] + [{"layer": 3, "neuron": dead}]
    curve = ablation.cumulative(model, text, lead, order, of="neurons").sel(order="as ranked")
    hooks = [("blocks.0.mlp.hook_post", partial(put, value=0, where=(..., list(range(60)))))]
    hooks.append(("blocks.3.mlp.hook_post", partial(put, value=0, where=(..., dead))))
    assert curve.values[-1].item() == pytest.approx(lead(model.run_with_hooks(text, fwd_hooks=hooks)).item(), abs=1e-4)


def test_a_ranking_finds_the_head_that_names_the_receiver(tinyworld) -> None:
    result = ablation.ablate(tinyworld, PROMPT, LEAD)
    ranked = ablation.ranking(result)
    sizes = [abs(cell.value) for cell in ranked]
    assert len(ranked) == 32
    assert sizes == sorted(sizes, reverse=True)
    first = ranked[0]
    value = result.sel(**first.labels).item()
    assert first.value == pytest.approx(value - result.info["clean"], abs=1e-4)
    two = ranked[:2]
    assert repr(two).startswith("layer  head  change\n")
    assert list(two) == [ranked[0], ranked[1]]
    assert two.info == ranked.info
    assert len(str(two).splitlines()) == 3
    falls = ablation.ranking(result, by="lowest")
    assert falls[0].value < 0
    assert falls[0].value <= min(cell.value for cell in ranked)
    curve = ablation.cumulative(tinyworld, PROMPT, LEAD, result)
    assert curve.values[0, 0] == curve.values[1, 0] == pytest.approx(result.info["clean"], abs=1e-4)
    assert curve.values[0, 1].item() == pytest.approx(value, abs=1e-3)
    assert curve.values[0, -1].item() == pytest.approx(curve.values[1, -1].item(), abs=1e-3)
    assert curve.info["parts"][0] == list(first.labels.values())


def test_heads_by_their_short_names(tinyworld) -> None:
    named = ablation.cumulative(tinyworld, PROMPT, LEAD, ["L3H4", "L1H2"])
    close(named, ablation.cumulative(tinyworld, PROMPT, LEAD, [(3, 4), {"layer": 1, "head": 2}]).values)


def test_prompts_of_different_lengths_are_as_by_themselves(tinyworld) -> None:
    prompts = [PROMPT, "John gave a book to"]
    result = ablation.ablate(tinyworld, prompts, LEAD, per_example=True, positions=-1)
    for number, prompt in enumerate(prompts):
        close(result.sel(example=number), ablation.ablate(tinyworld, prompt, LEAD, positions=-1).values)


def test_several_metrics_are_ranked_one_by_one(tinyworld) -> None:
    result = ablation.ablate(tinyworld, PROMPT, [LEAD, "kl"], of="mlps")
    with pytest.raises(HooklineError, match="sel\\(metric"):
        ablation.ranking(result)
    assert ablation.ranking(result.sel(metric="kl"))[0].value > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "median"}, '"zero", "mean" or "resample"'),
        ({"method": "zero", "data": OTHERS}, "needs no data"),
        ({"method": "mean", "seed": 1}, "seed needs"),
        ({"method": "zero", "per_position": True}, "per_position needs"),
        ({"method": "mean", "per_position": True}, "data="),
        ({"method": "mean", "per_position": True, "data": ["Tom"]}, "more than 1"),
        ({"method": "resample"}, "prompts .* 14 tokens"),
        ({"method": "resample", "data": ["Tom likes Anna"]}, "data .* tokens"),
        ({"of": "head"}, "'heads'"),
        ({"of": "heads", "points": "z"}, "of= or points="),
        ({"over": ("layer", "pos")}, "needs points"),
        ({"points": [], "over": "layer"}, "needs points"),
        ({"layers": 9}, "layer 9.*0 to 3"),
        ({"positions": 14}, "position 14.*has 14"),
        ({"positions": []}, "selects nothing"),
        ({"positions": 1, "pos": 1}, "are the same"),
        ({"points": "pattern", "over": ("layer", "src"), "positions": [1]}, "key positions"),
        ({"points": "pattern", "over": ("layer", "head"), "method": "mean", "data": OTHERS}, "no mean"),
    ],
)
def test_what_cannot_be_ablated_is_refused(tinyworld, options, message) -> None:
    with pytest.raises(HooklineError, match=message):
        ablation.ablate(tinyworld, PROMPT, LEAD, **options)


@pytest.mark.parametrize(
    ("order", "options", "message"),
    [
        ([], {}, "empty"),
        ([(3, 4), "L3H4"], {}, "twice"),
        ([(3, 99)], {}, "there is no component"),
        ([{"layer": 3}], {}, "there is no component"),
    ],
)
def test_orders_that_cannot_be_are_refused(tinyworld, order, options, message) -> None:
    with pytest.raises(HooklineError, match=message):
        ablation.cumulative(tinyworld, PROMPT, LEAD, order, **options)


def test_a_ranking_says_what_its_parts_are(tinyworld) -> None:
    mlps = ablation.ablate(tinyworld, PROMPT, LEAD, of="mlps")
    assert ablation.cumulative(tinyworld, PROMPT, LEAD, mlps).info["choice"]["of"] == "mlps"
    with pytest.raises(HooklineError, match="remove of="):
        ablation.cumulative(tinyworld, PROMPT, LEAD, mlps, of="heads")
    with pytest.raises(HooklineError, match="ablate"):
        ablation.cumulative(tinyworld, PROMPT, LEAD, Result(torch.zeros(2), ("layer",), {"layer": [0, 1]}))


def test_a_metric_that_gives_nan_is_refused(tinyworld) -> None:
    with pytest.raises(HooklineError, match="NaN"):
        ablation.ablate(tinyworld, PROMPT, lambda logits: (logits[:, -1, 0] * 0 - 1).sqrt())


@pytest.mark.parametrize(
    "pos", [np.array([1, 2]), [np.int64(1), 2], range(1, 3), slice(1, np.int64(3)), torch.tensor([2, 1])]
)
def test_positions_in_any_form(tinyworld, pos) -> None:
    expected = ablation.ablate(tinyworld, PROMPT, LEAD, of="mlps", positions=[1, 2])
    close(ablation.ablate(tinyworld, PROMPT, LEAD, of="mlps", positions=pos), expected.values)
    one = ablation.ablate(tinyworld, PROMPT, LEAD, of="mlps", positions=np.int64(2))
    close(one, ablation.ablate(tinyworld, PROMPT, LEAD, of="mlps", positions=2).values)


@pytest.mark.parametrize(
    "pos", [[True, False], slice(0, 4, 0), 1.5, np.array([1.5]), np.array([True, False]), "1", {1}, [], slice(90, 99)]
)
def test_what_is_no_position(tinyworld, pos) -> None:
    with pytest.raises(HooklineError, match=r"positions must|selects nothing"):
        ablation.ablate(tinyworld, PROMPT, LEAD, of="mlps", positions=pos)


def test_positions_by_their_meaning(tinyworld) -> None:
    for meaning, index in ((hookline.last, -1), (hookline.token(" John", nth=0), 3)):
        found, expected = (
            ablation.ablate(tinyworld, PROMPT, LEAD, of="mlps", positions=each) for each in (meaning, index)
        )
        assert found.info["positions"] == expected.info["positions"]
        assert torch.equal(found.values, expected.values)
    with pytest.raises(HooklineError, match=r"token\(' Anna'\).*row 0"):
        ablation.ablate(tinyworld, PROMPT, LEAD, of="mlps", positions=hookline.token(" Anna"))
    with pytest.raises(HooklineError, match="generated"):
        ablation.ablate(tinyworld, PROMPT, LEAD, of="mlps", positions=hookline.positions.new_tokens)


def test_hooks_that_were_active_are_recorded(tinyworld, tmp_path) -> None:
    prompt, metric = "When Mary and John went to the store, John gave a drink to", metrics.logit_diff(" Mary", " John")
    plain = ablation.ablate(tinyworld, prompt, metric, points="z", layers=[1])
    assert "hooks" not in plain.info
    assert "on the model" not in repr(plain)
    with tinyworld.hooks(fwd_hooks=[("blocks.3.attn.hook_z", edits.zero(head=0))]):
        other = hookline.load("tinyworld")  # hooks of another model do not count
        assert "hooks" not in ablation.ablate(other, prompt, metric, points="z", layers=[1]).info
        result = ablation.ablate(tinyworld, prompt, metric, points="z", layers=[1])
    assert result.info["hooks"] == ["blocks.3.attn.hook_z"]
    assert "with 1 hook on the model: blocks.3.attn.hook_z" in repr(result)
    result.save(tmp_path / "result.safetensors")
    assert Result.load(tmp_path / "result.safetensors").info == result.info
    with pytest.raises(hookline.HooklineError, match=r"different.*hooks"):
        ablation.ablate(tinyworld, prompt, metric, points="z", layers=[1], resume=result)


def test_the_repr_of_a_model_counts_added_hooks() -> None:
    model = hookline.load("tinyworld")
    assert "hook" not in repr(model).removeprefix("HookedModel")
    model.add_hook("blocks.3.attn.hook_z", edits.zero(head=0))
    assert repr(model).endswith("117 points, 1 hook added)")
