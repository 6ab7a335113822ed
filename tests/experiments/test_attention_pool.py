"""Probes that pool over positions: a planted token, a naive implementation, monitors of prefixes, files, bad input."""

import pytest
import torch
from backends import Counting, needs_graphs
from transformers import LlamaConfig, LlamaForCausalLM

import hookline
from hookline import HooklineError
from hookline.edits import scale
from hookline.experiments import probes
from hookline.experiments.probes import Probes, attention_pool, linear_fits

RESID = "blocks.{}.hook_resid_post"


@pytest.fixture(scope="module")
def model():
    sizes = {"hidden_size": 32, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    config = LlamaConfig(**sizes, vocab_size=64, pad_token_id=0, eos_token_id=None)
    return hookline.hook(LlamaForCausalLM(config).eval())


def planted(texts: int, seed: int = 0) -> tuple[list[torch.Tensor], list[int], list[int]]:
    """Random tokens with one of two telling tokens at a random place; which of them (the label), and the place."""
    random = torch.Generator().manual_seed(seed)
    ids, labels, places = [], [number % 2 for number in range(texts)], []
    for label in labels:
        length = int(torch.randint(30, 60, (), generator=random))
        places.append(int(torch.randint(0, length - 2, (), generator=random)))
        ids.append(torch.randint(3, 64, (length,), generator=random))
        ids[-1][places[-1]] = 1 + label
    return ids, labels, places


@pytest.fixture(scope="module")
def fitted(model) -> Probes:
    texts, labels, _ = planted(120)
    return probes.fit(model, texts, labels, pool="attention")


def test_one_token_at_a_random_position_is_read(model, fitted) -> None:
    texts, labels, places = planted(120)
    assert float(fitted.values.min()) >= 0.95
    assert float((fitted.info["control"].values - 0.5).abs().max()) < 0.15
    assert float(probes.fit(model, texts, labels).values.max()) < 0.7, "at the last position"
    assert float(probes.fit(model, texts, labels, pos=None).values.max()) < 0.7, "each position by itself"
    x = torch.stack([model.cache(text[None])[RESID.format(0)][0].mean(0) for text in texts]).double()
    is_test = torch.zeros(120, dtype=torch.bool)
    is_test[fitted.held_out] = True
    share = torch.full((90,), 1 / 90).double()
    indicators = torch.nn.functional.one_hot(torch.tensor(labels)).double()
    mean = linear_fits.logistic(x[~is_test], share, indicators[None, ~is_test], 0.1).scores(x[is_test])[0]
    right = mean.argmax(-1) == torch.tensor(labels)[is_test]
    assert float(right.double().mean()) < 0.8, "the mean of all positions"
    looks_at, weights = [], []
    for number in fitted.held_out:
        activation = model.cache(texts[number][None])[RESID.format(0)]
        weight = fitted.attention(0, activation)[0]
        weights.append(float(weight[places[number]]))
        looks_at.append(int(weight.argmax()) == places[number])
    assert sum(weights) / len(weights) > 0.7, "of some 45 positions"
    assert sum(looks_at) / len(looks_at) >= 0.95


def test_a_fit_is_repeated_and_stays_in_the_seed(model, fitted) -> None:
    texts, labels, _ = planted(120)
    again = probes.fit(model, texts, labels, pool="attention", layers=[1])
    assert torch.equal(again.queries[0], fitted.queries[1])
    assert torch.equal(again.weights[0], fitted.weights[1])
    other = probes.fit(model, texts, labels, pool="attention", layers=[1], seed=3, controls=1)
    assert other.held_out != fitted.held_out
    assert fitted.info["pool"] == "attention"


def naive(x, text, labels, penalty):
    """The same objective, text by text, with the gradients and the Adam of torch."""
    mean, std = x.mean(0), x.std(0, correction=0)
    rows = ((x - mean) / std).float()
    query, weight = torch.zeros(x.shape[1], requires_grad=True), torch.zeros(x.shape[1], 3, requires_grad=True)
    bias = torch.zeros(3, requires_grad=True)
    optimizer = torch.optim.Adam([query, weight, bias], lr=0.05, betas=(0.9, 0.99), eps=1e-6)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 200)
    for _ in range(200):
        optimizer.zero_grad()
        total = penalty / 2 * (query.square().sum() + weight.square().sum())
        for number, label in enumerate(labels.argmax(-1)):
            tokens = rows[text == number]
            pooled = (tokens @ query).softmax(0) @ tokens
            total = total + torch.nn.functional.cross_entropy(pooled @ weight + bias, label) / len(labels)
        total.backward()
        optimizer.step()
        schedule.step()
    return query / std, weight.T / std, bias - (weight.T / std) @ mean


def test_it_is_the_naive_implementation() -> None:
    random = torch.Generator().manual_seed(0)
    text = torch.tensor([0, 1, 1, 2, 2, 2, 3, 3, 3, 3, 4, 4, 5, 5, 5, 0, 2])  # in any order
    x = torch.randn(17, 5, generator=random, dtype=torch.float64) * torch.tensor([1.0, 3, 0.2, 5, 1]) + 2
    labels = torch.nn.functional.one_hot(torch.tensor([[0, 1, 2, 0, 1, 2], [2, 1, 0, 1, 0, 2]]), 3).double()
    found = attention_pool.attention_pool(x, text, labels, 0.05)
    for problem in range(2):
        query, weights, bias = naive(x, text, labels[problem], 0.05)
        torch.testing.assert_close(found.queries[problem], query.double(), atol=1e-3, rtol=1e-2)
        torch.testing.assert_close(found.linear.weights[problem], weights.double(), atol=1e-3, rtol=1e-2)
        torch.testing.assert_close(found.linear.bias[problem], bias.double(), atol=1e-3, rtol=1e-2)
        for number in range(6):
            tokens = x[text == number]
            pooled = (tokens @ found.queries[problem]).softmax(0) @ tokens
            expected = pooled @ found.linear.weights[problem].T + found.linear.bias[problem]
            torch.testing.assert_close(found.scores(x, text)[problem, number], expected)


def test_scores_predictions_and_accuracy_agree(model, fitted) -> None:
    texts, labels, _ = planted(30, seed=9)
    lengths = [len(text) for text in texts]
    ids = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True)
    mask = torch.arange(ids.shape[1]) < torch.tensor(lengths)[:, None]
    x = model.cache(ids, attention_mask=mask.long())[RESID.format(1)]
    scores = fitted.scores(1, x, mask)
    assert scores.shape == (30, 2)
    for number, text in enumerate(texts):
        alone = fitted.scores(1, model.cache(text[None])[RESID.format(1)])[0]
        torch.testing.assert_close(scores[number], alone, atol=1e-4, rtol=1e-4)
    assert fitted.attention(1, x, mask)[~mask].eq(0).all()
    predicted = fitted.predict(model, texts, 1)
    assert predicted == scores.argmax(-1).tolist()
    right = sum(map(int.__eq__, predicted, labels)) / 30
    assert float(fitted.evaluate(model, texts, labels).values[1]) == pytest.approx(right)
    plain = probes.fit(model, texts, labels, pos=None, layers=[1])
    decided = [int(plain.scores(1, model.cache(text[None])[RESID.format(1)][0]).mean(0).argmax()) for text in texts]
    assert plain.predict(model, texts, pos=None) == decided


def test_positions_and_stores(model, tmp_path) -> None:
    texts, labels, _ = planted(40)
    options = {"pool": "attention", "layers": [0]}
    of_two = probes.fit(model, texts, labels, pos=slice(-2, None), **options)
    assert float(of_two.values) < 0.9, "the telling token is before them"
    store = hookline.harvest(model, texts, RESID.format(0), tmp_path / "store", progress=False)
    of_texts, of_store = (probes.fit(model, given, labels, **options) for given in (texts, store))
    torch.testing.assert_close(of_store.queries, of_texts.queries, atol=1e-3, rtol=1e-2)
    assert torch.equal(of_store.values, of_texts.values)


def test_saved_and_loaded(model, fitted, tmp_path) -> None:
    fitted.save(tmp_path / "probes.safetensors")
    loaded = Probes.load(tmp_path / "probes.safetensors")
    assert torch.equal(loaded.queries, fitted.queries)
    assert torch.equal(loaded.direction(1), fitted.direction(1))
    assert loaded.predict(model, planted(6)[0]) == fitted.predict(model, planted(6)[0])


def test_removed_directions_leave_nothing_to_read(model, fitted) -> None:
    texts, labels, _ = planted(30, seed=9)
    with model.hooks(fitted.project_out(1)):
        assert float(fitted.evaluate(model, texts, labels).values[1]) == 0.5
    scale_of_one = fitted.directions().at(1).norm()
    assert bool(scale_of_one > 0)


def check_monitor(model, fitted) -> None:
    """The score at each token is that of the text that ends there; a bound acts from the next token on."""
    texts, _, _ = planted(2, seed=4)
    short, long = sorted(texts, key=len)
    pad = len(long) - len(short)
    ids = torch.stack([torch.nn.functional.pad(short, (pad, 0)), long])
    mask = torch.stack([torch.nn.functional.pad(torch.ones_like(short), (pad, 0)), torch.ones_like(long)])
    monitor = probes.Monitor(fitted, 1)
    options = {"names_filter": RESID.format(1), "do_sample": False, "max_new_tokens": 5, "monitors": [monitor]}
    _, cache = model.generate_with_cache(ids, attention_mask=mask, **options)
    scores = monitor.scores
    assert scores[0, :pad].isnan().all()
    for row, start in ((0, pad), (1, 0)):
        for end in range(start, scores.shape[1]):
            two = fitted.scores(1, cache[RESID.format(1)][row, start : end + 1])
            assert float(scores[row, end]) == pytest.approx(float(two[1] - two[0]), abs=1e-3)
    bound = monitor.above(float(scores[1].max()) - 1e-3)
    first = int((scores[1] > bound.bound).nonzero()[0])
    with model.hooks([(RESID.format(0), scale(1.0, on=bound))]) as run:
        model.generate_with_cache(ids[1:], **options)
    assert run.acted == {RESID.format(0): dict.fromkeys(range(max(len(long), first + 1), scores.shape[1]), 1)}


def test_a_monitor_scores_the_text_so_far(model, fitted) -> None:
    check_monitor(model, fitted)


@needs_graphs
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's compiler's own imports
def test_a_monitor_scores_the_text_so_far_in_a_graph(model, fitted) -> None:
    torch._dynamo.reset()
    with model.compiled(backend=Counting()) as runs:
        check_monitor(model, fitted)
        check_monitor(model, fitted)
        assert runs.graphs
        assert not runs.reasons, runs.reasons
    torch._dynamo.reset()


def test_a_running_pool_does_not_underflow() -> None:
    values = torch.randn(1, 6, 2, generator=torch.Generator().manual_seed(0))
    values[..., 1] = torch.tensor([-2000.0, -1999.0, 3000.0, -5.0, 3001.0, 9.0])
    is_text = torch.tensor([[False, True, True, True, True, True]])
    pool = attention_pool.RunningPool()
    scores = torch.cat([pool.scores(values[:, :2], is_text[:, :2]), pool.scores(values[:, 2:], is_text[:, 2:])], 1)
    assert scores[0, 0].isnan()
    for end in range(2, 7):
        tokens, logits = values[0, 1:end].double().unbind(-1)
        assert float(scores[0, end - 1]) == pytest.approx(float(logits.softmax(0) @ tokens), abs=1e-6)


def test_what_is_refused(model, fitted) -> None:
    texts, labels, _ = planted(20)
    for options in ({"pool": "mean"}, {"pool": "attention", "method": "ridge"}, {"pool": "attention", "k": 3}):
        with pytest.raises(HooklineError, match=r"pool|k is"):
            probes.fit(model, texts, labels, **options)
    plain = probes.fit(model, texts, labels, layers=[0])
    with pytest.raises(HooklineError, match="mask"):
        plain.scores(0, torch.zeros(1, 3, 32), torch.ones(1, 3))
    with pytest.raises(HooklineError, match='pool="attention"'):
        plain.attention(0, torch.zeros(3, 32))
    with pytest.raises(HooklineError, match="of layer"):
        fitted.predict(model, texts, 7)
