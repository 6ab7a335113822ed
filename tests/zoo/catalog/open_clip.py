"""Every model that open_clip lists, made smaller."""

from collections.abc import Iterator
from typing import Any

import open_clip
from open_clip.model import CLIP, CustomTextCLIP
from zoo.network import Built, Network, image, runs, tokens


def build(name: str) -> Built:
    """The model with two layers of few channels in each tower."""
    config: Any = open_clip.get_model_config(name)
    vision, text = config["vision_cfg"], config["text_cfg"]
    for key in ("model_name", "multimodal_cfg", "custom_text"):
        config.pop(key, None)
    if "hf_model_name" in text or "timm_model_name" in vision:
        raise NotImplementedError("a tower of timm or transformers, which have rows of their own")
    is_resnet = isinstance(vision.get("layers"), list)
    vision |= {"layers": [1, 1, 1, 1], "width": 16} if is_resnet else {"layers": 2, "width": 64, "head_width": 16}
    vision |= {"image_size": 64 if is_resnet else 4 * vision["patch_size"]}
    text |= {"layers": 2, "width": 64, "heads": 4, "vocab_size": 100, "context_length": 24}
    config["embed_dim"] = 32
    custom = bool(
        open_clip.get_model_config(name).get("custom_text")
    ) or "multimodal_cfg" in open_clip.get_model_config(name)
    config.pop("init_logit_bias", None), config.pop("init_logit_scale", None), config.pop("nonscalar_logit_scale", None)
    module = (CustomTextCLIP if custom else CLIP)(**config)
    return runs(module, ((image(vision["image_size"]), tokens()), {}))


def networks() -> Iterator[Network]:
    """One row per listed model."""
    for name in open_clip.list_models():
        yield Network(name, lambda name=name: build(name))
