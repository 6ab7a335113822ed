"""Kinds of autoencoders, checkpoints, and several points at once."""

import pytest
import torch
from tiny_models import causal_lm

import hookline
from hookline import HooklineError
from hookline.sae import SparseAutoencoder, train, train_many
from hookline.sae.kinds import START, WIDTH, _Jump
from hookline.sae.sources import source_of

KINDS = {
    "l1": {"l1": 1.0},
    "topk": {"k": 3},
    "batchtopk": {"k": 3},
    "matryoshka": {"k": 3, "levels": [24, 32]},
    "jumprelu": {"l0": 0.5},
    "gated": {"l1": 2.0},
}
FOUND = {"matryoshka": 0.6, "gated": 0.7}
"""The fraction of directions that is found, if not 0.8: the first 24 features of a matryoshka share them among them."""
FILES = {"l1": "standard", "topk": "topk", "gated": "gated"}


def quick(data, kind="topk", **options):
    return train(data, kind=kind, **({"d_sae": 32, "steps": 60, "batch_size": 128, "progress": False} | options))


def same(one, two) -> bool:
    pairs = zip(one.sae.state_dict().items(), two.sae.state_dict().items(), strict=True)
    equal = all(name == other and torch.equal(x, y) for (name, x), (other, y) in pairs)
    return equal and (one.history, one.steps, one.resampled) == (two.history, two.steps, two.resampled)


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_finds_what_is_there(truth, activations, kind, tmp_path) -> None:
    training = quick(activations, kind, steps=800, lr=6e-3, **KINDS[kind])
    sae = training.sae
    near = (truth @ sae.W_dec.detach().T).max(1).values
    assert (near > 0.9).float().mean() > FOUND.get(kind, 0.8), near
    assert training.last.explained_variance > 0.85
    assert training.last.l0 < 5
    x = activations[:500]
    missed = (sae(x).detach() - x).pow(2).sum() / (x - x.mean(0)).pow(2).sum()
    assert 1 - float(missed) == pytest.approx(training.last.explained_variance, abs=0.06), "in the units of the data"
    assert sae.cfg.architecture == FILES.get(kind, "jumprelu")
    assert sae.cfg.metadata["trained_as"] == kind
    sae.save(tmp_path)
    again = SparseAutoencoder.load(tmp_path)
    assert torch.equal(again.encode(x), sae.encode(x))
    assert all(parameter.requires_grad for parameter in sae.parameters())


@pytest.mark.parametrize("kind", ["batchtopk", "matryoshka"])
def test_k_per_row_on_average(activations, kind) -> None:
    training = quick(activations, kind, steps=400, k=2)
    counts = (training.sae.encode(activations) > 0).sum(1).float()
    assert float(counts.mean()) == pytest.approx(2, abs=0.5)
    assert float(counts.max()) > 2, "rows differ"


def test_the_first_features_of_a_matryoshka_reconstruct_more(activations) -> None:
    def first(kind, **options) -> float:
        sae = quick(activations, kind, steps=500, k=3, lr=3e-3, **options).sae
        features = sae.encode(activations).detach()
        features[:, 8:] = 0
        error = (sae.decode(features) - activations).detach().pow(2).sum()
        return 1 - float(error / (activations - activations.mean(0)).pow(2).sum())

    assert first("matryoshka", levels=[8, 32]) > first("batchtopk") + 0.05


def test_a_higher_price_gives_fewer_features(activations) -> None:
    for kind, price in (("jumprelu", "l0"), ("gated", "l1")):
        cheap, dear = (quick(activations, kind, steps=400, **{price: each}) for each in (0.05, 3.0))
        assert dear.last.l0 < cheap.last.l0


def test_gradients_of_thresholds_are_estimated_near_them() -> None:
    before = torch.tensor([[START, START + WIDTH, START + 0.4 * WIDTH]], requires_grad=True)
    threshold = torch.full((3,), START, requires_grad=True)
    values, count = _Jump.apply(before, threshold)
    assert count.tolist() == [[0, 1, 1]]
    (2 * values.sum() + 5 * count.sum()).backward()
    assert before.grad.tolist() == [[0, 2, 2]]
    slope = -(START * 2 + 5) / WIDTH
    assert threshold.grad.tolist() == pytest.approx([slope, 0, slope])


@pytest.mark.on_cpu(reason="the interrupted training gets batches, and a GPU sums their scale in another order")
@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_training_has_the_same_bits(activations, kind, tmp_path) -> None:
    options = {"d_sae": 48, "resample_every": 12, "log_every": 7} | {
        name: each for name, each in KINDS[kind].items() if name != "levels"
    }
    whole = quick(activations, kind, **options)

    def interrupted():
        count = 0
        while True:
            yield from source_of(activations, None, 128, 0).epoch(count)
            count += 1

    file = tmp_path / "run.safetensors"
    seen = 0

    def stopping():
        nonlocal seen
        for batch in interrupted():
            if seen == 35:
                raise TimeoutError
            seen += 1
            yield batch

    with pytest.raises(TimeoutError):
        quick(stopping(), kind, batch_size=None, checkpoint=file, checkpoint_every=10, **options)
    resumed = quick(activations, kind, checkpoint=file, checkpoint_every=10, **options)
    assert same(resumed, whole)
    again = quick(activations, kind, checkpoint=file, checkpoint_every=10, **options)
    assert same(again, whole), "a finished training is read from its file"


def test_a_checkpoint_of_another_training_is_refused(activations, tmp_path) -> None:
    file = tmp_path / "run.safetensors"
    quick(activations, checkpoint=file, k=3)
    with pytest.raises(HooklineError, match=r"lr is 0\.01.*0\.001"):
        quick(activations, checkpoint=file, k=3, lr=0.01)
    for other in (activations + 1, [*activations.split(128)[:7]]):  # also if the training is finished
        size = {} if isinstance(other, torch.Tensor) else {"batch_size": None}
        with pytest.raises(HooklineError, match="other data"):
            quick(other, checkpoint=file, k=3, **size)
    with pytest.raises(HooklineError, match="fewer batches"):
        quick(iter(activations.split(128)[:7]), checkpoint=file, k=3, batch_size=None)
    with pytest.raises(HooklineError, match="checkpoint="):
        quick(activations, checkpoint_every=5)
    part = tmp_path / "part.safetensors"

    def some():
        yield from activations.split(128)[:20]
        raise RuntimeError("the power fails")

    with pytest.raises(RuntimeError, match="power"):
        quick(some(), batch_size=None, checkpoint=part, checkpoint_every=10)
    with pytest.raises(HooklineError, match="other data"):
        quick([*(activations + 1).split(128)], batch_size=None, checkpoint=part, checkpoint_every=10)
    part.write_bytes(part.read_bytes()[:-40] + b"x" * 40)
    with pytest.raises(HooklineError, match="damaged"):
        quick([*activations.split(128)], batch_size=None, checkpoint=part)


def test_several_points_from_one_pass(tmp_path) -> None:
    model = hookline.hook(causal_lm("gpt2"))
    tokens = torch.randint(0, 60, (40, 8), generator=torch.Generator().manual_seed(0))
    store = hookline.harvest(
        model, tokens, ["blocks.*.hook_resid_post", "blocks.1.attn.hook_z"], tmp_path / "s", progress=False
    )
    options = {"d_sae": 24, "steps": 30, "batch_size": 64, "kind": "batchtopk", "k": 2, "progress": False}
    found = train_many(store, **options)
    assert list(found) == list(store.points)
    for name, training in found.items():
        assert same(training, train(store, name, **options))
        assert training.sae.cfg.hook_name == name
    folder = tmp_path / "checkpoints"
    train_many(store, "blocks.*.hook_resid_post", checkpoint=folder, **options)
    (folder / "blocks.2.hook_resid_post.safetensors").unlink()  # as after an interruption between two files
    again = train_many(store, "blocks.*.hook_resid_post", checkpoint=folder, **options)
    assert all(same(again[name], found[name]) for name in again)
    with pytest.raises(HooklineError, match="no option"):
        train_many(store, **options, price=3)
    with pytest.raises(HooklineError, match="store"):
        train_many(tokens.float(), **options)


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("jumprelu", {"l1": 1.0}, "l1 does not apply"),
        ("batchtopk", {"levels": [8, 32]}, "levels does not apply"),
        ("batchtopk", {"k": 33}, "k from 1"),
        ("matryoshka", {"levels": [8, 16]}, "levels must be"),
        ("matryoshka", {"levels": [16, 8, 32]}, "levels must be"),
        ("matryoshka", {"levels": 16}, "levels must be a list"),
        ("jumprelu", {"l0": -1.0}, "l0 must be"),
        ("l1", {"l1": "2"}, "l1 must be"),
        ("topk", {"k": "2"}, "k must be"),
        ("topk", {"seed": "a"}, "seed must be"),
    ],
)
def test_options_that_make_no_sense(activations, kind, options, message) -> None:
    with pytest.raises(HooklineError, match=message):
        quick(activations, kind, **options)
