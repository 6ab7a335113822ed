"""The views of one state of the page share one run, within a bound of memory; the next state runs anew."""

import gc
import json
import weakref

import pytest
import torch
from stores import tinyworld

import hookline
from hookline.explore import explore
from hookline.explore.question import LiveEdit, Question
from hookline.explore.shared_runs import SharedRuns
from hookline.explore.views import answer

PROMPT = "When Mary and John went to the store, John gave a drink to"
EDITS = (LiveEdit("zero", "blocks.3.attn.hook_z", head=4),)
ANSWERS = {"target": 100, "versus": 200}
VIEWS = {
    "next": {},
    "lens": {},
    "heads": {"measure": "attribution"},
    "attribution": {},
    "attention": {"layer": 2, "head": 1},
    "point": {"point": "blocks.1.mlp.hook_post"},
}


@pytest.fixture
def counted():
    """The model, and a list that has an entry for each time it runs."""
    model, runs = tinyworld(), []
    handle = model.module.register_forward_pre_hook(lambda *_: runs.append(1))
    yield model, runs
    handle.remove()


def asked(view: str, edits=(), **more) -> Question:
    return Question(view, PROMPT, edits=edits, **{**ANSWERS, **VIEWS[view], **more})


def test_one_run_for_all_views_and_another_for_the_next_state(counted) -> None:
    model, runs = counted
    shared = SharedRuns()
    for state in (0, 1):
        runs.clear()
        for view in VIEWS:
            with shared.of_state("a", state):
                answer(model, asked(view))
        assert len(runs) == 1


def test_with_edits_there_is_one_more(counted) -> None:
    model, runs = counted
    shared = SharedRuns()
    for view in VIEWS:
        with shared.of_state("a", 0):
            answer(model, asked(view, EDITS))
    assert len(runs) == 2  # the next tokens without the edits


@pytest.mark.parametrize("edits", [(), EDITS])
@pytest.mark.parametrize("most", [2**28, 2**20, 0])
def test_shared_or_not_the_numbers_are_the_same(most, edits) -> None:
    model, shared = tinyworld(), SharedRuns(most)
    for view in VIEWS:
        with shared.of_state("a", 0):
            found = answer(model, asked(view, edits))
        assert json.dumps(found) == json.dumps(answer(model, asked(view, edits)))
        assert shared.n_bytes <= most


def test_a_state_has_only_its_own_runs(counted) -> None:
    model, runs = counted
    shared = SharedRuns()
    with shared.of_state("a", 0):
        plain = answer(model, asked("next"))
        edited = answer(model, asked("next", EDITS))  # a page that says nothing of a new state
    assert plain["after"] != edited["after"]
    assert edited["before"] != edited["after"]
    with shared.of_state("b", 0):
        answer(model, asked("next"))
    runs.clear()
    for tab in "ab":
        with shared.of_state(tab, 0):
            answer(model, asked("lens"))
    assert not runs
    with shared.of_state("a", 1):
        pass
    with shared.of_state("b", 0):
        answer(model, asked("lens"))
    assert not runs
    shared.clear()
    assert shared.n_bytes == 0


def test_the_oldest_are_dropped_first() -> None:
    model, shared = tinyworld(), SharedRuns()
    with shared.of_state("a", 0):
        answer(model, asked("next"))
    one = shared.n_bytes
    shared.most = 3 * one
    for tab in "bcdefg":
        with shared.of_state(tab, 0):
            answer(model, asked("next"))
    assert one < shared.n_bytes <= shared.most


def test_closing_frees_the_model_and_its_activations() -> None:
    model = hookline.load("tinyworld")
    explorer = explore(model, PROMPT, browser=False)
    session = explorer._server.session
    assert "ids" in session.ask(ASKED).answered()
    assert session.runs.n_bytes > 0
    found = weakref.ref(model.module)
    explorer.close()
    assert session.runs.n_bytes == 0
    del model
    gc.collect()
    assert found() is None


def test_the_lens_reads_a_part_of_a_long_prompt(monkeypatch) -> None:
    model = tinyworld()
    monkeypatch.setattr("hookline.explore.views.MOST_LENS", 8 * (model.cfg.n_layers + 1) * model.cfg.d_vocab)
    whole = hookline.experiments.logit_lens.lens_tokens(model, PROMPT, top=10, pos=None)
    for start, first in ((None, 6), (0, 0), (3, 3), (99, 6), (-5, 0)):
        data = answer(model, asked("lens", start=start))
        assert (data["start"], data["length"], data["probs"]["shape"][1]) == (first, 14, 8)
        tokens = [[[data["words"][i] for i in cell] for cell in row] for row in data["cells"]]
        assert tokens == [row[first : first + 8] for row in whole.tokens]
    assert answer(model, asked("lens", pos=9))["start"] == 2


ASKED = {"tab": "a", "slot": "next", "state": 0, "question": {"view": "next", "prompt": PROMPT}}


@pytest.mark.parametrize(
    "error", [MemoryError(), torch.OutOfMemoryError("CUDA"), RuntimeError("can't allocate memory: 9 bytes")]
)
def test_running_out_of_memory_is_told_and_frees_memory(error, monkeypatch) -> None:
    with explore(tinyworld(), PROMPT, browser=False) as explorer:
        session = explorer._server.session
        session.ask(ASKED).answered()
        assert session.runs.n_bytes > 0

        def fail(*_: object) -> None:
            raise error

        monkeypatch.setattr("hookline.explore.session.answer", fail)
        assert "not enough memory" in session.ask({**ASKED, "state": 0}).answered()["error"]
        assert session.runs.n_bytes == 0


def test_a_change_to_the_weights_or_to_permanent_hooks_runs_anew() -> None:
    model, shared, runs = hookline.load("tinyworld"), SharedRuns(), []
    weight = model.module.transformer.h[1].mlp.c_proj.bias

    def found() -> str:
        with shared.of_state("a", 0):
            data = json.dumps(answer(model, asked("lens")))
        assert data == json.dumps(answer(model, asked("lens")))
        return data

    before = found()
    with torch.no_grad():
        weight.add_(1.0)
    assert found() != before
    with torch.no_grad():
        weight.sub_(1.0)
    model.add_hook("blocks.1.hook_mlp_out", hookline.edits.zero(), is_permanent=True)
    assert found() != before
    model.reset_hooks(including_permanent=True)
    handle = model.module.register_forward_pre_hook(lambda *_: runs.append(1))
    found()
    found()
    handle.remove()
    assert len(runs) == 3  # two of them without a page


@pytest.mark.parametrize("name", ["blocks.1.hook_q_input", "blocks.1.attn.hook_result", "blocks.0.mlp.hook_in"])
def test_a_point_that_is_recorded_on_request_only(name) -> None:
    model, runs = tinyworld(), SharedRuns()
    with runs.of_state("a", 0):
        answer(model, asked("next"))
        data = answer(model, asked("point", point=name))
    expected = model.cache(PROMPT, names_filter=name)[name][0]
    expected = expected[:, 0] if expected.ndim == 3 else expected
    assert data["values"]["shape"] == list(expected.shape)
