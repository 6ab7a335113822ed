"""Held-out accuracy of tinyworld: `python training/check.py` prints a table, and fails if a threshold is missed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Annotated

import sentences
import tasks
import torch
import typer
from tasks import Prompt
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

ASSETS = Path(__file__).parents[1] / "src" / "hookline" / "demo" / "assets" / "tinyworld"
BARS = {
    "indirect object": 0.98,
    "fact": 0.98,
    "fact after a sentence": 0.98,
    "opinion: agrees": 0.98,
    "no opinion: truth": 0.98,
    "repeated tokens": 0.90,
}


def load(folder: Path = ASSETS) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load the model and its tokenizer from a local folder."""
    return AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)


def held_out(count: int) -> dict[str, list[Prompt]]:
    """Return up to `count` held-out prompts of each task, except for repeated tokens."""
    rng = Random(9)
    facts = tasks.HELD_OUT_FACTS
    neutral = tasks.HELD_OUT_NEUTRAL
    return {
        "indirect object": [tasks.indirect_object(rng, tasks.HELD_OUT_PAIRS) for _ in range(count)],
        "fact": facts[:count],
        "fact after a sentence": [after_sentence(rng, fact) for fact in (facts * 5)[:count]],
        "opinion: agrees": [tasks.wrong_opinion(rng, tasks.HELD_OUT_OPINIONS) for _ in range(count)],
        "no opinion: truth": neutral[:count],
    }


def after_sentence(rng: Random, prompt: Prompt) -> Prompt:
    """Return the prompt with a sentence before it."""
    return Prompt(f"{sentences.sentence(rng)} {prompt.text}", prompt.answer)


@torch.no_grad()
def last_logits(model: PreTrainedModel, rows: Sequence[Sequence[int]]) -> Tensor:
    """Return the prediction after each row, in batches of equal length, without padding."""
    by_length = defaultdict(list)
    for place, row in enumerate(rows):
        by_length[len(row)].append(place)
    found = torch.empty(len(rows), model.config.vocab_size)
    for places in by_length.values():
        found[places] = model(torch.tensor([rows[place] for place in places])).logits[:, -1]
    return found


def encode(words: PreTrainedTokenizerBase, prompts: Sequence[Prompt], bos: bool) -> tuple[list[list[int]], Tensor]:
    """Return the tokens of the prompts, and the token of each answer."""
    rows = [[words.bos_token_id] * bos + words(prompt.text)["input_ids"] for prompt in prompts]
    return rows, torch.tensor([words(prompt.answer)["input_ids"][0] for prompt in prompts])


def accuracy(model: PreTrainedModel, words: PreTrainedTokenizerBase, prompts: Sequence[Prompt], bos: bool) -> float:
    """Return the fraction of prompts whose most likely next token is the answer."""
    rows, answers = encode(words, prompts, bos)
    return (last_logits(model, rows).argmax(-1) == answers).float().mean().item()


def repeats(words: PreTrainedTokenizerBase, half: int, count: int, bos: bool) -> Tensor:
    """Return rows of random tokens repeated once, with a seed that training does not use."""
    rng = Random(1_000_003 + half)
    vocabulary = [token for token in range(len(words)) if token != words.eos_token_id]
    return torch.tensor([[words.bos_token_id] * bos + tasks.repeated(rng, vocabulary, half) for _ in range(count)])


@torch.no_grad()
def repeat_accuracy(model: PreTrainedModel, words: PreTrainedTokenizerBase, count: int, bos: bool) -> float:
    """Return the fraction of tokens predicted in the second half, except for its first, over several lengths."""
    hits = []
    for half in (8, 16, 32, 48, 63):
        tokens = repeats(words, half, count, bos)
        found = model(tokens).logits[:, bos + half : -1].argmax(-1)
        hits.append((found == tokens[:, bos + half + 1 :]).flatten())
    return torch.cat(hits).float().mean().item()


def table(model: PreTrainedModel, words: PreTrainedTokenizerBase, count: int) -> dict[str, tuple[int, float, float]]:
    """Return for every task the number of prompts, and the accuracy with and without a BOS token."""
    found = {
        task: (len(prompts), accuracy(model, words, prompts, True), accuracy(model, words, prompts, False))
        for task, prompts in held_out(count).items()
    }
    rows = max(1, count // 10)
    each = [repeat_accuracy(model, words, rows, bos) for bos in (True, False)]
    return found | {"repeated tokens": (5 * rows, each[0], each[1])}


def main(
    folder: Annotated[Path, typer.Argument(help="The model's folder.")] = ASSETS,
    count: Annotated[int, typer.Option(help="Maximum number of prompts per task.")] = 1000,
) -> None:
    """Print the table; exit with 1 if an accuracy is below its threshold."""
    found = table(*load(folder), count)
    typer.echo(f"{'held out':<22}  prompts  with bos  without    bar")
    for task, (prompts, *figures) in found.items():
        low = "  below" if min(figures) < BARS[task] else ""
        typer.echo(f"{task:<22}  {prompts:>7}  {figures[0]:>8.1%}  {figures[1]:>7.1%}  {BARS[task]:>5.0%}{low}")
    if any(min(figures) < BARS[task] for task, (_, *figures) in found.items()):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
