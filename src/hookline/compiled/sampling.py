"""Choosing the next token inside a graph: greedy, or drawn with a temperature, top-k and top-p.

The draws are those of `torch.multinomial`, which divides the probabilities by exponential noise and takes the largest:
with one seed, the tokens are those of the model's own `generate`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hookline.compiled.not_compiled import NotCompiled
from hookline.compiled.random_state import random_state, return_to

_STOPS = 8
"""How many different stop tokens there is room for."""


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen, and which tokens end a text."""

    temperature: float | None = None
    """None: the most probable token."""
    top_k: int | None = None
    top_p: float | None = None
    keep: int = 1
    """How many tokens top-p keeps at least."""
    stops: tuple[int, ...] = ()
    pad: int = 0

    @property
    def structure(self) -> tuple[Any, ...]:
        """The settings that a graph is compiled for; the other numbers and the stop tokens may change."""
        return self.temperature is not None, self.top_k is not None, self.top_p is not None, self.keep


def way_to_choose(structure: tuple[Any, ...] | None) -> str:
    """The structure of a sampling in words; nothing for greedy search, and for a pass that chooses nothing."""
    if structure is None or not structure[0]:
        return ""
    more = [name for name, is_on in zip(("top-k", "top-p"), structure[1:3], strict=True) if is_on]
    return f"sampled with {' and '.join(more)}" if more else "sampled"


class Sampler:
    """The numbers of a `Sampling` in tensors of fixed address, for one size of batch."""

    def __init__(self, rows: int, width: int, device: torch.device) -> None:
        self.temperature = torch.ones((), device=device)
        self.top_k = torch.ones(1, dtype=torch.long, device=device)
        self.top_p = torch.ones((), device=device)
        self.stops = torch.full((_STOPS,), -1, device=device)
        self.pad = torch.zeros((), dtype=torch.long, device=device)
        self.noise = torch.ones(rows, width, device=device)
        self.random: torch.Generator | None = None
        for tensor in vars(self).values():
            if tensor is not None:
                torch._dynamo.mark_static_address(tensor)

    def set(self, sampling: Sampling) -> None:
        """Use these numbers from now on."""
        self.temperature.fill_(sampling.temperature or 1.0)
        self.top_k.fill_(sampling.top_k or 1)
        self.top_p.fill_(1.0 if sampling.top_p is None else sampling.top_p)
        self.stops.fill_(-1)
        self.stops[: len(sampling.stops)] = torch.tensor(sampling.stops, dtype=torch.long)
        self.pad.fill_(sampling.pad)

    def draw(self) -> None:
        """Draw the noise of one step, outside the graph."""
        self.noise.exponential_(generator=self.random)

    def random_state(self) -> Tensor:
        """The state of the random numbers that are drawn next."""
        return random_state(self.noise.device) if self.random is None else self.random.get_state()

    def return_to(self, state: Tensor) -> None:
        """Draw the same random numbers again from now on."""
        if self.random is not None:
            self.random.set_state(state)
        else:
            return_to(state, self.noise.device)

    def choose(self, logits: Tensor, sampling: Sampling) -> Tensor:
        """The next token of each row, `[row, 1]`, inside the graph."""
        if sampling.temperature is None:
            return logits.argmax(-1, keepdim=True)
        scores = logits / self.temperature
        if sampling.top_k is not None:
            ordered = scores.sort(-1, descending=True).values
            least = ordered.index_select(-1, (self.top_k - 1).clamp(max=scores.shape[-1] - 1))
            scores = scores.masked_fill(scores < least, -torch.inf)
        if sampling.top_p is not None:
            ordered, order = scores.sort(-1)
            is_out = ordered.softmax(-1).cumsum(-1) <= 1 - self.top_p
            is_out = is_out & (torch.arange(scores.shape[-1], device=scores.device) < scores.shape[-1] - sampling.keep)
            scores = scores.masked_fill(is_out.scatter(-1, order, is_out), -torch.inf)
        return (scores.softmax(-1) / self.noise).argmax(-1, keepdim=True)


def sampling_of(config: Any, processors: Any) -> Sampling:
    """The sampling that transformers' settings ask for; NotCompiled if there is no such sampling here."""
    settings: dict[str, Any] = {"temperature": 1.0} if config.do_sample else {}
    for processor in processors:
        name = type(processor).__name__
        if name == "TemperatureLogitsWarper":
            settings["temperature"] = float(processor.temperature)
        elif name == "TopKLogitsWarper":
            settings["top_k"] = int(processor.top_k)
        elif name == "TopPLogitsWarper":
            settings |= {"top_p": float(processor.top_p), "keep": int(processor.min_tokens_to_keep)}
        else:
            raise NotCompiled(f"{name} is not compiled")
    stops = config._eos_token_tensor
    settings["stops"] = tuple(stops.tolist()) if stops is not None else ()
    if len(settings["stops"]) > _STOPS:
        raise NotCompiled(f"there are more than {_STOPS} stop tokens")
    pad = config._pad_token_tensor
    return Sampling(pad=int(pad) if pad is not None else 0, **settings)
