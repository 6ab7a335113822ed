from __future__ import annotations

import pytest
import tiny_models
import torch
from experiment_models import wrapped
from torch import Tensor

import hookline
from hookline import HooklineError
from hookline.experiments import head_detectors

KINDS = ["gpt2", "llama", "gemma2", "mixtral", "gptj", "bert"]
PROMPT = "When Mary and John went to the store, John gave a drink to"


@pytest.mark.parametrize("kind", KINDS)
def test_scores_are_stripes_of_the_patterns(kind) -> None:
    model, half = wrapped(kind), 10
    tokens = head_detectors.repeated_tokens(model, half, 3, seed=1)
    result = head_detectors.head_scores(model, length=half, batch=3, seed=1)
    assert result.coords["kind"] == list(head_detectors.KINDS)
    late = torch.arange(half, 2 * half)
    for layer in range(model.cfg.n_layers):
        pattern = model.cache(tokens)["pattern", layer]
        every = torch.arange(1, 2 * half)
        expected = {
            "previous_token": pattern[:, :, every, every - 1],
            "duplicate_token": pattern[:, :, late, late - half],
            "induction": pattern[:, :, late, late - half + 1],
        }
        for name, stripe in expected.items():
            torch.testing.assert_close(result.sel(kind=name, layer=layer).values, stripe.mean((0, 2)).detach())


def test_tinyworld_repeats_with_its_last_layer(tinyworld) -> None:
    result = head_detectors.head_scores(tinyworld)
    best = result.sel(kind="induction").top(1, by="value")[0]
    assert best.value > 0.8
    assert best.labels["layer"] == 3
    assert result.sel(kind="previous_token").top(1, by="value")[0].value > 0.5
    assert float(result.values.min()) >= 0
    assert float(result.values.max()) <= 1


def test_random_tokens_begin_as_texts_do_and_come_twice(tinyworld) -> None:
    tokens = head_detectors.repeated_tokens(tinyworld, 12, 2)
    assert tokens.shape == (2, 25)
    assert tokens[:, 0].tolist() == [tinyworld.tokenizer.bos_token_id] * 2
    assert torch.equal(tokens[:, 1:13], tokens[:, 13:])
    assert all(len({*row.tolist()}) == 12 for row in tokens[:, 1:13])
    assert not {*tokens[:, 1:].flatten().tolist()} & {*tinyworld.tokenizer.all_special_ids}
    assert not torch.equal(tokens, head_detectors.repeated_tokens(tinyworld, 12, 2, seed=1))
    assert torch.equal(tokens, head_detectors.repeated_tokens(tinyworld, 12, 2, seed=0))


def test_own_prompts_count_every_place_that_can_look(tinyworld) -> None:
    prompts = [PROMPT, "Tom likes Anna and Tom likes Paul"]
    result = head_detectors.head_scores(tinyworld, prompts, "duplicate_token")
    total, count = torch.zeros(4, 8), 0
    for prompt in prompts:
        ids = tinyworld.to_tokens(prompt)[0].tolist()
        cache = tinyworld.cache(prompt)
        for here, token in enumerate(ids):
            before = [at for at in range(here) if ids[at] == token]
            count += bool(before)
            for layer in range(4):
                total[layer] += cache["pattern", layer][0, :, here, before].sum(-1).detach()
    torch.testing.assert_close(result.values[0], total / count)


def detected(pattern: Tensor, wanted: Tensor, measure: str, bos: bool, current: bool) -> float:
    """By hand, as one would for a single head."""
    keep = torch.ones_like(pattern)
    keep[:, 0] = 0 if bos else 1
    keep = keep - torch.diag(keep.diag()) if current else keep
    if measure == "mul":
        return float((pattern * wanted * keep).sum() / (pattern * keep).sum())
    return 1 - float(((pattern - wanted).abs() * keep).mean(1).sum())


@pytest.mark.parametrize("measure", ["mul", "abs"])
@pytest.mark.parametrize(("bos", "current"), [(False, False), (True, False), (False, True)])
def test_detection_is_by_overlap_or_by_distance(tinyworld, measure, bos, current) -> None:
    cache, n = tinyworld.cache(PROMPT), 14
    own = torch.rand(n, n).tril()
    for pattern in ("previous_token", own):
        wanted = torch.diag(torch.ones(n - 1), -1) if isinstance(pattern, str) else own
        result = head_detectors.detect(
            tinyworld, pattern, PROMPT, measure=measure, exclude_bos=bos, exclude_current_token=current
        )
        for layer, head in ((0, 0), (2, 7), (3, 4)):
            expected = detected(cache["pattern", layer][0, head].detach(), wanted, measure, bos, current)
            assert result.values[layer, head].item() == pytest.approx(expected, abs=1e-5)


def test_a_heads_own_pattern_is_found_by_distance(tinyworld) -> None:
    own = tinyworld.cache(PROMPT)["pattern", 2][0, 5]
    best = head_detectors.detect(tinyworld, own, PROMPT, measure="abs").top(1, by="value")[0]
    assert best.labels == {"layer": 2, "head": 5}
    assert best.value == pytest.approx(1, abs=1e-4)


def test_detection_averages_over_prompts_of_any_length(tinyworld) -> None:
    prompts = [PROMPT, "Tom likes Anna and Tom likes Paul"]
    both = head_detectors.detect(tinyworld, "induction", prompts)
    each = torch.stack([head_detectors.detect(tinyworld, "induction", prompt).values for prompt in prompts])
    torch.testing.assert_close(both.values, each.mean(0))


def test_patterns_of_a_repeated_text() -> None:
    tokens = torch.tensor([9, 4, 9, 4])
    assert head_detectors.detection_pattern("previous_token", tokens).nonzero().tolist() == [[1, 0], [2, 1], [3, 2]]
    assert head_detectors.detection_pattern("duplicate_token", tokens).nonzero().tolist() == [[2, 0], [3, 1]]
    assert head_detectors.detection_pattern("induction", tokens).nonzero().tolist() == [[2, 1], [3, 2]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompts": "Tom likes Anna"}, "duplicate_token"),
        ({"prompts": "Tom", "kinds": "previous_token"}, "previous_token"),
        ({"kinds": ()}, "some of"),
        ({"kinds": ("induction", "induction")}, "without duplicates"),
        ({"kinds": "copying"}, "copying"),
        ({"length": 64}, "at most 63"),
        ({"batch": 0}, "batch is at least 1"),
        ({"prompts": PROMPT, "seed": 1}, "remove them"),
    ],
)
def test_what_cannot_be_scored_is_refused(tinyworld, options, message) -> None:
    with pytest.raises(HooklineError, match=message):
        head_detectors.head_scores(tinyworld, **options)


@pytest.mark.parametrize(
    ("pattern", "options", "message"),
    [
        (torch.eye(3), {}, r"\[3, 3\].* 14"),
        (torch.ones(14, 14), {}, "later tokens"),
        ("induction", {"measure": "cosine"}, '"mul" or "abs"'),
        ("copying", {}, "no kind of head"),
    ],
)
def test_what_cannot_be_detected_is_refused(tinyworld, pattern, options, message) -> None:
    with pytest.raises(HooklineError, match=message):
        head_detectors.detect(tinyworld, pattern, PROMPT, **options)


def test_a_model_with_two_stacks_is_refused() -> None:
    with pytest.raises(HooklineError, match="encoder-decoder"):
        head_detectors.head_scores(hookline.hook(tiny_models.seq2seq("t5")))


def test_layers_without_attention_are_left_out() -> None:
    model = hookline.hook(tiny_models.causal_lm("jamba"))
    assert head_detectors.head_scores(model, length=5).coords["layer"] == [2]
