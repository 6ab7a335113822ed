# %% [markdown]
# # Coming from TransformerLens
#
# You have a folder full of TransformerLens notebooks: what has to change, and what do you gain?
#
# One line changes, the import. This notebook is the well-known exploration of indirect objects as one writes it for
# `HookedTransformer`; after it, the same results in hookline's own way, which is shorter.

# %%
import torch

# from transformer_lens import HookedTransformer, patching, utils
from hookline.compat.transformer_lens import HookedTransformer, patching, utils

torch.set_grad_enabled(False)
model = HookedTransformer.from_pretrained("tinyworld", device="cpu")
clean = "When Mary and John went to the store, John gave a drink to"
corrupted = "When Mary and John went to the store, Mary gave a drink to"
utils.test_prompt(clean, "Mary", model)

# %% [markdown]
# Caches, names and shorthands are the ones you know:

# %%
clean_tokens, corrupted_tokens = model.to_tokens(clean), model.to_tokens(corrupted)
clean_logits, clean_cache = model.run_with_cache(clean_tokens)
corrupted_logits = model(corrupted_tokens)
print(clean_cache[utils.get_act_name("pattern", 3)].shape, clean_cache["z", 3].shape)
print(model.W_Q.shape, model.cfg.n_layers, model.cfg.d_head)

# %% [markdown]
# ## The logit lens by hand

# %%
mary, john = model.to_single_token(" Mary"), model.to_single_token(" John")
direction = model.W_U[:, mary] - model.W_U[:, john]
stack, labels = clean_cache.accumulated_resid(layer=-1, incl_mid=False, pos_slice=-1, return_labels=True)
scaled = clean_cache.apply_ln_to_stack(stack, layer=-1, pos_slice=-1)
for label, value in zip(labels, (scaled[:, 0] @ direction).tolist(), strict=True):
    print(f"{label:10} {value:6.2f}")

# %% [markdown]
# ## Patching
#
# `patching.get_act_patch_…` takes the same arguments. It is faster: it runs again only the layers and positions that
# a patch can change.

# %% A heat map over layers and positions: patching resid_pre
import matplotlib.pyplot as plt


def logit_diff(logits):
    """The logit of Mary minus the logit of John."""
    return logits[0, -1, mary] - logits[0, -1, john]


low, high = logit_diff(corrupted_logits), logit_diff(clean_logits)
restored = patching.get_act_patch_resid_pre(
    model, corrupted_tokens, clean_cache, lambda logits: (logit_diff(logits) - low) / (high - low)
)
figure, ax = plt.subplots(figsize=(6.4, 2.4), layout="constrained")
shown = ax.imshow(restored, cmap="RdBu", vmin=-1, vmax=1, aspect="auto")
ax.set_xticks(range(len(clean_tokens[0])), model.to_str_tokens(clean), rotation=90)
ax.set(ylabel="layer", yticks=range(4), title="get_act_patch_resid_pre")
figure.colorbar(shown)

# %% [markdown]
# ## Hooks


# %%
def ablate(z, hook):
    """Zero head 4."""
    z[:, :, 4] = 0
    return z


ablated = model.run_with_hooks(clean_tokens, fwd_hooks=[(utils.get_act_name("z", 3), ablate)])
print(f"logit difference {logit_diff(clean_logits):.2f}, without head 4 of layer 3 {logit_diff(ablated):.2f}")

# %% [markdown]
# ## The same in hookline's own way
#
# `hookline.load` gives the Hugging Face model with its own weights: nothing is folded or centered. One difference to
# know: `HookedTransformer` puts a BOS token before every text, and `hookline.load` tokenizes as the model's own
# tokenizer does. To compare the two, we pass tokens.

# %% The same heat map, drawn by the result
import hookline
from hookline.experiments import metrics
from hookline.experiments import patching as sweeps

own = hookline.load("tinyworld")
print(len(own.to_str_tokens(clean)), "tokens, and with a BOS token", len(own.to_str_tokens(clean, prepend_bos=True)))
result = sweeps.sweep(own, clean_tokens, corrupted_tokens, metrics.logit_diff(mary, john)).normalized
result.plot(title="patching.sweep")

# %%
assert torch.allclose(result.values, restored, atol=1e-4)
assert torch.allclose(own(clean_tokens).softmax(-1), clean_logits.softmax(-1), atol=1e-5)
print("the grids and the probabilities agree")

# %% [markdown]
# The result knows its labels. `result.sel(pos="John")` works, and so do `result.top(3)`, `result.to_dataframe()` and
# `result.save(…)`.

# %%
print(result.top(3))

# %% [markdown]
# ## What is stricter
#
# A filter that matches nothing is easily written, and an experiment that does nothing looks like one without an
# effect. Here it is an error:

# %%
try:
    model.run_with_hooks(clean_tokens, fwd_hooks=[(lambda name: name.endswith("hook_zz"), ablate)])
except hookline.HooklineError as error:
    print(f"{type(error).__name__}: {error}")

# %% [markdown]
# ## Change all files at once
#
# `hookline migrate` rewrites the imports of scripts and notebooks, and lists what will behave differently. Without
# `--write` it only shows what it would do.

# %%
import subprocess
import sys
from pathlib import Path

imports = "from transformer_lens import HookedTransformer\nimport transformer_lens.utils as utils\n"
Path("old_script.py").write_text(imports)
command = [sys.executable, "-m", "hookline", "migrate", "old_script.py"]  # in a shell: hookline migrate old_script.py
done = subprocess.run(command, capture_output=True, text=True)
print(done.stdout)

# %% [markdown]
# ## What to try next
#
# - `hookline migrate` on your own folder; the [table of differences](../from-transformerlens.md#differences) says
#   what to look for.
# - sae-lens and circuit-tracer run on hookline too
#   ([docs](../from-transformerlens.md#libraries-that-import-transformer_lens)).
# - `HookedTransformer.from_pretrained("gpt2")`, or a model that TransformerLens never had.
