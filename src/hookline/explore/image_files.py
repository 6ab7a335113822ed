"""Images of the page as data: URLs: how they are made, and read with every limit checked before a pixel is decoded."""

from __future__ import annotations

import base64
import binascii
import io
import re
import warnings
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from hookline.errors import HooklineError
from hookline.vision.images import ImageLike, as_image

if TYPE_CHECKING:
    from PIL.Image import Image

MOST_IMAGES = 8
"""Of one prompt."""
MOST_IMAGE_BYTES = 6_000_000
"""Of one file."""
MOST_PIXELS = 40_000_000
"""Of one image: a small file may have very many."""
FORMATS = {"png": "PNG", "jpeg": "JPEG", "webp": "WEBP", "gif": "GIF", "bmp": "BMP"}
"""What every browser shows, by the type in a URL; with Pillow's name."""

_URL = re.compile(r"data:image/(\w+);base64,([A-Za-z0-9+/]*=*)")
_ENDINGS = {".png": "png", ".jpg": "jpeg", ".jpeg": "jpeg", ".webp": "webp", ".gif": "gif", ".bmp": "bmp"}


def data_url(image: ImageLike) -> str:
    """An image as a data: URL: a file that browsers can show as it is, anything else as PNG."""
    kind = _ENDINGS.get(Path(image).suffix.lower()) if isinstance(image, str | Path) else None
    if isinstance(image, str | Path) and kind is not None and Path(image).is_file():
        content = Path(image).read_bytes()
    else:
        made = io.BytesIO()
        as_image(image).save(made, "PNG")
        kind, content = "png", made.getvalue()
    url = f"data:image/{kind};base64,{base64.b64encode(content).decode()}"
    decoded_image(url)  # raises if it cannot be read
    return url


def image_bytes(url: str) -> tuple[str, bytes]:
    """The type and the bytes of a data: URL."""
    match = _URL.fullmatch(url)
    if match is None or match[1] not in FORMATS:
        raise HooklineError(f"an image is a file of type {', '.join(FORMATS)}, not {url[:40]!r}…")
    if len(match[2]) > MOST_IMAGE_BYTES * 4 // 3 + 4:
        size = len(match[2]) * 3 // 4
        raise HooklineError(f"the image has {size:,} bytes; the explorer takes up to {MOST_IMAGE_BYTES:,}: shrink it")
    try:
        return match[1], base64.b64decode(match[2], validate=True)
    except binascii.Error as error:
        raise HooklineError(f"the image is not valid base64: {error}") from None


@lru_cache(maxsize=4)  # every view asks for the same images
def decoded_image(url: str) -> Image:
    """The image of a data: URL, as Pillow reads it."""
    kind, content = image_bytes(url)
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError as error:
        raise HooklineError('images require Pillow: pip install "hookline[vision]"') from error
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the number of pixels is checked here, other oddities are harmless
            with Image.open(io.BytesIO(content), formats=[FORMATS[kind]]) as image:
                if image.width * image.height > MOST_PIXELS:
                    raise HooklineError(
                        f"the image has {image.width:,} × {image.height:,} pixels; the explorer takes up to "
                        f"{MOST_PIXELS:,}: shrink it"
                    )
                image.load()
    except UnidentifiedImageError:
        raise HooklineError(f"the file is not an image of type {kind}") from None
    except (Image.DecompressionBombError, OSError, SyntaxError, ValueError, EOFError, MemoryError) as error:
        # Pillow raises SyntaxError for a broken PNG, and other types depending on the decoder.
        raise HooklineError(f"the image cannot be read: {error}") from error
    as_image(image)  # raises if it has more than 8 bits per channel
    return image


def has_transparency(url: str) -> bool:
    """Whether pixels are transparent: the model gets their colors, which the page does not show."""
    image = decoded_image(url)
    return image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info
