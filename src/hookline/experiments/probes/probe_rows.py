"""The activations that probes are fitted on: from texts in one pass, or from a store; and which prompt each is of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from hookline.engine import HookPoint
from hookline.errors import HooklineError, StoreError
from hookline.experiments.core.prompts import check_has_weights
from hookline.model import HookedModel
from hookline.store.examples import Examples, as_text
from hookline.store.harvesting import Harvest
from hookline.store.manifest import differences
from hookline.store.selection import HarvestOptions
from hookline.store.store import Store, open_store
from hookline.text.given_texts import columns_in
from hookline.text.token_positions import Positions

_SAME = ("class", "config", "modules", "weights")
"""What a store and a model must have in common for the activations to be those of the model."""


@dataclass(frozen=True, eq=False)
class ProbeRows:
    """Rows of activations at several points, and the prompt of each row."""

    prompts: int
    prompt: Int[Tensor, " row"]
    """The number of the prompt of each row."""
    same: list[int]
    """For each prompt, the number of the first prompt with the same tokens; its own where tokens are not known."""
    at: Callable[[HookPoint], Float[Tensor, "row d"]]
    """The activations at a point."""

    def weights(self) -> Float[Tensor, " row"]:
        """The weight of each row, so that all prompts count the same."""
        return 1 / torch.bincount(self.prompt, minlength=self.prompts).double()[self.prompt]

    def pooled(self) -> ProbeRows:
        """One row for each prompt, as probes that pool have."""
        return replace(self, prompt=torch.arange(self.prompts))


def probe_rows(
    model: HookedModel, texts: Any, points: Sequence[HookPoint], pos: Positions, batch_size: int
) -> ProbeRows:
    """The rows at some positions of texts, of which the model runs once; or of a store, or the path of one."""
    is_store = isinstance(texts, Store | Path)
    return (_of_store if is_store else _of_texts)(model, texts, points, pos, batch_size)


def _of_texts(
    model: HookedModel, texts: Any, points: Sequence[HookPoint], pos: Positions, batch_size: int
) -> ProbeRows:
    if isinstance(texts, str):
        raise HooklineError(
            f"texts must be a list of texts, one for each label, or a store, or its Path; got the text {texts!r:.60}"
        )
    check_has_weights(model)
    work = Harvest(model, list(points), HarvestOptions(pos, batch_size=batch_size))
    examples, numbers = Examples(texts, None, partial(as_text, text=model.text)), list[Tensor]()
    activations: dict[str, list[Tensor]] = {point.canonical_name: [] for point in points}
    tokens: list[bytes] = []
    with torch.no_grad(), work.context():
        for before, items in examples.batches(batch_size):
            batch = work.batch(items, before.examples)
            numbers.append(batch.example)
            tokens += [_content(item) for item in items]
            if batch.rows:
                for name, x in work.activations(batch).items():
                    index = None if batch.index is None else batch.index.to(x.device)
                    activations[name].append((x if index is None else x[index]).cpu())
    prompt = torch.cat(numbers) if numbers else torch.zeros(0, dtype=torch.long)
    _check_covered(prompt, len(tokens), pos)
    rows = {name: torch.cat(parts) for name, parts in activations.items()}
    return ProbeRows(len(tokens), prompt, _first_equal(tokens), lambda point: rows[point.canonical_name])


def _content(example: Any) -> bytes:
    return example.encode("utf-8", "surrogatepass") if isinstance(example, str) else example.ids.numpy().tobytes()


def _first_equal(contents: Sequence[bytes]) -> list[int]:
    first: dict[bytes, int] = {}
    return [first.setdefault(content, number) for number, content in enumerate(contents)]


def _check_covered(prompt: Tensor, prompts: int, pos: Positions) -> None:
    """Raise if a prompt has no row: its label would be ignored."""
    absent = (torch.bincount(prompt, minlength=prompts) == 0).nonzero().flatten().tolist()
    if absent:
        raise HooklineError(
            f"prompt {absent[0]} has no position pos={pos!r}, or is empty ({len(absent)} of {prompts} prompts): remove "
            f"these prompts and their labels, or use another pos"
        )


def _of_store(
    model: HookedModel,
    source: Any,
    points: Sequence[HookPoint],
    pos: Positions,
    batch_size: int,  # noqa: ARG001
) -> ProbeRows:
    store = open_store(source)
    _check_model(model, store, points)
    names = {point.canonical_name: store.select(point.canonical_name)[0] for point in points}
    rows = store.rows(points=[])
    chosen = _chosen(model, store, rows.example, rows.position, rows.token, pos)
    prompt = rows.example[chosen].long()
    _check_covered(prompt, store.examples, pos)
    where, same = chosen.nonzero().flatten(), list(range(store.examples))
    if _has_all(store):
        counts = torch.bincount(rows.example.long(), minlength=store.examples).tolist()
        same = _first_equal([tokens.numpy().tobytes() for tokens in rows.token.split(counts)])
    return ProbeRows(store.examples, prompt, same, lambda point: store[names[point.canonical_name]][where])


def _has_all(store: Store) -> bool:
    """Whether a store has every token of its examples."""
    options = store.manifest.about.options
    return options.get("positions") == "all" and options.get("sample", 1.0) == 1


def _check_model(model: HookedModel, store: Store, points: Sequence[HookPoint]) -> None:
    """Raise if the store has the activations of another model."""
    identity = Harvest(model, list(points), HarvestOptions()).identity(store)
    is_empty = any(parameter.device.type == "meta" for parameter in model.module.parameters())
    compared = [key for key in _SAME if key != "weights" or not is_empty]
    stored = store.manifest.about.model
    ours, theirs = ({key: description.get(key) for key in compared} for description in (identity, stored))
    if different := differences(ours, theirs):
        raise StoreError(
            f"{store.path} has the activations of another model, {stored.get('id')!r}, not of {identity['id']!r}: "
            f"{'; '.join(different)}. Harvest it with this model"
        )


def _chosen(
    model: HookedModel, store: Store, example: Tensor, position: Tensor, token: Tensor, pos: Positions
) -> Bool[Tensor, " row"]:
    """Which rows of a store are at the positions."""
    every = torch.ones(len(example), dtype=torch.bool)
    options = store.manifest.about.options
    stored, sample = options.get("positions"), options.get("sample", 1.0)
    requested = HarvestOptions(pos).recorded()["positions"]
    if pos is None or (stored == requested and sample == 1):
        return every
    if not _has_all(store):
        what = f"the positions {stored}" if stored != "all" else f"a random {sample:.0%} of the tokens"
        raise StoreError(
            f"{store.path} has {what}, so pos={pos!r} cannot be found in it: pass pos=None, which uses every stored row"
        )
    counts = torch.bincount(example.long(), minlength=store.examples)
    ids = pad_sequence(list(token.long().split(counts.tolist())), batch_first=True)
    real = torch.arange(ids.shape[1]) < counts[:, None]
    mask, _ = columns_in(HarvestOptions(pos).positions, model.module, ids, real)  # type: ignore[arg-type]
    return (mask & real)[example.long(), position.long()]
