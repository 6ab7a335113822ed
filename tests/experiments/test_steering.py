"""Steering: vectors against caches, sweeps against plain runs, and every token of a generation steered."""

import experiment_models
import pytest
import torch

import hookline
from hookline.demo.chapters import CAPITALS, NO_OPINION, questions
from hookline.edits import add
from hookline.errors import HooklineWarning
from hookline.experiments import metrics, steering
from hookline.positions import last

METRIC = metrics.logit_diff(5, 7)
PROMPT = "The capital of France is"


def tokens(seed, rows=2, length=7):
    return experiment_models.tokens(seed, rows, length)


@pytest.mark.parametrize("kind", ["gpt2", "llama", "mixtral"])
@pytest.mark.parametrize("points", ["resid_post", "attn_out"])
def test_vectors_are_differences_of_means(models, kind, points) -> None:
    model, positive, negative = models[kind], tokens(0, 3), tokens(1, 2)
    vectors = steering.contrast_vectors(model, positive, negative, points=points)
    a, b = (model.run_with_cache(each)[1] for each in (positive, negative))
    for layer in range(4):
        expected = a[points, layer][:, -1].mean(0) - b[points, layer][:, -1].mean(0)
        torch.testing.assert_close(vectors.at(layer), expected, atol=1e-5, rtol=1e-4)
    everywhere = steering.contrast_vectors(model, positive, negative, points=points, pos=None, layers=[2])
    expected = a[points, 2].mean((0, 1)) - b[points, 2].mean((0, 1))
    torch.testing.assert_close(everywhere.at(2), expected, atol=1e-5, rtol=1e-4)
    unit = steering.contrast_vectors(model, positive, negative, points=points, normalize=True)
    torch.testing.assert_close(unit.norms, torch.ones(4))
    torch.testing.assert_close(unit.vectors * vectors.norms[:, None], vectors.vectors)


def test_padding_does_not_count(tinyworld) -> None:
    texts = ["Mary went to the store", "John went to"]
    both = steering.contrast_vectors(tinyworld, texts, PROMPT)
    each = [steering.contrast_vectors(tinyworld, text, PROMPT) for text in texts]
    torch.testing.assert_close(both.vectors, (each[0].vectors + each[1].vectors) / 2, atol=1e-5, rtol=1e-4)


def test_vectors_are_kept_in_files(models, tmp_path) -> None:
    vectors = steering.contrast_vectors(models["gpt2"], tokens(0), tokens(1), points="attn_out", layers=[1, 3])
    vectors.save(tmp_path / "v.safetensors")
    again = steering.Directions.load(tmp_path / "v.safetensors")
    assert (again.layers, again.kind, again.info) == ([1, 3], "attn_out", vectors.info)
    assert torch.equal(again.vectors, vectors.vectors)
    assert repr(again) == repr(vectors)
    (tmp_path / "bad.safetensors").write_bytes(b"nothing")
    with pytest.raises(hookline.HooklineError, match="directions"):
        steering.Directions.load(tmp_path / "bad.safetensors")
    other = tmp_path / "other.safetensors"
    steering.sweep_layers(models["gpt2"], vectors, tokens(2), METRIC).save(other)
    with pytest.raises(hookline.HooklineError, match="directions"):
        steering.Directions.load(other)


@pytest.mark.parametrize("kind", ["gpt2", "llama", "mixtral", "gptj"])
@pytest.mark.parametrize("points", ["resid_post", "mlp_out"])
@pytest.mark.parametrize("pos", [None, -1, [1, 4], slice(2, 5)])
def test_a_sweep_is_what_plain_runs_give(models, kind, points, pos) -> None:
    model, prompts = models[kind], tokens(2)
    vectors = steering.contrast_vectors(model, tokens(0), tokens(1), points=points)
    result = steering.sweep_layers(model, vectors, prompts, METRIC, coefficients=[-1, 0, 3], positions=pos)
    assert result.axes == ("layer", "coefficient")
    where = slice(None) if pos is None else pos
    for at, layer in enumerate(range(4)):
        for column, times in enumerate((-1, 0, 3)):
            change = times * vectors.at(layer)

            def add(x, change=change):
                x[:, where] += change.to(x.device)

            logits = model.run_with_hooks(prompts, fwd_hooks=[((points, layer), add)])
            expected = (logits[:, -1, 5] - logits[:, -1, 7]).mean().item()
            assert result.values[at, column].item() == pytest.approx(expected, abs=5e-4)
    assert (result.values[:, 1] == result.info["clean"]).all()


def test_steering_away_from_opinions(tinyworld) -> None:
    """The direction from questions after an opinion to plain ones makes the truth lead, on other countries."""
    search, test = list(CAPITALS)[::2], list(CAPITALS)[1::2]
    vectors = steering.contrast_vectors(
        tinyworld, questions(search, 5, template=NO_OPINION).prompts, questions(search, 5).prompts
    )
    asked = questions(test, 5)
    lead = metrics.logit_diff([f" {each}" for each in asked.answers], [f" {each}" for each in asked.others])
    result = steering.sweep_layers(tinyworld, vectors, asked.prompts, lead, coefficients=[1, 2, 4], positions=-1)
    assert result.info["clean"] < 0 < result.sel(layer=2, coefficient=4).item()


def test_every_token_of_a_generation_is_steered(tinyworld) -> None:
    """As with the vector added in every plain run over the whole text: none of the steps is missed."""
    vectors = steering.contrast_vectors(tinyworld, "The capital of Italy is", PROMPT)
    change = 2.0 * vectors.at(2)
    found = steering.generate(tinyworld, PROMPT, vectors, 2, 2.0, max_new_tokens=5)
    ids = tinyworld.to_tokens(PROMPT)
    for _ in range(5):
        logits = tinyworld.run_with_hooks(
            ids, fwd_hooks=[("blocks.2.hook_resid_post", lambda x: x + change.to(x.device))]
        )
        ids = torch.cat([ids, logits[:, -1].argmax(-1, keepdim=True)], 1)
        if ids[0, -1] == tinyworld.tokenizer.eos_token_id:
            break
    assert found.steered == [tinyworld.tokenizer.decode(ids[0], skip_special_tokens=True)]
    assert found.plain == [tinyworld.generate(PROMPT, 5)]


def test_it_can_be_changed_to_say_something_else(tinyworld) -> None:
    vectors = steering.contrast_vectors(tinyworld, "The capital of Italy is", PROMPT)
    found = steering.generate(tinyworld, PROMPT, vectors, 3, max_new_tokens=2, pos=hookline.last)
    assert "Paris" in found.plain[0]
    assert "Rome" in found.steered[0]
    assert repr(found).count("\n") == 2


def test_new_tokens_only(tinyworld) -> None:
    """The first new token comes from the prompt, which is left alone; those after it are steered."""
    change = 50 * torch.randn(128, generator=torch.Generator().manual_seed(0))
    everywhere, new = (
        steering.generate(tinyworld, PROMPT, change, 1, max_new_tokens=4, pos=where) for where in ("all", "new")
    )
    rest = new.steered[0].removeprefix(PROMPT)
    assert rest.startswith(" Paris")
    assert new.steered != new.plain
    assert not everywhere.steered[0].removeprefix(PROMPT).startswith(" Paris")


def test_several_prompts_and_chance(tinyworld) -> None:
    texts, change = [PROMPT, "When Mary and John went to the store, John gave a drink to"], torch.zeros(128)
    greedy = steering.generate(tinyworld, texts, change, 0, max_new_tokens=3)
    assert greedy.plain == greedy.steered == tinyworld.generate(texts, 3)
    how = {"do_sample": True, "temperature": 3.0, "max_new_tokens": 8}
    drawn = steering.generate(tinyworld, texts, change, 0, **how)
    assert drawn.plain == drawn.steered
    assert steering.generate(tinyworld, texts, change, 0, seed=1, **how).plain != drawn.plain


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"layer": 9}, "layer 9|no vector"),
        ({"pos": "old"}, "pos is"),
        ({"pos": "new", "max_new_tokens": 1}, "first new token"),
        ({"vector": torch.zeros(5)}, "width 5"),
        ({"vector": torch.zeros(2, 128)}, "a vector is"),
        ({"vector": [0.0]}, "a vector is"),
        ({"vector": torch.full([128], torch.nan)}, "NaN or infinite"),
        ({"layer": "3"}, "a layer is an int"),
        ({"layer": 3.0}, "a layer is an int"),
        ({"seed": 4}, "pass do_sample=True"),
        ({"num_return_sequences": 2, "do_sample": True}, "leave out num_return_sequences"),
    ],
)
def test_bad_generations(tinyworld, how, said) -> None:
    with pytest.raises(hookline.HooklineError, match=said):
        steering.generate(tinyworld, PROMPT, **{"vector": torch.zeros(128), "layer": 1} | how)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"coefficients": []}, "a list of numbers"),
        ({"coefficients": 1}, "a list of numbers"),
        ({"layers": []}, "layers is a list"),
        ({"layers": [1, 9]}, "layer 9 is out of range"),
        ({"layers": [0, "3"]}, "a layer is an int"),
        ({"positions": 7}, "has 7"),
        ({"positions": []}, "selects nothing"),
        ({"positions": "last"}, "positions must be"),
    ],
)
def test_bad_sweeps(models, how, said) -> None:
    vectors = steering.contrast_vectors(models["gpt2"], tokens(0), tokens(1))
    with pytest.raises(hookline.HooklineError, match=said):
        steering.sweep_layers(models["gpt2"], vectors, tokens(2), METRIC, **how)


def test_bad_contrasts(models) -> None:
    model = models["gpt2"]
    for how, said in (
        ({"points": "z"}, "width of the residual stream"),
        ({"layers": [4]}, "the model has layers 0 to 3"),
        ({"layers": []}, "layers"),
    ):
        with pytest.raises(hookline.HooklineError, match=said):
            steering.contrast_vectors(model, tokens(0), tokens(1), **how)
    with pytest.raises(hookline.HooklineError, match="normalize"):
        steering.contrast_vectors(model, tokens(0), tokens(0), normalize=True)
    with pytest.raises(hookline.HooklineError, match="width 128"):
        steering.sweep_layers(model, steering.Directions(torch.zeros(1, 128), [0]), tokens(0), METRIC)
    with pytest.raises(hookline.HooklineError, match=r"tensor.*vector"):
        steering.sweep_layers(model, torch.zeros(4, 128), tokens(0), METRIC)


def test_a_difference_that_is_rounding(tinyworld) -> None:
    texts = [PROMPT, "Mary went to the store", "John went to"]
    again = [texts[2], texts[0], texts[1]]  # the same mean, summed in another order
    with pytest.raises(hookline.HooklineError, match=r"layers \[0, 1, 2, 3\].*rounding"):
        steering.contrast_vectors(tinyworld, texts, again, normalize=True)
    with pytest.warns(HooklineWarning, match="rounding"):
        vectors = steering.contrast_vectors(tinyworld, texts, again)
    assert bool((vectors.norms < 1e-4).all())


def test_negative_layers_count_from_the_last(tinyworld) -> None:
    vectors = steering.contrast_vectors(tinyworld, "The capital of Italy is", PROMPT)
    last, third = (steering.generate(tinyworld, PROMPT, vectors, layer, max_new_tokens=2) for layer in (-1, 3))
    assert last == third
    metric = metrics.logit_diff(" Rome", " Paris")
    assert steering.sweep_layers(tinyworld, vectors, PROMPT, metric, layers=[-1]).coords["layer"] == [3]


@torch.no_grad()
@pytest.mark.parametrize("damage", ["kl", "loss"])
def test_damage_is_that_of_plain_runs_on_neutral_text(tinyworld, damage) -> None:
    vectors = steering.contrast_vectors(tinyworld, "The capital of Italy is", PROMPT)
    neutral = ["Tom likes Anna and Paul likes Kate", "The capital of Norway is Oslo."]
    lead = metrics.logit_diff(" Rome", " Paris")
    swept = steering.sweep_layers(
        tinyworld, vectors, PROMPT, lead, coefficients=[1, 2], positions=[-1], neutral=neutral, damage=damage
    )
    for layer, times in ((0, 1), (3, 2)):
        change = times * vectors.at(layer)
        hooks = [(("resid_post", layer), lambda x, change=change: x + change)]
        values = []
        for text in neutral:
            before, after = tinyworld(text)[0], tinyworld.run_with_hooks(text, fwd_hooks=hooks)[0]
            a, b = before.log_softmax(-1), after.log_softmax(-1)
            ids = tinyworld.to_tokens(text)[0, 1:, None]
            rise = (a - b)[:-1].gather(-1, ids).mean()
            values.append((a.exp() * (a - b)).sum(-1).mean() if damage == "kl" else rise)
        found = swept.info["damage"].sel(layer=layer, coefficient=times).item()
        assert found == pytest.approx(float(torch.stack(values).mean()), abs=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("damage", ["kl", "loss"])
def test_damage_is_by_default_that_of_one_prediction(tinyworld, damage) -> None:
    vectors = steering.contrast_vectors(tinyworld, "The capital of Italy is", "The capital of France is")
    lead = metrics.logit_diff(" Rome", " Paris")
    swept = steering.sweep_layers(tinyworld, vectors, PROMPT, lead, coefficients=[2.0], damage=damage)
    tokens = tinyworld.to_tokens(*steering.NEUTRAL)
    plain = tinyworld(tokens)[0, -2].log_softmax(-1)
    for layer in vectors.layers:
        hook = (f"blocks.{layer}.hook_resid_post", add(vectors.at(layer), 2.0, pos=-2))
        steered = tinyworld.run_with_hooks(tokens, fwd_hooks=[hook])[0, -2].log_softmax(-1)
        rise = (plain - steered)[tokens[0, -1]]
        expected = (plain.exp() * (plain - steered)).sum() if damage == "kl" else rise
        assert swept.info["damage"].sel(layer=layer).item() == pytest.approx(float(expected), abs=1e-4, rel=1e-4)


def test_the_best_cell_damages_least(tinyworld) -> None:
    vectors = steering.contrast_vectors(tinyworld, "The capital of Italy is", PROMPT)
    lead = metrics.logit_diff(" Rome", " Paris")
    swept = steering.sweep_layers(tinyworld, vectors, PROMPT, lead, positions=last, per_example=True)
    damage = swept.info["damage"]
    (cell,) = steering.best(swept, most_damage=0.3, by="value")
    assert damage.sel(**cell.labels).item() <= 0.3 < damage.sel(layer=3, coefficient=2.0).item()
    allowed = swept.mean("example").values[damage.values <= 0.3]
    assert cell.value == pytest.approx(float(allowed.max()))
    with pytest.raises(hookline.HooklineError, match="smaller coefficients"):
        steering.best(swept, most_damage=1e-9)
    bare = steering.sweep_layers(tinyworld, vectors, PROMPT, lead, neutral=None)
    with pytest.raises(hookline.HooklineError, match="neutral"):
        steering.best(bare, most_damage=1.0)
    with pytest.raises(hookline.HooklineError, match="damage is"):
        steering.sweep_layers(tinyworld, vectors, PROMPT, lead, damage="perplexity")
