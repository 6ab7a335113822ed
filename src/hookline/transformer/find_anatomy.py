"""Find the anatomy of a model by the names of its modules: language models, and the vision towers beside them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn

from hookline.functions.signatures import parameters_of
from hookline.transformer import roles
from hookline.transformer.anatomy import Anatomy, Block, CrossAttention, Projector, Stack, Tower
from hookline.transformer.architectures import architecture
from hookline.transformer.roles import child
from hookline.transformer.sites import query_heads


def find_anatomy(model: nn.Module) -> Anatomy | None:
    """The anatomy of a Hugging Face model; None if its layers are not found."""
    return _find_vlm(model) or _find_lm(model)


def unknown_anatomy(model: nn.Module) -> str:
    """The error message for a language model whose layers are not found."""
    lists = [
        f"{path} ({len(module)} × {type(module[0]).__name__})"
        for path, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module)
    ]
    return (
        f"{type(model).__name__} has native points only: its stack of layers was not recognized among "
        f"{', '.join(lists[:4]) or 'its modules'}. The module names of known architectures are listed in "
        f"hookline/transformer/roles.py (docs/transformers.md: Unsupported architectures)."
    )


def _find_lm(model: Any) -> Anatomy | None:
    """The anatomy of a language model or a speech model."""
    config, head = _text_config(model.config, decoder=True), _says(model, "get_output_embeddings")
    if getattr(model.config, "is_encoder_decoder", False):
        roots = {"encoder": _says(model, "get_encoder"), "decoder": _says(model, "get_decoder")}
        stacks = [stack for name, root in roots.items() if (stack := _stack(name, root, None)) is not None]
        is_whole = len(stacks) == len(roots) and stacks[-1].embed is not None
        return Anatomy(_kind(model.config), config, tuple(stacks), head) if is_whole else None
    stack = _stack("blocks", model, config)
    if stack is None or stack.embed is None:
        return None
    return Anatomy(_kind(config), config, (_named(stack, model),), head)


def _find_vlm(model: Any) -> Anatomy | None:
    """The anatomy of a vision-language model or a vision encoder; None for any other model."""
    whole = model.config
    config = _text_config(whole, decoder=True)
    is_pair = getattr(whole, "is_encoder_decoder", False)
    if getattr(model, "main_input_name", None) == "pixel_values" and config is whole and not is_pair:
        towers = _towers(model, None)
        return Anatomy(_kind(towers[0].config), towers[0].config, towers, None) if len(towers) == 1 else None
    tower, language = tower_of(model), language_of(model)
    if tower is None or language is None:
        return None
    stack = _stack("blocks", language, config, cross_attends=True)
    towers = _towers(tower, getattr(whole, "vision_feature_layer", getattr(whole, "vision_feature_layers", None)))
    if stack is None or stack.embed is None or not towers:
        return None
    if stack.ln_final is None:  # in CLIP it is beside the encoder
        stack = replace(stack, ln_final=child(language, roles.FINAL_NORM))
    head, projectors = _says(model, "get_output_embeddings"), _projectors(model, towers[0])
    return Anatomy(_kind(whole), config, (_named(stack, model),), head, towers, projectors)


def _says(model: Any, method: str) -> Any:
    """What a method of a model returns; None if its class does not implement it."""
    try:
        return getattr(model, method)()
    except (AttributeError, NotImplementedError):
        return None


def _text_config(config: Any, *, decoder: bool) -> Any:
    """The config of the text in a model; the whole config if it does not say which part that is."""
    try:
        return config.get_text_config(decoder=decoder)
    except (AttributeError, ValueError):  # a config of another library; several texts
        return config


def _kind(config: Any) -> str:
    return getattr(config, "model_type", "")


def _stack(name: str, root: Any, config: Any, *, cross_attends: bool = False) -> Stack | None:
    """The stack of layers in a module, of the length in the config if there is one.

    With `cross_attends`, its layers may have cross-attention, as in a decoder.
    """
    if root is None:
        return None
    n_layers = None if config is None else getattr(config, "num_hidden_layers", -1)  # without it none is certain
    candidates = [candidate for candidate in _layer_lists(root) if n_layers is None or len(candidate[1]) == n_layers]
    if len(candidates) > 1 and len({path.count(".") for path, _ in candidates}) == 1:
        return None  # none of them is the outermost
    if not candidates:
        return None
    path, layers = min(candidates, key=lambda candidate: candidate[0].count("."))
    parent = root.get_submodule(path.rpartition(".")[0])
    if config is None and (parent_config := getattr(parent, "config", getattr(root, "config", None))) is not None:
        config = _text_config(parent_config, decoder=name == "decoder")
    if not hasattr(config, "hidden_size"):
        return None
    blocks = tuple(_block(layer, config, has_encoder=cross_attends or name == "decoder") for layer in layers)
    if not _has_known_heads(blocks, config):
        return None
    return Stack(
        name,
        config,
        blocks,
        _says(root, "get_input_embeddings") or child(root, roles.EMBEDDING),
        child(parent, roles.POSITIONS) or _position_embedding_beside(root, path),
        child(parent, roles.FINAL_NORM),
        config.hidden_size,
        embed_norm=child(parent, roles.EMBEDDING_NORM),
    )


def _has_known_heads(blocks: tuple[Block, ...], config: Any) -> bool:
    return all(block.attn is None or query_heads(block.attn, config) is not None for block in blocks)


def _layer_lists(model: nn.Module) -> list[tuple[str, nn.ModuleList]]:
    """Every list of layers in a model, with its path."""
    return [
        (path, module)
        for path, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) and child(module[0], (*roles.ATTENTION, *roles.MIXER))
    ]


def _position_embedding_beside(model: nn.Module, path: str) -> nn.Module | None:
    """The position embeddings in a module next to the encoder, as in BERT."""
    parent = path.rpartition(".")[0]
    while parent:
        parent = parent.rpartition(".")[0]
        embedding = child(model.get_submodule(parent), roles.POSITIONS)
        if embedding is not None:
            return embedding
    return None


def _named(stack: Stack, model: Any) -> Stack:
    """The stack, renamed to "encoder" if its attention is bidirectional."""
    attn = next((block.attn for block in stack.blocks if block.attn is not None), None)
    declared = getattr(attn, "is_causal", None)
    is_causal = declared if isinstance(declared, bool) else getattr(model.config, "is_decoder", False) or attn is None
    return stack if _says(model, "can_generate") or is_causal else replace(stack, name="encoder")


def _block(layer: nn.Module, config: Any, *, has_encoder: bool) -> Block:
    """The roles of the submodules of one layer."""
    attn = child(layer, roles.ATTENTION)
    linear = attn if _is_linear(attn) else None
    attn = None if linear is not None else attn or _attention_among_mixers(layer)
    mlp = child(layer, roles.MLP)
    if isinstance(mlp, nn.Linear):  # ALBERT: the first of two linear layers has this name
        mlp = None
    cross = _cross(layer, has_other=attn is not None) if has_encoder else None
    norms = _norms(layer)
    if architecture(config).post_norm:  # norms after attention and MLP normalize the stream itself
        before, after, before_mlp, after_mlp = norms
        norms = before or after, None, before_mlp or after_mlp or child(layer, ("output.LayerNorm",)), None
    return Block(
        module=layer,
        attn=attn,
        mixer=None if attn is not None else linear or child(layer, roles.MIXER),
        o=(child(attn, roles.OUTPUT) if attn is not None else None) or child(layer, ("attention.output.dense",)),
        mlp=mlp,
        mlp_out=child(mlp, roles.MLP_OUT) if mlp is not None else child(layer, ("fc2", "output.dense", "ffn_output")),
        ln1=norms[0] if attn is not None or cross is None else None,
        ln1_post=norms[1],
        ln2=norms[2],
        ln2_post=norms[3],
        post_norm=child(layer, ("attention.output.LayerNorm",)),
        post_norm_2=child(layer, ("output.LayerNorm",)),
        adds_in_attention=attn is not None and attn is child(layer, ("attention.self",)),
        cross=cross,
        gains=next((names for names in roles.GAINS if all(name in layer._parameters for name in names)), None),
    )


def _is_linear(attn: nn.Module | None) -> bool:
    """Whether a module called attention has no softmax."""
    return any(hasattr(attn, name) for name in roles.LINEAR_ATTENTION)


def _attention_among_mixers(layer: nn.Module) -> nn.Module | None:
    """The mixer of a hybrid layer, if it is softmax attention."""
    mixer = child(layer, roles.MIXER)
    projections = (roles.QUERY, roles.KEY, roles.VALUE, roles.OUTPUT)
    if mixer is None or _is_linear(mixer) or not all(child(mixer, names) for names in projections):
        return None
    return mixer


def _cross(layer: nn.Module, *, has_other: bool) -> CrossAttention | None:
    """The cross-attention of a layer; without self-attention (`has_other`), it follows the first norm."""
    attn = child(layer, roles.CROSS_ATTENTION)
    if attn is None:
        return None
    return CrossAttention(
        attn,
        child(attn, roles.OUTPUT) or child(layer, ("crossattention.output.dense",)),
        child(layer, roles.NORM_OF_CROSS if has_other else roles.NORM_BEFORE_ATTENTION),
        child(layer, ("post_cross_attn_layernorm",)),
        child(layer, ("crossattention.output.LayerNorm",)),
    )


def _norms(layer: nn.Module) -> tuple[nn.Module | None, ...]:
    """The norms before and after attention, before and after the MLP.

    `post_attention_layernorm` is the norm before the MLP, unless the layer has another norm there, or has no norm
    before attention but one after the MLP: then it is the norm after attention.
    """
    before_attention, before_mlp = child(layer, roles.NORM_BEFORE_ATTENTION), child(layer, roles.NORM_BEFORE_MLP)
    after_attention, after_mlp = child(layer, roles.NORM_AFTER_ATTENTION), child(layer, roles.NORM_AFTER_MLP)
    ambiguous = layer._modules.get("post_attention_layernorm")
    if ambiguous is not None and before_mlp is not ambiguous:
        after_attention = after_attention or ambiguous
    elif ambiguous is not None and before_attention is None and after_mlp is not None:
        after_attention, before_mlp = ambiguous, None
    return before_attention, after_attention, before_mlp, after_mlp


def tower_of(model: nn.Module) -> nn.Module | None:
    """The vision tower of a vision-language model."""
    return child(_without_head(model), roles.TOWER)


def language_of(model: nn.Module) -> nn.Module | None:
    """The language model of a vision-language model."""
    return child(_without_head(model), roles.LANGUAGE)


def image_modules(model: nn.Module, anatomy: Anatomy) -> frozenset[nn.Module]:
    """All modules in the image stream: those of the vision tower and of the projectors."""
    if isinstance(anatomy.main, Tower):
        return frozenset(model.modules())
    parts = [tower_of(model) if anatomy.towers else None, *(projector.module for projector in anatomy.projectors)]
    return frozenset(module for part in parts if part is not None for module in part.modules())


def _without_head(model: nn.Module) -> nn.Module:
    """The module that contains the tower: the model without its head and without adapters."""
    while child(model, roles.TOWER) is None:
        inner = model._modules.get("base_model") or model._modules.get("model")
        if inner is None:
            break
        model = inner
    return model


def _towers(root: Any, feature_layer: int | list[int] | None) -> tuple[Tower, ...]:
    """The stacks of layers in a vision tower, in order; a second stack attends globally."""
    layer_lists, embed, config = _layer_lists(root), child(root, roles.PATCHES), getattr(root, "config", None)
    if embed is None or len(layer_lists) not in (1, 2) or not hasattr(config, "hidden_size"):
        return ()
    (path, layers), *others = layer_lists
    parent, positions = root.get_submodule(path.rpartition(".")[0]), child(root, roles.POSITIONS)
    first = _tower("vision.blocks", root, layers, embed, None if others else feature_layer)
    first = replace(
        first,
        pos_embed=positions if isinstance(positions, nn.Embedding) else None,
        # A backbone runs its norm on the stream after each of several layers.
        ln_final=None
        if hasattr(root, "out_indices")
        else child(parent, roles.FINAL_NORM) or child(root, roles.FINAL_NORM),
        ln_pre=child(root, roles.PRE_NORM),
    )
    towers = first, *(_tower("vision.global_blocks", root, other, embed, feature_layer) for _, other in others)
    return towers if all(_has_known_heads(tower.blocks, config) for tower in towers) else ()


def _tower(name: str, root: Any, layers: nn.ModuleList, embed: nn.Module, features: int | list[int] | None) -> Tower:
    """`features` are indices into the hidden states (embeddings first) that the language model reads."""
    blocks = tuple(_block(layer, root.config, has_encoder=False) for layer in layers)
    gain: Any = getattr(blocks[0].ln1, "weight", None)
    width = gain.shape[0] if gain is not None else root.config.hidden_size  # in Qwen2-VL that of the language model
    indices = [features] if isinstance(features, int) else features
    return Tower(
        name,
        root.config,
        blocks,
        embed,
        None,
        None,
        width,
        is_packed=blocks[0].attn is not None and "cu_seqlens" in parameters_of(blocks[0].attn)[0],
        read=max(index % (len(blocks) + 1) for index in indices) if indices is not None else None,
    )


def _projectors(root: nn.Module, tower: Tower) -> tuple[Projector, ...]:
    """The projectors, in the order in which they run."""
    root = _without_head(root)
    early: Any = child(root, roles.EARLY_PROJECTORS) or ()
    layers = getattr(tower.config, "deepstack_visual_indexes", ())
    projectors = [
        Projector(f"projector.deepstack.{n}", module, layer)
        for n, (module, layer) in enumerate(zip(early, layers, strict=False))
    ]
    last = child(root, roles.PROJECTOR)
    in_windows = tower_of(root) if hasattr(tower.config, "fullatt_block_indexes") else None
    return tuple(projectors if last is None else [*projectors, Projector("projector", last, ordered_by=in_windows)])
