"""A text where a feature is active."""

from dataclasses import dataclass


@dataclass(frozen=True)
class NeuronText:
    """A text, the largest activation of a feature in it, and the token where that is."""

    score: float
    text: str
    token_idx: int
    token_str: str
