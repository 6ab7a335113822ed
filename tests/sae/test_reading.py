"""Reading features: of a run, and with a detector."""

import pytest
import torch
from autoencoders import sae_for as make
from tiny_models import causal_lm

import hookline
from hookline import HooklineError, UnknownPointError, last
from hookline.edits import zero
from hookline.errors import HooklineWarning
from hookline.sae import run_with_features

POINT = "blocks.1.hook_resid_post"
TOKENS = torch.tensor([[5, 9, 3, 7, 11, 2], [8, 1, 4, 4, 30, 6]])
OTHER = "blocks.2.hook_mlp_out"


@pytest.fixture(scope="module")
def model():
    return hookline.hook(causal_lm("gpt2"))


@pytest.fixture(scope="module")
def sae(model):
    return make(model.cfg.d_model, hook_name=POINT)


@pytest.fixture(scope="module")
def other(model):
    return make(model.cfg.d_model, "topk", d_sae=30, hook_name=OTHER)


def test_features_of_a_run(model, sae, other) -> None:
    logits, features = run_with_features(model, TOKENS, saes=[sae, other])
    assert torch.equal(logits, model(TOKENS)), "nothing is spliced in"
    cache = model.cache(TOKENS, names_filter=[POINT, OTHER])
    assert torch.equal(features[POINT], sae.encode(cache[POINT]))
    assert torch.equal(features[OTHER], other.encode(cache[OTHER]))
    assert features["blocks.1.hook_out"] is features[POINT], "by any name of the point"
    assert list(features) == [POINT, OTHER]
    assert features[OTHER].shape == (2, 6, 30)


def test_a_mapping_says_where(model, sae) -> None:
    with pytest.warns(HooklineWarning, match="trained at 'blocks.1.hook_resid_post'"):
        _, features = run_with_features(model, TOKENS, saes={OTHER: sae, "transformer.h.0": sae})
    cache = model.cache(TOKENS, names_filter=[OTHER, "transformer.h.0"])
    assert all(torch.equal(features[name], sae.encode(cache[name])) for name in cache)


def test_another_name_of_the_stream_is_not_another_layer(model, sae) -> None:
    for name in ("transformer.h.1", "blocks.2.hook_resid_pre", "blocks.1.hook_mlp_out"):
        run_with_features(model, TOKENS, saes={name: sae})


def test_options_are_those_of_run_with_cache(model, sae) -> None:
    _, all_of_it = run_with_features(model, TOKENS, saes=sae)
    _, at_last = run_with_features(model, TOKENS, saes=sae, pos_slice=last)
    torch.testing.assert_close(at_last[POINT], all_of_it[POINT][:, -1])
    _, edited = run_with_features(model, TOKENS, saes=sae, fwd_hooks=[(POINT, zero())])
    assert torch.equal(edited[POINT], sae.encode(torch.zeros(2, 6, sae.d_in)))
    loss, _ = run_with_features(model, TOKENS, saes=sae, return_type="loss")
    assert loss.ndim == 0
    for name in ("names_filter", "incl_bwd", "dtype", "device"):
        with pytest.raises(HooklineError, match=f"not take {name}"):
            run_with_features(model, TOKENS, saes=sae, **{name: None})


def test_it_must_be_clear_which_is_where(model, sae) -> None:
    with pytest.raises(HooklineError, match=r"autoencoder.*point"):
        run_with_features(model, TOKENS, saes=[sae, sae])
    with pytest.raises(HooklineError, match=r"autoencoder.*point"):
        run_with_features(model, TOKENS, saes={POINT: sae, "blocks.1.hook_out": sae})
    with pytest.raises(HooklineError, match="has no hook_name"):
        run_with_features(model, TOKENS, saes=make(sae.d_in))
    with pytest.raises(HooklineError, match=r"saes.*empty"):
        run_with_features(model, TOKENS, saes=[])
    with pytest.raises(UnknownPointError):
        run_with_features(model, TOKENS, saes={"blocks.9.hook_resid_post": sae})
    with pytest.raises(HooklineError, match=r"'blocks\.1\.mlp\.hook_post'"):
        run_with_features(model, TOKENS, saes={"blocks.1.mlp.hook_post": sae})


def test_a_detector_keeps_features(model, sae) -> None:
    detector = sae.detector()
    logits = model.run_with_hooks(TOKENS, fwd_hooks=[detector])
    assert torch.equal(logits, model(TOKENS))
    wanted = sae.encode(model.cache(TOKENS, names_filter=POINT)[POINT])
    assert torch.equal(detector.get_captured(), wanted)
    assert not detector.get_captured().requires_grad
    assert detector.metadata == {"features_shape": (2, 6, 48)}


def test_a_detector_of_a_generation_keeps_every_step(model, sae) -> None:
    detector = sae.detector("transformer.h.1", keep_all=True)
    with model.hooks([detector]):
        new = model.generate(TOKENS[:1], max_new_tokens=3, do_sample=False)
    steps = detector.get_captured("features")
    assert [each.shape[1] for each in steps] == [6, 1, 1]
    wanted = sae.encode(model.cache(new[:, :-1], names_filter=POINT)[POINT])
    torch.testing.assert_close(torch.cat(steps, 1), wanted)
