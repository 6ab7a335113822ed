"""The points of a transformer, one row each: what a point is called, in every dialect, and what its axes are.

Names here are those within a layer (`attn.hook_q` of `blocks.5.attn.hook_q`), or of the model as a whole
(`hook_embed`). A new point is a row with a `site`: a function that finds it in a layer, or says why it is not there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from hookline.engine.points import Site
    from hookline.transformer.roles import Block

FindSite: TypeAlias = Callable[["Block", Any], "Site | str"]
"""From a layer and the model's config: where the point is, or the reason why this layer does not have it."""


@dataclass(frozen=True)
class Row:
    """One point of the table."""

    name: str
    axes: str
    """b batch, p position, k key position, h heads, g key/value heads, e d_head, d d_model, m d_mlp, V vocabulary."""
    short: tuple[str, ...] = ()
    """Shorthand: what may stand for the name in `("q", 5)` and `"q5"`."""
    bridge: tuple[str, ...] = ()
    """Its names in the bridge dialect, within a layer or of the model."""
    role: str | None = None
    """Its name in the role dialect: `attn.q` of `lm.attn.q` and `vision.attn.q`."""
    on_request: bool = False
    """Whether it is recorded only when asked for by name: it is a vector per head, or the same as another."""
    site: FindSite | None = None
    """Of a point that the generators of `classic.py` do not know: where it is."""
    after: str = ""
    """Of such a point: the point that fires just before it."""


def _rows() -> Iterator[Row]:
    yield from (
        Row("hook_tokens", "b p", ("tokens",), ("embed.hook_in",)),
        Row("hook_embed", "b p d", ("embed",), ("embed.hook_out",)),
        Row("hook_pos_embed", "b p d", ("pos_embed",), ("pos_embed.hook_out",)),
        Row("hook_resid_pre", "b p d", ("resid_pre",), ("hook_in",), "layer.pre"),
        Row("hook_attn_in", "b p h d", ("attn_in",), on_request=True),
        Row("hook_q_input", "b p h d", ("q_input",), on_request=True),
        Row("hook_k_input", "b p g d", ("k_input",), on_request=True),
        Row("hook_v_input", "b p g d", ("v_input",), on_request=True),
    )
    for norm in ("ln1", "ln1_post", "ln_cross", "ln_cross_post", "ln2", "ln2_post", "ln_final", "ln_pre"):
        yield Row(f"{norm}.hook_scale", "b p 1", ("scale",))
        yield Row(f"{norm}.hook_normalized", "b p d", ("normalized",))
    yield from _attention_rows()
    yield from (
        Row("hook_attn_out", "b p d", ("attn_out",), ("attn.hook_out",), "attn.out"),
        Row("hook_resid_mid", "b p d", ("resid_mid",)),
        Row("hook_cross_attn_out", "b p d", ("cross_attn_out",), ("cross_attn.hook_out",)),
        Row("hook_resid_mid_cross", "b p d", ("resid_mid_cross",)),
        Row("hook_mlp_in", "b p d", ("mlp_in",)),
        Row("mlp.hook_in", "b p d", (), (), "mlp.pre", on_request=True),
        Row("mlp.hook_pre", "b p m", ("pre", "mlp_pre"), ("mlp.in.hook_out", "mlp.gate.hook_out")),
        Row("mlp.hook_pre_linear", "b p m", ("pre_linear",)),
        Row("mlp.hook_post", "b p m", ("post", "mlp_mid", "mlp_post"), ("mlp.out.hook_in",)),
        Row("mlp.hook_router", "b p E", ("router",)),
        Row("mlp.hook_expert_weights", "b p K", ("expert_weights",)),
        Row("mlp.hook_expert_indices", "b p K", ("expert_indices",)),
        Row("hook_mlp_out", "b p d", ("mlp_out",), ("mlp.hook_out",), "mlp.out"),
        Row("hook_resid_post", "b p d", ("resid_post",), ("hook_out",), "layer.post"),
        Row("ln_final.hook_in", "b p d"),
        Row("ln_final.hook_out", "b p d"),
        Row("unembed.hook_in", "b p d"),
        Row("unembed.hook_out", "b p V"),
        Row("projector.hook_in", "b p d"),
        Row("projector.hook_out", "b p d"),
    )


def _attention_rows() -> Iterator[Row]:
    """The inside of a layer's own attention; that of cross-attention has the same rows, but no roles."""
    rows = (
        Row("attn.hook_in", "b p d", (), (), "attn.pre", on_request=True),
        Row("attn.hook_q", "b p h e", ("q", "query"), ("attn.q.hook_out",), "attn.q"),
        Row("attn.hook_k", "b p g e", ("k", "key"), ("attn.k.hook_out",), "attn.k"),
        Row("attn.hook_v", "b p g e", ("v", "value"), ("attn.v.hook_out",), "attn.v"),
        Row("attn.hook_rot_q", "b p h e", ("rot_q",)),
        Row("attn.hook_rot_k", "b k g e", ("rot_k",)),
        Row("attn.hook_attn_scores", "b h p k", ("attn_scores", "attn_logits"), (), "attn.scores"),
        Row("attn.hook_pattern", "b h p k", ("pattern", "attn"), (), "attn.pattern"),
        Row("attn.hook_z", "b p h e", ("z",), (), "attn.z"),
        Row("attn.hook_result", "b p h d", ("result",), on_request=True),
    )
    for row in rows:
        yield row
        bridge = tuple(f"cross_{name}" for name in row.bridge)
        on_request = row.on_request and not row.name.endswith("hook_in")
        yield replace(row, name=f"cross_{row.name}", bridge=bridge, role=None, on_request=on_request)


class PointTable(dict[str, Row]):
    """Rows by their names, with an index for each dialect."""

    def __init__(self, rows: Iterable[Row]) -> None:
        super().__init__()
        self.by_shorthand: dict[str, str] = {}
        """From shorthand to a name; norms and cross-attention are named beside it, so they are not in here."""
        self.by_bridge: dict[str, str] = {}
        self.by_role: dict[str, str] = {}
        for row in rows:
            self.add(row)

    def add(self, row: Row) -> None:
        """One point more."""
        self[row.name] = row
        if not row.name.startswith(("cross_attn.", "ln")):
            self.by_shorthand |= dict.fromkeys(row.short, row.name)
        self.by_bridge |= dict.fromkeys(row.bridge, row.name)
        if row.role is not None:
            self.by_role[row.role] = row.name

    def remove(self, name: str) -> None:
        """One point less."""
        del self[name]
        for index in (self.by_shorthand, self.by_bridge, self.by_role):
            for key in [key for key, known in index.items() if known == name]:
                del index[key]


POINTS = PointTable(_rows())
"""All points, by their names within a layer or of the model."""


def inside(prefix: str) -> list[str]:
    """What a layer's "attn", "mlp" or "ln1" has inside, in order: q, k, v, … of "attn"."""
    names = (name.removeprefix(f"{prefix}.hook_") for name in POINTS if name.startswith(f"{prefix}.hook_"))
    return [name for name in names if name != "in"]
