"""Edge scores: a number for each pair of a sender and a later receiver."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from hookline.errors import HooklineError
from hookline.experiments.result import BASELINES, Result, TopCells


@dataclass(frozen=True, eq=False, repr=False)
class EdgeScores:
    """The effect of each edge on a metric.

    scores.top(5)                          # the edges with the largest effect
    scores.of("L2H3", "L3H4.q")            # one of them
    scores.of("L2H3"), scores.of(to="mlp3")
    scores.matrix.plot()                   # a Result, sender × receiver, 0 where there is no edge
    scores.to_dataframe()                  # columns sender, receiver, value
    """

    values: Float[Tensor, " edge"]
    senders: Sequence[str]
    receivers: Sequence[str]
    name: str = "value"
    info: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "values", self.values.detach().cpu())
        if not len(self.values) == len(self.senders) == len(self.receivers):
            raise HooklineError("values, senders and receivers must have the same length")

    def __len__(self) -> int:
        return len(self.values)

    def of(self, sender: str | None = None, to: str | None = None) -> Any:
        """The score of one edge; or with only a sender, or only a receiver, the `EdgeScores` of that one's edges."""
        for asked, known in ((sender, self.senders), (to, self.receivers)):
            if asked is not None and asked not in known:
                raise HooklineError(f"there is no {asked!r}: use one of {', '.join(dict.fromkeys(known))}")
        pairs = enumerate(zip(self.senders, self.receivers, strict=True))
        at = [n for n, (u, v) in pairs if sender in (None, u) and to in (None, v)]
        if not at:
            raise HooklineError(f"there is no edge from {sender} to {to}: {to} comes before {sender}")
        if sender is not None and to is not None:
            return float(self.values[at[0]])
        return EdgeScores(
            self.values[at], [self.senders[n] for n in at], [self.receivers[n] for n in at], self.name, self.info
        )

    def top(self, k: int = 10, by: Literal["abs", "value", "lowest"] = "abs") -> TopCells:
        """The `k` edges of largest size, largest value or lowest value, in order."""
        found = TopCells()
        for cell in Result(self.values, ("edge",), {"edge": list(range(len(self)))}).top(k, by):
            at = int(cell.labels["edge"])
            found.append(cell._replace(labels={"sender": self.senders[at], "receiver": self.receivers[at]}))
        return found

    @property
    def matrix(self) -> Result:
        """The scores as a Result over senders and receivers; 0 where a receiver comes before a sender."""
        rows, columns = (list(dict.fromkeys(each)) for each in (self.senders, self.receivers))
        values = torch.zeros(len(rows), len(columns))
        where = [[rows.index(each) for each in self.senders], [columns.index(each) for each in self.receivers]]
        values[where[0], where[1]] = self.values.float()
        # The scores are changes of the metric, so a picture of them is centered on 0, not on a run's value.
        info = {key: value for key, value in self.info.items() if key not in BASELINES}
        return Result(values, ("sender", "receiver"), {"sender": [*rows], "receiver": [*columns]}, self.name, info)

    def to_dataframe(self) -> Any:
        """A pandas table with one row per edge."""
        cells = Result(self.values, ("edge",), {"edge": list(range(len(self)))}).to_dataframe()
        cells.insert(0, "sender", list(self.senders))
        cells.insert(1, "receiver", list(self.receivers))
        return cells.drop(columns="edge")

    def __repr__(self) -> str:
        said = {key: value for key, value in self.info.items() if isinstance(value, bool | int | float | str)}
        about = ", ".join(f"{key} {f'{x:.4g}' if isinstance(x, float) else x}" for key, x in said.items())
        return f"EdgeScores {self.name}: {len(self)} edges\n  {about}\n{self.top(5)!r}"
