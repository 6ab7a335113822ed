"""The modules of torch itself, each between two layers that also use its input and output otherwise."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from zoo.network import Built, Network, filled, runs

SIZES = {
    "in_channels": 4,
    "out_channels": 4,
    "kernel_size": 3,
    "in_features": 8,
    "out_features": 8,
    "num_features": 4,
    "num_channels": 4,
    "num_groups": 2,
    "normalized_shape": 8,
    "input_size": 8,
    "hidden_size": 8,
    "output_size": 4,
    "embed_dim": 8,
    "num_heads": 2,
    "d_model": 8,
    "nhead": 2,
    "dim_feedforward": 16,
    "num_embeddings": 10,
    "embedding_dim": 8,
    "padding": 1,
    "scale_factor": 2,
    "upscale_factor": 2,
    "downscale_factor": 2,
    "groups": 2,
    "lower": 0.1,
    "upper": 0.3,
    "size": 3,
    "threshold": 0.1,
    "value": 0.5,
    "norm_type": 2,
    "num_encoder_layers": 1,
    "num_decoder_layers": 1,
}

NOT_ALONE = (
    "LSTM",
    "GRU",
    "RNN",
    "RNNBase",
    "Container",
    "DataParallel",
    "ModuleList",
    "ModuleDict",
    "ParameterList",
    "ParameterDict",
    "Bilinear",
    "Fold",
    "RNNCellBase",
)
"""What is below with options, is abstract, or has no forward."""


def encoder_layer() -> nn.Module:
    return nn.TransformerEncoderLayer(8, 2, 16)


SPECIAL: dict[str, tuple[Callable[[], nn.Module], tuple[Any, ...]]] = {
    "AdaptiveLogSoftmaxWithLoss": (
        lambda: nn.AdaptiveLogSoftmaxWithLoss(8, 10, [4]),
        (torch.randn(3, 8), torch.randint(0, 10, (3,))),
    ),
    "CTCLoss": (
        nn.CTCLoss,
        (torch.randn(6, 2, 5), torch.randint(1, 5, (2, 3)), torch.tensor([6, 6]), torch.tensor([3, 2])),
    ),
    "CosineEmbeddingLoss": (nn.CosineEmbeddingLoss, (torch.randn(3, 8), torch.randn(3, 8), torch.tensor([1, -1, 1]))),
    "GaussianNLLLoss": (nn.GaussianNLLLoss, (torch.randn(3, 8), torch.randn(3, 8), torch.rand(3, 8))),
    "MaxUnpool1d": (lambda: nn.MaxUnpool1d(2), (torch.randn(1, 2, 4), torch.tensor([[[0, 3, 5, 6]] * 2]))),
    "MaxUnpool2d": (lambda: nn.MaxUnpool2d(2), (torch.randn(1, 2, 2, 2), torch.tensor([[[[0, 3], [9, 14]]] * 2]))),
    "MultiLabelMarginLoss": (nn.MultiLabelMarginLoss, (torch.randn(1, 4), torch.tensor([[3, 0, -1, 1]]))),
    "TransformerDecoder": (
        lambda: nn.TransformerDecoder(nn.TransformerDecoderLayer(8, 2, 16), 2),
        (torch.randn(4, 2, 8), torch.randn(5, 2, 8)),
    ),
    "TransformerEncoder": (lambda: nn.TransformerEncoder(encoder_layer(), 2), (torch.randn(4, 2, 8),)),
    "Unflatten": (lambda: nn.Unflatten(1, (2, 4)), (torch.randn(3, 8),)),
    "Upsample": (lambda: nn.Upsample(scale_factor=2), (torch.randn(1, 2, 4, 4),)),
    "UpsamplingBilinear2d": (lambda: nn.UpsamplingBilinear2d(scale_factor=2), (torch.randn(1, 2, 4, 4),)),
    "UpsamplingNearest2d": (lambda: nn.UpsamplingNearest2d(scale_factor=2), (torch.randn(1, 2, 4, 4),)),
}
"""What sizes by name do not make, with its inputs."""


class Beside(nn.Module):
    """Uses the argument and the result of a module a second time, so that a leak of an edit shows."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.before, self.inner, self.after = nn.GELU(), inner, nn.Tanh()  # GELU does not need its output

    def forward(self, x: Tensor, *more: Any) -> Any:
        h = self.before(x) if x.is_floating_point() else x
        out = self.inner(h, *more)
        first = out[0] if isinstance(out, tuple) else out
        return self.after(first), first * 1, h * 1, out


class InPlace(nn.Module):
    """Goes on in the memory of what a module returns."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.before, self.inner = nn.Linear(8, 8), inner

    def forward(self, x: Tensor) -> Tensor:
        h = self.inner(self.before(x))
        h += x
        return h


def build(cls: type[nn.Module], **options: Any) -> Built:
    """The module on the first kind of input that it takes."""
    if cls.__name__ in SPECIAL and not options:
        make, args = SPECIAL[cls.__name__]
        return Beside(make()), args, {}
    module = Beside(cls(**(filled(cls, SIZES) | options)))
    x = torch.randn(2, 4, 8)
    inputs: tuple[Any, ...] = (
        (torch.randn(2, 4, 8, 8),),
        (x,),
        (torch.randn(2, 4, 8, 8, 8),),
        (torch.randn(2, 8),),
        (x, x),
        (x, x, x),
        (torch.randint(0, 10, (2, 5)),),
        (torch.randn(2, 8), torch.randn(2, 8)),
        (torch.randn(2, 4, 8), torch.randint(0, 4, (2, 8))),
        (torch.randn(2, 8), torch.randn(2, 8), torch.randn(2, 8)),
        (torch.randn(4, 8), torch.randint(0, 4, (4,))),
    )
    return runs(module, *((args, {}) for args in inputs))


def networks() -> Iterator[Network]:
    """One row per class of `torch.nn`, and variants whose kernels work otherwise."""
    for name in dir(nn):
        cls = getattr(nn, name)
        if (
            isinstance(cls, type)
            and issubclass(cls, nn.Module)
            and cls is not nn.Module
            and name not in NOT_ALONE
            and not name.startswith("Lazy")
        ):
            yield Network(name, lambda cls=cls: build(cls))
    for name in ("LSTM", "GRU", "RNN"):
        sizes = {"input_size": 8, "hidden_size": 8}
        yield Network(f"{name} of one layer", lambda name=name, sizes=sizes: build(getattr(nn, name), **sizes))
        more = sizes | {"batch_first": True, "bidirectional": True, "num_layers": 2}
        yield Network(f"{name} batch first", lambda name=name, more=more: build(getattr(nn, name), **more))
    yield Network("Bilinear of two", lambda: build(nn.Bilinear, in1_features=8, in2_features=8))
    yield Network(
        "FoldUnfold", lambda: (Beside(nn.Sequential(nn.Unfold(3), nn.Fold((8, 8), 3))), (torch.randn(2, 4, 8, 8),), {})
    )
    for name in ("Conv1d", "Conv2d", "Conv3d"):
        options = {"kernel_size": 1, "padding": 0}
        yield Network(f"{name} of one", lambda name=name, options=options: build(getattr(nn, name), **options))
        options = {"kernel_size": 3, "groups": 4, "stride": 2}
        yield Network(f"{name} by channel", lambda name=name, options=options: build(getattr(nn, name), **options))
    for name in ("ReLU", "ELU", "Hardswish", "SiLU", "Mish", "LeakyReLU", "Dropout", "Hardtanh"):
        yield Network(f"{name} in place", lambda name=name: build(getattr(nn, name), inplace=True))
    for name in ("Identity", "Dropout", "ReLU", "Tanh", "GELU"):
        yield Network(
            f"{name} then in place", lambda name=name: (InPlace(getattr(nn, name)()), (torch.randn(3, 8),), {})
        )
    for name in ("TransformerEncoderLayer", "TransformerDecoderLayer", "Transformer", "MultiheadAttention"):
        yield Network(f"{name} batch first", lambda name=name: build(getattr(nn, name), batch_first=True))
    for name in ("weight_norm", "spectral_norm", "orthogonal"):
        parametrize = getattr(nn.utils.parametrizations, name)
        yield Network(
            f"Linear of {name}",
            lambda parametrize=parametrize: (Beside(parametrize(nn.Linear(8, 8))), (torch.randn(2, 8),), {}),
        )
