"""Pages that open from disk: the states that a page steps through, and the answers to what it asks in them.

    steps = [Step({"prompt": prompt, "other": other})]
    document(page_data(model, "tinyworld", steps))

A saved page is a tour of one step, without a text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import compress, product
from typing import Any, TypeAlias

from hookline.experiments.head_detectors import KINDS
from hookline.explore.attached_probe import AttachedProbe
from hookline.explore.attached_saes import AttachedSaes
from hookline.explore.live_edits import script
from hookline.explore.prompt_inputs import prompt_of, tokens_in
from hookline.explore.question import Question
from hookline.explore.views import Data, about_model, answer, attention_views
from hookline.model import HookedModel

Attached: TypeAlias = tuple[AttachedSaes | None, AttachedProbe | None]
MOST_SAVED = 1_000_000
"""Numbers in the attention maps of a state: a page with more has those of one head only."""


@dataclass(frozen=True)
class Step:
    """A state of the page, as in its address, and what the guide says about it.

    `look` are the views that the text is about, in order, and `select` is the head or cell that is outlined in them.
    """

    state: Data
    title: str = ""
    text: str = ""
    look: tuple[str, ...] = ()
    select: Data = field(default_factory=dict)
    code: str = ""


def page_data(
    model: HookedModel,
    name: str,
    steps: Sequence[Step],
    *,
    measures: Iterable[str] = ("attribution",),
    sweeps: Iterable[str] = ("stream",),
    saes: AttachedSaes | None = None,
    probe: AttachedProbe | None = None,
    paths: Mapping[str, str] | None = None,
) -> Data:
    """The data of a page that opens from disk, for `document`: with these measures of heads and patching sweeps.

    It has the attention of every head, and the answers with each of a step's edits switched on or off; the scores on
    repeated random tokens, which take longest, are without edits. `paths` has the files of images by their URLs.
    """
    states: list[Data] = []
    for state in (state for step in steps for state in _asked(step.state)):
        states += [] if state in states else [state]
    chosen = ([*measures], [*sweeps], (saes, probe))
    pairs = [
        (_without_images(question), view)
        for state in states
        for question, view in _answers(model, partial(script, name, paths=paths), state, *chosen)
    ]
    saved = [asdict(step) for step in steps]
    return {"live": False, "model": about_model(model, name, saes, probe), "steps": saved, "answers": pairs}


def _asked(state: Data) -> Iterator[Data]:
    """What all questions of the page have in common, with each of the edits switched on or off."""
    edits = state.get("edits", [])
    for on in product((True, False), repeat=len(edits)):
        active_edits = [{**edit, "on": True} for edit in compress(edits, on)]
        images = {"images": state.get("images", []), "other_images": state.get("otherImages", [])}
        yield {"prompt": state["prompt"], "other": state.get("other", ""), "edits": active_edits, "pos": -1, **images}


def _without_images(question: Data) -> Data:
    """A question as a page keeps it: images are in its state, once."""
    return {key: value for key, value in question.items() if key not in ("images", "other_images")}


def _answers(
    model: HookedModel,
    written: Callable[[Question], str],
    state: Data,
    measures: list[str],
    sweeps: list[str],
    attached: Attached,
) -> Iterator[tuple[Data, Data]]:
    """Questions of the page in a state, with their answers."""
    first = {**state, "view": "next"}
    chosen = _answer(model, first, attached)
    yield first, {**chosen, "script": written(Question.of(first, *attached))}
    yield (tokens := {**state, "view": "tokens"}), _answer(model, tokens, attached)
    state = {**state, **{key: chosen[key]["id"] for key in ("target", "versus")}}
    point = next((name for name in model.hook_dict if re.fullmatch(r"blocks\..*hook_resid_post", name)), "")
    probe = attached[1]
    if state["edits"]:
        measures = [measure for measure in measures if measure not in KINDS]
    partial_questions: list[Data] = [
        *({"view": view} for view in ("lens", "attribution")),
        {"view": "generate", "count": 20},
        {"view": "point", "point": point, "head": 0},
        *(
            {"view": "heads", "measure": measure, **({"src": 0} if measure == "attention" else {})}
            for measure in measures
        ),
        *({"view": "patching", "measure": sweep} for sweep in sweeps if state["other"]),
        *([{"view": "features", "sae": "", "feature": None}] if attached[0] else []),
        *([{"view": "scores", "point": probe_point} for probe_point in probe.about()["points"]] if probe else []),
    ]
    for partial_question in partial_questions:
        yield (question := {**state, **partial_question}), _answer(model, question, attached)
    yield from _attention(model, {**state, "view": "attention"}, attached)


def _attention(model: HookedModel, question: Data, attached: Attached) -> Iterator[tuple[Data, Data]]:
    """The attention of every head, or, if that is too much, of the one that a page begins with."""
    cfg, length = model.cfg, tokens_in(model, prompt_of(model, Question.of(question))).shape[1]
    if cfg.n_layers * cfg.n_heads * length**2 > MOST_SAVED:
        one = {**question, "layer": cfg.n_layers - 1, "head": 0}
        yield one, _answer(model, one, attached)
        return
    for (layer, head), view in attention_views(model, Question.of(question, *attached)).items():
        yield {**question, "layer": layer, "head": head}, view


def _answer(model: HookedModel, question: dict[str, Any], attached: Attached) -> Data:
    return answer(model, Question.of(question, *attached))
