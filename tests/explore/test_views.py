"""The views have the library's own numbers, and follow the edits."""

import threading
import warnings

import pytest
import torch
from questions import EDITS, OTHER, PROMPT, STEER, ZERO, ask, mary_john, printed, unpacked
from stores import tinyworld
from tiny_models import causal_lm, seq2seq

import hookline
from hookline import HooklineError, edits
from hookline.experiments import ablation, head_detectors, logit_attribution, logit_lens, metrics, patching
from hookline.explore.attached_probe import AttachedProbe
from hookline.explore.feature_views import FEATURE_VIEWS
from hookline.explore.question import LiveEdit, Question
from hookline.explore.views import MEASURES, VIEWS, _rows, about_model, aligned, answer, answers


@pytest.fixture(scope="module")
def model():
    return tinyworld()


def test_next_tokens_are_the_models(model) -> None:
    data = ask(model, "next")
    probs = model(PROMPT)[0, -1].softmax(-1)
    assert torch.equal(unpacked(data["before"]), probs[data["ids"]])
    assert torch.equal(unpacked(data["after"]), probs[data["ids"]])
    assert data["target"]["text"] == " Mary"


def test_the_answers_to_compare(model) -> None:
    assert ask(model, "next", other=OTHER)["versus"]["text"] == " John"
    second = model(PROMPT)[0, -1].topk(2).indices[1].item()
    assert ask(model, "next")["versus"]["id"] == second
    assert ask(model, "next", other="Mary", target=" John")["target"]["text"] == " John"


def test_a_late_edit_is_not_reported_as_unused(model) -> None:
    assert ask(model, "point", point="blocks.0.hook_resid_post", edits=(ZERO,))["notes"] == []
    assert ask(model, "attention", layer=3, edits=(ZERO,))["notes"] == []


def test_next_tokens_follow_the_edits(model) -> None:
    data = ask(model, "next", edits=(ZERO,))
    hooks = [("blocks.3.attn.hook_z", edits.zero(head=4))]
    probs = model.run_with_hooks(PROMPT, fwd_hooks=hooks)[0, -1].softmax(-1)
    assert torch.equal(unpacked(data["after"]), probs[data["ids"]])
    assert data["texts"][0] == " John"


def test_an_edit_that_is_off_does_nothing(model) -> None:
    off = LiveEdit("zero", "blocks.3.attn.hook_z", head=4, on=False)
    data = ask(model, "next", edits=(off,))
    assert data["before"] == data["after"]


def test_the_lens_is_the_librarys(model) -> None:
    data = ask(model, "lens")
    found = logit_lens.lens_tokens(model, PROMPT, top=10, pos=None)
    assert torch.equal(unpacked(data["probs"]), found.probs)
    assert [[[data["words"][i] for i in cell] for cell in row] for row in data["cells"]] == found.tokens


def test_heads_by_attribution_and_ablation(model) -> None:
    answers = mary_john(model)
    data = ask(model, "heads", measure="attribution", **answers)
    found = logit_attribution.direct_logit_attribution(model, PROMPT, " Mary", " John", of="heads")
    assert torch.equal(unpacked(data["values"]), found.values)
    data = ask(model, "heads", measure="ablation", **answers)
    lost = ablation.ablate(model, PROMPT, metrics.logit_diff(" Mary", " John"), progress=False)
    assert torch.allclose(unpacked(data["values"]), lost.values - lost.info["clean"])
    assert data["clean"] == lost.info["clean"]


@pytest.mark.parametrize("kind", head_detectors.KINDS)
def test_heads_by_what_they_attend_to(model, kind) -> None:
    found = head_detectors.head_scores(model, kinds=kind).isel(kind=0)
    assert torch.equal(unpacked(ask(model, "heads", measure=kind)["values"]), found.values)


def test_attention_of_a_head_and_to_a_token(model) -> None:
    pattern = model.cache(PROMPT)["pattern", 3][0]
    assert torch.equal(unpacked(ask(model, "attention", layer=3, head=4)["values"]), pattern[4])
    values = unpacked(ask(model, "heads", measure="attention", pos=-1, src=9)["values"])
    assert torch.equal(values[3], pattern[:, -1, 9])


def test_components_sum_to_the_logit_difference(model) -> None:
    data = ask(model, "attribution", **mary_john(model))
    assert float(unpacked(data["values"]).sum()) + data["bias"] == pytest.approx(data["logit"], rel=1e-4)


@pytest.mark.parametrize("point", ["blocks.1.hook_resid_post", "blocks.1.mlp.hook_post", "blocks.1.ln1.hook_scale"])
def test_any_point_is_a_matrix(model, point) -> None:
    assert torch.equal(unpacked(ask(model, "point", point=point)["values"]), model.cache(PROMPT)[point][0])


def test_a_point_with_heads_is_one_head(model) -> None:
    values = unpacked(ask(model, "point", point="blocks.1.attn.hook_z", head=3)["values"])
    assert torch.equal(values, model.cache(PROMPT)["z", 1][0, :, 3])


@pytest.mark.parametrize(("measure", "points", "over"), [("stream", "resid_pre", "pos"), ("heads", "z", "head")])
def test_patching_is_the_librarys(model, measure, points, over) -> None:
    data = ask(model, "patching", measure=measure, other=OTHER, **mary_john(model))
    metric = metrics.logit_diff(" Mary", " John")
    found = patching.sweep(model, PROMPT, OTHER, metric, points=points, over=("layer", over), progress=False)
    assert torch.equal(unpacked(data["values"]), found.normalized.values)


def test_the_generated_text_follows_the_edits(model) -> None:
    data = ask(model, "generate", count=2, edits=(ZERO,))
    assert data["before"][0] == " Mary"
    assert data["after"][0] == " John"


def test_tokens_of_both_prompts_are_aligned(model) -> None:
    data = ask(model, "tokens", other=OTHER)
    assert data["tokens"]["texts"] == model.to_str_tokens(PROMPT)
    assert data["aligned"] == [[at, at] for at in range(14)]
    assert aligned([1, 2, 3], [1, 3]) == [[0, 0], [1, None], [2, 1]]


@pytest.mark.parametrize("name", EDITS)
def test_the_script_prints_the_same_numbers(model, name) -> None:
    data = ask(model, "next", other=OTHER, edits=(EDITS[name],))
    after = dict(zip(data["texts"], unpacked(data["after"]).tolist(), strict=True))
    found = printed(Question("next", PROMPT, other=OTHER, edits=(EDITS[name],)))
    assert found == pytest.approx({text: after[text] for text in found}, abs=6e-5)
    assert len(found) == 10


@pytest.mark.parametrize("name", EDITS)
@pytest.mark.parametrize("view", [view for view in VIEWS if view not in FEATURE_VIEWS])
def test_every_view_takes_every_edit(model, view, name) -> None:
    more = {"measure": "stream"} if view == "patching" else {"point": "blocks.0.hook_resid_post"}
    more |= {"probe": AttachedProbe(model, {"blocks.0.hook_resid_post": torch.ones(128)})}
    ask(model, view, other=OTHER, edits=(EDITS[name],), **({"measure": "ablation"} | more))


@pytest.mark.parametrize("name", EDITS)
def test_components_sum_with_every_edit(model, name) -> None:
    data = ask(model, "attribution", other=OTHER, edits=(EDITS[name],), **mary_john(model))
    values = dict(zip(data["components"], unpacked(data["values"]).tolist(), strict=True))
    assert sum(values.values()) + data["bias"] == pytest.approx(data["logit"], rel=1e-3, abs=1e-3)
    assert ("edits" in values) == (name == "steer")  # the others are not at the last position of the stream


def test_heads_while_the_stream_is_edited(model) -> None:
    edit = LiveEdit("scale", "blocks.0.hook_resid_pre", amount=1.0)  # changes nothing
    answers = {"measure": "attribution", **mary_john(model)}
    plain, values = (unpacked(ask(model, "heads", edits=each, **answers)["values"]) for each in ((), (edit,)))
    assert torch.allclose(values, plain, atol=1e-4)
    ask(model, "heads", edits=(STEER,), **answers)


@pytest.mark.parametrize(
    "given",
    [
        {"view": "nothing"},
        {"view": "next", "prompt": ""},
        {"view": "next", "prompt": "word " * 500},
        {"view": "next", "pos": 99},
        {"view": "next", "target": "Mary and John"},
        {"view": "next", "edits": [{"kind": "zero", "point": "blocks.9.hook_resid_pre"}]},
        {"view": "next", "edits": [{"kind": "patch", "point": "blocks.1.hook_resid_pre"}]},
        {"view": "next", "other": "Mary", "edits": [{"kind": "patch", "point": "blocks.1.hook_resid_pre"}]},
        {"view": "next", "edits": [{"kind": "boom", "point": "blocks.1.hook_resid_pre"}]},
        {"view": "next", "edits": [{"kind": "zero"}]},
        {"view": "next", "edits": "all"},
        {"view": "next", "pos": True},
        {"view": "next", "unknown": 1},
        {"view": "next", "saes": "/tmp"},
        {"view": "features"},
        {"view": "scores"},
        {"view": "next", "edits": [{"kind": "zero", "point": "blocks.1.hook_resid_post", "feature": 1}]},
        {"view": "next", "edits": [{"kind": "mean", "point": "blocks.1.hook_resid_post", "feature": 1}]},
        {"view": "next", "edits": [{"kind": "zero", "point": "blocks.1.hook_resid_post", "feature": 1, "neuron": 2}]},
        {"view": "attention", "head": 99},
        {"view": "patching", "measure": "stream"},
        {"view": "patching", "measure": "stream", "other": "Mary"},
        {"view": "heads", "measure": "beauty"},
        {"view": "generate", "count": 10**9},
    ],
)
def test_a_bad_question_is_told(model, given) -> None:
    with pytest.raises(HooklineError):
        answer(model, Question.of({"prompt": PROMPT, **given}))


def test_a_question_reads_as_it_was_written() -> None:
    asked = Question.of({"view": "next", "prompt": PROMPT, "edits": [{"kind": "zero", "point": ZERO.point, "head": 4}]})
    assert asked == Question("next", PROMPT, edits=(ZERO,))


def test_the_model_is_described(model) -> None:
    data = about_model(model, "tinyworld")
    assert (data["layers"], data["heads"]) == (4, 8)
    assert data["points"]["blocks.0.attn.hook_z"] == "b p h e"


def test_the_warnings_of_another_thread_are_not_notes(model, monkeypatch) -> None:
    def view(model, asked):
        other = threading.Thread(target=lambda: warnings.warn("of the other thread", stacklevel=1))
        other.start()
        other.join()
        warnings.warn("of the view", stacklevel=1)
        return {}

    monkeypatch.setitem(VIEWS, "next", view)
    with pytest.warns(UserWarning, match="thread") as shown:
        assert ask(model, "next")["notes"] == ["of the view"]
    assert len(shown) == 1


def test_numbers_that_json_does_not_have_are_null(model, monkeypatch) -> None:
    data = {"kl": float("nan"), "of": {"one": float("inf"), "two": 2.0}}
    monkeypatch.setitem(VIEWS, "next", lambda model, asked: data)
    assert ask(model, "next") == {"view": "next", "kl": None, "of": {"one": None, "two": 2.0}, "notes": []}


@pytest.mark.parametrize(("tokens", "given"), [(2, {}), (2, {"target": 1}), (2, {"versus": 1}), (3, {})])
def test_a_vocabulary_of_a_few_tokens(tokens, given) -> None:
    found = answers(tinyworld(), Question("next", PROMPT, **given), torch.arange(float(tokens)))
    assert sorted(found) == [tokens - 2, tokens - 1]


def test_with_one_token_there_is_nothing_to_compare() -> None:
    with pytest.raises(HooklineError, match="the same"):
        answers(tinyworld(), Question("next", PROMPT), torch.zeros(1))


def test_layers_with_fewer_heads_than_others(model) -> None:
    found = unpacked(_rows(model, {0: torch.tensor([5.0]), 2: torch.tensor([1.0, 2.0])})["values"])
    assert found[2].tolist() == [1, 2]
    assert found[0, 0] == 5
    assert found.isnan().sum() == 5


def test_a_model_without_heads() -> None:
    mamba = hookline.hook(causal_lm("mamba", vocab_size=1024), tinyworld().tokenizer)
    for measure in MEASURES:
        with pytest.raises(HooklineError, match=r"no attention|none of"):
            answer(mamba, Question("heads", "Mary gave", measure=measure, target=10, versus=20))


def test_the_text_of_an_encoder_decoder_is_whole() -> None:
    model = hookline.hook(seq2seq("bart", vocab_size=1024), tinyworld().tokenizer)
    found = answer(model, Question("generate", "Mary gave John a drink", count=3))["before"]
    ids = model.generate(model.to_tokens("Mary gave John a drink"), max_new_tokens=3, do_sample=False)[0, 1:]
    assert found == [model.to_string([token]) for token in ids.tolist()]
    assert len(found) > 0


@pytest.mark.parametrize("view", ["attribution", "heads"])
@pytest.mark.parametrize("kind", ["zero", "scale", "mean", "patch"])
@pytest.mark.parametrize("point", ["ln_final.hook_in", "ln_final.hook_out", "unembed.hook_out"])
def test_parts_sum_to_the_logit_or_there_are_none(model, point, kind, view) -> None:
    edit = LiveEdit(kind, point, amount=0.3)
    try:
        data = ask(model, view, other=OTHER, edits=(edit,), **mary_john(model))
    except HooklineError:
        assert (point, kind) not in {("ln_final.hook_out", "zero"), ("ln_final.hook_out", "scale")}
        return
    assert point == "ln_final.hook_out"  # its factor is known, so the parts are scaled by it
    if view == "attribution":
        assert data["bias"] + unpacked(data["values"]).sum() == pytest.approx(data["logit"], abs=1e-4)
