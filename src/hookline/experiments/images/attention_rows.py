"""Attention rows: the pattern of every head from one position, in one run or during generation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from hookline.errors import HooklineError
from hookline.experiments.core.labels import Label, token_labels
from hookline.experiments.core.prompts import prompts_of
from hookline.experiments.core.sweep import SweepPoints
from hookline.model import HookedModel


def checked_position(inputs: Mapping[str, Any], pos: int, new_tokens: int) -> int:
    """The query position, counted from the start of the prompt."""
    length = inputs["input_ids"].shape[1]
    if isinstance(new_tokens, bool) or not isinstance(new_tokens, int) or new_tokens < 0:
        raise HooklineError(f"new_tokens must be the number of tokens to generate, 0 or more, not {new_tokens!r}")
    if new_tokens and pos != -1:
        raise HooklineError(f"new tokens are generated at the end of the prompt: omit pos={pos!r} or new_tokens")
    if isinstance(pos, bool) or not isinstance(pos, int) or pos not in range(-length, length):
        raise HooklineError(f"position {pos!r} is out of range: the prompt has {length} tokens")
    return pos % length


def attention_rows(
    model: HookedModel, inputs: Mapping[str, Any], where: SweepPoints, pos: int, new_tokens: int
) -> tuple[Float[Tensor, "*step layer head key"], list[Label] | None]:
    """Each head's attention from a position to the whole prompt, and the labels of steps if tokens are generated."""
    length = inputs["input_ids"].shape[1]
    found: dict[str, list[Tensor]] = {name: [] for name in where.names}

    def note(pattern: Tensor, hook: Any) -> None:
        """Record the row of that position in the pass over the prompt, then the only row of each decoding step."""
        rows = pattern[0].detach()
        row = rows[:, pos] if rows.shape[1] == length else rows[:, -1]
        found[hook.name].append(_of_prompt(row, length + len(found[hook.name]), length).float().cpu())

    hooks = [(name, note) for name in where.names]
    given = prompts_of(model, inputs).call(model)
    if not new_tokens:
        with torch.no_grad():
            model.run_with_hooks(**given, return_type=None, fwd_hooks=hooks)
        return _stacked(found)[0], None
    with torch.no_grad(), model.hooks(fwd_hooks=hooks):
        ids = model.generate(**given, max_new_tokens=new_tokens, do_sample=False)
    values = _stacked(found)
    said = ids[0, -len(values) :].tolist()
    texts = [str(each) if model.tokenizer is None else model.to_string([each]) for each in said]
    return values, list(token_labels(texts))


def _of_prompt(row: Float[Tensor, "head key"], total: int, length: int) -> Float[Tensor, "head pos"]:
    """The attention to positions of the prompt; a sliding window of keys lacks the oldest, which are padded with 0."""
    keys = row.shape[1]
    if keys > total:
        raise HooklineError(
            f"the pattern has {keys} keys, but there are {total} tokens: static caches are not supported"
        )
    return torch.nn.functional.pad(row, (total - keys, 0))[:, :length]


def tower_attention_rows(
    model: HookedModel, inputs: Mapping[str, Any], where: SweepPoints, which: int, pos: int
) -> Float[Tensor, "layer head key"]:
    """Each head's attention in the vision tower, from one position of one image."""
    found: dict[str, list[Tensor]] = {name: [] for name in where.names}

    def note(pattern: Tensor, hook: Any) -> None:
        found[hook.name].append(pattern[which, :, pos].detach().float().cpu())

    with torch.no_grad():
        model.run_with_hooks(**inputs, return_type=None, fwd_hooks=[(name, note) for name in where.names])
    return _stacked(found)[0]


def _stacked(found: dict[str, list[Tensor]]) -> Float[Tensor, "step layer head ..."]:
    heads = {name: each[0].shape[0] for name, each in found.items() if each}
    if len(heads) < len(found):
        missing = next(name for name, each in found.items() if not each)
        raise HooklineError(f"{missing!r} did not fire in this run, so there is no attention to show")
    if len({*heads.values()}) > 1:
        raise HooklineError(f"the layers have different numbers of heads: {heads}. Select some with layers=…")
    return torch.stack([torch.stack(each) for each in zip(*found.values(), strict=True)])
