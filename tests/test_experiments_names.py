"""The names that people type: modules of `hookline.experiments`, without further imports."""

import subprocess
import sys

import hookline.experiments

MODULES = (
    *(
        "ablation",
        "attribution",
        "circuits",
        "contrast",
        "controls",
        "edges",
        "feature_circuits",
        "figures",
        "graphs",
        "head_detectors",
        "images",
    ),
    *(
        "jacobian",
        "logit_attribution",
        "logit_lens",
        "metrics",
        "networks",
        "patching",
        "paths",
        "probes",
        "reading",
        "relevance",
    ),
    *("steering", "tracing"),
)


def test_modules_are_there_without_a_further_import() -> None:
    code = """
import sys
import hookline.experiments
assert not [name for name in sys.modules if name.startswith("hookline.experiments.")]
assert hookline.experiments.patching.sweep
assert "hookline.experiments.tracing" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_dir_shows_what_is_public() -> None:
    assert dir(hookline.experiments) == sorted(MODULES)
    for name in MODULES:
        module = getattr(hookline.experiments, name)
        assert all(hasattr(module, each) for each in module.__all__)
        if name != "images":
            assert dir(module) == sorted(module.__all__)
