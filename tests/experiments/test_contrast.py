"""Pairs of prompts: differences against caches, ablations against plain runs, and the agreeing heads of tinyworld."""

import pytest
import torch

import hookline
from hookline.demo.chapters import CAPITALS, NO_OPINION, off, questions
from hookline.experiments import contrast, metrics


def tokens(seed, length=7):
    return torch.randint(3, 60, (length,), generator=torch.Generator().manual_seed(seed))


PAIRS = [(tokens(0), tokens(1)), (tokens(2), tokens(3, 9))]


@pytest.fixture(scope="module")
def asked():
    """Questions after a wrong opinion, and after none."""
    countries = list(CAPITALS)[:10]
    after, plain = questions(countries, 5), questions(countries, 5, template=NO_OPINION)
    return list(zip(plain.prompts, after.prompts, strict=True)), after


@pytest.mark.parametrize("kind", ["gpt2", "llama", "mixtral", "bert"])
@pytest.mark.parametrize("relative", [False, True])
def test_it_is_the_norm_of_the_difference_at_the_last_position(models, kind, relative) -> None:
    model = models[kind]
    result = contrast.head_differences(model, PAIRS, per_example=True, relative=relative)
    assert result.shape == (4, 4, 2)
    for row, pair in enumerate(PAIRS):
        caches = [model.run_with_cache(each)[1] for each in pair]
        for layer in range(4):
            a, b = (cache["z", layer][0, -1] for cache in caches)
            expected = (a - b).norm(dim=-1)
            expected = expected / ((a.norm(dim=-1) + b.norm(dim=-1)) / 2) if relative else expected
            torch.testing.assert_close(result.values[layer, :, row], expected, atol=1e-5, rtol=1e-4)
    mean = contrast.head_differences(model, PAIRS, relative=relative)
    torch.testing.assert_close(mean.values, result.values.mean(-1))


def test_other_points_axes_and_positions(models) -> None:
    model, (a, b) = models["llama"], PAIRS[0]
    one, another = (model.run_with_cache(each)[1] for each in (a, b))
    everywhere = contrast.head_differences(model, [(a, b)], pos=None)
    assert everywhere.values[2, 1].item() == pytest.approx(
        (one["z", 2] - another["z", 2])[0, :, 1].norm().item(), rel=1e-4
    )
    stream = contrast.head_differences(model, [(a, b)], points="resid_post", over="layer", pos=2)
    assert stream.values[1].item() == pytest.approx(
        (one["resid_post", 1] - another["resid_post", 1])[0, 2].norm().item()
    )
    neurons = contrast.head_differences(model, [(a, b)], points="post", over=("neuron", "layer"))
    torch.testing.assert_close(neurons.values[:, 3], (one["post", 3] - another["post", 3])[0, -1].abs())
    patterns = contrast.head_differences(model, [(a, b)], points="pattern")
    apart = (one["pattern", 1] - another["pattern", 1])[0, :, -1].norm(dim=-1)
    torch.testing.assert_close(patterns.values[1], apart)


def test_the_same_prompt_twice_is_no_pair_apart(models) -> None:
    for relative in (False, True):
        assert (
            contrast.head_differences(models["gpt2"], [(tokens(0), tokens(0))], relative=relative).values == 0
        ).all()


def test_the_heads_that_agree_differ_most(tinyworld, asked) -> None:
    found = [tuple(cell.labels.values()) for cell in contrast.head_differences(tinyworld, asked[0]).top(2)]
    assert found == [(3, 7), (3, 3)]


def test_without_them_the_model_tells_the_truth(tinyworld, asked) -> None:
    both, after = asked
    found = contrast.ablate_differing(tinyworld, both, [f" {each}" for each in after.answers], heads=5)
    assert found.heads[:2] == [(3, 7), (3, 3)]
    assert found.together.sel(prompt="second", count=0).item() < 0.2
    assert found.together.sel(prompt="second", count=2).item() > 0.9
    assert found.together.sel(prompt="first", count=2).item() > 0.9
    assert found.differences is not None
    assert {"without", "nothing", "L3H7", "the first 2"} <= {*repr(found).replace("\n", "  ").split("  ")}


@pytest.mark.parametrize("by", ["zero", "mean"])
def test_ablations_are_those_of_plain_runs(tinyworld, asked, by) -> None:
    both, after = asked
    answers, others = ([f" {each}" for each in texts] for texts in (after.answers, after.others))
    heads = [(2, 2), (3, 7)]
    metric = metrics.logit_diff(answers, others)
    found = contrast.ablate_differing(tinyworld, both, metric=metric, heads=heads, method=by)
    ids = [torch.tensor([tinyworld.to_single_token(each) for each in texts]) for texts in (answers, others)]
    prompts = [pair[1] for pair in both]
    means = {}
    for layer, head in heads:
        each = torch.cat([tinyworld.run_with_cache(text)[1]["z", layer][0, :, head] for text in prompts])
        means[layer, head] = each.mean(0) if by == "mean" else torch.zeros(each.shape[1])

    def lead(which):
        hooks = []
        for layer, head in which:

            def put(z, layer=layer, head=head):
                z[:, :, head] = means[layer, head]

            hooks.append((("z", layer), put))
        logits = tinyworld.run_with_hooks(prompts, fwd_hooks=hooks)[:, -1]
        return (logits.gather(1, ids[0][:, None]) - logits.gather(1, ids[1][:, None])).mean().item()

    for at, head in enumerate(found.heads):
        assert found.alone.values[1, at].item() == pytest.approx(lead([head]), abs=1e-3)
    for count in range(3):
        assert found.together.values[1, count].item() == pytest.approx(lead(found.heads[:count]), abs=1e-3)
    assert found.differences is None


def test_the_order_is_what_each_adds_to_those_before(tinyworld, asked) -> None:
    both, after = asked
    metric = metrics.log_prob([f" {each}" for each in after.answers])
    heads = [(2, 2), (3, 3), (3, 7)]
    raised = contrast.ablate_differing(tinyworld, both, metric=metric, heads=heads)
    lowered = contrast.ablate_differing(tinyworld, both, metric=metric, heads=heads, order="lowers")
    best = raised.alone.values[1].argmax().item()
    assert best == 0
    assert lowered.alone.values[1].argmin().item() == 0
    assert raised.heads != lowered.heads
    changed = contrast.ablate_differing(tinyworld, both, metric=metric, heads=heads, order="changes")
    assert (changed.alone.values[1] - changed.together.values[1, 0]).abs().argmax().item() == 0


def test_right_is_the_share_of_right_answers(tinyworld, asked) -> None:
    _, after = asked
    answers = [f" {each}" for each in after.answers]
    heads = [(3, 7)]
    ids = torch.tensor([tinyworld.to_single_token(each) for each in answers])
    logits = tinyworld.run_with_hooks(after.prompts, fwd_hooks=off(heads))
    right = metrics.accuracy(ids)(logits[:, -1:])
    assert torch.equal(right, (logits[:, -1].argmax(-1) == ids).float())
    assert 0 < right.mean() <= 1
    assert metrics.accuracy(5)(torch.full((1, 1, 9), float("nan"))).isnan().all()


@pytest.mark.parametrize(
    ("given", "how", "said"),
    [
        ([], {}, "pairs is"),
        ("text", {}, "pairs is"),
        ([(tokens(0),)], {}, "pairs is"),
        (PAIRS, {"pos": None}, "7 and 9 tokens"),
        (PAIRS, {"points": "pattern"}, "7 and 9 tokens"),
        (PAIRS, {"over": ("layer", "pos"), "points": "resid_post"}, "pos="),
        (PAIRS, {"pos": 8}, "position 8"),
        (PAIRS, {"points": "resid_post"}, "no axis 'head'"),
    ],
)
def test_pairs_that_cannot_be_compared(models, given, how, said) -> None:
    with pytest.raises(hookline.HooklineError, match=said):
        contrast.head_differences(models["gpt2"], given, **how)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({}, "pass either"),
        ({"answers": [5, 6], "metric": metrics.prob(5)}, "pass either"),
        ({"answers": [5, 6], "order": "best"}, "order is"),
        ({"answers": [5, 6], "heads": 0}, "heads is a number"),
        ({"answers": [5, 6], "heads": []}, "heads is a number"),
        ({"answers": [5, 6], "heads": [(1, 1), (1, 1)]}, "without duplicates"),
        ({"answers": [5, 6], "heads": [(1, 9)]}, "no component"),
        ({"answers": [5, 6, 7]}, "3 answers for 2"),
        ({"answers": [5, 6], "method": "noise"}, "method is"),
        ({"answers": [5, 6], "resume": None}, "no option 'resume'"),
        ({"metric": [metrics.prob(5), "kl"]}, "one metric"),
    ],
)
def test_bad_input(tinyworld, how, said) -> None:
    texts = [("Mary went to the store", "John went to the store"), ("Mary went", "John went to the")]
    with pytest.raises(hookline.HooklineError, match=said):
        contrast.ablate_differing(tinyworld, texts, **how)


def test_tokens_as_pairs(models) -> None:
    """Prompts may be tokens, and of different lengths."""
    found = contrast.ablate_differing(models["gpt2"], PAIRS, metric=metrics.prob(5), heads=[(1, 1)])
    expected = [models["gpt2"](each)[0, -1].softmax(-1)[5].item() for _, each in PAIRS]
    assert found.together.values[1, 0].item() == pytest.approx(sum(expected) / 2, rel=1e-4)
