"""Rows of tokens: an image, then several questions about it that do not attend to each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from random import Random

import sight_processor
import sight_tasks
import torch
from sight_tasks import Question
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from hookline.demo.tinysight import GRID

NO_TARGET = -100
CHAT_SHARE = 0.25
BOS_SHARE = 0.8


@dataclass
class Row:
    """Tokens, their positions, the index of their question (0 for the shared part), and the targets."""

    tokens: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    owners: list[int] = field(default_factory=list)
    targets: list[int] = field(default_factory=list)

    def add(self, tokens: Sequence[int], first: int, owner: int, n_targets: int = 0) -> None:
        """Append tokens; the last `n_targets` of them are targets."""
        self.tokens += tokens
        self.positions += range(first, first + len(tokens))
        self.owners += [owner] * len(tokens)
        shifted = [*tokens[1:], NO_TARGET]
        self.targets += [NO_TARGET] * (len(tokens) - n_targets - 1) + shifted[len(tokens) - n_targets - 1 :]


@dataclass(frozen=True)
class Rows:
    """Rows of equal width, and their attention mask."""

    tokens: Tensor
    positions: Tensor
    targets: Tensor
    visible: Tensor


class Writer:
    """Builds rows with a tokenizer."""

    def __init__(self, words: PreTrainedTokenizerBase) -> None:
        self._words = words
        self._encoded = cache(lambda text: words(text, add_special_tokens=False)["input_ids"])

    def row(self, questions: Sequence[Question], form: Callable[[str], str], has_bos: bool) -> Row:
        """Return the questions in this form, each with its answer and an end token."""
        before = form("").split(sight_processor.IMAGE)[0]
        bos = [self._words.bos_token_id] * has_bos
        row = Row()
        row.add([*bos, *self._encoded(before + sight_processor.IMAGE * GRID**2)], first=0, owner=0)
        start = len(row.tokens)
        for owner, asked in enumerate(questions, start=1):
            text = form(asked.text).split(sight_processor.IMAGE)[1]
            tokens = [*self._encoded(text), *self._encoded(f" {asked.answer}"), self._words.eos_token_id]
            row.add(tokens, first=start, owner=owner, n_targets=2)
        return row

    def batch(self, rng: Random, asked: Sequence[Sequence[Question]], device: str | torch.device) -> Rows:
        """Return a row per image with its questions, all in one form, padded on the right."""
        form = sight_tasks.chat if rng.random() < CHAT_SHARE else sight_tasks.prompt
        rows = [self.row(questions, form, rng.random() < BOS_SHARE) for questions in asked]
        width = max(len(row.tokens) for row in rows)

        def padded(part: str, filler: int) -> Tensor:
            lists = [getattr(row, part) for row in rows]
            return torch.tensor([[*values, *[filler] * (width - len(values))] for values in lists], device=device)

        owners = padded("owners", -1)
        earlier = torch.ones(width, width, dtype=torch.bool, device=device).tril()
        seen = (owners[:, None, :] == 0) | (owners[:, None, :] == owners[:, :, None])
        return Rows(
            tokens=padded("tokens", self._words.pad_token_id),
            positions=padded("positions", 0),
            targets=padded("targets", NO_TARGET),
            visible=(seen & earlier)[:, None],
        )
