"""Answers of several tokens: against log-probabilities of whole texts, in every experiment that reads an answer."""

import pytest
import tiny_vision
import torch
from tiny_models import causal_lm, encoder

import hookline
from hookline import HookedModel, HooklineError
from hookline.experiments import ablation, attribution, contrast, edges, metrics, patching, paths, steering, tracing
from hookline.transformer.find_anatomy import find_anatomy

CLEAN, CORRUPTED = torch.tensor([[11, 12, 13, 14, 15]]), torch.tensor([[11, 32, 13, 34, 15]])
ANSWER, WRONG, LONGER = [7, 8, 9], [7, 18], [20, 21]
FOUR = metrics.logit_diff(ANSWER, LONGER)


@pytest.fixture(scope="module")
def model():
    return hookline.hook(causal_lm("llama"))


def log_prob(model, prompt, ids, hooks=()):
    """By running the prompt with the whole answer after it."""
    whole = torch.cat([prompt, torch.tensor([ids])], 1)
    with torch.no_grad():
        likely = model.run_with_hooks(whole, fwd_hooks=list(hooks))[0].log_softmax(-1)
    start = prompt.shape[1] - 1
    return sum(likely[start + at, each].item() for at, each in enumerate(ids))


def lead(model, prompt, hooks=()):
    return log_prob(model, prompt, ANSWER, hooks) - log_prob(model, prompt, LONGER, hooks)


@pytest.mark.parametrize(
    ("metric", "by_hand"),
    [
        (metrics.log_prob(ANSWER), lambda a, b, c: a),
        (metrics.log_prob([ANSWER]), lambda a, b, c: a),
        (metrics.log_prob(torch.tensor([ANSWER])), lambda a, b, c: a),
        (metrics.prob(ANSWER), lambda a, b, c: torch.tensor(a).exp().item()),
        (metrics.logit_diff(ANSWER, WRONG), lambda a, b, c: a - b),
        (FOUR, lambda a, b, c: a - c),
        (metrics.logit_diff(ANSWER, 7), None),
    ],
)
def test_it_is_the_log_probability_of_the_continuation(model, metric, by_hand):
    result = patching.sweep(model, CLEAN, CORRUPTED, metric, points="mlp_out", over="layer")
    for prompt, found in ((CLEAN, result.info["clean"]), (CORRUPTED, result.info["corrupted"])):
        each = [log_prob(model, prompt, ids) for ids in (ANSWER, WRONG, LONGER)]
        expected = each[0] - log_prob(model, prompt, [7]) if by_hand is None else by_hand(*each)
        assert found == pytest.approx(expected, abs=1e-4)


def test_a_sweep_is_what_hooks_one_by_one_give(model):
    name, result = (
        "blocks.1.attn.hook_z",
        patching.sweep(model, CLEAN, CORRUPTED, FOUR, points="z", over=("layer", "head")),
    )
    values = 0.0
    for ids, sign in ((ANSWER, 1), (LONGER, -1)):
        cache = model.run_with_cache(torch.cat([CLEAN, torch.tensor([ids])], 1))[1]

        def put(z, cache=cache):
            z[:, :, 2] = cache[name][:, :, 2]

        values += sign * log_prob(model, CORRUPTED, ids, [(name, put)])
    assert result.sel(layer=1, head=2).item() == pytest.approx(values, abs=1e-4)
    whole = patching.sweep(model, CLEAN, CORRUPTED, FOUR, points="resid_pre", over="layer")
    assert whole.values[0].item() == pytest.approx(whole.info["clean"], abs=1e-4)


def test_several_prompts_have_answers_of_their_own(model):
    clean, corrupted = torch.cat([CLEAN, CLEAN.flip(1)]), torch.cat([CORRUPTED, CORRUPTED.flip(1)])
    answers = metrics.logit_diff([ANSWER, [5]], [LONGER, [6, 4]])
    options = {"points": "z", "over": ("layer", "head")}
    both = patching.sweep(model, clean, corrupted, answers, per_example=True, **options)
    assert both.coords["example"] == [0, 1]
    assert both.info["clean"].shape == (2,)
    one = patching.sweep(model, CLEAN, CORRUPTED, FOUR, **options)
    other = patching.sweep(model, CLEAN.flip(1), CORRUPTED.flip(1), metrics.logit_diff([[5]], [6, 4]), **options)
    torch.testing.assert_close(both.values[..., 0], one.values, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(both.values[..., 1], other.values, atol=1e-4, rtol=1e-4)
    mean = patching.sweep(model, clean, corrupted, answers, **options)
    torch.testing.assert_close(mean.values, (one.values + other.values) / 2, atol=1e-4, rtol=1e-4)
    broken = hookline.experiments.result.Result(both.values.clone(), both.axes, both.coords, both.name, both.info)
    broken.values[1, 2] = torch.nan
    again = patching.sweep(model, clean, corrupted, answers, per_example=True, resume=broken, **options)
    torch.testing.assert_close(again.values, both.values, atol=1e-4, rtol=1e-4)
    per_row = patching.sweep(model, clean, corrupted, metrics.log_prob([5, 6]), per_example=True, **options)
    assert per_row.info["clean"].values[1].item() == pytest.approx(log_prob(model, CLEAN.flip(1), [6]), abs=1e-4)


def test_attribution_is_the_gradient_of_it(model):
    options = {"points": "z", "over": ("layer",)}  # along activations, all of a point adds up to patching it
    swept = patching.sweep(model, CLEAN, CORRUPTED, FOUR, **options)
    fine = attribution.attribution_patching(model, CLEAN, CORRUPTED, FOUR, steps=24, check=2, **options)
    torch.testing.assert_close(fine.values, swept.values, atol=1e-2, rtol=1e-2)
    assert fine.info["mean_abs_error"] < 1e-2
    assert fine.info["clean"] == pytest.approx(lead(model, CLEAN), abs=1e-4)
    scores = edges.edge_scores(model, CLEAN, CORRUPTED, FOUR, check=8)
    assert scores.info["top_correlation"] > 0.5
    assert scores.info["corrupted"] == pytest.approx(lead(model, CORRUPTED), abs=1e-4)


def test_other_experiments(model):
    def silence(z):
        z[:, :, 1] = 0

    def last(x):
        x[:, 4] = 0

    ablated = ablation.ablate(model, CLEAN, FOUR)
    hooks = [("blocks.1.attn.hook_z", silence)]
    assert ablated.sel(layer=1, head=1).item() == pytest.approx(lead(model, CLEAN, hooks), abs=1e-4)
    at_the_end = ablation.ablate(model, CLEAN, FOUR, of="mlps", positions=-1)
    hooks = [("blocks.1.hook_mlp_out", last)]
    assert at_the_end.sel(layer=1).item() == pytest.approx(lead(model, CLEAN, hooks), abs=1e-4)
    by = {"method": "resample", "data": CORRUPTED}
    resampled = ablation.ablate(model, CLEAN, FOUR, of="heads", **by)
    noised = patching.sweep(model, CLEAN, CORRUPTED, FOUR, points="z", over=("layer", "head"), direction="noise")
    torch.testing.assert_close(resampled.values, noised.values, atol=1e-4, rtol=1e-4)
    among = ablation.ablate(
        model,
        torch.cat([CLEAN, CORRUPTED]),
        metrics.logit_diff([ANSWER], [LONGER]),
        method="resample",
        per_example=True,
    )
    torch.testing.assert_close(among.values[..., 0], noised.values, atol=1e-4, rtol=1e-4)
    told = paths.path_patch(model, CLEAN, CORRUPTED, FOUR, senders=[(1, 0)])
    assert told.info["clean"] == pytest.approx(lead(model, CLEAN), abs=1e-4)
    traced = tracing.trace(model, CLEAN, [1], FOUR, samples=3, points="mlp_out")
    assert traced.info["clean"] == pytest.approx(lead(model, CLEAN), abs=1e-4)
    assert traced.info["corrupted"] != pytest.approx(traced.info["clean"], abs=1e-3)
    kept = tracing.trace(model, CLEAN, [1], FOUR, samples=2, points="resid_post", per_sample=True)
    assert kept.coords["sample"] == [0, 1]
    assert kept.shape[:2] == (len(model.blocks), 7)
    vectors = steering.contrast_vectors(model, CLEAN, CORRUPTED)
    steered = steering.sweep_layers(model, vectors, CLEAN, FOUR, coefficients=[2.0], positions=-1)
    at = vectors.point(model, 1).name

    def moved(x):
        x[:, 4] += 2.0 * vectors.fitting(model, 1)

    assert steered.sel(layer=1).values.item() == pytest.approx(lead(model, CLEAN, [(at, moved)]), abs=1e-4)


def test_whether_it_would_be_written(model):
    ids = model.generate(CLEAN, max_new_tokens=2, do_sample=False)[0, -2:].tolist()
    for answer, expected in ((ids, 1.0), ([ids[0], 3 if ids[1] != 3 else 4], 0.0)):
        found = ablation.ablate(model, CLEAN, metrics.accuracy([answer]), of="mlps")
        assert found.info["clean"] == expected
    given = [(CLEAN, CORRUPTED)]
    found = contrast.ablate_differing(model, given, answers=[ids], heads=[(0, 1), (1, 2)])
    assert found.together.values[0, 0].item() == 1.0


def test_answers_as_text():
    world = hookline.load("tinyworld")
    clean, corrupted = (f"When Mary and John went to the store, {name} gave a drink to" for name in ("John", "Mary"))
    result = patching.sweep(world, clean, corrupted, metrics.log_prob(" Mary and John"))
    tokens = world.to_tokens(clean)
    ids = world.to_tokens(" Mary and John", prepend_bos=False)[0].tolist()
    assert len(ids) > 1
    assert result.info["clean"] == pytest.approx(log_prob(world, tokens, ids), abs=1e-3)
    assert result.shape == (world.cfg.n_layers, tokens.shape[1] + len(ids) - 1)
    labels = [str(each) for each in result.coords["pos"]]
    assert "Mary" in labels[tokens.shape[1]]
    each = patching.sweep(world, clean, corrupted, metrics.logit_diff([" Mary and John"], " John"))
    assert each.info["clean"] == pytest.approx(
        log_prob(world, tokens, ids) - log_prob(world, tokens, [world.to_single_token(" John")]), abs=1e-3
    )


@pytest.mark.parametrize("kind", ["llava", "qwen2_5_vl"])
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_after_images(kind):
    module = tiny_vision.module_of(kind)
    model = HookedModel(module, None, find_anatomy(module))
    one, other = (tiny_vision.inputs_of(kind, rows=1) for _ in range(2))
    other["pixel_values"] = 0.3 - other["pixel_values"]
    result = patching.sweep(model, one, other, metrics.log_prob([70, 80, 90]), points="mlp_out", over="layer")
    given = dict(one)
    for each in (70, 80, 90):
        given["input_ids"] = torch.cat([given["input_ids"], torch.tensor([[each]])], 1)
        for name in ("attention_mask", "token_type_ids", "mm_token_type_ids"):
            if name in given:
                fill = 1 if name == "attention_mask" else 0
                given[name] = torch.cat([given[name], torch.full((1, 1), fill, dtype=given[name].dtype)], 1)
    likely = model(**given)[0].log_softmax(-1)
    start = one["input_ids"].shape[1] - 1
    expected = sum(likely[start + at, each].item() for at, each in enumerate((70, 80, 90)))
    assert result.info["clean"] == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(
    ("metric", "said"),
    [
        (metrics.rank(ANSWER), "rank"),
        (metrics.log_prob(ANSWER, pos=2), "remove pos"),
        ([metrics.log_prob(ANSWER), "kl"], "kl"),
        ({"a": metrics.log_prob(ANSWER), "mine": lambda logits: logits[:, -1, 0]}, "mine"),
        ([metrics.log_prob(ANSWER), metrics.log_prob(WRONG)], "log_prob"),
        (metrics.logit_diff(ANSWER, ANSWER), "the same in a row"),
        (metrics.log_prob([[7, 8], [9, 8]]), "2 answers for 1 prompt"),
        (metrics.log_prob([7, 10**6]), "out of range"),
    ],
)
def test_what_cannot_be_read(model, metric, said):
    with pytest.raises(HooklineError, match=said):
        patching.sweep(model, CLEAN, CORRUPTED, metric, points="mlp_out", over="layer")


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_prompts_that_would_see_the_answer():
    module = tiny_vision.module_of("paligemma")
    model = HookedModel(module, None, find_anatomy(module))
    inputs = tiny_vision.inputs_of("paligemma", rows=1)
    with pytest.raises(HooklineError, match=r"answer.*token"):
        ablation.ablate(model, inputs, metrics.log_prob([70, 80]), of="mlps")


def test_where_prompts_cannot_be_continued(model):
    bert = hookline.hook(encoder("bert", head=True))
    with pytest.raises(HooklineError, match="decoder-only"):
        patching.sweep(bert, CLEAN, CORRUPTED, metrics.log_prob(ANSWER))
    with pytest.raises(HooklineError, match="clean cache"):
        patching.sweep(model, model.run_with_cache(CLEAN)[1], CORRUPTED, metrics.log_prob(ANSWER))
    with pytest.raises(HooklineError, match="answer"):
        metrics.log_prob([[]])


def test_prompts_as_lists_of_ids(model):
    options = {"points": "z", "over": ("layer", "head")}
    lists = patching.sweep(model, CLEAN[0].tolist(), CORRUPTED[0].tolist(), FOUR, **options)
    torch.testing.assert_close(lists.values, patching.sweep(model, CLEAN, CORRUPTED, FOUR, **options).values)
    given = [CLEAN[0].tolist(), CLEAN[0, :3].tolist()]
    both = ablation.ablate(model, given, metrics.log_prob(5), per_example=True)
    short = ablation.ablate(model, CLEAN[:, :3], metrics.log_prob(5))
    torch.testing.assert_close(both.values[..., 1], short.values, atol=1e-4, rtol=1e-4)
    with pytest.raises(HooklineError, match="range"):
        ablation.ablate(model, [3, 10**6], metrics.log_prob(5))
