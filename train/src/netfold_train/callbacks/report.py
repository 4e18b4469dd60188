"""Write a run's page while it trains (`netfold_train.runs.page`), and the pictures that the page shows."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path

from PIL import Image

from netfold_train.callbacks.events import Callback, Ended, Evaluated, Started
from netfold_train.data.examples import Panel
from netfold_train.runs import PICTURE_LIST, PICTURES
from netfold_train.runs.page import write_report

# All ranks wait while rank 0 writes. Writing takes at most this fraction (1/200) of the time before the end.
_RARE = 200


class ReportCallback(Callback):
    """Write a run's page at evaluations and at the end of the run."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._next_s = 0.0
        self._steps = 0

    def on_start(self, event: Started) -> None:
        self._steps = event.steps

    def on_evaluation(self, event: Evaluated) -> None:
        if event.pictures:
            _write_pictures(self._folder, event.step, event.pictures)
        began_s = time.monotonic()
        if began_s < self._next_s or event.step == self._steps:  # the end comes next
            return
        write_report(self._folder)
        ended_s = time.monotonic()
        self._next_s = ended_s + _RARE * (ended_s - began_s)

    def on_end(self, event: Ended) -> None:
        write_report(self._folder)


def _write_pictures(folder: Path, step: int, panels: Sequence[Panel]) -> None:
    """Replace the PNG files in the folder, and then their list."""
    (folder / PICTURES).mkdir(exist_ok=True)
    listed = []
    for panel in panels:
        file = f"{panel.title}.png".replace(" ", "-")
        Image.fromarray(panel.pixels.permute(1, 2, 0).contiguous().numpy()).save(folder / PICTURES / file)
        listed.append({"title": panel.title, "said": panel.said, "file": file})
    (folder / PICTURES / PICTURE_LIST).write_text(
        json.dumps({"step": step, "panels": listed}, indent=1), encoding="utf-8"
    )
