"""Transcoders: what they compute, their files, and which models they fit."""

import json

import pytest
import tiny_models
import torch
import yaml
from safetensors.torch import load_file, save_file

import hookline
from hookline import HooklineError
from hookline.sae import Transcoder, TranscoderOrigin, Transcoders, train_transcoders

D, F, N = 32, 48, 4


def weights(seed: int, *, n_writes: int = 1, threshold: bool = False, skip: bool = False) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    shapes = {"W_enc": (D, F), "b_enc": (F,), "W_dec": (F, n_writes, D), "b_dec": (D,)}
    shapes |= ({"threshold": (F,)} if threshold else {}) | ({"W_skip": (D, D)} if skip else {})
    return {name: torch.randn(*shape, generator=random) / 6 for name, shape in shapes.items()}


def per_layer(**options) -> Transcoders:
    return Transcoders([Transcoder(layer, weights(layer, **options)) for layer in range(N)])


def cross_layer(**options) -> Transcoders:
    made = [
        Transcoder(layer, weights(layer, n_writes=N - layer, **options), writes=range(layer, N)) for layer in range(N)
    ]
    return Transcoders(made)


@pytest.mark.parametrize("options", [{}, {"threshold": True}, {"skip": True}, {"threshold": True, "skip": True}])
def test_outputs_are_the_sum_of_features(options) -> None:
    made, x = per_layer(**options), torch.randn(5, D)
    given = made[2]
    pre = x @ given.W_enc + given.b_enc
    active = pre.clamp(min=0) * (pre > given.threshold if given.threshold is not None else 1)
    wanted = active @ given.W_dec[:, 0] + given.b_dec + (x @ given.W_skip.T if given.W_skip is not None else 0)
    torch.testing.assert_close(made.outputs({2: x})[2], wanted)


def test_features_of_a_cross_layer_transcoder_write_to_later_layers() -> None:
    made = cross_layer()
    x = {layer: torch.randn(5, D) for layer in range(N)}
    found = made.outputs(x)
    wanted = made[2].b_dec + sum(made[layer].encode(x[layer]) @ made[layer].W_dec[:, 2 - layer] for layer in range(3))
    torch.testing.assert_close(found[2], wanted)
    assert made.is_cross_layer


@pytest.mark.parametrize("format", ["circuit-tracer", "saelens"])
@pytest.mark.parametrize("options", [{}, {"threshold": True}, {"skip": True}, {"threshold": True, "skip": True}])
def test_files_hold_what_was_saved(tmp_path, format, options) -> None:
    made = Transcoders(per_layer(**options), TranscoderOrigin("hook_resid_mid", "hook_mlp_out", "some/model", "abc"))
    made.save(tmp_path / "made", format)
    found = Transcoders.load(tmp_path / "made")
    assert found.origin == made.origin
    for one, other in zip(found.state_dict().items(), made.state_dict().items(), strict=True):
        assert one[0] == other[0]
        assert one[1].equal(other[1])


def test_files_of_cross_layer_transcoders_are_those_of_circuit_tracer(tmp_path, device) -> None:
    made = cross_layer(threshold=True)
    made.save(tmp_path / "made")
    config = yaml.safe_load((tmp_path / "made" / "config.yaml").read_text())
    assert config["model_kind"] == "cross_layer_transcoder"
    assert config["feature_input_hook"] == "mlp.hook_in"
    encoder = load_file(tmp_path / "made" / "W_enc_1.safetensors")
    assert {name: tuple(x.shape) for name, x in encoder.items()} == {
        **{"W_enc_1": (F, D), "b_enc_1": (F,), "b_dec_1": (D,), "threshold_1": (F,)}
    }
    assert load_file(tmp_path / "made" / "W_dec_1.safetensors")["W_dec_1"].shape == (F, N - 1, D)
    found = Transcoders.load(tmp_path / "made", device=device)
    x = {layer: torch.randn(3, D) for layer in range(N)}
    for layer, y in made.outputs(x).items():
        assert found.outputs(x)[layer].equal(y)
    with pytest.raises(HooklineError, match="no cross-layer"):
        made.save(tmp_path / "other", "saelens")


def test_files_of_others_without_checksums_are_read(tmp_path) -> None:
    (tmp_path / "config.yaml").write_text(
        "model_name: 'google/gemma'\nmodel_kind: transcoder_set\nscan: gemma\n"
        "feature_input_hook: mlp.hook_in\nfeature_output_hook: hook_mlp_out\n"
    )
    for layer in range(2):
        given = weights(layer)
        given |= {"W_enc": given["W_enc"].T.contiguous(), "W_dec": given["W_dec"][:, 0].contiguous()}
        save_file(given, tmp_path / f"layer_{layer}.safetensors")
    found = Transcoders.load(tmp_path)
    assert found.layers == [0, 1]
    assert found.origin.model_name == "google/gemma"
    assert found.origin.extra == {"scan": "gemma"}
    assert found[1].W_enc.equal(weights(1)["W_enc"])


def test_what_cannot_be_read_says_why(tmp_path) -> None:
    with pytest.raises(HooklineError, match="no transcoders"):
        Transcoders.load(tmp_path)
    per_layer().save(tmp_path / "a")
    (tmp_path / "a" / "layer_1.safetensors").unlink()
    with pytest.raises(HooklineError, match="every layer"):
        Transcoders.load(tmp_path / "a")
    per_layer().save(tmp_path / "b", "saelens")
    cfg = tmp_path / "b" / "layer_2" / "cfg.json"
    cfg.write_text(json.dumps(json.loads(cfg.read_text()) | {"architecture": "standard"}))
    with pytest.raises(HooklineError, match="'standard'"):
        Transcoders.load(tmp_path / "b")
    per_layer().save(tmp_path / "c")
    broken = (tmp_path / "c" / "layer_0.safetensors").read_bytes()
    (tmp_path / "c" / "layer_0.safetensors").write_bytes(broken[:-8])
    with pytest.raises(HooklineError, match="damaged"):
        Transcoders.load(tmp_path / "c")
    (tmp_path / "c" / "config.yaml").write_text("model_kind: [")
    with pytest.raises(HooklineError, match="be read"):
        Transcoders.load(tmp_path / "c")
    bad = per_layer()
    with torch.no_grad():
        bad[0].b_enc[3] = torch.nan
    with pytest.raises(HooklineError, match="not finite"):
        bad.save(tmp_path / "d")
    assert not (tmp_path / "d").exists()


def test_a_transcoder_has_matching_weights() -> None:
    given = weights(0)
    with pytest.raises(HooklineError, match=r"W_dec.*layer 3"):
        Transcoder(3, given | {"W_dec": given["W_dec"][:-1]})
    with pytest.raises(HooklineError, match=r"layer 3.*W_dec"):
        Transcoder(3, {name: x for name, x in given.items() if name != "W_dec"})
    with pytest.raises(HooklineError, match=r"b_dec.*layer 3"):
        Transcoder(3, given | {"b_dec": given["b_dec"][:3]})
    with pytest.raises(HooklineError, match="scale"):
        Transcoder(3, given | {"scale": given["b_enc"]})
    with pytest.raises(HooklineError, match="earlier layers"):
        Transcoder(3, given, writes=[1])
    with pytest.raises(HooklineError, match="transcoder"):
        Transcoders([Transcoder(0, weights(0, n_writes=2), writes=[0, 1])])


def test_transcoders_of_another_model_layer_or_width_are_refused() -> None:
    model = hookline.hook(tiny_models.causal_lm("llama"))
    per_layer().check_fit(model)
    name = model.cfg.model_name
    Transcoders(per_layer(), TranscoderOrigin(model_name=f"someone/{name}")).check_fit(model)
    with pytest.raises(HooklineError, match="are of 'gpt2'"):
        Transcoders(per_layer(), TranscoderOrigin(model_name="gpt2")).check_fit(model)
    with pytest.raises(HooklineError, match="has 4 layers"):
        Transcoders([Transcoder(4, weights(0))]).check_fit(model)
    narrow = {key: x[..., :16] if key in ("W_dec", "b_dec") else x for key, x in weights(0).items()}
    with pytest.raises(HooklineError, match="width 16"):
        Transcoders([Transcoder(0, narrow)]).check_fit(model)
    other = Transcoders(per_layer(), TranscoderOrigin(model_name=name, weights="0" * 32))
    with pytest.raises(HooklineError, match="other weights"):
        other.check_fit(model)
    other.without_weights().check_fit(model)
    with pytest.raises(hookline.UnknownPointError):
        Transcoders(per_layer(), TranscoderOrigin(reads="mlp.hook_nothing")).check_fit(model)


@pytest.mark.parametrize(
    "options", [{"kind": "topk", "k": 6}, {"kind": "l1", "l1": 0.1}, {"k": 6, "cross_layer": True}]
)
def test_training_on_a_store(tmp_path, options, device) -> None:
    model = hookline.hook(tiny_models.causal_lm("llama"))
    texts = torch.randint(3, 60, (24, 12), generator=torch.Generator().manual_seed(0))
    points = ["blocks.*.mlp.hook_in", "blocks.*.hook_mlp_out"]
    store = hookline.harvest(model, texts, points, tmp_path / "store", progress=False)
    how = {"steps": 60, "batch_size": 96, "lr": 1e-2, "progress": False, "device": device}
    training = train_transcoders(store, d_sae=96, **how, **options)
    made = training.transcoders
    assert made.layers == [0, 1, 2, 3]
    assert made.is_cross_layer == bool(options.get("cross_layer"))
    made.check_fit(model)
    assert made.origin.weights is not None
    assert training.history[-1].explained_variance > training.history[0].explained_variance + 0.2
    _, cache = model.run_with_cache(texts[:4], names_filter=points)
    with torch.no_grad():
        found = made.outputs({layer: cache[f"blocks.{layer}.mlp.hook_in"] for layer in range(N)})
        for layer, y in found.items():
            wanted = cache[f"blocks.{layer}.hook_mlp_out"]
            spread = (wanted - wanted.mean((0, 1))).pow(2).sum()
            share = 1 - float((y - wanted).pow(2).sum() / spread)
            assert share == pytest.approx(training.explained[layer], abs=0.3)  # unscaled as it was trained
        if options.get("kind") == "topk":
            active = (made[1].encode(cache["blocks.1.mlp.hook_in"]) > 0).sum(-1).float().mean()
            assert 3 < float(active) < 12
    other = hookline.hook(tiny_models.causal_lm("llama"))
    with torch.no_grad():
        next(other.module.parameters()).mul_(1.1)
    with pytest.raises(HooklineError, match="other weights"):
        made.check_fit(other)


def test_training_needs_both_points(tmp_path) -> None:
    model = hookline.hook(tiny_models.causal_lm("llama"))
    store = hookline.harvest(model, torch.full((2, 5), 7), "blocks.*.hook_mlp_out", tmp_path / "store", progress=False)
    with pytest.raises(HooklineError, match=r"mlp.hook_in.*hook_mlp_out"):
        train_transcoders(store, d_sae=8, steps=2)
    points = ["blocks.*.mlp.hook_in", "blocks.*.hook_mlp_out"]
    both = hookline.harvest(model, torch.full((2, 5), 7), points, tmp_path / "both", progress=False)
    for wrong, why in (
        ({"kind": "gated"}, "kind must be"),
        ({"k": 9}, "k must be from 1 to d_sae"),
        ({"k": 0}, "k must"),
    ):
        with pytest.raises(HooklineError, match=why):
            train_transcoders(both, d_sae=8, steps=2, **wrong)
    options = {"d_sae": 8, "k": 2, "steps": 1, "progress": False, "cross_layer": True}
    made = train_transcoders(both, layers=[2, 0, 2], **options).transcoders
    assert [each.writes for each in made] == [(0, 2), (2,)]
    with pytest.raises(HooklineError, match="apply"):
        train_transcoders(both, d_sae=8, steps=2, kind="l1", k=3)
