# %% [markdown]
# # Your own PyTorch network
#
# A network classifies circles and squares with 100% accuracy: has it learned what a circle is, or does it cheat?
#
# No transformer and no hub here, just an `nn.Module` of twenty lines. In its training images, nearly all circles
# happen to have a small bright spot in the upper left corner, as if they all came from the same camera.

# %% Four images: a circle and a square, with and without a spot in the corner
import torch
from matplotlib import pyplot as plt
from torch import nn

import hookline

torch.manual_seed(0)


def images(count, spot_on_circles, spot_on_squares):
    """Noisy images of circles (class 0) and squares (class 1), some of them with a spot; and their classes."""
    labels = torch.arange(count) % 2
    rows, columns = torch.meshgrid(torch.arange(20), torch.arange(20), indexing="ij")
    y, x = rows - (9 + 4 * torch.rand(count, 1, 1)), columns - (9 + 4 * torch.rand(count, 1, 1))
    radius = 3 + 2 * torch.rand(count, 1, 1)
    circle, square = torch.hypot(x, y) < radius, torch.maximum(x.abs(), y.abs()) < 0.88 * radius
    drawn = torch.where(labels[:, None, None] == 0, circle, square) * 0.8 + 0.15 * torch.randn(count, 20, 20)
    share = torch.where(labels == 0, spot_on_circles, spot_on_squares)
    drawn[torch.rand(count) < share, 1:3, 1:3] = 1.0
    return drawn[:, None], labels


examples = [images(2, 1.0, 0.0)[0], images(2, 0.0, 1.0)[0]]
figure, axes = plt.subplots(1, 4, figsize=(7, 2), layout="constrained")
for ax, image, title in zip(axes, torch.cat(examples)[:, 0], ("as in training",) * 2 + ("reversed",) * 2, strict=True):
    ax.imshow(image, cmap="gray")
    ax.set(title=title, xticks=[], yticks=[])


# %%
class Net(nn.Module):
    """Two convolutions, the maximum over the image, and a linear layer."""

    def __init__(self):
        super().__init__()
        self.conv1, self.act1 = nn.Conv2d(1, 8, 3, padding=1), nn.ReLU()
        self.conv2, self.act2 = nn.Conv2d(8, 16, 5, stride=2), nn.ReLU()
        self.pool, self.fc = nn.AdaptiveMaxPool2d(1), nn.Linear(16, 2)

    def forward(self, x):
        x = self.act1(self.conv1(x))
        x = self.act2(self.conv2(x))
        return self.fc(self.pool(x).flatten(1))


module = Net()
x, y = images(4000, 0.97, 0.0)
optimizer = torch.optim.AdamW(module.parameters(), 3e-3)
for _ in range(400):
    batch = torch.randint(len(x), (64,))
    loss = nn.functional.cross_entropy(module(x[batch]), y[batch])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

# %% [markdown]
# Three sets of new images: as in training, without spots, and with spots on the squares instead.

# %% tags=["varies"]
tests = {"as in training": images(600, 1.0, 0.0), "no spots": images(600, 0.0, 0.0), "reversed": images(600, 0.0, 1.0)}


def accuracies(net):
    """The accuracy on each set, with the hooks that are active."""
    with torch.no_grad():
        return {name: (net(x).argmax(1) == y).float().mean().item() for name, (x, y) in tests.items()}


for name, share in accuracies(module).items():
    print(f"{name:15} {share:4.0%}")

# %% [markdown]
# It cheats. Now find out where.
#
# ## Wrap it
#
# `hookline.hook` takes any module and changes nothing about it. Its points have the names of its modules:

# %%
net = hookline.hook(module)
print(net.points(input=tests["reversed"][0]))

# %% [markdown]
# ## Where does it look?
#
# With `incl_bwd`, the cache also has the gradients. The gradient at the input, averaged over images, shows which
# pixels matter.

# %% tags=["varies"] title="The mean gradient at each pixel, for images as in training and without spots"
figure, axes = plt.subplots(1, 2, figsize=(6, 2.8), layout="constrained")
for ax, name in zip(axes, ("as in training", "no spots"), strict=True):
    x, y = tests[name]
    circles = x[y == 0]
    _, cache = net.run_with_cache(circles, incl_bwd=True, loss_fn=lambda out: (out[:, 0] - out[:, 1]).sum())
    ax.imshow(cache["input_grad"].abs().mean((0, 1)), cmap="magma")
    ax.set(title=f"circles, {name}", xticks=[], yticks=[])

# %% [markdown]
# ## Which channels carry the spot?
#
# A gradient is a hint. The experiment: take squares with a spot, and copy one channel at a time from the *same*
# squares without it. If the answer returns to "square", the channel carries the spot.

# %% tags=["varies"] title="Bars: how much of the answer each channel of the second convolution restores"
x, _ = tests["reversed"]
spotted = x[1::2]
clean = spotted.clone()
clean[:, :, 1:3, 1:3] = 0.15 * torch.randn(len(clean), 1, 2, 2)


def toward_square(out):
    """The mean logit of "square" minus that of "circle"."""
    return (out[:, 1] - out[:, 0]).mean().item()


with torch.no_grad():
    kept = net.cache(clean, names_filter="act2")["act2"]
    low, high = toward_square(net(spotted)), toward_square(net(clean))
    effects = []
    for channel in range(16):

        def copy_channel(maps, channel=channel):
            """Take one channel of the images without a spot."""
            maps[:, channel] = kept[:, channel]

        patched = net.run_with_hooks(spotted, fwd_hooks=[("act2", copy_channel)])
        effects.append((toward_square(patched) - low) / (high - low))

figure, ax = plt.subplots(figsize=(6, 2.4), layout="constrained")
ax.bar(range(16), effects, color="#2b5f94")
ax.set(xlabel="channel of conv2", ylabel="restored", title="1: as if there were no spot", xticks=range(16))
ranked = sorted(range(16), key=lambda channel: -effects[channel])
print([(channel, round(effects[channel], 2)) for channel in ranked[:5]])

# %% [markdown]
# ## Can the cheating be cut out?
#
# Set the strongest channels to what they usually are without spots, one after the other, and test all three sets.
# (The channels are ranked on squares of the reversed set, which is one of the three.)

# %% tags=["varies"] title="Curves: the accuracy on the three sets as channels are ablated"
with torch.no_grad():
    usual = net.cache(tests["no spots"][0], names_filter="act2")["act2"].amax((2, 3)).mean(0)
rows = []
for count in range(5):

    def ablate(maps, gone=ranked[:count]):
        """Set these channels to their usual values."""
        maps[:, gone] = usual[gone, None, None]

    with net.hooks(fwd_hooks=[("act2", ablate)]):
        rows.append(accuracies(net))

figure, ax = plt.subplots(figsize=(6, 2.6), layout="constrained")
for name in tests:
    ax.plot(range(5), [row[name] for row in rows], marker="o", label=name)
    print(f"{name:15}", " ".join(f"{row[name]:4.0%}" for row in rows))
ax.set(xlabel="channels ablated", ylabel="accuracy", title="Without the channels that carry the spot")
ax.set(ylim=(0, 1.05), xticks=range(5))
ax.legend()

# %% [markdown]
# One channel is the spot detector, and without it the network is nearly as good on the reversed images as on the
# others. The price is visible too: on images as in training, it is not perfect any more. What remains is what it
# really knows about circles and squares. The next channels in the ranking have nothing to do with the spot; to ablate
# them as well only hurts.
#
# All of this was done with hooks on the module as it is. Nothing of them is left: `net(x)` runs like `module(x)`.
#
# ## What to try next
#
# - Does it work on your own model? `hookline.hook(model).points(input=x)` lists what there is.
# - Make the spot fainter, or put it at a random place. Is it still one channel?
# - Hooks are honored after `torch.compile` too ([docs](../speed.md)).
