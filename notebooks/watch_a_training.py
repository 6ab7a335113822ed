# %% [markdown]
# # Watch a training
#
# A network learns to read digits. With another learning rate it learns nothing, and raises no error: which layer is
# dead, and since when?
#
# `hookline.training.watch` records what passes through a network while it is trained. Between the steps at which it
# records, nothing is attached but a counter.

# %% title="Ten digits, moved and in noise"
import logging

import torch
from matplotlib import pyplot as plt
from torch import nn

import hookline
from hookline.training import absolute_max, collect, find_nonfinite, watch

torch.manual_seed(0)
logging.getLogger("hookline").setLevel(logging.ERROR)  # what looks wrong is printed below
FONT = "75557 26227 71747 71717 55711 74717 74757 71222 75757 75717"  # five rows of three pixels for each digit
glyphs = torch.tensor([[[int(bit) for bit in f"{int(row):03b}"] for row in digit] for digit in FONT.split()])
glyphs = glyphs.float().repeat_interleave(2, 1).repeat_interleave(2, 2)


def images(count):
    """Images of digits at random places, with noise, and the digits."""
    labels = torch.arange(count) % 10
    drawn = 0.2 * torch.randn(count, 1, 12, 12)
    for image, label in zip(drawn, labels, strict=True):
        row, column = torch.randint(3, ()), torch.randint(7, ())
        image[0, row : row + 10, column : column + 6] += glyphs[label]
    return drawn, labels


x, y = images(2000)
figure, axes = plt.subplots(1, 10, figsize=(8, 1), layout="constrained")
for ax, image in zip(axes, x, strict=False):
    ax.imshow(image[0], cmap="gray")
    ax.set(xticks=[], yticks=[])

# %% [markdown]
# ## A training that works


# %% tags=["varies"]
class Net(nn.Module):
    """Two convolutions and a linear layer."""

    def __init__(self):
        super().__init__()
        self.conv1, self.act1 = nn.Conv2d(1, 8, 3), nn.ReLU()
        self.conv2, self.act2 = nn.Conv2d(8, 16, 3, stride=2), nn.ReLU()
        self.fc = nn.Linear(16 * 16, 10)

    def forward(self, x):
        x = self.act2(self.conv2(self.act1(self.conv1(x))))
        return self.fc(x.flatten(1))


def train(net, lr, steps=200):
    """Train with momentum; return the losses."""
    optimizer, losses = torch.optim.SGD(net.parameters(), lr, momentum=0.9), []
    for step in range(steps):
        rows = torch.arange(step * 50, step * 50 + 50) % len(x)
        loss = nn.functional.cross_entropy(net(x[rows]), y[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def accuracy(net):
    """The share of new digits that it reads."""
    torch.manual_seed(1)
    new, labels = images(500)
    with torch.no_grad():
        return (net(new).argmax(1) == labels).float().mean().item()


torch.manual_seed(0)
good = Net()
with watch(good, every=20) as record:
    losses = {"0.02": train(good, 0.02)}
print(f"accuracy {accuracy(good):.0%}")
print(record)

# %% [markdown]
# The record has a row for each point, kind and step: here the gradients of the two convolutions.

# %% tags=["varies"]
for row in record.rows:
    if row.point in ("conv1.weight", "conv2.weight") and row.step in (0, 100, 180):
        print(f"step {row.step:3}  {row.point}  norm {row.statistics.norm:.3f}, largest {row.statistics.max:.3f}")

# %% [markdown]
# ## Break it
#
# The same network, with a larger learning rate. The loss falls to that of guessing, log 10, and stays there.

# %% tags=["varies"]
torch.manual_seed(0)
broken = Net()
with watch(broken, every=20) as record:
    losses["1.0"] = train(broken, 1.0)
print(f"accuracy {accuracy(broken):.0%}")
print(record)

# %% [markdown]
# The record says where: units that are 0 for every input at the last recorded steps. The share of zeros at each step
# shows when it happened.

# %% tags=["varies"] title="The loss of both trainings, and the share of zeros in the layers of the broken one"
figure, (left, right) = plt.subplots(1, 2, figsize=(8, 2.8), layout="constrained")
for rate, values in losses.items():
    left.plot(values, label=f"learning rate {rate}")
left.set(xlabel="step", ylabel="loss", ylim=(0, 5))
left.legend()
for point in ("act1", "act2"):
    rows = [row for row in record.rows if row.point == point and row.kind == "activation"]
    right.plot([row.step for row in rows], [row.statistics.zeros for row in rows], marker="o", label=point)
right.set(xlabel="step", ylabel="share of zeros", ylim=(0, 1.05))
right.legend()

# %% [markdown]
# ## Look inside
#
# What does the first layer of each network show of one image?

# %% tags=["varies"] title="The eight channels of the first layer: of the network that works, and of the broken one"
figure, axes = plt.subplots(2, 8, figsize=(8, 2.2), layout="constrained")
for row, module in zip(axes, (good, broken), strict=True):
    maps = hookline.hook(module).cache(x[3:4], names_filter="act1")["act1"][0]
    for ax, channel in zip(row, maps, strict=True):
        ax.imshow(channel, cmap="magma", vmin=0)
        ax.set(xticks=[], yticks=[])

# %% [markdown]
# A unit that is 0 for every input gets no gradient, so it stays so. Are they 0 for all images, or only for those at the
# recorded steps? `collect` takes the largest values over the whole data set, in batches.

# %% tags=["varies"]
for name, module in (("works", good), ("broken", broken)):
    largest = collect(module, ["act1", "act2"], {"out": absolute_max}, x.split(500), progress=False)
    print(f"{name:7} act1 {largest['act1']['out'].max():6.2f}   act2 {largest['act2']['out'].max():6.2f}")

# %% [markdown]
# ## The first NaN
#
# Larger still, and numbers overflow. `find_nonfinite` names the first module whose output, or gradient, is not finite.

# %% tags=["varies"]
torch.manual_seed(0)
worse = Net()
try:
    with find_nonfinite(worse):
        train(worse, 1e20)
except hookline.HooklineError as error:
    print(error)

# %% [markdown]
# ## What to try next
#
# - `to="watch.csv"`, a `SummaryWriter` or a run of Weights & Biases receives the same rows.
# - `edit_gradients` and `clip` bound gradients: can the broken training be saved? See
#   [hooks in training](../hooks-in-training.md).
# - In a `Trainer` of transformers, `callbacks=[watch(model).callback()]`.
