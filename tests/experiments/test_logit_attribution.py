from __future__ import annotations

import pytest
import tiny_models
import torch
from torch import Tensor

import hookline
from hookline import HooklineError
from hookline.experiments import logit_attribution, logit_lens

LINEAR = ["gpt2", "llama", "mixtral", "gptj", "cohere", "granite", "opt", "gpt_neox", "falcon", "gemma", "qwen3"]
PROMPT = "When Mary and John went to the store, John gave a drink to"
SHORT = "Tom likes"
BYS = ("components", "layers", "heads", "neurons")


def tokens(rows: int = 2) -> Tensor:
    return torch.randint(3, 60, (rows, 7), generator=torch.Generator().manual_seed(0))


def nudged(kind: str) -> hookline.HookedModel:
    return hookline.hook(tiny_models.nudged(kind).eval())


@pytest.mark.parametrize("kind", LINEAR)
@pytest.mark.parametrize("by", BYS)
def test_the_parts_sum_to_the_logit(kind, by) -> None:
    model, text = nudged(kind), tokens()
    if by == "neurons" and kind == "mixtral":
        with pytest.raises(HooklineError, match="neurons"):
            logit_attribution.direct_logit_attribution(model, text, 5, of=by)
        return
    with torch.no_grad():
        true = model(text)
    for pos in (-1, 2):
        result = logit_attribution.direct_logit_attribution(
            model, text, [5, 6], [9, 8], of=by, pos=pos, per_example=True
        )
        expected = true[[0, 1], pos, [5, 6]] - true[[0, 1], pos, [9, 8]]
        assert result.axes[-1] == "example"
        total = result.values.sum(tuple(range(result.values.ndim - 1))) + result.info["bias"].values
        total = total + (result.info["rest"].values if by in ("heads", "neurons") else 0)
        torch.testing.assert_close(total, expected, rtol=1e-3, atol=2e-3)
        torch.testing.assert_close(result.info["logit"].values, expected)


def test_each_head_and_neuron_is_what_its_vector_gives() -> None:
    model, text = nudged("gpt2"), tokens(1)
    cache = model.run_with_cache(text)[1]
    scale = cache["ln_final.hook_scale"][0, -1]
    direction = model.W_U[:, 5] * model.transformer.ln_f.weight
    by_head = logit_attribution.direct_logit_attribution(model, text, 5, of="heads")
    added = cache["z", 2][0, -1, 1] @ model.blocks[2].attn.W_O[1]
    assert by_head.sel(layer=2, head=1).item() == pytest.approx(
        (((added - added.mean()) / scale) @ direction).item(), abs=1e-4
    )
    by_neuron = logit_attribution.direct_logit_attribution(model, text, 5, of="neurons")
    added = cache["post", 3][0, -1, 70] * model.blocks[3].mlp.W_out[70]
    assert by_neuron.sel(layer=3, neuron=70).item() == pytest.approx(
        (((added - added.mean()) / scale) @ direction).item(), abs=1e-4
    )
    one = logit_attribution.direct_logit_attribution(model, text, 5, of="neurons", layers=-1)
    assert one.axes == ("neuron",)
    torch.testing.assert_close(one.values, by_neuron.values[3])
    assert one.info["rest"] + one.values.sum().item() == pytest.approx(
        by_neuron.info["rest"] + by_neuron.values.sum().item(), abs=1e-3
    )


def test_layers_are_the_sums_of_their_components() -> None:
    model, text = nudged("llama"), tokens(1)
    parts, layers = (
        logit_attribution.direct_logit_attribution(model, text, 5, of=by) for by in ("components", "layers")
    )
    assert layers.coords["layer"] == ["embed", 0, 1, 2, 3]
    both = parts.sel(component="1_attn_out").item() + parts.sel(component="1_mlp_out").item()
    assert layers.sel(layer=1).item() == pytest.approx(both, abs=1e-4)
    assert layers.sel(layer="embed").item() == pytest.approx(parts.sel(component="embed").item(), abs=1e-5)


def test_every_position_and_the_tokens_that_come_next(tinyworld) -> None:
    result = logit_attribution.direct_logit_attribution(tinyworld, PROMPT, pos=None, of="layers")
    assert result.axes == ("layer", "pos")
    assert result.shape == (5, 13)
    ids = tinyworld.to_tokens(PROMPT)[0]
    with torch.no_grad():
        true = tinyworld(PROMPT)[0, torch.arange(13), ids[1:]]
    torch.testing.assert_close(result.values.sum(0) + result.info["bias"].values, true, rtol=1e-4, atol=1e-3)
    third = logit_attribution.direct_logit_attribution(tinyworld, PROMPT, pos=3, of="layers")
    torch.testing.assert_close(third.values, result.isel(pos=3).values, rtol=1e-4, atol=1e-4)
    fixed = logit_attribution.direct_logit_attribution(tinyworld, PROMPT, " Mary", pos=None, of="layers")
    assert fixed.shape == (5, 14)


def test_prompts_are_averaged_and_padding_does_not_count(tinyworld) -> None:
    each = [
        logit_attribution.direct_logit_attribution(tinyworld, text, " Mary", of="heads") for text in (PROMPT, SHORT)
    ]
    both = logit_attribution.direct_logit_attribution(tinyworld, [PROMPT, SHORT], " Mary", of="heads")
    torch.testing.assert_close(both.values, torch.stack([one.values for one in each]).mean(0), rtol=1e-3, atol=1e-4)
    assert both.info["logit"] == pytest.approx(sum(one.info["logit"] for one in each) / 2, abs=1e-3)


def test_the_name_mover_is_the_head_that_adds_most(tinyworld) -> None:
    assert (
        logit_attribution.direct_logit_attribution(tinyworld, PROMPT, " Mary", " John", of="heads")
        .top(1)[0]
        .labels["layer"]
        == 3
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"of": "token"}, "'components'"),
        ({"of": "layers", "layers": 1}, "heads or neurons"),
        ({"of": "heads", "layers": 4}, "layer 4.*0 to 3"),
        ({"pos": 14}, "position 14"),
        ({"tokens": [" Mary", " John"]}, "for 1 prompt"),
        ({"tokens": None}, "no token after"),
        ({"wrong": " Mary"}, "are the same"),
        ({"tokens": "Mary and"}, "2 tokens, not one"),
    ],
)
def test_what_cannot_be_attributed_is_refused(tinyworld, options, message) -> None:
    with pytest.raises(HooklineError, match=message):
        logit_attribution.direct_logit_attribution(tinyworld, PROMPT, **{"tokens": " Mary"} | options)


def test_a_readout_that_is_not_linear_is_refused_but_can_be_looked_through() -> None:
    model, text = nudged("gemma2"), tokens()
    with pytest.raises(HooklineError, match="not linear"):
        logit_attribution.direct_logit_attribution(model, text, 5)
    with torch.no_grad():
        true = model(text)
    lens = logit_lens.logit_lens(model, text, 5, measure="logit", per_example=True)
    torch.testing.assert_close(lens.sel(layer=3).values.T, true[..., 5], rtol=1e-3, atol=1e-3)


def test_a_stream_that_is_normed_is_refused() -> None:
    model = nudged("openai-gpt")
    for refused in (logit_attribution.direct_logit_attribution, logit_lens.logit_lens):
        with pytest.raises(HooklineError, match="normalizes"):
            refused(model, tokens(), 5)
    with pytest.raises(HooklineError, match="final norm"):
        logit_attribution.direct_logit_attribution(hookline.hook(tiny_models.encoder("bert", head=True)), tokens(), 5)


@pytest.mark.parametrize("kind", LINEAR)
def test_the_lens_ends_with_what_the_model_says(kind) -> None:
    model, text = nudged(kind), tokens()
    with torch.no_grad():
        true = model(text).log_softmax(-1)
    lens = logit_lens.logit_lens(model, text, [5, 6], measure="log_prob", per_example=True)
    assert lens.axes == ("layer", "pos", "example")
    assert lens.coords["layer"] == ["embed", 0, 1, 2, 3]
    expected = torch.stack([true[0, :, 5], true[1, :, 6]], -1)
    torch.testing.assert_close(lens.isel(layer=-1).values, expected, rtol=1e-3, atol=1e-3)
    prob = logit_lens.logit_lens(model, text, [5, 6], per_example=True)
    torch.testing.assert_close(prob.values, lens.values.exp(), rtol=1e-3, atol=1e-5)


def test_the_lens_in_the_middle_is_the_model_without_its_last_layers() -> None:
    model, text = nudged("llama"), tokens()
    lens = logit_lens.logit_lens(model, text, 5, measure="rank", per_example=True)
    with torch.no_grad():
        stream = model.cache(text)["resid_post", 1]
        early = model.lm_head(model.model.norm(stream))
    expected = (early > early[..., 5:6]).sum(-1).double()
    assert torch.equal(lens.sel(layer=1).values.T.double(), expected)


def test_the_lens_goes_by_parts_where_there_is_little_room(tinyworld, monkeypatch) -> None:
    whole = logit_lens.logit_lens(tinyworld, PROMPT)
    monkeypatch.setattr("hookline.experiments.logit_lens._ROOM", 4 * 5 * tinyworld.cfg.d_vocab * 3)
    torch.testing.assert_close(logit_lens.logit_lens(tinyworld, PROMPT).values, whole.values)


def test_without_tokens_the_lens_is_about_what_the_model_says(tinyworld) -> None:
    assert logit_lens.logit_lens(tinyworld, PROMPT, measure="rank").isel(layer=-1).values.eq(0).all()
    at_end = logit_lens.logit_lens(tinyworld, [PROMPT, SHORT], measure="rank", pos=-1)
    assert at_end.axes == ("layer",)
    assert at_end.values[-1] == 0
    assert at_end.values[0] > 0


def test_the_table_of_tokens(tinyworld) -> None:
    table = logit_lens.lens_tokens(tinyworld, PROMPT, top=3)
    assert table.tokens[-1][0][0] == " Mary"
    assert table.probs.shape == (5, 1, 3)
    lines = repr(table).splitlines()
    assert len(lines) == 6
    assert lines[-1].startswith("3")
    assert "' Mary' 0.9" in lines[-1]
    assert table._repr_html_().count("<tr>") == 6
    every = logit_lens.lens_tokens(tinyworld, PROMPT, top=1, pos=None)
    assert every.rows()[0][-1] == "13: to"
    assert every.tokens[-1][-1] == [" Mary"]
    torch.testing.assert_close(every.probs[:, -1], table.probs[:, 0, :1])


def test_lenses_that_cannot_be_are_refused(tinyworld) -> None:
    with pytest.raises(HooklineError, match="measure"):
        logit_lens.logit_lens(tinyworld, PROMPT, measure="loss")
    with pytest.raises(HooklineError, match=r"differ.*length"):
        logit_lens.logit_lens(tinyworld, [PROMPT, SHORT])
    with pytest.raises(HooklineError, match="one prompt"):
        logit_lens.lens_tokens(tinyworld, [PROMPT, SHORT])
    with pytest.raises(HooklineError, match="got 0"):
        logit_lens.lens_tokens(tinyworld, PROMPT, top=0)
