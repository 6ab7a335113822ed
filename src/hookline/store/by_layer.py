"""Harvest by layer: models larger than memory, of which one layer's weights are in memory at a time.

All texts go through the embeddings, then through layer 0, and so on. Between layers the stream is on disk. Each stage
runs the model's own forward: earlier layers are skipped, the last of them returns the stream from disk, and the pass
stops after the layer whose turn it is. So masks, positions and whatever else a layer takes come from the model itself.
What a skipped part would have computed is NaN: if a layer needs more of it than the stream, that shows in its output.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hookline.engine import Action, HookPoint, Record, Recorder, Run, Skipping, StopForward
from hookline.errors import HooklineError, StoreError, UnavailablePointError, a_type, shown_bytes
from hookline.loading import load
from hookline.model import HookedModel
from hookline.progress import progress_bar, tell
from hookline.store.examples import Examples
from hookline.store.harvesting import Computed, Harvest, as_rows, column_name
from hookline.store.identity import identity
from hookline.store.layer_weights import EMBED, HEAD, REST, LayerWeights, layers_device
from hookline.store.manifest import Manifest, Progress
from hookline.store.selection import Batch, HarvestOptions
from hookline.store.stage_files import StageFiles, batch_in, batch_record, folder_beside
from hookline.store.store import Store
from hookline.store.writer import to_device
from hookline.transformer.anatomy import Anatomy
from hookline.transformer.index import ModelPoints
from hookline.transformer.memory.halving import is_out_of_memory
from hookline.transformer.resume import Enter, pass_through
from hookline.types import Filter, ModuleCall

BATCHES = "batches"
"""The log of the inputs of every batch; the stage that writes it runs no part of the model."""


@dataclass(frozen=True)
class Stage:
    """One part of the model that all texts go through: the embeddings (-1), a layer, or what follows the last layer."""

    number: int
    layer: int
    n_layers: int

    @property
    def parts(self) -> tuple[Any, ...]:
        """The parts of the weights that it needs, beside the rest, which is always in memory."""
        return (EMBED,) if self.layer < 0 else (HEAD,) if self.layer == self.n_layers else (self.layer,)

    @property
    def stream(self) -> str:
        """The log of the stream that leaves it."""
        return f"stream-{self.number}"

    @property
    def points(self) -> str:
        """The log of its points."""
        return f"points-{self.number}"

    def __str__(self) -> str:
        return (
            "the embeddings" if self.layer < 0 else f"layer {self.layer}" if self.layer < self.n_layers else "the end"
        )


class LayerHarvest(Harvest):
    """A harvest whose model is on the meta device, and whose layers come into memory one after the other."""

    model: HookedModel

    def __init__(self, model: Any, points: Filter, options: HarvestOptions, device: Any) -> None:
        hooked = load(model, device="meta") if isinstance(model, str | Path) else model
        if not isinstance(hooked, HookedModel):
            what = a_type(hooked)
            raise HooklineError(f"by_layer=True takes the folder of a language model of transformers, not {what}")
        _check(hooked.index)
        self.device = layers_device(device)
        self.weights = LayerWeights(hooked, self.device)
        super().__init__(hooked, points, options)
        layers = len(hooked.anatomy.blocks)
        self._stages = [Stage(layer + 2, layer, layers) for layer in range(-1, layers + 1)]
        self._layer_of = {
            part: index for index, block in enumerate(hooked.anatomy.blocks) for part in block.module.modules()
        }

    def identity(self, store: Store) -> dict[str, Any]:
        """What `identity` says of the same model in memory; the checksum of the weights is kept with the stages."""
        model_identity = identity(self.model) | {"device": self.device.type}
        about = {
            "model": model_identity,
            "files": self.weights.stamp,
            "points": [*self._asked],
            **self.options.recorded(),
        }
        self._files = StageFiles(folder_beside(store.folder), about, self.options.flush_every)
        notes = self._files.notes
        if "weights" not in notes:
            notes["weights"] = self.weights.digest()
            self._files.save()
        return model_identity | {"weights": notes["weights"]}

    def alone(self, examples: Examples, store: Store, progress: bool) -> None:
        """Harvest as the only process; what is of no use after an error is deleted."""
        try:
            super().alone(examples, store, progress)
        except HooklineError as error:
            if hasattr(self, "_files"):
                self._files.after_error(error)
            raise

    def computed(self, examples: Examples, store: Store, manifest: Manifest, progress: bool) -> Iterator[Computed]:
        """Run all stages that are not finished, then yield every batch with its rows."""
        files = self._files
        with closing(files):
            self._read_data(examples, store, manifest)
            stages = self._stages[: self._last_stage() + 1]
            self._check_space(stages, progress)
            try:
                self._run_stages(stages, progress)
            except BaseException:
                files.save()  # the batches that are done
                raise
            yield from self._assembled(stages, manifest)

    def _read_data(self, examples: Examples, store: Store, manifest: Manifest) -> None:
        """Write the inputs of all batches to disk; if that is done, check that the data is the same."""
        files = self._files
        if files.stage > 0:
            seen = Progress(*files.notes["progress"])
            for _ in islice(examples, seen.examples - examples.progress.examples):
                pass
            if examples.progress != seen or (not files.notes["is_cut"] and any(True for _ in examples)):
                raise StoreError(
                    f"{store.path} was made from other data: pass the same data set, or harvest into another store"
                )
            return
        tokens = rows = 0
        for before, batch in self.batches(examples, manifest.rows):
            files.append(BATCHES, *batch_record(batch, before, examples.progress))
            tokens, rows = tokens + batch.shape[0] * batch.shape[1], rows + batch.rows
        end, limit = examples.progress, self.options.max_rows
        is_cut = limit is not None and manifest.rows + rows >= limit
        files.notes.update(progress=[end.examples, end.sum], tokens=tokens, rows=rows, is_cut=is_cut)
        files.finish(1)

    def _run_stages(self, stages: Sequence[Stage], progress: bool) -> None:
        files = self._files
        left = [stage for stage in stages if stage.number >= files.stage]
        if not left or not files.notes["rows"]:
            return
        with progress_bar(progress, len(stages), " layers") as bar, self.weights.holding(REST, *self._always):
            bar.update(len(stages) - len(left))
            for stage in left:
                with self.weights.holding(*(part for part in stage.parts if part not in self._always)):
                    self._run_stage(stage, is_last=stage is stages[-1])
                self.weights.check_unchanged()
                files.finish(stage.number + 1, unneeded=Stage(stage.number - 1, 0, 0).stream)
                bar.update()

    @property
    def _always(self) -> tuple[str, ...]:
        """The parts that later layers read again."""
        return (EMBED,) if self.model.anatomy.architecture.rereads_embeddings else ()

    def _run_stage(self, stage: Stage, *, is_last: bool) -> None:
        files, done = self._files, self._files.done
        streams = files.records(Stage(stage.number - 1, 0, 0).stream) if stage.layer >= 0 else None
        for number, (record, note) in enumerate(files.records(BATCHES)):
            stream = next(streams)[0]["stream"] if streams is not None else None
            if number < done:
                continue
            batch, _, _ = batch_in(record, note)
            with _explained(stage, self.model.anatomy, is_first=number == done):
                values, out = self._run_parts(stage, batch, stream)
                if number == done:
                    _check_whole(stage, stream, [*values.values(), out], batch)
            if stage.layer < 0:
                files.notes["first"] = sorted(values)
            if values:
                rows = {name: x if batch.index is None else x[batch.index.to(x.device)] for name, x in values.items()}
                files.append(stage.points, rows, [*rows])  # safetensors sorts them
            if not is_last:
                files.append(stage.stream, {"stream": self._stream(stage, out)})
            files.count()

    def _stream(self, stage: Stage, out: Tensor | None) -> Tensor:
        if out is None:
            raise HooklineError(
                f"by_layer=True is not available for {self.model.anatomy.kind}: {stage} does not run on text. "
                f"Harvest without by_layer"
            )
        return out

    def _run_parts(self, stage: Stage, batch: Batch, stream: Tensor | None) -> tuple[dict[str, Tensor], Tensor | None]:
        """Run a batch through a stage, in parts if memory runs out."""

        def run(indices: Sequence[int]) -> tuple[dict[str, Tensor], Tensor | None]:
            first, stop = indices[0], indices[-1] + 1
            part = batch if len(indices) == batch.shape[0] else batch.part(first, stop)
            return self._run(stage, part, None if stream is None else to_device(stream[first:stop], self.device))

        results = [result for _, result in self._fit.parts(range(batch.shape[0]), run)]
        if len(results) == 1:
            return results[0]
        outs = [out.cpu() for _, out in results if out is not None]
        values = {name: torch.cat([values[name].cpu() for values, _ in results]) for name in results[0][0]}
        return values, torch.cat(outs) if outs else None

    def _run(self, stage: Stage, batch: Batch, stream: Tensor | None) -> tuple[dict[str, Tensor], Tensor | None]:
        points, model = self._points_of(stage), self.model
        streams: list[Tensor] = []
        recorder = Recorder(points, skips_missing=stage.layer < 0)
        actions: list[Action] = [Record(point, recorder) for point in points]
        if 0 <= stage.layer < stage.n_layers:
            layer = model.index.layer(stage.layer)
            actions.append(
                Record(model.index.find(f"{layer}.hook_resid_post"), leaving := Recorder(skips_missing=True))
            )
        if stage.layer == 0 and stream is not None:
            actions.append(
                Enter(model.index.find(f"{model.index.layer(0)}.hook_resid_pre").site, stream, is_first=True)
            )
        gives = self._gives(stage, stream, streams)
        inputs: dict[str, Any] = {name: to_device(x, self.device) for name, x in batch.kwargs.items()}
        root = model.index.root
        with Skipping(root, gives), Run(root, actions, is_one_pass=True), suppress(StopForward):
            model(return_type=None, **inputs)
        self.check_switch()
        if 0 <= stage.layer < stage.n_layers:
            streams = [*leaving.values().values()]
        axes = {point.name: point.axes for point in points}
        values = {
            column_name(model, points, name): as_rows(name, x, axes.get(name, ""), batch)
            for name, x in recorder.values().items()
        }
        return values, streams[0] if streams else None

    def _gives(self, stage: Stage, stream: Tensor | None, streams: list[Tensor]) -> dict[nn.Module, ModuleCall]:
        """What the modules that do not run in this stage return instead, by module."""
        anatomy = self.model.anatomy
        blocks, gives = [block.module for block in anatomy.blocks], dict[nn.Module, ModuleCall]()

        def enter(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            streams.append(args[0] if args else kwargs["hidden_states"])
            raise StopForward

        def stop(*_: Any) -> Any:
            raise StopForward

        if stage.layer < 0:
            return {blocks[0]: enter}
        if not self._always:
            gives[anatomy.main.embed] = _nothing(anatomy.main.embed, self.device)
        gives |= dict.fromkeys(blocks[: stage.layer], pass_through(anatomy))
        if stage.layer:
            gives[blocks[stage.layer - 1]] = pass_through(anatomy, stream)
        gives |= dict.fromkeys(blocks[stage.layer + 1 :], stop)
        if stage.layer < stage.n_layers and anatomy.unembed is not None:
            gives[anatomy.unembed] = stop
        return gives

    def _points_of(self, stage: Stage) -> list[HookPoint]:
        """The points that fire in a stage: outside the layers, those that fire before the first one come first."""
        if 0 <= stage.layer < stage.n_layers:
            return [point for point in self.points if self._layer_of.get(point.site.module) == stage.layer]
        outside = [point for point in self.points if point.site.module not in self._layer_of]
        if stage.layer < 0:
            return outside
        first = self._files.notes["first"]
        return [point for point in outside if column_name(self.model, outside, point.name) not in first]

    def _last_stage(self) -> int:
        """The index of the last stage that has points."""
        layers = [self._layer_of.get(point.site.module) for point in self.points]
        entry = (
            self.model.anatomy.main.embed,
            self.model.anatomy.main.pos_embed,
            self.model.anatomy.main.embed_norm,
        )
        if any(
            layer is None and point.site.module not in entry for layer, point in zip(layers, self.points, strict=True)
        ):
            return len(self._stages) - 1
        return max((layer + 1 for layer in layers if layer is not None), default=0)

    def _assembled(self, stages: Sequence[Stage], manifest: Manifest) -> Iterator[Computed]:
        """Every batch that is not stored yet, with its rows."""
        files = self._files
        logs = [files.records(stage.points) for stage in stages if files.has(stage.points)]
        for record, note in files.records(BATCHES) if files.notes["rows"] else ():
            records = [next(log) for log in logs]
            sources = {name: tensors[name] for tensors, names in records for name in names}
            batch, before, after = batch_in(record, note)
            if before.examples >= manifest.examples:
                yield before, replace(batch, index=None), sources, after

    def _check_space(self, stages: Sequence[Stage], progress: bool) -> None:
        """Say how much disk the stages need; raise if it is not there."""
        notes, folder, width = self._files.notes, self._files.folder, self.model.anatomy.width
        streams = 2 * notes["tokens"] * width * self.model.cfg.dtype.itemsize
        rows = 2 * notes["rows"] * self._row_bytes()  # by layer, and then as the shards of the store
        free = shutil.disk_usage(folder).free + sum(file.stat().st_size for file in folder.iterdir())
        if progress:
            largest = max(self.weights.nbytes(*stage.parts) for stage in stages)
            tell(
                f"by layer: {len(stages)} stages, each with at most {shown_bytes(largest)} of weights. Disk: "
                f"{shown_bytes(streams)} for the stream, and {shown_bytes(rows)} for the rows, half of which stay"
            )
        if streams + rows > free:
            raise StoreError(
                f"{folder} needs about {shown_bytes(streams + rows)} of disk, and {shown_bytes(free)} are free"
            )

    def _row_bytes(self) -> int:
        """About how many bytes a row has: all points are taken to be as wide as the stream, if shapes are unknown."""
        with suppress(HooklineError):
            tokens = torch.zeros(1, 2, dtype=torch.long)
            return self.model.plan(self.points, input={"input_ids": tokens}).nbytes // 2
        return len(self.points) * self.model.anatomy.width * self.model.cfg.dtype.itemsize

    def done(self) -> None:
        """Delete the files of the stages: everything is in the store."""
        self._files.delete()


def _check(points: ModelPoints) -> None:
    """Raise if the layers of a model do not simply hand on a stream."""
    anatomy = points.anatomy
    blocks = [block.module for block in anatomy.blocks]
    why = ""
    if anatomy.is_encoder_decoder:
        why = "its decoder also reads the encoder's output"
    elif anatomy.towers:
        why = "it has a vision tower"
    elif anatomy.architecture.more_than_stream:
        why = "its layers pass on more than the stream"
    elif getattr(anatomy.config, "num_kv_shared_layers", 0):
        why = "later layers use the keys and values of earlier ones (num_kv_shared_layers)"
    elif len({*blocks}) < len(blocks):
        why = "its layers share their weights, so all of them are in memory at once anyway"
    if not why:
        try:
            for layer in range(len(blocks)):
                points.find(f"{points.layer(layer)}.hook_resid_post")
        except UnavailablePointError as error:
            why = f"its layers do not simply return a stream ({error})"
    if why:
        raise HooklineError(f"by_layer=True is not available for {anatomy.kind}: {why}. Harvest without by_layer")


def _nothing(embed: nn.Module, device: torch.device) -> ModuleCall:
    """What skipped embeddings return: NaN, in the shape and dtype of embeddings."""
    weight: Any = embed.weight

    def give(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        ids = args[0] if args else kwargs["input"]
        return torch.full((*ids.shape, weight.shape[-1]), torch.nan, dtype=weight.dtype, device=device)

    return give


def _check_whole(stage: Stage, stream: Tensor | None, outputs: Sequence[Tensor | None], batch: Batch) -> None:
    """Raise if a stage gave NaN for real tokens, and its input has none: it needs something that was skipped."""
    mask = batch.kwargs.get("attention_mask", torch.ones(batch.shape, dtype=torch.long)).bool()
    if stream is None or bool(stream[mask].isnan().any()):
        return
    for x in outputs:
        if x is not None and x.is_floating_point() and bool(x.cpu().reshape(*batch.shape, -1)[mask].isnan().any()):
            raise HooklineError(
                f"{stage} gives NaN for an input without NaN: it reads more of earlier layers than the stream that "
                f"they hand on, or the model overflows. Harvest without by_layer"
            )


@contextmanager
def _explained(stage: Stage, anatomy: Anatomy, *, is_first: bool) -> Iterator[None]:
    """Turn what a stage raises on its first batch into an error that says what was tried."""
    try:
        yield
    except Exception as error:
        if not is_first or isinstance(error, HooklineError) or is_out_of_memory(error):
            raise
        raise HooklineError(
            f"by_layer=True is not available for {anatomy.kind}: {stage} does not run without the layers before it "
            f"({type(error).__name__}: {' '.join(str(error).split())}). Harvest without by_layer"
        ) from error
