# ruff: noqa: PT028 (test_prompt is no test of ours)
"""test_prompt: the rank and probability of an expected answer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hookline.errors import HooklineError

if TYPE_CHECKING:
    from hookline.compat.transformer_lens.hooked_transformer import HookedTransformer


@torch.no_grad()
def test_prompt(
    prompt: str,
    answer: str | list[str],
    model: HookedTransformer,
    prepend_space_to_answer: bool = True,
    print_details: bool = True,
    prepend_bos: bool | None = None,
    top_k: int = 10,
) -> None:
    """Print the rank of an answer after a prompt, token by token, and the likeliest tokens there.

    Of several answers, the first token of each is looked at.
    """
    answers = [answer] if isinstance(answer, str) else list(answer)
    if not answers or not all(answers):
        raise HooklineError(f"an answer must be a nonempty text, or a list of such texts, not {answer!r}")
    if prepend_space_to_answer:
        answers = [each if each.startswith(" ") else f" {each}" for each in answers]
    start = model.to_tokens(prompt, prepend_bos=prepend_bos)[0]
    rows = [model.to_tokens(each, prepend_bos=False)[0] for each in answers]
    rows = rows if len(rows) == 1 else [row[:1] for row in rows]
    labels = [model.to_str_tokens(row) for row in rows]
    if print_details:
        print("Tokenized prompt:", model.to_str_tokens(start))
        print(f"Tokenized answer{'s' if len(rows) > 1 else ''}:", labels if len(rows) > 1 else labels[0])
    logits = model(torch.cat([start, rows[0]])[None])[0, len(start) - 1 : -1]
    ranks = []
    for step, at in enumerate(logits):
        wanted = [int(row[step]) for row in rows]
        names = [label[step] for label in labels]
        order = at.argsort(descending=True).tolist()
        ranks.append([(name, order.index(token)) for name, token in zip(names, wanted, strict=True)])
        if print_details:
            _print_step(model, at, order, ranks[-1], wanted, top_k)
    print("Ranks of the answer tokens:", [each[0] for each in ranks] if len(rows) == 1 else ranks)


test_prompt.__test__ = False  # type: ignore[attr-defined]  # pytest would take it for a test


def _print_step(
    model: HookedTransformer, at: Tensor, order: list[int], ranks: list[tuple[str, int]], wanted: list[int], top_k: int
) -> None:
    probs = at.softmax(-1)
    print(f"Performance on answer token{'s' if len(wanted) > 1 else ''}:")
    for (name, rank), token in zip(ranks, wanted, strict=True):
        print(f"Rank: {rank: <8} Logit: {at[token]:5.2f} Prob: {probs[token]:6.2%} Token: |{name}|")
    for place, token in enumerate(order[:top_k]):
        print(
            f"Top {place}th token. Logit: {at[token]:5.2f} Prob: {probs[token]:6.2%} "
            f"Token: |{model.to_single_str_token(token)}|"
        )
