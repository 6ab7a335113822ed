"""Text datasets as rows of tokens of equal length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Int

from hookline.errors import HooklineError


def keep_single_column(dataset: Any, col_name: str) -> Any:
    """The dataset with only this column."""
    if dataset.column_names is not None and col_name not in dataset.column_names:
        raise HooklineError(f"the dataset has no column {col_name!r}, only {dataset.column_names}")
    return dataset.remove_columns([name for name in dataset.column_names or () if name != col_name])


def tokenize_and_concatenate(
    dataset: Any,
    tokenizer: Any,
    streaming: bool = False,
    max_length: int = 1024,
    column_name: str = "text",
    add_bos_token: bool = True,
    num_proc: int = 10,
    set_format: bool = True,
) -> Any:
    """Tokenize a text dataset (of Hugging Face `datasets`) into rows `tokens` of `max_length`."""

    def rows(examples: dict[str, list[str]]) -> dict[str, np.ndarray]:
        return {"tokens": token_rows(examples[column_name], tokenizer, max_length, add_bos_token)}

    options = {} if streaming else {"num_proc": num_proc}
    new = keep_single_column(dataset, column_name).map(rows, batched=True, remove_columns=[column_name], **options)
    if set_format:
        new.set_format(type="torch", columns=["tokens"])
    return new


def token_rows(
    texts: Sequence[str], tokenizer: Any, max_length: int, add_bos_token: bool = True
) -> Int[np.ndarray, "row max_length"]:
    """The texts as one sequence of tokens, separated by the EOS token, split into rows of equal length.

    What is left over at the end is dropped; only if there are too few tokens for one row is it padded.
    """
    if tokenizer.eos_token_id is None or (add_bos_token and tokenizer.bos_token_id is None):
        raise HooklineError("the tokenizer has no EOS or no BOS token: set them first")
    width = max_length - 1 if add_bos_token else max_length
    if width < 1:
        raise HooklineError(f"max_length={max_length} leaves no room for tokens")
    ids = tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"] if texts else []
    joined = np.array([token for row in ids for token in (*row, tokenizer.eos_token_id)][:-1], dtype=np.int64)
    if 0 < len(joined) < width:
        pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
        joined = np.pad(joined, (0, width - len(joined)), constant_values=pad)
    tokens = joined[: len(joined) // width * width].reshape(-1, width)
    return np.pad(tokens, ((0, 0), (1, 0)), constant_values=tokenizer.bos_token_id) if add_bos_token else tokens
