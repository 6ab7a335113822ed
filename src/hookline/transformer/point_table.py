"""The points of a transformer, one row each: its name in every dialect, and its axes.

Names are relative to a layer (`attn.hook_q` for `blocks.5.attn.hook_q`), or to the model (`hook_embed`). To add a
point, add a row with a `site`: a function that returns its site in a layer, or the reason why the layer has none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from hookline.engine import Site
    from hookline.transformer.anatomy import Block

FindSite: TypeAlias = Callable[["Block", Any], "Site | str"]
"""Takes a layer and the model's config; returns the site, or the reason why the layer does not have the point."""


@dataclass(frozen=True)
class PointRow:
    """One point of the table."""

    name: str
    axes: str
    """b batch, p position, k key position, h heads, g key/value heads, e d_head, d d_model, m d_mlp, V vocabulary, E
    experts, K chosen experts, 1 an axis of size 1."""
    short: tuple[str, ...] = ()
    """Shorthands, as in `("q", 5)` and `"q5"`."""
    bridge: tuple[str, ...] = ()
    """Names in the bridge dialect, relative to a layer or to the model."""
    role: str | None = None
    """Name in the role dialect: `attn.q` for `lm.attn.q` and `vision.attn.q`."""
    on_request: bool = False
    """Recorded only if requested by name: it has width d_model per head, or duplicates another point."""
    site: FindSite | None = None
    """Returns the site, for a point that `sites.py` does not generate."""
    after: str = ""
    """The point that fires just before it, for a point with its own `site`: one that `sites.py` generates."""


def _rows() -> Iterator[PointRow]:
    yield from (
        PointRow("hook_tokens", "b p", ("tokens",), ("embed.hook_in",)),
        PointRow("hook_embed", "b p d", ("embed",), ("embed.hook_out",)),
        PointRow("hook_pos_embed", "b p d", ("pos_embed",), ("pos_embed.hook_out",)),
        PointRow("hook_resid_pre", "b p d", ("resid_pre",), ("hook_in",), "layer.pre"),
        PointRow("hook_attn_in", "b p h d", ("attn_in",), ("attn.hook_attn_in",), on_request=True),
        PointRow("hook_q_input", "b p h d", ("q_input",), ("attn.hook_q_input",), on_request=True),
        PointRow("hook_k_input", "b p g d", ("k_input",), ("attn.hook_k_input",), on_request=True),
        PointRow("hook_v_input", "b p g d", ("v_input",), ("attn.hook_v_input",), on_request=True),
    )
    for norm in ("ln1", "ln1_post", "ln_cross", "ln_cross_post", "ln2", "ln2_post", "ln_final", "ln_pre"):
        yield PointRow(f"{norm}.hook_scale", "b p 1", ("scale",))
        yield PointRow(f"{norm}.hook_normalized", "b p d", ("normalized",))
    yield from _attention_rows()
    yield from (
        PointRow("hook_attn_out", "b p d", ("attn_out",), ("attn.hook_out", "attn.hook_hidden_states"), "attn.out"),
        PointRow("hook_resid_mid", "b p d", ("resid_mid",)),
        PointRow("hook_cross_attn_out", "b p d", ("cross_attn_out",), ("cross_attn.hook_out",)),
        PointRow("hook_resid_mid_cross", "b p d", ("resid_mid_cross",)),
        PointRow("hook_mlp_in", "b p d", ("mlp_in",)),
        PointRow("mlp.hook_in", "b p d", (), (), "mlp.pre", on_request=True),
        PointRow("mlp.hook_pre", "b p m", ("pre", "mlp_pre"), ("mlp.in.hook_out", "mlp.gate.hook_out")),
        PointRow("mlp.hook_pre_linear", "b p m", ("pre_linear",)),
        PointRow("mlp.hook_post", "b p m", ("post", "mlp_mid", "mlp_post"), ("mlp.out.hook_in",)),
        PointRow("mlp.hook_router", "b p E", ("router",)),
        PointRow("mlp.hook_expert_weights", "b p K", ("expert_weights",)),
        PointRow("mlp.hook_expert_indices", "b p K", ("expert_indices",)),
        PointRow("hook_mlp_out", "b p d", ("mlp_out",), ("mlp.hook_out",), "mlp.out"),
        PointRow("hook_resid_post", "b p d", ("resid_post",), ("hook_out",), "layer.post"),
        PointRow("ln_final.hook_in", "b p d"),
        PointRow("ln_final.hook_out", "b p d"),
        PointRow("unembed.hook_in", "b p d"),
        PointRow("unembed.hook_out", "b p V", (), ("hook_unembed",)),
        PointRow("projector.hook_in", "b p d"),
        PointRow("projector.hook_out", "b p d"),
    )


def _attention_rows() -> Iterator[PointRow]:
    """The points inside self-attention; cross-attention has the same rows without roles."""
    rows = (
        PointRow("attn.hook_in", "b p d", (), (), "attn.pre", on_request=True),
        PointRow("attn.hook_q", "b p h e", ("q", "query"), ("attn.q.hook_out",), "attn.q"),
        PointRow("attn.hook_k", "b p g e", ("k", "key"), ("attn.k.hook_out",), "attn.k"),
        PointRow("attn.hook_v", "b p g e", ("v", "value"), ("attn.v.hook_out",), "attn.v"),
        PointRow("attn.hook_rot_q", "b p h e", ("rot_q",)),
        PointRow("attn.hook_rot_k", "b k g e", ("rot_k",)),
        PointRow("attn.hook_attn_scores", "b h p k", ("attn_scores", "attn_logits"), (), "attn.scores"),
        PointRow("attn.hook_pattern", "b h p k", ("pattern", "attn"), (), "attn.pattern"),
        PointRow("attn.hook_z", "b p h e", ("z",), ("attn.o.hook_in",), "attn.z"),
        PointRow("attn.hook_result", "b p h d", ("result",), on_request=True),
    )
    for row in rows:
        yield row
        bridge = tuple(f"cross_{name}" for name in row.bridge)
        on_request = row.on_request and not row.name.endswith("hook_in")
        yield replace(row, name=f"cross_{row.name}", bridge=bridge, role=None, on_request=on_request)


class PointTable(dict[str, PointRow]):
    """Rows by their names, with an index for each dialect."""

    def __init__(self, rows: Iterable[PointRow]) -> None:
        super().__init__()
        self.by_shorthand: dict[str, str] = {}
        """Shorthand to name; without norms and cross-attention, which a shorthand names separately."""
        self.by_bridge: dict[str, str] = {}
        self.by_role: dict[str, str] = {}
        for row in rows:
            self.add(row)

    def add(self, row: PointRow) -> None:
        """Add a point."""
        if row.site is not None and (row.after not in self or self[row.after].site is not None):
            raise ValueError(f"{row.name} has its own site, so after= must be a point of sites.py, not {row.after!r}")
        self[row.name] = row
        if not row.name.startswith(("cross_attn.", "ln")):
            self.by_shorthand |= dict.fromkeys(row.short, row.name)
        self.by_bridge |= dict.fromkeys(row.bridge, row.name)
        if row.role is not None:
            self.by_role[row.role] = row.name

    def remove(self, name: str) -> None:
        """Remove a point."""
        del self[name]
        for index in (self.by_shorthand, self.by_bridge, self.by_role):
            for key in [key for key, point_name in index.items() if point_name == name]:
                del index[key]


POINTS = PointTable(_rows())
"""All points, by name relative to a layer or to the model."""


def inside(prefix: str) -> list[str]:
    """The points inside "attn", "mlp" or "ln1" of a layer, in order: q, k, v, … for "attn"."""
    names = (name.removeprefix(f"{prefix}.hook_") for name in POINTS if name.startswith(f"{prefix}.hook_"))
    return [name for name in names if name != "in"]
