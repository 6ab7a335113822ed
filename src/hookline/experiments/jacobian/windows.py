"""Windows: texts as rows of tokens to be averaged over, whole or cut into parts of one length."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hookline.errors import HooklineError
from hookline.experiments.core.prompts import Prompt, Prompts, check_has_weights, prompts_of
from hookline.model import HookedModel


def windows_of(model: HookedModel, texts: Prompt, window: int | None) -> list[Prompts]:
    """The texts, or all windows of that many tokens, one by one."""
    texts = model.text.prompts(texts)
    if isinstance(texts, Mapping) or (isinstance(texts, list | tuple) and any(isinstance(x, Mapping) for x in texts)):
        raise HooklineError("a Jacobian lens is fitted on texts or token ids, without images")
    if isinstance(texts, list | tuple) and not texts:
        raise HooklineError("a Jacobian lens needs texts to be fitted on: the list is empty")
    if window is None:
        text = prompts_of(model, texts)
        return [text.only(row) for row in range(len(text))]
    if isinstance(window, bool) or not isinstance(window, int) or window < 1:
        raise HooklineError(f"window is a number of tokens, at least 1, or None for whole texts, got {window!r}")
    check_has_weights(model)
    model.text.check_length(window)
    windows = []
    for number, ids in enumerate(_token_rows(model, texts)):
        if len(ids) < window:
            raise HooklineError(
                f"text {number} has {len(ids)} tokens, fewer than window={window}: leave it out, or use shorter windows"
            )
        windows += [ids[start : start + window] for start in range(0, len(ids) - window + 1, window)]
    return [Prompts.of_rows([ids]) for ids in windows]


def _token_rows(model: HookedModel, texts: Any) -> list[Tensor]:
    """The token ids of each text, however long it is."""
    inputs = [texts] if isinstance(texts, str) else texts
    if isinstance(inputs, list | tuple) and all(isinstance(text, str) for text in inputs):
        return [torch.tensor(model.text.ids(text, None), device=model.device) for text in inputs]
    if isinstance(inputs, Tensor):
        model.text.check_ids(inputs)
        return list(torch.atleast_2d(inputs.to(model.device)))
    rows = inputs if inputs and isinstance(inputs[0], list | tuple) else [inputs]
    token_rows = [torch.tensor(row, device=model.device) for row in rows]
    for ids in token_rows:
        model.text.check_ids(ids)
    return token_rows
