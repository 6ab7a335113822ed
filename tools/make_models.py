"""Verify every architecture, and write docs/models.md and src/hookline/transformer/unproved.json.

    python tools/make_models.py

Each model is built from a tiny config with random weights (tests/tiny_models.py), and checked by the verifier.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

import hookline
from hookline.transformer.listing import UNPROVED, kind_of, unproved
from hookline.transformer.verify.report import Report, verify_model

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))

import tiny_models  # noqa: E402 (in the tests folder, not in the package)
import tiny_vision  # noqa: E402

FAMILIES = {
    "embeddings": ("hook_tokens", "hook_embed", "hook_pos_embed"),
    "stream": ("hook_resid_pre", "hook_resid_mid", "hook_resid_mid_cross", "hook_resid_post"),
    "attention out": ("hook_attn_out", "hook_cross_attn_out"),
    "MLP out": ("hook_mlp_out",),
    "final norm, logits": (
        *("ln_final.hook_in", "ln_final.hook_scale", "ln_final.hook_normalized", "ln_final.hook_out"),
        *("unembed.hook_in", "unembed.hook_out"),
    ),
    "q k v": ("attn.hook_q", "attn.hook_k", "attn.hook_v"),
    "rotated q k": ("attn.hook_rot_q", "attn.hook_rot_k"),
    "scores, pattern": ("attn.hook_attn_scores", "attn.hook_pattern"),
    "z, result": ("attn.hook_z", "attn.hook_result"),
    "heads' inputs": ("hook_attn_in", "hook_q_input", "hook_k_input", "hook_v_input"),
    "MLP inside": ("hook_mlp_in", "mlp.hook_pre", "mlp.hook_pre_linear", "mlp.hook_post"),
    "norms": ("ln1.", "ln2.", "ln1_post.", "ln2_post.", "ln_cross.", "ln_cross_post."),
    "experts": ("mlp.hook_router", "mlp.hook_expert_weights", "mlp.hook_expert_indices"),
}
TOWER = {
    "patches": ("vision.hook_embed", "vision.hook_pos_embed"),
    "stream": ("hook_resid_pre", "hook_resid_mid", "hook_resid_post"),
    "attention out": ("hook_attn_out",),
    "MLP out": ("hook_mlp_out",),
    "final norm": ("vision.ln_final.hook_in", "vision.ln_final.hook_normalized", "vision.ln_final.hook_out"),
    "q k v": FAMILIES["q k v"],
    "rotated q k": FAMILIES["rotated q k"],
    "scores, pattern": FAMILIES["scores, pattern"],
    "z, result": FAMILIES["z, result"],
    "heads' inputs": FAMILIES["heads' inputs"],
    "MLP inside": FAMILIES["MLP inside"],
    "norms": ("ln1.", "ln2.", "ln1_post.", "ln2_post."),
    "projector": ("projector.",),
}
"""Groups of points of a vision tower."""
PARTS = {
    "Causal language models": (tiny_models.CAUSAL, tiny_models.causal_lm),
    "Encoders": (tiny_models.ENCODERS, tiny_models.encoder),
    "Encoder-decoders and speech models": (tiny_models.SEQ2SEQ, tiny_models.seq2seq),
}


HEAD = """# Architectures

A script builds every language model of transformers {version} with a tiny config and random weights
({n} architectures), runs `model.verify()`, and writes this page. A point is proved if it fires once, caching it leaves
the logits bitwise equal, an identity edit leaves them unchanged and a zeroing edit does not, and its gradient is that
of autograd. The stream must equal the hidden states that the model reports, and the pattern its attentions; the outputs
of attention and MLP must add up to the stream, the pattern must mix the values into `z`, and the results of heads must
sum to the output of the projection. *yes*: all points of this group that the architecture has are proved. *–*: it has
none (a state-space layer has no pattern). *no*: at least one point failed, and is not offered.

<div class="table-filter"></div>
"""


SHARDED = """
## Tensor parallel

Another script splits a tiny model of each kind that
transformers {version} has a plan for ({n}) over two processes. *equal*: all points, edits at each point, gradients,
weights, `local=True` and `generate` are those of the model in one process, and `verify` finds nothing. *fails in
transformers itself*: the model cannot be run in two processes, or has other logits there, without any hooks. *not run*:
a part of another model, which is not built alone here. Of these kinds, {total}.

| kind | in two processes |
|---|---|
"""


def reports(kinds: list[str], make: Callable[[str], Any]) -> dict[str, Report | None]:
    """The report on each architecture; None if it has native points only."""
    found: dict[str, Report | None] = {}
    for kind in kinds:
        module = make(kind)
        model = hookline.hook(module)
        known = isinstance(model, hookline.HookedModel)
        found[kind] = verify_model(model, tiny_models.inputs(module)) if known else None
        print(kind, "–" if found[kind] is None else f"{len(found[kind].failed())} failed", flush=True)
    return found


def vision_reports() -> dict[str, Report]:
    """The reports on vision and speech models, each run on an image or a sound."""
    found = {}
    for kind in tiny_vision.CONFIGS:
        model = hookline.hook(tiny_vision.module_of(kind))
        found[kind] = verify_model(model, tiny_vision.inputs_of(kind))
        print(kind, f"{len(found[kind].failed())} failed", flush=True)
    return found


def part_of(report: Report, *, of_tower: bool) -> Report:
    """The verdicts on the vision tower and the projector, or on the language model."""
    prefixes = ("vision.", "projector.")
    verdicts = [each for each in report.verdicts if each.name.startswith(prefixes) == of_tower]
    return Report(report.architecture, tuple(verdicts))


def is_in(name: str, points: tuple[str, ...]) -> bool:
    """Whether a point belongs to a group; points of cross-attention count as points of attention."""
    point = kind_of(name).replace("cross_attn.", "attn.")
    for stack in ("encoder.", "decoder.", "vision.blocks.", "vision.global_blocks."):
        point = point.removeprefix(stack)
    return any(point == each or (each.endswith(".") and point.startswith(each)) for each in points)


def cell(report: Report, points: tuple[str, ...]) -> str:
    """`yes` if every available point of a group is proved, `no` if one fails, `–` if there is none."""
    statuses = {verdict.status for verdict in report.verdicts if is_in(verdict.name, points)}
    if "failed" in statuses:
        return "no"
    return "yes" if "proved" in statuses else "–"


def table(title: str, found: dict[str, Report | None], families: dict[str, tuple[str, ...]] = FAMILIES) -> str:
    """One section of docs/models.md."""
    rows = [f"| architecture | {' | '.join(families)} |", "|---" * (len(families) + 1) + "|"]
    counts = defaultdict(int)
    for kind, report in found.items():
        cells = ["native points only"] + [""] * (len(families) - 1)
        if report is not None:
            cells = [cell(report, points) for points in families.values()]
        for family, text in zip(families, cells, strict=True):
            counts[family] += text == "yes"
        rows.append(f"| {kind} | {' | '.join(cells)} |")
    total = ", ".join(f"{family} {count}" for family, count in counts.items())
    return f"\n## {title}\n\nOf {len(found)}, proved: {total}.\n\n" + "\n".join(rows) + "\n"


def sharded_table() -> str:
    """The section about models that are split over processes, from what `tools/make_sharded.py` found."""
    data = json.loads((ROOT / "docs/sharded.json").read_text(encoding="utf-8"))
    kinds: dict[str, str] = data["kinds"]
    rows, counts = [], defaultdict(int)
    for kind, found in kinds.items():
        word, _, why = found.partition(": ")
        if word == "transformers":
            counts["fail without hookline"] += 1
            word = f"fails in transformers itself: {why.partition('. ')[0].rstrip(': ')}"
        elif word in ("equal", "no classic points"):
            counts["are equal"] += word == "equal"
        elif word in ("refused", "not run"):
            counts[f"are {word}"] += 1
            word = found
        rows.append(f"| {kind} | {word.replace('|', '/')} |")
    total = ", ".join(f"{count} {name}" for name, count in counts.items())
    return SHARDED.format(version=data["transformers"], n=len(kinds), total=total) + "\n".join(rows) + "\n"


def main() -> None:
    """Write both files."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    unproved().clear()  # test every point, including those that failed before
    found = {title: reports(*part) for title, part in PARTS.items()}
    vision = vision_reports()
    by_type: dict[str, dict[str, str]] = {}
    every = [report for part in (*found.values(), vision) for report in part.values() if report is not None]
    for report in every:
        for verdict in report.failed():
            by_type.setdefault(report.architecture, {})[kind_of(verdict.name)] = verdict.why
    UNPROVED.write_text(json.dumps(by_type, indent=1, ensure_ascii=False, sort_keys=True) + "\n", encoding="utf-8")
    head = HEAD.format(version=transformers.__version__, n=sum(map(len, (*found.values(), vision))))
    language = {kind: part_of(report, of_tower=False) for kind, report in vision.items()}
    language = {kind: report for kind, report in language.items() if report.verdicts}
    towers = {kind: part_of(report, of_tower=True) for kind, report in vision.items() if kind != "whisper"}
    text = head + "".join(table(*part) for part in found.items())
    text += table("Vision-language and speech models: the language model", language)
    text += table("Vision models: the vision tower and the projector", towers, TOWER)
    text += sharded_table()
    (ROOT / "docs/models.md").write_text(text)


if __name__ == "__main__":
    main()
