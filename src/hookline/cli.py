"""The command line: list and verify a model's points, and inspect stored activations."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from hookline.model import HookedModel

app = typer.Typer(help="Read, cache, edit and trace the activations inside a model, by name.", no_args_is_help=True)

stores = typer.Typer(help="Inspect stores of harvested activations.", no_args_is_help=True)
app.add_typer(stores, name="store")

Model = Annotated[str, typer.Argument(help="A hub id or a local folder.")]
Place = Annotated[str, typer.Argument(help="The store's folder, or an address such as s3://….")]


@contextmanager
def _errors_in_one_line() -> Iterator[None]:
    """Print errors that are meant for the user without a traceback, and exit with status 2."""
    from hookline.errors import HooklineError

    try:
        yield
    except (HooklineError, OSError) as error:
        typer.echo(f"error: {' '.join(str(error).split())}", err=True)
        raise typer.Exit(2) from None


@app.command()
def verify(model: Model) -> None:
    """Verify every point of a model: print which are verified, not available and why, or failing."""
    from hookline import load  # slow to import: `hookline --help` answers at once

    with _errors_in_one_line():
        loaded = load(model)
        with _few_threads(loaded):
            report = loaded.verify()
    _print_report(report, is_good=not report.failed())


@app.command()
def points(
    model: Model, names: Annotated[str, typer.Argument(help="A name or a glob; by default, all points.")] = "*"
) -> None:
    """List a model's points with their axes and shapes, for two rows of tokens or a prompt with an image."""
    from hookline import load

    with _errors_in_one_line():
        loaded = load(model)
        example = loaded.example_inputs() or {"input": loaded.example_tokens()}
        cache = loaded.cache(**example, names_filter=[*loaded.hook_dict] if names == "*" else names)
    width = max(map(len, cache))
    for name, activation in cache.items():
        typer.echo(f"{name:<{width}}  {loaded.point(name).axes:<8}  {list(activation.shape)}")


@app.command()
def plan(
    model: Model,
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
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say whether a run fits into memory, from the model's config alone; exits with 1 if it does not."""
    from hookline.load import outline

    with _errors_in_one_line():
        import torch

        tokens = torch.zeros(batch, length, dtype=torch.long)
        given: dict[str, Any] = {"new_tokens": new_tokens, "texts": texts, "devices": devices}
        memory = outline(model, dtype=dtype).plan(points or "blocks.*.hook_resid_post", input=tokens, **given).memory
    typer.echo(json.dumps(memory.to_json(), indent=1) if as_json else memory)
    if not memory.fits:
        raise typer.Exit(1)


@app.command()
def doctor(
    model: Annotated[str, typer.Argument(help="A hub id, a local folder, or a model of the package.")] = "tinyworld",
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Print versions, devices, whether each device computes what the CPU does, and what is proved on a model."""
    from hookline import load
    from hookline.doctor import diagnose

    with _errors_in_one_line():
        loaded = load(model)
        what = f"comparing devices with the CPU, then verifying the {len(loaded.hook_dict)} points of {model}"
        typer.echo(f"{what} …", err=True)
        with _few_threads(loaded):
            found = diagnose(loaded)
    typer.echo(json.dumps(found.to_json(), indent=1) if as_json else found)
    if found.problems():
        raise typer.Exit(1)


@app.command()
def migrate(
    paths: Annotated[list[Path], typer.Argument(help="Scripts, notebooks, or folders of them.")],
    write: Annotated[bool, typer.Option("--write", help="Change the files; otherwise, only show the changes.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the changes and differences as JSON.")] = False,
) -> None:
    """Change imports of transformer_lens, mi_crow and vlm_spectra to hookline's, and list what will differ."""
    from hookline.migrate import migrate as migrations
    from hookline.migrate import summary

    reports = []
    for report in migrations(paths, write=write):
        reports.append(report)
        if not as_json and (report.changes or report.differences or report.error):
            typer.echo(f"{report}\n")
    typer.echo(json.dumps([report.to_json() for report in reports], indent=1) if as_json else summary(reports))
    if any(report.error for report in reports):
        raise typer.Exit(1)


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="The folder that the page is written to.")] = Path("out"),
) -> None:
    """Tour the model inside the package, in the terminal and as a page of the explorer that opens from disk."""
    from hookline.demo import demo as tour

    with _errors_in_one_line():
        tour(out)


@app.command()
def explore(
    model: Annotated[str, typer.Argument(help="A hub id, a local folder, or a model of the package.")] = "tinyworld",
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
) -> None:
    """Look into a model in the browser: a page on this machine, whose address is printed."""
    from hookline import load
    from hookline.explore import export_page, first_prompts, serve

    with _errors_in_one_line():
        loaded = load(model)
        first, second = first_prompts(model) if prompt is None else (prompt, "")
        second = second if other is None else other
        given: dict[str, Any] = {"name": model, "saes": sae or None, "store": store}
        given |= _images(model, first, image, other_image)
        if export is not None:
            typer.echo(export_page(loaded, export, first, second, **given))
            return
        with _few_threads(loaded):
            serve(loaded, first, second, **given, port=port, browser=not no_browser)


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
) -> None:
    """Check every byte of a store, and print which files are damaged, missing or from another harvest."""
    with _errors_in_one_line():
        from hookline.store import open_store

        report = open_store(path).verify(rebuild=rebuild)
    _print_report(report, is_good=report.is_sound)


@stores.command("info")
def describe_store(path: Place) -> None:
    """Print what a store holds: the model, the options, the points, and the number of rows."""
    with _errors_in_one_line():
        from hookline.store import open_store

        store = open_store(path)
        about = store.manifest.about
    typer.echo(repr(store))
    for title, values in (("model", about.model), ("options", about.options)):
        typer.echo(f"\n{title}")
        for name, value in values.items():
            typer.echo(f"  {name:<12} {value}")
    typer.echo("\npoints")
    for name, column in about.points.items():
        typer.echo(f"  {name}  {list(column.shape)} {column.dtype}")


def _print_report(report: Any, *, is_good: bool) -> None:
    """Print a report, and exit with status 1 if it is bad."""
    typer.echo(report)
    if not is_good:
        raise typer.Exit(1)


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
