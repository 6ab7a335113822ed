"""Conversion of images in any supported form (PIL, array, tensor, path) to RGB."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from torch import Tensor

from hookline.errors import HooklineError, a_type

if TYPE_CHECKING:
    from PIL.Image import Image

ImageLike: TypeAlias = "Image | np.ndarray[Any, Any] | Tensor | str | Path"
Images: TypeAlias = "ImageLike | Sequence[ImageLike] | Sequence[Sequence[ImageLike]]"
"""One image; a list of images, for one prompt or one per prompt; or a list of images per prompt."""

_KINDS = "a PIL image, an array of height × width × channels, or the path of a file"
_DEEPER = ("I", "F", "I;16", "I;16L", "I;16B", "I;16N")
"""PIL modes with more than 8 bits per channel."""


def as_image(source: Any, what: str = "the image") -> Image:
    """One image as RGB, rotated according to its EXIF data, without alpha. `what` names the image in errors."""
    try:
        from PIL import Image, ImageOps
    except ImportError as error:
        raise HooklineError('images require Pillow: pip install "hookline[vision]"') from error
    if isinstance(source, Image.Image):
        image = source
    elif isinstance(source, str | Path):
        image = _opened(source, what)
    elif isinstance(source, np.ndarray | Tensor):
        image = Image.fromarray(_pixels(source, what))
    else:
        raise HooklineError(f"{what} is {a_type(source)}: give {_KINDS}")
    if image.mode in _DEEPER:
        raise HooklineError(f"{what} has PIL mode {image.mode!r}, with more than 8 bits: scale it to 0 … 255 first")
    if 0 in image.size:
        raise HooklineError(f"{what} is empty: it has {image.size[0]} × {image.size[1]} pixels")
    try:
        return ImageOps.exif_transpose(image).convert("RGB")
    except ValueError as error:
        raise HooklineError(f"{what} has PIL mode {image.mode!r}, which cannot be converted to RGB: {error}") from error


def is_one_image(images: Any) -> bool:
    """Whether this is a single image, not a list."""
    return not isinstance(images, list | tuple)


def _opened(path: str | Path, what: str) -> Image:
    from PIL import Image, UnidentifiedImageError

    if str(path).startswith(("http://", "https://")):
        raise HooklineError(f"{what} is a URL, {str(path)!r}: images are not downloaded. Pass a local file")
    if not Path(path).is_file():
        raise HooklineError(f"{what}: file {str(path)!r} does not exist")
    try:
        with Image.open(path) as image:
            image.load()
            return image
    except (UnidentifiedImageError, Image.DecompressionBombError, OSError, SyntaxError, ValueError, EOFError) as error:
        # PIL raises SyntaxError for a broken PNG, and other types depending on the decoder.
        raise HooklineError(f"{what}: file {str(path)!r} cannot be read as an image: {error}") from error


def _pixels(values: np.ndarray[Any, Any] | Tensor, what: str) -> np.ndarray[Any, Any]:
    """An array as PIL accepts it: height × width, or height × width × 3 or 4, with values 0 … 255."""
    if isinstance(values, Tensor):  # NumPy has no bfloat16
        values = (values.float() if values.is_floating_point() else values).detach().cpu().numpy()
    array = _channels_last(values, what)
    if array.size == 0:
        raise HooklineError(f"{what} is empty: it has shape {list(values.shape)}")
    if array.dtype == np.uint8:
        return array
    if not np.issubdtype(array.dtype, np.floating):
        raise HooklineError(f"{what} is an array of {array.dtype}: expected uint8 (0 … 255) or floats (0 … 1)")
    low, high = float(array.min()), float(array.max())
    if not (low >= 0 and high <= 1):
        raise HooklineError(
            f"{what} has floats from {low:.3g} to {high:.3g}: expected 0 to 1. For 0 … 255 use uint8; pass values "
            "already normalized by a processor as pixel_values="
        )
    scaled: np.ndarray[Any, Any] = np.rint(array * 255).astype(np.uint8)
    return scaled


def _channels_last(array: np.ndarray[Any, Any], what: str) -> np.ndarray[Any, Any]:
    """Height × width × channels, converted from channels × height × width if needed."""
    shape = list(array.shape)
    if array.ndim == 4:
        raise HooklineError(f"{what} has shape {shape}, a batch of images: pass a list, list(array)")
    if array.ndim == 2:
        return array
    if array.ndim != 3:
        raise HooklineError(f"{what} has shape {shape}: expected height × width × 3, or 3 × height × width")
    last, first = shape[2] in (1, 3, 4), shape[0] in (1, 3, 4)
    if last == first:
        problem = "could have its channels first or last" if last else "has no axis of 1, 3 or 4 channels"
        raise HooklineError(f"{what} has shape {shape}, which {problem}: pass a PIL image")
    array = np.ascontiguousarray(array if last else array.transpose(1, 2, 0))
    return array[..., 0] if array.shape[2] == 1 else array


def sizes_of(rows: Sequence[Sequence[Image]]) -> list[list[tuple[int, int]]]:
    """Height and width of every image."""
    return [[(image.height, image.width) for image in row] for row in rows]
