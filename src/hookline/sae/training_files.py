"""Checkpoints of a training: all that its next step depends on, in one file."""

from __future__ import annotations

import json
import zlib
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hookline.errors import HooklineError
from hookline.files.tensorfile import make_folder, read_tensors, taking_apart, write_tensors
from hookline.sae.training_plan import Metrics
from hookline.text.outliers import Outlying

if TYPE_CHECKING:
    from hookline.sae.train import Trainer

_KIND = "sae training"
_MOMENTS = ("step", "exp_avg", "exp_avg_sq")


@dataclass
class TrainingFile:
    """The file of a training's state, and how often it is written."""

    path: Path
    every: int
    sum: str = field(default="", init=False)
    """The checksum of the last batch before the state was written, until the data is compared with it."""

    def save(self, trainer: Trainer, batch: Tensor) -> None:
        """Write the state after a batch, whole or not at all."""
        parameters = dict(trainer.sae.named_parameters())
        tensors: dict[str, Tensor] = {f"sae.{name}": x for name, x in parameters.items()}
        for name, x in parameters.items():
            state = trainer.optimizer.state.get(x, {})
            tensors |= {f"adam.{moment}.{name}": state[moment] for moment in _MOMENTS if moment in state}
        tensors |= {
            "random": trainer.random.get_state(),
            "dead": trainer.dead_features.steps,
            "sums": trainer.sums,
        }
        content = {
            "plan": asdict(trainer.plan),
            "source": _source(trainer),
            "steps": trainer.steps,
            "scale": trainer.scale.hex(),
            "resampled": trainer.resampled,
            "place": trainer.place,
            "batch": _sum(batch),
            "history": [asdict(metrics) for metrics in trainer.history],
            "outlying": {name: x for name, x in asdict(trainer.outlying).items() if name != "rows"},
        }
        make_folder(self.path.parent, "a checkpoint")
        write_tensors(self.path, _KIND, tensors, {"content": json.dumps(content)})

    def restore(self, trainer: Trainer) -> None:
        """Continue where the file ends, if there is one; an error if it belongs to another training."""
        if not self.path.exists():
            return
        tensors, about = read_tensors(self.path, _KIND, called="a training's checkpoint", writer="train(checkpoint=…)")
        with taking_apart(str(self.path)):
            content = json.loads(about["content"])
            self._check(trainer, content)
            self.sum = content["batch"]
            _put(trainer, tensors, content)

    def check_batch(self, batch: Tensor) -> None:
        """Raise if the data is not the one that the checkpoint was written for."""
        if _sum(batch) != self.sum:
            raise self._other_data("the last batch before it was written differs")
        self.sum = ""

    def check_seen(self) -> None:
        """Raise if the data ended before the batch that the checkpoint was written after."""
        if self.sum:
            raise self._other_data("here there are fewer batches")

    def _other_data(self, why: str) -> HooklineError:
        return HooklineError(
            f"{self.path} was trained on other data: {why}. Train with the same data, or use another checkpoint"
        )

    def _check(self, trainer: Trainer, content: dict[str, Any]) -> None:
        current = json.loads(json.dumps({**asdict(trainer.plan), **_source(trainer)}))
        stored = {**content["plan"], **content["source"]}
        other = [f"{name} is {current[name]!r} here, but {stored.get(name)!r} there" for name in current]
        different = [
            difference for difference, name in zip(other, current, strict=True) if current[name] != stored.get(name)
        ]
        if different:
            raise HooklineError(f"{self.path} belongs to another training: {'; '.join(different)}")


def _source(trainer: Trainer) -> dict[str, Any]:
    source = trainer.source
    return {"point": source.hook_name, "d_in": source.d_in, "outliers": trainer.outliers}


def _sum(batch: Tensor) -> str:
    return f"crc32:{zlib.crc32(batch.detach().cpu().contiguous().view(torch.uint8).numpy().data):08x}"


@torch.no_grad()
def _put(trainer: Trainer, tensors: dict[str, Tensor], content: dict[str, Any]) -> None:
    """Set the state of a trainer."""
    for name, parameter in trainer.sae.named_parameters():
        parameter.copy_(tensors[f"sae.{name}"])
        moments = {moment: tensors[key] for moment in _MOMENTS if (key := f"adam.{moment}.{name}") in tensors}
        if moments:
            moved = {moment: x if moment == "step" else x.to(parameter.device) for moment, x in moments.items()}
            trainer.optimizer.state[parameter] = moved
    trainer.random.set_state(tensors["random"])
    trainer.dead_features.steps.copy_(tensors["dead"])
    trainer.sums.copy_(tensors["sums"])
    trainer.steps, trainer.resampled = content["steps"], content["resampled"]
    trainer.scale, trainer.place = float.fromhex(content["scale"]), tuple(content["place"])
    trainer.history = [Metrics(**metrics) for metrics in content["history"]]
    trainer.outlying = Outlying(**content["outlying"])
