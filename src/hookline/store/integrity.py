"""Verify every byte of a store and the order of its shards; rebuild a lost manifest."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from hookline.errors import StoreError
from hookline.store.folders import Folder, write_file
from hookline.store.manifest import MANIFEST, Manifest, Shard, versions
from hookline.store.shards import Header, is_sound, read_header
from hookline.store.store import load_manifest, mismatch


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

    def __str__(self) -> str:
        lines = [f"{'file':<20} {'rows':>12} {'examples':>21} {'bytes':>15}  state", *map(_line, self.findings)]
        rows, examples = (self.manifest.rows, self.manifest.examples) if self.manifest is not None else (0, 0)
        state = "complete" if self.manifest is not None and self.manifest.is_complete else "not complete"
        found = f"{len(self.problems)} problems" if self.problems else "sound"
        return "\n".join([*lines, f"{self.path}: {rows:,} rows of {examples:,} examples, {state}; {found}"])


def _line(finding: Finding) -> str:
    state, shard = finding.problem or finding.note or "sound", finding.shard
    if shard is None:
        return f"{finding.name:<20} {'':>12} {'':>21} {'':>15}  {state}"
    examples = f"{shard.first_example:,} – {shard.stop_example - 1:,}"
    return f"{finding.name:<20} {shard.rows:>12,} {examples:>21} {shard.bytes:>15,}  {state}"


def verify(folder: Folder) -> Verification:
    """Check every file; nothing is changed."""
    try:
        manifest = load_manifest(folder)
    except StoreError as error:
        others = [Finding(name, None, note="not checked") for name in shard_names(folder)]
        return Verification(folder.path, None, (Finding(MANIFEST, None, str(error)), *others))
    listed = [
        Finding(shard.name, shard, _problem(folder, manifest, shard, before))
        for before, shard in zip((None, *manifest.shards), manifest.shards, strict=False)
    ]
    return Verification(folder.path, manifest, (*listed, *_unlisted(folder, manifest)))


def shard_names(folder: Folder) -> list[str]:
    """The files that are named like shards."""
    return [name for name in folder.names() if name.endswith(".safetensors")]


def _problem(folder: Folder, manifest: Manifest, shard: Shard, before: Shard | None) -> str:
    try:
        header = sound_header(folder, shard.name)
    except StoreError as error:
        return str(error)
    if problem := mismatch(manifest, shard, header):
        return problem
    return "" if shard.follows(before) else "it does not start where the previous shard ends"


def sound_header(folder: Folder, name: str) -> Header:
    """The header of a file, after every byte was checked; StoreError says what is damaged."""
    try:
        file = folder.open(name)
    except FileNotFoundError:
        raise StoreError("it is missing") from None
    except OSError as error:
        raise StoreError(f"it cannot be opened ({error.strerror or error})") from error
    header = read_header(file)
    damaged = [each for each, place in header.tensors.items() if not is_sound(file, place)]
    if damaged:
        raise StoreError(f"bytes have changed in {', '.join(damaged)}")
    return header


def _unlisted(folder: Folder, manifest: Manifest) -> Iterator[Finding]:
    """Files that the manifest does not list: the next shards of a harvest that was killed, or unrelated files."""
    known = {shard.name for shard in manifest.shards}
    for name in shard_names(folder):
        if name not in known:
            finding = _stray(folder, manifest, name)
            yield finding
            if finding.shard is not None and not finding.problem:
                manifest = manifest.with_shards(finding.shard)


def _stray(folder: Folder, manifest: Manifest, name: str) -> Finding:
    try:
        header = sound_header(folder, name)
    except StoreError as error:
        return Finding(name, None, f"it is not in the manifest, and {error}")
    if is_next(manifest, name, header):
        return Finding(name, header.shard, note="sound, not yet in the manifest: the next harvest adds it")
    problem = mismatch(manifest, header.shard, header) or "it does not start where the last shard ends"
    return Finding(name, header.shard, f"it is not in the manifest, and {problem}")


def is_next(manifest: Manifest, name: str, header: Header) -> bool:
    """Whether a file is the next shard after those in the manifest."""
    before = manifest.shards[-1] if manifest.shards else None
    is_same = header.about == manifest.about and name == header.shard.name
    return is_same and header.shard.follows(before) and not manifest.is_complete


def with_unlisted(folder: Folder, manifest: Manifest) -> Manifest:
    """The manifest with the shards that were written after it; StoreError for any other file."""
    for finding in _unlisted(folder, manifest):
        if finding.problem or finding.shard is None:
            raise StoreError(
                f"{folder.path}/{finding.name}: {finding.problem}. Delete it, or harvest into another store"
            )
        manifest = manifest.with_shards(finding.shard)
    return manifest


def rebuild_manifest(folder: Folder) -> Manifest:
    """Rewrite the manifest from the headers of the shards, after checking every byte."""
    with folder.locked():
        names = shard_names(folder)
        if not names:
            raise StoreError(f"{folder.path} has no shard to rebuild a manifest from")
        manifest = with_unlisted(folder, _empty(folder, names[0]))
        try:
            write_file(folder, MANIFEST, [manifest.to_bytes()])
        except OSError as error:
            raise StoreError(f"{folder.path} cannot be written to: {error.strerror or error}") from error
        return manifest


def _empty(folder: Folder, name: str) -> Manifest:
    try:
        return replace(Manifest(sound_header(folder, name).about), versions=versions())
    except StoreError as error:
        raise StoreError(
            f"{folder.path}/{name}: {error}. Delete it and all shards after it, and harvest again"
        ) from error
