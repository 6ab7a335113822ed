"""The classic points of a transformer, each as an event of one of its modules plus a lens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from hookline.anatomy import variants
from hookline.anatomy.heads import ThroughNorm, result_site, splits
from hookline.anatomy.norms import norm_of, norm_sites
from hookline.anatomy.roles import (
    EXPERTS,
    FUSED,
    KEY,
    MLP_IN,
    MLP_LINEAR,
    QUERY,
    ROUTER,
    VALUE,
    Anatomy,
    Block,
    CrossAttention,
    Stack,
    child,
)
from hookline.anatomy.unproved import UNPROVED
from hookline.lenses import FIRST, Chain, Heads, HeadsFirst, Interleaved, Lens, Part, Scaled
from hookline.memo import Added, Difference, EachRow, Keys, Rows
from hookline.names import lens_of
from hookline.points import Site
from hookline.taps import Kind

_ATTENTION_AXES = {
    "q": "b p h e",
    "k": "b p g e",
    "v": "b p g e",
    "rot_q": "b p h e",
    "rot_k": "b k g e",
    "attn_scores": "b h p k",
    "pattern": "b h p k",
    "z": "b p h e",
    "result": "b p h d",
}


@dataclass(frozen=True)
class Spec:
    """A point of the table: where it is and what its axes are. Without a site it is not to be had; `why` says so."""

    name: str
    axes: str
    site: Site | None = None
    why: str = ""
    only: int | None = None
    """Which call of its module it is, if that is called several times."""

    @property
    def is_on_request(self) -> bool:
        """Whether it is recorded only when asked for by name: it is a vector per head, or the same as another."""
        return self.axes in ("b p h d", "b p g d") or self.name.endswith((".attn.hook_in", ".mlp.hook_in"))


def classic_points(anatomy: Anatomy) -> Iterator[Spec]:
    """All points of the table, in the order in which they fire; those that are known not to hold, without a site."""
    known = UNPROVED.get(anatomy.kind, {})
    for spec in _all_points(anatomy):
        kind = kind_of(spec.name)
        if spec.site is not None and kind in known:
            yield Spec(spec.name, spec.axes, why=f"on this architecture it is not what its name says: {known[kind]}")
        else:
            yield spec


def kind_of(name: str) -> str:
    """A point's name without its layer: attn.hook_q, or decoder.attn.hook_q."""
    stack, _, rest = name.partition(".")
    layer, _, point = rest.partition(".")
    if not layer.isdigit():
        return name
    return point if stack == "blocks" else f"{stack}.{point}"


def _all_points(anatomy: Anatomy) -> Iterator[Spec]:
    is_alone = not anatomy.is_encoder_decoder
    for stack in anatomy.stacks:
        for spec in _stack_points(stack, _nth_call(anatomy, stack)):
            is_layers = spec.name.partition(".")[0].isdigit()
            name = spec.name if is_alone and not is_layers else f"{stack.name}.{spec.name}"
            yield replace(spec, name=name)
    if anatomy.unembed is not None:
        yield Spec("unembed.hook_in", "b p d", _input(anatomy.unembed))
        yield Spec("unembed.hook_out", "b p V", _output(anatomy.unembed))


def _nth_call(anatomy: Anatomy, stack: Stack) -> int | None:
    """Which call of the embedding is this stack's, if stacks share it."""
    if len({each.embed for each in anatomy.stacks}) == len(anatomy.stacks):
        return None
    return anatomy.stacks.index(stack)


def _stack_points(stack: Stack, nth: int | None) -> Iterator[Spec]:
    width = stack.config.hidden_size
    factor = variants.embedding_factor(stack.config)
    yield Spec("hook_tokens", "b p", _input(stack.embed), only=nth)
    yield Spec("hook_embed", "b p d", _scaled(_output(stack.embed), factor), only=nth)
    if stack.pos_embed is not None:
        rows = _output(stack.embed)
        yield Spec("hook_pos_embed", "b p d", Site(stack.pos_embed, Kind.OUTPUT, EachRow(rows, FIRST), (rows,)))
    else:
        yield Spec("hook_pos_embed", "b p d", why="this model adds no position embedding to the stream")
    for index, block in enumerate(stack.blocks):
        for spec in _block_points(block, stack.config, width):
            yield replace(spec, name=f"{index}.{spec.name}")
    if stack.ln_final is not None:
        yield Spec("ln_final.hook_in", "b p d", _input(stack.ln_final))
        yield from _norm_points("ln_final", stack.ln_final, width)
        yield Spec("ln_final.hook_out", "b p d", _output(stack.ln_final))


def _block_points(block: Block, config: Any, width: int) -> Iterator[Spec]:
    factor = variants.residual_factor(config)
    resid_pre = _input(block.module)
    is_pre_norm = block.post_norm is None and not variants.is_post_norm(config)
    yield Spec("hook_resid_pre", "b p d", resid_pre)
    yield from _copies(block, config, is_pre_norm)
    if is_pre_norm:
        yield from _norm_points("ln1", block.ln1, width)
    yield from _attention_points(block, config)
    yield from _norm_points("ln1_post", block.ln1_post, width)
    attn_out = _attn_out(block, config)
    if attn_out is None:
        yield Spec("hook_attn_out", "b p d", why="no module of this layer gives what its attention adds")
        yield Spec("hook_resid_mid", "b p d", why="no module of this layer gives what its attention adds")
    else:
        yield Spec("hook_attn_out", "b p d", _scaled(attn_out, factor))
        if not is_pre_norm:
            yield from _norm_points("ln1", block.post_norm or block.ln1, width)
        mid = _resid_mid(block, config, resid_pre, _scaled(attn_out, factor))
        yield mid
        yield from _cross_points(block.cross, config, mid.site, is_pre_norm, width)
    before = _norm_points("ln2", block.ln2, width) if is_pre_norm else ()
    mlp_out = Spec("hook_mlp_out", "b p d", _mlp_out(block, config, factor))
    inside = (*_mlp_points(block), *_expert_points(block, resid_pre), *_norm_points("ln2_post", block.ln2_post, width))
    is_flat = config.model_type in variants.ROWS_FLATTENED
    for spec in (_mlp_in(block, config, is_pre_norm), *before, *inside, mlp_out):
        if spec.site is None:
            yield replace(spec, why=spec.why or "this layer has no MLP")
        else:
            is_row = is_flat and spec.axes in ("b p m", "b p d", "b p 1")
            yield replace(spec, site=_by_row(spec.site, resid_pre)) if is_row else spec
    if not is_pre_norm:
        yield from _norm_points("ln2", block.post_norm_2 or block.ln2, width)
    yield Spec("hook_resid_post", "b p d", _output(block.module))


def _cross_points(
    cross: CrossAttention | None, config: Any, resid_mid: Site | None, is_pre_norm: bool, width: int
) -> Iterator[Spec]:
    """A decoder's attention to the encoder, and the stream after it."""
    if cross is None or resid_mid is None:
        return
    if is_pre_norm:
        yield from _norm_points("ln_cross", cross.norm, width)
    yield from _inside_attention("cross_attn", cross.attn, cross.o, config)
    yield from _norm_points("ln_cross_post", cross.post_norm, width)
    out = _output(cross.post_norm if cross.post_norm is not None else cross.attn)
    stream_norm = cross.stream_norm if is_pre_norm or cross.stream_norm is not None else cross.norm
    if cross.stream_norm is not None and cross.o is not None:
        out = _output(cross.o)
    yield Spec("hook_cross_attn_out", "b p d", out)
    if not is_pre_norm:
        yield from _norm_points("ln_cross", stream_norm, width)
    after = _output(stream_norm) if stream_norm is not None else _sum(resid_mid, out)
    yield Spec("hook_resid_mid_cross", "b p d", replace(after, needs=tuple({*after.needs, *resid_mid.needs})))


def _norm_points(name: str, module: nn.Module | None, width: int) -> Iterator[Spec]:
    norm = norm_of(module, width)
    sites = norm_sites(norm) if norm is not None else {}
    why = "this layer has no such norm"
    if not isinstance(module, nn.Identity | None):
        why = f"{type(module).__name__} is no norm of a known form, or has no data"
    for point, axes in (("hook_scale", "b p 1"), ("hook_normalized", "b p d")):
        yield Spec(f"{name}.{point}", axes, sites.get(point), why)


def _copies(block: Block, config: Any, is_pre_norm: bool) -> Iterator[Spec]:
    """The copies of the stream that each head reads, for all it does or for its queries, keys or values."""
    points = {
        "hook_attn_in": "b p h d",
        "hook_q_input": "b p h d",
        "hook_k_input": "b p g d",
        "hook_v_input": "b p g d",
    }
    why = "this layer has no softmax attention"
    sites: dict[str, Site] = {}
    if block.attn is not None:
        heads, groups = head_counts(block.attn, config)
        norm = block.ln1 if is_pre_norm else None
        parts = dict(_projections(block.attn, config, heads, groups))
        stream = _input(norm if norm is not None else block.attn)
        sites = splits(stream, norm, parts, heads, groups)
        why = "keys and values are shared by groups of heads: hook_q_input, hook_k_input and hook_v_input are apart"
        why = why if heads != groups else "queries, keys and values are not all projected from the stream"
    for name, axes in points.items():
        yield Spec(name, axes, sites.get(name), why)


def _mlp_in(block: Block, config: Any, is_pre_norm: bool) -> Spec:
    if block.ln2 is not None and is_pre_norm:
        return Spec("hook_mlp_in", "b p d", _input(block.ln2))
    if variants.is_parallel(config) and block.ln1 is not None and block.mlp is not None:
        stream = _input(block.ln1)
        lens = ThroughNorm(block.ln1, stream, lens_of(block.mlp, Kind.INPUT))
        return Spec("hook_mlp_in", "b p d", Site(block.mlp, Kind.INPUT, lens, (stream,), stage=-1))
    if block.mlp is None and block.mlp_out is None:
        return Spec("hook_mlp_in", "b p d", why="this layer has no MLP")
    return Spec("hook_mlp_in", "b p d", why="what feeds the MLP is the stream itself: hook_resid_mid")


def _expert_points(block: Block, resid_pre: Site) -> Iterator[Spec]:
    mixture = block.mlp if block.mlp is not None else block.mixer
    experts = child(mixture, EXPERTS) if mixture is not None else None
    router = child(mixture, ROUTER) if mixture is not None else None
    if experts is None or router is None:
        for point, axes in (("router", "b p E"), ("expert_weights", "b p K"), ("expert_indices", "b p K")):
            yield Spec(f"mlp.hook_{point}", axes, why="this layer is no mixture of experts")
        return
    yield Spec("mlp.hook_router", "b p E", Site(router, Kind.ROUTER, Rows(resid_pre), (resid_pre,)))
    parameters = getattr(lens_of(experts, Kind.INPUT), "parameters", ())
    for point, word in (("hook_expert_weights", "weights"), ("hook_expert_indices", "ind")):
        name = next((name for name in parameters if word in name), None)
        if name is None:
            yield Spec(f"mlp.{point}", "b p K", why="this layer's experts are not called with it")
        else:
            lens = _chain(lens_of(experts, Kind.INPUT, (name,)), Rows(resid_pre))
            yield Spec(f"mlp.{point}", "b p K", Site(experts, Kind.INPUT, lens, (resid_pre,)))


def _attn_out(block: Block, config: Any) -> Site | None:
    """What the attention adds to the stream."""
    if block.ln1_post is not None:
        return _output(block.ln1_post)
    if block.adds_in_attention or config.model_type in variants.RESIDUAL_IN_ATTENTION:
        return _output(block.o) if block.o is not None else None
    mixer = block.attn or block.mixer
    return _output(mixer) if mixer is not None else None


def _resid_mid(block: Block, config: Any, resid_pre: Site, attn_out: Site) -> Spec:
    """The stream between attention and MLP."""
    if variants.is_parallel(config):
        return Spec("hook_resid_mid", "b p d", why="attention and MLP are side by side: there is no stream in between")
    if block.mlp is None and block.mlp_out is None:
        return Spec("hook_resid_mid", "b p d", why="this layer has no MLP")
    norm = block.post_norm or (block.ln1 if variants.is_post_norm(config) else None)
    return Spec("hook_resid_mid", "b p d", _output(norm) if norm is not None else _sum(resid_pre, attn_out))


def _mlp_out(block: Block, config: Any, factor: float) -> Site | None:
    """What the MLP adds to the stream."""
    if config.model_type in variants.SEVERAL_MLPS and block.ln2 is not None:
        stream = _input(block.ln2)
        return Site(block.module, Kind.OUTPUT, Difference(stream, FIRST), needs=(stream,), stage=-1)
    if block.ln2_post is not None:
        return _scaled(_output(block.ln2_post), factor)
    if block.mlp is None or config.model_type in variants.RESIDUAL_IN_MLP:
        return _scaled(_output(block.mlp_out), factor) if block.mlp_out is not None else None
    return _scaled(_output(block.mlp), factor)


def _attention_points(block: Block, config: Any) -> Iterator[Spec]:
    if block.attn is not None:
        yield from _inside_attention("attn", block.attn, block.o, config)
        return
    for name, axes in _ATTENTION_AXES.items():
        yield Spec(f"attn.hook_{name}", axes, why="this layer has no softmax attention")


def _inside_attention(prefix: str, attn: nn.Module, o: nn.Module | None, config: Any) -> Iterator[Spec]:
    yield Spec(f"{prefix}.hook_in", "b p d", _input(attn))
    heads, groups = head_counts(attn, config)
    sites = dict(_projections(attn, config, heads, groups))
    key = Site(attn, Kind.KEY, HeadsFirst(groups))
    sites["rot_q"], sites["rot_k"] = Site(attn, Kind.QUERY, HeadsFirst(heads)), key
    keys = (key,) if config.model_type in variants.SINKS else ()
    sites["attn_scores"] = Site(attn, Kind.SCORES, Keys(heads, *keys), needs=keys)
    sites["pattern"] = Site(attn, Kind.PATTERN, Keys(heads, *keys), needs=keys)
    if o is not None:
        sites["z"] = _input(o, Heads(heads))
        sites["result"] = result_site(o, sites["z"])
    for name, axes in _ATTENTION_AXES.items():
        yield Spec(f"{prefix}.hook_{name}", axes, sites.get(name), "this attention has no projection of that kind")


def head_counts(attn: nn.Module, config: Any) -> tuple[int, int]:
    """Query heads, and key/value heads."""
    heads = _first_int(attn, "num_heads", "num_attention_heads", "n_head", "n_heads") or config.num_attention_heads
    key, size = child(attn, KEY), getattr(attn, "head_dim", None)
    if isinstance(size, int) and key is not None and (width := _width(key)) is not None:
        return heads, width // size
    if config.model_type == "gpt_bigcode":
        return heads, 1 if config.multi_query else heads
    if config.model_type == "falcon":
        return heads, config.num_kv_heads if config.new_decoder_architecture or not config.multi_query else 1
    return heads, getattr(config, "num_key_value_heads", None) or heads


def _first_int(module: nn.Module, *names: str) -> int | None:
    values = (getattr(module, name, None) for name in names)
    return next((value for value in values if isinstance(value, int)), None)


def _projections(attn: nn.Module, config: Any, heads: int, groups: int) -> Iterator[tuple[str, Site]]:
    for name, names, n in (("q", QUERY, heads), ("k", KEY, groups), ("v", VALUE, groups)):
        module = child(attn, names)
        width = _width(module) if module is not None else None
        if module is not None and name == "q" and width and config.model_type in variants.GATE_IN_QUERY:
            yield name, _output(module, Heads(n), Part(0, width // n // 2))
        elif module is not None:
            yield name, _output(module, Heads(n))
    fused = child(attn, FUSED)
    width = _width(fused) if fused is not None else None
    if fused is not None and width is not None:
        for index, name in enumerate("qkv"):
            yield name, _output(fused, *_fused_lens(width, config, heads, groups, index))


def _fused_lens(width: int, config: Any, heads: int, groups: int, index: int) -> tuple[Lens, ...]:
    if config.model_type in variants.FUSED_BY_HEAD and heads == groups:
        return (Interleaved(heads, 3, index, heads),)
    if config.model_type == "codegen":  # query, value, key, for each of four groups of heads
        return (Interleaved(4, 3, (0, 2, 1)[index], heads),)
    size = width // (heads + 2 * groups)
    starts = [0, heads * size, (heads + groups) * size, (heads + 2 * groups) * size]
    return Part(starts[index], starts[index + 1]), Heads(heads if index == 0 else groups)


def _width(module: nn.Module) -> int | None:
    """How many numbers a linear module gives; None if it is no linear module.

    Not read off the weight: GPT-2's has it the other way round, a quantised one packed, or as a method.
    """
    while (inside := module._modules.get("base_layer")) is not None:  # peft's adapters are around the module they adapt
        module = inside
    return _first_int(module, "out_features", "nf")


def _mlp_points(block: Block) -> Iterator[Spec]:
    mlp = block.mlp or block.module
    into, linear, out = child(mlp, MLP_IN), child(mlp, MLP_LINEAR), block.mlp_out
    if block.mlp is not None:
        yield Spec("mlp.hook_in", "b p d", _input(block.mlp))
    if out is None or into is None:
        has_experts = block.mlp is not None and child(block.mlp, EXPERTS) is not None
        why = "each expert has its own" if has_experts else "no linear map into or out of an MLP is known here"
        for point in ("hook_pre", "hook_pre_linear", "hook_post"):
            yield Spec(f"mlp.{point}", "b p m", why=why)
        return
    gate = _output(linear) if linear is not None and linear is not into else None
    yield Spec("mlp.hook_pre", "b p m", _output(into))
    yield Spec("mlp.hook_pre_linear", "b p m", gate, "this MLP has no gate")
    yield Spec("mlp.hook_post", "b p m", _input(out))


def _input(module: nn.Module, *lenses: Lens) -> Site:
    return Site(module, Kind.INPUT, _chain(lens_of(module, Kind.INPUT), *lenses))


def _output(module: nn.Module, *lenses: Lens) -> Site:
    return Site(module, Kind.OUTPUT, _chain(FIRST, *lenses))


def _chain(*lenses: Lens) -> Lens:
    return lenses[0] if len(lenses) == 1 else Chain(lenses)


def _scaled(site: Site, factor: float) -> Site:
    return site if factor == 1.0 else replace(site, lens=_chain(site.lens, Scaled(factor)))


def _sum(base: Site, added: Site) -> Site:
    return Site(added.module, added.kind, Added(base, added.lens), needs=(base,), stage=added.stage + 1)


def _by_row(site: Site, like: Site) -> Site:
    return replace(site, lens=_chain(site.lens, Rows(like)), needs=(like, *site.needs))
