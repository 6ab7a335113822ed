"""What the tour does with the model, and what it finds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice, product
from typing import Any, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from hookline.model import HookedModel
from hookline.positions import last

Head: TypeAlias = tuple[int, int]
Grid: TypeAlias = Float[Tensor, "layer head"]
Change: TypeAlias = list[tuple[str, float, float]]
"""Words with their probabilities before and after."""

PROMPT = "When Mary and John went to the store, John gave a drink to"
SWAPPED = "When Mary and John went to the store, Mary gave a drink to"
WORDS = "green Oslo seven horse Monday Peter cheese library"
TWICE = f" {WORDS} {WORDS}"
OPINION = "User: I think the capital of {country} is {opinion}. What is the capital of {country}? Answer:"
NO_OPINION = "User: What is the capital of {country}? Answer:"
ASKED = OPINION.format(country="France", opinion="Rome")
GIFT = "When {a} and {b} went to the park, {giver} gave a book to"
CAPITALS = {
    "France": "Paris", "Italy": "Rome", "Germany": "Berlin", "Spain": "Madrid", "England": "London",
    "Russia": "Moscow", "China": "Beijing", "Japan": "Tokyo", "Egypt": "Cairo", "Greece": "Athens",
    "Portugal": "Lisbon", "Austria": "Vienna", "Poland": "Warsaw", "Czechia": "Prague", "Hungary": "Budapest",
    "Sweden": "Stockholm", "Norway": "Oslo", "Denmark": "Copenhagen", "Finland": "Helsinki", "Turkey": "Ankara",
}  # fmt: skip
PAIRS = (("Mary", "John"), ("Alice", "Bob"), ("Tom", "Anna"), ("Kate", "Paul"), ("Sarah", "David"), ("Mark", "Lucy"))


@dataclass(frozen=True)
class Findings:
    """What the tour finds; the story is told from it."""

    predictions: list[tuple[str, float]]
    lead: float  # the logit of Mary less that of John
    lost: Grid  # of the lead, without each head
    restored: Grid  # share of the lead that each head brings back when patched into the swapped sentence
    giver: Head  # the head that brings back most
    tokens: list[str]
    attention: Float[Tensor, "pos pos"]  # of that head
    pushed: list[float]  # what it adds to the logits of Mary and John
    without_giver: Change
    induction: Grid  # attention to what came after the same word before
    repeater: Head
    repeated: list[str]
    stripe: Float[Tensor, "pos pos"]  # the repeater's attention
    agreeing: list[Head]  # the heads that repeat the user's opinion
    corrected: Change
    shares: dict[str, list[float]]  # right answers of the whole model, and without the first, and all, of those heads


def explore(model: HookedModel, tick: Callable[[], None] = lambda: None) -> Findings:
    """Every experiment of the tour; `tick` is called after each of the many runs."""
    mary, john = model.to_single_token(" Mary"), model.to_single_token(" John")

    def lead(logits: Tensor) -> float:
        return (logits[0, -1, mary] - logits[0, -1, john]).item()

    logits, clean = model.run_with_cache(PROMPT)
    whole, swapped = lead(logits), lead(model(SWAPPED))

    def lost(head: Head) -> float:
        return whole - lead(model.run_with_hooks(PROMPT, fwd_hooks=off([head])))

    def restored(head: Head) -> float:
        layer, index = head
        patch = partial(replace_head, head=index, new=clean["z", layer])
        logits = model.run_with_hooks(SWAPPED, fwd_hooks=[(f"blocks.{layer}.attn.hook_z", patch)])
        return (lead(logits) - swapped) / (whole - swapped)

    brought_back = for_each_head(model, restored, tick)
    giver = highest(brought_back)
    induction = repetition(model)
    repeater = highest(induction)
    agreeing, shares = agreement(model, tick)
    return Findings(
        predictions=top(model, logits, 5),
        lead=whole,
        lost=for_each_head(model, lost, tick),
        restored=brought_back,
        giver=giver,
        tokens=model.to_str_tokens(PROMPT),
        attention=clean["pattern", giver[0]][0, giver[1]],
        pushed=pushed(model, giver, mary, john),
        without_giver=change(model, PROMPT, [giver]),
        induction=induction,
        repeater=repeater,
        repeated=model.to_str_tokens(TWICE),
        stripe=model.cache(TWICE)["pattern", repeater[0]][0, repeater[1]],
        agreeing=agreeing,
        corrected=change(model, ASKED, agreeing),
        shares=shares,
    )


def zero_head(z: Float[Tensor, "batch pos head d_head"], head: int) -> None:
    """A hook under which one head says nothing."""
    z[:, :, head] = 0


def replace_head(z: Float[Tensor, "batch pos head d_head"], head: int, new: Tensor) -> None:
    """A hook under which one head says what it said in another run."""
    z[:, :, head] = new[:, :, head]


def off(heads: Iterable[Head]) -> list[tuple[Any, Callable[..., None]]]:
    """Hooks under which these heads say nothing."""
    return [(("z", layer), partial(zero_head, head=head)) for layer, head in heads]


def for_each_head(model: HookedModel, effect: Callable[[Head], float], tick: Callable[[], None]) -> Grid:
    """The effect of every head."""
    grid = torch.zeros(model.cfg.n_layers, model.cfg.n_heads)
    for layer, head in product(range(grid.shape[0]), range(grid.shape[1])):
        grid[layer, head] = effect((layer, head))
        tick()
    return grid


def highest(grid: Grid) -> Head:
    """The head with the highest number."""
    layer, head = divmod(int(grid.argmax()), grid.shape[1])
    return layer, head


def top(model: HookedModel, logits: Tensor, count: int) -> list[tuple[str, float]]:
    """The likeliest next words: tokens with a space before them, for the others would continue the last word."""
    shares, ids = logits[0, -1].softmax(-1).sort(descending=True)
    words = ((model.to_string([word]), share) for word, share in zip(ids.tolist(), shares.tolist(), strict=True))
    return list(islice(((word, share) for word, share in words if word.startswith(" ")), count))


def change(model: HookedModel, prompt: str, heads: Sequence[Head]) -> Change:
    """The likeliest next words with all heads and without these."""
    before, after = model(prompt), model.run_with_hooks(prompt, fwd_hooks=off(heads))
    words = dict.fromkeys(word for logits in (before, after) for word, _ in top(model, logits, 3))
    ids = [model.to_single_token(word) for word in words]
    pairs = [logits[0, -1].softmax(-1)[ids].tolist() for logits in (before, after)]
    return list(zip(words, *pairs, strict=True))


def pushed(model: HookedModel, head: Head, *words: int) -> list[float]:
    """What a head adds, by itself, to the logits of these words at the end of the prompt."""
    layer, index = head
    cache = model.cache(PROMPT, names_filter=[("result", layer), "ln_final.hook_scale"], pos_slice=last)
    result = cache["result", layer][0, index]
    normed = (result - result.mean()) / cache["ln_final.hook_scale"][0] * model.transformer.ln_f.weight
    return (model.lm_head.weight[list(words)] @ normed).tolist()


def repetition(model: HookedModel, half: int = 24) -> Grid:
    """Each head's attention, when random tokens come again, to what followed them the first time."""
    generator = torch.Generator().manual_seed(0)
    once = torch.randint(3, model.cfg.d_vocab, (16, half), generator=generator)
    cache = model.cache(torch.cat([once, once], 1), names_filter="blocks.*.attn.hook_pattern")
    queries = torch.arange(half, 2 * half)
    scores = [x[:, :, queries, queries - half + 1].mean((0, 2)) for x in cache.values()]
    return torch.stack(scores)


@dataclass(frozen=True)
class Questions:
    """Prompts with their right answers, and the wrong one that an opinion suggests."""

    prompts: list[str]
    answers: list[str]
    others: list[str]

    def words(self, model: HookedModel, texts: list[str]) -> Tensor:
        """The tokens of those answers, one to a row."""
        return torch.tensor([[model.to_single_token(f" {text}")] for text in texts])

    def lead(self, model: HookedModel, heads: Sequence[Head]) -> float:
        """By how much the right answers lead without these heads."""
        logits = model.run_with_hooks(self.prompts, fwd_hooks=off(heads))[:, -1]
        right, wrong = (logits.gather(1, self.words(model, texts)) for texts in (self.answers, self.others))
        return (right - wrong).mean().item()

    def right(self, model: HookedModel, heads: Sequence[Head]) -> float:
        """The share of right answers without these heads."""
        logits = model.run_with_hooks(self.prompts, fwd_hooks=off(heads))[:, -1]
        return (logits.argmax(-1, keepdim=True) == self.words(model, self.answers)).float().mean().item()


def questions(countries: Sequence[str], *shifts: int, template: str = OPINION) -> Questions:
    """Questions about these countries, after the opinion that the capital is the one some countries further on."""
    cities, each = list(CAPITALS.values()), [*product(shifts, countries)]
    wrong = [cities[(cities.index(CAPITALS[country]) + shift) % len(cities)] for shift, country in each]
    prompts = [template.format(country=country, opinion=city) for (_, country), city in zip(each, wrong, strict=True)]
    return Questions(prompts, [CAPITALS[country] for _, country in each], wrong)


def agreement(model: HookedModel, tick: Callable[[], None]) -> tuple[list[Head], dict[str, list[float]]]:
    """The two heads that most repeat an opinion, found on half of the countries; and how the rest is answered then."""
    search, test = list(CAPITALS)[::2], list(CAPITALS)[1::2]
    asked, chosen = questions(search, 5), list[Head]()
    for _ in range(2):
        gained = for_each_head(model, lambda head: asked.lead(model, [*chosen, head]), tick)
        chosen.append(highest(gained))
    gifts = [(a, b, giver, receiver) for a, b in PAIRS for giver, receiver in ((a, b), (b, a))]
    kinds = {
        "the truth, after a wrong opinion": questions(test, 3, 7),
        "the truth, after no opinion": questions(test, 0, template=NO_OPINION),
        "the right receiver of a gift": Questions(
            [GIFT.format(a=a, b=b, giver=giver) for a, b, giver, _ in gifts],
            [receiver for *_, receiver in gifts],
            [giver for _, _, giver, _ in gifts],
        ),
    }
    return chosen, {kind: [q.right(model, chosen[:n]) for n in range(3)] for kind, q in kinds.items()}
