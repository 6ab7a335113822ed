"""Edits on the page are the library's, in their order, and a script prints the same numbers."""

from dataclasses import replace

import pytest
import torch
from questions import EDITS, OTHER, PROMPT, STEER, ZERO, ask, mary_john, printed, unpacked
from stores import tinyworld

from hookline import HooklineError, edits
from hookline.explore.live_edits import library_edits
from hookline.explore.question import KINDS, LiveEdit, Question
from hookline.explore.views import answer
from hookline.text.outliers import outlying, row_norms


@pytest.fixture(scope="module")
def model():
    return tinyworld()


@torch.no_grad()
@pytest.mark.parametrize("name", ["patch last", "zero attention", "several"])
def test_heads_while_an_attention_output_is_edited(model, name) -> None:
    layer_3, zero = EDITS["patch last"], LiveEdit("zero", "blocks.2.hook_attn_out")
    given = {"patch last": (layer_3,), "zero attention": (zero,), "several": (layer_3, zero, STEER, ZERO)}[name]
    answers = mary_john(model)
    data = ask(model, "heads", measure="attribution", other=OTHER, edits=given, **answers)
    with model.hooks(fwd_hooks=library_edits(model, Question("next", PROMPT, OTHER, given))):
        cache = model.run_with_cache(PROMPT, pos_slice=-1)[1]
    outputs = torch.stack([cache["attn_out", layer] for layer in range(4)])
    whole = float(cache.logit_attrs(outputs, answers["target"], answers["versus"]).sum())
    biases = torch.stack([model.b_O[layer] for layer in range(4)])[:, None]
    bias = float(cache.logit_attrs(biases, answers["target"], answers["versus"]).sum())
    values = unpacked(data["values"])
    assert float(values.sum()) + bias + data["edits"] == pytest.approx(whole, abs=1e-3)
    assert abs(data["edits"]) > 0.1


def test_heads_without_such_edits_have_no_part_of_edits(model) -> None:
    assert ask(model, "heads", edits=(ZERO,))["edits"] is None
    assert ask(model, "heads", edits=(STEER,))["edits"] is None


PLACES = {
    "head": {"point": "blocks.3.attn.hook_z", "head": 4},
    "neuron": {"point": "blocks.1.mlp.hook_post", "neuron": 7},
    "cell": {"point": "blocks.1.hook_resid_post", "pos": 9},
    "layer": {"point": "blocks.2.hook_attn_out"},
}


PAIRS = [
    (kind, place)
    for kind in KINDS
    for place in PLACES
    if kind != "steer" or place in ("cell", "layer")  # a vector is added to the stream, or to what is added to it
]


@pytest.mark.parametrize(("kind", "place"), PAIRS)
def test_every_edit_at_every_place_is_the_librarys(model, kind, place) -> None:
    more = {"positive": "Mary", "negative": "John"} if kind == "steer" else {}
    edit = LiveEdit(kind, **PLACES[place], amount=2.5, **more)
    asked = Question("next", PROMPT, OTHER, (edit,))
    data = answer(model, asked)
    assert data["before"] != data["after"]
    after = dict(zip(data["texts"], unpacked(data["after"]).tolist(), strict=True))
    found = printed(asked)
    assert found == pytest.approx({text: after[text] for text in found}, abs=6e-5)


def test_edits_at_one_point_apply_in_their_order(model) -> None:
    zero, steer = LiveEdit("zero", STEER.point), STEER
    one, other = (unpacked(ask(model, "next", edits=each)["logits"])[1] for each in ((zero, steer), (steer, zero)))
    assert not torch.equal(one, other)
    assert torch.equal(other, unpacked(ask(model, "next", edits=(zero,))["logits"])[1])


STORY, OTHER_STORY = "When Mary and John went to the", "When Anna and John went to the"


@pytest.mark.parametrize("pos", [None, 1, 6])
@pytest.mark.parametrize("kind", KINDS)
def test_generation_with_edits_of_the_prompt_or_of_all_positions(model, kind, pos) -> None:
    """An edit of all positions acts on the new tokens, too; a patch and an edit of one position on the prompt only."""
    edit = LiveEdit(kind, "blocks.1.hook_mlp_out", pos=pos, amount=1.5, positive=" Mary", negative=" John")
    asked = Question("generate", STORY, OTHER_STORY, (edit,), count=8)
    spread = tuple(replace(edit, pos=each) for each in range(7)) if (kind, pos) == ("patch", None) else (edit,)
    hooks, tokens = library_edits(model, replace(asked, edits=spread)), model.to_tokens(STORY)
    length = tokens.shape[1]
    for _ in range(8):
        new = model.run_with_hooks(tokens, fwd_hooks=hooks)[0, -1].argmax()
        tokens = torch.cat([tokens, new.view(1, 1)], 1)
    found = answer(model, asked)["after"]
    assert length == 7
    assert len(found) > 2
    assert found == [model.to_string([token]) for token in tokens[0, length:].tolist()][: len(found)]


def test_the_mean_is_that_of_the_positions_of_the_prompt(model) -> None:
    x = model.cache(PROMPT)["mlp_out", 1]
    assert not outlying(row_norms(x[0]), "exclude")[0].any()  # no attention sink, so the mean is over all positions
    expected = model.run_with_hooks(PROMPT, fwd_hooks=[("blocks.1.hook_mlp_out", edits.replace(x.mean((0, 1))))])
    data = ask(model, "next", edits=(LiveEdit("mean", "blocks.1.hook_mlp_out"),))
    assert torch.allclose(unpacked(data["after"]), expected[0, -1].softmax(-1)[data["ids"]], atol=1e-6)


@pytest.mark.parametrize("part", ["head", "neuron"])
def test_a_steering_vector_is_not_of_a_part(part) -> None:
    with pytest.raises(HooklineError, match="whole"):
        LiveEdit.of({"kind": "steer", "point": STEER.point, "positive": "Mary", "negative": "John", part: 0})
