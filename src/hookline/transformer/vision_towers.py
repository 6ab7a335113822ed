"""Vision-language models: the vision tower and the projector, found by name.

For a new architecture with other module names, add the names to the tables here.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn

from hookline.engine.signatures import parameters_of
from hookline.transformer.roles import (
    FINAL_NORM,
    POSITIONS,
    Anatomy,
    Projector,
    Stack,
    Tower,
    block_of,
    child,
    named,
    stack_in,
    stacks_of_layers,
)

TOWER = ("visual", "vision_tower", "vision_model")
LANGUAGE = ("language_model", "text_model")
PROJECTOR = ("multi_modal_projector", "connector", "visual.merger")
EARLY_PROJECTORS = ("visual.deepstack_merger_list",)
"""Projectors that read earlier layers of the tower."""
PATCHES = ("embeddings.patch_embedding", "embeddings.patch_embeddings", "patch_embed", "patch_embedding", "patch_conv")
PRE_NORM = ("pre_layrnorm", "ln_pre")


def find_vlm(model: nn.Module) -> Anatomy | None:
    """The anatomy of a vision-language model or a vision encoder; None for any other model."""
    if getattr(model, "main_input_name", None) == "pixel_values" and not _has_text(model):
        towers = _towers(model, None)
        return Anatomy(towers[0].config.model_type, towers[0].config, towers, None) if len(towers) == 1 else None
    tower, language = tower_of(model), language_of(model)
    if tower is None or language is None:
        return None
    whole: Any = model.config
    config = whole.get_text_config(decoder=True)
    stack = stack_in("blocks", language, config, cross_attends=True)
    towers = _towers(tower, getattr(whole, "vision_feature_layer", getattr(whole, "vision_feature_layers", None)))
    if stack is None or not towers:
        return None
    stack = named(_with_end(stack, language), model)
    head = model.get_output_embeddings()  # type: ignore[operator]
    return Anatomy(whole.model_type, config, (stack,), head, towers, _projectors(model, towers[0]))


def tower_of(model: nn.Module) -> nn.Module | None:
    """The vision tower of a vision-language model."""
    return child(_inside(model), TOWER)


def language_of(model: nn.Module) -> nn.Module | None:
    """The language model of a vision-language model."""
    return child(_inside(model), LANGUAGE)


def image_modules(model: nn.Module, anatomy: Anatomy) -> frozenset[nn.Module]:
    """All modules in the image stream: those of the vision tower and of the projectors."""
    if isinstance(anatomy.main, Tower):
        return frozenset(model.modules())
    tower = tower_of(model)
    roots = [*([tower] if tower is not None and anatomy.towers else []), *(each.module for each in anatomy.projectors)]
    return frozenset(module for root in roots for module in root.modules())


def _inside(model: nn.Module) -> nn.Module:
    """The module that contains the tower: the model without its head and without adapters."""
    while child(model, TOWER) is None:
        inner = model._modules.get("base_model") or model._modules.get("model")
        if inner is None:
            break
        model = inner
    return model


def _has_text(model: nn.Module) -> bool:
    config: Any = model.config
    return config.get_text_config(decoder=True) is not config or config.is_encoder_decoder


def _with_end(stack: Stack, root: nn.Module) -> Stack:
    """The stack with the final norm of `root`, if it has none (CLIP's text model)."""
    return stack if stack.ln_final is not None else replace(stack, ln_final=child(root, FINAL_NORM))


def _towers(root: nn.Module, feature_layer: int | list[int] | None) -> tuple[Tower, ...]:
    """The stacks of layers in a vision tower, in order; a second stack attends globally."""
    found = stacks_of_layers(root)
    names = ("vision.blocks", "vision.global_blocks")
    if not 1 <= len(found) <= len(names) or (embed := child(root, PATCHES)) is None:
        return ()
    config: Any = root.config
    return tuple(
        _tower(name, root, path, layers, config, embed, feature_layer if path is found[-1][0] else None)
        for name, (path, layers) in zip(names, found, strict=False)
    )


def _tower(
    name: str,
    root: nn.Module,
    path: str,
    layers: nn.ModuleList,
    config: Any,
    embed: nn.Module,
    feature_layer: int | list[int] | None,
) -> Tower:
    blocks = tuple(block_of(layer, config, has_encoder=False) for layer in layers)
    is_first = name == "vision.blocks"
    parent = root.get_submodule(path.rpartition(".")[0])
    positions = child(root, POSITIONS)
    gain: Any = getattr(blocks[0].ln1, "weight", None)
    return Tower(
        name,
        config,
        blocks,
        embed,
        positions if is_first and isinstance(positions, nn.Embedding) else None,
        (child(parent, FINAL_NORM) or child(root, FINAL_NORM)) if is_first else None,
        gain.shape[0] if gain is not None else config.hidden_size,  # in Qwen2-VL the width of the language model
        child(root, PRE_NORM) if is_first else None,
        blocks[0].attn is not None
        and "cu_seqlens" in parameters_of(blocks[0].attn)[0],  # lengths of images packed into one row
        None if feature_layer is None else _layers_read(feature_layer, len(layers)),
    )


def _layers_read(feature_layer: int | list[int], n: int) -> int:
    """The number of layers that matter, from an index into the hidden states (embeddings first)."""
    each = [feature_layer] if isinstance(feature_layer, int) else feature_layer
    return max(index % (n + 1) for index in each)


def _projectors(root: nn.Module, tower: Tower) -> tuple[Projector, ...]:
    """The projectors, in the order in which they run."""
    root = _inside(root)
    early: Any = child(root, EARLY_PROJECTORS) or ()
    layers = getattr(tower.config, "deepstack_visual_indexes", ())
    found = [
        Projector(f"projector.deepstack.{n}", module, layer)
        for n, (module, layer) in enumerate(zip(early, layers, strict=False))
    ]
    last = child(root, PROJECTOR)
    in_windows = tower_of(root) if hasattr(tower.config, "fullatt_block_indexes") else None
    return tuple(found if last is None else [*found, Projector("projector", last, ordered_by=in_windows)])
