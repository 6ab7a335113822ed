"""Experiments on a model, one module per method; each module is imported when it is first used.

    import hookline
    result = hookline.experiments.patching.sweep(model, clean, corrupted, metric)

`patching`, `attribution`, `relevance`, `edges` and `paths` compare a clean and a corrupted run; `circuits` measures how
much some edges account for; `ablation` and `tracing` remove or restore activations; `logit_attribution`, `logit_lens`
and `head_detectors` read a run as it is, and `graphs` what each feature adds to each other; `jacobian` and `reading`
translate activations into tokens; `steering`, `contrast` and `probes` compare kinds of prompts, and `controls` an
effect with those of random changes; `images` is for vision-language models, and `networks` for any `nn.Module`.
`metrics` are what they all measure. `figures` shows attention and values over a text.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hookline.experiments import (
        ablation,
        attribution,
        circuits,
        contrast,
        controls,
        edges,
        feature_circuits,
        figures,
        graphs,
        head_detectors,
        images,
        jacobian,
        logit_attribution,
        logit_lens,
        metrics,
        networks,
        patching,
        paths,
        probes,
        reading,
        relevance,
        steering,
        tracing,
    )

__all__ = [
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
    "steering",
    "tracing",
]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return import_module(f"hookline.experiments.{name}")
    raise AttributeError(f"module 'hookline.experiments' has no attribute {name!r}; it has {', '.join(__all__)}")


def __dir__() -> list[str]:
    return list(__all__)
