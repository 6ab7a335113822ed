"""The explorer: look into a model in the browser, live and offline.

    explorer = model.explore("When Mary and John went to the store, John gave a drink to")
    explorer.address               # http://127.0.0.1:…/…/
    explorer.close()

In a notebook, the explorer is a widget. On the command line: `hookline explore MODEL`.
"""

from __future__ import annotations

import os
import sys
import threading
import webbrowser
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from hookline.errors import HooklineError, warn_deprecated
from hookline.explore.attached_probe import AttachedProbe, ProbeGiven
from hookline.explore.attached_saes import AttachedSaes, SaesGiven
from hookline.explore.image_files import data_url
from hookline.explore.prompt_inputs import placeholders, with_places
from hookline.explore.saved import Step, page_data
from hookline.explore.server import ExplorerServer
from hookline.explore.session import Session
from hookline.files.tensorfile import write_bytes
from hookline.model import HookedModel
from hookline.pages.document import document
from hookline.store import Store
from hookline.text.chats import Chat, Messages
from hookline.vision.image_methods import without_second_bos
from hookline.vision.images import ImageLike

__all__ = ["Explorer", "explore", "export_page", "first_prompts", "in_notebook", "serve"]

_FIRST = {
    "tinyworld": (
        "When Mary and John went to the store, John gave a drink to",
        "When Mary and John went to the store, Mary gave a drink to",
    ),
    "tinysight": ("<image> What color is the circle?", "<image> What color is the circle?"),
}


def __dir__() -> list[str]:
    return __all__


class Explorer:
    """A page of a model, served from a thread until `close`.

    with model.explore(prompt, browser=False) as explorer:
        print(explorer.address)
    """

    def __init__(self, server: ExplorerServer) -> None:
        self._server, self._is_closed, self._has_ended = server, False, threading.Event()
        self._thread = threading.Thread(target=self._serve, name="hookline explorer server", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        try:
            self._server.serve_forever()
        finally:
            self._has_ended.set()

    @property
    def address(self) -> str:
        """Where the page is. Whoever has the address can use the model, on this machine only."""
        return self._server.address

    def close(self) -> None:
        """Stop the server; may be called more than once."""
        if not self._is_closed:
            self._is_closed = True
            self._server.shutdown()
            self._thread.join()
            self._server.server_close()

    def wait(self) -> None:
        """Serve the page until Ctrl-C, and close."""
        with self, suppress(KeyboardInterrupt):
            self._has_ended.wait()  # not `join`: interrupted, it takes the thread for ended in Python 3.11 and 3.12

    def __enter__(self) -> Explorer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Explorer at {self.address}" if not self._is_closed else "Explorer, closed"

    def _repr_html_(self) -> str:
        return f'<a href="{self.address}" target="_blank" rel="noopener">{self!r}</a>'


def explore(
    model: HookedModel,
    prompt: str | Messages = "",
    other: str | Messages = "",
    *,
    images: Sequence[ImageLike] = (),
    other_images: Sequence[ImageLike] = (),
    server: bool | None = None,
    port: int = 0,
    browser: bool = True,
    height: int = 720,
    name: str | None = None,
    saes: SaesGiven | None = None,
    store: str | os.PathLike[str] | Store | None = None,
    probe: ProbeGiven | None = None,
) -> Any:
    """Show the page of a model: in a notebook as a widget, otherwise in a browser, served from a thread.

    Returns an `ExplorerWidget` or an `Explorer`. `server=True` is the server (with `port` and `browser`), False the
    widget (with `height`, in pixels), and None the widget if `in_notebook()`. `other` is a second prompt to compare
    with. Both may be lists of messages, which are shown as text. `images` go in with the prompt, for a vision-
    language model; `other_images` with the second, whose images are otherwise those of the first. `name` is what
    "Copy as Python" loads the model by. `saes` are sparse autoencoders or their folders: one, several, or by point.
    `store` is a store of activations at their points, for the top contexts of features. `probe` scores the tokens of
    the prompt: the result of `probes.fit`, the file that it was saved to, a `probes.Monitor`, or a mapping from points
    to directions.
    """
    first, second = _as_text(model, prompt), _as_text(model, other)
    _check(model, first, second)
    name = model.cfg.model_name if name is None else name
    state, paths = _first_state(model, first, second, images, other_images)
    attached = AttachedSaes.given(model, saes, store)
    session = Session(model, name, saes=attached, probe=AttachedProbe.given(model, probe), paths=paths)
    if not (not in_notebook() if server is None else server):
        return _widget_class()(session, state=state, height=height)
    explorer = Explorer(ExplorerServer(session, state, port=port))
    print(explorer.address, flush=True)
    if browser:
        webbrowser.open(explorer._server.link)
    return explorer


def _as_text(model: HookedModel, prompt: Any) -> Any:
    """A conversation as the text that the page shows; any other prompt as it is."""
    text = prompt if isinstance(prompt, str) else model.text.prompts(prompt)
    return without_second_bos(model.tokenizer, str(text)) if isinstance(text, Chat) else prompt


def in_notebook() -> bool:
    """Whether this process is a Jupyter kernel, as in a notebook of Jupyter, VS Code or Colab."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return getattr(shell, "kernel", None) is not None  # a terminal's shell has none


def _widget_class() -> Any:
    try:
        from hookline.explore.widget import ExplorerWidget
    except ModuleNotFoundError as error:
        raise HooklineError(
            f'in a notebook, the explorer needs {error.name}: pip install "hookline[explore]". Without it, '
            f"model.explore(prompt, server=True) opens the explorer in a browser on this machine"
        ) from None
    return ExplorerWidget


def serve(model: HookedModel, prompt: str, other: str = "", **options: Any) -> None:
    """Serve the page until Ctrl-C. Deprecated: `explore(model, prompt, server=True).wait()` does the same."""
    warn_deprecated("hookline.explore.serve", "model.explore(prompt, server=True).wait()", since="0.1")
    explore(model, prompt, other, server=True, **options).wait()


def first_prompts(name: str) -> tuple[str, str]:
    """The prompts that the page of a model begins with; empty, unless the model ships with the package."""
    return _FIRST.get(name, ("", ""))


def export_page(
    model: HookedModel,
    path: str | os.PathLike[str],
    prompt: str,
    other: str = "",
    *,
    images: Sequence[ImageLike] = (),
    other_images: Sequence[ImageLike] = (),
    name: str | None = None,
    saes: SaesGiven | None = None,
    store: str | os.PathLike[str] | Store | None = None,
    probe: ProbeGiven | None = None,
) -> Path:
    """Write the page to a file, with the views of these prompts inside; it opens from disk, without a server."""
    first, second = _as_text(model, prompt), _as_text(model, other)
    _check(model, first, second)
    name = model.cfg.model_name if name is None else name
    state, paths = _first_state(model, first, second, images, other_images)
    attached = AttachedSaes.given(model, saes, store)
    data = page_data(model, name, [Step(state)], paths=paths, saes=attached, probe=AttachedProbe.given(model, probe))
    write_bytes(Path(path), document(data).encode(), "the page")
    return Path(path)


def _first_state(
    model: HookedModel, prompt: str, other: str, images: Sequence[ImageLike], other_images: Sequence[ImageLike]
) -> tuple[dict[str, Any], dict[str, str]]:
    """The state that a page begins with, and the files of its images, by their URLs."""
    urls = [[data_url(image) for image in prompt_images] for prompt_images in (images, other_images)]
    files = zip([*images, *other_images], [*urls[0], *urls[1]], strict=True)
    prompt = with_places(model, prompt, images)
    other = with_places(model, other or (prompt if other_images else ""), other_images)
    if placeholders(model)["token"] in other and not other_images:
        urls[1] = urls[0] if placeholders(model)["token"] else []
    state = {"prompt": prompt, "other": other, "images": urls[0], "otherImages": urls[1]}
    return state, {url: str(image) for image, url in files if isinstance(image, str | Path)}


def _check(model: Any, *prompts: Any) -> None:
    if not isinstance(model, HookedModel):
        raise HooklineError(f"the explorer is for language models of transformers, not {type(model).__name__}")
    if model.tokenizer is None:
        raise HooklineError("the explorer needs text, but the model has no tokenizer: hookline.hook(model, tokenizer)")
    for prompt in prompts:
        if not isinstance(prompt, str):
            raise HooklineError(f"the explorer takes a prompt as text, not {type(prompt).__name__}")
