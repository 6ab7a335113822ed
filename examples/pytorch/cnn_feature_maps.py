"""The feature maps of a convolutional network, and which of its channels matter.

Trains the network of `shapes.py`, draws its feature maps for a circle, a square and a triangle, and ablates each
channel in turn to see how much accuracy is lost. Needs matplotlib: `pip install "hookline[plot]"`.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
from matplotlib.figure import Figure, SubFigure
from shapes import CLASSES, images, train
from torch import Tensor

import hookline

LAYERS = {"conv1": "relu1", "conv2": "relu2"}
"""Each convolution, and the point where its maps are read: after the ReLU."""


def zero_channel(maps: Tensor, channel: int) -> None:
    """A hook that sets one channel to zero."""
    maps[:, channel] = 0


def accuracy(net: hookline.HookedModule, x: Tensor, y: Tensor) -> float:
    """Return the fraction of images that are classified correctly, with the hooks that are active."""
    with torch.no_grad():
        return (net(x).argmax(1) == y).float().mean().item()


def accuracy_without_each(net: hookline.HookedModule, point: str, x: Tensor, y: Tensor) -> list[float]:
    """Return the accuracy without channel 0, without channel 1, and so on."""
    accuracies = []
    channels = net.points(point, input=x)[0].shape[1]
    for channel in range(channels):
        with net.hooks(fwd_hooks=[(point, partial(zero_channel, channel=channel))]):
            accuracies.append(accuracy(net, x, y))
    return accuracies


def draw_maps(figure: SubFigure, layer: str, x: Tensor, maps: Tensor, without: list[float]) -> None:
    """Draw a row for each image: the image, then its feature maps, with one color scale for all channels."""
    figure.suptitle(f"{layer}: under each channel, the accuracy without it", x=0.01, ha="left", weight="bold")
    axes = figure.subplots(len(x), 1 + maps.shape[1])
    for row, image, channels in zip(axes, x, maps, strict=True):
        row[0].imshow(image[0].numpy(), cmap="gray")
        for ax, channel in zip(row[1:], channels, strict=True):
            ax.imshow(channel.numpy(), cmap="magma", vmin=0, vmax=maps.max().item())
    for ax in axes.flat:
        ax.set(xticks=[], yticks=[])
    for ax, name in zip(axes[:, 0], CLASSES, strict=True):
        ax.set_ylabel(name)
    matters = min(range(len(without)), key=without.__getitem__)
    for channel, (ax, value) in enumerate(zip(axes[-1, 1:], without, strict=True)):
        color = "crimson" if channel == matters else "black"
        ax.set_xlabel(f"channel {channel}\n{value:.0%}", color=color)


def main(out: Path = Path("out")) -> tuple[Path, float, dict[str, list[float]]]:
    """Save the figure; return its path, the accuracy, and the accuracies without each channel of each layer."""
    torch.set_num_threads(1)
    net = hookline.hook(train(progress=True))
    x, y = images(600, seed=2)
    whole = accuracy(net, x, y)
    without = {layer: accuracy_without_each(net, point, x, y) for layer, point in LAYERS.items()}
    print(f"accuracy on {len(x)} new images: {whole:.1%}")
    for layer, values in without.items():
        print(f"{layer}, without each channel: {' '.join(f'{value:.0%}' for value in values)}")

    one_of_each = x[: len(CLASSES)]
    cache = net.cache(one_of_each, names_filter=[*LAYERS.values()])
    figure = Figure(figsize=(11, 8.5), layout="constrained")
    for part, (layer, point) in zip(figure.subfigures(2, hspace=0.06), LAYERS.items(), strict=True):
        draw_maps(part, layer, one_of_each, cache[point], without[layer])
    out.mkdir(parents=True, exist_ok=True)
    path = out / "feature_maps.png"
    figure.savefig(path, dpi=110, bbox_inches="tight", pad_inches=0.2)
    print(f"saved {path}")
    return path, whole, without


if __name__ == "__main__":
    main()
