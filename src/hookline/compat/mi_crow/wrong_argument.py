"""The error for wrong arguments. mi-crow raises a ValueError for them."""

from hookline.errors import HooklineError


class WrongArgumentError(HooklineError, ValueError):
    """An argument that mi-crow refuses with a `ValueError`."""
