"""Pictures: whatever a user has, as RGB images."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from hookline.errors import HooklineError

if TYPE_CHECKING:
    from PIL.Image import Image

Picture: TypeAlias = "Image | np.ndarray[Any, Any] | Tensor | str | Path"
Pictures: TypeAlias = "Picture | Sequence[Picture] | Sequence[Sequence[Picture]]"
"""One picture, several of one prompt or one for each prompt, or a list for each prompt."""

_KINDS = "a PIL image, an array of height × width × colours, or the path of a file"
_DEEPER = ("I", "F", "I;16", "I;16L", "I;16B", "I;16N")
"""PIL's modes whose values may not fit into eight bits."""


def picture_of(given: Any, what: str = "the picture") -> Image:
    """One picture as an RGB image, turned as its EXIF says; alpha is left out. `what` is how an error names it."""
    from_pil = _pil()
    if isinstance(given, from_pil.Image):
        image = given
    elif isinstance(given, str | Path):
        image = _opened(given, what)
    elif isinstance(given, np.ndarray | Tensor):
        image = from_pil.fromarray(_pixels(given, what))
    else:
        raise HooklineError(f"{what} is a {type(given).__name__}: give {_KINDS}")
    if image.mode in _DEEPER:
        raise HooklineError(f"{what} has PIL's mode {image.mode!r}, of more than 8 bits: scale it to 0 … 255 first")
    if 0 in image.size:
        raise HooklineError(f"{what} is empty: it has {image.size[0]} × {image.size[1]} pixels")
    try:
        return _upright(image).convert("RGB")
    except ValueError as error:
        raise HooklineError(f"{what} has PIL's mode {image.mode!r}: give it in RGB. PIL says: {error}") from error


def _upright(image: Image) -> Image:
    from PIL import ImageOps

    return ImageOps.exif_transpose(image)


def is_picture(given: Any) -> bool:
    """Whether it is meant as one picture, and not as several."""
    return not isinstance(given, list | tuple)


def _pil() -> Any:
    try:
        from PIL import Image
    except ImportError as error:
        raise HooklineError('pictures need Pillow: pip install "hookline[vision]"') from error
    return Image


def _opened(path: str | Path, what: str) -> Image:
    from PIL import Image, UnidentifiedImageError

    if str(path).startswith(("http://", "https://")):
        raise HooklineError(f"{what} is an address, {str(path)!r}: nothing is downloaded here. Give the file itself")
    if not Path(path).is_file():
        raise HooklineError(f"{what}: there is no file {str(path)!r}")
    try:
        with Image.open(path) as image:
            image.load()
            return image
    except (UnidentifiedImageError, Image.DecompressionBombError, OSError, SyntaxError, ValueError, EOFError) as error:
        # PIL calls a broken PNG a SyntaxError, and others whatever their decoder ran into.
        raise HooklineError(f"{what}: the file {str(path)!r} cannot be read as a picture: {error}") from error


def _pixels(given: np.ndarray[Any, Any] | Tensor, what: str) -> np.ndarray[Any, Any]:
    """An array as PIL takes it: height × width, or height × width × 3 or 4, of 0 … 255."""
    if isinstance(given, Tensor):  # numpy knows no bfloat16
        given = (given.float() if given.is_floating_point() else given).detach().cpu().numpy()
    array = _channels_last(given, what)
    if array.size == 0:
        raise HooklineError(f"{what} is empty: it has the shape {list(given.shape)}")
    if array.dtype == np.uint8:
        return array
    if not np.issubdtype(array.dtype, np.floating):
        raise HooklineError(f"{what} is an array of {array.dtype}: give uint8 (0 … 255) or floats (0 … 1)")
    low, high = float(array.min()), float(array.max())
    if not (low >= 0 and high <= 1):
        raise HooklineError(
            f"{what} has floats from {low:.3g} to {high:.3g}: floats go from 0 to 1. For 0 … 255 give uint8; what a "
            "processor has normalised goes in as pixel_values="
        )
    scaled: np.ndarray[Any, Any] = np.rint(array * 255).astype(np.uint8)
    return scaled


def _channels_last(array: np.ndarray[Any, Any], what: str) -> np.ndarray[Any, Any]:
    """Height × width × colours, also of colours × height × width."""
    shape = list(array.shape)
    if array.ndim == 4:
        raise HooklineError(f"{what} has the shape {shape}, that of several: give them as a list, list(array)")
    if array.ndim == 2:
        return array
    if array.ndim != 3:
        raise HooklineError(f"{what} has the shape {shape}: a picture is height × width × 3, or 3 × height × width")
    last, first = shape[2] in (1, 3, 4), shape[0] in (1, 3, 4)
    if last == first:
        problem = "may have its colours first or last" if last else "has no axis of 1, 3 or 4 colours"
        raise HooklineError(f"{what} has the shape {shape} and {problem}: give a PIL image")
    array = np.ascontiguousarray(array if last else array.transpose(1, 2, 0))
    return array[..., 0] if array.shape[2] == 1 else array


def sizes_of(rows: Sequence[Sequence[Image]]) -> list[list[tuple[int, int]]]:
    """Height and width of every picture."""
    return [[(image.height, image.width) for image in row] for row in rows]


def as_dtype(value: Any, device: torch.device, dtype: torch.dtype) -> Any:
    """A tensor on a device, floats in that type; what is no tensor as it is."""
    if not isinstance(value, Tensor):
        return value
    return value.to(device=device, dtype=dtype if value.is_floating_point() else None)
