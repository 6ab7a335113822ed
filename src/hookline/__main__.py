"""`python -m hookline`."""

from hookline.cli import app

app()
