"""The sites of the classic points: for each point, a module event and a lens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Self

from torch import nn

from hookline.engine.derived import Added, Difference, ExpandBatch, Keys, MergeTiles, Unflatten
from hookline.engine.lenses import FIRST, Chain, Lens
from hookline.engine.names import lens_of
from hookline.engine.order import Kind
from hookline.engine.points import Site
from hookline.transformer.architectures import (
    architecture,
    embedding_factor,
    is_parallel,
    is_post_norm,
    residual_factor,
)
from hookline.transformer.attention import AttentionTap
from hookline.transformer.layout_lenses import Heads, HeadsFirst, Interleaved, Slice, Times, TimesParameter
from hookline.transformer.norms import norm_of, norm_sites
from hookline.transformer.per_head import ThroughNorm, per_head_inputs, result_site
from hookline.transformer.point_table import POINTS, PointRow, inside
from hookline.transformer.roles import (
    EXPERTS,
    FUSED,
    KEY,
    MLP_IN,
    MLP_LINEAR,
    QUERY,
    ROUTER,
    VALUE,
    Block,
    Stack,
    child,
)
from hookline.transformer.router import RouterTap, choices_of


@dataclass(frozen=True)
class PointSpec:
    """A point of the table on one model: its site, or the reason why it is not available."""

    name: str
    row: PointRow
    site: Site | None = None
    why: str = ""
    only: int | None = None
    """The index of the call, if the module is called several times per forward pass."""

    @classmethod
    def of(cls, name: str, site: Site | None = None, why: str = "", only: int | None = None) -> Self:
        """The point with that name in the table."""
        return cls(name, POINTS[name], site, why, only)

    @property
    def axes(self) -> str:
        """The axes, one letter each."""
        return self.row.axes

    @property
    def is_on_request(self) -> bool:
        """Whether it is recorded only if requested by name."""
        return self.row.on_request

    def missing(self, why: str) -> PointSpec:
        """The same point as unavailable, with a reason."""
        return replace(self, site=None, why=why)


def entry_points(stack: Stack, nth: int | None) -> Iterator[PointSpec]:
    """The points before the first layer; `nth` is this stack's call of the embedding, if stacks share it."""
    factor = embedding_factor(stack.config)
    if isinstance(stack.embed, nn.Conv1d):
        for point in ("hook_tokens", "hook_embed"):
            yield PointSpec.of(point, why="the input is audio, embedded by convolutions that have native names")
    else:
        yield PointSpec.of("hook_tokens", input_of(stack.embed), only=nth)
        last = stack.embed if stack.embed_norm is None else stack.embed_norm
        yield PointSpec.of("hook_embed", _times(output_of(last), factor), only=nth)
    if stack.pos_embed is not None:
        rows = output_of(stack.embed)
        yield PointSpec.of("hook_pos_embed", Site(stack.pos_embed, Kind.OUTPUT, ExpandBatch(rows, FIRST), (rows,)))
    else:
        yield PointSpec.of("hook_pos_embed", why="this model adds no position embedding to the stream")


def layer_points(stack: Stack) -> Iterator[PointSpec]:
    """The points of all layers, named by layer index."""
    for index, block in enumerate(stack.blocks):
        for spec in _with_own_sites(_block_points(block, stack.config, stack.width), block, stack.config):
            yield replace(spec, name=f"{index}.{spec.name}")


def _with_own_sites(specs: Iterator[PointSpec], block: Block, config: Any) -> Iterator[PointSpec]:
    """Insert the points whose rows have their own `site`, each after the point that its row names."""
    for spec in specs:
        yield spec
        for row in POINTS.values():
            if row.site is not None and row.after == spec.name:
                found = row.site(block, config)
                yield PointSpec.of(row.name, why=found) if isinstance(found, str) else PointSpec.of(row.name, found)


def final_points(stack: Stack) -> Iterator[PointSpec]:
    """The final norm, with its input and output."""
    if stack.ln_final is not None:
        yield PointSpec.of("ln_final.hook_in", input_of(stack.ln_final))
        yield from norm_points("ln_final", stack.ln_final, stack.width)
        yield PointSpec.of("ln_final.hook_out", output_of(stack.ln_final))


def _block_points(block: Block, config: Any, width: int) -> Iterator[PointSpec]:
    factor = residual_factor(config)
    resid_pre = input_of(block.module)
    is_pre_norm = block.post_norm is None and not is_post_norm(config)
    yield PointSpec.of("hook_resid_pre", resid_pre)
    yield from _copies(block, config, is_pre_norm)
    if is_pre_norm:
        yield from norm_points("ln1", block.ln1, width)
    yield from _attention_points(block, config)
    yield from norm_points("ln1_post", block.ln1_post, width)
    attn_out = _attn_out(block, config)
    if attn_out is None:
        only = "this layer has cross-attention only: hook_cross_attn_out, hook_resid_mid_cross"
        why = only if block.cross is not None else "no module of this layer returns the attention output"
        yield PointSpec.of("hook_attn_out", why=why)
        yield PointSpec.of("hook_resid_mid", why=why)
        yield from _cross_points(block, config, resid_pre, is_pre_norm, width)
    else:
        yield PointSpec.of("hook_attn_out", _times(attn_out, factor))
        if not is_pre_norm:
            yield from norm_points("ln1", block.post_norm or block.ln1, width)
        mid = _resid_mid(block, config, resid_pre, _times(attn_out, factor))
        yield mid
        yield from _cross_points(block, config, mid.site, is_pre_norm, width)
    before = norm_points("ln2", block.ln2, width) if is_pre_norm else ()
    mlp_out = PointSpec.of("hook_mlp_out", _mlp_out(block, config, factor))
    within = (*_mlp_points(block), *_expert_points(block, resid_pre), *norm_points("ln2_post", block.ln2_post, width))
    is_flat = architecture(config.model_type).flattened_rows
    for spec in (_mlp_in(block, config, is_pre_norm), *before, *within, mlp_out):
        if spec.site is None:
            yield replace(spec, why=spec.why or "this layer has no MLP")
        else:
            is_row = is_flat and spec.axes in ("b p m", "b p d", "b p 1")
            yield replace(spec, site=_by_row(spec.site, resid_pre)) if is_row else spec
    if not is_pre_norm:
        yield from norm_points("ln2", block.post_norm_2 or block.ln2, width)
    yield PointSpec.of("hook_resid_post", output_of(block.module))


def _cross_points(
    block: Block, config: Any, resid_mid: Site | None, is_pre_norm: bool, width: int
) -> Iterator[PointSpec]:
    """The points of cross-attention to an encoder or to images, and the stream after it."""
    cross = block.cross
    if cross is None or resid_mid is None:
        return
    if is_pre_norm:
        yield from norm_points("ln_cross", cross.norm, width)
    for spec in _inside_attention("cross_attn", cross.attn, cross.o, config):
        is_apart = architecture(config.model_type).separate_tiles and spec.name.endswith(("hook_k", "hook_v"))
        yield replace(spec, site=_merge_tiles(spec.site, resid_mid)) if is_apart and spec.site is not None else spec
    yield from norm_points("ln_cross_post", cross.post_norm, width)
    out = output_of(cross.post_norm if cross.post_norm is not None else cross.attn)
    stream_norm = cross.stream_norm if is_pre_norm or cross.stream_norm is not None else cross.norm
    if cross.stream_norm is not None and cross.o is not None:
        out = output_of(cross.o)
    out = _times_parameter(out, block, 0) if block.attn is None else out
    yield PointSpec.of("hook_cross_attn_out", out)
    if not is_pre_norm:
        yield from norm_points("ln_cross", stream_norm, width)
    after = output_of(stream_norm) if stream_norm is not None else _sum(resid_mid, out)
    yield PointSpec.of("hook_resid_mid_cross", replace(after, needs=tuple({*after.needs, *resid_mid.needs})))


def norm_points(name: str, module: nn.Module | None, width: int) -> Iterator[PointSpec]:
    """The points inside a norm."""
    norm = norm_of(module, width)
    sites = norm_sites(norm) if norm is not None else {}
    why = "this layer has no such norm"
    if not isinstance(module, nn.Identity | None):
        why = f"{type(module).__name__} is not a norm of a known form, or has no data"
    for point in ("hook_scale", "hook_normalized"):
        yield PointSpec.of(f"{name}.{point}", sites.get(point), why)


def _copies(block: Block, config: Any, is_pre_norm: bool) -> Iterator[PointSpec]:
    """The per-head inputs: `hook_attn_in`, `hook_q_input`, `hook_k_input`, `hook_v_input`."""
    why = "this layer has no softmax attention"
    sites: dict[str, Site] = {}
    if block.attn is not None:
        heads, groups = head_counts(block.attn, config)
        norm = block.ln1 if is_pre_norm else None
        parts = dict(_projections(block.attn, config, heads, groups))
        stream = input_of(norm if norm is not None else block.attn)
        sites = per_head_inputs(stream, norm, parts, heads, groups)
        why = "heads share keys and values: use hook_q_input, hook_k_input and hook_v_input"
        why = why if heads != groups else "queries, keys and values are not all projected from the stream"
    for name in ("hook_attn_in", "hook_q_input", "hook_k_input", "hook_v_input"):
        yield PointSpec.of(name, sites.get(name), why)


def _mlp_in(block: Block, config: Any, is_pre_norm: bool) -> PointSpec:
    if block.ln2 is not None and is_pre_norm:
        return PointSpec.of("hook_mlp_in", input_of(block.ln2))
    if is_parallel(config) and block.ln1 is not None and block.mlp is not None:
        stream = input_of(block.ln1)
        lens = ThroughNorm(block.ln1, stream, lens_of(block.mlp, Kind.INPUT))
        return PointSpec.of("hook_mlp_in", Site(block.mlp, Kind.INPUT, lens, (stream,), stage=-1))
    if block.mlp is None and block.mlp_out is None:
        return PointSpec.of("hook_mlp_in", why="this layer has no MLP")
    return PointSpec.of("hook_mlp_in", why="the MLP reads the stream itself: hook_resid_mid")


def _expert_points(block: Block, resid_pre: Site) -> Iterator[PointSpec]:
    mixture = block.mlp if block.mlp is not None else block.mixer
    experts = child(mixture, EXPERTS) if mixture is not None else None
    router = child(mixture, ROUTER) if mixture is not None else None
    if experts is None or router is None:
        for point in ("router", "expert_weights", "expert_indices"):
            yield PointSpec.of(f"mlp.hook_{point}", why="this layer is not a mixture of experts")
        return
    yield PointSpec.of(
        "mlp.hook_router", Site(router, Kind.ROUTER, Unflatten(resid_pre), (resid_pre,), tap_type=RouterTap)
    )
    parameters = getattr(lens_of(experts, Kind.INPUT), "parameters", ())
    for point, word in (("hook_expert_weights", "weights"), ("hook_expert_indices", "ind")):
        name = next((name for name in parameters if word in name), None)
        if name is None:
            yield PointSpec.of(f"mlp.{point}", why="the experts of this layer do not take it as an argument")
        else:
            lens = chained(lens_of(experts, Kind.INPUT, (name,)), Unflatten(resid_pre))
            choices = choices_of(experts) if point == "hook_expert_indices" else None
            yield PointSpec.of(f"mlp.{point}", Site(experts, Kind.INPUT, lens, (resid_pre,), choices=choices))


def _attn_out(block: Block, config: Any) -> Site | None:
    """The site of `hook_attn_out`."""
    if block.ln1_post is not None:
        return output_of(block.ln1_post)
    if block.adds_in_attention or architecture(config.model_type).residual_in_attention:
        return output_of(block.o) if block.o is not None else None
    mixer = block.attn or block.mixer
    return _times_parameter(output_of(mixer), block, 0) if mixer is not None else None


def _resid_mid(block: Block, config: Any, resid_pre: Site, attn_out: Site) -> PointSpec:
    """`hook_resid_mid`, the stream between attention and MLP."""
    if is_parallel(config):
        return PointSpec.of("hook_resid_mid", why="attention and MLP are parallel: there is no stream in between")
    if block.mlp is None and block.mlp_out is None:
        return PointSpec.of("hook_resid_mid", why="this layer has no MLP")
    norm = block.post_norm or (block.ln1 if is_post_norm(config) else None)
    return PointSpec.of("hook_resid_mid", output_of(norm) if norm is not None else _sum(resid_pre, attn_out))


def _mlp_out(block: Block, config: Any, factor: float) -> Site | None:
    """The site of `hook_mlp_out`."""
    is_more = architecture(config.model_type).several_mlps or (block.attn is None and block.gains is not None)
    if is_more and block.ln2 is not None:  # the sum of several modules, or masked where there is no image to attend to
        stream = input_of(block.ln2)
        return Site(block.module, Kind.OUTPUT, Difference(stream, FIRST), needs=(stream,), stage=-1)
    if block.ln2_post is not None:
        return _times(output_of(block.ln2_post), factor)
    if block.mlp is None or architecture(config.model_type).residual_in_mlp:
        return _times(output_of(block.mlp_out), factor) if block.mlp_out is not None else None
    return _times_parameter(_times(output_of(block.mlp), factor), block, 1)


def _attention_points(block: Block, config: Any) -> Iterator[PointSpec]:
    if block.attn is not None:
        yield from _inside_attention("attn", block.attn, block.o, config)
        return
    for name in inside("attn"):
        yield PointSpec.of(f"attn.hook_{name}", why="this layer has no softmax attention")


def _inside_attention(prefix: str, attn: nn.Module, o: nn.Module | None, config: Any) -> Iterator[PointSpec]:
    yield PointSpec.of(f"{prefix}.hook_in", input_of(attn))
    heads, groups = head_counts(attn, config)
    sites = dict(_projections(attn, config, heads, groups))
    key = _inner(attn, Kind.KEY, HeadsFirst(groups))
    sites["rot_q"], sites["rot_k"] = _inner(attn, Kind.QUERY, HeadsFirst(heads)), key
    keys = (key,) if architecture(config.model_type).attention_sinks else ()
    sites["attn_scores"] = _inner(attn, Kind.SCORES, Keys(heads, *keys), keys)
    sites["pattern"] = _inner(attn, Kind.PATTERN, Keys(heads, *keys), keys)
    if o is not None:
        sites["z"] = input_of(o, Heads(heads))
        sites["result"] = result_site(o, sites["z"])
    for name in inside(prefix):
        yield PointSpec.of(f"{prefix}.hook_{name}", sites.get(name), "this attention has no such projection")


def _inner(attn: nn.Module, kind: Kind, lens: Lens, needs: tuple[Site, ...] = ()) -> Site:
    """A site inside an attention module."""
    return Site(attn, kind, lens, needs, tap_type=AttentionTap)


def head_counts(attn: nn.Module, config: Any) -> tuple[int, int]:
    """The numbers of query heads and key/value heads."""
    heads = _first_int(attn, "num_heads", "num_attention_heads", "n_head", "n_heads") or config.num_attention_heads
    key, size = child(attn, KEY), getattr(attn, "head_dim", None)
    if isinstance(size, int) and key is not None and (width := _width(key)) is not None:
        return heads, width // size
    groups = architecture(config.model_type).kv_heads
    return heads, groups(config) if groups is not None else getattr(config, "num_key_value_heads", None) or heads


def _first_int(module: nn.Module, *names: str) -> int | None:
    values = (getattr(module, name, None) for name in names)
    return next((value for value in values if isinstance(value, int)), None)


def _projections(attn: nn.Module, config: Any, heads: int, groups: int) -> Iterator[tuple[str, Site]]:
    for name, names, n in (("q", QUERY, heads), ("k", KEY, groups), ("v", VALUE, groups)):
        module = child(attn, names)
        width = _width(module) if module is not None else None
        if module is not None and name == "q" and width and architecture(config.model_type).gate_in_query:
            yield name, output_of(module, Heads(n), Slice(0, width // n // 2))
        elif module is not None:
            yield name, output_of(module, Heads(n))
    fused = child(attn, FUSED)
    width = _width(fused) if fused is not None else None
    if fused is not None and width is not None:
        for index, name in enumerate("qkv"):
            yield name, output_of(fused, *_fused_lens(width, config, heads, groups, index))


def _fused_lens(width: int, config: Any, heads: int, groups: int, index: int) -> tuple[Lens, ...]:
    if architecture(config.model_type).fused_by_head and heads == groups:
        return (Interleaved(heads, 3, index, heads),)
    if (of := architecture(config.model_type).fused_groups) is not None:
        return (Interleaved(of, 3, (0, 2, 1)[index], heads),)
    size = width // (heads + 2 * groups)
    starts = [0, heads * size, (heads + groups) * size, (heads + 2 * groups) * size]
    return Slice(starts[index], starts[index + 1]), Heads(heads if index == 0 else groups)


def _width(module: nn.Module) -> int | None:
    """The output width of a linear module; None for any other module.

    Not taken from the weight, which GPT-2 transposes and quantized modules pack.
    """
    while (inside := module._modules.get("base_layer")) is not None:  # peft adapters wrap the module
        module = inside
    return _first_int(module, "out_features", "nf")


def _mlp_points(block: Block) -> Iterator[PointSpec]:
    mlp = block.mlp or block.module
    into, linear, out = child(mlp, MLP_IN), child(mlp, MLP_LINEAR), block.mlp_out
    if block.mlp is not None:
        yield PointSpec.of("mlp.hook_in", input_of(block.mlp))
    if out is None or into is None:
        has_experts = block.mlp is not None and child(block.mlp, EXPERTS) is not None
        why = "each expert has its own" if has_experts else "the linear layers of this MLP are not known"
        for point in ("hook_pre", "hook_pre_linear", "hook_post"):
            yield PointSpec.of(f"mlp.{point}", why=why)
        return
    gate = output_of(linear) if linear is not None and linear is not into else None
    yield PointSpec.of("mlp.hook_pre", output_of(into))
    yield PointSpec.of("mlp.hook_pre_linear", gate, "this MLP has no gate")
    yield PointSpec.of("mlp.hook_post", input_of(out))


def input_of(module: nn.Module, *lenses: Lens) -> Site:
    """The site of a module's input, through lenses."""
    return Site(module, Kind.INPUT, chained(lens_of(module, Kind.INPUT), *lenses))


def output_of(module: nn.Module, *lenses: Lens) -> Site:
    """The site of a module's output, through lenses."""
    return Site(module, Kind.OUTPUT, chained(FIRST, *lenses))


def chained(*lenses: Lens) -> Lens:
    """The composition of lenses."""
    return lenses[0] if len(lenses) == 1 else Chain(lenses)


def _times(site: Site, factor: float) -> Site:
    return site if factor == 1.0 else replace(site, lens=chained(site.lens, Times(factor)))


def _times_parameter(site: Site, block: Block, which: int) -> Site:
    """The site of an output that the layer multiplies by a parameter before adding it to the stream."""
    if block.gains is None:
        return site
    return replace(site, lens=chained(site.lens, TimesParameter(block.module, block.gains[which])))


def _sum(base: Site, added: Site) -> Site:
    return Site(added.module, added.kind, Added(base, added.lens), needs=(base,), stage=added.stage + 1)


def _merge_tiles(site: Site, like: Site) -> Site:
    return replace(site, lens=chained(site.lens, MergeTiles(like)), needs=(like, *site.needs))


def _by_row(site: Site, like: Site) -> Site:
    return replace(site, lens=chained(site.lens, Unflatten(like)), needs=(like, *site.needs))
