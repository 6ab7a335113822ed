"""Pages of the docs site that are made when it is built: files outside docs/, the API reference (see mkdocs.yml).

Links between files are those of the repository. Here they are changed to the pages that show these files.
"""

from __future__ import annotations

import ast
import inspect
import posixpath
import re
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import FunctionType
from typing import Any

from mkdocs.structure.files import File, Files

from hookline.edits import DataEdit

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tools")]

import messages  # noqa: E402 (in the tests folder: it reads the messages from the source)
from notebook_sources import ORDER, for_jupyter  # noqa: E402

ELSEWHERE = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "examples/README.md": "examples.md",
    "examples/vlm_spectra/README.md": "examples/vlm_spectra.md",
    "changelog.d": "changelog.md",
    "src/hookline/loading.py": "api/models.md",
    "tests/messages.golden": "messages.md",
    "training/README.md": "training.md",
    "training/tinysight.md": "training-tinysight.md",
}
"""Files outside docs/, and the pages that show them; `index.md` has a text of its own."""
FRONT = {
    "models": ("Models", ["load", "hook", "HookedModel", "HookedModule", "HookedRootModule", "HookPoint"]),
    "caches": ("Caches", ["ActivationCache", "residual.ModelCache"]),
}
"""The pages of the API for names of `hookline` itself: title and names."""
MODULES = ("edits", "positions", "hooks", "errors", "store", "sae", "training", "weights", "vision")
MESSAGES = """# Every message

The texts of all errors and warnings, where … is a value: search this page for the words between the values of yours.
[Errors and warnings](errors.md) explains their classes.
"""
RANKS = {
    r"(examples|messages|changelog|training|architecture|contributing)": 0.3,
    r"(api|models|benchmarks)": 0.8,
    r"(points|errors)": 2.5,
    r"recipes": 2,
    r"": 1.5,
}
"""How much a page counts in searches, by the beginning of its path."""
LINK = re.compile(r"(\]\()([^)\s#]+)(#[^)\s]*)?(\))")


def experiments() -> list[str]:
    """The public modules of `hookline.experiments`, and the module of their results."""
    return ["result", *import_module("hookline.experiments").__all__]


def api_pages() -> Iterator[tuple[str, str]]:
    """The pages of the API reference: path and text."""
    for page, (title, names) in FRONT.items():
        yield f"api/{page}.md", f"# {title}\n" + "".join(entry(f"hookline.{name}", name) for name in names)
    for module in MODULES:
        yield f"api/{module}.md", module_page(f"hookline.{module}")
    for module in experiments():
        yield f"api/experiments/{module}.md", module_page(f"hookline.experiments.{module}")


def module_page(path: str) -> str:
    """The page of a module: what it is for, and its public names in their order."""
    module = import_module(path)
    found = [(name, getattr(module, name)) for name in module.__all__]
    if path != "hookline.errors":
        found = [(name, each) for name, each in found if getattr(each, "__module__", "") != "hookline.errors"]
    entries = (
        entry(f"{each.__module__}.{name}", name) if is_shown_by_source(name, each) else named(name, each)
        for name, each in found
        if is_documented(each)
    )
    title = path.removeprefix("hookline.") if "experiments" in path else path
    return f"# {title}\n\n::: {path}\n    options: {{members: false}}\n" + "".join(entries)


def is_documented(each: Any) -> bool:
    """Whether it is a function or class; the docstring of the module describes other values."""
    return isinstance(each, type | FunctionType)


def is_shown_by_source(name: str, each: Any) -> bool:
    """Whether the source has its public name and its defaults; those of edits are calls of `edit_field` there."""
    return each.__name__ == name and not (isinstance(each, type) and issubclass(each, DataEdit))


def named(name: str, each: Any) -> str:
    """A class or function whose source does not show its name or defaults: `edits.zero` is the class `Zero`."""
    given = inspect.signature(each.__init__ if isinstance(each, type) else each).parameters.values()
    parameters = [p.replace(annotation=inspect.Parameter.empty) for p in given if p.name != "self"]
    call = name + str(inspect.Signature(parameters))
    text = (inspect.getdoc(each) or "").replace("Examples:\n", "**Examples:**\n\n")
    return f"\n## {name}\n\n```python\n{call}\n```\n\n{text}\n"


def entry(path: str, name: str) -> str:
    """One function or class, under its public name."""
    options = f"show_root_heading: true, show_root_toc_entry: true, heading: {name.rpartition('.')[2]}"
    return f"\n::: {path}\n    options: {{{options}}}\n"


def message_page() -> str:
    """All error and warning texts of the source, by package."""
    sections: dict[str, list[str]] = {}
    for path in sorted(messages.PACKAGE.rglob("*.py")):
        package = path.relative_to(messages.PACKAGE).parts[0].removesuffix(".py").replace("__init__", "")
        found = [f"- {escape(text)}" for text in messages.messages(path)]
        sections.setdefault(package, []).extend(each for each in found if each not in sections[package])
    body = (
        f"\n## {f'hookline.{package}'.rstrip('.')}\n\n" + "\n".join(found) + "\n"
        for package, found in sections.items()
        if found
    )
    return MESSAGES + "".join(body)


def escape(text: str) -> str:
    """A message as Markdown: values in it as …, and nothing in it a tag, a link or emphasis."""
    return re.sub(r"([\\`*_\[\]<>#])", r"\\\1", " ".join(without_values(text).split()))


def without_values(text: str) -> str:
    """A message of `messages.messages`, with … in place of each value, and "one / other" for alternatives."""
    shown, depth, start = "", 0, 0
    for at, character in enumerate(text):
        depth += (character == "{") - (character == "}")
        if character == "{" and depth == 1:
            shown, start = shown + text[start:at], at + 1
        elif character == "}" and depth == 0:
            shown, start = shown + value(text[start:at]), at + 1
    return shown + text[start:]


def value(source: str) -> str:
    """What is shown for the source of a value: …, or the texts of alternatives, "one | other: condition"."""
    try:
        ast.parse(source, mode="eval")
    except SyntaxError:
        texts = source.rpartition(": ")[0].split(" | ")
        return " / ".join(without_values(text) for text in texts if text != "None") or "…"
    return "…"


def changelog() -> str:
    """The change log, with the changes since it was last written."""
    fragments = sorted(path for path in (ROOT / "changelog.d").glob("*.md") if path.name != "README.md")
    changes = "".join(path.read_text(encoding="utf-8").rstrip() + "\n" for path in fragments)
    head, title, released = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").partition("\n## ")
    return f"{head}\n## Latest\n\n{changes}{title}{released}"


def example_pages() -> Iterator[tuple[str, str]]:
    """The scripts in examples/, each as a page: its path in the repository and its text."""
    for path in sorted(ROOT.glob("examples/*/*.py")):
        name = path.relative_to(ROOT).as_posix()
        yield name, f"# {path.name}\n\n```python\n{path.read_text(encoding='utf-8')}```\n"


def page_of(path: str) -> str | None:
    """The page of the site that shows a file or folder of the repository."""
    if path in ELSEWHERE:
        return ELSEWHERE[path]
    if path.startswith("notebooks/"):
        return path
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    if path.startswith("src/hookline/"):
        return "api/" + path.removeprefix("src/hookline/").removesuffix("/__init__.py").removesuffix(".py") + ".md"
    if path.startswith("examples/"):
        return path.removesuffix(".py") + ".md" if path.endswith(".py") else "examples.md"
    return None


def on_config(config: Any) -> Any:
    """Complete the navigation: the API reference, and the notebooks if they have been made."""
    for section in config.nav:
        if "Reference" in section:
            front = [f"api/{page}.md" for page in (*FRONT, *MODULES)]
            section["Reference"][1:1] = [
                {"API": front},
                {"API of the experiments": [f"api/experiments/{module}.md" for module in experiments()]},
            ]
    folder = ROOT / "docs/notebooks"
    if folder.exists():
        first = (folder / "index.md").read_text(encoding="utf-8") if (folder / "index.md").exists() else ""
        order = ["index.md", *re.findall(r"\]\((\w+\.md)\)", first), *sorted(path.name for path in folder.glob("*.md"))]
        pages = [page for page in dict.fromkeys(order) if (folder / page).exists()]
        config.nav.insert(2, {"Notebooks": [f"notebooks/{page}" for page in pages]})
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are not files of docs/."""
    made = dict(api_pages())
    for path, page in ELSEWHERE.items():
        if path.endswith(".md") and page != "index.md":
            made[page] = (ROOT / path).read_text(encoding="utf-8")
    made |= {"messages.md": message_page(), "changelog.md": changelog()}
    made |= {str(page_of(name)): text for name, text in example_pages()}
    for page, text in made.items():
        files.append(File.generated(config, page, content=text))
    for name in ORDER:
        files.append(File.generated(config, f"notebooks/{name}.py", abs_src_path=str(ROOT / f"notebooks/{name}.py")))
        files.append(File.generated(config, f"notebooks/{name}.ipynb", content=for_jupyter(name)))
    return files


def on_page_content(html: str, page: Any, files: Files, **_: Any) -> str:
    """In the API reference, link the pages that docstrings name, such as docs/sae.md."""
    if not page.file.src_uri.startswith("api/"):
        return html
    up = "../" * page.file.src_uri.count("/")
    known = {file.src_uri: title(file) for file in files.documentation_pages()}

    def linked(name: re.Match[str]) -> str:
        page = known.get(f"{name[1]}.md")
        return f'<a href="{up}{name[1]}.html">{page}</a>' if page else name[0]

    html = re.sub(r"\bdocs/([\w-]+)\.md", linked, html)
    anchor = f"{up}api/models.html#hookline.HookedModule."
    return re.sub(r"<code>HookedModule\.(\w+)</code>", rf'<a href="{anchor}\1">\g<0></a>', html)


def title(file: File) -> str:
    """The title of a page: its first heading."""
    found = re.search(r"^# (.*)$", file.content_string, re.MULTILINE)
    return found[1] if found else file.src_uri


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Change links between files of the repository to links between pages, and set the rank of a page in searches.

    A notebook gets a link to its file for Jupyter, which only the site has.
    """
    uri = page.file.src_uri
    page.meta["search"] = {"boost": next(boost for pattern, boost in RANKS.items() if re.match(pattern, uri))}
    source = next((path for path, shown in ELSEWHERE.items() if shown == uri and uri != "index.md"), f"docs/{uri}")

    def changed(link: re.Match[str]) -> str:
        before, target, anchor, after = link.groups()
        if ":" in target:
            return link[0]
        shown = page_of(posixpath.normpath(posixpath.join(posixpath.dirname(source), target)))
        if shown is None:
            return link[0]
        return before + posixpath.relpath(shown, posixpath.dirname(uri) or ".") + (anchor or "") + after

    markdown = LINK.sub(changed, markdown)
    return re.sub(r"^\[(\w+)\.py\]\(\1\.py\)$", r"[\1.ipynb](\1.ipynb) · \g<0>", markdown, flags=re.MULTILINE)
