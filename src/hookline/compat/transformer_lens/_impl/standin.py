"""The stand-in: this package under the name `transformer_lens`, for libraries that import it by that name."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.abc import Loader
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import Distribution, DistributionFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from hookline.errors import HooklineError
from hookline.transformer.hub import check_transformers

NAME = "transformer_lens"
PACKAGE = f"hookline.compat.{NAME}"
VERSION = "3.5.1+hookline"
"""The release whose interface this is, as `importlib.metadata.version("transformer-lens")` returns it."""

REMOVED = {"huggingface_hub.constants": {"HF_HUB_ENABLE_HF_TRANSFER": False}}
"""Names that current releases of other packages no longer have, and that circuit-tracer 0.5 imports."""

MOVED = {"transformers.models.gpt2.tokenization_gpt2_fast": ("transformers", "GPT2TokenizerFast")}
"""Modules that transformers 5 no longer has, with the name that ARENA's exercises import from them."""


def install() -> Callable[[], None]:
    """Make `import transformer_lens` import this package, in this process. Returns the function that undoes it.

        from hookline.compat import transformer_lens
        transformer_lens.install()
        from sae_lens import HookedSAETransformer          # imports transformer_lens, and gets hookline's

    Every submodule is the same object under both names. Installing twice has no further effect. Processes that this
    one starts do not inherit it, unless they are forked: install `packages/transformer-lens` for those. Names that
    these libraries import from other packages, and that are gone there (`REMOVED`, `MOVED`), are put back.
    """
    check_transformers()
    imported_package = sys.modules.get(NAME)
    package = importlib.import_module(PACKAGE)
    if imported_package is not None and imported_package is not package and not _is_shim(imported_package):
        raise HooklineError(
            f"transformer_lens is already imported, from {getattr(imported_package, '__file__', None)}: call install() "
            f"before anything imports it, or start the program with python -m {PACKAGE}"
        )
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
    for name, module in list(sys.modules.items()):
        # All at once: importing a submodule would set it as an attribute of the package, and hide a class of its name.
        if name == PACKAGE or name.startswith(f"{PACKAGE}."):
            sys.modules[name.removeprefix("hookline.compat.")] = module
    for name, values in REMOVED.items():
        vars(importlib.import_module(name)).update(
            {key: values[key] for key in values if key not in vars(sys.modules[name])}
        )
    return uninstall


def uninstall() -> None:
    """Undo `install`. Modules that imported names meanwhile keep them."""
    if _finder in sys.meta_path:
        sys.meta_path.remove(_finder)
        for name in [name for name in sys.modules if name == NAME or name.startswith(f"{NAME}.")]:
            del sys.modules[name]


def _is_shim(module: ModuleType) -> bool:
    """Whether this is the package in `packages/transformer-lens`, which calls `install` while it is imported."""
    return getattr(module, "__hookline__", False)


class _Finder(DistributionFinder):
    """Finds `transformer_lens.x` as our module x, and the metadata of the distribution `transformer-lens`."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec of our module under that name; raises for one that we do not have."""
        del target
        if fullname in MOVED and PathFinder.find_spec(fullname, path) is None:
            return ModuleSpec(fullname, _Moved())
        if fullname != NAME and not fullname.startswith(f"{NAME}."):
            return None
        real = f"hookline.compat.{fullname}"
        if importlib.util.find_spec(real) is None:
            raise ModuleNotFoundError(
                f"{fullname} is not in hookline's stand-in for TransformerLens: docs/from-transformerlens.md lists "
                f"what is not available",
                name=fullname,
            )
        return ModuleSpec(fullname, _Same(real), is_package=hasattr(importlib.import_module(real), "__path__"))

    def find_distributions(self, context: Any = None) -> Iterator[Distribution]:
        """The distribution `transformer-lens`, unless others are asked for."""
        name = getattr(context, "name", None)
        if name is None or name.lower().replace("_", "-") == "transformer-lens":
            yield _StandInDistribution()


class _Same(Loader):
    """Loads a module as another one that exists already."""

    def __init__(self, real: str) -> None:
        self.real = real

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """The module itself."""
        del spec
        module = importlib.import_module(self.real)
        self.spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Nothing runs twice; the import system has replaced the module's spec, which is put back."""
        module.__spec__ = self.spec


class _Moved(Loader):
    """Makes a module with the name that has moved elsewhere."""

    def exec_module(self, module: ModuleType) -> None:
        """Import the name."""
        package, name = MOVED[module.__name__]
        setattr(module, name, getattr(importlib.import_module(package), name))


class _StandInDistribution(Distribution):
    """The metadata of `transformer-lens`."""

    def read_text(self, filename: str) -> str | None:
        """The text of a metadata file."""
        if filename != "METADATA":
            return None
        return f"Metadata-Version: 2.1\nName: transformer-lens\nVersion: {VERSION}\nSummary: hookline's stand-in\n"

    def locate_file(self, path: Any) -> Path:
        """Where a file of the distribution would be."""
        return Path(__file__).parent.parent / path


_finder = _Finder()
