"""The networks of monai, with small sizes for what their arguments are called."""

from collections.abc import Iterator
from typing import Any

import monai.networks.nets as nets
import torch
from torch import nn
from zoo.network import Built, Network, filled, runs

SIZES = {
    "spatial_dims": 2,
    "in_channels": 1,
    "out_channels": 2,
    "channels": (8, 16, 32),
    "strides": (2, 2),
    "img_size": (32, 32),
    "patch_size": (8, 8),
    "hidden_size": 48,
    "mlp_dim": 64,
    "num_layers": 2,
    "num_heads": 4,
    "kernel_size": 3,
    "num_classes": 2,
    "in_shape": (1, 32, 32),
    "out_shape": (2,),
    "features": (8, 8, 16, 16, 16, 8),
    "feature_size": 12,
    "init_filters": 8,
    "num_channels": (8, 16),
    "attention_levels": (False, True),
    "norm_num_groups": 4,
    "num_res_blocks": 1,
    "latent_channels": 3,
    "num_head_channels": 8,
    "latent_shape": (8, 4, 4),
    "start_shape": (8, 4, 4),
    "upsample_kernel_size": (2, 2),
    "filters": (8, 16, 32),
    "init_features": 8,
    "growth_rate": 4,
    "block_config": (2, 2),
    "dimensions": 2,
    "dim": 2,
    "image_size": [32, 32],
    "num_channel_initial": 4,
    "depth": 2,
    "extract_levels": [0, 1, 2],
    "num_tokens": 50,
    "max_seq_len": 24,
    "attn_layers_dim": 32,
    "attn_layers_depth": 2,
    "attn_layers_heads": 2,
    "hidden_channels": [16, 16],
    "latent_size": 4,
    "in_channel": 1,
    "ndf": 8,
    "num_layers_d": 2,
    "layers": (1, 1, 1, 1),
    "block_inplanes": [8, 16, 16, 16],
    "block": "basic",
    "downsample_parameters": ((2, 4, 1, 1), (2, 4, 1, 1)),
    "upsample_parameters": ((2, 4, 1, 1, 0), (2, 4, 1, 1, 0)),
    "num_embeddings": 16,
    "embedding_dim": 8,
    "label_nc": 3,
    "num_res_channels": (8, 16),
    "depths": (1, 1, 1, 1),
    "blocks_down": (1, 1),
    "blocks_up": (1,),
    "input_image_size": (32, 32),
    "conditioning_embedding_num_channels": (8,),
    "conditioning_embedding_in_channels": 1,
    "model_name": "efficientnet-b0",
    "encoder_channels": (8, 16),
    "n_dense_channels": 8,
    "pretrained": False,
    "backbone": "efficientnet-b0",
    "act_function": "relu",
    "dropout_prob": 0.0,
    "norm_num_groups_": 4,
    "pos_embed": "learnable",
    "masking_ratio": 0.5,
    "decoder_hidden_size": 32,
    "decoder_mlp_dim": 32,
    "decoder_num_layers": 1,
    "decoder_num_heads": 2,
    "init_kernel_size": 3,
}
"""Small values of arguments, by their names."""


LEVELS = {"attention_levels": (False, False, True)}
SQUEEZED = {"spatial_dims": 2, "in_channels": 1, "num_classes": 2}

OPTIONS: dict[str, dict[str, Any]] = {
    "AutoEncoder": {"strides": (2, 2, 2)},
    "AutoencoderKL": LEVELS,
    "ControlNet": LEVELS,
    "DiffusionModelUNet": LEVELS,
    "DynUNet": {"kernel_size": [3, 3, 3], "strides": [1, 2, 2], "upsample_kernel_size": [2, 2]},
    "FullyConnectedNet": {"in_channels": 32},
    "Generator": {"latent_shape": (32,)},
    "MultiScalePatchDiscriminator": {"channels": 8, "num_d": 2, "num_layers_d": 1},
    "PatchDiscriminator": {"channels": 8},
    "ResNetEncoder": {"model_name": "resnet10"},
    "ResNetFeatures": {"model_name": "resnet10"},
    "SENet154": SQUEEZED,
    "SEResNeXt50": SQUEEZED,
    "SEResNet50": SQUEEZED,
    "SPADEAutoencoderKL": LEVELS,
    "SPADEDiffusionModelUNet": LEVELS,
    "SwinUNETR": {"num_heads": (2, 2, 2, 2), "patch_size": 2},
    "TorchVisionFCModel": {"model_name": "resnet18"},
    "VQVAE": {"channels": (8, 16), "num_res_channels": (8, 8)},
    "VarAutoEncoder": {"strides": (2, 2, 2)},
    "VarFullyConnectedNet": {"in_channels": 32, "encode_channels": [16], "decode_channels": [16]},
    "ViTAutoEnc": {"patch_size": 4},
}
"""Other values for some networks."""


def build(name: str, dimensions: int) -> Built:
    """The network on an image or a volume."""
    sizes = SIZES | {"spatial_dims": dimensions, "dimensions": dimensions}
    if dimensions == 3:
        sizes |= {
            "img_size": (32, 32, 32),
            "patch_size": (8, 8, 8),
            "in_shape": (1, 32, 32, 32),
            "image_size": [32, 32, 32],
        }
        sizes |= {"latent_shape": (8, 4, 4, 4), "start_shape": (8, 4, 4, 4), "input_image_size": (32, 32, 32)}
    cls = getattr(nets, name)
    options = OPTIONS.get(name, {})
    module = cls(**filled(cls, sizes) | options | ({"spatial_dims": dimensions} if options is SQUEEZED else {}))
    shape = (32,) * dimensions
    x = torch.randn(1, 1, *shape)
    three = torch.randn(1, 3, *shape)
    steps = torch.tensor([3])
    large = torch.randn(1, 1, *(64,) * dimensions)
    return runs(
        module,
        ((x,), {}),
        ((three,), {}),
        ((x, steps), {}),
        ((torch.randn(1, 2, *shape),), {}),
        ((torch.randn(1, 32),), {}),
        ((torch.randn(2, 8),), {}),
        ((x, torch.randn(1, 3, *shape)), {}),
        ((torch.randint(0, 50, (1, 12)),), {}),
        ((large,), {}),
        ((x, x), {}),
        ((x, steps, x), {}),
        ((torch.randn(1, 4),), {}),
    )


def networks() -> Iterator[Network]:
    """One row per class, in two dimensions and in three."""
    classes: dict[type, str] = {}
    for name in dir(nets):
        cls = getattr(nets, name)
        if isinstance(cls, type) and issubclass(cls, nn.Module) and cls not in classes:
            classes[cls] = name
    for dimensions in (2, 3):  # volumes take more time
        for name in classes.values():
            yield Network(f"{name} {dimensions}d", lambda name=name, dimensions=dimensions: build(name, dimensions))
