"""Autoencoders spliced in: with their error only edits change something, without it the reconstruction flows."""

import threading

import pytest
import torch
from autoencoders import KINDS
from autoencoders import sae_for as make
from networks import MLP
from tiny_models import causal_lm

import hookline
from hookline import HookError, HooklineError, NeverFiredWarning, at, last, token
from hookline.edits import add, replace, scale, zero
from hookline.positions import new_tokens
from hookline.sae import evaluate

POINT = "blocks.1.hook_resid_post"
TOKENS = torch.tensor([[5, 9, 3, 7, 11, 2], [8, 1, 4, 4, 30, 6]])


@pytest.fixture(scope="module")
def model():
    return hookline.hook(causal_lm("gpt2"))


@pytest.fixture(scope="module")
def sae(model):
    return make(model.cfg.d_model, hook_name=POINT)


def directions(sae, model, features, edited):
    """What the stream is with other features: as a hook without any autoencoder would do it."""
    return model.run_with_hooks(TOKENS, fwd_hooks=[(POINT, lambda x: x + (edited - features) @ sae.W_dec)])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
def test_with_its_error_nothing_changes(kind, architecture) -> None:
    model = hookline.hook(causal_lm(architecture))
    splice = make(model.cfg.d_model, kind).spliced(POINT)
    plain = model(TOKENS)
    assert torch.equal(model.run_with_hooks(TOKENS, fwd_hooks=[splice]), plain), "with gradients"
    with torch.no_grad():
        assert torch.equal(model.run_with_hooks(TOKENS, fwd_hooks=[splice]), plain)


@pytest.mark.parametrize("kind", [*KINDS, "normalized"])
def test_without_its_error_the_reconstruction_flows(model, kind) -> None:
    is_normalized = kind == "normalized"
    options = {"normalize_activations": "layer_norm"} if is_normalized else {}
    sae = make(model.cfg.d_model, "standard" if is_normalized else kind, **options)
    spliced, cache = model.run_with_cache(TOKENS, fwd_hooks=[sae.spliced(POINT, keep_error=False)], names_filter=POINT)
    x = model.cache(TOKENS, names_filter=POINT)[POINT]
    torch.testing.assert_close(cache[POINT], sae(x))
    by_hand = model.run_with_hooks(TOKENS, fwd_hooks=[(POINT, sae.forward)])
    torch.testing.assert_close(spliced, by_hand)
    assert not torch.allclose(spliced, model(TOKENS))


def test_without_its_error_outlying_positions_keep_theirs(model, sae) -> None:
    mask = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]])
    before, after = [], []

    def sink(x):
        return x * torch.tensor([1000.0, 1, 1, 1, 1, 1])[:, None]

    def run(**options):
        before.clear(), after.clear()
        splice = sae.spliced(POINT, keep_error=False, **options)
        hooks = [(POINT, sink), (POINT, lambda x: before.append(x.clone())), splice, (POINT, lambda x: after.append(x))]
        model.run_with_hooks(TOKENS, attention_mask=mask, fwd_hooks=hooks)
        return before[0], after[0]

    x, new = run()
    assert torch.equal(new[:, 0], x[:, 0])
    torch.testing.assert_close(new[:, 1:], sae(x)[:, 1:])
    x, new = run(edits=[add(2.0, neuron=7)])
    torch.testing.assert_close(new[:, 0] - x[:, 0], (2 * sae.W_dec[7]).expand(2, -1), atol=1e-2, rtol=0)
    x, new = run(outliers="include")
    torch.testing.assert_close(new, sae(x))
    assert torch.equal(run(outliers=1e6)[1], new)
    with pytest.raises(HooklineError, match="outliers"):
        sae.spliced(POINT, keep_error=False, outliers="keep")


@pytest.mark.parametrize("outliers", ["exclude", "include"])
def test_the_spliced_loss_of_evaluate_is_that_of_the_splice(outliers) -> None:
    model = hookline.load("tinyworld")
    texts, sae = ["The capital of France is Paris", "Mary gave a drink"], make(model.cfg.d_model)
    direction = torch.zeros(model.cfg.d_model)
    direction[0] = 1e4
    with torch.no_grad(), model.hooks([("blocks.0.hook_resid_post", add(direction, pos=0))]):
        quality = evaluate(sae, model, texts, POINT, outliers=outliers)
        losses = [
            model.run_with_hooks(
                text, fwd_hooks=[sae.spliced(POINT, keep_error=False, outliers=outliers)], return_type="loss",
                loss_per_token=True,
            )
            for text in texts
        ]  # fmt: skip
    assert bool(quality.outlying.count) == (outliers == "exclude")
    assert quality.loss_spliced == pytest.approx(float(torch.cat(losses, 1).mean()), rel=1e-4)


def test_features_are_edited_by_the_edits_of_activations(model, sae) -> None:
    x = model.cache(TOKENS, names_filter=POINT)[POINT]
    features = sae.encode(x)
    i = int(features.sum((0, 1)).argmax())
    where = torch.zeros(48, dtype=torch.bool)
    where[i] = True
    for edit, edited in (
        (zero(neuron=i), torch.where(where, 0.0, features)),
        (scale(3.0, neuron=i), torch.where(where, features * 3, features)),
        (add(2.0, neuron=i), torch.where(where, features + 2, features)),
        (replace(4.0, neuron=i), torch.where(where, 4.0, features)),
        (lambda f: f * 0, features * 0),
        (lambda f, hook: f * (2 if hook.name == POINT else 1), features * 2),
    ):
        new = model.run_with_hooks(TOKENS, fwd_hooks=[sae.spliced(edits=[edit])])
        torch.testing.assert_close(new, directions(sae, model, features, edited), msg=lambda m, e=edit: f"{e}: {m}")
        assert not torch.allclose(new, model(TOKENS))


def test_edits_are_made_one_after_the_other_and_in_place_ones_count(model, sae) -> None:
    def double(features) -> None:
        features.mul_(2)

    x = model.cache(TOKENS, names_filter=POINT)[POINT]
    features = sae.encode(x)
    new = model.run_with_hooks(TOKENS, fwd_hooks=[sae.spliced(edits=[double, add(1.0)])])
    torch.testing.assert_close(new, directions(sae, model, features, features * 2 + 1))


def test_edits_at_positions_change_nothing_before(model, sae) -> None:
    edited = sae.spliced(edits=[add(3.0, neuron=[1, 2], pos=3)])
    new, plain = model.run_with_hooks(TOKENS, fwd_hooks=[edited]), model(TOKENS)
    assert torch.equal(new[:, :3], plain[:, :3])
    assert not torch.allclose(new[:, 3], plain[:, 3])
    x = model.cache(TOKENS, names_filter=POINT)[POINT]
    features = sae.encode(x)
    changed = features.clone()
    changed[:, 3, [1, 2]] += 3
    torch.testing.assert_close(new, directions(sae, model, features, changed))


@pytest.mark.parametrize(
    "name", [POINT, "blocks.1.hook_out", "transformer.h.1", "blocks.2.hook_resid_pre", 1, ("resid_post", 1)]
)
def test_points_by_any_name(model, sae, name) -> None:
    new = model.run_with_hooks(TOKENS, fwd_hooks=[sae.spliced(name, edits=[zero(neuron=3)])])
    assert torch.allclose(new, model.run_with_hooks(TOKENS, fwd_hooks=[sae.spliced(edits=[zero(neuron=3)])]))
    pair = model.run_with_hooks(TOKENS, fwd_hooks=[(name, sae.spliced(None, edits=[zero(neuron=3)]))])
    assert torch.allclose(new, pair)


def test_it_is_a_hook_object(model, sae) -> None:
    splice = sae.spliced(keep_error=False, hook_id="mine")
    plain = model(TOKENS)
    model.registry.register_hook(None, splice)
    try:
        changed = model(TOKENS)
        assert not torch.allclose(changed, plain)
        splice.disable()
        assert torch.equal(model(TOKENS), plain)
        splice.enable()
        assert torch.equal(model(TOKENS), changed)
    finally:
        model.registry.unregister_hook("mine")
    assert torch.equal(model(TOKENS), plain)


def test_it_works_at_every_step_of_a_generation(model, sae) -> None:
    prompt = TOKENS[:1]
    plain = model.generate(prompt, max_new_tokens=6, do_sample=False)
    with model.hooks([sae.spliced()]):
        assert torch.equal(model.generate(prompt, max_new_tokens=6, do_sample=False), plain)
    seen = []
    splice = sae.spliced(edits=[lambda f: seen.append(f.shape[1]), add(5.0, neuron=7, pos=new_tokens)])
    with model.hooks([splice]):
        new = model.generate(prompt, max_new_tokens=6, do_sample=False)
    assert seen == [6, 1, 1, 1, 1, 1]
    assert torch.equal(new[:, :7], plain[:, :7]), "the prompt, and the token after it, are as before"
    by_hand = at(new_tokens, lambda x: x + 5.0 * sae.W_dec[7])
    with model.hooks([(POINT, by_hand)]):
        assert torch.equal(model.generate(prompt, max_new_tokens=6, do_sample=False), new)


def test_gradients_flow_through_the_features_alone(model, sae) -> None:
    splice = sae.spliced(keep_features=True)
    loss = model.run_with_hooks(TOKENS, fwd_hooks=[splice], return_type="loss")
    (of_features,) = torch.autograd.grad(loss, splice.features, retain_graph=True)
    _, cache = model.run_with_cache(TOKENS, names_filter=POINT, incl_bwd=True, return_type="loss")
    torch.testing.assert_close(of_features, cache[f"{POINT}_grad"] @ sae.W_dec.T)
    (of_encoder,) = torch.autograd.grad(loss, sae.W_enc)
    assert of_encoder.abs().sum() > 0
    first = "hook_embed"
    _, spliced = model.run_with_cache(
        TOKENS, names_filter=first, incl_bwd=True, return_type="loss", fwd_hooks=[sae.spliced(edits=[scale(0.0)])]
    )
    assert not spliced[f"{first}_grad"].any(), "with all features off, what is left is a constant"


def test_features_are_kept_only_if_asked_for(model, sae) -> None:
    splice = sae.spliced()
    model.run_with_hooks(TOKENS, fwd_hooks=[splice])
    assert splice.features is None


def test_heads_side_by_side(model) -> None:
    z, width = "blocks.1.attn.hook_z", model.cfg.n_heads * model.cfg.d_head
    sae = make(width, reshape_activations="hook_z", hook_name=z)
    plain = model(TOKENS)
    assert torch.equal(model.run_with_hooks(TOKENS, fwd_hooks=[sae.spliced()]), plain)
    new, cache = model.run_with_cache(TOKENS, fwd_hooks=[sae.spliced(keep_error=False)], names_filter=z)
    x = model.cache(TOKENS, names_filter=z)[z]
    torch.testing.assert_close(cache[z], sae(x.flatten(-2)).view(x.shape))
    assert not torch.allclose(new, plain)
    edited = model.run_with_hooks(TOKENS, fwd_hooks=[sae.spliced(edits=[add(3.0, neuron=2, pos=last)])])
    assert torch.equal(edited[:, :-1], plain[:, :-1])
    assert not torch.allclose(edited[:, -1], plain[:, -1])
    per_head = make(model.cfg.d_head)
    by_head = model.run_with_hooks(TOKENS, fwd_hooks=[per_head.spliced(z, keep_error=False)])
    torch.testing.assert_close(by_head, model.run_with_hooks(TOKENS, fwd_hooks=[(z, per_head.forward)]))


def test_a_model_of_another_dtype() -> None:
    model = hookline.hook(causal_lm("llama").bfloat16())
    sae = make(model.cfg.d_model)
    plain = model(TOKENS)
    assert torch.equal(model.run_with_hooks(TOKENS, fwd_hooks=[sae.spliced(POINT)]), plain)
    new = model.run_with_hooks(TOKENS, fwd_hooks=[sae.spliced(POINT, keep_error=False)])
    assert new.dtype == plain.dtype == torch.bfloat16


def test_in_any_network() -> None:
    net, x = hookline.hook(MLP()), torch.randn(5, 4)
    width = net.cache(x, names_filter="fc1")["fc1"].shape[-1]
    sae = make(width)
    assert torch.equal(net.run_with_hooks(x, fwd_hooks=[sae.spliced("fc1")]), net(x))
    wanted = net.run_with_hooks(x, fwd_hooks=[("fc1", sae.forward)])
    torch.testing.assert_close(net.run_with_hooks(x, fwd_hooks=[sae.spliced("fc1", keep_error=False)]), wanted)


def test_the_wrong_width_names_both(model, sae) -> None:
    wide = "blocks.1.mlp.hook_post"
    with pytest.raises(HookError, match=rf"width {sae.d_in}, but '{wide}' .*'{POINT}'"):
        model.run_with_hooks(TOKENS, fwd_hooks=[sae.spliced(wide)])
    z = make(99, reshape_activations="hook_z")
    with pytest.raises(HookError, match="width 99"):
        model.run_with_hooks(TOKENS, fwd_hooks=[z.spliced("blocks.1.attn.hook_z")])


def test_mistakes_are_seen_when_it_is_made(model, sae) -> None:
    with pytest.raises(HooklineError, match="feature 48"):
        sae.spliced(edits=[zero(neuron=48)])
    with pytest.raises(HooklineError, match="heads"):
        sae.spliced(edits=[zero(head=1)])
    with pytest.raises(HooklineError, match="edits"):
        sae.spliced(edits=zero(neuron=1))
    with pytest.raises(HooklineError, match="not callable"):
        sae.spliced(edits=[3])
    with pytest.raises(HooklineError, match="Splice"):
        model.run_with_hooks(TOKENS, fwd_hooks=[make(sae.d_in).spliced()])
    with pytest.raises(HooklineError, match="keep_features"):
        model.run_with_hooks(TOKENS, fwd_hooks=[sae.spliced("blocks.*.hook_resid_post", keep_features=True)])
    with pytest.raises(HooklineError, match="works"):
        model.run_with_hooks(TOKENS, bwd_hooks=[sae.spliced()])
    with pytest.raises(HookError, match=r"\[2, 6, 1\].*\[2, 6, 48\]"):
        model.run_with_hooks(TOKENS, fwd_hooks=[sae.spliced(edits=[lambda f: f[..., :1]])])


def test_an_edit_for_positions_that_never_come_is_reported(model, sae) -> None:
    both = [add(1.0, neuron=1), zero(neuron=2, pos=new_tokens)]
    with pytest.warns(NeverFiredWarning, match=r"zero\(pos=new_tokens"):
        model.run_with_hooks(TOKENS, fwd_hooks=[sae.spliced(edits=both)])
    with pytest.raises(HookError, match="token\\(60\\)"):
        model.run_with_hooks(TOKENS, fwd_hooks=[sae.spliced(edits=[zero(neuron=2, pos=token(60))])])


def test_threads_do_not_see_each_other(model, sae) -> None:
    plain, wrong = model(TOKENS).detach(), []

    def work() -> None:
        for _ in range(10):
            with torch.no_grad():
                if not torch.equal(model(TOKENS), plain):
                    wrong.append(1)

    thread = threading.Thread(target=work)
    with model.hooks([sae.spliced(keep_error=False)]):
        thread.start()
        assert not torch.allclose(model(TOKENS), plain)
        thread.join()
    assert not wrong


def test_it_prints_what_it_does(sae) -> None:
    splice = sae.spliced(edits=[zero(neuron=7)], keep_error=False)
    assert repr(splice) == f"<Splice of 48 features at {POINT!r}, edits=[zero(neuron=7)], keep_error=False>"
