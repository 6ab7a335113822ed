"""A callback that opens `watch` when a training begins, and closes it when it ends."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from weakref import finalize

from transformers import TrainerCallback

if TYPE_CHECKING:
    from hookline.training.record import TrainingRecord
    from hookline.training.watching import Watch


class WatchCallback(TrainerCallback):
    """For the `Trainer` of transformers; Lightning's calls methods of other names, all of which it has.

    Lightning is not imported: it calls what a callback has, by name.
    """

    state_key = "hookline.watch"

    def __init__(self, watching: Watch) -> None:
        self._watching = watching
        finalize(self, watching.end)  # a training that raised does not say that it has ended

    @property
    def record(self) -> TrainingRecord:
        """What was measured."""
        return self._watching.record

    def on_train_begin(self, *_args: Any, **_kwargs: Any) -> None:
        """The training begins: `Trainer`."""
        self._watching.begin()

    def on_train_start(self, *_args: Any) -> None:
        """The training begins: Lightning."""
        self._watching.begin()

    def on_train_end(self, *_args: Any, **_kwargs: Any) -> None:
        """The training has ended."""
        self._watching.end()

    def on_exception(self, *_args: Any) -> None:
        """The training raised an exception: Lightning."""
        self._watching.end()

    def state_dict(self) -> dict[str, Any]:
        """What Lightning saves with a checkpoint: nothing."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("on_") or name in ("setup", "teardown"):
            return _nothing
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")


def _nothing(*_args: Any, **_kwargs: Any) -> None:
    """Another event of Lightning."""
