"""`positions=`: prompts of unequal lengths, whose values are those of runs on each prompt alone."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from hookline import HooklineError
from hookline.experiments import (
    ablation,
    attribution,
    logit_attribution,
    logit_lens,
    metrics,
    patching,
    relevance,
    steering,
)
from hookline.experiments.result import Result
from hookline.positions import image_tokens, last, token
from hookline.text.token_positions import Meaning

TENSORS_ON_CPU = True

CLEAN = [
    "When Mary and John went to the store, John gave a drink to",
    "After Tom and Anna went to the park, the teacher said that Anna gave a book to",
    "Then Kate and Paul walked to the store. Paul gave a drink to",
]
CORRUPTED = [
    "When Mary and John went to the store, Mary gave a drink to",
    "When Tom and Anna went to the park, Tom gave a book to",
    "Then, when Kate and Paul went to the big store, Kate gave a drink to",
]
ANSWERS, OTHERS = [" Mary", " Tom", " Kate"], [" John", " Anna", " Paul"]
LEAD = metrics.logit_diff(ANSWERS, OTHERS)
NAMES = {"resid_pre": "blocks.{}.hook_resid_pre", "z": "blocks.{}.attn.hook_z", "mlp_out": "blocks.{}.hook_mlp_out"}


@torch.no_grad()
def by_hand(model: Any, result: Result, source: str, target: str, lead: Any, points: str, places: Any) -> Tensor:
    """A sweep over one pair of prompts of any lengths, in plain runs with hooks.

    `places` are the positions of each cell in the source and in the target.
    """
    cache, values = model.cache(source), []
    for cell in itertools.product(*map(range, result.shape)):
        at = dict(zip(result.axes, cell, strict=True))
        cells = [places[at["pos"]]] if "pos" in at else places

        def patch(x: Tensor, hook: Any, at: Any = at, cells: Any = cells) -> None:
            head = at.get("head", slice(None)) if points == "z" else slice(None)
            for froms, tos in cells:
                x[0, tos, head] = cache[hook.name][0, froms, head]

        name = NAMES[points].format(result.coords["layer"][at["layer"]])
        logits = model.run_with_hooks(target, fwd_hooks=[(name, patch)])[0, -1]
        answer, other = (model.to_single_token(text) for text in lead)
        values.append(float(logits[answer] - logits[other]))
    return torch.tensor(values).reshape(result.shape)


@pytest.mark.parametrize("direction", ["denoise", "noise"])
@pytest.mark.parametrize(
    ("points", "over"),
    [("resid_pre", ("layer", "pos")), ("z", ("pos", "head", "layer")), ("mlp_out", "layer"), ("z", ("layer", "head"))],
)
def test_a_sweep_is_the_mean_of_plain_runs_on_each_pair(tinyworld, direction, points, over) -> None:
    positions = [-1, -2, -5]
    given: dict[str, Any] = {"points": points, "over": over, "direction": direction, "layers": [0, 3]}
    result = patching.sweep(tinyworld, CLEAN, CORRUPTED, LEAD, positions=positions, **given)
    pairs = zip(CLEAN, CORRUPTED, strict=True) if direction == "denoise" else zip(CORRUPTED, CLEAN, strict=True)
    places = [([place], [place]) for place in positions]
    expected = [
        by_hand(tinyworld, result, *pair, lead, points, places)
        for pair, lead in zip(pairs, zip(ANSWERS, OTHERS, strict=True), strict=True)
    ]
    torch.testing.assert_close(result.values, torch.stack(expected).mean(0), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(result.by_example.values, torch.stack(expected, -1), atol=1e-4, rtol=1e-4)
    if "pos" in result.axes:
        assert result.coords["pos"] == positions


def test_baselines_are_those_of_each_prompt(tinyworld) -> None:
    result = patching.sweep(tinyworld, CLEAN, CORRUPTED, LEAD, positions=[-1])
    for key, prompts in (("clean", CLEAN), ("corrupted", CORRUPTED)):
        values = []
        for prompt, answer, other in zip(prompts, ANSWERS, OTHERS, strict=True):
            logits = tinyworld(prompt)[0, -1].detach()
            values.append(logits[tinyworld.to_single_token(answer)] - logits[tinyworld.to_single_token(other)])
        assert result.info[key] == pytest.approx(float(torch.stack(values).mean()), abs=1e-4)
        assert result.by_example.info[key].values.tolist() == pytest.approx([float(x) for x in values], abs=1e-4)


def test_meanings_are_found_in_each_prompt(tinyworld) -> None:
    """The second name stands at other places in clean and corrupted prompts."""
    result = patching.sweep(tinyworld, CLEAN, CORRUPTED, LEAD, positions=[token(" and", nth=0), last])
    assert result.coords["pos"] == ["token(' and', nth=0)", "last"]
    expected = []
    for clean, corrupted, *lead in zip(CLEAN, CORRUPTED, ANSWERS, OTHERS, strict=True):
        at = [tinyworld.to_str_tokens(prompt).index(" and") for prompt in (clean, corrupted)]
        places = [([at[0]], [at[1]]), ([-1], [-1])]
        expected.append(by_hand(tinyworld, result, clean, corrupted, lead, "resid_pre", places))
    torch.testing.assert_close(result.values, torch.stack(expected).mean(0), atol=1e-4, rtol=1e-4)
    assert patching.sweep(tinyworld, CLEAN, CORRUPTED, LEAD, positions=last).coords["pos"] == ["last"]


def test_a_meaning_in_a_list_is_one_cell_of_all_its_tokens(tinyworld) -> None:
    first_three = _FirstTokens(3)
    assert patching.sweep(tinyworld, CLEAN, CORRUPTED, LEAD, positions=first_three).coords["pos"] == [0, 1, 2]
    result = patching.sweep(tinyworld, CLEAN, CORRUPTED, LEAD, positions=[first_three])
    together = patching.sweep(tinyworld, CLEAN, CORRUPTED, LEAD, over="layer", positions=[0, 1, 2])
    torch.testing.assert_close(result.values[:, 0], together.values)


class _FirstTokens(Meaning):
    """A meaning of several tokens, as other modules may define one."""

    def __init__(self, count: int) -> None:
        object.__setattr__(self, "count", count)

    def mask(self, text, span):
        mask = torch.zeros_like(span.real())
        for row, flags in enumerate(span.real()):
            mask[row, flags.nonzero().flatten()[: self.count]] = True
        return mask


def test_a_list_for_each_prompt(tinyworld) -> None:
    lists = [[1, 3], [-1, 3], [2, 5]]
    result = patching.sweep(tinyworld, CLEAN, CORRUPTED, LEAD, positions=lists)
    expected = [
        by_hand(tinyworld, result, clean, corrupted, lead, "resid_pre", [([place], [place]) for place in places])
        for clean, corrupted, lead, places in zip(
            CLEAN, CORRUPTED, zip(ANSWERS, OTHERS, strict=True), lists, strict=True
        )
    ]
    torch.testing.assert_close(result.values, torch.stack(expected).mean(0), atol=1e-4, rtol=1e-4)
    one = patching.sweep(tinyworld, CLEAN, CORRUPTED, LEAD, positions=torch.tensor(lists))
    assert torch.equal(one.values, result.values)


def test_prompts_of_the_same_length_have_the_columns_of_a_full_sweep(tinyworld) -> None:
    clean, corrupted = CLEAN[0], CORRUPTED[0]
    lead = metrics.logit_diff(" Mary", " John")
    whole = patching.sweep(tinyworld, clean, corrupted, lead)
    part = patching.sweep(tinyworld, clean, corrupted, lead, positions=[9, -1])
    torch.testing.assert_close(part.values, whole.values[:, [9, -1]], atol=1e-4, rtol=1e-4)
    cache = tinyworld.run_with_cache(clean)[1]
    cached = patching.sweep(tinyworld, cache, corrupted, lead, positions=[9, -1])
    torch.testing.assert_close(part.values, cached.values, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("direction", ["denoise", "noise"])
@pytest.mark.parametrize("over", [("layer", "pos"), ("layer",)])
def test_estimates_are_of_the_same_cells(tinyworld, direction, over) -> None:
    """One by one as together, in the columns of the whole estimate, and close to true patching."""
    given: dict[str, Any] = {"over": over, "points": "mlp_out", "positions": [-1, -4], "direction": direction}
    estimate = attribution.attribution_patching(tinyworld, CLEAN, CORRUPTED, LEAD, steps=8, **given)
    true = patching.sweep(tinyworld, CLEAN, CORRUPTED, LEAD, **given)
    assert (estimate.axes, estimate.coords) == (true.axes, true.coords)
    assert estimate.info["correlation"] > 0.98
    assert estimate.info["clean"] == pytest.approx(true.info["clean"], abs=1e-4)
    pairs = zip(CLEAN, CORRUPTED, ANSWERS, OTHERS, strict=True)
    alone = [
        attribution.attribution_patching(
            tinyworld, clean, corrupted, metrics.logit_diff(*lead), steps=8, check=0, **given
        ).values
        for clean, corrupted, *lead in pairs
    ]
    torch.testing.assert_close(estimate.by_example.values, torch.stack(alone, -1), atol=2e-3, rtol=1e-3)
    rough = relevance.relevance(tinyworld, CLEAN, CORRUPTED, LEAD, check=0, **given)
    assert rough.coords == true.coords
    assert rough.info["corrupted"] == pytest.approx(true.info["corrupted"], abs=1e-4)


def test_estimates_of_one_pair_are_columns_of_the_whole_estimate(tinyworld) -> None:
    given: Any = (tinyworld, CLEAN[0], CORRUPTED[0], metrics.logit_diff(" Mary", " John"))
    for estimate in (attribution.attribution_patching, relevance.relevance):
        whole, part = (estimate(*given, check=0, positions=where) for where in (None, [9, -1]))
        torch.testing.assert_close(part.values, whole.values[:, [9, -1]], atol=1e-4, rtol=1e-4)


def test_answers_of_several_tokens_and_divergences(tinyworld) -> None:
    answers = [" Mary Tom", " Tom Kate", " Kate Paul"]
    result = patching.sweep(tinyworld, CLEAN, CORRUPTED, metrics.log_prob(answers), positions=[-1, -2])
    alone = [
        patching.sweep(tinyworld, clean, corrupted, metrics.log_prob(answer), positions=[-1, -2]).values
        for clean, corrupted, answer in zip(CLEAN, CORRUPTED, answers, strict=True)
    ]
    torch.testing.assert_close(result.values, torch.stack(alone).mean(0), atol=1e-4, rtol=1e-4)
    assert patching.sweep(tinyworld, CLEAN, CORRUPTED, "kl", positions=[-1]).info["clean"] == pytest.approx(0, abs=1e-5)


def test_ablation_at_positions(tinyworld) -> None:
    by_position = ablation.ablate(tinyworld, CLEAN, LEAD, points="mlp_out", over=("layer", "pos"), positions=[-1, 3])
    for place in (-1, 3):
        alone = ablation.ablate(tinyworld, CLEAN, LEAD, points="mlp_out", positions=place)
        torch.testing.assert_close(by_position.sel(pos=place).values, alone.values)
    both = ablation.ablate(tinyworld, CLEAN, LEAD, of="mlps", positions=[-1, last, 3])
    torch.testing.assert_close(
        both.values, ablation.ablate(tinyworld, CLEAN, LEAD, of="mlps", positions=[3, -1]).values
    )
    lists = ablation.ablate(tinyworld, CLEAN, LEAD, of="mlps", positions=[[1], [2, 3], [4]])
    for row, places in enumerate([[1], [2, 3], [4]]):
        lead = metrics.logit_diff(ANSWERS[row], OTHERS[row])
        alone = ablation.ablate(tinyworld, CLEAN[row], lead, of="mlps", positions=places)
        torch.testing.assert_close(lists.by_example.values[:, row], alone.values, atol=1e-4, rtol=1e-4)


def test_steering_at_positions(tinyworld) -> None:
    vectors = steering.contrast_vectors(tinyworld, CLEAN, CORRUPTED)
    by_meaning, by_index = (
        steering.sweep_layers(tinyworld, vectors, CLEAN, LEAD, positions=where, neutral=None) for where in (last, [-1])
    )
    assert torch.equal(by_meaning.values, by_index.values)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"positions": [[1], [2]]}, "3 prompts"),
        ({"positions": [[1], [2, 3], [4]]}, "cannot be an axis"),
        ({"positions": [[1], [2], [99]]}, "99 is out of range"),
        ({"positions": [99]}, "no position 99"),
        ({"positions": []}, "selects nothing"),
        ({"positions": token(" and", nth=3)}, "no token"),
        ({"positions": [-1], "points": "pattern", "over": ("layer", "head")}, "same length"),
        ({"positions": [-1], "points": "pattern", "over": ("layer", "src")}, "src"),
        ({"positions": image_tokens}, "image"),
        ({}, "positions="),
    ],
)
def test_what_is_refused(tinyworld, options, message) -> None:
    with pytest.raises(HooklineError, match=message):
        patching.sweep(tinyworld, CLEAN, CORRUPTED, LEAD, **options)


def test_as_many_tokens_in_both_prompts(tinyworld) -> None:
    """A meaning of two tokens in one prompt, and of three in the other."""

    class Commas(Meaning):
        def mask(self, text, span):
            return (span.tokens == tinyworld.to_single_token(",")).cpu() & span.real()

    prompts = (["Tom, Anna, Paul and Kate"], ["Tom, Anna and Kate"])
    with pytest.raises(HooklineError, match="prompt 0"):
        patching.sweep(tinyworld, *prompts, metrics.logit_diff(" Mary", " John"), positions=[Commas()])


def test_inputs_move_as_a_whole(tinyworld) -> None:
    with pytest.raises(HooklineError, match="activations"):
        attribution.attribution_patching(
            tinyworld, CLEAN, CORRUPTED, LEAD, positions=[-1], steps=4, along="inputs", points="z", over="layer"
        )
    with pytest.raises(HooklineError, match="same length"):
        relevance.relevance(tinyworld, CLEAN, CORRUPTED, LEAD, positions=[-1], rules="difference")


@pytest.mark.parametrize("per_example", [False, True])
def test_lenses_read_each_position(tinyworld, per_example) -> None:
    """As one prompt at a time at one position."""
    places = [[-1, 3], [5, 3], [2, -2]]
    lens = logit_lens.logit_lens(tinyworld, CLEAN, " Mary", positions=places, per_example=per_example)
    parts = logit_attribution.direct_logit_attribution(
        tinyworld, CLEAN, " Mary", " John", of="layers", positions=places, per_example=per_example
    )
    for row, (prompt, of_prompt) in enumerate(zip(CLEAN, places, strict=True)):
        for number, place in enumerate(of_prompt):
            by_example = [result if per_example else result.by_example for result in (lens, parts)]
            found = [result.isel(pos=number, example=row) for result in by_example]
            assert found[0].axes == found[1].axes == ("layer",)
            alone = logit_lens.logit_lens(tinyworld, prompt, " Mary", pos=place)
            torch.testing.assert_close(found[0].values, alone.values, atol=1e-4, rtol=1e-4)
            alone = logit_attribution.direct_logit_attribution(
                tinyworld, prompt, " Mary", " John", of="layers", pos=place
            )
            torch.testing.assert_close(found[1].values, alone.values, atol=1e-4, rtol=1e-4)
            assert found[1].info["logit"] == pytest.approx(alone.info["logit"], abs=1e-4)
    if not per_example:
        assert parts.info["bias"].axes == ("pos",)
        assert lens.axes == ("layer", "pos")
    assert logit_lens.logit_lens(tinyworld, CLEAN, positions=_FirstTokens(2)).coords["pos"] == [0, 1]
    with pytest.raises(HooklineError, match="prompt 0"):
        logit_lens.logit_lens(tinyworld, CLEAN, positions=[_FirstTokens(2)])
