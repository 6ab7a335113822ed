"""The command line: verify and list a model's points, look into models and stores. docs/cli.md has every command.

Nothing slow is imported before a command runs, so that `hookline --help` and completion answer at once.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hookline.cli.outcome import Answer, Commands

if TYPE_CHECKING:
    from hookline.explore import Explorer
    from hookline.model import HookedModel

app = typer.Typer(
    help="Read, cache, edit and trace the activations inside a model, by name.",
    cls=Commands,
    no_args_is_help=True,
    rich_markup_mode=None,  # slow to import, and its boxes need a terminal with UTF-8
    pretty_exceptions_enable=False,
)
stores = typer.Typer(help="Inspect stores of harvested activations.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(stores, name="store")

_MOST_TOKENS = 2**28
"""The largest batch that is planned: its ids alone are 2 GB."""


def _shipped() -> list[str]:
    """The models that completion offers."""
    return ["tinyworld", "tinysight"]


ModelName = Annotated[
    str,
    typer.Argument(help="A hub id, a local folder, a GGUF file, or a model of the package.", autocompletion=_shipped),
]
Place = Annotated[str, typer.Argument(help="The store's folder, or an address such as s3://….")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document; errors too.")]


def _version(is_asked: bool) -> None:
    if is_asked:
        from hookline import __version__

        print(f"hookline {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Read, cache, edit and trace the activations inside a model, by name."""


@app.command()
def verify(model: ModelName, as_json: Json = False) -> Answer:
    """Verify every point of a model: which are proved, unavailable and why, or failing; exits with 1 if any fails."""
    from hookline.loading import load

    loaded = load(model)
    with _few_threads(loaded):
        report = loaded.verify()
    return Answer(as_json, {"model": model, **report.to_json()}, report, is_good=not report.failed())


@app.command()
def points(
    model: ModelName,
    names: Annotated[str, typer.Argument(help="A name or a glob; by default, all points.")] = "*",
    as_json: Json = False,
) -> Answer:
    """List a model's points with their axes and shapes, for two rows of tokens or a prompt with an image."""
    from hookline.loading import load

    loaded = load(model)
    example = loaded.example_inputs() or {"input": loaded.example_tokens()}
    cache = loaded.cache(**example, names_filter=[*loaded.hook_dict] if names == "*" else names)
    rows = [(name, loaded.point(name).axes, list(activation.shape)) for name, activation in cache.items()]
    width = max(len(name) for name, *_ in rows)
    text = "\n".join(f"{name:<{width}}  {axes:<8}  {shape}" for name, axes, shape in rows)
    listed = [dict(zip(("name", "axes", "shape"), row, strict=True)) for row in rows]
    return Answer(as_json, {"model": model, "points": listed}, text)


@app.command()
def plan(
    model: ModelName,
    points: Annotated[
        list[str] | None,
        typer.Option(help="A name or a glob to cache, by default every layer's resid_post; may be repeated."),
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Texts at once.")] = 1,
    length: Annotated[int, typer.Option(min=1, help="Tokens of a text.")] = 128,
    new_tokens: Annotated[int, typer.Option(min=0, help="Tokens that are generated after each text.")] = 0,
    texts: Annotated[int, typer.Option(min=0, help="Texts in a store of these points.")] = 0,
    devices: Annotated[int, typer.Option(min=1, help="Devices that the model is split over (tensor parallel).")] = 1,
    dtype: Annotated[str | None, typer.Option(help="The dtype of the weights; by default, that of the config.")] = None,
    as_json: Json = False,
) -> Answer:
    """Say whether a run fits into memory, from the model's config alone; exits with 1 if it does not."""
    if batch * (length + new_tokens) > _MOST_TOKENS:
        raise typer.BadParameter(f"a plan has at most {_MOST_TOKENS:,} tokens: plan fewer texts")
    import torch

    from hookline.loading import outline

    weights_dtype = getattr(torch, dtype or "float32", None)
    if not isinstance(weights_dtype, torch.dtype) or not weights_dtype.is_floating_point:
        raise typer.BadParameter(
            f"--dtype is the name of a floating-point dtype of torch, such as bfloat16, not {dtype!r}"
        )
    tokens = torch.zeros(batch, length, dtype=torch.long)
    options: dict[str, Any] = {"new_tokens": new_tokens, "texts": texts, "devices": devices}
    memory = outline(model, dtype=dtype).plan(points or "blocks.*.hook_resid_post", input=tokens, **options).memory
    return Answer(as_json, memory.to_json(), memory, is_good=memory.fits)


@app.command()
def doctor(model: ModelName = "tinyworld", as_json: Json = False) -> Answer:
    """Print versions, devices, whether each device computes what the CPU does, and what is proved on a model."""
    from hookline.doctor import diagnose
    from hookline.loading import load

    loaded = load(model)
    what = f"comparing devices with the CPU, then verifying the {len(loaded.hook_dict)} points of {model}"
    print(f"{what} …", file=sys.stderr)
    with _few_threads(loaded):
        diagnosis = diagnose(loaded)
    return Answer(as_json, diagnosis.to_json(), diagnosis, is_good=not diagnosis.problems())


@app.command()
def migrate(
    paths: Annotated[list[Path], typer.Argument(help="Scripts, notebooks, or folders of them.")],
    write: Annotated[bool, typer.Option("--write", help="Change the files; otherwise, only show the changes.")] = False,
    as_json: Json = False,
) -> Answer:
    """Change imports of transformer_lens, mi_crow and vlm_spectra to hookline's, and list what will differ."""
    from hookline.migrate import migrate as migrations
    from hookline.migrate import summary

    reports = []
    for report in migrations(paths, write=write):
        reports.append(report)
        if not as_json and (report.changes or report.differences or report.error):
            print(f"{report}\n")
    failed = [report for report in reports if report.error]
    return Answer(as_json, {"files": [report.to_json() for report in reports]}, summary(reports), is_good=not failed)


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="The folder that the page is written to.")] = Path("out"),
    as_json: Json = False,
) -> Answer:
    """Tour the model inside the package, in the terminal and as a page of the explorer that opens from disk."""
    from hookline.demo import demo as tour

    return Answer(as_json, {"page": str(tour(out))})


@app.command()
def explore(
    model: ModelName = "tinyworld",
    prompt: Annotated[str | None, typer.Option(help="The text to begin with.")] = None,
    other: Annotated[str | None, typer.Option(help="A second text, to compare with and patch from.")] = None,
    image: Annotated[
        list[Path] | None, typer.Option(help="An image that goes in with the text; may be repeated.")
    ] = None,
    other_image: Annotated[
        list[Path] | None, typer.Option(help="An image of the second text; may be repeated.")
    ] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port on 127.0.0.1; 0 is any that is free.")] = 0,
    no_browser: Annotated[bool, typer.Option("--no-browser", help="Do not open the page in a browser.")] = False,
    export: Annotated[Path | None, typer.Option(help="Write the page to this file, and serve nothing.")] = None,
    sae: Annotated[list[str] | None, typer.Option(help="The folder of a sparse autoencoder, or POINT=FOLDER.")] = None,
    store: Annotated[str | None, typer.Option(help="A store of activations, for top contexts of features.")] = None,
    probe: Annotated[Path | None, typer.Option(help="The file of a probe (Probes.save), which scores tokens.")] = None,
    as_json: Json = False,
) -> Answer:
    """Look into a model in the browser: a page on this machine, whose address is printed."""
    from hookline.errors import HooklineError
    from hookline.explore import explore as show
    from hookline.explore import export_page, first_prompts
    from hookline.loading import load

    first, second = first_prompts(model) if prompt is None else (prompt, "")
    second = second if other is None else other
    if export is not None and not first:
        raise HooklineError(f"a page needs a text: hookline explore {model} --export {export} --prompt TEXT")
    loaded = load(model)
    options: dict[str, Any] = {"name": model, "saes": sae or None, "store": store, "probe": probe}
    options |= _images(model, first, image, other_image)
    if export is not None:
        page = export_page(loaded, export, first, second, **options)
        return Answer(as_json, {"page": str(page)}, page)
    explorer = show(loaded, first, second, **options, server=True, port=port, browser=not no_browser)
    return Answer(as_json, {"address": explorer.address}, then=lambda: _serve(explorer, loaded))


def _serve(explorer: Explorer, model: HookedModel) -> None:
    with _few_threads(model):
        explorer.wait()


def _images(model: str, prompt: str, image: list[Path] | None, other: list[Path] | None) -> dict[str, Any]:
    """The images of both prompts; by default, those of tinysight's first page."""
    if image or other or model != "tinysight" or "<image>" not in prompt:
        return {"images": image or (), "other_images": other or ()}
    from hookline.demo.tinysight import first_images

    first, second = first_images()
    return {"images": [first], "other_images": [second]}


@stores.command("verify")
def verify_store(
    path: Place,
    rebuild: Annotated[bool, typer.Option(help="First rebuild the manifest from the shards' headers.")] = False,
    as_json: Json = False,
) -> Answer:
    """Check every byte of a store: which files are damaged, missing or of another harvest; exits with 1 if any is."""
    from hookline.store import open_store

    report = open_store(path).verify(rebuild=rebuild)
    return Answer(as_json, report.to_json(), report, is_good=report.is_sound)


@stores.command("info")
def describe_store(path: Place, as_json: Json = False) -> Answer:
    """Print what a store holds: the model, the options, the points, and the number of rows."""
    from hookline.store import open_store

    store = open_store(path)
    manifest, about = store.manifest, store.manifest.about
    lines = [repr(store)]
    for title, values in (("model", about.model), ("options", about.options)):
        lines += ["", title, *(f"  {name:<12} {value}" for name, value in values.items())]
    lines += ["", "points", *(f"  {name}  {list(point.shape)} {point.dtype}" for name, point in about.points.items())]
    counts = {"rows": manifest.rows, "examples": manifest.examples, "is_complete": manifest.is_complete}
    return Answer(as_json, {"path": store.path, **counts, **about.to_json()}, "\n".join(lines))


@contextmanager
def _few_threads(model: HookedModel) -> Iterator[None]:
    """Use one thread for a small model, where several would mostly wait for each other."""
    import torch

    before = torch.get_num_threads()
    if sum(parameter.numel() for parameter in model.module.parameters()) < 10_000_000:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
