"""Features on the page are the library's; edits of them are splices, and a script prints the same numbers."""

import copy
import json
from dataclasses import replace

import pytest
import torch
from autoencoders import sae_for
from dictionaries import CAPITAL, COUNTRIES, ITALY, JAPAN, POINT, TEXTS, countries
from questions import STEER, printed, unpacked
from stores import tinyworld
from typer.testing import CliRunner

import hookline
from hookline import HooklineError, edits
from hookline.cli import app
from hookline.explore import explore
from hookline.explore.attached_saes import AttachedSaes
from hookline.explore.feature_views import FEATURE_VIEWS, direct_logits
from hookline.explore.jobs import Cancelled, Worker
from hookline.explore.question import LiveEdit, Question
from hookline.explore.views import VIEWS, about_model, answer
from hookline.sae import evaluate, run_with_features, top_contexts
from hookline.store import LocalStore

NAME = "countries"


def of(feature, kind="zero", **more) -> LiveEdit:
    return LiveEdit(kind, POINT, sae=NAME, feature=feature, **more)


EDITS = {
    "off": (of(ITALY, pos=3),),
    "scale": (of(ITALY, "scale", amount=-0.5),),
    "set": (of(JAPAN, "set", amount=4.0, pos=-2),),
    "swap": (of(ITALY, pos=3), of(JAPAN, "set", amount=9.0, pos=3)),
    "stacked": (
        of(ITALY, pos=3),
        LiveEdit("scale", POINT, amount=1.1),
        LiveEdit("zero", "blocks.3.attn.hook_z", head=4),
        of(JAPAN, "set", amount=4.0, pos=3),
        STEER,
    ),
}


@pytest.fixture(scope="module")
def model():
    return tinyworld()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    found = tmp_path_factory.mktemp("features")
    countries().save(found / NAME)
    hookline.harvest(tinyworld(), TEXTS, POINT, found / "store", progress=False)
    return found


@pytest.fixture(scope="module")
def saes(model, folder):
    return AttachedSaes(model, folder / NAME, folder / "store")


def ask(model, view, saes, **more):
    data = answer(model, Question(view, CAPITAL, saes=saes, **more))
    json.dumps(data, allow_nan=False)
    return data


def test_the_features_are_the_librarys(model, saes) -> None:
    data = ask(model, "features", saes, pos=3)
    features = run_with_features(model, CAPITAL, saes=countries())[1][POINT][0]
    assert torch.equal(unpacked(data["before"]), features[:, data["features"]].T)
    assert data["before"] == data["after"]
    assert sorted(data["features"]) == (features > 0).any(0).nonzero().flatten().tolist()
    assert data["here"]["features"][0] == ITALY == int(features[3].argmax())
    assert torch.equal(unpacked(data["here"]["before"]), features[3, data["here"]["features"]])
    assert unpacked(data["active"]).tolist() == (features > 0).sum(1).tolist()


@torch.no_grad()
def test_how_good_the_autoencoder_is(model, saes) -> None:
    data = ask(model, "features", saes)
    quality = evaluate(countries(), model, [CAPITAL])
    assert data["quality"]["loss_spliced"] == pytest.approx(quality.loss_spliced)
    assert data["quality"]["loss_recovered"] == pytest.approx(quality.loss_recovered)
    assert data["quality"]["explained_variance"] == pytest.approx(quality.explained_variance)
    splice = countries().spliced(keep_error=False)
    probs = model.run_with_hooks(CAPITAL, fwd_hooks=[splice])[0, -1].softmax(-1)
    assert data["spliced"]["text"] == " Rome"
    assert data["spliced"]["after"] == pytest.approx(float(probs[model.to_single_token(" Rome")]), rel=1e-4)
    x = model.cache(CAPITAL)[POINT]
    error = (x - countries()(x)).norm(dim=-1) / x.norm(dim=-1)
    assert torch.allclose(unpacked(data["relative_error"]), error[0])


def test_a_prompt_of_one_token_has_no_loss(model, saes) -> None:
    assert answer(model, Question("features", "The", saes=saes))["quality"] is None


def test_the_pinned_feature_is_always_shown(model, saes) -> None:
    data = ask(model, "features", saes, feature=31)
    assert 31 in data["features"]
    assert data["here"]["features"][-1] == 31


def test_top_contexts_are_the_librarys(model, saes, folder) -> None:
    data = ask(model, "contexts", saes, feature=ITALY)
    expected = top_contexts(countries(), model, LocalStore(folder / "store"), ITALY, 12)
    found = [(each["activation"], each["example"], each["position"]) for each in data["contexts"]]
    assert found == [(each.activation, each.example, each.position) for each in expected]
    for each in data["contexts"]:
        assert float(unpacked(each["values"])[each["at"]]) == pytest.approx(each["activation"], rel=1e-5)
    assert data["contexts"][0]["texts"][data["contexts"][0]["at"]] == " Italy"
    assert saes.profile(model, NAME) is saes.profile(model, "")  # the store is read once
    assert ask(model, "features", saes, pos=3)["labels"][str(ITALY)] == " Italy"


@pytest.mark.parametrize("point", [POINT, "blocks.2.attn.hook_z", "blocks.2.mlp.hook_post", "blocks.2.hook_mlp_out"])
def test_the_logits_of_a_direction(model, point) -> None:
    """One unit more of a feature changes what is added to the stream, and that is read out."""
    x = model.cache(CAPITAL)[point]
    is_z = point.endswith("hook_z")
    sae = sae_for(x[0, 0].numel(), **({"reshape_activations": "hook_z"} if is_z else {}))
    found = AttachedSaes(model, {point: sae}).all[0]
    with torch.no_grad():
        logits = direct_logits(model, Question("feature", CAPITAL, pos=3), found, 5, x[:, 3])
        cache = model.run_with_cache(CAPITAL, pos_slice=3)[1]
        with model.hooks([sae.spliced(point, edits=[edits.add(1.0, neuron=5, pos=3)])]):
            more = model.cache(CAPITAL, pos_slice=3)
        where = {"blocks.2.attn.hook_z": "blocks.2.hook_attn_out", "blocks.2.mlp.hook_post": "blocks.2.hook_mlp_out"}
        change = more[where.get(point, point)] - cache[where.get(point, point)]
        one = cache.logit_attrs(change, " Rome")
        assert torch.allclose(logits, cache.logit_attrs(change, None)[0], atol=1e-4)
    assert float(logits[model.to_single_token(" Rome")]) == pytest.approx(float(one), abs=1e-4)


@torch.no_grad()
def test_tokens_that_a_feature_raises_and_lowers(model, saes) -> None:
    data = ask(model, "feature", saes, feature=ITALY, pos=3)
    logits = direct_logits(
        model, Question("feature", CAPITAL, pos=3), saes.all[0], ITALY, model.cache(CAPITAL)[POINT][:, 3]
    )
    values = unpacked(data["logits"]["values"])
    assert float(values[0]) == pytest.approx(float(logits.max()))
    assert float(values[-1]) == pytest.approx(float(logits.min()))
    assert len(data["logits"]["texts"]) == 16


def test_a_point_without_a_direct_path_is_told(model) -> None:
    point = "blocks.2.ln1.hook_normalized"
    saes = AttachedSaes(model, {point: sae_for(128)})
    data = ask(model, "feature", saes, feature=0)
    assert data["logits"] is None
    assert point in data["why"]


def test_switching_a_feature_changes_the_answer(model, saes) -> None:
    assert ask(model, "next", saes)["texts"][0] == " Rome"
    assert ask(model, "next", saes, edits=EDITS["swap"])["texts"][0] == " Tokyo"
    data = ask(model, "features", saes, edits=EDITS["swap"], pos=3)
    values = dict(zip(data["here"]["features"], unpacked(data["here"]["after"]).tolist(), strict=True))
    assert (values[ITALY], values[JAPAN]) == (0.0, 9.0)


def test_an_edit_that_changes_nothing_changes_nothing(model, saes) -> None:
    features = run_with_features(model, CAPITAL, saes=countries())[1][POINT][0]
    idle = int((features == 0).all(0).nonzero()[0])
    data = ask(model, "next", saes, edits=(of(ITALY, "scale", amount=1.0), of(idle)))
    assert data["before"] == data["after"]


@pytest.mark.parametrize("name", EDITS)
def test_the_script_prints_the_same_numbers(model, saes, name) -> None:
    data = ask(model, "next", saes, edits=EDITS[name])
    after = dict(zip(data["texts"], unpacked(data["after"]).tolist(), strict=True))
    found = printed(Question("next", CAPITAL, edits=EDITS[name], saes=saes))
    assert found == pytest.approx({text: after[text] for text in found}, abs=6e-5)
    assert data["before"] != data["after"]


def test_edits_of_features_stack_in_their_order(model, saes) -> None:
    off, twice, layer = of(ITALY, pos=3), of(ITALY, "scale", amount=2.0), LiveEdit("scale", POINT, amount=0.5)
    sae = countries()
    one = [sae.spliced(edits=[edits.zero(neuron=ITALY, pos=3), edits.scale(2.0, neuron=ITALY)])]
    two = [
        sae.spliced(edits=[edits.zero(neuron=ITALY, pos=3)]),
        (POINT, edits.scale(0.5)),
        sae.spliced(edits=[edits.scale(2.0, neuron=ITALY)]),
    ]
    for given, hooks in (((off, twice), one), ((off, layer, twice), two)):
        data = ask(model, "next", saes, edits=given)
        probs = model.run_with_hooks(CAPITAL, fwd_hooks=hooks)[0, -1].softmax(-1)
        assert torch.equal(unpacked(data["after"]), probs[data["ids"]])
    off_again = tuple(replace(each, on=False) for each in (off, twice))
    data = ask(model, "next", saes, edits=off_again)
    assert data["before"] == data["after"]


@pytest.mark.parametrize("name", ["off", "swap", "stacked"])
@pytest.mark.parametrize("view", [view for view in VIEWS if view != "scores"])  # which need a probe: test_scores.py
def test_every_view_takes_edits_of_features(model, saes, view, name) -> None:
    more = {"measure": "stream"} if view == "patching" else {"measure": "ablation"}
    other = "The capital of Japan is"
    data = ask(model, view, saes, other=other, edits=EDITS[name], point=POINT, feature=ITALY, count=3, **more)
    assert data["notes"] == []


def test_heads_and_components_with_edits_of_features(model, saes) -> None:
    data = ask(model, "attribution", saes, edits=EDITS["swap"])
    assert float(unpacked(data["values"]).sum()) + data["bias"] == pytest.approx(data["logit"], abs=1e-3)
    ask(model, "heads", saes, edits=EDITS["swap"], measure="attribution")


@pytest.mark.filterwarnings("ignore:the autoencoder was trained at")  # one is used in two layers here
def test_several_autoencoders(model, folder) -> None:
    several = AttachedSaes(model, [folder / NAME, countries(), f"blocks.2.hook_resid_post={folder / NAME}"])
    assert [each.name for each in several.all] == [NAME, POINT, f"{NAME} 2"]
    assert several.named(f"{NAME} 2").point == "blocks.2.hook_resid_post"
    given = (of(ITALY), LiveEdit("zero", "blocks.2.hook_resid_post", sae=f"{NAME} 2", feature=ITALY))
    asked = Question("next", CAPITAL, edits=given, saes=several)
    data = answer(model, asked)
    after = dict(zip(data["texts"], unpacked(data["after"]).tolist(), strict=True))
    assert printed(asked) == pytest.approx({text: after[text] for text in printed(asked)}, abs=6e-5)
    assert len(about_model(model, "tinyworld", several)["saes"]) == 3


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"blocks.1.mlp.hook_post": countries()}, "Points of width 128: hook_embed"),
        ({"blocks.9.hook_resid_post": countries()}, "blocks.N.hook_resid_post"),
        ({"blocks.1.attn.hook_pattern": countries()}, "Points of width 128"),
        (sae_for(128), "hook_name"),
        (sae_for(77, hook_name=POINT), "Points of width 77: none"),
        ([], "empty"),
        ("no/such/folder", "no/such/folder"),
    ],
)
def test_an_autoencoder_that_does_not_fit_is_refused(model, given, told) -> None:
    with pytest.raises(HooklineError, match=told):
        explore(model, CAPITAL, browser=False, saes=given)


def test_a_store_that_does_not_fit_is_refused(model, folder) -> None:
    with pytest.raises(HooklineError, match=r"it has blocks\.1\.hook_resid_post"):
        AttachedSaes(model, {"blocks.2.hook_resid_post": countries()}, folder / "store")
    with pytest.raises(HooklineError, match="saes"):
        explore(model, CAPITAL, browser=False, store=folder / "store")
    with pytest.raises(HooklineError, match="--store"):
        ask(model, "contexts", AttachedSaes(model, countries()), feature=0)


def test_a_store_of_other_weights_is_noted(folder) -> None:
    model = hookline.load("tinyworld")
    with torch.no_grad():
        model.module.lm_head.weight[0, 0] += 1.0
    other = AttachedSaes(model, folder / NAME, folder / "store")
    assert "other weights" in ask(model, "contexts", other, feature=ITALY)["notes"][0]


@pytest.mark.parametrize(
    "more",
    [
        {"view": "features", "sae": "unknown"},
        {"view": "feature", "feature": 99},
        {"view": "feature"},
        {"view": "contexts", "feature": -99},
        {"view": "features", "pos": 50},
        {"view": "next", "edits": (of(99),)},
        {"view": "next", "edits": (replace(of(ITALY), sae="unknown"),)},
        {"view": "next", "edits": (replace(of(ITALY), point="blocks.2.hook_resid_post"),)},
    ],
)
def test_a_bad_question_about_features_is_told(model, saes, more) -> None:
    with pytest.raises(HooklineError):
        ask(model, more.pop("view"), saes, **more)


def test_reading_a_store_can_be_canceled(model, saes) -> None:
    def forever():
        while True:
            for _ in saes.store.batches(8, [POINT]):
                pass

    with Worker() as worker:
        job = worker.submit(forever, tab="a", slot="contexts", state=0)
        worker.submit(lambda: 1, tab="a", slot="contexts", state=1).result()
        with pytest.raises(Cancelled):
            job.result()


def test_the_command_takes_autoencoders(folder, tmp_path) -> None:
    page, runner = tmp_path / "page.html", CliRunner()
    options = ["--sae", str(folder / NAME), "--store", str(folder / "store"), "--prompt", CAPITAL]
    result = runner.invoke(app, ["explore", "--export", str(page), *options])
    assert result.exit_code == 0, result.output
    assert '"relative_error"' in page.read_text()
    bad = ["--sae", f"blocks.1.mlp.hook_post={folder / NAME}"]
    result = runner.invoke(app, ["explore", "--export", str(page), *bad])
    assert result.exit_code == 3
    assert "Points of width 128" in result.output


def test_every_view_of_features_is_a_view() -> None:
    assert FEATURE_VIEWS.keys() < VIEWS.keys()
    assert len(COUNTRIES) == 6


def test_what_is_kept_is_of_the_weights_as_they_are(folder) -> None:
    model, sae = tinyworld(), copy.deepcopy(countries())
    saes = AttachedSaes(model, {POINT: sae}, folder / "store")
    before = ask(model, "features", saes, pos=3)
    contexts = ask(model, "contexts", saes, feature=ITALY)["contexts"]
    assert ask(model, "features", saes, pos=3)["labels"] != {}
    with torch.no_grad():
        sae.W_enc.mul_(0.5)
    after = ask(model, "features", saes, pos=3)
    fresh = ask(model, "features", AttachedSaes(model, {POINT: sae}), pos=3)
    assert after == fresh
    assert after["quality"] != before["quality"]
    assert ask(model, "contexts", saes, feature=ITALY)["contexts"] != contexts


def test_a_model_that_computes_nan(model) -> None:
    saes = AttachedSaes(model, {POINT: countries()})
    with model.hooks(fwd_hooks=[("blocks.3.hook_mlp_out", lambda x, hook: x * float("nan"))]):
        data = ask(model, "features", saes, pos=3)
    assert data["spliced"]["kl"] is None
