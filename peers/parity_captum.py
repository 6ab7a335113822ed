"""Attribution beside captum's: the largest difference, and the time as a ratio, on ten networks.

    python peers/parity_captum.py --captum FOLDER --torchvision FOLDER [--rounds 3] [--only resnet18]

The folders are where captum and torchvision are installed (`pip install --no-deps --target FOLDER …`). They are
searched after this environment's own, so that both libraries run with the same torch. Weights are random. A difference
is relative to the largest absolute value of captum's result. Time is hookline's divided by captum's, the least of some
rounds each; the network is wrapped once, as captum's object is made once.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from time import process_time
from typing import Any

import torch
from torch import Tensor, nn

import hookline
from hookline.experiments import networks

TOLERANCE = 1e-4
IDS = torch.randint(5, 90, (2, 24), generator=torch.Generator().manual_seed(0))
Row = tuple[str, Callable[[], Any], Callable[[], Any]]
"""A method, how hookline computes it, and how captum does."""


class SmallCNN(nn.Module):
    """Convolutions with ReLU in place."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.relu1 = nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(inplace=True)
        self.conv2, self.relu2 = nn.Conv2d(16, 32, 3, padding=1, stride=2), nn.ReLU(inplace=True)
        self.fc = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Run the network."""
        return self.fc(self.relu2(self.conv2(self.relu1(self.conv1(x)))).mean((2, 3)))


class Recurrent(nn.Module):
    """An LSTM over embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.lstm, self.fc = nn.Embedding(90, 32), nn.LSTM(32, 64, batch_first=True), nn.Linear(64, 5)

    def forward(self, ids: Tensor) -> Tensor:
        """Run the network."""
        return self.fc(self.lstm(self.embed(ids))[0][:, -1])


class TwoInputs(nn.Module):
    """A network of two tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.out = nn.Linear(6, 32), nn.Linear(9, 32), nn.Linear(32, 4)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        """Run the network."""
        return self.out(torch.tanh(self.left(a)) * torch.tanh(self.right(b)))


class Logits(nn.Module):
    """A classifier of transformers that returns its logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        """Run the network."""
        return self.model(input_ids=ids).logits


def bert() -> nn.Module:
    """A small BERT with random weights."""
    from transformers import BertConfig, BertForSequenceClassification

    shape = {"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 256}
    return Logits(BertForSequenceClassification(BertConfig(vocab_size=90, **shape)))


def made() -> Iterator[tuple[str, nn.Module, Any, str]]:
    """Networks, their inputs, and the point that is looked at."""
    import torchvision.models as zoo

    image = torch.randn(1, 3, 224, 224, generator=torch.Generator().manual_seed(1))
    yield (
        "MLP",
        nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 5)),
        torch.randn(16, 20),
        "2",
    )
    yield "small CNN, ReLU in place", SmallCNN(), torch.randn(8, 1, 28, 28), "conv2"
    yield "two inputs", TwoInputs(), (torch.randn(4, 6), torch.randn(4, 9)), "left"
    yield "LSTM", Recurrent(), IDS, "embed"
    yield "BERT", bert(), IDS, "model.bert.embeddings"
    yield "resnet18", zoo.resnet18(), image, "layer4"
    yield "resnet50", zoo.resnet50(), image[..., :160, :160], "layer4"
    yield "vgg11_bn", zoo.vgg11_bn(), image[..., :96, :96], "features.26"
    yield "mobilenet_v3_small", zoo.mobilenet_v3_small(), image, "features.12"
    vit = zoo.VisionTransformer(64, 8, 4, 4, 96, 192, num_classes=10)
    nn.init.normal_(vit.heads[0].weight)  # torchvision's zeros would make every number 0
    yield "ViT", vit, image[:, :, :64, :64], "encoder.layers.encoder_layer_2"


def rows(net: nn.Module, x: Any, at: str) -> Iterator[Row]:
    """The methods that apply to a network."""
    from captum import attr

    layer, wrapper, target = net.get_submodule(at), hookline.hook(net), 1
    if isinstance(x, Tensor) and not x.is_floating_point():
        blank = torch.ones_like(x)
        by_layer = attr.LayerIntegratedGradients(net, layer)
        yield (
            "integrated_gradients, at",
            lambda: networks.integrated_gradients(wrapper, x, target, at, blank),
            lambda: by_layer.attribute(x, blank, target=target, n_steps=32),
        )
        yield (
            "occlusion",
            lambda: networks.occlusion(wrapper, x, target, 2, 1),
            lambda: attr.Occlusion(net).attribute(x, (2,), 1, target=target),
        )
    else:
        yield "saliency", lambda: networks.saliency(wrapper, x, target), lambda: attr.Saliency(net).attribute(x, target)
        yield (
            "integrated_gradients",
            lambda: networks.integrated_gradients(wrapper, x, target),
            lambda: attr.IntegratedGradients(net).attribute(x, target=target, n_steps=32),
        )
        shape, step = window_of(x)
        yield (
            "occlusion",
            lambda: networks.occlusion(wrapper, x, target, shape, step),
            lambda: attr.Occlusion(net).attribute(
                x, captum_shape(x, shape), captum_shape(x, step, is_step=True), target=target
            ),
        )
        if any(isinstance(module, nn.ReLU) for module in net.modules()):
            yield (
                "guided_backprop",
                lambda: networks.guided_backprop(wrapper, x, target),
                lambda: attr.GuidedBackprop(net).attribute(x, target),
            )
    yield (
        "gradient_x_activation",
        lambda: networks.gradient_x_activation(wrapper, x, at, target),
        lambda: attr.LayerGradientXActivation(net, layer).attribute(x, target),
    )
    shape = tuple(wrapper.cache(*(x if isinstance(x, tuple) else (x,)), names_filter=at)[at].shape)
    if len(shape) == 4:
        yield (
            "grad_cam",
            lambda: networks.grad_cam(wrapper, x, at, target),
            lambda: attr.LayerGradCam(net, layer).attribute(x, target, relu_attributions=True)[:, 0],
        )
    if isinstance(x, Tensor) and x.is_floating_point():
        unit = tuple(size // 2 for size in shape[1:])
        yield (
            "neuron_gradient",
            lambda: networks.neuron_gradient(wrapper, x, at, unit),
            lambda: attr.NeuronGradient(net, layer).attribute(x, unit),
        )
    if shape[1] <= 600:
        channels = torch.arange(shape[1]).reshape(1, -1, *[1] * (len(shape) - 2))
        yield (
            "ablate_channels",
            lambda: networks.ablate_channels(wrapper, x, at, target),
            lambda: -by_channel(attr.LayerFeatureAblation(net, layer).attribute(x, target=target, layer_mask=channels)),
        )


def by_channel(values: Tensor) -> Tensor:
    """One value per channel of what captum repeats over places."""
    return values.flatten(2)[..., 0] if values.ndim > 2 else values


def window_of(x: Any) -> tuple[Any, Any]:
    """A window and a stride for inputs of this shape."""
    if isinstance(x, Tensor) and x.ndim == 4:
        return (x.shape[-2] // 4, x.shape[-1] // 4), (x.shape[-2] // 5, x.shape[-1] // 5)
    return 2, 1


def captum_shape(x: Any, sizes: Any, *, is_step: bool = False) -> Any:
    """The window of all axes, as captum takes it."""
    if isinstance(x, tuple):
        return tuple((sizes,) for _ in x)
    return (
        (x.shape[1], *sizes)
        if isinstance(sizes, tuple) and not is_step
        else (x.shape[1], *sizes)
        if isinstance(sizes, tuple)
        else (sizes,)
    )


def difference(ours: Any, theirs: Any) -> float:
    """The largest difference, relative to the largest value."""
    pairs = zip(ours, theirs, strict=True) if isinstance(ours, tuple) else [(ours, theirs)]
    return max(float((one.values - other).abs().max() / other.abs().max().clamp(min=1e-12)) for one, other in pairs)


def ratio(ours: Callable[[], Any], theirs: Callable[[], Any], rounds: int) -> float:
    """The least processor time of ours over that of theirs, each the mean of as many calls as take 50 ms."""
    least = [float("inf")] * 2
    for _ in range(rounds):
        for number, work in enumerate((ours, theirs)):
            start, calls = process_time(), 0
            while process_time() - start < 0.05 or not calls:
                work()
                calls += 1
            least[number] = min(least[number], (process_time() - start) / calls)
    return least[0] / least[1]


def main() -> int:
    """Print the table; the exit status is 1 if a difference is above the tolerance."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--captum", required=True)
    parser.add_argument("--torchvision", required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    sys.path += [options.captum, options.torchvision, str(Path(__file__).parent.parent / "tests")]
    importlib.import_module("zoo.torchvision_ops")  # before torchvision
    warnings.simplefilter("ignore")  # captum warns of its own hooks
    torch.manual_seed(0)
    torch.set_num_threads(1)
    is_good = True
    for name, net, x, at in made():
        if options.only and options.only not in name:
            continue
        net.eval()
        for method, ours, theirs in rows(net, x, at):
            try:
                far = difference(ours(), theirs())
            except Exception as error:
                print(f"{name:26}{method:28}{type(error).__name__}: {str(error)[:90]}", flush=True)
                continue
            is_good &= far < TOLERANCE
            print(f"{name:26}{method:28}{far:10.1e}{ratio(ours, theirs, options.rounds):8.2f}", flush=True)
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
