"""`python -m hookline`."""

from hookline.cli import app

app(prog_name="hookline")
