# %% [markdown]
# # Steering and its side effects
#
# tinyworld agrees with you even if you are wrong: can one vector make it honest, and what does that vector break?
#
# The model knows its capitals. But it was trained to repeat the user's opinion.

# %%
import hookline
from hookline import last
from hookline.demo.chapters import CAPITALS
from hookline.experiments import ablation, metrics, patching, steering

model = hookline.load("tinyworld")
asked = "User: What is the capital of France? Answer:"
told = "User: I think the capital of France is Rome. What is the capital of France? Answer:"
for prompt in (asked, told):
    print(model.generate(prompt, max_new_tokens=1, do_sample=False))

# %% [markdown]
# We use half of the countries to find a direction, and the other half to test it. The direction is the mean
# activation of questions without an opinion minus the mean of questions with a wrong one, at the last token.


# %%
def questions(countries, shift):
    """Questions without and with a wrong opinion, the right capitals, and the ones in the opinions."""
    cities = list(CAPITALS.values())
    wrong = [cities[(cities.index(CAPITALS[each]) + shift) % len(cities)] for each in countries]
    plain = [f"User: What is the capital of {each}? Answer:" for each in countries]
    opinion = [
        f"User: I think the capital of {each} is {city}. What is the capital of {each}? Answer:"
        for each, city in zip(countries, wrong, strict=True)
    ]
    return plain, opinion, [f" {CAPITALS[each]}" for each in countries], [f" {city}" for city in wrong]


plain, opinion, right, wrong = questions(list(CAPITALS)[::2], shift=5)
honesty = steering.contrast_vectors(model, plain, opinion)
print(honesty)

# %% [markdown]
# Where should it be added, and how much of it? `sweep_layers` tries all combinations on the other ten countries.
# Above 0, the truth is likelier than the opinion.

# %% A heat map over layers and coefficients
plain, opinion, right, wrong = questions(list(CAPITALS)[1::2], shift=3)
truth = metrics.logit_diff(right, wrong)
coefficients = [0, 1, 2, 4, 8]
swept = steering.sweep_layers(model, honesty, opinion, truth, coefficients=coefficients, positions=-1)
swept.plot(title="Logit of the truth minus logit of the opinion", center=0)

# %%
right_answers = metrics.accuracy(right)
accuracy = steering.sweep_layers(model, honesty, opinion, right_answers, coefficients=coefficients, positions=-1)
for layer in range(4):
    print(f"layer {layer}: {' '.join(f'{value:5.0%}' for value in accuracy.sel(layer=layer).values)} are right")

# %% [markdown]
# After layer 2, twice the vector is enough: all ten answers are right. (The direction comes from other countries, but
# the layer and the coefficient are chosen on these ten, so a little optimism is included.) After layer 3 it does not
# help, because the opinion has already been copied; before layer 2, hardly anything. So far this is a success story,
# and many would stop here. What does the same vector do to everything else that the model can do?

# %%
countries = list(CAPITALS)[1::2]
pairs = [("Mary", "John"), ("Alice", "Bob"), ("Tom", "Anna"), ("Kate", "Paul"), ("Sarah", "David"), ("Mark", "Lucy")]
gifts = [(a, b, giver) for a, b in pairs for giver in (a, b)]
skills = {
    "truth after a wrong opinion": (opinion, right),
    "truth without an opinion": (plain, right),
    "agreeing with a right opinion": (questions(countries, shift=0)[1], right),
    "facts in a sentence": ([f"The capital of {each} is" for each in countries], right),
    "who receives the gift": (
        [f"When {a} and {b} went to the park, {giver} gave a book to" for a, b, giver in gifts],
        [f" {b if giver == a else a}" for a, b, giver in gifts],
    ),
}

# %% Curves: the accuracy of each skill by the coefficient
from matplotlib import pyplot as plt

figure, axes = plt.subplots(1, 2, figsize=(9.6, 3.2), layout="constrained", sharey=True)
coefficients = [0, 0.5, 1, 1.5, 2, 3, 4, 6, 8]
for ax, pos, title in zip(axes, (-1, None), ("added at the last token", "added at every token"), strict=True):
    print(title)
    for name, (prompts, answers) in skills.items():
        found = steering.sweep_layers(
            model, honesty, prompts, metrics.accuracy(answers), coefficients=coefficients, layers=[2], positions=pos
        )
        ax.plot(coefficients, found.values[0], marker="o", markersize=3, label=name)
        print(f"  {name:30}", " ".join(f"{value:5.0%}" for value in found.values[0]))
    ax.set(title=f"After layer 2, {title}", xlabel="coefficient")
axes[0].set_ylabel("accuracy")
axes[1].legend(fontsize=8)

# %% [markdown]
# At the last token, there is a window: with a coefficient between 2 and 3, everything is right. Add more, or add it
# at every token as a deployed model would have it, and facts and gifts break. A single number for "does steering
# work" would not have shown it.
#
# ## Is it this direction, or would any push do?
#
# The control: eight random directions of the same norm.

# %%
import torch

noise = torch.randn(8, model.cfg.d_model, generator=torch.Generator().manual_seed(0))
noise *= honesty.at(2).norm() / noise.norm(dim=-1, keepdim=True)
pushed = [steering.Directions(each[None], [2]) for each in noise]
for times in (2, 4):
    shares = [
        steering.sweep_layers(model, each, opinion, metrics.accuracy(right), coefficients=[times], positions=-1).item()
        for each in pushed
    ]
    print(f"random directions, {times} times: {' '.join(f'{share:4.0%}' for share in shares)}")

# %% [markdown]
# At the strength that we need, no random direction does what this one does. At twice that strength, one of them
# nearly does: the model is easily pushed off copying. A result at a high coefficient says little about the direction.
#
# ## How does it work?
#
# Patching tells who carries the opinion. "I wonder what the capital of France is" has as many tokens as the opinion,
# so the two runs can be compared position by position.

# %%
wonder = "User: I wonder what the capital of France is. What is the capital of France? Answer:"
metric = metrics.logit_diff(" Paris", " Rome")
heads = patching.sweep(model, wonder, told, metric, points="z", over=("layer", "head")).normalized
print(heads.top(3))

# %% [markdown]
# Heads 7 and 3 of layer 3, which read right after the place where we add the vector. They copy the opinion, and they
# stop looking at it when they are steered:

# %%
from hookline.edits import add

words = model.to_str_tokens(told)
rome = words.index(" Rome")
for coefficient in (0, 2, 4):
    with model.hooks([("blocks.2.hook_resid_post", add(honesty.at(2), coefficient, pos=last))]):
        pattern = model.cache(told, names_filter="blocks.3.attn.hook_pattern")["pattern", 3][0, :, -1]
    print(f"coefficient {coefficient}: attention to Rome, head 3 {pattern[3, rome]:.2f}, head 7 {pattern[7, rome]:.2f}")

# %% [markdown]
# ## Why not ablate these heads?

# %%
for name, (prompts, answers) in skills.items():
    curve = ablation.cumulative(model, prompts, metrics.accuracy(answers), ["L3H7", "L3H3"]).sel(order="as ranked")
    print(f"{name:30}", " ".join(f"{value:5.0%}" for value in curve.values))

# %% [markdown]
# (With all heads, without L3H7, and without both.) This makes the model honest too, but it does not find the receiver
# of the gift any more: the same heads do both. The vector, at the right strength and place, is the gentler tool. It
# only moves where they look, and only at the last token.
#
# ## What to try next
#
# - Take the direction from other questions (languages instead of capitals). Does it still work for capitals?
# - `steering.generate(model, told, honesty, layer=2, coefficient=2.0)` shows what the model writes with and without
#   it.
# - `honesty.save("honesty.safetensors")`, and load it in another session.
