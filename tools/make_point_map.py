"""Write the data of the point map: docs/assets/point-map-data.js.

    python tools/make_point_map.py            # every architecture, about six minutes
    python tools/make_point_map.py gpt2 t5    # print the data of some

Which points an architecture has, and at which modules they are, is read from tiny models (tests/tiny_models.py). Sizes
are those of the default config of transformers, built without weights. Descriptions are those of docs/points.md.
"""

from __future__ import annotations

import json
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

import hookline
from hookline.transformer.listing import classic_points
from hookline.transformer.point_table import POINTS

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))

import tiny_models  # noqa: E402 (in the tests folder, not in the package)

DATA = ROOT / "docs/assets/point-map-data.js"
IN_LAYER = re.compile(r"(blocks|encoder|decoder)\.(\d+)\.(.+)")
GROUPS: dict[str, tuple[list[str], Callable[[str], Any], Any]] = {
    "decoders": (tiny_models.CAUSAL, tiny_models.causal_lm, transformers.AutoModelForCausalLM),
    "encoders": (tiny_models.ENCODERS, tiny_models.encoder, transformers.AutoModel),
    "encoder-decoders": (tiny_models.SEQ2SEQ, tiny_models.seq2seq, transformers.AutoModelForSeq2SeqLM),
}
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "top_k_experts")


def descriptions() -> dict[str, str]:
    """What each point is, by its name in a layer or in the model, from the tables of docs/points.md."""
    page = (ROOT / "docs/points.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([\w.]+)` \| [\w ]+ \| (.+) \|$", page, re.MULTILINE)
    return {re.sub(r"^(blocks|decoder)\.L\.", "", name): text.replace("*", "").replace("`", "") for name, text in rows}


def rows() -> dict[str, dict[str, Any]]:
    """The rows of the table of points: axes, names in other dialects, what it is."""
    said = descriptions()
    return {
        name: {
            "axes": row.axes,
            "short": row.short[0] if row.short else "",
            "bridge": row.bridge[0] if row.bridge else "",
            "role": row.role or "",
            "request": row.on_request,
            "what": said.get(name, ""),
        }
        for name, row in POINTS.items()
    }


def place(spec: Any, paths: dict[nn.Module, str], layer: str) -> str:
    """Where a point is, such as "output of model.layers.L.mlp"."""
    path = paths.get(spec.site.module, "") or "the model"
    if layer:
        path = re.sub(rf"(?<=\.){layer}(?=\.|$)", "L", path, count=1)
    kind = spec.site.kind
    return f"inside {path}" if kind.is_inner else f"{kind.value} of {path}"


def stacks(model: hookline.HookedModel) -> dict[str, Any]:
    """The points of each stack of layers, and of the rest of the model (""): where they are, or why they are not."""
    paths = {module: path for path, module in model.module.named_modules()}
    found: dict[str, Any] = {}
    for spec in classic_points(model.anatomy):
        match = IN_LAYER.fullmatch(spec.name)
        stack, layer, name = match.groups() if match else ("", "", spec.name)
        here = found.setdefault(stack, {"points": {}, "missing": {}, "some": []})
        if spec.site is not None:
            here["points"].setdefault(name, place(spec, paths, layer))
        else:
            here["missing"].setdefault(name, spec.why)
    for here in found.values():
        here["some"] = sorted(here["points"].keys() & here["missing"].keys())
        here["missing"] = {name: why for name, why in here["missing"].items() if name not in here["points"]}
    return found


def sizes(kind: str, auto: Any) -> dict[str, Any]:
    """The sizes of a model with the default config of transformers, by the letters of the axes; {} if there is none."""
    try:
        config = transformers.CONFIG_MAPPING[kind]()
        with torch.device("meta"):
            model = hookline.hook(auto.from_config(config))
        cfg = model.cfg
    except Exception as error:
        # A default config that cannot be built says nothing about hookline: shapes are shown with letters.
        print(f"{kind}: no sizes ({type(error).__name__})", file=sys.stderr)
        return {}
    found = {"h": cfg.n_heads, "g": cfg.n_kv_heads, "e": cfg.d_head, "d": cfg.d_model, "m": cfg.d_mlp, "V": cfg.d_vocab}
    for letter, names in (("E", EXPERTS), ("K", CHOSEN)):
        found[letter] = next(
            (getattr(config, name) for name in names if isinstance(getattr(config, name, None), int)), 0
        )
    layers = {stack.name: len(stack.blocks) for stack in model.anatomy.stacks}
    return {**{letter: size for letter, size in found.items() if size}, "layers": layers}


def architectures(kinds: set[str]) -> Iterator[dict[str, Any]]:
    """The architectures, by group; without kinds, all of them."""
    for group, (names, make, auto) in GROUPS.items():
        for kind in sorted(names):
            if not kinds or kind in kinds:
                model = hookline.hook(make(kind))
                known = isinstance(model, hookline.HookedModel)
                yield {
                    "kind": kind,
                    "group": group,
                    "stacks": stacks(model) if known else {},
                    "sizes": sizes(kind, auto) if known else {},
                }


def packed(found: list[dict[str, Any]]) -> str:
    """The data as a script; stacks and texts that several architectures share are written once."""
    texts: dict[str, int] = {}
    parts: dict[str, int] = {}

    def number(text: str) -> int:
        return texts.setdefault(text, len(texts))

    for each in found:
        for name, stack in each["stacks"].items():
            numbered = {
                "points": {point: number(where) for point, where in stack["points"].items()},
                "missing": {point: number(why) for point, why in stack["missing"].items()},
                "some": stack["some"],
            }
            each["stacks"][name] = parts.setdefault(json.dumps(numbered), len(parts))
    data = {"rows": rows(), "texts": list(texts), "parts": list(map(json.loads, parts)), "architectures": found}
    return (
        f"// Written by tools/make_point_map.py, from transformers {transformers.__version__}.\n"
        f"const POINT_MAP = {json.dumps(data, ensure_ascii=False, separators=(',', ':'))};\n"
    )


def main(kinds: list[str]) -> None:
    """Write the data of all architectures, or print that of some."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    found = list(architectures(set(kinds)))
    if kinds:
        print(json.dumps(found, indent=1, ensure_ascii=False))
    else:
        DATA.write_text(packed(found), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
