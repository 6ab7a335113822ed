# %% [markdown]
# # A sparse autoencoder, from harvest to dashboard
#
# A layer has 128 numbers for every token, and no number means anything by itself: can we find directions that do?
#
# A sparse autoencoder writes each activation as a sum of few directions out of many, its features. We harvest
# activations of tinyworld, train an autoencoder on them, look at what it found, and test it by experiment. Nobody
# tells it what a country is.

# %%
import tempfile
from itertools import product

import hookline
from hookline import token
from hookline.demo.chapters import CAPITALS
from hookline.edits import replace, zero
from hookline.sae import dashboard, evaluate, profile, train

model = hookline.load("tinyworld")
point = "blocks.1.hook_resid_post"

# %% [markdown]
# ## Harvest
#
# Sentences about 14 countries, alone and after other sentences. `harvest` stores the activation at every token in
# files, resumes if it is interrupted, and scales to data sets that do not fit into memory. Here we use a temporary
# folder.

# %%
countries = [*list(CAPITALS)[:11], "Poland", "Sweden", "Turkey"]
sentences = [
    "The capital city of {} is", "The name of the capital of {} is", "{} has its capital in", "In {}, the capital is",
    "The government of {} is in", "People in {} speak", "In {}, people speak", "The people of {} speak",
    "{} is a country whose capital is", "The language of {} is",
]  # fmt: skip
before = ["", "The cat sat on the mat. ", "Hello, my name is Mary. ", "The weather today is nice. "]
texts = [start + sentence.format(country) for start, sentence, country in product(before, sentences, countries)]
held_out = [f"{start}The capital of {country} is" for start, country in product(before[:2], countries)]

folder = tempfile.TemporaryDirectory()
store = hookline.harvest(model, texts, point, folder.name, progress=False)
activations = store[point]
print(f"{store.examples} texts, {activations.shape[0]} tokens, {activations.shape[1]} numbers each")

# %% [markdown]
# ## Train
#
# There are 256 features, and each token may use four of them (`topk`).

# %% tags=["varies"]
training = train(store, point, d_sae=256, kind="topk", k=4, steps=1500, batch_size=256, progress=False)
sae = training.sae
print(training)

# %% [markdown]
# How much of the model survives if the activation is replaced by its reconstruction? On sentences that were not
# harvested:

# %% tags=["varies"]
print(evaluate(sae, model, held_out))

# %% [markdown]
# ## Look
#
# `profile` finds where every feature is active. `about` lists the features that are active mostly at one token.

# %% tags=["varies"]
found = profile(sae, model, texts, k=20)
features = {}
for country in countries:
    (feature, share), *_ = found.about(f" {country}", k=1)
    print(f"{country:9} feature {feature:3}, {share:4.0%} of its strongest activations are at this word")
    if share > 0.8:
        features[country] = feature
print(f"{len(features)} of {len(countries)} countries have a feature of their own")

# %% [markdown]
# Most countries have a feature of their own, and some share one: at this size, the autoencoder did not need to tell
# them apart. Here is the page of the first that has one. Its top texts are what we hoped for; look at the random ones
# too, because top texts alone make every feature look clean.

# %% tags=["varies"] title="The page of a feature"
first = next(iter(features.values()))
dashboard(sae, model, texts, first)

# %% [markdown]
# ## Test
#
# The lists of logits on that page are hardly about the country. They come from the direction alone, as if no layer
# came after it, and two do. What the feature *does* is a question for an experiment. We take out the feature of each
# country, and put in that of the next one, as strong as it gets, in a sentence that was not harvested:


# %% tags=["varies"]
def answer(prompt, hooks):
    """The next word."""
    with model.hooks(hooks):
        return model.generate(prompt, max_new_tokens=1, do_sample=False).split()[-1]


def swap(old, new, strength=1.0):
    """A hook that writes the feature of another country in place of that of a country."""
    here, most = token(f" {old}"), found.top(features[new])[0].activation
    edits = [zero(neuron=features[old], pos=here), replace(strength * most, neuron=features[new], pos=here)]
    return sae.spliced(edits=edits)


names = list(features)
pairs = list(zip(names, names[1:] + names[:1], strict=True))
for old, new in pairs:
    steered = answer(f"The capital of {old} is", [swap(old, new)])
    is_right = "yes" if steered == CAPITALS[new] else "no"
    print(f"The capital of {old:9} with the feature of {new:9}: {steered:10} {CAPITALS[new]}? {is_right}")

# %% [markdown]
# How good is that? True patching is the yardstick: copy the *whole* activation at the country's token from a sentence
# about the other country. And a control: the same edit with a feature that has nothing to do with countries.

# %% tags=["varies"] title="Bars: how many answers change to the other country's capital"
from matplotlib import pyplot as plt

from hookline import at

cat = "The cat sat on the mat."
unrelated = sae.encode(model.cache(cat, names_filter=point)[point])[0, -2].argmax().item()
counts = {}
for old, new in pairs:
    here, prompt, goal = token(f" {old}"), f"The capital of {old} is", CAPITALS[new]
    whole = model.cache(f"The capital of {new} is", names_filter=point)[point]
    strange = replace(found.top(unrelated)[0].activation, neuron=unrelated, pos=here)
    hooks = {
        "whole activation": (point, at(here, lambda x, whole=whole: whole[:, : x.shape[1]])),
        "feature": swap(old, new),
        "feature, half as strong": swap(old, new, strength=0.5),
        "old feature out only": sae.spliced(edits=[zero(neuron=features[old], pos=here)]),
        "unrelated feature": sae.spliced(edits=[zero(neuron=features[old], pos=here), strange]),
    }
    for name, hook in hooks.items():
        counts[name] = counts.get(name, 0) + (answer(prompt, [hook]) == goal)

figure, ax = plt.subplots(figsize=(6.4, 2.4), layout="constrained")
ax.barh(list(counts), list(counts.values()), color="#2b5f94")
ax.invert_yaxis()
ax.set(xlim=(0, len(pairs)), xlabel="answers that become the other capital", title="What the features do")
print(counts)

# %% [markdown]
# One feature does here what the whole activation does, which has 128 numbers, and an unrelated one does not. Two
# warnings: these were the countries *with* a feature, and a world of 14 countries in ten sentences is an easy one. On
# real text, features are fewer than concepts, and more of them are about nothing that has a name.
#
# ## What to try next
#
# - Other seeds: `train(…, seed=1)`. Do the same countries share a feature?
# - Other kinds: `kind="batchtopk"`, `"jumprelu"`, `"matryoshka"` ([docs](../sae.md)).
# - `hookline.sae.published("gpt2-small-res-jb", "blocks.8.hook_resid_pre")` loads an autoencoder of somebody else.
