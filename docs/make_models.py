"""Verify every architecture, and write down what holds: docs/models.md, and src/hookline/anatomy/unproved.json.

    python docs/make_models.py

Each is built tiny, with random weights, from its configuration (tests/tiny_models.py), and proved by the verifier.
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
from hookline.transformer.verify.report import Report, verify

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))

import tiny_models  # noqa: E402 (they are beside the tests, not in the package)
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
SEEING = {
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
"""The families of points of what looks at images."""
PARTS = {
    "Causal language models": (tiny_models.CAUSAL, tiny_models.causal_lm),
    "Encoders": (tiny_models.ENCODERS, tiny_models.encoder),
    "Encoder-decoders, and models that hear": (tiny_models.SEQ2SEQ, tiny_models.seq2seq),
}


HEAD = """# Architectures

Made by `docs/make_models.py`: each language model of transformers {version} that can be built tiny from its
configuration ({n} of them), with every point proved by the verifier on random weights: it fires once, caching it
changes no bit of the logits, an identity edit leaves them and a zeroing edit does not, its gradient is autograd's own,
the stream is what the model reports as hidden states and adds up, the pattern is what it reports as attentions and
mixes the values into `z`, heads' results sum to the projection's output, norms and heads' own inputs do what they say.
*yes*: all points of the family that the architecture has are proved. *–*: it has none (a state-space layer has no
pattern). *no*: not proved, and so not offered.
"""


def reports(kinds: list[str], make: Callable[[str], Any]) -> dict[str, Report | None]:
    """The verdicts on each architecture; None where the anatomy is not known."""
    found: dict[str, Report | None] = {}
    for kind in kinds:
        module = make(kind)
        model = hookline.hook(module)
        known = isinstance(model, hookline.HookedModel)
        found[kind] = verify(model, tiny_models.inputs(module)) if known else None
        print(kind, "–" if found[kind] is None else f"{len(found[kind].failed())} failed", flush=True)
    return found


def seen() -> dict[str, Report]:
    """The verdicts on models that see or hear, each with an image or a sound."""
    found = {}
    for kind in tiny_vision.CONFIGS:
        model = hookline.hook(tiny_vision.module_of(kind))
        found[kind] = verify(model, tiny_vision.inputs_of(kind))
        print(kind, f"{len(found[kind].failed())} failed", flush=True)
    return found


def part_of(report: Report, *, encode_images: bool) -> Report:
    """The verdicts on what looks at images, or on what reads."""
    prefixes = ("vision.", "projector.")
    verdicts = [each for each in report.verdicts if each.name.startswith(prefixes) == encode_images]
    return Report(report.architecture, tuple(verdicts))


def is_in(name: str, points: tuple[str, ...]) -> bool:
    """Whether a point is of a family; those of cross-attention count with the others."""
    point = kind_of(name).replace("cross_attn.", "attn.")
    for stack in ("encoder.", "decoder.", "vision.blocks.", "vision.global_blocks."):
        point = point.removeprefix(stack)
    return any(point == each or (each.endswith(".") and point.startswith(each)) for each in points)


def cell(report: Report, points: tuple[str, ...]) -> str:
    """`yes` if every point of a family that is to be had is proved, `no` if one fails, `–` if there is none."""
    statuses = {verdict.status for verdict in report.verdicts if is_in(verdict.name, points)}
    if "failed" in statuses:
        return "no"
    return "yes" if "proved" in statuses else "–"


def table(title: str, found: dict[str, Report | None], families: dict[str, tuple[str, ...]] = FAMILIES) -> str:
    """One part of docs/models.md."""
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


def main() -> None:
    """Write both files."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    unproved().clear()  # every point is tried, whatever was known before
    found = {title: reports(*part) for title, part in PARTS.items()}
    images = seen()
    by_type: dict[str, dict[str, str]] = {}
    every = [report for part in (*found.values(), images) for report in part.values() if report is not None]
    for report in every:
        for verdict in report.failed():
            by_type.setdefault(report.architecture, {})[kind_of(verdict.name)] = verdict.why
    UNPROVED.write_text(json.dumps(by_type, indent=1, ensure_ascii=False, sort_keys=True) + "\n", encoding="utf-8")
    head = HEAD.format(version=transformers.__version__, n=sum(map(len, (*found.values(), images))))
    reading = {kind: part_of(report, encode_images=False) for kind, report in images.items()}
    reading = {kind: report for kind, report in reading.items() if report.verdicts}
    seeing = {kind: part_of(report, encode_images=True) for kind, report in images.items() if kind != "whisper"}
    text = head + "".join(table(*part) for part in found.items())
    text += table("Models that see or hear: the language part", reading)
    text += table("Models that see: the vision tower and the projector", seeing, SEEING)
    (ROOT / "docs/models.md").write_text(text)


if __name__ == "__main__":
    main()
