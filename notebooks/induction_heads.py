# %% [markdown]
# # Induction heads
#
# How can a model continue a sequence that makes no sense and that it has seen only once?
#
# Take thirty random tokens and write them twice. Nobody can guess the first half. The second half is easy, but only
# for a model that looks up what came next the first time.

# %%
import torch

import hookline
from hookline.experiments import ablation, figures, head_detectors, metrics, patching, paths

model = hookline.load("tinyworld")
half = 30
once = torch.randint(3, model.cfg.d_vocab, (16, half), generator=torch.Generator().manual_seed(0))
twice = torch.cat([once, once], dim=1)
with torch.no_grad():
    losses = model(twice, return_type="loss", loss_per_token=True)
print(f"loss in the first half {losses[:, : half - 1].mean():.2f}, in the second half {losses[:, half:].mean():.2f}")

# %% The loss at each position of the repeated sequence
from matplotlib import pyplot as plt

figure, ax = plt.subplots(figsize=(6.4, 2.6), layout="constrained")
ax.plot(range(1, 2 * half), losses.mean(0))
ax.axvline(half, color="0.6", linestyle=":")
ax.set(xlabel="position", ylabel="loss", title="Random tokens, repeated from position 30 on")

# %% [markdown]
# The very first token of the repetition cannot be guessed either. From the second one on, the model knows. Which
# heads look back to what followed the same token before? `head_scores` measures it, for all heads, on random tokens
# like these.

# %% Three heat maps over layers and heads: previous token, duplicate token, induction
scores = head_detectors.head_scores(model)
scores.plot(title="Share of a head's attention that goes to …")

# %%
print(scores.sel(kind="induction").top(6, by="value"))
print(scores.sel(kind="previous_token").top(3, by="value"))

# %% [markdown]
# Half a dozen heads of the last layer are induction heads, and head 7 of layer 2 looks at the previous token. To see
# one at work, here are eight words, twice. Choose a token to see where each head looks from it.

# %% The attention of the induction heads of layer 3 over eight words that are repeated
words = " green Oslo seven horse Monday Peter cheese library" * 2
pattern = model.cache(words, names_filter="blocks.3.attn.hook_pattern")["pattern", 3][0]
heads = [cell.labels["head"] for cell in scores.sel(kind="induction", layer=3).top(6, by="value")]
figures.attention_map(
    model.to_str_tokens(words), pattern[heads], names=[f"head {head}" for head in heads], title="Layer 3"
)

# %% [markdown]
# ## Does the model need them?
#
# Attention is a correlation. We ablate each head and measure the loss on the repetition.


# %%
def repetition(logits):
    """The loss on the second half, one number per row."""
    chosen = logits[:, half:-1].log_softmax(-1).gather(-1, twice[:, half + 1 :, None])
    return -chosen.mean((1, 2))


alone = ablation.ablate(model, twice, repetition, of="heads", method="mean")
print(f"with all heads: {alone.info['clean']:.2f}")
print(alone.top(4))

# %% [markdown]
# No induction head seems to matter much, and the head that matters most, in layer 2, is not one of them. But heads
# that do the same job stand in for each other, and an ablation of one at a time does not see that. So ablate them
# together, and as a control as many heads of the layer before, without its head 7.

# %% The loss as more and more heads are ablated
induction = [(3, head) for head in heads]
others = [(2, head) for head in range(7)][: len(heads)]
curve = ablation.cumulative(model, twice, repetition, induction, method="mean").sel(order="as ranked")
control = ablation.cumulative(model, twice, repetition, others, method="mean").sel(order="as ranked")
ax = curve.plot(label="induction heads of layer 3", title="The loss on the repetition")
control.plot(ax, label="heads of layer 2", color="0.5")
ax.set_xlabel("heads ablated")
ax.legend()
for name, each in (("induction", curve), ("control", control)):
    print(f"{name:9}", [f"{value:.2f}" for value in each.values])

# %% [markdown]
# ## How do they know where to look?
#
# The theory: a head in an earlier layer writes at each token what the *previous* token was, and the induction head
# compares its own token with that. If this is so, then the path from an earlier head to the **keys** of the induction
# heads carries the information. Path patching tests it. The model reads the eight words, and then the first four
# again; the answer is " Monday". In the corrupted text, the first "horse" is a flower: there is nothing to look up
# any more.

# %% A heat map over layers and positions: patching the residual stream
clean = " green Oslo seven horse Monday Peter cheese library green Oslo seven horse"
corrupted = " green Oslo seven flower Monday Peter cheese library green Oslo seven horse"
metric = metrics.log_prob(" Monday")

stream = patching.sweep(model, clean, corrupted, metric).normalized
stream.plot(title="Patching the residual stream: 1 is the text with a horse")

# %%
print(stream.top(5))

# %% [markdown]
# The information starts at the first horse, and moves to the word after it, where layer 3 reads it. Now the paths,
# from every head into the keys, the queries and the values of the induction heads:

# %%
for into in ("k", "q", "v"):
    receivers = [(into, 3, head) for head in heads]
    sent = paths.path_patch(model, clean, corrupted, metric, senders="heads", receivers=receivers).normalized
    print(f"into the {into} of the induction heads\n{sent.top(3, by='value')}\n")

# %% [markdown]
# In this text, one head, the previous-token head of layer 2, restores nearly everything through the *keys* of the
# induction heads, and nothing else does. It is the head whose ablation hurt most. But this is one text. The same
# experiment with random tokens, which is what the scores above were measured on:

# %%
clean = twice[:1, : half + 8]
corrupted = clean.clone()
corrupted[0, 7] = 500  # the first occurrence of the last token
metric = metrics.log_prob(clean[0, 8].item())
for into in ("k", "q", "v"):
    receivers = [(into, 3, head) for head in heads]
    sent = paths.path_patch(model, clean, corrupted, metric, senders="heads", receivers=receivers).normalized
    print(f"into the {into} of the induction heads\n{sent.top(3, by='value')}\n")

# %% [markdown]
# The first part of the theory holds in both texts: what matters goes through the keys. The second part, one
# previous-token head, does not: with random tokens, heads of layers 0 and 1 restore most of the answer as well, each
# by itself, so the shares add up to more than 1.
#
# ## What to try next
#
# - Induction heads copy. In the notebook about steering, two of these heads copy the user's opinion.
# - Try the same code on SmolLM2-135M (see the notebook about indirect objects): leave out the mean ablation of all
#   heads, or use `attribution.attribution_patching`, which needs three forward passes for all of them.
# - Make the repetition inexact: replace every third token of the second half. Which heads still help?
