"""Where features are strongest, how good an autoencoder is, and the way from activations to steering."""

import math

import devices
import pytest
import torch
from tiny_models import encoder

import hookline
from hookline import HooklineError, token
from hookline.edits import replace, zero
from hookline.sae import SAEConfig, SparseAutoencoder, evaluate, profile, top_contexts, train

POINT = "blocks.1.hook_resid_post"
TEXTS = [
    "The capital of France is Paris.",
    "People in Germany speak German.",
    "Hello, world!",
    "My cat sat on the mat.",
    "When Mary and John went to the store, John gave a drink to Mary.",
]


@pytest.fixture(scope="module")
def model():
    return hookline.load("tinyworld")


@pytest.fixture(scope="module")
def sae(model):
    return SparseAutoencoder(SAEConfig("standard", model.cfg.d_model, 40, hook_name=POINT), seed=1)


def perfect(model) -> SparseAutoencoder:
    """One whose reconstruction is the activation: a feature for each coordinate, and for its negative."""
    d = model.cfg.d_model
    sae = SparseAutoencoder(SAEConfig("standard", d, 2 * d, hook_name=POINT))
    with torch.no_grad():
        sae.W_enc.copy_(torch.cat([torch.eye(d), -torch.eye(d)], 1))
        sae.W_dec.copy_(sae.W_enc.T)
    return sae


@torch.no_grad()
def test_the_strongest_places_of_all_features(model, sae) -> None:
    places = []
    for example, text in enumerate(TEXTS):
        features = sae.encode(model.cache(text, names_filter=POINT)[POINT][0])
        for position, word in enumerate(model.to_str_tokens(text)):
            places.append((example, position, word, features[position]))
    found = profile(sae, model, TEXTS, k=4, batch_size=2)
    assert found.rows == len(places)
    for feature in range(40):
        best = sorted(places, key=lambda place: -place[3][feature])[:4]
        top = found.top(feature)
        wanted = [(e, p, w) for e, p, w, f in best if f[feature] > 0]
        assert [(each.example, each.position, each.token) for each in top] == wanted
        strongest = torch.stack([f[feature] for *_, f in best])[: len(top)]
        torch.testing.assert_close(torch.tensor([each.activation for each in top]), strongest)  # another batch size
        active = sum(float(f[feature] > 0) for *_, f in places)
        assert float(found.density[feature]) == pytest.approx(active / len(places))
    assert "Profile of 40 features" in repr(found)


def test_the_text_around_a_place(model, sae) -> None:
    feature = 3
    top = top_contexts(sae, model, TEXTS, feature, 3)
    assert top == profile(sae, model, TEXTS, features=[7, feature], k=3).top(feature)
    for each in top:
        assert f"«{each.token}»" in each.text
        if len(model.to_str_tokens(TEXTS[each.example])) < 7:
            assert each.text.replace("«", "").replace("»", "").removeprefix("<|endoftext|>") in TEXTS[each.example]
        assert each.token in model.to_str_tokens(TEXTS[each.example])
    assert repr(top).splitlines()[0].split()[0] == f"{top[0].activation:.3f}"
    assert "<table>" in top._repr_html_()


def test_a_store_gives_the_same_as_texts(model, sae, tmp_path) -> None:
    store = hookline.harvest(model, TEXTS, POINT, tmp_path / "store", progress=False)
    from_texts, from_store = profile(sae, model, TEXTS), profile(sae, model, store)
    torch.testing.assert_close(from_texts.density, from_store.density)
    for feature in range(0, 40, 7):
        for a, b in zip(from_texts.top(feature), from_store.top(feature), strict=True):
            assert (a.token, a.text, a.example, a.position) == (b.token, b.text, b.example, b.position)
            assert a.activation == pytest.approx(b.activation, rel=1e-4)


def test_the_features_of_a_token(model) -> None:
    point = "hook_embed"
    d, france = model.cfg.d_model, model.to_single_token(" France")
    sae = SparseAutoencoder(SAEConfig("standard", d, 5, hook_name=point))
    with torch.no_grad():  # one that is for the embedding of that token
        embedding = model.cache(torch.tensor([[france]]), names_filter=point)[point][0, 0]
        sae.W_enc[:, 2] = embedding
        sae.b_enc[2] = -0.9 * embedding.pow(2).sum()
    found = profile(sae, model, TEXTS)
    assert found.about(" France")[0] == (2, 1.0)
    assert found.about(france)[0] == (2, 1.0)
    assert all(feature != 2 for feature, _ in found.about(" Germany"))
    with pytest.raises(HooklineError, match="token 99999"):
        found.about(99999)
    assert [each.token for each in found.top(2)] == [" France"]


def test_questions_that_make_no_sense(model, sae, tmp_path) -> None:
    with pytest.raises(HooklineError, match="feature 40"):
        top_contexts(sae, model, TEXTS, 40)
    with pytest.raises(HooklineError, match="k must be"):
        top_contexts(sae, model, TEXTS, 1, 0)
    with pytest.raises(HooklineError, match=r"list.*texts"):
        top_contexts(sae, model, "one text", 1)
    with pytest.raises(HooklineError, match="no texts"):
        profile(sae, model, [])
    with pytest.raises(HooklineError, match=r"pass.*point"):
        profile(SparseAutoencoder(SAEConfig("standard", sae.d_in, 40)), model, TEXTS)
    with pytest.raises(HooklineError, match="matches 4 points"):
        profile(sae, model, TEXTS, point="blocks.*.hook_resid_post")
    found = profile(sae, model, TEXTS, features=[3], k=2)
    with pytest.raises(HooklineError, match="feature 4 "):
        found.top(4)
    with pytest.raises(HooklineError, match="2 contexts"):
        found.top(3, 3)


def test_a_perfect_autoencoder_loses_nothing(model) -> None:
    quality = evaluate(perfect(model), model, TEXTS, batch_size=2)
    assert quality.explained_variance == pytest.approx(1)
    assert quality.loss_spliced == pytest.approx(quality.loss, rel=1e-4)
    assert quality.loss_recovered == pytest.approx(1, abs=1e-4)
    assert quality.l0 == pytest.approx(model.cfg.d_model)
    assert quality.loss_zeroed > quality.loss
    assert "recovered 100.0%" in repr(quality)
    whole = evaluate(perfect(model), model, TEXTS, batch_size=5)
    assert whole.loss == pytest.approx(quality.loss, rel=1e-5), "padding counts for nothing"


@torch.no_grad()
def test_the_loss_is_the_models_own(model, sae) -> None:
    quality = evaluate(sae, model, TEXTS[:1])
    assert quality.loss == pytest.approx(float(model(TEXTS[0], return_type="loss")), rel=1e-5)
    spliced = model.run_with_hooks(TEXTS[0], return_type="loss", fwd_hooks=[sae.spliced(keep_error=False)])
    assert quality.loss_spliced == pytest.approx(float(spliced), rel=1e-5)
    with pytest.raises(HooklineError, match="no tokens"):
        evaluate(sae, model, [])


def test_from_activations_to_steering(model, tmp_path) -> None:
    """Harvest, train, name a feature of a country, and steer with it: in few steps, so not for every country."""
    capitals = {"France": "Paris", "Italy": "Rome", "Germany": "Berlin", "Japan": "Tokyo", "Russia": "Moscow"}
    sentences = ("The capital city of {} is", "In {}, the capital is", "People in {} speak", "The people of {} speak")
    texts = [sentence.format(country) for sentence in sentences for country in capitals]
    store = hookline.harvest(model, texts, POINT, tmp_path / "store", progress=False)
    training = train(
        store,
        POINT,
        d_sae=96,
        kind="topk",
        k=3,
        steps=500,
        batch_size=128,
        lr=3e-3,
        progress=False,
        device=devices.DEVICE,
    )
    assert training.last.explained_variance > 0.9
    found = profile(training.sae, model, store)
    features = {country: found.about(f" {country}", 1)[0][0] for country in capitals}
    assert len(set(features.values())) == len(capitals)
    steered = 0
    for old, new in zip(capitals, [*capitals][1:], strict=False):
        here, strength = token(f" {old}"), 2 * found.top(features[new])[0].activation
        edits = [zero(neuron=features[old], pos=here), replace(strength, neuron=features[new], pos=here)]
        with model.hooks([training.sae.spliced(edits=edits)]):
            answer = model.generate(f"The capital of {old} is", max_new_tokens=1, do_sample=False)
        assert model.generate(f"The capital of {old} is", max_new_tokens=1, do_sample=False).endswith(capitals[old])
        steered += answer.endswith(capitals[new])
    assert steered >= 3


def test_empty_texts_have_a_number_and_no_tokens(model, sae, tmp_path) -> None:
    full = ["Mary went to the garden.", "The capital of Italy is"]
    some = [full[0], "", full[1], ""]
    assert evaluate(sae, model, some, batch_size=1).loss == pytest.approx(evaluate(sae, model, full).loss)
    found, of_store = profile(sae, model, some), hookline.harvest(model, some, POINT, tmp_path, progress=False)
    assert set(found.example.unique().tolist()) <= {-1, 0, 2}
    assert torch.equal(found.example, profile(sae, model, of_store).example)
    for batch_size in (1, 3):
        assert profile(sae, model, some, batch_size=batch_size).rows == len(of_store)
    with pytest.raises(HooklineError, match="no texts"):
        profile(sae, model, ["", ""])


def test_a_masked_model_has_no_loss_of_the_next_token(model) -> None:
    bert = hookline.hook(encoder("bert", head=True, vocab_size=1024), model.tokenizer)
    point = "encoder.1.hook_resid_post"
    quality = evaluate(
        SparseAutoencoder(SAEConfig("standard", d_in=32, d_sae=24, hook_name=point)), bert, ["Mary went"]
    )
    assert math.isnan(quality.loss)
    assert math.isnan(quality.loss_recovered)
    assert quality.l0 > 0
    assert "no loss" in repr(quality)


def test_a_word_without_the_space_before_it(model) -> None:
    sae = SparseAutoencoder(SAEConfig("standard", model.cfg.d_model, 5, hook_name="hook_embed"))
    with torch.no_grad():
        sae.b_enc += 100.0  # active at every token
    vocabulary = model.tokenizer.get_vocab()
    word = next(each for each in sorted(vocabulary) if each.isalpha() and f"Ġ{each}" in vocabulary)
    found = profile(sae, model, [f"The{model.to_string([vocabulary[f'Ġ{word}']])}"])
    assert found.about(f" {word}")
    with pytest.raises(HooklineError, match=rf"'{word}'.*' {word}'"):
        found.about(word)
