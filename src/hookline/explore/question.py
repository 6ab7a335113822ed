"""What the page asks: a view of a prompt, with a list of edits. Read from JSON, with every field checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Any, Literal, Self, TypeAlias, get_args

from hookline.errors import HooklineError
from hookline.explore.attached_probe import AttachedProbe
from hookline.explore.attached_saes import AttachedSaes
from hookline.explore.image_files import MOST_IMAGES
from hookline.text.token_positions import Meaning
from hookline.text.turn_positions import from_json

Kind: TypeAlias = Literal["zero", "scale", "set", "mean", "patch", "steer"]
KINDS: tuple[Kind, ...] = get_args(Kind)
FEATURE_KINDS: tuple[Kind, ...] = ("zero", "scale", "set")
"""What can be done to a feature."""
MOST_EDITS = 200
MOST_TEXT = 200_000

_OPTIONAL_INT: dict[str, Any] = {"types": (int, type(None))}
_POSITIONS: dict[str, Any] = {"types": (int, list, dict, type(None))}
_IMAGES: dict[str, Any] = {"types": (list,)}
_TEXT: dict[str, Any] = {"types": (str,)}


@dataclass(frozen=True)
class LiveEdit:
    """One row of the page's list of edits.

    `amount` is the factor of "scale", the value of "set" and the coefficient of "steer"; `positive` and `negative` are
    the prompts that a steering vector is made from. "patch" writes the activation of the other prompt, "mean" the mean
    over the positions of the prompt. `pos` is a position, several, or None: all; as JSON also {"turn": "user"},
    {"span": "some words"} or {"sentence": 0}. With `feature`, the edit is of that
    feature of the autoencoder named `sae`.
    """

    kind: str = field(metadata=_TEXT)
    point: str = field(metadata=_TEXT)
    head: int | None = field(default=None, metadata=_OPTIONAL_INT)
    neuron: int | None = field(default=None, metadata=_OPTIONAL_INT)
    pos: int | tuple[int, ...] | Meaning | None = field(default=None, metadata=_POSITIONS)
    amount: float = field(default=1.0, metadata={"types": (int, float)})
    positive: str = field(default="", metadata=_TEXT)
    negative: str = field(default="", metadata=_TEXT)
    sae: str = field(default="", metadata=_TEXT)
    feature: int | None = field(default=None, metadata=_OPTIONAL_INT)
    on: bool = field(default=True, metadata={"types": (bool,)})

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise HooklineError(f"an edit is one of {', '.join(KINDS)}, got {self.kind!r}")
        if abs(self.amount) > 1e6 or self.amount != self.amount:
            raise HooklineError(f"the amount of an edit must be between -1e6 and 1e6, got {self.amount!r}")
        if self.kind == "steer" and (self.head is not None or self.neuron is not None):
            raise HooklineError("a steering vector is added to a whole activation: leave out head and neuron")
        if self.feature is not None and self.kind not in FEATURE_KINDS:
            raise HooklineError(f"an edit of a feature is one of {', '.join(FEATURE_KINDS)}, got {self.kind!r}")
        if self.feature is not None and (self.head is not None or self.neuron is not None):
            raise HooklineError("an edit is of a feature, or of heads and neurons, not of both")

    @property
    def is_in_tower(self) -> bool:
        """Whether the positions of its point are patches of images, not tokens."""
        return self.point.startswith(("vision.", "projector."))

    @classmethod
    def of(cls, data: Any) -> Self:
        """The edit that a JSON object describes."""
        values = _checked(cls, data, "an edit")
        if isinstance(pos := values.get("pos"), list):
            if not pos or len(pos) > MOST_TEXT or not all(type(position) is int for position in pos):
                raise HooklineError(f"pos of an edit is a position, or a list of positions, got {pos!r:.80}")
            values["pos"] = tuple(pos)
        elif isinstance(pos, dict):
            values["pos"] = from_json(pos)
            if values["pos"] is None:
                raise HooklineError(f'pos of an edit is not {pos!r:.80}: write {{"turn": "user"}}, for example')
        return cls(**values)


@dataclass(frozen=True)
class Question:
    """A view, and what it is a view of.

    `pos` is the position whose next token is looked at, `src` a position that heads may attend to. `target` and
    `versus` are tokens, by id or as text; None is the model's first choice, and its second. `start` is the first of the
    positions that the lens reads, if the prompt is too long to read all; None is a place that has `pos` among them.
    Images are data: URLs. `row` is an image, or a tile of one, at points of the vision tower. `sae` is the name of an
    autoencoder; "" is the first. `saes` and `probe` are those that the explorer was given: the page cannot change them.
    """

    view: str = field(metadata=_TEXT)
    prompt: str = field(metadata=_TEXT)
    other: str = field(default="", metadata=_TEXT)
    edits: tuple[LiveEdit, ...] = field(default=(), metadata={"types": (list,)})
    pos: int = field(default=-1, metadata={"types": (int,)})
    src: int = field(default=0, metadata={"types": (int,)})
    target: int | str | None = field(default=None, metadata={"types": (int, str, type(None))})
    versus: int | str | None = field(default=None, metadata={"types": (int, str, type(None))})
    layer: int = field(default=0, metadata={"types": (int,)})
    head: int = field(default=0, metadata={"types": (int,)})
    measure: str = field(default="attribution", metadata=_TEXT)
    point: str = field(default="", metadata=_TEXT)
    count: int = field(default=20, metadata={"types": (int,)})
    sae: str = field(default="", metadata=_TEXT)
    feature: int | None = field(default=None, metadata=_OPTIONAL_INT)
    saes: AttachedSaes | None = field(default=None, repr=False, compare=False)
    probe: AttachedProbe | None = field(default=None, repr=False, compare=False)
    images: tuple[str, ...] = field(default=(), metadata=_IMAGES)
    other_images: tuple[str, ...] = field(default=(), metadata=_IMAGES)
    row: int = field(default=0, metadata={"types": (int,)})
    start: int | None = field(default=None, metadata=_OPTIONAL_INT)

    @classmethod
    def of(cls, data: Any, saes: AttachedSaes | None = None, probe: AttachedProbe | None = None) -> Self:
        """The question that a JSON object asks."""
        values = _checked(cls, data, "a question")
        rows = values.pop("edits", [])
        if len(rows) > MOST_EDITS:
            raise HooklineError(f"there are {len(rows)} edits; the explorer takes up to {MOST_EDITS}")
        values |= {name: _image_urls(values[name]) for name in ("images", "other_images") if name in values}
        return cls(**values, edits=tuple(LiveEdit.of(row) for row in rows), saes=saes, probe=probe)

    @property
    def active(self) -> tuple[LiveEdit, ...]:
        """The edits that are switched on, in order."""
        return tuple(edit for edit in self.edits if edit.on)


def _image_urls(urls: list[Any]) -> tuple[str, ...]:
    if len(urls) > MOST_IMAGES or not all(isinstance(url, str) for url in urls):
        raise HooklineError(f"images are up to {MOST_IMAGES} data: URLs for each prompt")
    return tuple(urls)


def _checked(kind: type[LiveEdit] | type[Question], data: Any, what: str) -> dict[str, Any]:
    """The fields of a JSON object; raises if one is unknown, missing or of another type."""
    fields_by_name: dict[str, Field[Any]] = {
        dataclass_field.name: dataclass_field for dataclass_field in fields(kind) if "types" in dataclass_field.metadata
    }
    if not isinstance(data, Mapping):
        raise HooklineError(f"{what} is a JSON object, got {type(data).__name__}")
    unknown = sorted(map(str, data.keys() - fields_by_name.keys()))
    missing = [
        name
        for name, dataclass_field in fields_by_name.items()
        if dataclass_field.default is MISSING and name not in data
    ]
    if unknown or missing:
        raise HooklineError(
            f"{what} has the fields {', '.join(fields_by_name)}; unknown: {unknown}, missing: {missing}"
        )
    for name, value in data.items():
        types = fields_by_name[name].metadata["types"]
        if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
            raise HooklineError(f"{name} of {what} cannot be {value!r:.80}")
        if isinstance(value, str) and len(value) > MOST_TEXT:
            raise HooklineError(f"{name} has {len(value)} characters; the explorer takes up to {MOST_TEXT}")
    return dict(data)
