"""The experiments of the tour, run with `hookline.experiments`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice, product
from typing import Any, NamedTuple, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from hookline.edits import zero
from hookline.experiments import ablation, contrast, head_detectors, logit_attribution, logit_lens, metrics, patching
from hookline.model import HookedModel

Grid: TypeAlias = Float[Tensor, "layer head"]
Change: TypeAlias = list[tuple[str, list[float]]]
"""Words with their probabilities before and after a change."""

PROMPT = "When Mary and John went to the store, John gave a drink to"
SWAPPED = "When Mary and John went to the store, Mary gave a drink to"
TWICE = " green Oslo seven horse Monday Peter cheese library" * 2
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


class Head(NamedTuple):
    """An attention head; prints as "3.4"."""

    layer: int
    head: int

    def __str__(self) -> str:
        return f"{self.layer}.{self.head}"


class Attention(NamedTuple):
    """The words of a text, and the attention of a head from each to each."""

    words: list[str]
    pattern: Float[Tensor, "pos pos"]

    @property
    def last(self) -> tuple[str, float]:
        """The word that the last one looks at most, and how much."""
        most, at = self.pattern[-1].max(-1)
        return self.words[int(at)], most.item()


@dataclass(frozen=True)
class Findings:
    """The results of the tour, from which the story is written."""

    predictions: list[tuple[str, float]]
    lens: list[tuple[str, float]]  # the likeliest next word after each layer, with its probability
    logit_diff: float  # the logit of Mary minus that of John
    added: dict[str, float]  # what each component adds to it
    added_by_heads: Grid
    lost: Grid  # decrease of the logit difference without each head
    restored: Grid  # fraction of the logit difference that each head restores when patched into the swapped sentence
    stream: Float[Tensor, "layer pos"]  # the same for the stream before each layer, at each position
    giver: Head  # the head that restores most
    attention: Attention  # of that head
    pushed: dict[str, float]  # its contributions to the logits of John and Mary
    without_giver: Change
    added_without: dict[str, float]  # what each component adds to the logit difference without that head
    induction: Grid  # attention to the token after the previous occurrence
    repeater: Head
    stripe: Attention  # of the repeater
    agreeing: list[Head]  # the heads that repeat the user's opinion
    opinion: Attention  # of the first of them
    corrected: Change
    shares: dict[str, list[float]]  # accuracy with all heads, without the first, and without both of those heads


@torch.no_grad()
def find_all(model: HookedModel) -> Findings:
    """Run every experiment of the tour."""
    receiver = metrics.logit_diff(" Mary", " John")
    ablated = ablation.ablate(model, PROMPT, receiver, progress=False)
    restored, stream = (
        patching.sweep(model, PROMPT, SWAPPED, receiver, points=points, over=over, progress=False).normalized.values
        for points, over in (("z", ("layer", "head")), ("resid_pre", ("layer", "pos")))
    )
    lens = logit_lens.lens_tokens(model, PROMPT, top=1, pos=-1)
    guesses = [word.strip() for ((word,),) in lens.tokens]
    induction = head_detectors.head_scores(model, kinds="induction").sel(kind="induction").values
    giver, repeater = highest(restored), highest(induction)
    pushed = {
        name: logit_attribution.direct_logit_attribution(model, PROMPT, f" {name}", of="heads")[giver].item()
        for name in ("John", "Mary")
    }
    agreeing, shares = agreeing_heads(model)
    return Findings(
        predictions=top(model, model(PROMPT), 5),
        lens=list(zip(guesses, lens.probs.flatten().tolist(), strict=True)),
        logit_diff=ablated.info["clean"],
        added=added(model),
        added_by_heads=logit_attribution.direct_logit_attribution(model, PROMPT, " Mary", " John", of="heads").values,
        lost=ablated.info["clean"] - ablated.values,
        restored=restored,
        stream=stream,
        giver=giver,
        attention=attention_of(model, PROMPT, giver),
        pushed=pushed,
        without_giver=change(model, PROMPT, [giver]),
        added_without=added(model, [giver]),
        induction=induction,
        repeater=repeater,
        stripe=attention_of(model, TWICE, repeater),
        agreeing=agreeing,
        opinion=attention_of(model, ASKED, agreeing[0]),
        corrected=change(model, ASKED, agreeing),
        shares=shares,
    )


def off(heads: Iterable[Head]) -> list[tuple[Any, Any]]:
    """Hooks that zero these heads."""
    return [(("z", layer), zero(head=head)) for layer, head in heads]


def added(model: HookedModel, without: Sequence[Head] = ()) -> dict[str, float]:
    """What each component adds to the logit of Mary minus that of John, without these heads."""
    with model.hooks(fwd_hooks=off(without)):
        attribution = logit_attribution.direct_logit_attribution(model, PROMPT, " Mary", " John")
    return {
        str(name): value
        for name, value in zip(attribution.coords["component"], attribution.values.tolist(), strict=True)
    }


def highest(grid: Grid) -> Head:
    """The head with the highest number."""
    return Head(*divmod(int(grid.argmax()), grid.shape[1]))


def attention_of(model: HookedModel, text: str, head: Head) -> Attention:
    """The words of a text, and a head's attention from each to each."""
    words = [token.strip() for token in model.to_str_tokens(text)]
    return Attention(words, model.cache(text)["pattern", head.layer][0, head.head])


def top(model: HookedModel, logits: Tensor, count: int) -> list[tuple[str, float]]:
    """The likeliest next words: tokens that begin with a space; others would continue the last word."""
    shares, ids = logits[0, -1].softmax(-1).sort(descending=True)
    words = ((model.to_string([word]), share) for word, share in zip(ids.tolist(), shares.tolist(), strict=True))
    return list(islice(((word[1:], share) for word, share in words if word.startswith(" ")), count))


def change(model: HookedModel, prompt: str, heads: Sequence[Head]) -> Change:
    """The likeliest next words with all heads and without these."""
    runs = [model(prompt), model.run_with_hooks(prompt, fwd_hooks=off(heads))]
    words = dict.fromkeys(word for logits in runs for word, _ in top(model, logits, 3))
    ids = {word: model.to_single_token(f" {word}") for word in words}
    return [(word, [logits[0, -1].softmax(-1)[ids[word]].item() for logits in runs]) for word in words]


class Questions(NamedTuple):
    """Prompts with their correct answers, and the wrong answers that an opinion suggests."""

    prompts: list[str]
    answers: list[str]
    others: list[str]


def questions(countries: Sequence[str], *shifts: int, template: str = OPINION) -> Questions:
    """Questions about these countries, each after an opinion that names the capital of another country."""
    cities, shifted_countries = list(CAPITALS.values()), [*product(shifts, countries)]
    wrong = [cities[(cities.index(CAPITALS[country]) + shift) % len(cities)] for shift, country in shifted_countries]
    prompts = [
        template.format(country=country, opinion=city)
        for (_, country), city in zip(shifted_countries, wrong, strict=True)
    ]
    return Questions(prompts, [CAPITALS[country] for _, country in shifted_countries], wrong)


def agreeing_heads(model: HookedModel) -> tuple[list[Head], dict[str, list[float]]]:
    """The two heads that repeat an opinion most, found on half of the countries, and the accuracy on the rest."""
    search, test = list(CAPITALS)[::2], list(CAPITALS)[1::2]
    opinionated, plain = questions(search, 5), questions(search, 5, template=NO_OPINION)
    right, wrong = ([f" {word}" for word in words] for words in (opinionated.answers, opinionated.others))
    pairs = list(zip(plain.prompts, opinionated.prompts, strict=True))
    result = contrast.ablate_differing(model, pairs, metric=metrics.logit_diff(right, wrong), progress=False)
    gifts = [(a, b, *givers) for a, b in PAIRS for givers in ((a, b), (b, a))]
    kinds = {
        "the truth, after a wrong opinion": questions(test, 3, 7),
        "the truth, after no opinion": questions(test, 0, template=NO_OPINION),
        "the right receiver of a gift": Questions(
            [GIFT.format(a=a, b=b, giver=giver) for a, b, giver, _ in gifts],
            [receiver for *_, receiver in gifts],
            [giver for _, _, giver, _ in gifts],
        ),
    }
    heads, shares = [Head(*head) for head in result.heads[:2]], {}
    for kind, question_set in kinds.items():
        correct = metrics.accuracy([f" {word}" for word in question_set.answers])
        curve = ablation.cumulative(model, question_set.prompts, correct, heads, progress=False)
        shares[kind] = curve.sel(order="as ranked").values.tolist()
    return heads, shares
