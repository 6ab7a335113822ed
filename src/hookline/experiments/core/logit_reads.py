"""What metrics read from logits: answers (tokens) at positions, one for all rows or one per row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from hookline.errors import HooklineError, warn
from hookline.text.given_texts import columns_in
from hookline.text.token_positions import Meaning
from hookline.transformer.precision import upcast

Read: TypeAlias = Sequence[tuple[Float[Tensor, "token vocab"], Int[Tensor, " token"]]]
"""For each row, the logits before every token of an answer, and the tokens."""


def checked_answers(tokens: Any) -> Any:
    """An id, a text, a tuple of either or of tuples of ids, or a tensor of one id per row."""
    if isinstance(tokens, np.ndarray | np.integer) or (isinstance(tokens, Tensor) and tokens.ndim in (0, 2)):
        tokens = tokens.tolist()
    if isinstance(tokens, Tensor):
        if tokens.ndim > 1 or tokens.is_floating_point() or tokens.dtype == torch.bool or not tokens.numel():
            raise HooklineError(f"answers are one token id, or one per row [batch], got {short(tokens)}")
        return tokens.detach().cpu().long()
    if type(tokens) in (int, str):
        return tokens
    if isinstance(tokens, list | tuple) and tokens and all(map(_is_answer, tokens)):
        return tuple(tuple(answer) if isinstance(answer, list | tuple) else answer for answer in tokens)
    raise HooklineError(
        f"an answer is a text, a token id or a list of ids; or a list or tensor with one per row, got {tokens!r}"
    )


def _is_answer(answer: Any) -> bool:
    if isinstance(answer, list | tuple):
        return bool(answer) and all(type(token) is int for token in answer)
    return type(answer) in (int, str)


def checked_position(pos: Any) -> Any:
    """An index, None, a tensor of one index per row, or a position by its meaning."""
    if isinstance(pos, Meaning):
        return pos
    if isinstance(pos, list | tuple) and pos and all(type(index) is int for index in pos):
        return torch.tensor(pos)
    if isinstance(pos, Tensor) and pos.ndim <= 1 and pos.dtype in (torch.int64, torch.int32) and pos.numel():
        return pos.detach().cpu().long() if pos.ndim else int(pos)
    if pos is None or type(pos) is int:
        return pos
    raise HooklineError(f"pos is an index, or a list or tensor with one per row, got {short(pos)}")


def single_ids(tokens: Any, model: Any, rows: int) -> int | Tensor:
    """Answers as token ids: one, or one per row."""
    if isinstance(tokens, tuple):
        if any(isinstance(answer, tuple) for answer in tokens):
            raise HooklineError(f"answers of several tokens, {tokens}, are supported in experiments only")
        tokens = torch.tensor([single_ids(answer, model, 1) for answer in tokens])
    ids = model.to_single_token(tokens) if isinstance(tokens, str) else tokens
    _per_row(ids, rows, range(model.cfg.d_vocab), "token")
    return ids


def warn_of_missing_space(answers: Any, model: Any, tokens: Int[Tensor, "batch pos"], pos: Any) -> None:
    """Warn if an answer is a word without the space before it, where the prompt needs one: another token is meant."""
    columns = _per_row(pos, len(tokens), None, "position")
    for row, text in enumerate(answers if isinstance(answers, tuple) else (answers,)):
        if not isinstance(text, str) or not text[:1].isalnum():
            continue
        spaced = model.tokenizer(f" {text}", add_special_tokens=False)["input_ids"]
        if len(spaced) != 1 or spaced[0] == model.to_single_token(text):
            continue  # the token is the same with and without a space, or there is none with it
        before = model.tokenizer.decode([int(tokens[row, columns[row]])])
        if before[-1:].isalnum() or before[-1:] in (*",.;:!?",):
            warn(
                f"the answer {text!r} has no space before it, but comes after {before!r}: the word in a text is "
                f"{' ' + text!r}, which is another token. If this one is meant, pass its id, "
                f"{model.to_single_token(text)}"
            )
            return


def columns_of(pos: int | Tensor, mask: Tensor) -> int | Tensor:
    """The columns of positions that are counted within the text of each row; `mask` is true where there is text."""
    row_columns = []
    for row, index in enumerate(_per_row(pos, len(mask), None, "position").tolist()):
        columns = mask[row].nonzero().flatten().tolist()
        if index not in range(-len(columns), len(columns)):
            raise HooklineError(f"position {index} is out of range: prompt {row} has {len(columns)} tokens")
        row_columns.append(columns[index])
    return row_columns[0] if len(set(row_columns)) == 1 else torch.tensor(row_columns)


def columns_meant(pos: Meaning, model: Any, tokens: Tensor, mask: Tensor) -> Tensor:
    """The column that a position by its meaning has in each row."""
    meant, missing = columns_in(pos, model.index.root, tokens, mask.bool())
    if missing:
        raise HooklineError(f"pos={pos!r}: there is no {next(iter(missing.values()))}")
    counts = meant.sum(1).tolist()
    if {*counts} != {1}:
        row = next(row for row, count in enumerate(counts) if count != 1)
        raise HooklineError(f"pos={pos!r} is {counts[row]} positions in prompt {row}, but a metric reads one")
    return meant.int().argmax(1)


def _per_row(numbers: int | Tensor, rows: int, bounds: range | None, what: str) -> Int[Tensor, " batch"]:
    """One number for each row, from one for all or one each, within the known ones."""
    tensor = torch.as_tensor(numbers)
    if tensor.ndim and len(tensor) != rows:
        raise HooklineError(f"{len(tensor)} {what}s for {rows} rows: pass one for all, or one each")
    wrong = [] if bounds is None else [x for x in tensor.flatten().tolist() if x not in bounds]
    if bounds is not None and wrong:
        raise HooklineError(f"{what} {wrong[0]} is out of range: it must be from {bounds[0]} to {bounds[-1]}")
    return tensor.expand(rows)


def at_position(logits: Tensor, pos: Any) -> Float[Tensor, "batch vocab"]:
    """The logits at one position, or at one per row."""
    if logits.ndim != 3:
        raise HooklineError(f"a metric takes logits [batch, pos, vocab], got a tensor of shape {list(logits.shape)}")
    batch, width = logits.shape[:2]
    columns = _per_row(pos, batch, range(-width, width), "position")
    return upcast(logits[torch.arange(batch, device=logits.device), columns.to(logits.device)])


def of_answer(logits: Float[Tensor, "batch vocab"], ids: Any) -> Float[Tensor, " batch"]:
    """The value of one token, or of one per row."""
    if isinstance(ids, tuple) and all(type(token) is int for token in ids):
        ids = torch.tensor(ids)
    if isinstance(ids, str | tuple):
        raise HooklineError(
            f"the answer {ids!r} is text, and logits have no tokenizer. Experiments look it up; to call a metric on "
            f"logits, pass its id, model.to_single_token({ids!r}), or first call metric.resolved(model, tokens)"
        )
    tokens = _per_row(ids, len(logits), range(logits.shape[-1]), "token")
    return logits.gather(-1, tokens[:, None].to(logits.device))[:, 0]


def log_probs(read: Read) -> Float[Tensor, " batch"]:
    """The log-probability of the answer of each row."""
    return torch.stack([logits.log_softmax(-1).gather(-1, ids[:, None]).sum() for logits, ids in read])


def divergence(reference: Tensor, logits: Tensor) -> Tensor:
    """KL(reference ‖ logits) over the last axis, in nats."""
    expected, actual = reference.log_softmax(-1), logits.log_softmax(-1)
    share = expected.exp()
    return (share * (expected - actual)).masked_fill(share == 0, 0.0).sum(-1)


def weighted_mean(values: Float[Tensor, "batch pos"], counts: Tensor) -> Float[Tensor, " batch"]:
    """The weighted mean; values with weight 0 are ignored, even NaN."""
    counts = counts.to(values.device)
    return values.masked_fill(counts == 0, 0.0).sum(1) / counts.to(values.dtype).sum(1)


def short(x: Any) -> str:
    """A value for messages: small integer tensors as lists, others by shape and dtype."""
    if isinstance(x, tuple) and all(type(element) is int for element in x):
        return repr(list(x))
    if not isinstance(x, Tensor):
        return repr(x)
    return str(x.tolist()) if x.numel() <= 8 and not x.is_floating_point() else f"<{list(x.shape)} {x.dtype}>"
