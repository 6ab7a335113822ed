"""Texts of different lengths: the logits after each, and the warning that the last column is not that."""

import warnings

import devices
import pytest
import tiny_models
import torch

import hookline
from hookline import HooklineError, at, last
from hookline.errors import HooklineWarning

TEXTS = ["Mary went to", "Mary went to the store and John", "John"]


@pytest.fixture(scope="module")
def model():
    return hookline.load("tinyworld")


@pytest.fixture(scope="module")
def alone(model) -> torch.Tensor:
    """The logits after each text, run by itself."""
    return torch.cat([model(text)[:, -1] for text in TEXTS])


@pytest.mark.parametrize("side", ["left", "right", None])
def test_last_logits_of_texts(model, alone, side) -> None:
    assert torch.allclose(model.last_logits(TEXTS, padding_side=side), alone, atol=1e-4)


def test_last_logits_of_tokens_and_keyword_inputs(model, alone) -> None:
    made = model.tokenizer(TEXTS, return_tensors="pt", padding=True).to(devices.DEVICE)
    assert torch.allclose(model.last_logits(model.to_tokens(TEXTS)), alone, atol=1e-4)
    assert torch.allclose(model.last_logits(made), alone, atol=1e-4)
    assert torch.allclose(model.last_logits(**made), alone, atol=1e-4)
    given = model.last_logits(made["input_ids"], attention_mask=made["attention_mask"])
    assert torch.allclose(given, alone, atol=1e-4)
    assert torch.equal(model.last_logits(model.to_tokens(TEXTS[0])[0]), model(TEXTS[0])[:, -1])


def test_last_logits_under_hooks(model) -> None:
    with model.hooks(fwd_hooks=[("unembed.hook_out", at(last, torch.zeros_like))]):
        assert model.last_logits(TEXTS).eq(0).all()


def test_last_logits_that_cannot_be_had(model) -> None:
    with pytest.raises(HooklineError, match="stop_at_layer"):
        model.last_logits(TEXTS, stop_at_layer=1)
    with pytest.raises(HooklineError, match="labels"):
        model.last_logits("John", labels=model.to_tokens("John"))
    tokens = model.to_tokens("John went")
    with pytest.raises(HooklineError, match="only padding"):
        model.last_logits(tokens, attention_mask=torch.zeros_like(tokens))


def test_last_logits_of_a_decoder() -> None:
    model = hookline.hook(tiny_models.seq2seq("t5"))
    ids, into = torch.tensor([[5, 6, 7]]), torch.tensor([[0, 3, 4]])
    assert torch.equal(model.last_logits(ids, decoder_input=into), model(ids, decoder_input=into)[:, -1])


def test_the_warning_is_given_once(model, monkeypatch) -> None:
    monkeypatch.setattr("hookline.text.ragged.warned", set())
    quiet = [
        lambda: model(TEXTS[0]),
        lambda: model(TEXTS, return_type="loss"),
        lambda: model(TEXTS, padding_side="right"),
        lambda: model(TEXTS, padding_side="left"),
        lambda: model(TEXTS, stop_at_layer=1),
        lambda: model.last_logits(TEXTS),
        lambda: model.cache(TEXTS, names_filter="blocks.0.hook_resid_pre"),
    ]
    for call in quiet:
        call()
    with pytest.warns(HooklineWarning, match=r"model\.last_logits\(texts\)") as caught:
        model(TEXTS)
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(TEXTS)
