"""A run in TensorBoard: `tensorboard --logdir runs`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from netfold.train.callbacks.curves import of_evaluation, of_step
from netfold.train.callbacks.overlap import OverlapCallback
from netfold.train.events import Callback, Ended, Evaluated, Noted, Started, Stepped

# What a run that is killed may lose.
_FLUSH_S = 10


class TensorBoard(Callback):
    """Curves under train/ and held-out/, what was noted as text. A run that goes on takes back what it does again."""

    def __init__(self, folder: Path, every: int, exposed: OverlapCallback) -> None:
        """every: steps between two points."""
        self._folder, self._every, self._exposed = folder / "tensorboard", every, exposed
        self._batch = 0
        self._proto: Any = None
        self._writer: Any = None

    def on_start(self, event: Started) -> None:
        from tensorboard.compat.proto import summary_pb2  # type: ignore[import-untyped]
        from torch.utils.tensorboard import SummaryWriter

        self._proto = summary_pb2
        self._batch = event.batch
        self._writer = SummaryWriter(
            str(self._folder), purge_step=event.step + 1 if event.step else None, flush_secs=_FLUSH_S
        )

    def on_step(self, event: Stepped) -> None:
        if event.step % self._every == 0:
            self._add(of_step(event, self._batch, self._exposed.share), event.step)

    def on_evaluation(self, event: Evaluated) -> None:
        self._add(of_evaluation(event), event.step)

    def on_note(self, event: Noted) -> None:
        if self._writer is not None:
            self._writer.add_text(event.level, event.text, event.step)

    def on_end(self, event: Ended) -> None:
        self._writer.close()

    def _add(self, values: Mapping[str, float], step: int) -> None:
        # All as one event: its way to the thread that writes costs more than making it.
        each = [self._proto.Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._writer.file_writer.add_summary(self._proto.Summary(value=each), step)
