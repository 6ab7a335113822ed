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

from hookline.engine.blocks import entered
from hookline.engine.cache import ActivationCache
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
        self._lock = entered(threading.Lock())

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
        found = run()
        with self._lock:
            if _size(found) <= self.most:
                self._kept[key] = found
            while self.n_bytes > self.most:
                del self._kept[next(iter(self._kept))]
        return found


_current: ContextVar[tuple[SharedRuns, str, int] | None] = ContextVar("shared runs", default=None)


def run_at_position(model: HookedModel, asked: Question) -> ModelCache:
    """The run with the edits: every point at the position that is asked about, and the logits there."""
    text = checked_text(model, prompt_of(model, asked), asked.pos)
    if _fits(model, asked):
        return _shared(model, asked, "position", lambda: _run(model, asked).at(asked.pos))
    return _shared(model, asked, "position", lambda: _edited_run(model, asked, text, asked.pos))


def logits_at_position(model: HookedModel, asked: Question) -> Tensor:
    """The logits of the run with the edits at the position that is asked about: [vocab]."""
    checked_text(model, prompt_of(model, asked), asked.pos)
    logits = _run(model, asked).logits if _fits(model, asked) else run_at_position(model, asked).logits
    assert logits is not None
    return logits[0, asked.pos] if logits.ndim == 3 else logits.reshape(-1)


def run_with_points(model: HookedModel, asked: Question, names: list[str]) -> ActivationCache:
    """The run with the edits, in which these points are at every position."""
    points = [model.point(name) for name in names]
    is_in_all = all(each.stream != "image" and not model._points.is_on_request(each.canonical_name) for each in points)
    if is_in_all and _fits(model, asked):
        return _run(model, asked)
    with edited(model, asked):
        given = keywords(prompt_of(model, asked))
        return model.cache(**given, names_filter=names, stop_early=False)  # later edits fire, too


def clean_logits(model: HookedModel, asked: Question) -> Tensor:
    """The logits of the run without edits at the position that is asked about: [vocab]."""
    checked_text(model, prompt_of(model, asked), asked.pos)

    def run() -> Tensor:
        if not asked.active:
            return logits_at_position(model, asked).clone()
        return model(**keywords(prompt_of(model, asked)))[0, asked.pos].clone()

    return _shared(model, replace(asked, edits=()), "logits", run)


def logits_of_lens(model: HookedModel, asked: Question, where: slice) -> Tensor:
    """The logits after each layer of the run with the edits, at these positions: [layer, 1, pos, vocab]."""
    if _fits(model, asked):
        return _run(model, asked).logit_lens(pos_slice=where)
    with edited(model, asked):
        return logit_lens.lens_cache(model, checked_text(model, prompt_of(model, asked), where), where).logit_lens()


def _run(model: HookedModel, asked: Question) -> ModelCache:
    text = checked_text(model, prompt_of(model, asked), None)
    return _shared(model, asked, "all", lambda: _edited_run(model, asked, text, None))


def _edited_run(model: HookedModel, asked: Question, text: Prompts, where: int | None) -> ModelCache:
    with edited(model, asked):
        return cached_run(model, text, where)


def _fits(model: HookedModel, asked: Question) -> bool:
    """Whether there is a page that shares its runs, and room for every point: about 32 streams per layer."""
    given, tokens, cfg = _current.get(), tokens_in(model, prompt_of(model, asked)).shape[1], model.cfg
    per_layer = tokens * (32 * cfg.d_model + 2 * cfg.n_heads * tokens) + 2 * tokens * cfg.d_vocab / cfg.n_layers
    return given is not None and 4 * cfg.n_layers * per_layer <= given[0].most / 2


def _shared(model: HookedModel, asked: Question, what: str, run: Callable[[], Kept]) -> Kept:
    given = _current.get()
    if given is None:
        return run()
    runs, tab, state = given
    now = model_versions(model)
    pos = 0 if what == "all" else asked.pos
    same = replace(asked, view=what, edits=asked.active, pos=pos, src=0, target=None, versus=None, layer=0, head=0)
    same = replace(same, measure="", point="", count=1, start=None, row=0, sae="", feature=None)
    return runs.get((tab, state, (same, now, _sae_versions(asked))), run)


def _sae_versions(asked: Question) -> Hashable:
    """Of the autoencoders whose features are edited."""
    edits = [edit for edit in asked.active if edit.feature is not None]
    return tuple(weight_versions(asked.saes.named(edit.sae).sae) for edit in edits if asked.saes is not None)


def _size(cache: ModelCache | Tensor) -> int:
    if isinstance(cache, Tensor):
        return cache.untyped_storage().nbytes()
    return cache.nbytes + (0 if cache.logits is None else cache.logits.untyped_storage().nbytes())
