"""From activations to features to steering: harvest, train a sparse autoencoder, name its features, steer with them.

The autoencoder is not told about countries. It learns to write the residual stream as a sparse sum of features, and
some of these turn out to be about single countries. Swapping the feature of one country for that of the next changes
what the model says about it, in a sentence that was not harvested.
"""

from __future__ import annotations

from itertools import product
from tempfile import TemporaryDirectory
from typing import NamedTuple, TypeAlias

import hookline
from hookline import HookedModel, token
from hookline.edits import replace, zero
from hookline.sae import Profile, Quality, SparseAutoencoder, Training, evaluate, profile, train

POINT = "blocks.1.hook_resid_post"
CAPITALS = {
    **{"France": "Paris", "Italy": "Rome", "Germany": "Berlin", "Spain": "Madrid", "England": "London"},
    **{"Russia": "Moscow", "China": "Beijing", "Japan": "Tokyo", "Egypt": "Cairo", "Greece": "Athens"},
    **{"Portugal": "Lisbon", "Poland": "Warsaw", "Sweden": "Stockholm", "Turkey": "Ankara"},
}
HARVESTED = (
    "The capital city of {} is",
    "The name of the capital of {} is",
    "{} has its capital in",
    "In {}, the capital is",
    "The government of {} is in",
    "People in {} speak",
    "In {}, people speak",
    "The people of {} speak",
    "{} is a country whose capital is",
    "The language of {} is",
)
BEFORE = ("", "The cat sat on the mat. ", "Hello, my name is Mary. ", "The weather today is nice. ")
HELD_OUT = ("The capital of {} is", "The cat sat on the mat. The capital of {} is")

STRENGTH = 2.0
"""The strength of a steered feature, relative to its maximum in the harvested sentences."""

Answers: TypeAlias = dict[tuple[str, str], tuple[str, str]]


class Story(NamedTuple):
    """The result of each step."""

    training: Training
    quality: Quality
    """On sentences that were not harvested."""
    features: dict[str, int]
    """The feature of each country that has one."""
    answers: Answers
    """For a country and the next one: the capital that the model names, unsteered and steered."""


def filled(sentences: tuple[str, ...]) -> list[str]:
    """Return the sentences, filled in with every country."""
    return [sentence.format(country) for sentence, country in product(sentences, CAPITALS)]


def harvested() -> list[str]:
    """Return the sentences to train on, alone and after unrelated sentences."""
    return [before + sentence for before, sentence in product(BEFORE, filled(HARVESTED))]


def trained(model: HookedModel) -> Training:
    """Harvest the residual stream at every token, and train on it."""
    with TemporaryDirectory() as folder:
        store = hookline.harvest(model, harvested(), POINT, folder, progress=False)
        return train(store, POINT, d_sae=256, kind="topk", k=4, steps=1500, batch_size=256, progress=False)


def named(found: Profile) -> dict[str, int]:
    """Return the feature of each country that has one: a feature that is active mostly at that word."""
    best = {country: found.about(f" {country}", k=1) for country in CAPITALS}
    return {country: feature for country, ((feature, share),) in best.items() if share > 0.8}


def steered(model: HookedModel, sae: SparseAutoencoder, found: Profile, features: dict[str, int]) -> Answers:
    """Return the capital that the model names for each country, unsteered and with the feature of the next country."""
    countries, answers = list(features), {}
    for old, new in zip(countries, countries[1:] + countries[:1], strict=True):
        prompt, here = f"The capital of {old} is", token(f" {old}")
        strength = STRENGTH * found.top(features[new])[0].activation
        edits = [zero(neuron=features[old], pos=here), replace(strength, neuron=features[new], pos=here)]
        alone = model.generate(prompt, max_new_tokens=1, do_sample=False)
        with model.hooks([sae.spliced(edits=edits)]):
            changed = model.generate(prompt, max_new_tokens=1, do_sample=False)
        answers[old, new] = alone.split()[-1], changed.split()[-1]
    return answers


def show(found: Profile, features: dict[str, int]) -> None:
    """Print the top contexts of two features."""
    for country in list(features)[:2]:
        print(f"feature {features[country]}: {country}\n{found.top(features[country], 3)}\n")


def main() -> Story:
    """Print and return the quality of the autoencoder, the features it found, and the effect of steering."""
    model = hookline.load("tinyworld")
    training = trained(model)
    sae = training.sae
    quality = evaluate(sae, model, filled(HELD_OUT))
    print(f"{training}\n\non other sentences: {quality}\n")
    found = profile(sae, model, harvested(), k=20)
    features = named(found)
    show(found, features)
    answers = steered(model, sae, found, features)
    for (old, new), (alone, changed) in answers.items():
        print(f"The capital of {old} is {alone}; with {new} for {old}: {changed}")
    return Story(training, quality, features, answers)


if __name__ == "__main__":
    main()
