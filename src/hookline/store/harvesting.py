"""Harvest: write the activations of a data set to a store, resuming an interrupted harvest."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hookline.engine import Hooked, HookPoint, Run, sharding
from hookline.errors import HooklineError, StoreError, UnknownPointError, a_type, warn
from hookline.model import HookedModel
from hookline.progress import progress_bar
from hookline.store.examples import BatchSize, Example, Examples, as_sample, as_text
from hookline.store.identity import check_same, code_in, identity, input_device, with_weights
from hookline.store.integrity import with_unlisted
from hookline.store.manifest import MANIFEST, About, Column, Manifest, Progress, differences, shard_names, versions
from hookline.store.many_workers import SharedHarvest, only_worker
from hookline.store.selection import Batch, Chosen, HarvestOptions, checked_seed, sample_batch, text_batch
from hookline.store.shards import DTYPES, ROW
from hookline.store.store import Store, open_store
from hookline.store.teams import Team
from hookline.store.workers import HarvestWorker, worker_of
from hookline.store.writer import Writer, to_device
from hookline.transformer.dialects import other_names
from hookline.transformer.index import ModelPoints
from hookline.transformer.memory.halving import BatchFitter
from hookline.types import Filter

Computed = tuple[Progress, Batch, dict[str, Tensor], Progress]
"""A batch with its activations, and the progress in the data set before and after it."""


def harvest(
    model: Hooked | str | Path,
    dataset: Any,
    points: Filter,
    store: str | Path | Store,
    *,
    by_layer: bool | str | torch.device = False,
    column: str | int | None = None,
    positions: Chosen = None,
    dtype: torch.dtype | None = None,
    batch_size: BatchSize = "auto",
    max_rows: int | None = None,
    sample: float = 1.0,
    seed: int | None = None,
    max_tokens: int | None = None,
    prepend_bos: bool | None = None,
    shard_rows: int | None = None,
    shard_bytes: int = 128 * 2**20,
    flush_every: float = 60.0,
    hooks_tag: str | None = None,
    shard: tuple[int, int] | HarvestWorker | None = None,
    progress: bool = True,
) -> Store:
    """Store the activations at these points for every token of a data set; returns the store.

        >>> hookline.harvest(model, texts, "blocks.*.hook_resid_post", "new")["blocks.0.hook_resid_post"][:10].shape
        torch.Size([10, 128])

    The data set is any iterable of texts or of rows of token ids, a tensor of tokens, or a table, of which `column`
    selects a column. A network that is not a language model takes tensors, and a row is a sample. `positions` selects
    the tokens to store: None for all, positions as for hooks (`hookline.last`, `token(…)`, indices), a mask [example,
    position], or a function from a text's tokens to a mask. A position that a text does not have gives no row; neither
    do padding and empty texts. `sample` keeps a random fraction of the rows, determined by `seed` and the example's
    number; `max_rows` ends the harvest. Floats are stored as `dtype`. Texts longer than the model's context raise,
    unless `max_tokens` truncates them. `batch_size="auto"` runs as many texts at once as have about 8,192 tokens.

    On Ctrl-C, or any exception, the rows of each finished batch are stored. Rows are also written `flush_every` seconds
    after they were computed, so a killed process loses little more than that. Called again with the same arguments, a
    harvest resumes at the first row that is not stored, and ends with the same rows in the same order as without the
    interruption. With other arguments, another model or other edits it refuses to resume. Functions, as hooks or as
    `positions`, are not compared: `hooks_tag` names their version, and a harvest with functions but no tag cannot be
    resumed. Memory: two shards (`shard_bytes` each, or `shard_rows`), at most five if the model outruns the disk.

    With `by_layer` (True or a device) the model is a folder, or `hookline.load(folder, device="meta")`, and one layer's
    weights at a time are in memory. Many processes can harvest into one store: `shard` is (rank, world), by default
    that of torchrun or Slurm, or a `store.HarvestWorker`. The rows are the same.
    """
    options = HarvestOptions(
        *(positions, dtype, batch_size, max_rows, sample, checked_seed(seed, sample)),
        *(max_tokens, prepend_bos, shard_rows, shard_bytes, flush_every, hooks_tag),
    )
    where, work = open_store(store), _work(model, points, options, by_layer)
    worker = _worker(work, where, shard, by_layer)
    read = partial(as_text, text=work.model.text) if isinstance(work.model, HookedModel) else as_sample
    examples = partial(Examples, dataset, column, read)
    with torch.no_grad(), work.context():
        if worker is not None:
            SharedHarvest(work, dataset, examples, where, worker).run(progress)
        else:
            work.alone(examples(), where, progress)
    where.refresh()
    return where


def _worker(work: Harvest, store: Store, shard: Any, by_layer: Any) -> HarvestWorker | None:
    """Which worker this process is; None for a harvest of one process."""
    if by_layer is False:
        return worker_of(shard, work.team.size) or only_worker(store.folder, work.team)
    if worker_of(shard or (0, 1)) is not None:
        raise HooklineError(f"by_layer={by_layer!r} is a harvest of one process, and shard={shard!r} one of many")
    return None


def _work(model: Hooked | str | Path, points: Filter, options: HarvestOptions, by_layer: Any) -> Harvest:
    if by_layer is False:
        return Harvest(with_weights(model), points, options)
    from hookline.store.by_layer import LayerHarvest  # imports this module

    return LayerHarvest(model, points, options, by_layer)


class Harvest:
    """One harvest: the model, the points and the options."""

    def __init__(self, model: Hooked | str | Path, points: Filter, options: HarvestOptions) -> None:
        if isinstance(model, str | Path):
            raise HooklineError(
                f"harvest takes a folder only with by_layer=True: pass that, or hookline.load({str(model)!r})"
            )
        if not isinstance(model, Hooked):
            raise HooklineError(f"harvest takes a hooked model, hookline.hook(module), not {a_type(model)}")
        self.model, self.options = model, options
        self.team = Team(sharding.processes.get(model.index.root))
        self._fit = BatchFitter("examples")
        self.points = model.index.select(points)
        self._asked = {column_name(model, self.points, point.name): point.name for point in self.points}
        _check_steady(model.module)
        self._was = self._switch()
        if isinstance(model, HookedModel):
            _check_points(model, self.points)
        elif options.positions is not None or options.max_tokens is not None or options.prepend_bos is not None:
            raise HooklineError("positions, max_tokens and prepend_bos apply to texts; here a row is a whole sample")

    def _switch(self) -> Any:
        """The attribute of the model that a run may change permanently; None if it has none."""
        name = self.model.anatomy.architecture.switches if isinstance(self.model, HookedModel) else None
        parts = () if name is None else self.model.module.modules()
        return next((getattr(part, name or "") for part in parts if name in vars(part)), None)

    def check_switch(self) -> None:
        """Raise if the last run changed the model for good: the rows would depend on the runs before."""
        if isinstance(self.model, HookedModel) and (now := self._switch()) != self._was:
            name = self.model.anatomy.architecture.switches
            why = "for all later texts, so that rows would depend on the order of texts"
            raise HooklineError(f"a short text changed {name} of the model, {why}: load it with {name}={now!r}")

    def context(self) -> Run | nullcontext[None]:
        """One run around all passes if there are permanent hooks, so that unreached positions are reported once."""
        return Run(self.model.index.root, ()) if self.model.index.permanent.steps else nullcontext()

    def identity(self, store: Store) -> dict[str, Any]:  # noqa: ARG002 - for harvests that keep something beside it
        """What the activations depend on besides the points, the data and the options."""
        model_identity = identity(self.model)
        return model_identity | {"weights": self.team.joined(model_identity["weights"])}

    def about(self, store: Store) -> About:
        """The identity of this harvest, as it will be read back."""
        about = About(self.identity(store), {"points": list(self._asked), **self.options.recorded()}, {})
        return About.from_json(about.to_json())

    def alone(self, examples: Examples, store: Store, progress: bool) -> None:
        """Harvest as the only process, beginning with the first row that is not stored."""
        with store.folder.locked():
            manifest = self.resumed(store)
            examples.skip(manifest, store.path)
            if manifest.is_complete:
                check_over(examples, manifest, store.path)
            else:
                self.run(examples, store, manifest, progress)
            self.done()

    def resumed(self, store: Store) -> Manifest:
        """The manifest of the rows stored so far, which must belong to this harvest; or an empty one."""
        about, folder = self.about(store), store.folder
        untagged = self.untagged(about)
        if MANIFEST not in folder.names() and not shard_names(folder):
            if untagged:
                warn(f"{store.path} cannot be resumed if this harvest is interrupted: {untagged}")
            return Manifest(about, versions=versions())
        manifest = Manifest.load(folder)
        check_same(about, manifest, store.path)
        if untagged:
            raise StoreError(f"{store.path} cannot be resumed: {untagged}. Harvest into another store")
        missing = sorted({shard.name for shard in manifest.shards} - {*folder.names()})
        if missing:
            raise StoreError(
                f"{store.path} has lost {', '.join(missing[:4])}: `hookline store verify PATH` checks all shards"
            )
        whole = with_unlisted(folder, manifest)
        if whole != manifest:
            whole.save(folder)
        return whole

    def untagged(self, about: About) -> str:
        """Why functions that this harvest runs prevent resuming; empty if there are none, or a tag names them."""
        functions = code_in(about) + (["positions"] if callable(self.options.positions) else [])
        if not functions or self.options.hooks_tag is not None:
            return ""
        return (
            f"it runs Python functions, which are not compared ({', '.join(functions)}). Name their version with "
            f"harvest(…, hooks_tag='v1'), and change the tag whenever they change"
        )

    def run(self, examples: Examples, store: Store, manifest: Manifest, progress: bool) -> None:
        """Run the model on each batch, and store the activations at the points."""
        limit, writer = self.options.max_rows, None
        # With `max_rows` the number of examples is unknown in advance, so the progress bar counts rows.
        total, unit = (examples.total, " examples") if limit is None else (limit, " rows")
        with ExitStack() as stack:
            bar = stack.enter_context(progress_bar(progress, total, unit))
            bar.update(manifest.examples if limit is None else manifest.rows)
            for before, batch, sources, after in self.computed(examples, store, manifest, progress):
                if writer is None:
                    writer = stack.enter_context(self._writer(store, manifest, sources))
                writer.add(batch, sources, before, after)
                bar.update(after.examples - bar.n if limit is None else batch.rows)
            if writer is None and not manifest.rows:
                raise StoreError(
                    f"there are no rows to store in {store.path}: the data set is empty, or no text has the positions"
                )
            if writer is None:  # the previous harvest was interrupted after its last row
                writer = stack.enter_context(self._writer(store, manifest, {}))
            writer.finish(examples.progress)

    def computed(
        self,
        examples: Examples,
        store: Store,  # noqa: ARG002
        manifest: Manifest,
        progress: bool,  # noqa: ARG002
    ) -> Iterator[Computed]:
        """Run the model on each batch that is not stored yet."""
        for before, batch in self.batches(examples, manifest.rows):
            yield before, batch, self.activations(batch), examples.progress

    def done(self) -> None:
        """Clean up after the last row has been written."""

    def batches(self, examples: Examples, rows: int) -> Iterator[tuple[Progress, Batch]]:
        """Yield the batches with rows to store, until `max_rows` is reached."""
        left = math.inf if self.options.max_rows is None else self.options.max_rows - rows
        if left <= 0:
            return
        for before, items in examples.batches(self.options.batch_size, self.options.max_tokens):
            batch = self.batch(items, before.examples)
            batch = batch if batch.rows <= left else batch.first(int(left))
            if batch.rows:
                yield before, batch
            left -= batch.rows
            if left <= 0:
                return

    def activations(self, batch: Batch) -> dict[str, Tensor]:
        """The activations at each point as [row, …], with a row for each token or sample of the batch."""
        activations = _run_batch(self.model, self.points, batch, self._fit)
        self.check_switch()
        return activations

    def batch(self, items: list[Example], first: int) -> Batch:
        """The examples from number `first` on as inputs of the model."""
        if isinstance(self.model, HookedModel):
            return text_batch(self.model, items, first, self.options)
        return sample_batch(items, first, self.options)

    def columns(self, sources: dict[str, Tensor]) -> dict[str, Column]:
        """How the activations of a batch are stored."""
        return {
            name: column_of(x, self._asked.get(name, name), name, self.options.dtype, names_of(self.model, name))
            for name, x in sources.items()
        }

    def _writer(self, store: Store, manifest: Manifest, sources: dict[str, Tensor]) -> Writer:
        """The writer for the rows, whose dtypes and shapes are known after the first batch."""
        columns = self.columns(sources)
        if not manifest.about.points:
            manifest = replace(manifest, about=replace(manifest.about, points=columns))
            manifest.save(store.folder)  # so that it exists before the first shard
        if sources and (different := differences(columns, manifest.about.points)):
            raise StoreError(f"{store.path} has activations of other shapes or dtypes: {'; '.join(different)}")
        return Writer(store.folder, manifest, self.options, sources)


def check_over(examples: Examples, manifest: Manifest, where: str) -> None:
    """Raise if a complete store would need more rows."""
    max_rows = manifest.about.options["max_rows"]
    if max_rows is not None and manifest.rows >= max_rows:
        return
    for _ in examples:
        raise StoreError(
            f"{where} is complete, with {manifest.examples:,} examples, but this data set has more: harvest into "
            f"another store"
        )


def _check_points(model: HookedModel, points: Sequence[HookPoint]) -> None:
    """Raise unless each point has one row per token of the data."""
    for point in points:
        axes = point.axes.split()
        if axes and ("p" in axes) == ("k" in axes):
            raise StoreError(
                f"{point.name!r} has the axes {point.axes!r}: a store needs one row of fixed shape per position. Use "
                f"run_with_cache instead"
            )
        if model.anatomy.is_encoder_decoder and not point.canonical_name.startswith("encoder."):
            raise StoreError(
                f"{point.name!r} is not in the encoder, and the data is fed to the encoder only: harvest encoder.…"
            )


def _check_steady(module: nn.Module) -> None:
    """Raise if the model is stochastic, or changes with each pass: its harvest could not be resumed."""
    kinds = (nn.modules.dropout._DropoutNd, nn.modules.batchnorm._BatchNorm)
    for name, part in module.named_modules():
        if part.training and isinstance(part, kinds) and getattr(part, "p", 1):
            raise HooklineError(
                f"the model is in training mode, and {name!r} is {a_type(part)}: call model.eval() first, or "
                f"the activations would differ each time"
            )


def _run_batch(model: Hooked, points: Sequence[HookPoint], batch: Batch, fit: BatchFitter) -> dict[str, Tensor]:
    """The activations at each point as [row, …], with a row for each token or sample of the batch, stored or not.

    If memory runs out, the batch is run in parts, and their results are collected on the CPU.
    """
    examples = range(batch.shape[0])

    def run(indices: Sequence[int]) -> dict[str, Tensor]:
        activations = _run(model, points, batch, indices)
        return activations if len(indices) == len(examples) else {name: x.cpu() for name, x in activations.items()}

    parts = [part for _, part in fit.parts(examples, run)]
    return parts[0] if len(parts) == 1 else {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def _run(model: Hooked, points: Sequence[HookPoint], batch: Batch, examples: Sequence[int]) -> dict[str, Tensor]:
    """The activations at each point in a run of some consecutive examples of a batch."""
    if len(examples) < batch.shape[0]:
        batch = batch.part(examples[0], examples[-1] + 1)
    device = input_device(model)
    args = tuple(to_device(x, device) for x in batch.args)
    kwargs: dict[str, Any] = {name: to_device(x, device) for name, x in batch.kwargs.items()}
    # A native point may fire several times, so then the pass must run to its end.
    stops = isinstance(model, HookedModel) and all(point.axes for point in points)
    cache = model.cache(*args, names_filter=points, stop_early=stops, **kwargs)
    axes = {point.name: point.axes for point in points}
    return {column_name(model, points, name): as_rows(name, x, axes.get(name, ""), batch) for name, x in cache.items()}


def column_name(model: Hooked, points: Sequence[HookPoint], key: str) -> str:
    """The column for a key of a cache of these points: the point's canonical name, or the new name that it has."""
    base = key.partition("#")[0]
    is_renamed = any(point.is_renamed and point.name == base for point in points)
    return key if is_renamed else model.index.canonical_name(key)


def as_rows(name: str, x: Tensor, axes: str, batch: Batch) -> Tensor:
    """The activations at a point as [row, …], with a row for each token or sample of the batch."""
    names = axes.split()
    axis = names.index("p" if "p" in names else "k") if names else 1
    if len(batch.shape) == 2 and x.ndim > axis:
        x = x.movedim(axis, 1)
    if x.shape[: len(batch.shape)] != batch.shape:
        what = "token" if len(batch.shape) == 2 else "sample"
        raise StoreError(
            f"{name!r} has the shape {list(x.shape)}, but needs one row per {what} of a batch {list(batch.shape)}"
        )
    return x.flatten(0, len(batch.shape) - 1)


def names_of(model: Hooked, name: str) -> list[str]:
    """The other names of a stored point: in other dialects, and the path of its module."""
    points, others = model.index, list[str]()
    if isinstance(points, ModelPoints) and name in points.hook_dict:
        others += other_names(name, points._stacks)
    try:
        path = points._paths.get(points.find(name).site.module)
    except UnknownPointError:  # a new name that the filter gave a point
        return others
    if not path:
        return others
    for native in (path, f"{path}.input"):
        with suppress(UnknownPointError):
            if points.canonical_name(native) == name:
                others.append(native)
    return others


def column_of(x: Tensor, requested: str, name: str, dtype: torch.dtype | None, also: Sequence[str] = ()) -> Column:
    """How the rows of a point are stored. `also` are its other names."""
    if name in ROW:
        raise StoreError(f"a point cannot be stored as {name!r}: that name is reserved")
    stored = dtype if dtype is not None and x.is_floating_point() else x.dtype
    dtype_name = str(stored).removeprefix("torch.")
    if dtype_name not in DTYPES:
        raise StoreError(f"{name!r} has dtype {stored}, which cannot be stored; supported: {', '.join(DTYPES)}")
    others = tuple(other for other in also if other not in (name, requested))
    return Column(dtype_name, tuple(x.shape[1:]), requested if requested != name else "", others)
