"""Pages that open from disk: the states that a page steps through, and the answers to what it asks in them.

    steps = [Step({"prompt": prompt, "other": other})]
    document(page_data(model, "tinyworld", steps))

A saved page is a tour of one step, without a text.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import compress, product
from typing import Any

from hookline.experiments.head_detectors import KINDS
from hookline.explore.attached_saes import AttachedSaes
from hookline.explore.live_edits import script
from hookline.explore.question import Question
from hookline.explore.views import Data, about_model, answer, attention_views
from hookline.model import HookedModel

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
) -> Data:
    """The data of a page that opens from disk, for `document`: with these measures of heads and patching sweeps.

    It has the attention of every head, and the answers with each of a step's edits switched on or off; the scores on
    repeated random tokens, which take longest, are without edits.
    """
    asked: list[Data] = []
    for state in (state for step in steps for state in _asked(step.state)):
        asked += [] if state in asked else [state]
    pairs = [pair for state in asked for pair in _answers(model, name, state, [*measures], [*sweeps], saes)]
    saved = [asdict(step) for step in steps]
    return {"live": False, "model": about_model(model, name, saes), "steps": saved, "answers": pairs}


def _asked(state: Data) -> Iterator[Data]:
    """What all questions of the page have in common, with each of the edits switched on or off."""
    edits = state.get("edits", [])
    for on in product((True, False), repeat=len(edits)):
        kept = [{**edit, "on": True} for edit in compress(edits, on)]
        yield {"prompt": state["prompt"], "other": state.get("other", ""), "edits": kept, "pos": -1}


def _answers(
    model: HookedModel,
    name: str,
    state: Data,
    measures: list[str],
    sweeps: list[str],
    saes: AttachedSaes | None,
) -> Iterator[tuple[Data, Data]]:
    """Questions of the page in a state, with their answers."""
    first = {**state, "view": "next"}
    chosen = _answer(model, first, saes)
    yield first, {**chosen, "script": script(name, Question.of(first, saes))}
    yield (tokens := {**state, "view": "tokens"}), _answer(model, tokens, saes)
    state = {**state, **{key: chosen[key]["id"] for key in ("target", "versus")}}
    point = next((each for each in model.hook_dict if each.endswith("hook_resid_post")), "")
    if state["edits"]:
        measures = [measure for measure in measures if measure not in KINDS]
    asked: list[Data] = [
        *({"view": view} for view in ("lens", "attribution")),
        {"view": "generate", "count": 20},
        {"view": "point", "point": point, "head": 0},
        *({"view": "heads", "measure": each, **({"src": 0} if each == "attention" else {})} for each in measures),
        *({"view": "patching", "measure": sweep} for sweep in sweeps if state["other"]),
        *([{"view": "features", "sae": "", "feature": None}] if saes else []),
    ]
    for each in asked:
        yield (question := {**state, **each}), _answer(model, question, saes)
    yield from _attention(model, {**state, "view": "attention"}, saes)


def _attention(model: HookedModel, asked: Data, saes: AttachedSaes | None) -> Iterator[tuple[Data, Data]]:
    """The attention of every head, or, if that is too much, of the one that a page begins with."""
    cfg, length = model.cfg, model.to_tokens(asked["prompt"]).shape[1]
    if cfg.n_layers * cfg.n_heads * length**2 > MOST_SAVED:
        one = {**asked, "layer": cfg.n_layers - 1, "head": 0}
        yield one, _answer(model, one, saes)
        return
    for (layer, head), found in attention_views(model, Question.of(asked, saes)).items():
        yield {**asked, "layer": layer, "head": head}, found


def _answer(model: HookedModel, question: dict[str, Any], saes: AttachedSaes | None) -> Data:
    return answer(model, Question.of(question, saes))
