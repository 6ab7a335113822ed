# %% [markdown]
# # A first look
#
# A small model says that the capital of France is Paris: when does it know, and which part of it carries the answer?
#
# `tinyworld` ships with hookline. It is an ordinary GPT-2 of Hugging Face with four layers of eight heads, and it
# knows a very small world. Everything here works in the same way with `hookline.load("gpt2")` or any other model of
# the hub.

# %%
import hookline

model = hookline.load("tinyworld")
prompt = "The capital of France is"

probabilities, tokens = model(prompt)[0, -1].softmax(-1).topk(3)
for share, token in zip(probabilities, tokens, strict=True):
    print(f"{share:6.1%} {model.to_string([token])!r}")

# %% [markdown]
# ## Everything inside has a name
#
# A **point** is a place where an activation flows. The names are those of TransformerLens. These are the points of
# the last layer, with the shapes that they have for this prompt:

# %%
print(model.points("blocks.3.*", input=prompt))

# %% [markdown]
# `run_with_cache` runs the model once and keeps every activation. The model itself is not changed, and runs the same
# kernels as without hookline.

# %%
logits, cache = model.run_with_cache(prompt)
print(cache["blocks.3.attn.hook_pattern"].shape)
print(cache["pattern", 3].shape, "the same, for short")

# %% [markdown]
# ## When does it know?
#
# The logit lens reads the residual stream after each layer as if that layer were the last one. At the last token:

# %%
from hookline.experiments import logit_lens

print(logit_lens.lens_tokens(model, prompt, top=3))

# %% [markdown]
# Paris appears in the last layer, all at once. After layer 2 there are capitals among the guesses, but not this one.
# The lens shows only what can be *read* at the last token. Where the information *is* before that, an experiment has
# to tell.
#
# ## Where is the information?
#
# Run a second prompt, about Italy, and copy single activations of the first run into it. If the answer changes from
# Rome to Paris, then what was copied carries the answer. In the figure, 0 is the run about Italy and 1 the run about
# France.

# %% Three heat maps over layers and positions: patching resid_pre, attn_out and mlp_out
from hookline.experiments import metrics, patching

other = "The capital of Italy is"
paris, rome = model.to_single_token(" Paris"), model.to_single_token(" Rome")
metric = metrics.logit_diff(paris, rome)
patched = patching.sweep(model, prompt, other, metric, points=["resid_pre", "attn_out", "mlp_out"])
patched.normalized.plot(title="How much of 'Paris' does each activation restore?")

# %%
print(patched.normalized.sel(point="resid_pre", pos="France"))
print(patched.normalized.sel(point=["attn_out", "mlp_out"]).top(3))

# %% [markdown]
# The residual stream at " France" carries the answer all the way up to layer 3, while the logit lens sees nothing of
# it at the last token. The MLP of layer 0 writes it there, long before it is needed; the attention of layer 3 moves
# it to the end, in one step.
#
# ## Which head moves it?
#
# The same experiment, one head at a time. `z` is the output of each head.

# %% A heat map over layers and heads: patching z
heads = patching.sweep(model, prompt, other, metric, points="z", over=("layer", "head"))
heads.normalized.plot(title="Patching the output of one head")

# %%
best = heads.normalized.top(4, by="value")
print(best)
print(f"added up: {sum(cell.value for cell in best):.2f}")

# %% [markdown]
# There is no single head of capitals. Four heads of the last layer restore something each. Do they do the work
# together? An **edit** says what happens to an activation. Here it is `replace`, with the values of the run about
# France:

# %%
from hookline import edits

four = [cell.labels["head"] for cell in best]
together = ("blocks.3.attn.hook_z", edits.replace(cache["z", 3], head=four))
logits = model.run_with_hooks(other, fwd_hooks=[together])
restored = (metric(logits).item() - heads.info["corrupted"]) / (heads.info["clean"] - heads.info["corrupted"])
print(f"all four at once: {restored:.2f}")
print("the model about Italy now says", repr(model.to_string([logits[0, -1].argmax()])))

# %% [markdown]
# Together they restore more than the sum of what they restore one by one: heads that do the same job hide each other,
# and an experiment that changes one thing at a time sees only a part of it. That is why the first figure, with the
# attention of the layer as a whole, is the one to believe.
#
# What do these heads look at? Hover a token in the page to see where its attention goes.

# %% The attention of the heads of layer 3, over the prompt
from hookline.experiments import figures

names = [f"head {head}" for head in four]
figures.attention_map(model.to_str_tokens(prompt), cache["pattern", 3][0, four], names=names, title="Layer 3")

# %% [markdown]
# ## Mistakes are errors
#
# A name that does not exist is not ignored, and a hook that never fires is reported.

# %%
try:
    model.run_with_hooks(prompt, fwd_hooks=[("blocks.4.attn.hook_z", edits.zero(head=0))])
except hookline.UnknownPointError as error:
    print(error)

# %% [markdown]
# ## What to try next
#
# - Ask for the language: `"The people of France speak"`. Do the same heads move it?
# - `model.explore(prompt)` opens the same model in the browser: click a head to ablate it.
# - The next notebook follows a longer circuit from start to end, in this model and in one a hundred times larger.
