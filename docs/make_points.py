"""Draw where each point sits in a block: docs/points-*.svg.

    python docs/make_points.py

What is drawn, and the table in docs/points.md, is held against the points of tiny models of each kind: a point that a
model has and no picture shows (or the other way round, or with other axes) is an error, and so are texts that overlap.
"""

from __future__ import annotations

import itertools
import re
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

import hookline

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))

import tiny_models  # noqa: E402 (it is beside the tests, not in the package)

WIDTH, ROW = 900, 38
NORM_ROW = 46  # between a norm, which is higher, and what is above or below it
STREAM = 90  # where the residual stream is, from the left
LEFT, RIGHT = 212, 890  # a panel's edges
LANES = 312.0, 540.0, 762.0  # of queries, keys and values
COLOURS = {"stream": "#c2410c", "attention": "#1d4ed8", "MLP": "#047857", "norm": "#7e22ce"}
LINE, INK, FAINT = "#475569", "#1e293b", "#64748b"

Lanes = tuple[float, float, float]
Axes = dict[str, str]
"""The axes of each point, by its name in the block."""


def kind_of(name: str) -> str:
    """Which colour a point has: by what computes it."""
    if name.endswith((".hook_scale", ".hook_normalized")):
        return "norm"
    if name.partition(".")[0] in ("attn", "cross_attn") or name.endswith("attn_out"):
        return "attention"
    return "MLP" if name.startswith(("mlp.", "hook_mlp_out")) else "stream"


def is_on_request(axes: str) -> bool:
    """Whether a point is a vector as wide as the model for each head: worked out only when asked for by name."""
    return axes in ("b p h d", "b p g d")


def width_of(text: str, size: float = 12) -> float:
    """How wide a text is at most, in the usual sans-serif fonts."""
    narrow = sum(text.count(each) for each in "ijl.,:()| ")
    return size * (0.6 * (len(text) - narrow) + 0.35 * narrow)


def pill_width(name: str) -> float:
    """How wide a point's pill is."""
    return width_of(name) + 18


def beside_stream(name: str) -> float:
    """The middle of a pill at the left edge of a panel, where a branch leaves the stream or comes back to it."""
    return LEFT + 14 + pill_width(name) / 2


class Picture:
    """An SVG in the making. Places are middles, from the top left; what is solid must not overlap."""

    def __init__(self, title: str, remark: str, axes: Axes) -> None:
        self.axes = axes
        self.drawn: set[str] = set()
        self._layers: tuple[list[str], list[str], list[str]] = ([], [], [])  # behind, lines, in front
        self._solid: list[tuple[str, float, float, float, float]] = []
        self._label(16, 28, title, size=16, anchor="start", weight="bold")
        self.text(16, 49, remark, anchor="start")
        self._legend()

    def text(self, x: float, y: float, text: str, *, anchor: str = "middle") -> None:
        """A remark."""
        self._label(x, y, text, anchor=anchor, colour=FAINT)

    def box(self, x: float, y: float, text: str, width: float = 0) -> None:
        """Something that is done."""
        width = width or width_of(text) + 22
        self._take(text, x, y, width, 27)
        self._rect(2, x, y, width, 27, f'rx="4" fill="#ffffff" stroke="{LINE}" stroke-width="1.2"')
        self._label(x, y, text, is_taken=True)

    def frame(self, left: float, right: float, y: float, height: float = 36) -> None:
        """A box around other things."""
        style = f'rx="4" fill="#ffffff" stroke="{LINE}" stroke-width="1.2"'
        self._rect(2, (left + right) / 2, y, right - left, height, style)

    def panel(self, left: float, right: float, top: float, bottom: float, title: str, kind: str) -> None:
        """A part of the block."""
        style = f'rx="8" fill="{COLOURS[kind]}" fill-opacity="0.06"'
        self._rect(0, (left + right) / 2, (top + bottom) / 2, right - left, bottom - top, style)
        self._label(right - 12, top + 16, title, anchor="end", colour=COLOURS[kind], weight="bold")

    def pill(self, x: float, y: float, name: str, axes_at: str = "right") -> None:
        """A point, with its axes at its right or above it."""
        self.drawn.add(name)
        axes = self.axes.get(name, "")
        colour, width = COLOURS[kind_of(name)], pill_width(name)
        self._pill(x, y, width, name, colour, is_dashed=is_on_request(axes))
        if axes_at == "right":
            self._label(x + width / 2 + 5, y, axes, size=10.5, anchor="start", colour=FAINT)
        else:
            self._label(x, y - 19, axes, size=10.5, colour=FAINT)

    def arrow(self, *points: tuple[float, float], is_stream: bool = False, has_head: bool = True) -> None:
        """The way of the data."""
        path = "M" + " L".join(f"{x:g} {y:g}" for x, y in points)
        colour, width = (COLOURS["stream"], 5) if is_stream else (LINE, 1.4)
        head = f' marker-end="url(#{"stream" if is_stream else "head"})"' if has_head else ""
        line = f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="{width}" stroke-linejoin="round"{head}/>'
        self._layers[1].append(line)

    def down(self, x: float, *ys: float) -> None:
        """The way of the data through boxes below each other, with an arrow into each after the first."""
        for start, end in itertools.pairwise(ys):
            self.arrow((x, start), (x, end - 14))

    def plus(self, x: float, y: float) -> None:
        """Where something is added to the stream."""
        colour = COLOURS["stream"]
        self._take("+", x, y, 24, 24)
        circle = f'<circle cx="{x:g}" cy="{y:g}" r="11" fill="#ffffff" stroke="{colour}" stroke-width="2.5"/>'
        cross = f'<path d="M{x - 6:g} {y:g}h12M{x:g} {y - 6:g}v12" stroke="{colour}" stroke-width="2.5"/>'
        self._layers[2].append(circle + cross)

    def svg(self, height: float) -> str:
        """The finished text."""
        heads = "".join(
            f'<marker id="{name}" viewBox="0 0 8 8" refX="{ref}" refY="4" markerWidth="{size}" markerHeight="{size}" '
            f'markerUnits="userSpaceOnUse" orient="auto"><path d="M0 0L8 4L0 8z" fill="{colour}"/></marker>'
            for name, ref, size, colour in (("head", 7, 9, LINE), ("stream", 4, 17, COLOURS["stream"]))
        )
        opening = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" width="{WIDTH}" '
            f'height="{height:g}" font-family="Helvetica, Arial, sans-serif" font-size="12">\n<defs>{heads}</defs>'
        )
        ground = f'<rect width="{WIDTH}" height="{height:g}" rx="10" fill="#ffffff"/>'
        return "\n".join([opening, ground, *(line for layer in self._layers for line in layer), "</svg>", ""])

    def _pill(self, x: float, y: float, width: float, text: str, colour: str, *, is_dashed: bool) -> None:
        fill, ink, dash = ("#ffffff", colour, ' stroke-dasharray="4 2.5"') if is_dashed else (colour, "#ffffff", "")
        self._take(text, x, y, width, 23)
        self._rect(2, x, y, width, 22, f'rx="11" fill="{fill}" stroke="{colour}" stroke-width="1.5"{dash}')
        self._label(x, y, text, colour=ink, is_taken=True)

    def _rect(self, layer: int, x: float, y: float, width: float, height: float, style: str) -> None:
        place = f'x="{x - width / 2:.1f}" y="{y - height / 2:.1f}" width="{width:.1f}" height="{height:.1f}"'
        self._layers[layer].append(f"<rect {place} {style}/>")

    def _label(
        self,
        x: float,
        y: float,
        text: str,
        *,
        size: float = 12,
        anchor: str = "middle",
        colour: str = INK,
        weight: str = "normal",
        is_taken: bool = False,
    ) -> None:
        width = width_of(text, size)
        if not is_taken:
            self._take(text, x + {"start": width / 2, "middle": 0, "end": -width / 2}[anchor], y, width, size)
        style = f'font-size="{size:g}" text-anchor="{anchor}" fill="{colour}" font-weight="{weight}"'
        self._layers[2].append(f'<text x="{x:.1f}" y="{y + size * 0.35:.1f}" {style}>{escape(text)}</text>')

    def _take(self, what: str, x: float, y: float, width: float, height: float) -> None:
        for other, *at in self._solid:
            if abs(x - at[0]) < (width + at[2]) / 2 and abs(y - at[1]) < (height + at[3]) / 2:
                raise SystemExit(f"{what!r} and {other!r} overlap at {x:g}, {y:g}")
        if x - width / 2 < 0 or x + width / 2 > WIDTH:
            raise SystemExit(f"{what!r} leaves the picture at {x:g}, {y:g}")
        self._solid.append((what, x, y, width, height))

    def _legend(self) -> None:
        x = WIDTH - 14
        kinds = {kind_of(name) for name in self.axes}
        entries = [(kind, colour) for kind, colour in COLOURS.items() if kind in kinds]
        entries += [("only on request", LINE)] * any(map(is_on_request, self.axes.values()))
        for text, colour in reversed(entries):
            width = pill_width(text)
            self._pill(x - width / 2, 30, width, text, colour, is_dashed=colour == LINE)
            x -= width + 8


def norm(picture: Picture, y: float, name: str, left: float = LEFT + 14, right: float = RIGHT - 14) -> None:
    """The inside of a norm, as a formula."""
    before, after = "(x − mean) ÷", "× weight + bias"
    scale, normalized = f"{name}.hook_scale", f"{name}.hook_normalized"
    widths = [width_of(before) + 8, pill_width(scale) + 44, 16, pill_width(normalized) + 44, width_of(after)]
    starts = [(left + right - sum(widths)) / 2 + sum(widths[:i]) for i in range(len(widths))]
    if starts[0] < left + 6:
        raise SystemExit(f"the inside of {name} does not fit")
    picture.frame(left, right, y)
    picture.text(starts[1] - 8, y, before, anchor="end")
    picture.pill(starts[1] + pill_width(scale) / 2, y, scale)
    picture.text(starts[2], y, "=", anchor="start")
    picture.pill(starts[3] + pill_width(normalized) / 2, y, normalized)
    picture.text(starts[4], y, after, anchor="start")


def head_inputs(picture: Picture, y: float, lanes: Lanes) -> float:
    """The branch off the stream, a copy for each head's queries, keys and values, and the norm; returns where it is."""
    at = y + ROW + NORM_ROW
    picture.arrow((STREAM, y), (lanes[2], y), has_head=False)
    picture.pill(beside_stream("hook_attn_in"), y, "hook_attn_in", axes_at="above")
    for lane, name in zip(lanes, "qkv", strict=True):
        picture.arrow((lane, y), (lane, at - 18))
        picture.pill(lane, y + ROW, f"hook_{name}_input")
        picture.down(lane, at + 18, at + NORM_ROW)
    norm(picture, at, "ln1")
    return at


def inside_attention(picture: Picture, y: float, prefix: str, lanes: Lanes) -> float:
    """From the projections, which are at `y`, to the scores, the pattern and what is added; returns where that is."""
    query, key, value = lanes
    middle, wide = (query + key) / 2, key - query + 130
    for lane, name in zip(lanes, "qkv", strict=True):
        picture.box(lane, y, f"{name} projection")
        picture.pill(lane, y + ROW, f"{prefix}.hook_{name}")
    for lane, name in ((query, "q"), (key, "k")):
        picture.down(lane, y, y + 2 * ROW, y + 4 * ROW)
        picture.pill(lane, y + 3 * ROW, f"{prefix}.hook_rot_{name}")
    picture.box(middle, y + 2 * ROW, "rotary (where the model has it)", wide)
    picture.box(middle, y + 4 * ROW, "query · key, scaled, capped, biased, masked", wide)
    picture.down(middle, y + 4 * ROW, y + 6 * ROW, y + 8 * ROW)
    picture.pill(middle, y + 5 * ROW, f"{prefix}.hook_attn_scores")
    picture.box(middle, y + 6 * ROW, "softmax")
    picture.pill(middle, y + 7 * ROW, f"{prefix}.hook_pattern")
    picture.down(value, y, y + 8 * ROW)
    picture.box((middle + value) / 2, y + 8 * ROW, "values, mixed by the pattern", value - middle + 80)
    return out_of_heads(picture, y + 8 * ROW, prefix, (middle + 3 * value) / 4)


def out_of_heads(picture: Picture, y: float, prefix: str, x: float) -> float:
    """From the mix of values, which is at `y`, to what is added to the stream; returns where that is."""
    end = y + 3 * ROW + 4
    result, out = f"{prefix}.hook_result", f"hook_{prefix}_out"
    picture.down(x, y, y + 2 * ROW)
    picture.pill(x, y + ROW, f"{prefix}.hook_z")
    picture.box(x, y + 2 * ROW, "output projection of each head")
    picture.pill(x, end, result)
    between = beside_stream(out) + pill_width(out) / 2, x - pill_width(result) / 2
    picture.arrow((x, y + 2 * ROW), (x, end), (sum(between) / 2 + 50, end))
    picture.box(sum(between) / 2, end, "sum + bias", 96)
    picture.arrow((sum(between) / 2, end), (STREAM + 12, end))
    picture.pill(beside_stream(out), end, out, axes_at="above")
    picture.plus(STREAM, end)
    return end


def attention(picture: Picture, y: float) -> float:
    """The self-attention of a sequential block, off the stream at `y`; returns where it is added."""
    at = head_inputs(picture, y, LANES)
    end = inside_attention(picture, at + NORM_ROW, "attn", LANES)
    picture.panel(LEFT, RIGHT, y - 38, end + 24, "attention", "attention")
    return end


def cross_attention(picture: Picture, y: float) -> float:
    """A decoder's attention to the encoder: queries from the stream, keys and values from the encoder."""
    query, key, value = LANES
    at, projections = y + NORM_ROW, y + 2 * NORM_ROW + ROW + 4
    picture.arrow((STREAM, y), (query, y), (query, at - 18))
    norm(picture, at, "ln_cross")
    picture.down(query, at + 18, projections)
    for lane in (key, value):
        picture.down(lane, at + NORM_ROW, projections)
    width = value - key + 110
    picture.box((key + value) / 2, at + NORM_ROW, "the encoder's output (encoder.ln_final.hook_out)", width)
    end = inside_attention(picture, projections, "cross_attn", LANES)
    picture.panel(LEFT, RIGHT, y - 38, end + 24, "cross-attention", "attention")
    return end


def mlp_input(picture: Picture, y: float) -> float:
    """The branch off the stream, and the norm before the MLP; returns where that is."""
    middle = (LEFT + RIGHT) / 2
    picture.arrow((STREAM, y), (middle, y), (middle, y + NORM_ROW - 18))
    picture.pill(beside_stream("hook_mlp_in"), y, "hook_mlp_in", axes_at="above")
    norm(picture, y + NORM_ROW, "ln2")
    return y + NORM_ROW


def back_to_stream(picture: Picture, x: float, y: float, end: float) -> float:
    """What the MLP adds, out of a box at `y`; returns `end`, where it is added."""
    picture.arrow((x, y), (x, end), (STREAM + 12, end))
    picture.pill(beside_stream("hook_mlp_out"), end, "hook_mlp_out", axes_at="above")
    picture.plus(STREAM, end)
    return end


def gated_mlp(picture: Picture, y: float) -> float:
    """An MLP with a gate, off the stream at `y`; returns where it is added."""
    gate, linear = 410, 692
    middle = (gate + linear) / 2
    at = mlp_input(picture, y)
    first = at + NORM_ROW
    picture.down(gate, at + 18, first, first + 2 * ROW, first + 3 * ROW)
    picture.down(linear, at + 18, first, first + 3 * ROW)
    picture.box(gate, first, "gate projection")
    picture.box(linear, first, "up projection (gated MLPs only)")
    picture.pill(gate, first + ROW, "mlp.hook_pre")
    picture.pill(linear, first + ROW, "mlp.hook_pre_linear")
    picture.box(gate, first + 2 * ROW, "activation")
    picture.box(middle, first + 3 * ROW, "product", linear - gate + 100)
    picture.down(middle, first + 3 * ROW, first + 5 * ROW)
    picture.pill(middle, first + 4 * ROW, "mlp.hook_post")
    picture.box(middle, first + 5 * ROW, "down projection")
    end = back_to_stream(picture, middle, first + 5 * ROW, first + 6 * ROW)
    picture.panel(LEFT, RIGHT, y - 38, end + 24, "MLP", "MLP")
    return end


def experts(picture: Picture, y: float) -> float:
    """A mixture of experts, off the stream at `y`; returns where it is added."""
    weights, indices, direct = 340, 570, 790
    middle = (weights + indices) / 2
    at = mlp_input(picture, y)
    first = at + NORM_ROW
    picture.down(middle, at + 18, first, first + 2 * ROW)
    picture.box(middle, first, "router")
    picture.pill(middle, first + ROW, "mlp.hook_router")
    picture.box(middle, first + 2 * ROW, "choice of the K best", indices - weights + 100)
    for lane, name in ((weights, "weights"), (indices, "indices")):
        picture.down(lane, first + 2 * ROW, first + 4 * ROW)
        picture.pill(lane, first + 3 * ROW, f"mlp.hook_expert_{name}")
    picture.down(direct, at + 18, first + 4 * ROW)
    summed, width = "the K experts chosen, each an MLP; their outputs × weights, summed", direct - weights + 150
    picture.box((weights + direct) / 2, first + 4 * ROW, summed, width)
    end = back_to_stream(picture, (weights + direct) / 2, first + 4 * ROW, first + 5 * ROW + 10)
    picture.panel(LEFT, RIGHT, y - 38, end + 24, "mixture of experts", "MLP")
    return end


def stream(picture: Picture, top: float, bottom: float) -> None:
    """The residual stream from the block before to the block after."""
    picture.arrow((STREAM, top - 26), (STREAM, bottom + 32), is_stream=True)
    picture.pill(STREAM, top, "hook_resid_pre")
    picture.pill(STREAM, bottom, "hook_resid_post")


def sequential(picture: Picture, mlp: Callable[[Picture, float], float] = gated_mlp) -> float:
    """Attention, then an MLP or experts."""
    mid = attention(picture, 150) + 44
    picture.pill(STREAM, mid, "hook_resid_mid")
    post = mlp(picture, mid + 64) + 44
    stream(picture, 104, post)
    return post + 46


def parallel(picture: Picture) -> float:
    """Attention and MLP beside each other, behind one norm (as in GPT-J)."""
    lanes, lane, top, border = (284.0, 458.0, 616.0), 802.0, 188.0, 716
    picture.arrow((STREAM, top - 52), (lane, top - 52), (lane, top + ROW + NORM_ROW - 18))
    picture.pill(lane, top + ROW, "hook_mlp_in")
    at = head_inputs(picture, top, lanes)
    first = at + NORM_ROW
    added = inside_attention(picture, first, "attn", lanes)
    picture.down(lane, at + 18, first, first + 2 * ROW, first + 4 * ROW)
    picture.box(lane, first, "up projection")
    picture.pill(lane, first + ROW, "mlp.hook_pre")
    picture.box(lane, first + 2 * ROW, "activation")
    picture.pill(lane, first + 3 * ROW, "mlp.hook_post")
    picture.box(lane, first + 4 * ROW, "down projection")
    end = back_to_stream(picture, lane, first + 4 * ROW, added + 2 * ROW - 4)
    picture.panel(LEFT - 4, border, top - 38, added + 24, "attention", "attention")
    picture.panel(border + 8, RIGHT + 4, top - 38, added + 24, "MLP", "MLP")
    stream(picture, 104, end + 44)
    return end + 90


def decoder(picture: Picture) -> float:
    """A layer of an encoder-decoder's decoder."""
    mid = attention(picture, 150) + 44
    picture.pill(STREAM, mid, "hook_resid_mid")
    cross = cross_attention(picture, mid + 64) + 44
    picture.pill(STREAM, cross, "hook_resid_mid_cross")
    post = gated_mlp(picture, cross + 64) + 44
    stream(picture, 104, post)
    return post + 46


def before_and_after(picture: Picture) -> float:
    """What is before the first block and after the last."""
    y, positions, way, final, out = 104, 152, 192, 240, 302
    picture.arrow((66, y), (138, y))
    picture.pill(66, y, "hook_tokens", axes_at="above")
    picture.box(190, y, "embedding", 100)
    picture.arrow((190, y), (384, y))
    picture.pill(304, y, "hook_embed", axes_at="above")
    picture.box(150, positions, "position embedding")
    picture.arrow((190, positions), (396, positions), (396, y + 12))
    picture.pill(304, positions, "hook_pos_embed", axes_at="above")
    picture.arrow((396, y), (880, y), (880, way), (20, way), (20, final), (34, final), is_stream=True, has_head=False)
    picture.plus(396, y)
    for x, text in ((500, "blocks.0"), (606, "blocks.1"), (682, "…"), (780, "blocks.(n − 1)")):
        picture.box(x, y, text)
    picture.pill(90, final, "ln_final.hook_in", axes_at="above")
    picture.arrow((90, final), (182, final))
    norm(picture, final, "ln_final", left=184, right=RIGHT)
    picture.arrow((204, final + 18), (204, out), (564, out))
    picture.pill(300, out, "ln_final.hook_out", axes_at="above")
    picture.pill(462, out, "unembed.hook_in", axes_at="above")
    picture.box(620, out, "unembedding", 110)
    picture.arrow((620, out), (776, out), has_head=False)
    picture.pill(776, out, "unembed.hook_out", axes_at="above")
    return out + 34


def points_of(*models: hookline.HookedModel) -> Axes:
    """The axes of all points that one of these models has."""
    return {name: point.axes for model in models for name, point in model.hook_dict.items()}


NOT_DRAWN = (".attn.hook_in", ".cross_attn.hook_in", ".mlp.hook_in")
"""What a norm gives, by another name."""


def inside(points: Axes, layer: str) -> Axes:
    """Those of one layer, by their names in it."""
    drawn = {name: axes for name, axes in points.items() if not name.endswith(NOT_DRAWN)}
    return {name.removeprefix(layer): axes for name, axes in drawn.items() if name.startswith(layer)}


def outside(points: Axes) -> Axes:
    """Those of no layer."""
    return {name: axes for name, axes in points.items() if not re.search(r"\.\d+\.", name)}


def same(what: str, ours: set[Any], theirs: set[Any]) -> None:
    """Stop unless what we show is what the models have."""
    if ours != theirs:
        lacks, more = sorted(map(str, theirs - ours)), sorted(map(str, ours - theirs))
        raise SystemExit(f"{what} is out of date: it lacks {lacks}, and has {more}, which the models do not have")


def row_name(name: str, in_blocks: set[str]) -> str:
    """How the table names a point: for any layer, and with `blocks` unless only a decoder has it."""
    stack, layer, point = re.fullmatch(r"(?:(blocks|encoder|decoder)\.)?(?:(\d+)\.)?(.+)", name).groups()  # type: ignore[union-attr]
    if layer is None:
        return point
    return f"blocks.L.{point}" if point in in_blocks else f"{stack}.L.{point}"


def check_table(points: Axes) -> None:
    """The table in docs/points.md has the points that there are, with their axes."""
    in_blocks = {name.removeprefix("blocks.0.") for name in points if name.startswith("blocks.0.")}
    theirs = {(row_name(name, in_blocks), axes) for name, axes in points.items()}
    page = (ROOT / "docs/points.md").read_text()
    same("docs/points.md", set(re.findall(r"^\| `([\w.]+)` \| ([\w ]+) \|", page, re.MULTILINE)), theirs)


def save(name: str, draw: Callable[[Picture], float], picture: Picture) -> None:
    """Write a picture, if it shows the points that there are."""
    height = draw(picture)
    same(f"docs/points-{name}.svg", set(picture.drawn), set(picture.axes))
    (ROOT / f"docs/points-{name}.svg").write_text(picture.svg(height))


def main() -> None:
    """Write the pictures, after holding them and the table against the models."""
    warnings.simplefilter("ignore")

    def causal(kind: str, **settings: int) -> hookline.HookedModel:
        return hookline.hook(tiny_models.causal_lm(kind, **settings))

    dense = points_of(causal("llama", num_key_value_heads=4), causal("gpt2"))
    parallels, mixture = points_of(causal("gptj")), points_of(causal("mixtral", num_key_value_heads=4))
    seq2seq = points_of(hookline.hook(tiny_models.seq2seq("t5", feed_forward_proj="gated-gelu")))
    more = points_of(causal("gemma2"), hookline.hook(tiny_models.seq2seq("t5gemma")))
    check_table(dense | parallels | mixture | seq2seq | more)
    named = "two stacks have their own (encoder.hook_embed, decoder.hook_embed, …), and one unembed"
    save("model", before_and_after, Picture("Before and after the blocks", named, outside(dense)))
    named = "names begin with blocks.L."
    save("sequential", sequential, Picture("A sequential block", named, inside(dense, "blocks.0.")))
    save("parallel", parallel, Picture("A parallel block", named, inside(parallels, "blocks.0.")))
    with_experts = partial(sequential, mlp=experts)
    save("experts", with_experts, Picture("A block with experts", named, inside(mixture, "blocks.0.")))
    named = "names begin with decoder.L."
    save("encoder-decoder", decoder, Picture("A layer of a decoder", named, inside(seq2seq, "decoder.0.")))


if __name__ == "__main__":
    main()
