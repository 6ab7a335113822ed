"""Edits of features on the page as the library's splices, and as Python."""

from __future__ import annotations

from hookline import edits
from hookline.errors import HooklineError
from hookline.explore.attached_saes import AttachedSae
from hookline.explore.question import LiveEdit, Question
from hookline.sae import Splice


def edit_groups(asked: Question) -> list[list[LiveEdit]]:
    """The edits that are switched on, each by itself, except edits of features that one splice makes together.

    These are edits of features of one autoencoder, without another edit at the same point in between. Edits at other
    points do not matter: points follow each other as in the model, whatever the order of the list.
    """
    groups: list[list[LiveEdit]] = []
    latest: dict[str, list[LiveEdit]] = {}
    for edit in asked.active:
        last = latest.get(edit.point)
        if edit.feature is not None and last and last[0].feature is not None and last[0].sae == edit.sae:
            last.append(edit)
        else:
            latest[edit.point] = [edit]
            groups.append(latest[edit.point])
    return groups


def splice_of(asked: Question, group: list[LiveEdit], *, keep_features: bool = False) -> Splice:
    """The splice that makes edits of features; its error is kept, so nothing else changes."""
    found = _attached(asked, group[0])
    return found.sae.spliced(found.point, edits=[_change(edit) for edit in group], keep_features=keep_features)


def _change(edit: LiveEdit) -> edits.DataEdit:
    if edit.kind == "zero":
        return edits.zero(neuron=edit.feature, pos=edit.pos)
    if edit.kind == "scale":
        return edits.scale(edit.amount, neuron=edit.feature, pos=edit.pos)
    return edits.replace(float(edit.amount), neuron=edit.feature, pos=edit.pos)


def _attached(asked: Question, edit: LiveEdit) -> AttachedSae:
    """The autoencoder of an edit; raises unless it is at the edit's point."""
    if asked.saes is None:
        raise HooklineError(f"feature {edit.feature} needs its autoencoder: hookline explore MODEL --sae PATH")
    found = asked.saes.named(edit.sae)
    if found.point != edit.point:
        raise HooklineError(f"{found.name!r} is at {found.point!r}, but the edit of its feature is at {edit.point!r}")
    return found


def script_saes(asked: Question) -> dict[str, tuple[str, str]]:
    """For each autoencoder by its name in the edits: its variable in a script, and the line that loads it."""
    found = {edit.sae: _attached(asked, edit) for edit in asked.active if edit.feature is not None}
    names = ["sae"] if len(found) < 2 else [f"sae_{number}" for number in range(1, len(found) + 1)]
    return {
        sae: (name, f"{name} = {_loaded(each)}") for name, (sae, each) in zip(names, found.items(), strict=bool(found))
    }


def _loaded(found: AttachedSae) -> str:
    if found.path is not None:
        return f"SparseAutoencoder.load({found.path!r})"
    return f'SparseAutoencoder.load("PATH")  # the autoencoder at {found.point!r}, after sae.save("PATH")'
