"""Communication profiles: where a training job's time on the network goes.

`run` is what a profiled job leaves on disk, `record` one operation in it, `findings` what is said of it. `recording` is
how a process writes it, `launch` runs a command with that on. `analyse` leads from a run to findings: `columns` (names
and sizes), `matching` (which records are one operation), `clock_sync`, `stragglers`, `overlap`, `summary`. `compare`
sets two runs side by side; `table`, `export`, `page` and `perfetto` are how it is shown. May import NumPy and, while it
records, the native floor; no room of ours. The record's layout is the native engine's
(`native/engine/include/.../event.hpp`), held by a test.

Always: reading a run changes nothing in it; a run can be read on another machine, without what made it.

Tests: `.venv/bin/pytest tests/profile`
"""

import os
import sys
from types import ModuleType
from typing import TYPE_CHECKING

from netfold.profile.record import RECORD, Records, records_of

if TYPE_CHECKING:
    from netfold.profile.recording import Recording

__all__ = ["RECORD", "Records", "records_of", "step"]


def step() -> None:
    """Mark, on the training thread, the boundary between two steps; without it those of the optimizer are taken.

    Does nothing where nothing is recorded.
    """
    recording = sys.modules.get("netfold.profile.recording")
    if recording is not None:
        recording.step()


class _Callable(ModuleType):
    """This module, so that `netfold.profile` can be a room and what it does: importing a room of a package sets the
    package's attribute of that name, so no function could live there as well."""

    def __call__(self, folder: "str | os.PathLike[str]") -> "Recording":
        """Record this process into `folder`: `with netfold.profile("RUN"):`, or `.start()` and `.stop()`.

        Every process of a job calls it with the same folder and has a folder of its rank there. It never synchronises
        ranks and changes nothing about operations; a full disk ends the recording, with a sentence on stderr, and not
        the training. What is recorded begins with the call, and with the process's first group where it is in none.
        Costs: docs/reference/profile.md. start() raises RuntimeError where the process is recorded already, ValueError
        where
        `folder` holds something else, or a profile of this rank.
        """
        from netfold.profile.recording import Recording

        return Recording(folder)


sys.modules[__name__].__class__ = _Callable
