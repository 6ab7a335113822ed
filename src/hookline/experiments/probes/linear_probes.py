"""The probes of all layers: how they are fitted, judged, used and saved."""

from __future__ import annotations

import json
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self, TypeAlias

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from hookline.edits import add, project_out
from hookline.engine import HookPoint
from hookline.errors import HooklineError, warn
from hookline.experiments.core.labels import Label, about, find_label, listed
from hookline.experiments.core.sweep import sweep_points
from hookline.experiments.probes.attention_pool import attention_pool, text_softmax, text_sums
from hookline.experiments.probes.linear_fits import Linear, class_means, logistic, means_of, ridge, sparse
from hookline.experiments.probes.probe_rows import ProbeRows, probe_rows
from hookline.experiments.probes.prompt_split import Split, class_numbers, shuffled, split_prompts
from hookline.experiments.result import Result
from hookline.experiments.steering import Directions
from hookline.files.tensorfile import read_tensors, taking_apart, write_tensors
from hookline.hooks.data_edits import DataEdit
from hookline.model import HookedModel
from hookline.text.token_positions import Positions, last

Method: TypeAlias = Literal["logistic", "ridge", "mean_difference", "sparse"]
Pool: TypeAlias = Literal["attention"]
METHODS = ("logistic", "ridge", "mean_difference", "sparse")
PENALTY, POOL_PENALTY, K = 0.1, 0.001, 8


@dataclass(frozen=True, eq=False, repr=False)
class Probes(Result):
    """The held-out accuracy of a probe at each layer, with the probes themselves.

        probes.values                                   # [layer]: the accuracy on held-out prompts
        probes.selectivity                              # minus that of probes of shuffled labels
        probes.direction(2)                             # [d_model], a unit vector toward the second class
        model.run_with_hooks(prompt, fwd_hooks=probes.project_out(2))
        probes.evaluate(model, other_texts, other_labels)

    `info` has the accuracy on the training prompts (`trained`), that of probes of shuffled labels (`control`, and
    `control_trained`), and that of always answering the most frequent class (`majority`).
    """

    classes: list[Label] = field(default_factory=list)
    """The classes in order: of two, the direction points from the first to the second."""
    layers: list[int] = field(default_factory=list)
    points: list[str] = field(default_factory=list)
    """The name of the point of each layer."""
    weights: Float[Tensor, "layer class d"] = field(default_factory=lambda: torch.zeros(0, 0, 0))
    bias: Float[Tensor, "layer class"] = field(default_factory=lambda: torch.zeros(0, 0))
    means: Float[Tensor, "layer class d"] = field(default_factory=lambda: torch.zeros(0, 0, 0))
    """The mean activation of the training prompts of each class."""
    queries: Float[Tensor, "layer d"] | None = None
    """Of probes that pool over positions: where they look. A position counts as the softmax of `x @ query`."""
    held_out: list[int] = field(default_factory=list)
    """The numbers of the prompts that were held out."""

    @property
    def selectivity(self) -> Result:
        """The held-out accuracy minus that of probes of shuffled labels."""
        plain = Result(self.values, self.axes, self.coords, self.name, {})
        return plain - self.info["control"]

    def direction(self, layer: int, label: Label | None = None) -> Float[Tensor, " d"]:
        """The unit vector along which the score of a class rises most against the others.

        Of two classes, the default is the second: `True`, 1, or the later in the alphabet.
        """
        at, of = self._layer(layer), self._class(label)
        vector = _against_others(self.weights[at], of)
        if not bool(vector.any()):
            raise HooklineError(f"the probe of layer {layer} has no direction for {self.classes[of]!r}: it is zero")
        return vector / vector.norm()

    def directions(self, label: Label | None = None) -> Directions:
        """The direction at every layer, for `steering`: times the distance between the class means along it.

        Added once, it moves the mean of the other classes to that of the class, along the direction.
        """
        of = self._class(label)
        vectors = []
        for at, layer in enumerate(self.layers):
            unit = self.direction(layer, label)
            vectors.append(unit * (_against_others(self.means[at], of) @ unit))
        return Directions(torch.stack(vectors), self.layers, str(self.info["points"]), {"class": str(self.classes[of])})

    def add(
        self, layer: int, coefficient: float = 1.0, label: Label | None = None, *, pos: Positions = None
    ) -> list[tuple[str, DataEdit]]:
        """Hooks that add the direction of a class, in the scale of `directions`, at every position or at `pos`."""
        vector = self.directions(label).at(self.layers[self._layer(layer)])
        return [(self.points[self._layer(layer)], add(vector, coefficient, pos=pos))]

    def project_out(self, layer: int, *, pos: Positions = None) -> list[tuple[str, DataEdit]]:
        """Hooks that remove everything that the probe of a layer reads: one direction fewer than classes."""
        at = self._layer(layer)
        apart = self.weights[at] - self.weights[at].mean(0)
        _, sizes, basis = torch.linalg.svd(apart.double(), full_matrices=False)
        units = basis[sizes > 1e-6 * sizes[0]].to(self.weights) if bool(sizes[0]) else basis[:0]
        if not len(units):
            raise HooklineError(f"the probe of layer {layer} is zero: there is nothing to project out")
        return [(self.points[at], project_out(unit, pos=pos)) for unit in units]

    def functional(self, layer: int, label: Label | None = None) -> tuple[str, Float[Tensor, " d"], Float[Tensor, ""]]:
        """The point of a layer, and weight and bias of one score there: of two classes the second minus the first."""
        at, of = self._layer(layer), self._class(label)
        weight, bias = self.weights[at], self.bias[at]
        if len(self.classes) == 2:
            return self.points[at], weight[of] - weight[1 - of], bias[of] - bias[1 - of]
        return self.points[at], weight[of], bias[of]

    def query(self, layer: int) -> Float[Tensor, " d"] | None:
        """The query of a layer, if the probes pool over positions."""
        return None if self.queries is None else self.queries[self._layer(layer)]

    def scores(
        self, layer: int, x: Float[Tensor, "*place d"], mask: Bool[Tensor, "*text position"] | None = None
    ) -> Float[Tensor, "*scored class"]:
        """The score of each class for activations at a layer: the largest is the prediction.

        Probes that pool score whole texts, `[*text, position, d]`, without the positions where `mask` is False.
        """
        at = self._layer(layer)
        scores = x.to(self.weights) @ self.weights[at].T + self.bias[at]
        if self.queries is not None:
            return (self.attention(layer, x, mask)[..., None] * scores).sum(-2)
        if mask is not None:
            raise HooklineError("mask is for probes that pool over positions: these score each position by itself")
        return scores

    def attention(
        self, layer: int, x: Float[Tensor, "*text position d"], mask: Bool[Tensor, "*text position"] | None = None
    ) -> Float[Tensor, "*text position"]:
        """How much each position of a text counts for probes that pool: the weights add up to 1."""
        query = self.query(layer)
        if query is None:
            raise HooklineError('these probes do not pool over positions: pass pool="attention" to probes.fit')
        logits = x.to(query) @ query
        return (logits if mask is None else logits.masked_fill(~mask.bool(), -torch.inf)).softmax(-1)

    def predict(
        self, model: HookedModel, texts: Any, layer: int | None = None, *, pos: Positions = last, batch_size: int = 16
    ) -> list[Label]:
        """The class of each text, by the probe of a layer: by default, of the highest held-out accuracy.

        Several positions of a text decide by their mean score, or, if the probes pool, by that of the pool.
        """
        at = int(self.values.argmax()) if layer is None else self._layer(layer)
        point = model.point(self.points[at])
        rows = probe_rows(model, texts, [point], self._positions(pos), batch_size)
        scores = self._row_scores(at, rows, point)
        if self.queries is None:
            scores = text_sums(scores * rows.weights()[:, None], rows.prompt)
        return [self.classes[number] for number in scores.argmax(-1).tolist()]

    def _positions(self, pos: Positions) -> Positions:
        return _pooled_positions(pos) if self.queries is not None else pos

    def _row_scores(self, at: int, rows: ProbeRows, point: HookPoint) -> Float[Tensor, "row class"]:
        """The scores of all rows at a point; of all prompts, if the probes pool."""
        x = _checked(rows.at(point), point)
        scores = x @ self.weights[at].double().T + self.bias[at].double()
        if self.queries is None:
            return scores
        return text_sums(scores * text_softmax(x @ self.queries[at].double()[:, None], rows.prompt), rows.prompt)

    def evaluate(
        self, model: HookedModel, texts: Any, labels: Sequence[Any], *, pos: Positions = last, batch_size: int = 16
    ) -> Result:
        """The accuracy on other prompts, by layer: texts of another kind show what a probe really reads."""
        points = [model.point(name) for name in self.points]
        rows = probe_rows(model, texts, points, self._positions(pos), batch_size)
        classes, number = class_numbers([*labels, *self.classes], rows.prompts + len(self.classes))
        if classes != self.classes:
            raise HooklineError(f"the labels {listed(set(classes) - {*self.classes})} are not classes of this probe")
        accuracies = []
        scored = rows if self.queries is None else rows.pooled()
        for at, point in enumerate(points):
            scores = self._row_scores(at, rows, point)
            accuracies.append(_accuracy(scores[None], number[None, : rows.prompts], scored, None))
        values = torch.stack(accuracies)[:, 0]
        return Result(
            values, ("layer",), {"layer": [*self.layers]}, "accuracy", about(model, "probes on other prompts")
        )

    def save(self, path: str | Path) -> None:
        """Write the probes and their accuracy to a safetensors file."""
        plain, inner = self._split_info()
        tensors = {name: getattr(self, name) for name in ("values", "weights", "bias", "means")}
        tensors |= {} if self.queries is None else {"queries": self.queries}
        tensors |= {f"info.{key}": value.values for key, value in inner.items()}
        lists = {name: getattr(self, name) for name in ("classes", "layers", "points", "held_out")}
        heads = {key: value._header() for key, value in inner.items()}
        content = json.dumps({**self._header(), **lists, "info": plain, "results": heads}, ensure_ascii=False)
        write_tensors(path, "probes", tensors, {"content": content})

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read what `save` wrote."""
        tensors, metadata = read_tensors(path, "probes", called="probes", writer="Probes.save")
        with taking_apart(str(path)):
            head: dict[str, Any] = json.loads(metadata["content"])
            inner = {key: Result(tensors.pop(f"info.{key}"), **header) for key, header in head.pop("results").items()}
            fields: dict[str, Any] = {**tensors, **head, "info": head["info"] | inner}
            return cls(**fields)

    def _layer(self, layer: int) -> int:
        if layer not in self.layers:
            raise HooklineError(f"there is no probe of layer {layer!r}: there are probes of {self.layers}")
        return self.layers.index(layer)

    def _class(self, label: Any) -> int:
        if label is None and len(self.classes) == 2:
            return 1
        if label is None:
            raise HooklineError(f"there are {len(self.classes)} classes: choose one with label=, of {self.classes}")
        return find_label("class", self.classes, int(label) if isinstance(label, bool) else label)


def _against_others(x: Float[Tensor, "class d"], of: int) -> Float[Tensor, " d"]:
    """A row minus the mean of the others."""
    others = [at for at in range(len(x)) if at != of]
    return x[of] - x[others].mean(0)


def fit(
    model: HookedModel,
    texts: Any,
    labels: Sequence[Any],
    points: str = "resid_post",
    pos: Positions = last,
    *,
    method: Method = "logistic",
    pool: Pool | None = None,
    layers: Sequence[int] | None = None,
    penalty: float | None = None,
    k: int | None = None,
    test: float = 0.25,
    groups: Sequence[Hashable] | None = None,
    controls: int = 5,
    seed: int = 0,
    batch_size: int = 16,
) -> Probes:
    """Fit a probe of the labels at every layer; returns the accuracy on held-out prompts, and the probes.

        >>> about = [f"The capital of {each} is" for each in ("France", "Italy", "Spain", "Japan", "China", "Egypt")]
        >>> found = probes.fit(model, about, [True, True, True, False, False, False], test=0.4)
        >>> found.axes, found.direction(2).shape
        (('layer',), torch.Size([128]))

    `texts` are texts or token ids, over which the model runs once for all layers; or a store of activations
    (`hookline.harvest`) of this model, with one label for each of its examples. Activations are read at the last
    position, or at `pos` (None: all); then each prompt has several rows with its label, and all prompts count the same.

    The `method` is "logistic" (multinomial, with an L2 penalty), "ridge" (least squares), "mean_difference" (the
    nearest class mean), or "sparse" (logistic on the `k` dimensions that separate the classes best). `penalty` applies
    to weights of standardized activations.

    With `pool="attention"`, a probe reads all positions of a prompt, or those of another `pos`: a learned query weighs
    them, as one head of attention would, and the probe classifies the weighted mean. It finds evidence that is at one
    token, wherever that is.

    A share `test` of the prompts is held out, of each class; prompts with the same tokens, and those of one of the
    `groups` (templates, topics, …), are on the same side. `controls` probes are fitted on labels that are shuffled
    among prompts: what they reach on held-out prompts needs no information about the labels.
    """
    by_layer = _points(model, points, layers)
    how = _Fit.checked(method, pool, penalty, k, controls)
    positions = pos if pool is None else _pooled_positions(pos)
    rows = probe_rows(model, texts, list(by_layer.values()), positions, batch_size)
    split = split_prompts(labels, rows.same, groups, test, seed)
    problems = torch.cat([split.label[None], shuffled(split.label, rows.same, controls, seed)])
    device = model.cfg.device if model.cfg.device.type == "cuda" else torch.device("cpu")
    parts = [how.layer(rows, point, split, problems, device) for point in by_layer.values()]
    if not all(part.linear.is_converged for part in parts):
        warn("a logistic probe did not converge: its accuracy may still rise. A larger penalty= converges faster")
    return _result(model, parts, split, by_layer, {"points": points, **how.info()})


@dataclass(frozen=True, eq=False)
class _Layer:
    """The probes of one layer, and their accuracies; the first is of the labels, the others of shuffled ones."""

    linear: Linear
    means: Tensor
    query: Tensor | None
    trained: Float[Tensor, " problem"]
    held_out: Float[Tensor, " problem"]


@dataclass(frozen=True)
class _Fit:
    """How probes are fitted."""

    method: Method
    pool: Pool | None
    penalty: float
    k: int

    @classmethod
    def checked(cls, method: Any, pool: Any, penalty: float | None, k: int | None, controls: Any) -> _Fit:
        if method not in METHODS:
            raise HooklineError(f"method must be one of {listed(METHODS)}, got {method!r}")
        if pool not in (None, "attention"):
            raise HooklineError(f'pool is "attention", or None for a probe of each position; got {pool!r}')
        if pool is not None and method != "logistic":
            raise HooklineError(f'pool="attention" is for method="logistic", not for {method!r}')
        if penalty is not None and (method == "mean_difference" or not 0 < penalty < float("inf")):
            raise HooklineError(
                f"penalty must be a positive number, and does not apply to class means; got {penalty!r}"
            )
        if k is not None and (method != "sparse" or isinstance(k, bool) or not isinstance(k, int) or k < 1):
            raise HooklineError(f'k is a number of dimensions, and applies to method="sparse"; got {k!r}')
        if isinstance(controls, bool) or not isinstance(controls, int) or controls < 1:
            raise HooklineError(f"controls is how often labels are shuffled, at least once; got {controls!r}")
        default = PENALTY if pool is None else POOL_PENALTY
        return cls(method, pool, default if penalty is None else penalty, K if k is None else k)

    def info(self) -> dict[str, Any]:
        options = {"mean_difference": (), "sparse": ("penalty", "k")}.get(self.method, ("penalty",))
        pooling = {} if self.pool is None else {"pool": self.pool}
        return {"method": self.method, **pooling, **{name: getattr(self, name) for name in options}}

    def layer(self, rows: ProbeRows, point: HookPoint, split: Split, problems: Tensor, device: torch.device) -> _Layer:
        """Fit the probes of one layer."""
        x = _checked(rows.at(point), point)
        if self.pool is not None:
            return self._pooled(rows, x.to(device), split, problems.to(device))
        is_train = ~split.is_test[rows.prompt]
        share = rows.weights()[is_train]
        training_rows, share = x[is_train].to(device), (share / share.sum()).to(device)
        labels = torch.nn.functional.one_hot(problems[:, rows.prompt[is_train]], len(split.classes)).to(training_rows)
        linear, means = self._linear(training_rows, share, labels, point), means_of(training_rows, share, labels[:1])[0]
        scores = linear.scores(x.to(device)).cpu()
        trained, held_out = (_accuracy(scores, problems, rows, which) for which in (~split.is_test, split.is_test))
        return _Layer(linear, means.cpu(), None, trained, held_out)

    def _pooled(self, rows: ProbeRows, x: Tensor, split: Split, problems: Tensor) -> _Layer:
        """Fit the probes of one layer that pool over the rows of each prompt."""
        is_train, text = ~split.is_test[rows.prompt].to(x.device), rows.prompt.to(x.device)
        labels = torch.nn.functional.one_hot(problems, len(split.classes)).to(x)
        _, training_text = text[is_train].unique(return_inverse=True)
        is_training_text = ~split.is_test.to(x.device)
        fitted = attention_pool(x[is_train], training_text, labels[:, is_training_text], self.penalty)
        scores, weights = fitted.scores(x, text).cpu(), text_softmax(x @ fitted.queries[0][:, None], text)
        share = is_training_text / is_training_text.sum()
        means = means_of(text_sums(x * weights, text), share.to(x), labels[:1])[0]
        trained, held_out = (
            _accuracy(scores, problems.cpu(), rows.pooled(), which) for which in (~split.is_test, split.is_test)
        )
        return _Layer(fitted.linear, means.cpu(), fitted.queries[0].cpu(), trained, held_out)

    def _linear(self, x: Tensor, share: Tensor, labels: Tensor, point: HookPoint) -> Linear:
        match self.method:
            case "ridge":
                return ridge(x, share, labels, self.penalty)
            case "mean_difference":
                return class_means(x, share, labels)
            case "sparse":
                if self.k > x.shape[1]:
                    raise HooklineError(f"k={self.k}, but {point.name!r} has {x.shape[1]} dimensions")
                return sparse(x, share, labels, self.penalty, self.k)
            case _:
                return logistic(x, share, labels, self.penalty)


def _result(
    model: HookedModel, parts: list[_Layer], split: Split, by_layer: dict[int, HookPoint], info: dict[str, Any]
) -> Probes:
    layers = list(by_layer)
    coords: dict[str, list[Label]] = {"layer": [*layers]}

    def curve(values: list[Tensor], name: str) -> Result:
        return Result(torch.stack(values), ("layer",), coords, name)

    train, test = split.counts()
    info = about(model, f"probes of {len(split.classes)} classes at {info['points']}") | info
    info |= {"train": train, "test": test, "majority": split.majority()}
    info["trained"] = curve([part.trained[0] for part in parts], "accuracy on training prompts")
    info["control"] = curve([part.held_out[1:].mean() for part in parts], "accuracy with shuffled labels")
    info["control_trained"] = curve(
        [part.trained[1:].mean() for part in parts], "accuracy on training prompts with shuffled labels"
    )
    queries = [part.query for part in parts if part.query is not None]
    return Probes(
        torch.stack([part.held_out[0] for part in parts]),
        *(("layer",), coords, "accuracy", info),
        classes=split.classes,
        layers=layers,
        points=[point.name for point in by_layer.values()],
        weights=torch.stack([part.linear.weights[0].cpu() for part in parts]).float(),
        bias=torch.stack([part.linear.bias[0].cpu() for part in parts]).float(),
        means=torch.stack([part.means for part in parts]).float(),
        queries=torch.stack(queries).float() if queries else None,
        held_out=split.is_test.nonzero().flatten().tolist(),
    )


def _pooled_positions(pos: Positions) -> Positions:
    """The positions of a pool: all, unless others than the default are chosen."""
    return None if pos is last else pos


def _points(model: HookedModel, kind: Any, layers: Sequence[int] | None) -> dict[int, HookPoint]:
    """The points of some layers; an error unless they have one vector per position of the text."""
    if not isinstance(kind, str):
        raise HooklineError(
            f"points is one kind of point, such as 'resid_post', got {kind!r}: fit each kind separately"
        )
    by_layer = {int(layer): point for (layer,), point in sweep_points(model, kind, "layer", layers).points.items()}
    for point in by_layer.values():
        letters = point.axes.split()
        if point.stream == "image" or letters[:2] != ["b", "p"] or len(letters) != 3:
            raise HooklineError(
                f"a probe needs one vector per token, but {point.name!r} has axes {point.axes}: use resid_post, "
                f"attn_out, mlp_out, post, …"
            )
    return by_layer


def _checked(x: Tensor, point: HookPoint) -> Float[Tensor, "row d"]:
    if not bool(x.isfinite().all()):
        raise HooklineError(f"{point.name!r} has activations that are not finite (NaN or infinite)")
    return x.double()


def _accuracy(scores: Tensor, problems: Tensor, rows: ProbeRows, which: Tensor | None) -> Float[Tensor, " problem"]:
    """The share of right predictions on some prompts, which all count the same."""
    is_right = (scores.argmax(-1) == problems[:, rows.prompt]).double()
    weights = rows.weights() if which is None else rows.weights() * which[rows.prompt]
    return is_right @ weights / weights.sum()
