"""The runs that the views of one state of the page share: of a short prompt, one run with every point.

    runs = SharedRuns()
    with runs.of_state("a tab", 3):
        answer(model, Question("next", prompt))
        answer(model, Question("lens", prompt))      # the model does not run again

The next state runs anew, and so does the same one after a change to the weights or to the permanent hooks. (Answers of
many runs: `remembered`.)
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import TypeVar, cast

from torch import Tensor

from hookline.engine import ActivationCache, undo
from hookline.experiments import logit_lens
from hookline.experiments.core.answers import cached_run, checked_text
from hookline.experiments.core.prompts import Prompts
from hookline.explore.attached_saes import model_versions, weight_versions
from hookline.explore.live_edits import edited
from hookline.explore.prompt_inputs import keywords, prompt_of, tokens_in
from hookline.explore.question import Question
from hookline.model import HookedModel
from hookline.residual import ModelCache

Kept = TypeVar("Kept", ModelCache, Tensor)

MOST_KEPT = 2**28
"""Bytes of activations that are kept, of all pages together."""


class SharedRuns:
    """The activations of the newest state of each page, up to a number of bytes; the oldest are dropped first."""

    def __init__(self, most: int = MOST_KEPT) -> None:
        self.most = most
        self._kept: dict[tuple[str, int, Hashable], ModelCache | Tensor] = {}
        self._lock = undo.interrupt_safe(threading.Lock())

    @property
    def n_bytes(self) -> int:
        """The bytes of the activations that are kept."""
        return sum(map(_size, self._kept.values()))

    def clear(self) -> None:
        """Drop everything."""
        with self._lock:
            self._kept.clear()

    @contextmanager
    def of_state(self, tab: str, state: int) -> Iterator[None]:
        """A context in which views share the runs of a state of a page; those of its other states are dropped."""
        with self._lock:
            self._kept = {key: cache for key, cache in self._kept.items() if key[0] != tab or key[1] == state}
        token = _current.set((self, tab, state))
        try:
            yield
        finally:
            _current.reset(token)

    def get(self, key: tuple[str, int, Hashable], run: Callable[[], Kept]) -> Kept:
        """What is kept under a key, or what a new run returns, which is kept if there is room."""
        if key in self._kept:
            return cast(Kept, self._kept[key])
        activations = run()
        with self._lock:
            if _size(activations) <= self.most:
                self._kept[key] = activations
            while self.n_bytes > self.most:
                del self._kept[next(iter(self._kept))]
        return activations


_current: ContextVar[tuple[SharedRuns, str, int] | None] = ContextVar("shared runs", default=None)


def run_at_position(model: HookedModel, question: Question) -> ModelCache:
    """The run with the edits: every point at the position that is asked about, and the logits there."""
    text = checked_text(model, prompt_of(model, question), question.pos)
    if _fits(model, question):
        return _shared(model, question, "position", lambda: _run(model, question).at(question.pos))
    return _shared(model, question, "position", lambda: _edited_run(model, question, text, question.pos))


def logits_at_position(model: HookedModel, question: Question) -> Tensor:
    """The logits of the run with the edits at the position that is asked about: [vocab]."""
    checked_text(model, prompt_of(model, question), question.pos)
    logits = _run(model, question).logits if _fits(model, question) else run_at_position(model, question).logits
    assert logits is not None
    return logits[0, question.pos] if logits.ndim == 3 else logits.reshape(-1)


def run_with_points(model: HookedModel, question: Question, names: list[str]) -> ActivationCache:
    """The run with the edits, in which these points are at every position."""
    points = [model.point(name) for name in names]
    is_in_all = all(point.stream != "image" and not model.index.is_on_request(point.canonical_name) for point in points)
    if is_in_all and _fits(model, question):
        return _run(model, question)
    with edited(model, question):
        inputs = keywords(prompt_of(model, question))
        return model.cache(**inputs, names_filter=names, stop_early=False)  # later edits fire, too


def clean_logits(model: HookedModel, question: Question) -> Tensor:
    """The logits of the run without edits at the position that is asked about: [vocab]."""
    checked_text(model, prompt_of(model, question), question.pos)

    def run() -> Tensor:
        if not question.active:
            return logits_at_position(model, question).clone()
        return model(**keywords(prompt_of(model, question)))[0, question.pos].clone()

    return _shared(model, replace(question, edits=()), "logits", run)


def logits_of_lens(model: HookedModel, question: Question, where: slice) -> Tensor:
    """The logits after each layer of the run with the edits, at these positions: [layer, 1, pos, vocab]."""
    if _fits(model, question):
        return _run(model, question).logit_lens(pos_slice=where)
    with edited(model, question):
        return logit_lens.lens_cache(model, checked_text(model, prompt_of(model, question), where), where).logit_lens()


def _run(model: HookedModel, question: Question) -> ModelCache:
    text = checked_text(model, prompt_of(model, question), None)
    return _shared(model, question, "all", lambda: _edited_run(model, question, text, None))


def _edited_run(model: HookedModel, question: Question, text: Prompts, where: int | None) -> ModelCache:
    with edited(model, question):
        return cached_run(model, text, where)


def _fits(model: HookedModel, question: Question) -> bool:
    """Whether there is a page that shares its runs, and room for every point: about 32 streams per layer."""
    page_state, tokens, cfg = _current.get(), tokens_in(model, prompt_of(model, question)).shape[1], model.cfg
    per_layer = tokens * (32 * cfg.d_model + 2 * cfg.n_heads * tokens) + 2 * tokens * cfg.d_vocab / cfg.n_layers
    return page_state is not None and 4 * cfg.n_layers * per_layer <= page_state[0].most / 2


def _shared(model: HookedModel, question: Question, what: str, run: Callable[[], Kept]) -> Kept:
    page_state = _current.get()
    if page_state is None:
        return run()
    runs, tab, state = page_state
    now = model_versions(model)
    pos = 0 if what == "all" else question.pos
    same = replace(
        question, view=what, edits=question.active, pos=pos, src=0, target=None, versus=None, layer=0, head=0
    )
    same = replace(same, measure="", point="", count=1, start=None, row=0, sae="", feature=None)
    return runs.get((tab, state, (same, now, _sae_versions(question))), run)


def _sae_versions(question: Question) -> Hashable:
    """Of the autoencoders whose features are edited."""
    edits = [edit for edit in question.active if edit.feature is not None]
    return tuple(weight_versions(question.saes.named(edit.sae).sae) for edit in edits if question.saes is not None)


def _size(cache: ModelCache | Tensor) -> int:
    if isinstance(cache, Tensor):
        return cache.untyped_storage().nbytes()
    return cache.nbytes + (0 if cache.logits is None else cache.logits.untyped_storage().nbytes())
