"""Patchscopes and oracle reads: against hooks written by hand, between models, and what they refuse."""

import pytest
import torch
from tiny_models import causal_lm

import hookline
from hookline import HooklineError
from hookline.experiments import reading

SOURCE, TARGET = "The capital of France is", "The capital of Italy is"
TOKENS = torch.tensor([[5, 9, 31, 7, 44, 2, 18]])


def by_hand(model, target, values, layer, columns) -> torch.Tensor:
    """The logits at the end of the target, with values at some of its positions after a layer."""

    def put(x):
        x = x.clone()
        x[0, columns] = values
        return x

    return model.run_with_hooks(target, fwd_hooks=[(f"blocks.{layer}.hook_resid_post", put)])[0, -1].detach()


def test_into_itself_it_is_the_original_run(tinyworld) -> None:
    logits = tinyworld(SOURCE)[0, -1].detach()
    paris = tinyworld.to_single_token(" Paris")
    for pos in (1, 3, -1):
        found = reading.patchscope(tinyworld, SOURCE, SOURCE, marker=pos, pos=pos, tokens=" Paris", measure="logit")
        torch.testing.assert_close(found.values[:, 0], logits[paris].expand(4), atol=1e-4, rtol=1e-4)
        top = reading.patchscope(tinyworld, SOURCE, SOURCE, marker=pos, pos=pos)
        assert {each for layer in top.info["tokens"] for each in layer} == {tinyworld.to_string([int(logits.argmax())])}
        torch.testing.assert_close(top.values[:, 0], logits.softmax(-1).max().expand(4), atol=1e-5, rtol=1e-4)


def test_all_pairs_of_layers_agree_with_a_hook(tinyworld) -> None:
    cache = tinyworld.cache(SOURCE)
    found = reading.patchscope(
        tinyworld, SOURCE, TARGET, marker="Italy", pos=[3, 4], into_layers=[0, 2], tokens=" Paris", measure="log_prob"
    )
    assert found.axes == ("layer", "into", "pos")
    assert found.coords == {"layer": [0, 1, 2, 3], "into": [0, 2], "pos": ["3: France", "4: is"]}
    paris = tinyworld.to_single_token(" Paris")
    for layer in range(4):
        for into in (0, 2):
            for at, pos in enumerate((3, 4)):
                logits = by_hand(tinyworld, TARGET, cache["resid_post", layer][0, pos], into, [3])
                expected = logits.log_softmax(-1)[paris]
                torch.testing.assert_close(found.sel(layer=layer, into=into).values[at], expected, atol=1e-4, rtol=1e-4)
                token = tinyworld.to_string([int(logits.argmax())])
                assert found.info["tokens"][layer][[0, 2].index(into)][at] == token


def test_several_markers_get_the_same_activation(tinyworld) -> None:
    target = "Tom saw Tom and Tom"
    found = reading.patchscope(tinyworld, SOURCE, target, marker="Tom", pos=3, layers=[1])
    columns = found.info["marker"]
    assert len(columns) == 3
    value = tinyworld.cache(SOURCE)["resid_post", 1][0, 3]
    probs = by_hand(tinyworld, target, value, 1, columns).softmax(-1)
    torch.testing.assert_close(found.values[0, 0], probs.max(), atol=1e-5, rtol=1e-4)


def test_what_is_generated_begins_with_the_likeliest_token(tinyworld) -> None:
    for size in ("auto", 1):
        found = reading.patchscope(
            tinyworld, SOURCE, TARGET, marker="Italy", into_layers=[0, 1], max_new_tokens=3, batch_size=size
        )
        for tokens, texts in zip(found.info["tokens"], found.info["texts"], strict=True):
            for some, said in zip(tokens, texts, strict=True):
                assert all(text.startswith(token) for token, text in zip(some, said, strict=True))
    assert found.info["texts"][0][0][3].startswith(" Paris")
    assert "' Paris" in reading.token_table(found)


def test_another_model_of_the_same_width() -> None:
    model, other = hookline.hook(causal_lm("gpt2")), hookline.hook(causal_lm("llama"))
    found = reading.patchscope(model, TOKENS, TOKENS.flip(1), marker=2, pos=4, layers=[1], into_layers=[2], into=other)
    value = model.cache(TOKENS)["resid_post", 1][0, 4]
    probs = by_hand(other, TOKENS.flip(1), value, 2, [2]).softmax(-1)
    torch.testing.assert_close(found.values[0, 0, 0], probs.max(), atol=1e-5, rtol=1e-4)


def test_another_width_needs_a_map(tinyworld) -> None:
    model = hookline.hook(causal_lm("gpt2"))
    how = {"marker": 1, "pos": 2, "layers": [1], "into_layers": [0], "into": tinyworld}
    with pytest.raises(HooklineError, match="width_map"):
        reading.patchscope(model, TOKENS, TARGET, **how)
    matrix = torch.randn(128, 32)
    found = reading.patchscope(model, TOKENS, TARGET, **how, width_map=matrix)
    same = reading.patchscope(model, TOKENS, TARGET, **how, width_map=lambda x: x @ matrix.T)
    value = matrix @ model.cache(TOKENS)["resid_post", 1][0, 2]
    probs = by_hand(tinyworld, TARGET, value, 0, [1]).softmax(-1)
    torch.testing.assert_close(found.values[0, 0, 0], probs.max(), atol=1e-5, rtol=1e-4)
    assert torch.equal(found.values, same.values)
    for wrong, why in (
        (lambda _: 3, "returned an int"),
        (lambda x: x[0], "returned the shape"),
        (matrix / 0, "finite"),
    ):
        with pytest.raises(HooklineError, match=why):
            reading.patchscope(model, TOKENS, TARGET, **how, width_map=wrong)
    with pytest.raises(HooklineError, match=r"\[7, 5\]"):
        reading.patchscope(model, TOKENS, TARGET, **how, width_map=torch.randn(7, 5))


def test_an_oracle_adds_activations_at_its_markers(tinyworld) -> None:
    value = tinyworld.cache(SOURCE)["resid_post", 1][0, 3]

    def added(x):
        x = x.clone()
        x[0, 3] += 8.0 * x[0, 3].norm() * value / value.norm()
        return x

    logits = tinyworld.run_with_hooks(TARGET, fwd_hooks=[("blocks.0.hook_resid_post", added)])[0, -1]
    how = {"marker": "Italy", "pos": 3, "into_layer": 0, "scale": 8.0, "max_new_tokens": 1}
    said = reading.oracle(tinyworld, SOURCE, TARGET, layers=[1, 2], **how)
    assert len(said) == 2
    assert (
        said[0]
        == tinyworld.to_string([int(logits.argmax())])
        != reading.oracle(tinyworld, SOURCE, TARGET, layers=[1], **how | {"scale": 0.0})
    )


def test_what_reads_refuse(tinyworld) -> None:
    for options in (
        {},  # no marker in the target
        {"marker": ""},
        {"marker": 40},
        {"marker": "Italy", "pos": 9},
        {"marker": "Italy", "layers": [4]},
        {"marker": "Italy", "into_layers": [9]},
        {"marker": "Italy", "points": "z"},
        {"marker": "Italy", "measure": "rank"},
        {"marker": "Italy", "measure": "size"},
        {"marker": "Italy", "tokens": " Paris and"},
        {"marker": "Italy", "resume": None},
    ):
        with pytest.raises(HooklineError):
            reading.patchscope(tinyworld, SOURCE, TARGET, **options)
    with pytest.raises(HooklineError, match="one prompt"):
        reading.patchscope(tinyworld, [SOURCE, TARGET], TARGET, marker="Italy")
    with pytest.raises(HooklineError, match="markers"):
        reading.oracle(tinyworld, SOURCE, TARGET, layers=[1], marker="Italy", pos=[1, 2])
    with pytest.raises(HooklineError, match="whole result"):
        reading.token_table(reading.patchscope(tinyworld, SOURCE, TARGET, marker="Italy").isel(pos=0))
