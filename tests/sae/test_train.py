"""Training: what is known to be there is found; the same seed gives the same; and every option takes effect."""

import devices
import pytest
import torch
from tiny_models import causal_lm

import hookline
from hookline import HooklineError
from hookline.errors import HooklineWarning
from hookline.sae import SparseAutoencoder, Training, train
from hookline.sae.dead_features import resample
from hookline.sae.sources import source_of
from hookline.sae.train import Trainer, TrainingPlan

POINT = "blocks.1.hook_resid_post"


def quick(data, **options) -> Training:
    kind = {"kind": "topk", "k": 3} if "kind" not in options else {}
    return train(data, **({"d_sae": 32, "steps": 60, "batch_size": 128, "progress": False} | kind | options))


@pytest.mark.parametrize("options", [{"kind": "topk", "k": 3}, {"kind": "l1", "l1": 1.0}])
def test_directions_that_are_there_are_found(truth, activations, options) -> None:
    training = quick(activations, steps=1500, lr=3e-3, **options)
    near = (truth @ training.sae.W_dec.detach().T).max(1).values
    assert (near > 0.9).float().mean() > 0.85, near
    assert training.last.explained_variance > 0.85
    assert training.last.l0 < 5
    x = activations[:500]
    missed = (training.sae(x).detach() - x).pow(2).sum() / (x - x.mean(0)).pow(2).sum()
    assert 1 - float(missed) == pytest.approx(training.last.explained_variance, abs=0.05), "in the units of the data"


def test_the_same_seed_gives_the_same(activations) -> None:
    torch.manual_seed(5)
    first = quick(activations, seed=4)
    torch.manual_seed(6)
    again, other = quick(activations, seed=4), quick(activations, seed=5)
    assert first.history == again.history
    assert all(torch.equal(a, b) for a, b in zip(first.sae.parameters(), again.sae.parameters(), strict=True))
    assert not torch.equal(first.sae.W_dec, other.sae.W_dec)


def test_it_leaves_the_random_numbers_of_others_alone(activations) -> None:
    torch.manual_seed(0)
    wanted = torch.rand(3)
    torch.manual_seed(0)
    quick(activations)
    assert torch.equal(torch.rand(3), wanted)


def test_directions_have_the_norm_1_and_k_are_active(activations) -> None:
    training = quick(activations, k=4)
    torch.testing.assert_close(training.sae.W_dec.norm(dim=1), torch.ones(32))
    assert ((training.sae.encode(activations) > 0).sum(1) <= 4).all()
    assert training.last.l0 == pytest.approx(4, abs=0.5)


def test_scaled_activations_give_the_same_features_scaled(activations) -> None:
    small, large = quick(activations), quick(activations * 64)
    assert [each.loss for each in small.history] == pytest.approx([each.loss for each in large.history], rel=1e-3)
    torch.testing.assert_close(
        small.sae.encode(activations) * 64, large.sae.encode(activations * 64), rtol=1e-3, atol=1e-2
    )


def test_a_higher_price_gives_fewer_features(activations) -> None:
    cheap, dear = (quick(activations, kind="l1", l1=price, steps=300) for price in (0.1, 3.0))
    assert dear.last.l0 < cheap.last.l0
    assert dear.last.explained_variance < cheap.last.explained_variance


@pytest.mark.on_cpu(reason="how much it helps depends on rounding")
def test_dead_features_are_resampled(activations) -> None:
    def dead_from_the_start(every) -> Training:
        return quick(activations, k=1, d_sae=256, steps=400, resample_every=every)

    left, helped = dead_from_the_start(0), dead_from_the_start(40)
    assert left.resampled == 0
    assert helped.resampled > 0
    assert helped.last.explained_variance > left.last.explained_variance


def test_from_a_store(tmp_path) -> None:
    model = hookline.hook(causal_lm("gpt2"))
    tokens = torch.randint(0, 60, (40, 8), generator=torch.Generator().manual_seed(0))
    z = "blocks.1.attn.hook_z"
    store = hookline.harvest(model, tokens, [POINT, z], tmp_path / "store", progress=False)
    training = quick(store, point=POINT, batch_size=64, device=devices.DEVICE)
    cfg = training.sae.cfg
    assert (cfg.hook_name, cfg.d_in, cfg.metadata["model_name"]) == (POINT, model.cfg.d_model, model.cfg.model_name)
    by_path = quick(str(tmp_path / "store"), point=POINT, batch_size=64, device=devices.DEVICE)
    assert torch.equal(by_path.sae.W_dec, training.sae.W_dec)
    assert torch.equal(model.run_with_hooks(tokens, fwd_hooks=[training.sae.spliced()]), model(tokens)), (
        "it knows where it belongs"
    )
    of_heads = quick(store, point=z, device=devices.DEVICE).sae
    assert of_heads.cfg.reshape_activations == "hook_z"
    assert of_heads.d_in == model.cfg.n_heads * model.cfg.d_head
    model.run_with_hooks(tokens, fwd_hooks=[of_heads.spliced()])
    training.sae.save(tmp_path / "sae")
    assert torch.equal(SparseAutoencoder.load(tmp_path / "sae").W_enc, training.sae.W_enc)
    with pytest.raises(HooklineError, match=r"trained.*point"):
        quick(store)
    with pytest.raises(HooklineError, match=r"point.*named"):
        quick(store, point="blocks.0.hook_mlp_out")


def test_from_batches_that_are_given(activations) -> None:
    batches = list(activations.split(100))
    training = quick(batches, batch_size=None)
    assert training.steps == 60, "a list is gone through again"
    assert training.sae.cfg.hook_name is None
    as_text = quick([batch.view(4, 25, 16) for batch in batches], batch_size=None)
    assert torch.equal(as_text.sae.W_dec, training.sae.W_dec), "axes before the last are rows"
    once = quick((batch for batch in batches), batch_size=None, steps=40)
    assert once.steps == 40
    with pytest.warns(HooklineWarning, match="40 of 60 steps"):
        assert quick((batch for batch in batches), batch_size=None).steps == 40
    with pytest.raises(HooklineError, match="batch_size"):
        quick(batches, batch_size=10)
    with pytest.raises(HooklineError, match="width 15"):
        quick([batches[0], batches[0][:, :15]], batch_size=None)


def test_ctrl_c_gives_what_is_trained_so_far(activations) -> None:
    def batches():
        yield from activations.split(100)[:25]
        raise KeyboardInterrupt

    training = quick(batches(), batch_size=None, steps=1000, device=devices.DEVICE)
    assert (training.steps, training.is_interrupted) == (25, True)
    assert training.history[-1].step == 25
    assert "stopped by Ctrl-C after 25 steps" in repr(training)
    x = activations[:100]
    before = (x - x.mean(0)).pow(2).sum()
    assert (training.sae(x) - x).pow(2).sum() < before, "in the units of the data"

    def nothing():
        raise KeyboardInterrupt
        yield

    with pytest.raises(KeyboardInterrupt):
        quick(nothing(), batch_size=None)


def test_history_and_how_it_prints(activations) -> None:
    training = quick(activations, log_every=20, steps=50)
    assert [each.step for each in training.history] == [20, 40, 50]
    lines = repr(training).splitlines()
    assert lines[0] == "topk, k=3, 16 → 32; after 50 steps, " + f"{training.resampled} features resampled"
    assert lines[1].split() == ["step", "loss", "l0", "explained_variance", "dead"]
    assert len(lines) == 5
    assert training.history[-1].loss < training.history[0].loss
    assert len(repr(quick(activations, log_every=1)).splitlines()) == 12


def test_stored_dtypes_are_trained_on_in_full_precision(activations) -> None:
    assert quick(activations.bfloat16()).sae.dtype == torch.float32
    assert quick(activations.double()).sae.dtype == torch.float32


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "relu"}, "kind must be one of 'l1', .*'gated', not 'relu'"),
        ({"l1": 2.0}, 'l1 does not apply to kind="topk"'),
        ({"kind": "l1", "k": 3}, 'k does not apply to kind="l1"'),
        ({"k": 33}, "needs k from 1 to d_sae"),
        ({"d_sae": 0}, "d_sae"),
        ({"steps": 0}, "steps"),
        ({"lr": float("nan")}, "lr"),
        ({"warm_up": 2}, "warm_up"),
        ({"decay": -1}, "decay"),
        ({"resample_every": -3}, "resample_every"),
        ({"log_every": -3}, "log_every"),
        ({"batch_size": 0}, "batch_size"),
        ({"lr": 1e30}, "the loss is"),
    ],
)
def test_options_that_make_no_sense(activations, options, message) -> None:
    with pytest.raises(HooklineError, match=message):
        quick(activations, **options)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (torch.randn(16), "float tensor"),
        (torch.randn(0, 16), "no activations"),
        (torch.ones(5, 16, dtype=torch.long), "float tensor"),
        (torch.zeros(50, 16), "mean norm .*0.0"),
        (torch.full((50, 16), float("nan")), "mean norm .*nan"),
        ([], "there are no batches"),
        ([3], "float tensor"),
        (3, "not 3"),
    ],
)
def test_data_that_is_none(data, message) -> None:
    size = {} if isinstance(data, torch.Tensor) else {"batch_size": None}
    with pytest.raises(HooklineError, match=message):
        quick(data, **size)


def test_the_price_and_the_learning_rate_rise_and_fall(activations) -> None:
    plan = TrainingPlan("l1", 32, 4.0, 1, 100, 1e-2, 0.1, 0.2, 0.5, 0, 1, 0)
    rates, prices = [plan.rate(step) for step in range(100)], [plan.l1_coefficient(step) for step in range(100)]
    assert rates[0] == pytest.approx(1e-3)
    assert rates[9:80] == [1e-2] * 71
    assert rates[90] == pytest.approx(5e-3)
    assert rates[99] == pytest.approx(5e-4)
    assert prices[0] == pytest.approx(0.08)
    assert prices[49:] == [4.0] * 51
    at_once, later = (quick(activations, kind="l1", l1=4.0, l1_warm_up=share, log_every=1) for share in (0, 1))
    assert at_once.history[0].loss > 2 * later.history[0].loss


def test_a_step_of_the_optimizer_does_not_push_along_the_directions(activations) -> None:
    trainer = Trainer(
        source_of(activations, None, 128, 0), TrainingPlan("topk", 32, 0, 3, 9, 0.01, 0, 0, 0, 0, 1, 0), devices.DEVICE
    )
    before = trainer.sae.W_dec.detach().clone()
    trainer._step(activations[:128])
    assert trainer.sae.W_dec.grad.abs().max() > 1
    assert (trainer.sae.W_dec.grad * before).sum(1).abs().max() < 1e-3


def test_a_resampled_feature_starts_anew(activations) -> None:
    trainer = Trainer(
        source_of(activations, None, 128, 0), TrainingPlan("topk", 32, 0, 3, 9, 0.01, 0, 0, 0, 5, 1, 0), devices.DEVICE
    )
    sae, x = trainer.sae, activations[:128]
    trainer._step(x)
    trainer.dead_features.steps[[4, 7]] = 5
    others = [i for i in range(32) if i not in (4, 7)]
    before = {name: value.clone() for name, value in sae.state_dict().items()}
    moments = trainer.optimizer.state[sae.W_dec]["exp_avg"].clone()
    missed = torch.nn.functional.normalize((x - sae(x)).detach(), dim=1)
    assert resample(sae, trainer.optimizer, trainer.dead_features, x, trainer.random) == 2
    assert (sae.W_dec[[4, 7]] @ missed.T).max(1).values.tolist() == pytest.approx([1, 1], abs=1e-4)
    assert torch.equal(sae.W_dec[others], before["W_dec"][others])
    assert torch.equal(sae.W_enc[:, others], before["W_enc"][:, others])
    norm = float(before["W_enc"][:, others].norm(dim=0).mean())
    assert sae.W_enc[:, 4].detach().norm().item() == pytest.approx(0.2 * norm, rel=1e-4)
    assert not sae.b_enc[[4, 7]].any()
    kept = trainer.optimizer.state[sae.W_dec]["exp_avg"]
    assert not kept[[4, 7]].any()
    assert torch.equal(kept[others], moments[others])
    assert trainer.dead_features.steps[[4, 7]].tolist() == [0, 0]
    assert resample(sae, trainer.optimizer, trainer.dead_features, x, trainer.random) == 0, "none is dead now"


def test_rows_come_in_a_new_order_each_time_around() -> None:
    rows = torch.arange(100.0)[:, None].expand(100, 2)
    source = source_of(rows, None, 30, seed=1)
    first, second = (torch.cat(list(source.epoch(number)))[:, 0].tolist() for number in (0, 1))
    assert sorted(first) == sorted(second) == rows[:, 0].tolist()
    assert first != second
    assert first != rows[:, 0].tolist()
    assert first == torch.cat(list(source.epoch(0)))[:, 0].tolist()
    assert [len(batch) for batch in source.epoch(0)] == [30, 30, 30, 10]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_it_trains_where_gradients_are_off(activations, mode) -> None:
    wanted = quick(activations, steps=20)
    with mode():
        found = quick(activations, steps=20)
        of_there = quick(activations * 1.0, steps=20)
    for each in (found, of_there):
        assert torch.equal(each.sae.W_enc, wanted.sae.W_enc)
        assert each.sae.W_enc.requires_grad


def test_from_arrays_and_past_empty_batches(activations) -> None:
    wanted = quick(activations, steps=20)
    assert torch.equal(quick(activations.cpu().numpy(), steps=20, device=devices.DEVICE).sae.W_enc, wanted.sae.W_enc)
    batches = [activations[:64], activations[64:128]]
    one = quick(batches, steps=4, batch_size=None)
    gaps = [activations[:0], batches[0].cpu().numpy(), activations[:0], batches[1]]
    other = quick(gaps, steps=4, batch_size=None)
    assert torch.equal(one.sae.W_enc, other.sae.W_enc)
    with pytest.raises(HooklineError, match="no activations"):
        quick([activations[:0]], batch_size=None)
