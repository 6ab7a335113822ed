"""The images of a prompt as Python."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence

from hookline.explore.image_files import image_bytes

_WIDTH = 100


def image_lines(named: Mapping[str, Sequence[str]], paths: Mapping[str, str]) -> tuple[list[str], list[str]]:
    """The imports and the lines that make lists of images, given as data: URLs by the name of each list.

    An image whose path is known is read from its file; of others, the bytes are written into the program.
    """
    embedded = [url for urls in named.values() for url in urls if url not in paths]
    names = {url: f"image_{nth}" for nth, url in enumerate(dict.fromkeys(embedded))}
    lines = [line for url, name in names.items() for line in _embedded(name, url)]
    for name, urls in named.items():
        if urls:
            lines.append(f"{name} = [{', '.join(repr(paths[url]) if url in paths else names[url] for url in urls)}]")
    imports = ["import base64", "import io", "", "from PIL import Image", ""] if names else []
    return imports, lines


def _embedded(name: str, url: str) -> list[str]:
    text = base64.b64encode(image_bytes(url)[1]).decode()
    rows = [f"    {text[at : at + _WIDTH]!r}" for at in range(0, len(text), _WIDTH)]
    return [f"{name} = Image.open(io.BytesIO(base64.b64decode(", *rows, ")))"]
