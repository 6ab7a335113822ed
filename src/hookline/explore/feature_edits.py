"""Edits of features on the page as the library's splices, and as Python."""

from __future__ import annotations

from hookline import edits
from hookline.errors import HooklineError
from hookline.explore.attached_saes import AttachedSae
from hookline.explore.question import LiveEdit, Question
from hookline.sae import Splice


def edit_groups(question: Question) -> list[list[LiveEdit]]:
    """The edits that are switched on, each by itself, except edits of features that one splice makes together.

    These are edits of features of one autoencoder, without another edit at the same point in between. Edits at other
    points do not matter: points follow each other as in the model, whatever the order of the list.
    """
    groups: list[list[LiveEdit]] = []
    latest: dict[str, list[LiveEdit]] = {}
    for edit in question.active:
        last = latest.get(edit.point)
        if edit.feature is not None and last and last[0].feature is not None and last[0].sae == edit.sae:
            last.append(edit)
        else:
            latest[edit.point] = [edit]
            groups.append(latest[edit.point])
    return groups


def splice_of(question: Question, group: list[LiveEdit], *, keep_features: bool = False) -> Splice:
    """The splice that makes edits of features; its error is kept, so nothing else changes."""
    attached = _attached(question, group[0])
    return attached.sae.spliced(attached.point, edits=[_change(edit) for edit in group], keep_features=keep_features)


def _change(edit: LiveEdit) -> edits.DataEdit:
    if edit.kind == "zero":
        return edits.zero(neuron=edit.feature, pos=edit.pos)
    if edit.kind == "scale":
        return edits.scale(edit.amount, neuron=edit.feature, pos=edit.pos)
    return edits.replace(float(edit.amount), neuron=edit.feature, pos=edit.pos)


def _attached(question: Question, edit: LiveEdit) -> AttachedSae:
    """The autoencoder of an edit; raises unless it is at the edit's point."""
    if question.saes is None:
        raise HooklineError(f"feature {edit.feature} needs its autoencoder: hookline explore MODEL --sae PATH")
    attached = question.saes.named(edit.sae)
    if attached.point != edit.point:
        raise HooklineError(
            f"{attached.name!r} is at {attached.point!r}, but the edit of its feature is at {edit.point!r}"
        )
    return attached


def script_saes(question: Question) -> dict[str, tuple[str, str]]:
    """For each autoencoder by its name in the edits: its variable in a script, and the line that loads it."""
    attached_by_name = {edit.sae: _attached(question, edit) for edit in question.active if edit.feature is not None}
    names = (
        ["sae"] if len(attached_by_name) < 2 else [f"sae_{number}" for number in range(1, len(attached_by_name) + 1)]
    )
    return {
        sae: (name, f"{name} = {_loaded(attached)}")
        for name, (sae, attached) in zip(names, attached_by_name.items(), strict=bool(attached_by_name))
    }


def _loaded(attached: AttachedSae) -> str:
    if attached.path is not None:
        return f"SparseAutoencoder.load({attached.path!r})"
    return f'SparseAutoencoder.load("PATH")  # the autoencoder at {attached.point!r}, after sae.save("PATH")'
