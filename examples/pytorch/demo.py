"""A tour of hookline on a small convolutional network: train it, read its activations, ablate channels, plot.

Run it with `python examples/pytorch/demo.py`. Needs matplotlib: `pip install "hookline[plot]"`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from cnn_feature_maps import LAYERS, accuracy, accuracy_without_each, zero_channel
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from shapes import CLASSES, images, train
from torch import Tensor

import hookline

ACCENT, PLAIN = "crimson", "slategray"


@dataclass(frozen=True)
class Findings:
    """The results of the tour, from which the figure is drawn."""

    accuracy: float
    lost: dict[str, list[float]]  # for each layer, the accuracy lost without each of its channels
    layer: str  # the most important channel
    channel: int
    image: Tensor  # an image whose answer depends on that channel
    before: Tensor  # its class probabilities with the channel, and without it
    after: Tensor
    changed: int  # how many answers change without the channel
    saliency: Tensor
    maps: dict[str, Tensor]


def explore(net: hookline.HookedModule, x: Tensor, y: Tensor) -> Findings:
    """Find the most important channel, an image that depends on it, and the feature maps and saliency of that image."""
    whole = accuracy(net, x, y)
    lost = {
        layer: [whole - without for without in accuracy_without_each(net, point, x, y)]
        for layer, point in LAYERS.items()
    }
    _, layer, channel = max((value, layer, channel) for layer in lost for channel, value in enumerate(lost[layer]))
    switch_off = (LAYERS[layer], partial(zero_channel, channel=channel))
    with torch.no_grad():
        before = net(x).softmax(1)
        after = net.run_with_hooks(x, fwd_hooks=[switch_off]).softmax(1)
    changes = before.argmax(1) != after.argmax(1)
    chosen = int((changes & (before.argmax(1) == y)).nonzero()[0])
    label, image = y[chosen], x[chosen : chosen + 1]
    _, cache = net.run_with_cache(image, incl_bwd=True, loss_fn=lambda scores: scores[0, label])
    return Findings(
        accuracy=whole,
        lost=lost,
        layer=layer,
        channel=channel,
        image=image[0, 0],
        before=before[chosen],
        after=after[chosen],
        changed=int(changes.sum()),
        saliency=cache["input_grad"][0, 0].abs(),
        maps={layer: cache[point][0] for layer, point in LAYERS.items()},
    )


def tell(found: Findings, count: int) -> None:
    """Print the results as text and bars."""
    print(f"\nAccuracy on {count} new images: {found.accuracy:.1%}. Lost without each channel:\n")
    for layer, values in found.lost.items():
        for channel, value in enumerate(values):
            print(f"  {layer} channel {channel}  {value:6.1%}  {'█' * round(100 * value)}".rstrip())
        print()
    print(f"Without channel {found.channel} of {found.layer}, {found.changed} answers change. One of them:\n")
    for name, before, after in zip(CLASSES, found.before, found.after, strict=True):
        print(f"  {name:9} {before:6.1%}  →  {after:6.1%}")


def draw(found: Findings) -> Figure:
    """Draw an image and its answers, and for each layer its feature maps and the importance of its channels."""
    figure = Figure(figsize=(11, 10), layout="constrained")
    name = CLASSES[found.before.argmax()]
    figure.suptitle(
        f"A {name} inside a small network, and the channel that its answer depends on", size="x-large", weight="bold"
    )
    top, *layers = figure.subfigures(3, height_ratios=(1.15, 1, 1), hspace=0.05)
    shown, salient, answers = top.subplots(1, 3, width_ratios=(1, 1, 1.6))
    shown.imshow(found.image.numpy(), cmap="gray")
    shown.set(title="image", xticks=[], yticks=[])
    salient.imshow(found.saliency.numpy(), cmap="magma")
    salient.set(title="gradient at the input", xticks=[], yticks=[])
    draw_answers(answers, found)
    for part, (layer, maps) in zip(layers, found.maps.items(), strict=True):
        part.suptitle(f"{layer}: its feature maps, and the accuracy lost without each channel", weight="bold")
        axes = part.subplot_mosaic([[*range(len(maps))], ["bars"] * len(maps)], height_ratios=(1.3, 1))
        bars = axes.pop("bars")
        for channel, ax in axes.items():
            ax.imshow(maps[channel].numpy(), cmap="magma", vmin=0, vmax=maps.max().item())
            ax.set(xticks=[], yticks=[])
        draw_bars(bars, found, layer)
    return figure


def draw_answers(ax: Axes, found: Findings) -> None:
    """Draw the probabilities with the channel and without it."""
    rows = torch.arange(len(CLASSES))
    for values, offset, color, label in (
        (found.before, -0.2, PLAIN, "the network"),
        (found.after, 0.2, ACCENT, f"without channel {found.channel} of {found.layer}"),
    ):
        bars = ax.barh((rows + offset).tolist(), values.tolist(), 0.38, color=color, label=label)
        ax.bar_label(bars, [f"{value:.0%}" for value in values], padding=3, color=color)
    ax.set(title="answer", yticks=rows.tolist(), yticklabels=CLASSES, xlim=(0, 1.15), xticks=[])
    ax.invert_yaxis()
    ax.set_box_aspect(0.6)
    ax.spines[["top", "right", "bottom"]].set_visible(False)
    ax.legend(loc="upper center", bbox_to_anchor=(0.5, 0), ncols=2, frameon=False)


def draw_bars(ax: Axes, found: Findings, layer: str) -> None:
    """Draw the accuracy lost without each channel of a layer."""
    values = found.lost[layer]
    matters = [(layer, channel) == (found.layer, found.channel) for channel in range(len(values))]
    heights = [max(value, 0) for value in values]
    bars = ax.bar(range(len(values)), heights, 0.6, color=[ACCENT if this else PLAIN for this in matters])
    ax.bar_label(bars, [f"{value:.1%}" for value in values], padding=2)
    ax.set(xlim=(-0.5, len(values) - 0.5), ylim=(0, 1.25 * max(map(max, found.lost.values()))), yticks=[])
    ax.set_xticks(range(len(values)), [f"channel {channel}" for channel in range(len(values))])
    ax.tick_params(length=0)
    ax.spines[["top", "right", "left"]].set_visible(False)


def main(out: Path = Path("out")) -> tuple[Path, Findings]:
    """Run the tour; return the path of the figure, and the results."""
    torch.set_num_threads(1)
    print(f"Training a network to classify images of a {CLASSES[0]}, a {CLASSES[1]} or a {CLASSES[2]}.")
    net = hookline.hook(train(progress=True))
    x, y = images(600, seed=2)

    print("\nIts points, with shapes for a batch of one:\n")
    print(net.points(input=x[:1]))
    print("\nIts answers for three images:\n")
    for scores, label in zip(net(x[:3]).softmax(1), y, strict=False):
        print(
            f"  a {CLASSES[label]:9}" + "  ".join(f"{name} {p:6.1%}" for name, p in zip(CLASSES, scores, strict=True))
        )

    found = explore(net, x, y)
    tell(found, len(x))
    out.mkdir(parents=True, exist_ok=True)
    path = out / "demo.png"
    draw(found).savefig(path, dpi=110, bbox_inches="tight", pad_inches=0.25)
    print(f"\nSaved the figure: {path}")
    return path, found


if __name__ == "__main__":
    main()
