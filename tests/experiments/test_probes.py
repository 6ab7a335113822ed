"""Probes: against other solvers, split by prompt, controls near chance, edits with an effect, and bad input."""

import pytest
import torch
from experiment_models import tokens

import hookline
from hookline import HooklineError, token
from hookline.errors import StoreError
from hookline.experiments import probes
from hookline.experiments.probes import Probes, linear_fits, prompt_split

METHODS = ["logistic", "ridge", "mean_difference", "sparse"]
COUNTRIES = ["France", "Italy", "Germany", "Spain", "Greece", "Japan", "Russia", "China", "Egypt", "India"]
SENTENCES = ["The capital city of {} is", "In {}, the capital is", "People in {} speak", "The people of {} speak"]
TEXTS = [sentence.format(country) for sentence in SENTENCES for country in COUNTRIES]
ABOUT = ["speak" if "speak" in text else "capital" for text in TEXTS]


def problem(rows=60, width=7, classes=3, seed=0):
    """Rows of some classes with different means, and one-hot labels."""
    random = torch.Generator().manual_seed(seed)
    number = torch.arange(rows) % classes
    centers = torch.randn(classes, width, generator=random, dtype=torch.float64)
    x = centers[number] * 0.7 + torch.randn(rows, width, generator=random, dtype=torch.float64)
    x = x * torch.linspace(0.1, 20, width).double() + 3
    weight = torch.rand(rows, generator=random).double() + 0.2
    return x, weight / weight.sum(), torch.nn.functional.one_hot(number, classes).double()[None]


@pytest.mark.parametrize("width", [7, 90])
@pytest.mark.parametrize("penalty", [0.01, 1.0])
def test_logistic_is_the_minimum_that_another_solver_finds(width, penalty) -> None:
    x, share, labels = problem(width=width)
    found = linear_fits.logistic(x, share, labels, penalty)
    assert found.is_converged
    mean = share @ x
    std = (share @ (x - mean) ** 2).sqrt()
    weights = torch.zeros(3, width, dtype=torch.float64, requires_grad=True)
    bias = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    options = {"max_iter": 5000, "tolerance_grad": 1e-12, "tolerance_change": 0, "line_search_fn": "strong_wolfe"}
    optimizer = torch.optim.LBFGS([weights, bias], **options)

    def loss():
        optimizer.zero_grad()
        logits = (x - mean) / std @ weights.T + bias
        cross = torch.nn.functional.cross_entropy(logits, labels[0].argmax(1), reduction="none")
        total = share @ cross + penalty / 2 * (weights**2).sum()
        total.backward()
        return total

    optimizer.step(loss)
    expected = ((x - mean) / std @ weights.T + bias).detach().softmax(-1)
    torch.testing.assert_close(found.scores(x)[0].softmax(-1), expected, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("width", [7, 90])
def test_ridge_solves_the_normal_equations(width) -> None:
    x, share, labels = problem(width=width)
    mean = share @ x
    std = (share @ (x - mean) ** 2).sqrt()
    scaled, target = (x - mean) / std, labels[0] - share @ labels[0]
    gram = scaled.T @ (share[:, None] * scaled) + 0.3 * torch.eye(width).double()
    expected = scaled @ torch.linalg.solve(gram, scaled.T @ (share[:, None] * target)) + share @ labels[0]
    torch.testing.assert_close(linear_fits.ridge(x, share, labels, 0.3).scores(x)[0], expected)


def test_class_means_of_two_classes_meet_in_the_middle() -> None:
    x, share, labels = problem(classes=2)
    found = linear_fits.class_means(x, share, labels)
    zero, one = linear_fits.means_of(x, share, labels)[0]
    torch.testing.assert_close(found.weights[0, 1] - found.weights[0, 0], one - zero)
    low, high = found.scores(((zero + one) / 2)[None])[0, 0]
    torch.testing.assert_close(low, high)


def test_a_sparse_probe_reads_the_dimensions_that_tell() -> None:
    x, share, labels = problem(rows=200, width=20, classes=2)
    x = torch.randn(x.shape, generator=torch.Generator().manual_seed(3)).double()
    x[:, [4, 11]] += 3 * labels[0, :, :1]
    found = linear_fits.sparse(x, share, labels, 0.1, 2)
    assert (found.weights[0] != 0).any(0).nonzero().flatten().tolist() == [4, 11]


def test_constant_dimensions_are_left_out() -> None:
    x, share, labels = problem()
    x[:, 2] = 5.0
    for found in (linear_fits.ridge(x, share, labels, 0.1), linear_fits.logistic(x, share, labels, 0.1)):
        assert bool(found.weights.isfinite().all())
        assert not bool(found.weights[0, :, 2].any())


@pytest.mark.parametrize("method", METHODS)
def test_what_a_text_is_about_is_found_in_every_layer(tinyworld, method) -> None:
    found = probes.fit(tinyworld, TEXTS, ABOUT, method=method)
    assert found.axes == ("layer",)
    assert found.coords == {"layer": [0, 1, 2, 3]}
    assert found.classes == ["capital", "speak"]
    assert bool((found.values == 1).all())
    assert found.info["majority"] == 0.5
    assert float(found.info["control"].values.max()) < 0.75
    torch.testing.assert_close(found.selectivity.values, found.values - found.info["control"].values)
    assert found.direction(2).shape == (128,)
    assert float(found.direction(2).norm()) == pytest.approx(1, abs=1e-5)
    torch.testing.assert_close(found.direction(2, "capital"), -found.direction(2))


def test_held_out_accuracy_is_that_of_the_held_out_prompts(tinyworld) -> None:
    labels = [country in COUNTRIES[:5] for _ in SENTENCES for country in COUNTRIES]
    found = probes.fit(tinyworld, TEXTS, labels, layers=[1, 3], method="mean_difference")
    for at, layer in enumerate([1, 3]):
        right = []
        for number in found.held_out:
            cache = tinyworld.cache(TEXTS[number], names_filter=("resid_post", layer))
            score = found.scores(layer, cache["resid_post", layer][0, -1])
            right.append(int(score.argmax()) == int(labels[number]))
        assert float(found.values[at]) == pytest.approx(sum(right) / len(right))


def test_prompts_of_one_group_are_on_one_side(tinyworld) -> None:
    names = [country for _ in SENTENCES for country in COUNTRIES]
    found = probes.fit(tinyworld, TEXTS, [name in COUNTRIES[:5] for name in names], groups=names, layers=[0])
    out = {names[number] for number in found.held_out}
    assert out.isdisjoint(names[number] for number in range(len(names)) if number not in found.held_out)
    assert len(found.held_out) == 8


def test_equal_prompts_are_on_one_side(tinyworld) -> None:
    texts, labels = [*TEXTS, *TEXTS], [*ABOUT, *ABOUT]
    found = probes.fit(tinyworld, texts, labels, layers=[0])
    out = set(found.held_out)
    assert all((number in out) == (number + len(TEXTS) in out) for number in range(len(TEXTS)))


def test_tokens_of_a_prompt_are_on_one_side_and_prompts_count_the_same(tinyworld) -> None:
    labels = [number % 2 for number in range(len(TEXTS))]  # about nothing
    found = probes.fit(tinyworld, TEXTS, labels, pos=None, layers=[2], penalty=1e-4)
    assert float(found.info["trained"].values) > 0.7  # learned by heart
    right = []
    for number in found.held_out:
        x = tinyworld.cache(TEXTS[number])["resid_post", 2][0]
        right.append((found.scores(2, x).argmax(-1) == labels[number]).float().mean())
    assert float(found.values) == pytest.approx(float(torch.stack(right).mean()), abs=1e-6)


def test_several_classes(tinyworld) -> None:
    labels = [number // len(COUNTRIES) for number in range(len(TEXTS))]  # which sentence
    found = probes.fit(tinyworld, TEXTS, labels, layers=[1])
    assert found.classes == [0, 1, 2, 3]
    assert float(found.values) > 0.7
    assert float(found.direction(1, 2) @ found.direction(1, 3)) < 0.5
    with pytest.raises(HooklineError, match="4 classes"):
        found.direction(1)
    hooks = found.project_out(1)
    assert len(hooks) == 3
    with tinyworld.hooks(hooks):
        x = torch.stack([tinyworld.cache(text)["resid_post", 1][0, -1] for text in TEXTS])
    scores = found.scores(1, x)
    torch.testing.assert_close(scores - scores[:1], torch.zeros_like(scores), atol=1e-3, rtol=0)


def test_added_once_the_direction_moves_one_mean_to_the_other(tinyworld) -> None:
    found = probes.fit(tinyworld, TEXTS, ABOUT, layers=[2])
    ((name, edit),) = found.add(2)
    moved = found.means[0, 0] + edit.vector
    unit = found.direction(2)
    assert float(moved @ unit) == pytest.approx(float(found.means[0, 1] @ unit), abs=1e-4)
    assert name == "blocks.2.hook_resid_post"
    capital = [number for number in found.held_out if ABOUT[number] == "capital"]
    with tinyworld.hooks(found.add(2, 2.0)):
        scores = [found.scores(2, tinyworld.cache(TEXTS[at])["resid_post", 2][0, -1]) for at in capital]
    assert all(int(score.argmax()) == 1 for score in scores)


def test_a_direction_that_is_projected_out_is_gone(tinyworld) -> None:
    found = probes.fit(tinyworld, TEXTS, ABOUT, layers=[2], method="mean_difference")
    with tinyworld.hooks(found.project_out(2)):
        x = tinyworld.cache(TEXTS[0])["resid_post", 2]
        again = found.evaluate(tinyworld, TEXTS, ABOUT)
    torch.testing.assert_close(x @ found.direction(2).to(x), torch.zeros(x.shape[:2]), atol=1e-4, rtol=0)
    assert float(again.values) == 0.5


def test_directions_steer(tinyworld) -> None:
    found = probes.fit(tinyworld, TEXTS, ABOUT)
    vectors = found.directions()
    assert (vectors.layers, vectors.kind) == ([0, 1, 2, 3], "resid_post")
    torch.testing.assert_close(vectors.at(3) / vectors.at(3).norm(), found.direction(3))


@pytest.mark.parametrize("pos", [None, hookline.last, -2, [0, 2], token(" people")])
def test_a_store_gives_what_texts_give(tinyworld, tmp_path, pos) -> None:
    texts = [text for text in TEXTS if " people" in text or " capital" in text]
    labels = [number % 2 for number in range(len(texts))]
    if pos == token(" people"):
        texts = [f"The people of {country}" for country in COUNTRIES]
        labels = [number % 2 for number in range(len(texts))]
    store = hookline.harvest(tinyworld, texts, "blocks.*.hook_resid_post", tmp_path / "all", progress=False)
    here, there = (probes.fit(tinyworld, each, labels, pos=pos) for each in (texts, store))
    torch.testing.assert_close(here.values, there.values)
    torch.testing.assert_close(here.weights, there.weights, atol=1e-3, rtol=1e-3)
    assert here.held_out == there.held_out


def test_a_store_of_some_positions(tinyworld, tmp_path) -> None:
    folder = tmp_path / "last"
    hookline.harvest(tinyworld, TEXTS, "blocks.*.hook_resid_post", folder, positions=hookline.last, progress=False)
    here = probes.fit(tinyworld, TEXTS, ABOUT)
    for pos in (hookline.last, None):
        torch.testing.assert_close(probes.fit(tinyworld, folder, ABOUT, pos=pos).values, here.values)
    with pytest.raises(StoreError, match="pos=None"):
        probes.fit(tinyworld, folder, ABOUT, pos=0)


def test_a_store_of_another_model_is_refused(models, tmp_path) -> None:
    rows = tokens(0, rows=8)
    store = hookline.harvest(models["llama"], rows, "blocks.*.hook_resid_post", tmp_path / "other", progress=False)
    with pytest.raises(StoreError, match="another model"):
        probes.fit(models["gpt2"], store, [0, 1] * 4)
    with pytest.raises(HooklineError, match="8 prompts"):
        probes.fit(models["llama"], store, [0, 1] * 3)


@pytest.mark.parametrize("kind", ["gpt2", "llama", "mixtral", "bert"])
@pytest.mark.parametrize("points", ["resid_post", "mlp_out", "post"])
def test_any_architecture_and_point(models, kind, points) -> None:
    if (kind, points) == ("mixtral", "post"):
        pytest.skip("experts have no neurons of their own name")
    rows = tokens(0, rows=24)
    found = probes.fit(models[kind], rows, (rows[:, -1] > 30).tolist(), points=points, method="ridge")
    assert found.shape == (4,)
    assert found.weights.shape[:2] == (4, 2)


def test_probes_are_kept_in_files(tinyworld, tmp_path) -> None:
    found = probes.fit(tinyworld, TEXTS, ABOUT)
    found.save(tmp_path / "p.safetensors")
    again = Probes.load(tmp_path / "p.safetensors")
    assert repr(again) == repr(found)
    assert torch.equal(again.direction(1), found.direction(1))
    assert again.held_out == found.held_out
    torch.testing.assert_close(again.selectivity.values, found.selectivity.values)
    part = found.sel(layer=[1, 2])
    assert torch.equal(part.direction(1), found.direction(1))
    with pytest.raises(HooklineError, match="probes"):
        Probes.load(tmp_path / "none.safetensors")


def test_the_same_seed_gives_the_same_split_and_controls(tinyworld) -> None:
    one, two, other = (probes.fit(tinyworld, TEXTS, ABOUT, layers=[0], seed=seed) for seed in (0, 0, 1))
    assert torch.equal(one.weights, two.weights)
    assert torch.equal(one.info["control"].values, two.info["control"].values)
    assert one.held_out != other.held_out


def test_shuffled_labels_are_dealt_to_prompts() -> None:
    label, same = torch.tensor([0, 0, 0, 1, 1, 1]), [0, 0, 2, 3, 3, 5]
    dealt = prompt_split.shuffled(label, same, 20, 0)
    assert bool((dealt[:, 0] == dealt[:, 1]).all() and (dealt[:, 3] == dealt[:, 4]).all())
    assert len({tuple(row.tolist()) for row in dealt}) > 3
    assert bool((dealt[:, [0, 2, 3, 5]].sum(1) == 2).all())


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"labels": ["capital"] * len(TEXTS)}, "two classes"),
        ({"labels": ABOUT[:-1]}, "one label for each prompt"),
        ({"labels": [None] * len(TEXTS)}, "labels must be"),
        ({"labels": [1, *ABOUT[1:]]}, "labels must be"),
        ({"labels": [i / 7 for i in range(len(TEXTS))]}, "classes"),
        ({"texts": TEXTS[:2], "labels": ["a", "b"]}, "too few"),
        ({"texts": [TEXTS[0]] * 4, "labels": ["a", "a", "b", "b"]}, "too few"),
        ({"texts": [*TEXTS[:-1], ""]}, "prompt 39"),
        ({"texts": TEXTS[0], "labels": ["a"]}, "or its Path"),
        ({"pos": token(" France")}, "no position"),
        ({"points": "z"}, "one vector per token"),
        ({"points": "pattern"}, "one vector per token"),
        ({"points": ["resid_post", "mlp_out"]}, "one kind"),
        ({"method": "forest"}, "method"),
        ({"method": "ridge", "k": 3}, "sparse"),
        ({"method": "mean_difference", "penalty": 1.0}, "class means"),
        ({"method": "sparse", "k": 129}, "128 dimensions"),
        ({"penalty": 0.0}, "penalty"),
        ({"test": 1.5}, "share"),
        ({"test": 0.99}, "too few"),
        ({"groups": ["a"] * len(TEXTS)}, "too few"),
        ({"groups": ["a"]}, "groups"),
        ({"controls": 0}, "controls"),
        ({"layers": [9]}, "out of range"),
    ],
)
def test_bad_input_is_refused(tinyworld, changes, match) -> None:
    with pytest.raises(HooklineError, match=match):
        probes.fit(tinyworld, **{"texts": TEXTS, "labels": ABOUT, "layers": [0], **changes})


def test_bad_questions_are_refused(tinyworld) -> None:
    found = probes.fit(tinyworld, TEXTS, ABOUT, layers=[0])
    with pytest.raises(HooklineError, match=r"probe.*layer 2"):
        found.direction(2)
    with pytest.raises(HooklineError, match="class"):
        found.direction(0, "river")
    with pytest.raises(HooklineError, match="classes"):
        found.evaluate(tinyworld, TEXTS, ["river"] * len(TEXTS))
