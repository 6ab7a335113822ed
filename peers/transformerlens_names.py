"""The public names of TransformerLens, and where each is in hookline: a table for docs/from-transformerlens.md.

    python peers/transformerlens_names.py FOLDER [FOLDER …]            print what is not explained, and a summary
    python peers/transformerlens_names.py FOLDER [FOLDER …] --write    also write the table into the page

A folder holds the package `transformer_lens` of one version, for example from `pip download --no-deps
transformer-lens==3.5.1`, unpacked. Its source is read and not imported. The exit status is 1 if a name is neither
available, nor refused with a reason, nor in a module that has a reason here.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

PAGE = Path(__file__).parent.parent / "docs" / "from-transformerlens.md"
PACKAGE = "hookline.compat.transformer_lens"
BEGIN, END = "<!-- names: begin -->", "<!-- names: end -->"

MODULES = {
    "HookedAudioEncoder": "`hookline.hook(model)` wraps audio encoders, with `encoder.…` points",
    "benchmarks": "compares TransformerLens with transformers; `model.verify()` proves every point on your model",
    "components": "the modules are those of transformers: `model.blocks[0]` and its parts have weights and points",
    "config.transformer": "`HookedTransformerConfig`, or the config of the transformers model",
    "conversion_utils": "weights are views of the model's own, and need no conversion",
    "factories": "makes the parts of TransformerLens's own models; `transformers.activations.ACT2FN` has activations",
    "lit": "`model.explore()` shows the model in a browser",
    "model_bridge.": "takes the model apart, or runs it elsewhere; here `model.module` is the transformers model",
    "model_protocol": "types for models; write `HookedTransformer`",
    "pretrained": "converts weights of each architecture; here weights are views of the model's own",
    "remote_module_loading": "empty",
    "tools.analysis._model_state": "internal",
    "tools.analysis.attribution_patching": "`hookline.experiments.edges` and `.attribution`",
    "tools.analysis.interchange": "write the intervention as a hook; `hookline.store` collects activations",
    "tools.analysis.jacobian_lens": "`hookline.experiments.jacobian`",
    "tools.analysis.logit_lens": "`hookline.experiments.logit_lens`",
    "tools.analysis.projection_kernel": "`model.OV` and `model.QK` are factored matrices: `torch.linalg` has the rest",
    "tools.analysis.sparse_probing": "collect activations with `hookline.store`, and fit with scikit-learn",
    "tools.model_registry": "lists models on the hub; any model of transformers can be tried, and `verify()` proves it",
    "utilities.activation_functions": "`transformers.activations.ACT2FN`",
    "utilities.addmm": "internal",
    "utilities.aliases": "internal",
    "utilities.architectures": "internal: classes of architectures of Bridge",
    "utilities.attention": "internal",
    "utilities.attn_implementation": "attention is not forced to be eager",
    "utilities.bridge_components": "internal",
    "utilities.heterogeneous_config": "internal",
    "utilities.hf_utils": "internal: retries and patches of transformers",
    "utilities.multi_gpu": "`device_map`, as transformers takes it",
    "utilities.parameter_swap": "internal",
    "utilities.position_ids": "internal",
    "utilities.quantization": "internal",
    "utilities.slice": "internal",
    "utilities.statistics": "`scipy.stats`",
    "utilities.tl_checkpoint_conversion": "`load_state_dict` takes TransformerLens's names",
    "utilities.tracr": "load the weights of a Tracr model with `load_state_dict`",
    "utilities.typed_module_list": "internal",
    "weight_processing": "`process_weights_` on the model, and `restore_weights`",
}
"""Reasons for names of a module, or of all modules with this beginning, that are not importable here."""

CLASSES = {
    "ActivationCache.ActivationCache",
    "BertNextSentencePrediction.BertNextSentencePrediction",
    "FactoredMatrix.FactoredMatrix",
    "HookedEncoder.HookedEncoder",
    "HookedEncoderDecoder.HookedEncoderDecoder",
    "HookedRootModule.HookedRootModule",
    "HookedTransformer.HookedTransformer",
    "SVDInterpreter.SVDInterpreter",
    "cache.key_value_cache.TransformerLensKeyValueCache",
    "cache.key_value_cache_entry.TransformerLensKeyValueCacheEntry",
    "config.hooked_transformer_config.HookedTransformerConfig",
    "evals.IOIDataset",
    "hook_points.HookPoint",
    "model_bridge.bridge.TransformerBridge",
    "model_bridge.transformer_bridge.TransformerBridge",
    "tools.analysis.direct_logit_attribution.DirectLogitAttribution",
    "utilities.slice.Slice",
}
"""Classes whose public methods are listed too."""


def main() -> int:
    """Print what is unexplained; return 0 if nothing is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path, help="folders that contain the package transformer_lens")
    parser.add_argument("--write", action="store_true", help="write the table into docs/from-transformerlens.md")
    options = parser.parse_args()
    found: dict[str, dict[str, str]] = {}
    for folder in options.folders:
        for module, name in public_names(folder / "transformer_lens"):
            found.setdefault(module, {})[name] = where(module, name)
    unexplained = [f"{module}.{name}" for module in found for name, reason in found[module].items() if not reason]
    counts = {kind: sum(kind == status(each) for names in found.values() for each in names.values()) for kind in KINDS}
    print(", ".join(f"{count} {kind}" for kind, count in counts.items()))
    print("\n".join(unexplained) or "nothing is unexplained")
    if options.write:
        text = PAGE.read_text(encoding="utf-8")
        before, after = text.split(BEGIN)[0], text.split(END)[1]
        PAGE.write_text(f"{before}{BEGIN}\n{table(found)}\n{END}{after}", encoding="utf-8")
    return int(bool(unexplained))


KINDS = ("available", "refused with a reason", "in a module with a reason", "unexplained")
HERE = "here"


def status(reason: str) -> str:
    """Return which of the kinds a reason is."""
    if not reason or reason == HERE:
        return KINDS[0] if reason else KINDS[3]
    return KINDS[2] if reason in MODULES.values() else KINDS[1]


def public_names(package: Path) -> Iterator[tuple[str, str]]:
    """Yield the modules of a package with their public names; `Class.method` for methods of the listed classes."""
    for path in sorted(package.rglob("*.py")):
        module = ".".join(path.relative_to(package).with_suffix("").parts).removesuffix("__init__").rstrip(".")
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            for name in defined(node, is_package=path.name == "__init__.py"):
                yield module, name
            if isinstance(node, ast.ClassDef) and f"{module}.{node.name}" in CLASSES:
                for each in node.body:
                    if isinstance(each, ast.FunctionDef) and not each.name.startswith("_"):
                        yield module, f"{node.name}.{each.name}"


def defined(node: ast.stmt, *, is_package: bool) -> list[str]:
    """Return the public names that a statement at the top of a module defines; imports count in a package only."""
    names: list[str] = []
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        names = [node.name]
    elif isinstance(node, ast.Assign | ast.AnnAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        names = [target.id for target in targets if isinstance(target, ast.Name)]
    elif isinstance(node, ast.ImportFrom) and is_package and (node.level or "transformer_lens" in (node.module or "")):
        names = [each.asname or each.name for each in node.names]
    return [name for name in names if not name.startswith(("_", "*")) and name != "logger"]


def where(module: str, name: str) -> str:
    """Return "here", the reason why a name is not, or nothing."""
    whole = next((why for start, why in MODULES.items() if f"{module}.".startswith((f"{start}.", start))), "")
    try:
        owner = importlib.import_module(f"{PACKAGE}.{module}" if module else PACKAGE)
    except ModuleNotFoundError:
        return whole
    first, _, method = name.partition(".")
    try:
        found = getattr(owner, first)
    except ImportError as error:
        return str(error).partition("hookline.compat: ")[2]
    except AttributeError:
        return whole
    if not method or hasattr(found, method) or method in getattr(found, "__annotations__", {}) or is_weight(method):
        return HERE
    return refusal_of(found, method) or ""


def is_weight(name: str) -> bool:
    """Return whether this is a weight that models have as an attribute."""
    from hookline.weights.matrices import Weights

    return name in Weights.names()


def refusal_of(found: type, method: str) -> str | None:
    """Return why a class does not have a method."""
    methods = importlib.import_module(f"{PACKAGE}.absent").METHODS
    methods["HookedTransformer"] |= importlib.import_module(f"{PACKAGE}.hooked_transformer").NOT_HERE
    return next((known[method] for each in found.__mro__ if method in (known := methods.get(each.__name__, {}))), None)


def table(found: dict[str, dict[str, str]]) -> str:
    """Return the rows of the page: a module, the names that are here, and the others with their reasons."""
    lines = ["| module | available | not available |", "|---|---|---|"]
    whole: dict[str, int] = {}
    for module, names in found.items():
        reasons: dict[str, list[str]] = {}
        for name, reason in names.items():
            reasons.setdefault(reason, []).append(f"`{name[name.find('.') :] if '.' in name else name}`")
        here = ", ".join(reasons.pop(HERE, []))
        start = next((each for each in MODULES if f"{module}.".startswith((f"{each}.", each))), None)
        if not here and start is not None and set(reasons) == {MODULES[start]}:
            whole[start] = whole.get(start, 0) + len(names)
            continue
        others = "; ".join(f"{', '.join(each)}: {reason}" for reason, each in reasons.items())
        lines.append(f"| `{'.'.join(filter(None, ('transformer_lens', module)))}` | {here} | {others} |")
    for start, count in whole.items():
        lines.append(f"| `transformer_lens.{start.rstrip('.')}` and below | | all {count} names: {MODULES[start]} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
