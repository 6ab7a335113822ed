"""Where the classic points of some architectures are, written down by reading transformers' code.

It shares nothing with hookline's own tables: it is what these are judged by.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from fuzz.program import Language, Place


@dataclass(frozen=True)
class Row:
    """The paths of an architecture; those of a layer begin at the layer. An empty path: there is no such module."""

    layers: str = "model.layers"
    attn: str = "self_attn"
    o: str = "self_attn.o_proj"
    ln1: str = "input_layernorm"
    ln2: str = "post_attention_layernorm"
    ln1_post: str = ""
    ln2_post: str = ""
    mlp: str = "mlp"
    gate: str = "mlp.gate_proj"
    up: str = "mlp.up_proj"
    down: str = "mlp.down_proj"
    embed: str = "model.embed_tokens"
    final: str = "model.norm"
    head: str = "lm_head"
    projections: tuple[str, str, str] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    fused: str = ""
    """Of one projection for q, k and v: "parts" one behind another, or "chunks" of each head."""
    is_parallel: bool = False
    logits_are_heads: bool = True
    """Whether what the head returns are the logits."""
    attention: str = "interface"
    """How attention is called: by transformers' interface, or the "module" has code of its own."""
    kinds: tuple[str, ...] = ()


LLAMA = Row()
ROWS: dict[str, Row] = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "ministral", "seed_oss"), LLAMA),
    "gemma": LLAMA,
    "gemma2": replace(
        LLAMA,
        ln1_post="post_attention_layernorm",
        ln2="pre_feedforward_layernorm",
        ln2_post="post_feedforward_layernorm",
        logits_are_heads=False,
    ),
    "stablelm": LLAMA,
    "smollm3": LLAMA,
    "helium": LLAMA,
    "mixtral": replace(LLAMA, gate="", up="", down=""),
    "starcoder2": replace(LLAMA, gate="mlp.c_fc", up="", down="mlp.c_proj"),
    **dict.fromkeys(("nemotron", "arcee"), replace(LLAMA, gate="mlp.up_proj", up="")),
    "phi3": replace(
        LLAMA,
        projections=("self_attn.qkv_proj",) * 3,
        fused="parts",
        gate="",
        up="",
    ),
    "cohere": replace(LLAMA, ln2="", is_parallel=True, logits_are_heads=False),
    "gpt2": Row(
        layers="transformer.h",
        attn="attn",
        o="attn.c_proj",
        ln1="ln_1",
        ln2="ln_2",
        gate="mlp.c_fc",
        up="",
        down="mlp.c_proj",
        embed="transformer.wte",
        final="transformer.ln_f",
        projections=("attn.c_attn",) * 3,
        fused="parts",
    ),
    "gpt_neox": Row(
        layers="gpt_neox.layers",
        attn="attention",
        o="attention.dense",
        gate="mlp.dense_h_to_4h",
        up="",
        down="mlp.dense_4h_to_h",
        embed="gpt_neox.embed_in",
        final="gpt_neox.final_layer_norm",
        projections=("attention.query_key_value",) * 3,
        fused="chunks",
        is_parallel=True,
    ),
    "gptj": Row(
        layers="transformer.h",
        attn="attn",
        o="attn.out_proj",
        ln1="ln_1",
        ln2="",
        gate="mlp.fc_in",
        up="",
        down="mlp.fc_out",
        embed="transformer.wte",
        final="transformer.ln_f",
        projections=("attn.q_proj", "attn.k_proj", "attn.v_proj"),
        is_parallel=True,
        attention="module",
    ),
    "gpt_neo": Row(
        layers="transformer.h",
        attn="attn",
        o="attn.attention.out_proj",
        ln1="ln_1",
        ln2="ln_2",
        gate="mlp.c_fc",
        up="",
        down="mlp.c_proj",
        embed="transformer.wte",
        final="transformer.ln_f",
        projections=("attn.attention.q_proj", "attn.attention.k_proj", "attn.attention.v_proj"),
        attention="module",
    ),
    "phi": replace(
        LLAMA,
        o="self_attn.dense",
        ln2="",
        gate="mlp.fc1",
        up="",
        down="mlp.fc2",
        final="model.final_layernorm",
        is_parallel=True,
    ),
    "opt": Row(
        layers="model.decoder.layers",
        o="self_attn.out_proj",
        ln1="self_attn_layer_norm",
        ln2="",  # its MLP gets the rows of a batch one behind another
        mlp="",
        gate="",
        up="",
        embed="model.decoder.embed_tokens",
        final="model.decoder.final_layer_norm",
    ),
}
FEW = ("scores", "pattern", "rot_q", "rot_k")
"""What is inside attention."""


def places(network: Language, config: Any) -> list[Place]:
    """The classic points of a model that the oracle knows."""
    row = ROWS.get(network.kind)
    if row is None or network.family != "causal":
        return []
    found = [
        Place("hook_embed", row.embed),
        Place("ln_final.hook_in", row.final, "input"),
        Place("ln_final.hook_out", row.final),
        Place("ln_final.hook_scale", row.final, inside="scale"),
        Place("ln_final.hook_normalized", row.final, inside="normalized"),
        Place("unembed.hook_in", row.head, "input"),
    ]
    if row.logits_are_heads:
        found.append(Place("unembed.hook_out", row.head))
    for layer in range(config.num_hidden_layers):
        found += _of_layer(row, f"{row.layers}.{layer}", f"blocks.{layer}", config)
    return found


def _of_layer(row: Row, path: str, name: str, config: Any) -> list[Place]:
    found = [
        Place(f"{name}.hook_resid_pre", path, "input"),
        Place(f"{name}.hook_resid_post", path),
        Place(f"{name}.hook_attn_out", f"{path}.{row.ln1_post or row.attn}"),
        Place(f"{name}.attn.hook_z", f"{path}.{row.o}", "input", heads=config.num_attention_heads),
        Place(f"{name}.attn.hook_result", f"{path}.{row.o}", inside=f"result of {config.num_attention_heads}"),
        *_norm(f"{path}.{row.ln1}", f"{name}.ln1"),
        *_projected(row, path, name, config),
    ]
    if row.ln2:
        found += _norm(f"{path}.{row.ln2}", f"{name}.ln2")
        found.append(Place(f"{name}.hook_mlp_in", f"{path}.{row.ln2}", "input"))
        if not row.is_parallel:
            found.append(Place(f"{name}.hook_resid_mid", f"{path}.{row.ln2}", "input", inside="stream"))
    if row.ln1_post:
        found += _norm(f"{path}.{row.ln1_post}", f"{name}.ln1_post")
        found += _norm(f"{path}.{row.ln2_post}", f"{name}.ln2_post")
    if row.mlp:
        found.append(Place(f"{name}.hook_mlp_out", f"{path}.{row.ln2_post or row.mlp}"))
    if row.gate:
        found.append(Place(f"{name}.mlp.hook_pre", f"{path}.{row.gate}"))
        found.append(Place(f"{name}.mlp.hook_post", f"{path}.{row.down}", "input"))
    if row.up:
        found.append(Place(f"{name}.mlp.hook_pre_linear", f"{path}.{row.up}"))
    if row.attention == "interface":
        found += [Place(f"{name}.attn.hook_{inside}", f"{path}.{row.attn}", inside=inside) for inside in FEW[1:]]
        found.append(Place(f"{name}.attn.hook_attn_scores", f"{path}.{row.attn}", inside="scores"))
    return found


def _norm(path: str, name: str) -> list[Place]:
    return [
        Place(f"{name}.hook_scale", path, inside="scale"),
        Place(f"{name}.hook_normalized", path, inside="normalized"),
    ]


def _projected(row: Row, path: str, name: str, config: Any) -> list[Place]:
    """The queries, keys and values of a layer as heads."""
    heads = config.num_attention_heads
    groups = getattr(config, "num_key_value_heads", None) or heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    ends = [0, heads * size, (heads + groups) * size, (heads + 2 * groups) * size]
    found = []
    for index, (letter, projection) in enumerate(zip("qkv", row.projections, strict=True)):
        place = Place(f"{name}.attn.hook_{letter}", f"{path}.{projection}", heads=heads if letter == "q" else groups)
        if row.fused == "parts":
            place = replace(place, part=(ends[index], ends[index + 1]))
        elif row.fused == "chunks":
            place = replace(place, chunk=(index, 3))
        found.append(place)
    return found


DIALECTS = {
    "hook_resid_pre": ("hook_in", "lm.layer.{}.pre", "resid_pre{}"),
    "hook_resid_post": ("hook_out", "lm.layer.{}.post", "resid_post{}"),
    "hook_attn_out": ("attn.hook_out", "lm.attn.{}.out", "attn_out{}"),
    "hook_mlp_out": ("mlp.hook_out", "lm.mlp.{}.out", "mlp_out{}"),
    "attn.hook_q": ("attn.q.hook_out", "lm.attn.{}.q", "q{}"),
    "attn.hook_k": ("attn.k.hook_out", "lm.attn.{}.k", "k{}"),
    "attn.hook_v": ("attn.v.hook_out", "lm.attn.{}.v", "v{}"),
    "attn.hook_z": ("attn.o.hook_in", "lm.attn.{}.z", "z{}"),
    "attn.hook_pattern": ("lm.attn.{}.pattern", "pattern{}"),
    "ln1.hook_normalized": ("normalized{}ln1",),
    "ln1.hook_scale": ("scale{}ln1",),
}
"""Names of points of a layer in other dialects: those of a bridge begin as the classic ones do."""


def other_names(place: Place) -> list[Place]:
    """The same point under its names in other dialects."""
    if not place.name.startswith("blocks."):
        return []
    _, layer, rest = place.name.split(".", 2)
    names = [name.format(layer) for name in DIALECTS.get(rest, ())]
    names = [f"blocks.{layer}.{name}" if "hook" in name else name for name in names]
    return [replace(place, name=name) for name in names]


def layer_paths(network: Language, config: Any) -> list[str]:
    """The paths of the layers, and of the norm behind them."""
    row = ROWS[network.kind]
    return [*[f"{row.layers}.{layer}" for layer in range(config.num_hidden_layers)], row.final]


def layer_of(network: Language, place: Place, count: int) -> int:
    """The layer in which a place is: -1 before the first one, as many as there are behind the last one."""
    row = ROWS[network.kind]
    if place.module.startswith(f"{row.layers}."):
        return int(place.module.removeprefix(f"{row.layers}.").split(".")[0])
    return count if place.module in (row.final, row.head) else -1
