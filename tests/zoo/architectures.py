"""Architectures that everyone uses, as their libraries build them, with small images.

`python tests/zoo/architectures.py NAME` checks one at every leaf, and prints what disagrees: torchvision is not
installed beside transformers, which would use it everywhere, but in a folder that only this process sees.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import nn

Built: TypeAlias = tuple[nn.Module, dict[str, Any]]


def image(size: int, rows: int = 2) -> torch.Tensor:
    return torch.randn(rows, 3, size, size)


def of_transformers(
    name: str, size: int = 64, config: str = "", inputs: Any = dict, **options: Any
) -> Callable[[], Built]:
    """A model of transformers from its config."""

    def build() -> Built:
        import transformers

        settings = getattr(transformers, config or f"{name}Config")(**options)
        module = getattr(transformers, f"{name}Model" if hasattr(transformers, f"{name}Model") else name)(settings)
        return module, {"pixel_values": image(size)} | inputs()

    return build


def dinov3() -> Built:
    import transformers

    sizes: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
    }
    config = transformers.DINOv3ViTConfig(**sizes, num_register_tokens=2, image_size=64, patch_size=16)
    return transformers.DINOv3ViTModel(config), {"pixel_values": image(64)}


def rt_detr(depth: int = 2) -> Built:
    import transformers

    backbone = transformers.RTDetrResNetConfig(
        embedding_size=16,
        hidden_sizes=[32, 64, 96, 128],
        depths=[depth] * 4,
        out_features=["stage2", "stage3", "stage4"],
    )
    sizes: dict[str, Any] = {"encoder_hidden_dim": 32, "d_model": 32, "num_queries": 20, "decoder_layers": 2}
    sizes |= {"encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "decoder_attention_heads": 4, "encoder_attention_heads": 4}
    sizes |= {"encoder_in_channels": [64, 96, 128], "decoder_in_channels": [32, 32, 32], "num_denoising": 0}
    config = transformers.RTDetrConfig(backbone_config=backbone, num_labels=7, **sizes)
    return transformers.RTDetrForObjectDetection(config), {"pixel_values": image(64)}


def detr() -> Built:
    import transformers

    backbone = transformers.ResNetConfig(
        embedding_size=16, hidden_sizes=[32, 48, 64, 96], depths=[2, 2, 2, 2], out_features=["stage4"]
    )
    sizes: dict[str, Any] = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "num_queries": 10}
    sizes |= {"encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
    config = transformers.DetrConfig(
        backbone_config=backbone, use_timm_backbone=False, use_pretrained_backbone=False, backbone=None, **sizes
    )
    return transformers.DetrForObjectDetection(config), {"pixel_values": image(64)}


def sam() -> Built:
    import transformers

    vision: dict[str, Any] = {
        "hidden_size": 32,
        "output_channels": 16,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
    }
    vision |= {"image_size": 64, "patch_size": 8, "window_size": 4, "global_attn_indexes": [1, 3], "num_pos_feats": 8}
    prompt: dict[str, Any] = {"hidden_size": 16, "image_size": 64, "patch_size": 8, "mask_input_channels": 4}
    mask: dict[str, Any] = {"hidden_size": 16, "mlp_dim": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    mask |= {"iou_head_hidden_dim": 16}
    config = transformers.SamConfig(vision_config=vision, prompt_encoder_config=prompt, mask_decoder_config=mask)
    return transformers.SamModel(config), {
        "pixel_values": image(64, 1),
        "input_points": torch.tensor([[[[20.0, 30.0]]]]),
    }


def of_torchvision(name: str, size: int = 64, **options: Any) -> Callable[[], Built]:
    """A network of torchvision, without weights, by the name of a model or of a class."""

    def build() -> Built:
        importlib.import_module("zoo.torchvision_ops")  # before torchvision
        models = importlib.import_module("torchvision").models
        module = (
            getattr(models, name)(**options) if name[0].isupper() else models.get_model(name, weights=None, **options)
        )
        parameter = next(iter(inspect.signature(module.forward).parameters))
        return module, {parameter: image(size)}

    return build


TORCHVISION = {
    "ResNet-50": of_torchvision("resnet50"),
    "GoogLeNet": of_torchvision("googlenet", init_weights=False),
    "MobileNetV2": of_torchvision("mobilenet_v2"),
    "EfficientNet-B0": of_torchvision("efficientnet_b0"),
    "SqueezeNet": of_torchvision("squeezenet1_1"),
    "Inception v3": of_torchvision("inception_v3", 96, init_weights=False),
    "DenseNet-121": of_torchvision("densenet121"),
    "ViT": of_torchvision(
        "VisionTransformer", image_size=64, patch_size=16, num_layers=2, num_heads=4, hidden_dim=64, mlp_dim=128
    ),
}

TRANSFORMERS = {
    "ResNet-50": of_transformers("ResNet"),
    "MobileNetV2": of_transformers("MobileNetV2"),
    "EfficientNet-B0": of_transformers(
        "EfficientNet", width_coefficient=1.0, depth_coefficient=1.0, hidden_dim=1280, image_size=64
    ),
    "ConvNeXt": of_transformers("ConvNext", hidden_sizes=[16, 32, 48, 64], depths=[2, 2, 2, 2]),
    "RegNet": of_transformers(
        "RegNet", embedding_size=16, hidden_sizes=[16, 32, 48, 64], depths=[1, 1, 2, 1], groups_width=16
    ),
    "SegFormer": of_transformers("Segformer", hidden_sizes=[16, 32, 48, 64], depths=[1, 1, 1, 1]),
    "DINOv3": dinov3,
    "RT-DETR": rt_detr,
    "DETR": detr,
    "SAM": sam,
}

SMALL = {
    "ResNet": of_transformers(
        "ResNet", 32, embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="bottleneck"
    ),
    "RegNet": of_transformers("RegNet", 32, embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], groups_width=8),
    "DINOv3": dinov3,
}


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from zoo import checks

    torch.set_num_threads(1)
    torch.manual_seed(0)
    built, built_inputs = TORCHVISION[sys.argv[1]]()
    findings = checks.check_leaves(built, (), built_inputs)
    for problem in findings.problems:
        print(f"PROBLEM {problem}")
    for refused, reason in findings.refused.items():
        print(f"REFUSED {refused}: {reason}")
    print(f"CHECKED {sum(findings.compared.values())}")
