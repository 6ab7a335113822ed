"""Draw diagrams of the points of a block: docs/points-*.svg.

    python tools/make_points.py

The diagrams, and the table in docs/points.md, are compared with the points of tiny models of each kind. A point that is
missing in a diagram or in the models, different axes, and overlapping texts are errors.
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

import tiny_models  # noqa: E402 (in the tests, not in the package)

WIDTH, ROW = 900, 38
NORM_ROW = 46  # the distance of a norm, which is taller, from its neighbors
STREAM = 90  # the x coordinate of the residual stream
LEFT, RIGHT = 212, 890  # the edges of a panel
LANES = 312.0, 540.0, 762.0  # the x coordinates of queries, keys and values
COLORS = {"stream": "#c2410c", "attention": "#1d4ed8", "MLP": "#047857", "norm": "#7e22ce"}
LINE, INK, FAINT = "#475569", "#1e293b", "#64748b"

Lanes = tuple[float, float, float]
Axes = dict[str, str]
"""The axes of each point, by its name in the block."""


def kind_of(name: str) -> str:
    """Return the kind of a point, which determines its color."""
    if name.endswith((".hook_scale", ".hook_normalized")):
        return "norm"
    if name.partition(".")[0] in ("attn", "cross_attn") or name.endswith("attn_out"):
        return "attention"
    return "MLP" if name.startswith(("mlp.", "hook_mlp_out")) else "stream"


def is_on_request(axes: str) -> bool:
    """Return whether a point has width d_model per head, and so is computed only on request."""
    return axes in ("b p h d", "b p g d")


def width_of(text: str, size: float = 12) -> float:
    """Return an upper bound of the width of a text in common sans-serif fonts."""
    narrow = sum(text.count(each) for each in "ijl.,:()| ")
    return size * (0.6 * (len(text) - narrow) + 0.35 * narrow)


def pill_width(name: str) -> float:
    """Return the width of a point's pill."""
    return width_of(name) + 18


def beside_stream(name: str) -> float:
    """Return the center of a pill at the left edge of a panel, where a branch leaves or joins the stream."""
    return LEFT + 14 + pill_width(name) / 2


class Diagram:
    """An SVG image. Coordinates are centers, from the top left; solid elements must not overlap."""

    def __init__(self, title: str, remark: str, axes: Axes) -> None:
        self.axes = axes
        self.drawn: set[str] = set()
        self._layers: tuple[list[str], list[str], list[str]] = ([], [], [])  # behind, lines, in front
        self._solid: list[tuple[str, float, float, float, float]] = []
        self._label(16, 28, title, size=16, anchor="start", weight="bold")
        self.text(16, 49, remark, anchor="start")
        self._legend()

    def text(self, x: float, y: float, text: str, *, anchor: str = "middle") -> None:
        """Draw a note."""
        self._label(x, y, text, anchor=anchor, color=FAINT)

    def box(self, x: float, y: float, text: str, width: float = 0) -> None:
        """Draw an operation."""
        width = width or width_of(text) + 22
        self._take(text, x, y, width, 27)
        self._rect(2, x, y, width, 27, f'rx="4" fill="#ffffff" stroke="{LINE}" stroke-width="1.2"')
        self._label(x, y, text, is_taken=True)

    def frame(self, left: float, right: float, y: float, height: float = 36) -> None:
        """Draw a box around other elements."""
        style = f'rx="4" fill="#ffffff" stroke="{LINE}" stroke-width="1.2"'
        self._rect(2, (left + right) / 2, y, right - left, height, style)

    def panel(self, left: float, right: float, top: float, bottom: float, title: str, kind: str) -> None:
        """Draw a panel, a part of the block."""
        style = f'rx="8" fill="{COLORS[kind]}" fill-opacity="0.06"'
        self._rect(0, (left + right) / 2, (top + bottom) / 2, right - left, bottom - top, style)
        self._label(right - 12, top + 16, title, anchor="end", color=COLORS[kind], weight="bold")

    def pill(self, x: float, y: float, name: str, axes_at: str = "right") -> None:
        """Draw a point, with its axes to the right or above it."""
        self.drawn.add(name)
        axes = self.axes.get(name, "")
        color, width = COLORS[kind_of(name)], pill_width(name)
        self._pill(x, y, width, name, color, is_dashed=is_on_request(axes))
        if axes_at == "right":
            self._label(x + width / 2 + 5, y, axes, size=10.5, anchor="start", color=FAINT)
        else:
            self._label(x, y - 19, axes, size=10.5, color=FAINT)

    def arrow(self, *points: tuple[float, float], is_stream: bool = False, has_head: bool = True) -> None:
        """Draw an arrow along the data flow."""
        path = "M" + " L".join(f"{x:g} {y:g}" for x, y in points)
        color, width = (COLORS["stream"], 5) if is_stream else (LINE, 1.4)
        head = f' marker-end="url(#{"stream" if is_stream else "head"})"' if has_head else ""
        line = f'<path d="{path}" fill="none" stroke="{color}" stroke-width="{width}" stroke-linejoin="round"{head}/>'
        self._layers[1].append(line)

    def down(self, x: float, *ys: float) -> None:
        """Draw arrows through boxes that are below each other."""
        for start, end in itertools.pairwise(ys):
            self.arrow((x, start), (x, end - 14))

    def plus(self, x: float, y: float) -> None:
        """Draw an addition to the stream."""
        color = COLORS["stream"]
        self._take("+", x, y, 24, 24)
        circle = f'<circle cx="{x:g}" cy="{y:g}" r="11" fill="#ffffff" stroke="{color}" stroke-width="2.5"/>'
        cross = f'<path d="M{x - 6:g} {y:g}h12M{x:g} {y - 6:g}v12" stroke="{color}" stroke-width="2.5"/>'
        self._layers[2].append(circle + cross)

    def svg(self, height: float) -> str:
        """Return the SVG as text."""
        heads = "".join(
            f'<marker id="{name}" viewBox="0 0 8 8" refX="{ref}" refY="4" markerWidth="{size}" markerHeight="{size}" '
            f'markerUnits="userSpaceOnUse" orient="auto"><path d="M0 0L8 4L0 8z" fill="{color}"/></marker>'
            for name, ref, size, color in (("head", 7, 9, LINE), ("stream", 4, 17, COLORS["stream"]))
        )
        opening = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" width="{WIDTH}" '
            f'height="{height:g}" font-family="Helvetica, Arial, sans-serif" font-size="12">\n<defs>{heads}</defs>'
        )
        ground = f'<rect width="{WIDTH}" height="{height:g}" rx="10" fill="#ffffff"/>'
        return "\n".join([opening, ground, *(line for layer in self._layers for line in layer), "</svg>", ""])

    def _pill(self, x: float, y: float, width: float, text: str, color: str, *, is_dashed: bool) -> None:
        fill, ink, dash = ("#ffffff", color, ' stroke-dasharray="4 2.5"') if is_dashed else (color, "#ffffff", "")
        self._take(text, x, y, width, 23)
        self._rect(2, x, y, width, 22, f'rx="11" fill="{fill}" stroke="{color}" stroke-width="1.5"{dash}')
        self._label(x, y, text, color=ink, is_taken=True)

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
        color: str = INK,
        weight: str = "normal",
        is_taken: bool = False,
    ) -> None:
        width = width_of(text, size)
        if not is_taken:
            self._take(text, x + {"start": width / 2, "middle": 0, "end": -width / 2}[anchor], y, width, size)
        style = f'font-size="{size:g}" text-anchor="{anchor}" fill="{color}" font-weight="{weight}"'
        self._layers[2].append(f'<text x="{x:.1f}" y="{y + size * 0.35:.1f}" {style}>{escape(text)}</text>')

    def _take(self, what: str, x: float, y: float, width: float, height: float) -> None:
        for other, *at in self._solid:
            if abs(x - at[0]) < (width + at[2]) / 2 and abs(y - at[1]) < (height + at[3]) / 2:
                raise SystemExit(f"{what!r} and {other!r} overlap at {x:g}, {y:g}")
        if x - width / 2 < 0 or x + width / 2 > WIDTH:
            raise SystemExit(f"{what!r} leaves the diagram at {x:g}, {y:g}")
        self._solid.append((what, x, y, width, height))

    def _legend(self) -> None:
        x = WIDTH - 14
        kinds = {kind_of(name) for name in self.axes}
        entries = [(kind, color) for kind, color in COLORS.items() if kind in kinds]
        entries += [("only on request", LINE)] * any(map(is_on_request, self.axes.values()))
        for text, color in reversed(entries):
            width = pill_width(text)
            self._pill(x - width / 2, 30, width, text, color, is_dashed=color == LINE)
            x -= width + 8


def norm(diagram: Diagram, y: float, name: str, left: float = LEFT + 14, right: float = RIGHT - 14) -> None:
    """Draw the inside of a norm, as a formula."""
    before, after = "(x − mean) ÷", "× weight + bias"
    scale, normalized = f"{name}.hook_scale", f"{name}.hook_normalized"
    widths = [width_of(before) + 8, pill_width(scale) + 44, 16, pill_width(normalized) + 44, width_of(after)]
    starts = [(left + right - sum(widths)) / 2 + sum(widths[:i]) for i in range(len(widths))]
    if starts[0] < left + 6:
        raise SystemExit(f"the inside of {name} does not fit")
    diagram.frame(left, right, y)
    diagram.text(starts[1] - 8, y, before, anchor="end")
    diagram.pill(starts[1] + pill_width(scale) / 2, y, scale)
    diagram.text(starts[2], y, "=", anchor="start")
    diagram.pill(starts[3] + pill_width(normalized) / 2, y, normalized)
    diagram.text(starts[4], y, after, anchor="start")


def head_inputs(diagram: Diagram, y: float, lanes: Lanes) -> float:
    """Draw the branch to attention, with the per-head inputs and the norm; return its y coordinate."""
    at = y + ROW + NORM_ROW
    diagram.arrow((STREAM, y), (lanes[2], y), has_head=False)
    diagram.pill(beside_stream("hook_attn_in"), y, "hook_attn_in", axes_at="above")
    for lane, name in zip(lanes, "qkv", strict=True):
        diagram.arrow((lane, y), (lane, at - 18))
        diagram.pill(lane, y + ROW, f"hook_{name}_input")
        diagram.down(lane, at + 18, at + NORM_ROW)
    norm(diagram, at, "ln1")
    return at


def inside_attention(diagram: Diagram, y: float, prefix: str, lanes: Lanes) -> float:
    """Draw attention from the projections at `y` to the output; return the y coordinate of the output."""
    query, key, value = lanes
    middle, wide = (query + key) / 2, key - query + 130
    for lane, name in zip(lanes, "qkv", strict=True):
        diagram.box(lane, y, f"{name} projection")
        diagram.pill(lane, y + ROW, f"{prefix}.hook_{name}")
    for lane, name in ((query, "q"), (key, "k")):
        diagram.down(lane, y, y + 2 * ROW, y + 4 * ROW)
        diagram.pill(lane, y + 3 * ROW, f"{prefix}.hook_rot_{name}")
    diagram.box(middle, y + 2 * ROW, "rotary (if the model has it)", wide)
    diagram.box(middle, y + 4 * ROW, "query · key, scaled, capped, biased, masked", wide)
    diagram.down(middle, y + 4 * ROW, y + 6 * ROW, y + 8 * ROW)
    diagram.pill(middle, y + 5 * ROW, f"{prefix}.hook_attn_scores")
    diagram.box(middle, y + 6 * ROW, "softmax")
    diagram.pill(middle, y + 7 * ROW, f"{prefix}.hook_pattern")
    diagram.down(value, y, y + 8 * ROW)
    diagram.box((middle + value) / 2, y + 8 * ROW, "pattern · value", value - middle + 80)
    return out_of_heads(diagram, y + 8 * ROW, prefix, (middle + 3 * value) / 4)


def out_of_heads(diagram: Diagram, y: float, prefix: str, x: float) -> float:
    """Draw the path from `hook_z` at `y` to the addition to the stream; return the y coordinate of the latter."""
    end = y + 3 * ROW + 4
    result, out = f"{prefix}.hook_result", f"hook_{prefix}_out"
    diagram.down(x, y, y + 2 * ROW)
    diagram.pill(x, y + ROW, f"{prefix}.hook_z")
    diagram.box(x, y + 2 * ROW, "output projection of each head")
    diagram.pill(x, end, result)
    between = beside_stream(out) + pill_width(out) / 2, x - pill_width(result) / 2
    diagram.arrow((x, y + 2 * ROW), (x, end), (sum(between) / 2 + 50, end))
    diagram.box(sum(between) / 2, end, "sum + bias", 96)
    diagram.arrow((sum(between) / 2, end), (STREAM + 12, end))
    diagram.pill(beside_stream(out), end, out, axes_at="above")
    diagram.plus(STREAM, end)
    return end


def attention(diagram: Diagram, y: float) -> float:
    """Draw the self-attention of a sequential block, starting at `y`; return where it is added."""
    at = head_inputs(diagram, y, LANES)
    end = inside_attention(diagram, at + NORM_ROW, "attn", LANES)
    diagram.panel(LEFT, RIGHT, y - 38, end + 24, "attention", "attention")
    return end


def cross_attention(diagram: Diagram, y: float) -> float:
    """Draw cross-attention: queries from the stream, keys and values from the encoder."""
    query, key, value = LANES
    at, projections = y + NORM_ROW, y + 2 * NORM_ROW + ROW + 4
    diagram.arrow((STREAM, y), (query, y), (query, at - 18))
    norm(diagram, at, "ln_cross")
    diagram.down(query, at + 18, projections)
    for lane in (key, value):
        diagram.down(lane, at + NORM_ROW, projections)
    width = value - key + 110
    diagram.box((key + value) / 2, at + NORM_ROW, "the encoder's output (encoder.ln_final.hook_out)", width)
    end = inside_attention(diagram, projections, "cross_attn", LANES)
    diagram.panel(LEFT, RIGHT, y - 38, end + 24, "cross-attention", "attention")
    return end


def mlp_input(diagram: Diagram, y: float) -> float:
    """Draw the branch to the MLP and its norm; return the y coordinate of the norm."""
    middle = (LEFT + RIGHT) / 2
    diagram.arrow((STREAM, y), (middle, y), (middle, y + NORM_ROW - 18))
    diagram.pill(beside_stream("hook_mlp_in"), y, "hook_mlp_in", axes_at="above")
    norm(diagram, y + NORM_ROW, "ln2")
    return y + NORM_ROW


def back_to_stream(diagram: Diagram, x: float, y: float, end: float) -> float:
    """Draw the output of the MLP from a box at `y`; return `end`, where it is added."""
    diagram.arrow((x, y), (x, end), (STREAM + 12, end))
    diagram.pill(beside_stream("hook_mlp_out"), end, "hook_mlp_out", axes_at="above")
    diagram.plus(STREAM, end)
    return end


def gated_mlp(diagram: Diagram, y: float) -> float:
    """Draw a gated MLP, starting at `y`; return where it is added."""
    gate, linear = 410, 692
    middle = (gate + linear) / 2
    at = mlp_input(diagram, y)
    first = at + NORM_ROW
    diagram.down(gate, at + 18, first, first + 2 * ROW, first + 3 * ROW)
    diagram.down(linear, at + 18, first, first + 3 * ROW)
    diagram.box(gate, first, "gate projection")
    diagram.box(linear, first, "up projection (gated MLPs only)")
    diagram.pill(gate, first + ROW, "mlp.hook_pre")
    diagram.pill(linear, first + ROW, "mlp.hook_pre_linear")
    diagram.box(gate, first + 2 * ROW, "activation")
    diagram.box(middle, first + 3 * ROW, "product", linear - gate + 100)
    diagram.down(middle, first + 3 * ROW, first + 5 * ROW)
    diagram.pill(middle, first + 4 * ROW, "mlp.hook_post")
    diagram.box(middle, first + 5 * ROW, "down projection")
    end = back_to_stream(diagram, middle, first + 5 * ROW, first + 6 * ROW)
    diagram.panel(LEFT, RIGHT, y - 38, end + 24, "MLP", "MLP")
    return end


def experts(diagram: Diagram, y: float) -> float:
    """Draw a mixture of experts, starting at `y`; return where it is added."""
    weights, indices, direct = 340, 570, 790
    middle = (weights + indices) / 2
    at = mlp_input(diagram, y)
    first = at + NORM_ROW
    diagram.down(middle, at + 18, first, first + 2 * ROW)
    diagram.box(middle, first, "router")
    diagram.pill(middle, first + ROW, "mlp.hook_router")
    diagram.box(middle, first + 2 * ROW, "top-K selection", indices - weights + 100)
    for lane, name in ((weights, "weights"), (indices, "indices")):
        diagram.down(lane, first + 2 * ROW, first + 4 * ROW)
        diagram.pill(lane, first + 3 * ROW, f"mlp.hook_expert_{name}")
    diagram.down(direct, at + 18, first + 4 * ROW)
    summed, width = "sum over the K chosen experts, each an MLP: output × weight", direct - weights + 150
    diagram.box((weights + direct) / 2, first + 4 * ROW, summed, width)
    end = back_to_stream(diagram, (weights + direct) / 2, first + 4 * ROW, first + 5 * ROW + 10)
    diagram.panel(LEFT, RIGHT, y - 38, end + 24, "mixture of experts", "MLP")
    return end


def stream(diagram: Diagram, top: float, bottom: float) -> None:
    """Draw the residual stream from the previous block to the next."""
    diagram.arrow((STREAM, top - 26), (STREAM, bottom + 32), is_stream=True)
    diagram.pill(STREAM, top, "hook_resid_pre")
    diagram.pill(STREAM, bottom, "hook_resid_post")


def sequential(diagram: Diagram, mlp: Callable[[Diagram, float], float] = gated_mlp) -> float:
    """Draw a sequential block: attention, then an MLP or experts."""
    mid = attention(diagram, 150) + 44
    diagram.pill(STREAM, mid, "hook_resid_mid")
    post = mlp(diagram, mid + 64) + 44
    stream(diagram, 104, post)
    return post + 46


def parallel(diagram: Diagram) -> float:
    """Draw a parallel block: attention and MLP after one norm (as in GPT-J)."""
    lanes, lane, top, border = (284.0, 458.0, 616.0), 802.0, 188.0, 716
    diagram.arrow((STREAM, top - 52), (lane, top - 52), (lane, top + ROW + NORM_ROW - 18))
    diagram.pill(lane, top + ROW, "hook_mlp_in")
    at = head_inputs(diagram, top, lanes)
    first = at + NORM_ROW
    added = inside_attention(diagram, first, "attn", lanes)
    diagram.down(lane, at + 18, first, first + 2 * ROW, first + 4 * ROW)
    diagram.box(lane, first, "up projection")
    diagram.pill(lane, first + ROW, "mlp.hook_pre")
    diagram.box(lane, first + 2 * ROW, "activation")
    diagram.pill(lane, first + 3 * ROW, "mlp.hook_post")
    diagram.box(lane, first + 4 * ROW, "down projection")
    end = back_to_stream(diagram, lane, first + 4 * ROW, added + 2 * ROW - 4)
    diagram.panel(LEFT - 4, border, top - 38, added + 24, "attention", "attention")
    diagram.panel(border + 8, RIGHT + 4, top - 38, added + 24, "MLP", "MLP")
    stream(diagram, 104, end + 44)
    return end + 90


def decoder(diagram: Diagram) -> float:
    """Draw a decoder layer of an encoder-decoder."""
    mid = attention(diagram, 150) + 44
    diagram.pill(STREAM, mid, "hook_resid_mid")
    cross = cross_attention(diagram, mid + 64) + 44
    diagram.pill(STREAM, cross, "hook_resid_mid_cross")
    post = gated_mlp(diagram, cross + 64) + 44
    stream(diagram, 104, post)
    return post + 46


def before_and_after(diagram: Diagram) -> float:
    """Draw the points before the first block and after the last one."""
    y, positions, way, final, out = 104, 152, 192, 240, 302
    diagram.arrow((66, y), (138, y))
    diagram.pill(66, y, "hook_tokens", axes_at="above")
    diagram.box(190, y, "embedding", 100)
    diagram.arrow((190, y), (384, y))
    diagram.pill(304, y, "hook_embed", axes_at="above")
    diagram.box(150, positions, "position embedding")
    diagram.arrow((190, positions), (396, positions), (396, y + 12))
    diagram.pill(304, positions, "hook_pos_embed", axes_at="above")
    diagram.arrow((396, y), (880, y), (880, way), (20, way), (20, final), (34, final), is_stream=True, has_head=False)
    diagram.plus(396, y)
    for x, text in ((500, "blocks.0"), (606, "blocks.1"), (682, "…"), (780, "blocks.(n − 1)")):
        diagram.box(x, y, text)
    diagram.pill(90, final, "ln_final.hook_in", axes_at="above")
    diagram.arrow((90, final), (182, final))
    norm(diagram, final, "ln_final", left=184, right=RIGHT)
    diagram.arrow((204, final + 18), (204, out), (564, out))
    diagram.pill(300, out, "ln_final.hook_out", axes_at="above")
    diagram.pill(462, out, "unembed.hook_in", axes_at="above")
    diagram.box(620, out, "unembedding", 110)
    diagram.arrow((620, out), (776, out), has_head=False)
    diagram.pill(776, out, "unembed.hook_out", axes_at="above")
    return out + 34


def points_of(*models: hookline.HookedModel) -> Axes:
    """Return the axes of all points of these models."""
    return {name: point.axes for model in models for name, point in model.hook_dict.items()}


NOT_DRAWN = (".attn.hook_in", ".cross_attn.hook_in", ".mlp.hook_in")
"""Other names for the output of a norm."""


def inside(points: Axes, layer: str) -> Axes:
    """Return the points of one layer, by their names in the layer."""
    drawn = {name: axes for name, axes in points.items() if not name.endswith(NOT_DRAWN)}
    return {name.removeprefix(layer): axes for name, axes in drawn.items() if name.startswith(layer)}


def outside(points: Axes) -> Axes:
    """Return the points outside of layers."""
    return {name: axes for name, axes in points.items() if not re.search(r"\.\d+\.", name)}


def same(what: str, ours: set[Any], theirs: set[Any]) -> None:
    """Raise an error unless the points shown are the points of the models."""
    if ours != theirs:
        lacks, more = sorted(map(str, theirs - ours)), sorted(map(str, ours - theirs))
        raise SystemExit(f"{what} is out of date: missing: {lacks}; not in the models: {more}")


def row_name(name: str, in_blocks: set[str]) -> str:
    """Return the name of a point in the table: for any layer, with `blocks` unless only a decoder has it."""
    stack, layer, point = re.fullmatch(r"(?:(blocks|encoder|decoder)\.)?(?:(\d+)\.)?(.+)", name).groups()  # type: ignore[union-attr]
    if layer is None:
        return point
    return f"blocks.L.{point}" if point in in_blocks else f"{stack}.L.{point}"


def check_table(points: Axes) -> None:
    """Compare the table in docs/points.md with the points of the models and their axes."""
    in_blocks = {name.removeprefix("blocks.0.") for name in points if name.startswith("blocks.0.")}
    theirs = {(row_name(name, in_blocks), axes) for name, axes in points.items()}
    page = (ROOT / "docs/points.md").read_text().partition("### Vision-language models")[0]
    same("docs/points.md", set(re.findall(r"^\| `([\w.]+)` \| ([\w ]+) \|", page, re.MULTILINE)), theirs)


def save(name: str, draw: Callable[[Diagram], float], diagram: Diagram) -> None:
    """Write a diagram, after comparing it with the points of the models."""
    height = draw(diagram)
    same(f"docs/points-{name}.svg", set(diagram.drawn), set(diagram.axes))
    (ROOT / f"docs/points-{name}.svg").write_text(diagram.svg(height))


def main() -> None:
    """Write the diagrams, after comparing them and the table with the models."""
    warnings.simplefilter("ignore")

    def causal(kind: str, **settings: int) -> hookline.HookedModel:
        return hookline.hook(tiny_models.causal_lm(kind, **settings))

    dense = points_of(causal("llama", num_key_value_heads=4), causal("gpt2"))
    parallels, mixture = points_of(causal("gptj")), points_of(causal("mixtral", num_key_value_heads=4))
    seq2seq = points_of(hookline.hook(tiny_models.seq2seq("t5", feed_forward_proj="gated-gelu")))
    more = points_of(causal("gemma2"), hookline.hook(tiny_models.seq2seq("t5gemma")))
    check_table(dense | parallels | mixture | seq2seq | more)
    named = "in an encoder-decoder, each stack has its own (encoder.hook_embed, …), except for unembed"
    save("model", before_and_after, Diagram("Before and after the blocks", named, outside(dense)))
    named = "names begin with blocks.L."
    save("sequential", sequential, Diagram("A sequential block", named, inside(dense, "blocks.0.")))
    save("parallel", parallel, Diagram("A parallel block", named, inside(parallels, "blocks.0.")))
    with_experts = partial(sequential, mlp=experts)
    save("experts", with_experts, Diagram("A block with experts", named, inside(mixture, "blocks.0.")))
    named = "names begin with decoder.L."
    save("encoder-decoder", decoder, Diagram("A layer of a decoder", named, inside(seq2seq, "decoder.0.")))


if __name__ == "__main__":
    main()
