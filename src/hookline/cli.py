"""The command line: look at a model's points, and prove them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(help="Read, cache, edit and trace the activations inside a model, by name.", no_args_is_help=True)

Model = Annotated[str, typer.Argument(help="A hub id or a local folder.")]


@app.command()
def verify(model: Model) -> None:
    """Prove every point of a model: what is proved, what is not to be had and why, and what fails."""
    from hookline import load  # slow to import: `hookline --help` answers at once

    report = load(model).verify()
    typer.echo(report)
    if report.failed():
        raise typer.Exit(1)


@app.command()
def points(
    model: Model, names: Annotated[str, typer.Argument(help="A name or a glob; all points without one.")] = "*"
) -> None:
    """List a model's points, with their axes and their shapes for two rows of seven tokens."""
    from hookline import load

    loaded = load(model)
    cache = loaded.cache(loaded.example_tokens(), names_filter=names)
    width = max(map(len, cache))
    for name, activation in cache.items():
        typer.echo(f"{name:<{width}}  {loaded.point(name).axes:<8}  {list(activation.shape)}")


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="The folder that the page is written to.")] = Path("out"),
) -> None:
    """A tour of the model inside the package: which heads matter, what they do, what changes without them."""
    from hookline.demo import demo as tour

    tour(out)


if __name__ == "__main__":
    app()
