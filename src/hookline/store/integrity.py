"""Verify every byte of a store and the order of its shards; rebuild a lost manifest."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from hookline.errors import StoreError, how_many
from hookline.store.folders import Folder
from hookline.store.manifest import MANIFEST, Manifest, Shard, shard_names, versions
from hookline.store.shards import about_differences, mismatch, open_shard
from hookline.store.units import load_manifest, merged, missing_units, read_records, record_name


@dataclass(frozen=True)
class Finding:
    """The result for one file."""

    name: str
    shard: Shard | None
    problem: str = ""
    note: str = ""


@dataclass(frozen=True)
class Verification:
    """The result of a verification; prints as a table."""

    path: str
    manifest: Manifest | None
    findings: tuple[Finding, ...]

    @property
    def problems(self) -> list[str]:
        """The problems, one line per file."""
        return [f"{finding.name}: {finding.problem}" for finding in self.findings if finding.problem]

    @property
    def is_sound(self) -> bool:
        """Whether there are no problems."""
        return not self.problems

    def to_json(self) -> dict[str, Any]:
        """The findings as values for JSON."""
        counts = ("rows", "examples", "is_complete")
        files = [
            {"name": finding.name, "problem": finding.problem, "note": finding.note}
            | {"shard": None if finding.shard is None else finding.shard.to_json()}
            for finding in self.findings
        ]
        about = {name: getattr(self.manifest, name, None) for name in counts}
        return {"path": self.path, "is_sound": self.is_sound, **about, "problems": self.problems, "files": files}

    def __str__(self) -> str:
        wide = max(20, *(len(finding.name) for finding in self.findings), 0)
        lines = [f"{'file':<{wide}} {'rows':>12} {'examples':>21} {'bytes':>15}  state"]
        lines += [_line(finding, wide) for finding in self.findings]
        rows, examples = (self.manifest.rows, self.manifest.examples) if self.manifest is not None else (0, 0)
        state = "complete" if self.manifest is not None and self.manifest.is_complete else "not complete"
        summary = how_many(len(self.problems), "problem") if self.problems else "sound"
        return "\n".join(
            [*lines, f"{self.path}: {how_many(rows, 'row')} of {how_many(examples, 'example')}, {state}; {summary}"]
        )


def _line(finding: Finding, wide: int) -> str:
    state, shard = finding.problem or finding.note or "sound", finding.shard
    if shard is None:
        return f"{finding.name:<{wide}} {'':>12} {'':>21} {'':>15}  {state}"
    examples = f"{shard.first_example:,} – {shard.stop_example - 1:,}"
    return f"{finding.name:<{wide}} {shard.rows:>12,} {examples:>21} {shard.bytes:>15,}  {state}"


def verify(folder: Folder) -> Verification:
    """Check every file; nothing is changed. Raises StoreError if there is no file of a store."""
    try:
        manifest = load_manifest(folder)
    except StoreError as error:
        if not folder.names():
            raise
        others = [Finding(name, None, note="not checked") for name in shard_names(folder)]
        return Verification(folder.path, None, (Finding(MANIFEST, None, str(error)), *others))
    listed = [Finding(shard.name, shard, _problem(folder, manifest, shard)) for shard in manifest.shards]
    find = _unlisted if manifest.about.unit is None else _other_units
    return Verification(folder.path, manifest, (*listed, *find(folder, manifest)))


def _problem(folder: Folder, manifest: Manifest, shard: Shard) -> str:
    try:
        return mismatch(manifest, shard, open_shard(folder, shard.name, check=True)[1])
    except StoreError as error:
        return str(error)


def _unlisted(folder: Folder, manifest: Manifest) -> Iterator[Finding]:
    """Files that the manifest does not list: the next shards of a harvest that was killed, or unrelated files."""
    listed = {shard.name for shard in manifest.shards}
    for name in shard_names(folder):
        if name not in listed:
            finding = _stray(folder, manifest, name)
            yield finding
            if finding.shard is not None and not finding.problem:
                manifest = manifest.with_shards(finding.shard)


def _stray(folder: Folder, manifest: Manifest, name: str) -> Finding:
    try:
        _, header = open_shard(folder, name, check=True)
    except StoreError as error:
        return Finding(name, None, f"it is not in the manifest, and {error}")
    before = manifest.shards[-1] if manifest.shards else None
    is_same = header.about == manifest.about and name == header.shard.name
    if is_same and header.shard.follows(before) and not manifest.is_complete:
        return Finding(name, header.shard, note="sound, not yet in the manifest: the next harvest adds it")
    problem = mismatch(manifest, header.shard, header) or "it does not start where the last shard ends"
    return Finding(name, header.shard, f"it is not in the manifest, and {problem}")


def _other_units(folder: Folder, manifest: Manifest) -> Iterator[Finding]:
    """In a store of many workers: the units after the first that is missing, and files that do not count."""
    listed = {shard.name for shard in manifest.shards}
    records, damaged = ({}, {}) if manifest.is_complete else read_records(folder)
    for unit, why in damaged.items():
        yield Finding(record_name(unit), None, f"{why}. The next harvest does unit {unit} again")
    for record in records.values():
        for shard in record.shards:
            if shard.name not in listed:
                listed.add(shard.name)
                note = "sound, comes after a missing unit"
                yield Finding(shard.name, shard, _problem(folder, record, shard), note)
    for name in shard_names(folder):
        if name not in listed:
            yield _copy(folder, manifest, name)
    if not manifest.is_complete:
        yield Finding("units", None, note=f"{missing_units(folder)}: harvest again with the same arguments")


def _copy(folder: Folder, manifest: Manifest, name: str) -> Finding:
    """A shard that no record lists: of a worker that died, or of a unit that was done twice."""
    try:
        _, header = open_shard(folder, name, check=True)
    except StoreError as error:
        return Finding(name, None, f"no record lists it, and {error}")
    problem = "; ".join(about_differences(replace(header.about, points={}), replace(manifest.about, points={})))
    note = "sound, but no record lists it: it can be deleted once the store is complete"
    return Finding(name, header.shard, f"it belongs to a different harvest: {problem}" if problem else "", note)


def with_unlisted(folder: Folder, manifest: Manifest) -> Manifest:
    """The manifest with the shards that were written after it; StoreError for any other file."""
    for finding in _unlisted(folder, manifest):
        if finding.problem or finding.shard is None:
            raise StoreError(
                f"{folder.path}/{finding.name}: {finding.problem}. Delete it, or harvest into another store"
            )
        manifest = manifest.with_shards(finding.shard)
    return manifest


def rebuild_manifest(folder: Folder) -> None:
    """Rewrite the manifest from the headers of the shards, after checking every byte."""
    with folder.locked():
        names = shard_names(folder)
        if not names:
            raise StoreError(f"{folder.path} has no shard to rebuild a manifest from")
        try:
            _, first = open_shard(folder, names[0], check=True)
        except StoreError as error:
            advice = "Delete it and all shards after it, and harvest again"
            raise StoreError(f"{folder.path}/{names[0]}: {error}. {advice}") from error
        plan = Manifest(first.about, versions=versions())
        if first.about.unit is None:
            with_unlisted(folder, plan).save(folder)
            return
        whole = merged(plan, read_records(folder)[0], folder.path)
        (whole if whole.is_complete else replace(plan, about=replace(plan.about, points={}))).save(folder)
