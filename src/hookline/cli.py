"""The command line: look at a model's points, prove them, and look at stored activations."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from hookline.model import HookedModel

app = typer.Typer(help="Read, cache, edit and trace the activations inside a model, by name.", no_args_is_help=True)

stores = typer.Typer(help="Look at activations that were harvested.", no_args_is_help=True)
app.add_typer(stores, name="store")

Model = Annotated[str, typer.Argument(help="A hub id or a local folder.")]


@app.command()
def verify(model: Model) -> None:
    """Prove every point of a model: what is proved, what is not to be had and why, and what fails."""
    from hookline import load  # slow to import: `hookline --help` answers at once

    with _telling():
        loaded = load(model)
        with _few_threads(loaded):
            report = loaded.verify()
    typer.echo(report)
    if report.failed():
        raise typer.Exit(1)


@app.command()
def points(
    model: Model, names: Annotated[str, typer.Argument(help="A name or a glob; all points without one.")] = "*"
) -> None:
    """List a model's points, with their axes and their shapes: for two rows of tokens, or a prompt with a picture."""
    from hookline import load

    with _telling():
        loaded = load(model)
        seen = loaded.example_inputs()
        example = {"input": loaded.example_tokens()} if seen is None else seen
        cache = loaded.cache(**example, names_filter=[*loaded.hook_dict] if names == "*" else names)
    width = max(map(len, cache))
    for name, activation in cache.items():
        typer.echo(f"{name:<{width}}  {loaded.point(name).axes:<8}  {list(activation.shape)}")


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="The folder that the page is written to.")] = Path("out"),
) -> None:
    """A tour of the model inside the package: which heads matter, what they do, what changes without them."""
    from hookline.demo import demo as tour

    with _telling():
        tour(out)


@app.command()
def explore(
    model: Annotated[str, typer.Argument(help="A hub id, a local folder, or a model of the package.")] = "tinyworld",
    prompt: Annotated[str | None, typer.Option(help="The text to begin with.")] = None,
    other: Annotated[str | None, typer.Option(help="A second text, to compare with and patch from.")] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port on 127.0.0.1; 0 is any that is free.")] = 0,
    no_browser: Annotated[bool, typer.Option("--no-browser", help="Do not open the page in a browser.")] = False,
    export: Annotated[Path | None, typer.Option(help="Write the page to this file, and serve nothing.")] = None,
) -> None:
    """Look into a model in the browser: a page on this machine, whose address is printed."""
    from hookline import load
    from hookline.explore import export_page, first_prompts, serve

    with _telling():
        loaded = load(model)
        first, second = first_prompts(model) if prompt is None else (prompt, "")
        second = second if other is None else other
        if export is not None:
            typer.echo(export_page(loaded, export, first, second, name=model))
            return
        with _few_threads(loaded):
            serve(loaded, first, second, name=model, port=port, browser=not no_browser)


Place = Annotated[str, typer.Argument(help="The store's folder, or an address such as s3://….")]


@stores.command("verify")
def verify_store(
    path: Place,
    rebuild: Annotated[bool, typer.Option(help="First write the manifest anew, from the shards' headers.")] = False,
) -> None:
    """Look at every byte of a store, and say which file is damaged, missing or of another harvest."""
    with _telling():
        from hookline.store import open_store

        report = open_store(path).verify(rebuild=rebuild)
    typer.echo(report)
    if not report.is_sound:
        raise typer.Exit(1)


@stores.command("info")
def describe_store(path: Place) -> None:
    """Say what a store is of: the model, the points, how many rows."""
    with _telling():
        from hookline.store import open_store

        store = open_store(path)
        manifest = store.manifest
    typer.echo(repr(store))
    for title, values in (("model", manifest.about.model), ("options", manifest.about.options)):
        typer.echo(f"\n{title}")
        for name, value in values.items():
            typer.echo(f"  {name:<12} {value}")
    typer.echo("\npoints")
    for name, column in manifest.about.points.items():
        typer.echo(f"  {name}  {list(column.shape)} {column.dtype}")


@contextmanager
def _few_threads(model: HookedModel) -> Iterator[None]:
    """One thread for a small model: with more, they spend most of their time waiting for each other."""
    import torch

    before = torch.get_num_threads()
    if sum(parameter.numel() for parameter in model.module.parameters()) < 10_000_000:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _telling() -> Iterator[None]:
    """An error that is meant for the reader is told in one line, without its traceback; 1 is for what was found."""
    from hookline.errors import HooklineError

    try:
        yield
    except (HooklineError, OSError) as error:
        typer.echo(f"error: {' '.join(str(error).split())}", err=True)
        raise typer.Exit(2) from None


if __name__ == "__main__":
    app()
