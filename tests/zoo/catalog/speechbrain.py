"""The networks of speechbrain's `lobes.models` and layers of its `nnet`, with small sizes."""

import importlib
import pkgutil
from collections.abc import Iterator

import speechbrain.lobes.models
import speechbrain.nnet
import torch
from torch import nn
from zoo.network import Built, Network, can_be_filled, filled, runs

SIZES = {
    "input_size": 16,
    "input_shape": (2, 10, 16),
    "hidden_size": 16,
    "num_layers": 2,
    "n_neurons": 16,
    "out_channels": 8,
    "kernel_size": 3,
    "in_channels": 16,
    "channels": [16, 16, 16, 16, 48],
    "kernel_sizes": [3, 3, 3, 3, 1],
    "dilations": [1, 1, 1, 1, 1],
    "lin_neurons": 8,
    "d_model": 16,
    "nhead": 2,
    "d_ffn": 32,
    "num_encoder_layers": 1,
    "num_decoder_layers": 1,
    "dim": 16,
    "attn_dim": 8,
    "embed_dim": 16,
    "num_heads": 2,
    "device": "cpu",
    "attention_channels": 8,
    "tgt_vocab": 20,
    "vocab": 20,
    "output_size": 16,
    "bottleneck_dim": 8,
    "rnn_size": 16,
    "out_neurons": 8,
    "dropout": 0.1,
    "N": 16,
    "L": 8,
    "B": 8,
    "H": 8,
    "P": 3,
    "X": 2,
    "R": 1,
    "C": 2,
    "num_spks": 2,
    "n_mels": 16,
    "projection": 8,
    "enc_dim": 16,
    "dec_dim": 16,
    "num_embeddings": 10,
    "embedding_dim": 8,
    "cnn_channels": (4, 8),
    "cnn_blocks": 2,
    "rnn_layers": 1,
    "rnn_neurons": 8,
    "dnn_blocks": 1,
    "dnn_neurons": 16,
    "tdnn_blocks": 2,
    "tdnn_channels": [8, 8],
    "tdnn_kernel_sizes": [3, 1],
    "tdnn_dilations": [1, 1],
    "num_features": 16,
    "size": 16,
    "nb_filters": 4,
    "attn_type": "content",
}
"""Small values of arguments, by their names."""


def build(cls: type[nn.Module]) -> Built:
    """The module on features, sound or images."""
    module = cls(**filled(cls, SIZES))
    x = torch.randn(2, 10, 16)
    inputs = (
        (x,),
        (x, torch.ones(2)),
        (x.transpose(1, 2),),
        (torch.randn(2, 2000),),
        (torch.randn(2, 1, 2000),),
        (torch.randn(2, 10, 16, 4),),
        (torch.randn(2, 16),),
        (x, x),
        (x, x, x),
        (torch.randint(0, 10, (2, 6)),),
        (torch.randn(2, 16, 80),),
    )
    return runs(module, *((args, {}) for args in inputs))


def networks() -> Iterator[Network]:
    """One row per class that needs nothing but sizes."""
    for package in (speechbrain.lobes.models, speechbrain.nnet):
        for info in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
            if "huggingface" in info.name or "fairseq" in info.name:
                continue
            try:
                module = importlib.import_module(info.name)
            except Exception:  # it needs what nobody has here
                continue
            for name, cls in vars(module).items():
                is_network = isinstance(cls, type) and issubclass(cls, nn.Module) and cls.__module__ == info.name
                if is_network and can_be_filled(cls, SIZES):
                    yield Network(f"{info.name.split('.', 2)[2]}.{name}", lambda cls=cls: build(cls))
