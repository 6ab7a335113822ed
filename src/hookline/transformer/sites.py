"""The sites of the classic points of a layer: for each point, a module event and a lens, or why there is none."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Self

from torch import nn

from hookline.engine import FIRST, Kind, Lens, Site, attention, chained, lens_of, sharding
from hookline.transformer import roles
from hookline.transformer.anatomy import Block, Stack
from hookline.transformer.architectures import architecture
from hookline.transformer.experts import choices_of
from hookline.transformer.layout_lenses import (
    Added,
    Difference,
    ExpandBatch,
    Heads,
    HeadsFirst,
    Interleaved,
    Keys,
    MergeTiles,
    Slice,
    Times,
    TimesParameter,
    Unflatten,
)
from hookline.transformer.norms import norm_of, norm_sites
from hookline.transformer.per_head import HeadResult, ThroughNorm, per_head_inputs
from hookline.transformer.point_table import POINTS, PointRow, inside
from hookline.transformer.roles import child


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
    def of(cls, name: str, site_or_reason: Site | str | None, why: str = "", only: int | None = None) -> Self:
        """The point with that name in the table: at a site, or unavailable for a reason."""
        if isinstance(site_or_reason, str):
            return cls(name, POINTS[name], None, site_or_reason, only)
        return cls(name, POINTS[name], site_or_reason, why, only)

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
    tokens: Site | str = "no module embeds the tokens of a text: those that embed the input have native names"
    embed = tokens
    if not isinstance(stack.embed, nn.Conv1d | nn.ModuleList | None):
        tokens = input_of(stack.embed)
        embed = _times(output_of(stack.embed_norm or stack.embed), stack.architecture.embedding_factor)
    yield PointSpec.of("hook_tokens", tokens, only=nth)
    yield PointSpec.of("hook_embed", embed, only=nth)
    added: Site | str = "this model adds no position embedding to the stream"
    if stack.pos_embed is not None and stack.embed is not None:
        added = position_site(stack.pos_embed, output_of(stack.embed))
    yield PointSpec.of("hook_pos_embed", added)


def position_site(module: nn.Module, embedded: Site) -> Site:
    """The site of `hook_pos_embed`, with as many rows as there are embeddings."""
    return output_of(module, ExpandBatch((embedded,)))


def layer_points(stack: Stack) -> Iterator[PointSpec]:
    """The points of all layers, named by layer index."""
    rows_with_site = [row for row in POINTS.values() if row.site is not None]
    for index, block in enumerate(stack.blocks):
        for spec in LayerSites(block, stack).points():
            yield replace(spec, name=f"{index}.{spec.name}")
            # Points whose rows have their own `site`, each after the point that its row names.
            for row in rows_with_site:
                if row.site is not None and row.after == spec.name:
                    row_spec = PointSpec.of(row.name, row.site(block, stack.config))
                    yield replace(row_spec, name=f"{index}.{row.name}")


def final_points(stack: Stack) -> Iterator[PointSpec]:
    """The final norm, with its input and output."""
    if stack.ln_final is not None:
        only = 0 if stack.architecture.pools_with_norm else None
        yield PointSpec.of("ln_final.hook_in", input_of(stack.ln_final), only=only)
        for spec in norm_points("ln_final", stack.ln_final, stack.width):
            yield replace(spec, only=only)
        yield PointSpec.of("ln_final.hook_out", output_of(stack.ln_final), only=only)


def norm_points(name: str, module: nn.Module | None, width: int) -> Iterator[PointSpec]:
    """The points inside a norm."""
    norm = norm_of(module, width)
    sites = norm_sites(norm) if norm is not None else {}
    why = "this layer has no such norm"
    if not isinstance(module, nn.Identity | None):
        why = f"{type(module).__name__} is not a norm of a known form, or has no data"
    for point in ("hook_scale", "hook_normalized"):
        yield PointSpec.of(f"{name}.{point}", sites.get(point), why)


class LayerSites:
    """The sites of the points of one layer."""

    def __init__(self, block: Block, stack: Stack) -> None:
        self.block, self.config, self.width = block, stack.config, stack.width
        self.architecture = stack.architecture
        self.is_pre_norm = block.post_norm is None and not self.architecture.post_norm
        self.resid_pre = input_of(block.module)

    def points(self) -> Iterator[PointSpec]:
        """All points, in the order in which they fire."""
        block = self.block
        yield PointSpec.of("hook_resid_pre", self.resid_pre)
        yield from self._per_head_inputs()
        yield from self._norm("ln1", block.ln1, is_before=True)
        if block.attn is not None:
            yield from _inside_attention("attn", block.attn, block.o, self.config)
        else:
            for name in inside("attn"):
                yield PointSpec.of(f"attn.hook_{name}", "this layer has no softmax attention")
        yield from norm_points("ln1_post", block.ln1_post, self.width)
        attn_out = self._attn_out()
        yield PointSpec.of("hook_attn_out", attn_out)
        mid: Site | str = attn_out
        if isinstance(attn_out, Site):
            yield from self._norm("ln1", block.post_norm or block.ln1, is_before=False)
            mid = self._resid_mid(attn_out)
        yield PointSpec.of("hook_resid_mid", mid)
        yield from self._cross_points(mid if isinstance(attn_out, Site) else self.resid_pre)
        yield from self._mlp_points()
        yield from self._norm("ln2", block.post_norm_2 or block.ln2, is_before=False)
        yield PointSpec.of("hook_resid_post", output_of(block.module))

    def _norm(self, name: str, module: nn.Module | None, *, is_before: bool) -> Iterator[PointSpec]:
        """The points of a norm before attention or MLP, or after the addition to the stream (post-norm models)."""
        if is_before == self.is_pre_norm:
            yield from norm_points(name, module, self.width)

    def _per_head_inputs(self) -> Iterator[PointSpec]:
        """`hook_attn_in`, `hook_q_input`, `hook_k_input` and `hook_v_input`."""
        why = "this layer has no softmax attention"
        sites: dict[str, Site] = {}
        if (attn := self.block.attn) is not None:
            heads, groups = head_counts(attn, self.config)
            norm = self.block.ln1 if self.is_pre_norm else None
            stream = input_of(norm if norm is not None else attn)
            sites = per_head_inputs(stream, norm, _projections(attn, self.config, heads, groups), heads, groups)
            why = "queries, keys and values are not all projected from the stream"
            if heads != groups:
                why = "heads share keys and values: use hook_q_input, hook_k_input and hook_v_input"
        for name in ("hook_attn_in", "hook_q_input", "hook_k_input", "hook_v_input"):
            yield PointSpec.of(name, sites.get(name), why)

    def _attn_out(self) -> Site | str:
        block, mixer = self.block, self.block.attn or self.block.mixer
        if block.ln1_post is not None:
            site: Site | None = output_of(block.ln1_post)
        elif block.adds_in_attention or self.architecture.residual_in_attention:
            site = output_of(block.o) if block.o is not None else None
        else:
            site = _times_parameter(output_of(mixer), block, 0) if mixer is not None else None
        if site is not None:
            return _times(site, self.architecture.residual_factor)
        if block.cross is not None:
            return "this layer has cross-attention only: hook_cross_attn_out, hook_resid_mid_cross"
        return "no module of this layer returns the attention output"

    def _resid_mid(self, attn_out: Site) -> Site | str:
        """The stream between attention and MLP."""
        if self.architecture.parallel:
            return "attention and MLP are parallel: there is no stream in between"
        if not self.block.has_mlp:
            return "this layer has no MLP"
        if self.architecture.attends_apart or getattr(self.block.module, "window_size", 0):
            return "attention runs on windows or frames, and its output has other axes than the stream"
        norm = self.block.post_norm or (self.block.ln1 if self.architecture.post_norm else None)
        return output_of(norm) if norm is not None else _sum(self.resid_pre, attn_out)

    def _cross_points(self, resid_mid: Site | str) -> Iterator[PointSpec]:
        """The points of cross-attention to an encoder or to images, and the stream after it."""
        cross = self.block.cross
        if cross is None or isinstance(resid_mid, str):
            return
        yield from self._norm("ln_cross", cross.norm, is_before=True)
        for spec in _inside_attention("cross_attn", cross.attn, cross.o, self.config):
            is_apart = self.architecture.separate_tiles and spec.name.endswith(("hook_k", "hook_v"))
            yield _through(spec, MergeTiles((resid_mid,))) if is_apart else spec
        yield from norm_points("ln_cross_post", cross.post_norm, self.width)
        out = output_of(cross.post_norm or cross.attn)
        if cross.stream_norm is not None and cross.o is not None:
            out = output_of(cross.o)
        if self.block.attn is None:
            out = _times_parameter(out, self.block, 0)
        yield PointSpec.of("hook_cross_attn_out", out)
        stream_norm = cross.stream_norm or (None if self.is_pre_norm else cross.norm)
        yield from self._norm("ln_cross", stream_norm, is_before=False)
        after = output_of(stream_norm) if stream_norm is not None else _sum(resid_mid, out)
        yield PointSpec.of("hook_resid_mid_cross", after)

    def _mlp_points(self) -> Iterator[PointSpec]:
        """The points of the MLP and its norms; all unavailable if there is no MLP."""
        for spec in (
            PointSpec.of("hook_mlp_in", self._mlp_in()),
            *self._norm("ln2", self.block.ln2, is_before=True),
            *self._inside_mlp(),
            *self._expert_points(),
            *norm_points("ln2_post", self.block.ln2_post, self.width),
            PointSpec.of("hook_mlp_out", self._mlp_out(), "this layer has no MLP"),
        ):
            is_flat = self.architecture.flattened_rows and spec.axes in ("b p m", "b p d", "b p 1")
            yield _through(spec, Unflatten((self.resid_pre,))) if is_flat else spec

    def _mlp_in(self) -> Site | str:
        block = self.block
        if block.ln2 is not None and self.is_pre_norm:
            return input_of(block.ln2)
        if self.architecture.parallel and block.ln1 is not None and block.mlp is not None:
            stream = input_of(block.ln1)
            lens = ThroughNorm(block.ln1, (stream,), lens_of(block.mlp, Kind.INPUT))
            return Site(block.mlp, Kind.INPUT, lens, stage=-1)
        return "the MLP reads the stream itself: hook_resid_mid" if block.has_mlp else "this layer has no MLP"

    def _inside_mlp(self) -> Iterator[PointSpec]:
        block = self.block
        mlp = block.mlp or block.module
        into, linear, out = child(mlp, roles.MLP_IN), child(mlp, roles.MLP_LINEAR), block.mlp_out
        if block.mlp is not None:
            yield PointSpec.of("mlp.hook_in", input_of(block.mlp))
        sites: dict[str, Site] = {}
        why = "the linear layers of this MLP are not known"
        if out is not None and into is not None:
            sites = {"hook_pre": output_of(into), "hook_post": input_of(out)}
            why = "this MLP has no gate"
            if linear is not None and linear is not into:
                sites["hook_pre_linear"] = output_of(linear)
        elif block.mlp is not None and child(block.mlp, roles.EXPERTS) is not None:
            why = "each expert has its own"
        for point in ("hook_pre", "hook_pre_linear", "hook_post"):
            yield PointSpec.of(f"mlp.{point}", sites.get(point), why)

    def _expert_points(self) -> Iterator[PointSpec]:
        mixture = self.block.mlp or self.block.mixer
        experts = child(mixture, roles.EXPERTS) if mixture is not None else None
        router = child(mixture, roles.ROUTER) if mixture is not None else None
        rows = Unflatten((self.resid_pre,))
        sites: dict[str, Site] = {}
        why = "this layer is not a mixture of experts"
        if experts is not None and router is not None:
            sites["hook_router"] = Site(router, Kind.ROUTER, rows)
            why = "the experts of this layer do not take it as an argument"
            parameters = getattr(lens_of(experts, Kind.INPUT), "parameters", ())
            for point, word in (("hook_expert_weights", "weights"), ("hook_expert_indices", "ind")):
                for name in [name for name in parameters if word in name][:1]:
                    lens = chained(lens_of(experts, Kind.INPUT, (name,)), rows)
                    choices = choices_of(experts) if word == "ind" else None
                    sites[point] = Site(experts, Kind.INPUT, lens, choices=choices)
        for point in ("hook_router", "hook_expert_weights", "hook_expert_indices"):
            yield PointSpec.of(f"mlp.{point}", sites.get(point), why)

    def _mlp_out(self) -> Site | None:
        block, factor = self.block, self.architecture.residual_factor
        is_more = self.architecture.several_mlps or (block.attn is None and block.gains is not None)
        if (
            is_more and block.ln2 is not None
        ):  # a sum of several modules, or masked where there is no image to attend to
            stream = input_of(block.ln2)
            return Site(block.module, Kind.OUTPUT, chained(FIRST, Difference((stream,))), stage=-1)
        if block.ln2_post is not None:
            return _times(output_of(block.ln2_post), factor)
        if block.mlp is None or self.architecture.residual_in_mlp:
            return _times(output_of(block.mlp_out), factor) if block.mlp_out is not None else None
        return _times_parameter(_times(output_of(block.mlp), factor), block, 1)


def _inside_attention(prefix: str, attn: nn.Module, o: nn.Module | None, config: Any) -> Iterator[PointSpec]:
    yield PointSpec.of(f"{prefix}.hook_in", input_of(attn))
    heads, groups = head_counts(attn, config)
    sites: dict[str, Site | str] = {**_projections(attn, config, heads, groups)}
    sites |= _in_products(attn, config, heads, groups)
    if hasattr(attn, "ngram"):
        sites["z"] = sites["result"] = f"{type(attn).__name__} projects several streams, one after the other"
    elif o is not None:
        z = sites["z"] = input_of(o, Heads(heads))
        sites["result"] = Site(o, Kind.OUTPUT, HeadResult(o, (z,)), stage=-1)
    for name in inside(prefix):
        yield PointSpec.of(f"{prefix}.hook_{name}", sites.get(name), "this attention has no such projection")


def _in_products(attn: nn.Module, config: Any, heads: int, groups: int) -> dict[str, Site | str]:
    """The sites of queries and keys as they are multiplied, of scores and of patterns."""
    names = ("rot_q", "rot_k", "attn_scores", "pattern")
    if any(hasattr(attn, name) for name in roles.ATTENTION_IN_PARTS):
        return dict.fromkeys(names, f"{type(attn).__name__} computes no pattern of all tokens, but several parts")
    is_convolution = isinstance(child(attn, roles.QUERY), nn.Conv1d)
    attention.expect(attn, None if sharding.completing(attn, Kind.SCORES) else heads, positions_last=is_convolution)
    rot_q = _in_attention(attn, Kind.QUERY, HeadsFirst(heads))
    rot_k = _in_attention(attn, Kind.KEY, HeadsFirst(groups))
    keys = (rot_k,) if architecture(config).attention_sinks else ()
    weights = (_in_attention(attn, kind, Keys(heads, keys)) for kind in (Kind.SCORES, Kind.PATTERN))
    return dict(zip(names, (rot_q, rot_k, *weights), strict=True))


def _in_attention(attn: nn.Module, kind: Kind, lens: Lens) -> Site:
    return Site(attn, kind, chained(*sharding.completing(attn, kind), lens))


def query_heads(attn: nn.Module, config: Any) -> int | None:
    """The number of query heads; None if neither the module nor the config says it."""
    heads = _first_int(attn, "num_heads", "num_attention_heads", "n_head", "n_heads")
    return heads or _first_int(config, "num_attention_heads")


def head_counts(attn: nn.Module, config: Any) -> tuple[int, int]:
    """The numbers of query heads and key/value heads."""
    heads = query_heads(attn, config)
    assert heads is not None  # otherwise no anatomy is found
    key, size = child(attn, roles.KEY), getattr(attn, "head_dim", None)
    if isinstance(size, int) and key is not None and (width := _width(key)) is not None:
        return heads, width // size
    return heads, architecture(config).kv_heads or getattr(config, "num_key_value_heads", None) or heads


def _first_int(owner: Any, *names: str) -> int | None:
    values = (getattr(owner, name, None) for name in names)
    return next((value for value in values if isinstance(value, int)), None)


def _projections(attn: nn.Module, config: Any, heads: int, groups: int) -> dict[str, Site]:
    """The sites of queries, keys and values."""
    sites = {}
    for name, names, n in (("q", roles.QUERY, heads), ("k", roles.KEY, groups), ("v", roles.VALUE, groups)):
        if (module := child(attn, names)) is not None:
            width = _width(module)
            has_gate = name == "q" and width and architecture(config).gate_in_query
            half = (Slice(0, width // n // 2),) if has_gate and width else ()
            sites[name] = output_of(module, Heads(n), *half)
    fused = child(attn, roles.FUSED)
    if fused is not None and (width := _width(fused)) is not None:
        for index, name in enumerate("qkv"):
            sites[name] = output_of(fused, *_fused_lens(width, config, heads, groups, index))
    return sites


def _fused_lens(width: int, config: Any, heads: int, groups: int, index: int) -> tuple[Lens, ...]:
    row = architecture(config)
    if row.fused_by_head and heads == groups:
        return (Interleaved(heads, 3, index, heads),)
    if row.fused_groups is not None:
        return (Interleaved(row.fused_groups, 3, (0, 2, 1)[index], heads),)
    size = width // (heads + 2 * groups)
    starts = [0, heads * size, (heads + groups) * size, (heads + 2 * groups) * size]
    return Slice(starts[index], starts[index + 1]), Heads(heads if index == 0 else groups)


def _width(module: nn.Module) -> int | None:
    """The output width of a linear module; None for any other module.

    Not taken from the weight, which GPT-2 transposes and quantized modules pack.
    """
    while (inner := module._modules.get("base_layer")) is not None:  # peft adapters wrap the module
        module = inner
    return _first_int(module, "out_features", "nf")


def input_of(module: nn.Module, *lenses: Lens) -> Site:
    """The site of a module's input, through lenses."""
    return Site(module, Kind.INPUT, chained(lens_of(module, Kind.INPUT), *lenses))


def output_of(module: nn.Module, *lenses: Lens) -> Site:
    """The site of a module's output, through lenses."""
    return Site(module, Kind.OUTPUT, chained(lens_of(module, Kind.OUTPUT), *lenses))


def _times(site: Site, factor: float) -> Site:
    return site if factor == 1.0 else replace(site, lens=chained(site.lens, Times(factor)))


def _times_parameter(site: Site, block: Block, which: int) -> Site:
    """The site of an output that the layer multiplies by a parameter before adding it to the stream."""
    if block.gains is None:
        return site
    return replace(site, lens=chained(site.lens, TimesParameter(block.module, block.gains[which])))


def _sum(base: Site, added: Site) -> Site:
    return Site(added.module, added.kind, chained(added.lens, Added((base,))), stage=added.stage + 1)


def _through(spec: PointSpec, lens: Lens) -> PointSpec:
    """The point through another lens."""
    return spec if spec.site is None else replace(spec, site=replace(spec.site, lens=chained(spec.site.lens, lens)))
