"""What the heads of the embedded model do: induction, indirect objects, and agreeing with the user."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import product
from pathlib import Path
from random import Random
from typing import Annotated

import check
import tasks
import torch
import typer
from tasks import Prompt
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

Head = tuple[int, int]


@contextmanager
def without(model: PreTrainedModel, heads: Sequence[Head]) -> Iterator[None]:
    """The model with these heads' outputs at zero."""
    size = model.config.n_embd // model.config.n_head

    def hook(head: int):  # noqa: ANN202
        def zero(_module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            z = args[0].clone()
            z[..., head * size : (head + 1) * size] = 0
            return (z, *args[1:])

        return zero

    with ExitStack() as stack:
        for layer, head in heads:
            handle = model.transformer.h[layer].attn.c_proj.register_forward_pre_hook(hook(head))
            stack.callback(handle.remove)
        yield


def all_heads(model: PreTrainedModel) -> list[Head]:
    """Every head as (layer, head)."""
    return list(product(range(model.config.n_layer), range(model.config.n_head)))


@torch.no_grad()
def induction(folder: Path, words: PreTrainedTokenizerBase, half: int = 30) -> dict[Head, float]:
    """How much each head attends, in the second half of a repetition, to the token after the previous occurrence."""
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    tokens = check.repeats(words, half, count=50, bos=True)
    patterns = model(tokens, output_attentions=True).attentions
    queries = torch.arange(1 + half, 2 * half)
    return {
        (layer, head): patterns[layer][:, head, queries, queries - half + 1].mean().item()
        for layer, head in all_heads(model)
    }


@torch.no_grad()
def margin(model: PreTrainedModel, rows: Sequence[list[int]], rights: Sequence[int], wrongs: Sequence[int]) -> Tensor:
    """Logit of one token less that of another, after each row."""
    found = []
    for row, right, wrong in zip(rows, rights, wrongs, strict=True):
        logits = model(torch.tensor([row])).logits[0, -1]
        found.append(logits[right] - logits[wrong])
    return torch.stack(found)


def agreeing_heads(
    model: PreTrainedModel, words: PreTrainedTokenizerBase, asked: Sequence[tuple[Prompt, str]], most: int
) -> list[Head]:
    """Heads whose loss, one after the other, most raises the logit of the truth over that of the user's opinion."""
    rows = [[words.bos_token_id, *words(prompt.text)["input_ids"]] for prompt, _ in asked]
    truths = [words.convert_tokens_to_ids(words.tokenize(truth))[0] for _, truth in asked]
    opinions = [words.convert_tokens_to_ids(words.tokenize(prompt.answer))[0] for prompt, _ in asked]
    chosen: list[Head] = []
    for _ in range(most):
        gains = {}
        for head in all_heads(model):
            with without(model, [*chosen, head]):
                gains[head] = margin(model, rows, truths, opinions).mean().item()
        chosen.append(max(gains, key=gains.__getitem__))
    return chosen


def main(folder: Annotated[Path, typer.Argument(help="The model's folder.")] = check.ASSETS) -> None:
    """Print the induction heads, the heads that matter to indirect objects, and those that agree with the user."""
    model, words = check.load(folder)
    typer.echo("induction: attention to the token after the previous occurrence")
    scores = induction(folder, words)
    for head in sorted(scores, key=scores.__getitem__, reverse=True)[:6]:
        typer.echo(f"  head {head}: {scores[head]:.2f}")

    prompts = check.held_out(200)
    typer.echo("indirect objects: accuracy without one head")
    losses = {}
    for head in all_heads(model):
        with without(model, [head]):
            losses[head] = check.accuracy(model, words, prompts["indirect object"], True)
    for head in sorted(losses, key=losses.__getitem__)[:6]:
        typer.echo(f"  head {head}: {losses[head]:.1%}")

    typer.echo("wrong opinions: answers without the first n of the agreeing heads")
    rng = Random(5)
    asked = [tasks.wrong_opinion(rng, tasks.SEEN_OPINIONS) for _ in range(40)]
    chosen = agreeing_heads(model, words, asked, most=6)
    test = [tasks.wrong_opinion(rng, tasks.HELD_OUT_OPINIONS) for _ in range(200)]
    agreed = [prompt for prompt, _ in test]
    honest = [Prompt(prompt.text, truth) for prompt, truth in test]
    for n in range(len(chosen) + 1):
        with without(model, chosen[:n]):
            shares = [
                check.accuracy(model, words, some, True)
                for some in (agreed, honest, prompts["no opinion: truth"], prompts["fact"], prompts["indirect object"])
            ]
        names = " ".join(f"{layer}.{head}" for layer, head in chosen[:n]) or "none"
        figures = zip(("opinion", "truth", "no opinion", "fact", "indirect object"), shares, strict=True)
        typer.echo(f"  {names:<24} " + "  ".join(f"{name} {share:.0%}" for name, share in figures))


if __name__ == "__main__":
    typer.run(main)
