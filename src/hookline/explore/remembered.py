"""Answers that take many runs, kept while the model is the same: clicking an edit off and on again costs no new ones.

The model is the same if its weights are, and if the run of this state, without and with the edits, has exactly the same
logits as when the answer was found. The first notices weights that the prompt does not use; the second whatever else
was changed: a hook, an attribute of a module, an autoencoder.
"""

from __future__ import annotations

import hashlib
import threading
import warnings
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from hookline.engine import undo
from hookline.explore.question import Question
from hookline.explore.shared_runs import clean_logits, logits_at_position
from hookline.model import HookedModel

MOST = 64
"""Answers that are kept."""


class Remembered:
    """The newest answers, each with what the model was when it was found, and its warnings."""

    def __init__(self) -> None:
        self._kept: dict[Hashable, tuple[bytes, Any, list[Warning]]] = {}
        self._lock = undo.interrupt_safe(threading.Lock())

    @contextmanager
    def used(self) -> Iterator[None]:
        """A context in which `remembered` keeps answers here."""
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)

    def get(self, key: Hashable, seen: bytes, compute: Callable[[], Any]) -> Any:
        """The answer that is kept if the model is as it was seen then, or a new one."""
        before, value, told = self._kept.get(key, (b"", None, []))
        if before == seen:
            for warning in told:
                warnings.warn(warning, stacklevel=2)
        else:
            with _noting() as told:
                value = compute()
        with self._lock:
            self._kept.pop(key, None)
            self._kept[key] = seen, value, told
            while len(self._kept) > MOST:
                del self._kept[next(iter(self._kept))]
        return value

    def clear(self) -> None:
        """Drop everything."""
        with self._lock:
            self._kept.clear()


@contextmanager
def _noting() -> Iterator[list[Warning]]:
    """The warnings of this thread, which are shown as before."""
    thread_id, noted_warnings = threading.get_ident(), list[Warning]()
    with warnings.catch_warnings():
        show = warnings.showwarning

        def note(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
            if threading.get_ident() == thread_id:
                noted_warnings.append(message if isinstance(message, Warning) else category(message))
            show(message, category, *where, **more)

        warnings.showwarning = note
        yield noted_warnings


_current: ContextVar[Remembered | None] = ContextVar("remembered answers", default=None)


def remembered(model: HookedModel, question: Question, key: Hashable, compute: Callable[[], Any]) -> Any:
    """What `compute` returns. It depends on the model, the prompts and edits of the question, and `key`."""
    memory = _current.get()
    has_runs = memory is not None and not model.anatomy.is_encoder_decoder  # whose prompt alone has no logits
    weights = fingerprint(model.module) if has_runs else None
    if memory is None or weights is None:
        return compute()
    runs = [clean_logits(model, question), *([logits_at_position(model, question)] if question.active else [])]
    seen = hashlib.sha256(weights)
    for logits in runs:
        seen.update(_bytes(logits))
    prompts = (question.prompt, question.images, question.other, question.other_images, question.pos)
    return memory.get((prompts, question.active, key), seen.digest(), compute)


@torch.no_grad()
def fingerprint(module: nn.Module) -> bytes | None:
    """A hash of the weights and buffers, from the sum of each row as integers; None if some cannot be read.

    Version counters alone are not enough: `weight.data` can be changed without them.
    """
    hasher = hashlib.sha256()
    for name, x in chain(module.named_parameters(), module.named_buffers()):
        if type(x) not in (Tensor, nn.Parameter) or x.is_meta or x.layout is not torch.strided or x.is_quantized:
            return None
        version = None if x.is_inference() else x._version
        hasher.update(f"{name} {id(x)} {version} {x.dtype} {list(x.shape)}".encode())
        if x.numel():
            hasher.update(_bytes(_row_sums(x)))
    return hasher.digest()


def _row_sums(x: Tensor) -> Tensor:
    """The sum of each row, read as integers of 64 bits: a pass over the memory, and no more."""
    rows = x.detach().contiguous().reshape(len(x) if x.ndim else 1, -1).view(torch.uint8)
    if (short := -rows.shape[1] % 8) or rows.storage_offset() % 8:
        rows = torch.cat([rows, rows.new_zeros(len(rows), short)], 1)
    return rows.view(torch.int64).sum(1)


def _bytes(x: Tensor) -> bytes:
    return x.contiguous().reshape(-1).view(torch.uint8).cpu().numpy().tobytes()
