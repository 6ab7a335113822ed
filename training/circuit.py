"""What the heads of tinyworld do: induction, indirect objects, and agreeing with the user."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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


def all_heads(model: PreTrainedModel) -> list[Head]:
    """Return all heads as (layer, head)."""
    return list(product(range(model.config.n_layer), range(model.config.n_head)))


@contextmanager
def without(model: PreTrainedModel, heads: Sequence[Head]) -> Iterator[None]:
    """Run the model with these heads ablated, inside a context."""
    with ExitStack() as stack:
        for layer, head in heads:
            attention = model.transformer.h[layer].attn
            part = slice(head * attention.head_dim, (head + 1) * attention.head_dim)
            stack.callback(attention.c_proj.register_forward_pre_hook(zero(part)).remove)
        yield


def zero(part: slice) -> Callable[[nn.Module, tuple[Tensor]], tuple[Tensor]]:
    """Return a hook that zeroes a slice of a module's input."""

    def hook(_module: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
        z = args[0].clone()
        z[..., part] = 0
        return (z,)

    return hook


@torch.no_grad()
def induction(folder: Path, words: PreTrainedTokenizerBase, half: int = 30) -> dict[Head, float]:
    """Return each head's attention, in the second half of a repetition, to the token after the first occurrence."""
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    tokens = check.repeats(words, half, count=50, bos=True)
    patterns = model(tokens, output_attentions=True).attentions
    queries = torch.arange(1 + half, 2 * half)
    return {
        (layer, head): patterns[layer][:, head, queries, queries - half + 1].mean().item()
        for layer, head in all_heads(model)
    }


def margin(model: PreTrainedModel, words: PreTrainedTokenizerBase, prompts: Sequence[Prompt]) -> float:
    """Return the mean logit difference between the answers and the distractors."""
    rows, answers = check.encode(words, prompts, bos=True)
    others = torch.tensor([words(prompt.other)["input_ids"][0] for prompt in prompts])
    logits = check.last_logits(model, rows)
    each = torch.arange(len(rows))
    return (logits[each, answers] - logits[each, others]).mean().item()


def margins(
    model: PreTrainedModel, words: PreTrainedTokenizerBase, prompts: Sequence[Prompt], already: Sequence[Head] = ()
) -> dict[Head, float]:
    """Return the margin without each head (and without those already chosen), lowest first."""
    found = {}
    for head in all_heads(model):
        with without(model, [*already, head]):
            found[head] = margin(model, words, prompts)
    return dict(sorted(found.items(), key=lambda item: item[1]))


def agreeing_heads(model: PreTrainedModel, words: PreTrainedTokenizerBase, most: int) -> list[Head]:
    """Return the heads whose ablation, added one by one, most favors the truth over the user's opinion."""
    rng = Random(5)
    prompts = [tasks.wrong_opinion(rng, tasks.SEEN_OPINIONS) for _ in range(60)]
    chosen: list[Head] = []
    for _ in range(most):
        chosen.append(next(iter(margins(model, words, prompts, chosen))))
    return chosen


def show_agreement(model: PreTrainedModel, words: PreTrainedTokenizerBase, most: int) -> None:
    """Print the accuracy on held-out prompts without the first n of these heads."""
    prompts = check.held_out(200)
    prompts["opinion: truth"] = [Prompt(prompt.text, prompt.other) for prompt in prompts["opinion: agrees"]]
    shown = ("opinion: agrees", "opinion: truth", "no opinion: truth", "fact", "indirect object")
    typer.echo(f"{'  without':<26}" + "  ".join(shown))
    chosen = agreeing_heads(model, words, most)
    for n in range(most + 1):
        names = " ".join(f"{layer}.{head}" for layer, head in chosen[:n]) or "none"
        with without(model, chosen[:n]):
            shares = [f"{check.accuracy(model, words, prompts[task], bos=True):>{len(task)}.1%}" for task in shown]
        typer.echo(f"  {names:<24}" + "  ".join(shares))


def main(folder: Annotated[Path, typer.Argument(help="The model's folder.")] = check.ASSETS) -> None:
    """Print the induction heads, the heads that matter for indirect objects, and those that agree with the user."""
    model, words = check.load(folder)
    typer.echo("induction: attention to the token after the previous occurrence")
    for (layer, head), score in sorted(induction(folder, words).items(), key=lambda item: -item[1])[:8]:
        typer.echo(f"  {layer}.{head}  {score:.2f}")
    prompts = check.held_out(200)["indirect object"]
    typer.echo("indirect objects without one head: logit difference of receiver and giver, and accuracy")
    typer.echo(f"  none  {margin(model, words, prompts):.1f}")
    for (layer, head), score in list(margins(model, words, prompts).items())[:6]:
        with without(model, [(layer, head)]):
            typer.echo(f"  {layer}.{head}  {score:.1f}  {check.accuracy(model, words, prompts, bos=True):.1%}")
    typer.echo("wrong opinions without the heads that agree most with the user: fraction of answers")
    show_agreement(model, words, most=4)


if __name__ == "__main__":
    typer.run(main)
