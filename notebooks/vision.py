# %% [markdown]
# # Looking into a vision-language model
#
# The model sees a red circle and a blue square, and says "red": where in the image, and where in the model, is the
# color?
#
# `tinysight` ships with hookline. It is a small LLaVA: a vision tower turns an image into 36 image tokens, one for
# each patch of 8 × 8 pixels, and a language model reads them together with the question.

# %% Two images of a circle and a square
from matplotlib import pyplot as plt

import hookline
from hookline.demo.tinysight import SIDE, Shape, draw
from hookline.experiments import images, metrics, patching

model = hookline.load("tinysight")
square = Shape("square", "blue", x=36, y=35, size=13)
circle = Shape("circle", "red", x=14, y=14, size=15)
image = draw([circle, square])
other = draw([Shape("circle", "green", x=14, y=14, size=15), square])

figure, axes = plt.subplots(1, 2, figsize=(4, 2.2), layout="constrained")
for ax, each, title in zip(axes, (image, other), ("clean", "corrupted"), strict=True):
    ax.imshow(each)
    ax.set(title=title, xticks=[], yticks=[])

# %%
question = "<image> What color is the circle?"
red, green = (model.to_inputs(question, images=[each]) for each in (image, other))
for inputs in (red, green):
    print(repr(model.to_string([model(**inputs)[0, -1].argmax()])))
print(model.to_str_tokens(question)[-7:])

# %% [markdown]
# ## Where in the image?
#
# Patch the residual stream of one position at a time, from the run that saw red into the run that saw green, and draw
# the effect of each image token over its patch: 1 means that the answer is red again.

# %% Four panels, one per layer: the effect of patching each image token, drawn over the image
metric = metrics.logit_diff(" red", " green")
swept = patching.sweep(model, red, green, metric)
images.overlay(swept.normalized, images.place_image(model, red, image))

# %% [markdown]
# No single patch does much: the circle covers several. So patch all positions of the circle together, and then all
# *others* of the image.

# %%
box = tuple(side / SIDE for side in circle.box)
shape = images.patch(model, red, green, metric, box=box).normalized
ground = images.patch(model, red, green, metric, box=box, others=True).normalized
print("before layer   ", *(f"{layer:6}" for layer in range(4)))
print("the circle     ", *(f"{value:6.0%}" for value in shape.values))
print("the rest       ", *(f"{value:6.0%}" for value in ground.values))

# %%
print(swept.normalized.sel(layer=[2, 3]).top(2))

# %% [markdown]
# Before layers 0 and 1, the color is in the circle's own image tokens and nowhere else. Before layer 2, it has moved
# to the question mark, the last token. So layer 1 looked it up. Which of its heads?
#
# ## Who looks at the circle?

# %% Eight panels, one per head of layer 1: attention from the last token, drawn over the image
attention = images.attention(model, red, image)
print(attention.top(5, box=box))
attention.plot(1)

# %% [markdown]
# Four heads of layer 1 look at the circle and at nothing else. Do they carry the color? Patch them one by one, and
# then together:

# %%
from hookline.edits import replace

heads = patching.sweep(model, red, green, metric, points="z", over=("layer", "head"))
print(heads.normalized.top(4))

z = model.cache(**red, names_filter="blocks.1.attn.hook_z")["z", 1]
four = [4, 5, 6, 7]
logits = model.run_with_hooks(**green, fwd_hooks=[("blocks.1.attn.hook_z", replace(z, head=four))])
first, second = (model.to_single_token(word) for word in (" red", " green"))
restored = (logits[0, -1, first] - logits[0, -1, second]).item() - heads.info["corrupted"]
print(f"heads 4 to 7 together: {restored / (heads.info['clean'] - heads.info['corrupted']):.2f}")

# %% [markdown]
# ## What the logit lens does not show
#
# What does the model "think" at each patch? The logit lens reads every image token as if it were the last one.

# %% The likeliest token at each patch after layers 1 and 3, over the image
lens = images.lens(model, red, image, top=1)
lens.plot([1, 3])

# %% [markdown]
# At the circle it reads "red". It would be tempting to conclude that the model has not seen the color of the square,
# since at the square the lens does not read "blue":

# %%
from hookline.demo.tinysight import patches_of

for shape in (circle, square):
    words = [lens.tokens[-1][patch][0] for patch in patches_of(shape)]
    print(f"{shape.kind}: {words}")

# %% [markdown]
# Patching says otherwise. Image tokens come before the question, so they are the same whatever is asked. We ask about
# the square, and take its image tokens from an image where it is yellow:

# %%
about_square = "<image> What color is the square?"
yellow = draw([circle, Shape("square", "yellow", x=36, y=35, size=13)])
one, two = (model.to_inputs(about_square, images=[each]) for each in (image, yellow))
there = tuple(side / SIDE for side in square.box)
blue = images.patch(model, one, two, metrics.logit_diff(" blue", " yellow"), box=there).normalized
print("before layer    ", *(f"{layer:6}" for layer in range(4)))
print("the square      ", *(f"{value:6.0%}" for value in blue.values))

# %% [markdown]
# The color of the square is in the square's tokens, as that of the circle is in the circle's, but in a form that the
# lens does not read. A lens that shows something is evidence. A lens that shows nothing is not.
#
# ## What to try next
#
# - `images.tower_attention(model, red, image, at=(0.3, 0.3)).plot(2)`: attention inside the vision tower.
# - Patch the tower: `points="vision.resid_pre"`, `over=("layer", "pos")`.
# - `model.explore(question, images=[image])`: the same in the browser.
