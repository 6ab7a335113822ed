"""Teams: the processes that run one sharded model together, which are one worker.

All of them run the same batches. The first one alone reads and writes the store, and tells the others what to do.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any, TypeVar

from hookline.errors import HooklineError, StoreError
from hookline.transformer.agreement import Agreement

T = TypeVar("T")


class Team:
    """The processes of one model. A model that is not sharded has a team of one."""

    def __init__(self, agreement: Any = None) -> None:
        self._agreement: Agreement | None = agreement
        self.size = 1 if agreement is None else agreement.size
        self.is_first = agreement is None or agreement.is_first

    def joined(self, digest: str) -> str:
        """One checksum of all parts of the model."""
        if self._agreement is None:
            return digest
        return hashlib.blake2b("".join(self._agreement.told(digest)).encode(), digest_size=16).hexdigest()

    def decided(self, decide: Callable[[], T], seen: Any = None) -> T:
        """What the first process decides. Raises in all of them if it raises, or if they have `seen` different data."""
        if self._agreement is None:
            return decide()
        answer: T | None = None
        problem = ""
        if self.is_first:
            try:
                answer = decide()
            except HooklineError as error:
                problem = str(error)
        every = self._agreement.told((seen, answer, problem))
        if any(seen_data != every[0][0] for seen_data, _, _ in every):
            raise HooklineError("the processes of one sharded model were given different data sets to harvest")
        _, answer, problem = every[0]
        if problem:
            raise StoreError(problem)
        return answer
