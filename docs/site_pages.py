"""Pages of the docs site that are made when it is built: files outside docs/, the API reference, notebooks (see mkdocs.yml).

Links between files are those of the repository. Here they are changed to the pages that show these files.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
ELSEWHERE = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "examples/README.md": "examples/index.md",
    "examples/vlm_spectra/README.md": "examples/vlm_spectra/index.md",
    "training/README.md": "training.md",
    "training/tinysight.md": "training-tinysight.md",
}
"""Files outside docs/, and the pages that show them; `index.md` has a text of its own."""
FRONT = {
    "models": ("Models", "hookline", ["load", "hook", "HookedModel", "HookedModule", "HookedRootModule", "HookPoint"]),
    "caches": ("Caches", "hookline", ["ActivationCache"]),
}
"""The pages of the API that show a part of a module: title, module, names."""
MODULES = ("edits", "positions", "hooks", "errors", "store", "sae", "weights", "vision")
LINK = re.compile(r"(\]\()([^)\s#]+)(#[^)\s]*)?(\))")


def experiments() -> list[str]:
    """The public modules of `hookline.experiments`, and the module of their results."""
    return ["result", *import_module("hookline.experiments").__all__]


def api_pages() -> Iterator[tuple[str, str]]:
    """The pages of the API reference: path and text."""
    for page, (title, module, names) in FRONT.items():
        members = "".join(f"\n        - {name}" for name in names)
        extra = "\n::: hookline.residual.ModelCache\n" if page == "caches" else ""
        options = f"    options:\n      show_root_docstring: false\n      show_root_heading: false\n      members:{members}\n"
        yield f"api/{page}.md", f"# {title}\n\n::: {module}\n{options}{extra}"
    for module in MODULES:
        yield f"api/{module}.md", f"# hookline.{module}\n\n::: hookline.{module}\n"
    for module in experiments():
        yield f"api/experiments/{module}.md", f"# experiments.{module}\n\n::: hookline.experiments.{module}\n"


def example_pages() -> Iterator[tuple[str, str]]:
    """The scripts in examples/, each as a page: its path in the repository and its text."""
    for path in sorted(ROOT.glob("examples/*/*.py")):
        name = path.relative_to(ROOT).as_posix()
        yield name, f"# {path.name}\n\n```python\n{path.read_text(encoding='utf-8')}```\n"


def page_of(path: str) -> str | None:
    """The page of the site that shows a file or folder of the repository."""
    if path in ELSEWHERE:
        return ELSEWHERE[path]
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    if path.startswith("examples/"):
        return path.removesuffix(".py") + ".md" if path.endswith(".py") else "examples/index.md"
    return None


def on_config(config: Any) -> Any:
    """Complete the navigation: the API reference, and the notebooks if they have been made."""
    for section in config.nav:
        if "Reference" in section:
            front = [f"api/{page}.md" for page in (*FRONT, *MODULES)]
            section["Reference"][:0] = [
                {"API": front},
                {"API of the experiments": [f"api/experiments/{module}.md" for module in experiments()]},
            ]
    notebooks = sorted((ROOT / "docs/notebooks").glob("*.md"))
    if notebooks:
        config.nav.insert(2, {"Notebooks": [f"notebooks/{path.name}" for path in notebooks]})
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are not files of docs/."""
    made = dict(api_pages())
    for path, page in ELSEWHERE.items():
        if page != "index.md":
            made[page] = (ROOT / path).read_text(encoding="utf-8")
    made |= {str(page_of(name)): text for name, text in example_pages()}
    for page, text in made.items():
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Change links between files of the repository to links between pages."""
    uri = page.file.src_uri
    source = next((path for path, shown in ELSEWHERE.items() if shown == uri and uri != "index.md"), f"docs/{uri}")

    def changed(link: re.Match[str]) -> str:
        before, target, anchor, after = link.groups()
        if ":" in target:
            return link[0]
        shown = page_of(posixpath.normpath(posixpath.join(posixpath.dirname(source), target)))
        if shown is None:
            return link[0]
        return before + posixpath.relpath(shown, posixpath.dirname(uri) or ".") + (anchor or "") + after

    return LINK.sub(changed, markdown)
