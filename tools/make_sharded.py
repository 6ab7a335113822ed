"""Split every kind of model that transformers has a plan for over two processes, and write docs/sharded.json.

    python tools/make_sharded.py            # all of them, or those that are named

Each model is tiny, with random weights. Everything that hookline offers is compared with the same model in one process:
see tests/sharded_models.py. `tools/make_models.py` makes a table of the result.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import transformers

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))

import sharded_models  # noqa: E402 (in the tests folder, not in the package)
import tiny_models  # noqa: E402

DATA = ROOT / "docs/sharded.json"
PARTS = ("muse_glimmer_text", "qwen3_vl_moe_text")
"""Parts of other models that can be built and run alone, on tokens."""
NOT_RUN = "not run"
"""Of all other parts of other models."""
AT_ONCE = 12
"""Models per group of processes: one that ends a process loses no more than the rest of its group."""


def kinds() -> list[str]:
    """The kinds of models with a plan, also those that are only a part of another model."""
    found = [
        kind for kind, config in transformers.CONFIG_MAPPING.items() if getattr(config, "base_model_tp_plan", None)
    ]
    built = [*tiny_models.CAUSAL, *tiny_models.ENCODERS]
    return sorted({*found, *(kind for kind in built if sharded_models.has_plan(kind))})


def outcomes(group: list[str]) -> dict[str, str]:
    """What became of each kind: "equal", or in which way it is not."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for differences in sharded_models.run(sharded_models.all_differences, 2, group, folder):
            found |= {kind: each[0] if each else found.get(kind, "equal") for kind, each in differences.items()}
    return found


def main() -> None:
    """Write the file after each group; only kinds that are named on the command line, if any are."""
    data: dict[str, Any] = {"kinds": {}}
    if DATA.exists():
        data = json.loads(DATA.read_text(encoding="utf-8"))
    some = sys.argv[1:] or kinds()
    built = [kind for kind in some if kind in {*tiny_models.CAUSAL, *tiny_models.ENCODERS, *PARTS}]
    data["kinds"] |= {kind: NOT_RUN for kind in some if kind not in built}
    for start in range(0, len(built), AT_ONCE):
        data["kinds"] |= outcomes(built[start : start + AT_ONCE])
        print(f"{start + AT_ONCE} of {len(built)}", flush=True)
        data = {"transformers": transformers.__version__, "kinds": dict(sorted(data["kinds"].items()))}
        DATA.write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
