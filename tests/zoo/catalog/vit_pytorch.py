"""The networks of vit-pytorch, one of each of its files, with small sizes for what their arguments are called."""

import importlib
import pkgutil
from collections.abc import Iterator
from typing import Any

import torch
import vit_pytorch
from torch import nn
from zoo.network import Built, Network, can_be_filled, filled, image, images, runs

SIZES = {
    "image_size": 32,
    "patch_size": 8,
    "image_patch_size": 8,
    "num_classes": 5,
    "dim": 32,
    "depth": 2,
    "heads": 2,
    "mlp_dim": 64,
    "channels": 3,
    "dim_head": 16,
    "frames": 4,
    "frame_patch_size": 2,
    "seq_len": 64,
    "cls_depth": 1,
    "spatial_depth": 2,
    "temporal_depth": 2,
    "num_patches": 8,
    "mlp_mult": 2,
    "max_patch_size": 8,
    "max_depth": 2,
    "sm_dim": 16,
    "lg_dim": 32,
    "sm_patch_size": 8,
    "lg_patch_size": 16,
    "sm_enc_depth": 1,
    "lg_enc_depth": 1,
    "sm_enc_heads": 2,
    "lg_enc_heads": 2,
    "sm_enc_mlp_dim": 32,
    "lg_enc_mlp_dim": 32,
    "sm_enc_dim_head": 16,
    "lg_enc_dim_head": 16,
    "cross_attn_depth": 1,
    "cross_attn_heads": 2,
    "cross_attn_dim_head": 16,
    "num_register_tokens": 2,
    "local_patch_size": 4,
    "window_size": 4,
    "global_window_size": (4, 2, 2, 1),
    "local_window_size": 4,
    "max_tokens_per_depth": (12, 8),
    "volume_size": 16,
    "video_shape": (4, 32, 32),
    "ndim": 2,
    "input_shape": 32,
    "num_hierarchies": 2,
    "block_repeats": (1, 1),
    "dims": (16, 24, 32),
    "expansion": 2,
    "conv_dims": 16,
    "rank": 2,
    "cct_3d": 1,
    "t2t_layers": ((7, 4), (3, 2)),
    "kernel_size_": 3,
    "img_size": 32,
    "embedding_dim": 32,
    "num_layers": 2,
    "num_heads": 2,
    "mlp_ratio": 2,
    "n_conv_layers": 1,
    "token_dropout_prob": 0.1,
    "stages": 2,
    "layers": 2,
    "num_frames": 4,
    "num_image_patches": 8,
}
"""Small values of arguments, by their names."""

PARTS = (
    "Attention",
    "FeedForward",
    "Transformer",
    "Norm",
    "LayerNorm",
    "RMSNorm",
    "Conv",
    "Embed",
    "Residual",
    "Dropout",
    "Block",
    "Pool",
    "SPT",
    "LSA",
    "Module",
    "Rearrange",
    "Mixer",
    "MLP",
    "GEGLU",
    "Linear",
    "RoPE",
    "Rotary",
    "Cross",
    "PEG",
)
"""What the names of their parts end with."""


WINDOWS = {"num_classes": 5, "dim": 16, "dim_head": 8, "depth": (1, 1)}

OPTIONS: dict[str, dict[str, Any]] = {
    "cct.CCT": {"num_heads": 2, "positional_embedding": "learnable"},
    "cct_3d.CCT": {"num_heads": 2, "positional_embedding": "learnable", "frame_kernel_size": 3},
    "crossformer.CrossFormer": {
        "dim": (32, 32, 64, 64),
        "depth": (1, 1, 1, 1),
        "global_window_size": (4, 2, 2, 1),
        "local_window_size": (4, 4, 2, 2),
    },
    "distill.DistillableViT": {key: SIZES[key] for key in ("image_size", "patch_size", "num_classes", "dim")}
    | {"depth": 2, "heads": 2, "mlp_dim": 64},
    "look_vit.LookViT": {"image_size": 64, "mlp_factor": 2, "highres_patch_size": 4, "highres_mlp_factor": 2},
    "max_vit.MaxViT": WINDOWS | {"dim_conv_stem": 16, "window_size": 4},
    "max_vit_with_registers.MaxViT": WINDOWS | {"dim_conv_stem": 16, "window_size": 4},
    "mobile_vit.MobileViT": {"image_size": (64, 64), "channels": [8, 8, *[16] * 8, 32]},
    "pit.PiT": {"depth": (1, 1)},
    "sep_vit.SepViT": WINDOWS | {"heads": (1, 2), "window_size": 2},
    "twins_svt.TwinsSVT": {
        f"s{stage}_{name}": value
        for stage, (patch, k) in enumerate(((4, 4), (4, 2), (2, 2), (2, 1)), 1)
        for name, value in {"emb_dim": 16, "local_patch_size": patch, "global_k": k, "depth": 1}.items()
    },
}
"""Other values for some networks."""


def build(cls: type[nn.Module], name: str) -> Built:
    """The network on images, a video or a sequence."""
    module = cls(**filled(cls, SIZES) | OPTIONS.get(name, {}))
    video = ((torch.randn(1, 3, 4, 32, 32),), {})
    volume = ((torch.randn(1, 3, 16, 16, 16),), {})
    return runs(module, *images(32, 64, 128), video, volume, ((torch.randn(1, 3, 64),), {}), (([[image(32)[0]]],), {}))


def networks() -> Iterator[Network]:
    """One row per class that is not a part of another."""
    for info in pkgutil.iter_modules(vit_pytorch.__path__):
        try:
            module = importlib.import_module(f"vit_pytorch.{info.name}")
        except Exception:  # it needs what nobody has here
            continue
        for name, cls in vars(module).items():
            is_network = isinstance(cls, type) and issubclass(cls, nn.Module) and cls.__module__ == module.__name__
            if is_network and not name.endswith(PARTS) and can_be_filled(cls, SIZES):
                name = f"{info.name}.{name}"
                yield Network(name, lambda cls=cls, name=name: build(cls, name))
