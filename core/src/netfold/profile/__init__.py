"""Communication profiles: where a training job spends its time on the network.

`run` reads a profiled job's files, `record` is the record of one operation, `findings` the results. `recording` writes
a process's files; `launch` runs a command with recording on. `nccl` reads what NCCL's own profiler gave. `window` cuts
a run to its steps. `analyse` turns a run into findings: `columns` (names and sizes), `matching` (which records are one
operation), `clock_sync`, `stragglers`, `overlap`, `summary`. `compare` compares two runs. `table`, `export`, `page` and
`perfetto` render the results. May import NumPy, `netfold.page`, `netfold.units` and, while recording, the native
engine. The record's layout is the native engine's (`core/native/engine/include/.../event.hpp`); a test compares them.

Always: reading a run does not change it; a run can be read on another machine, without the software that recorded it.

Tests: `.venv/bin/pytest core/tests/profile`
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
    """Mark the boundary between two steps. Call it on the training thread. Without it, optimizer steps count.

    Does nothing without a recording.
    """
    recording = sys.modules.get("netfold.profile.recording")
    if recording is not None and (current := recording.current()) is not None:
        current.step()


class _Callable(ModuleType):
    """This module's class, so that `netfold.profile` is both a package and a callable.

    Importing a subpackage sets the parent's attribute of that name, so the parent cannot hold a function of that name.
    """

    def __call__(self, folder: "str | os.PathLike[str]") -> "Recording":
        """Record this process into `folder`: `with netfold.profile("RUN"):`, or `.start()` and `.stop()`.

        Every process of a job calls this with the same folder, and writes a subfolder for its rank. The recording
        begins with the call, or with the process's first group if there is none yet. It never synchronises ranks and
        does not change operations. A full disk ends the recording, with a message on stderr, but not the training.
        Cost: docs/reference/profile.md. start() raises RuntimeError if the process is already being recorded,
        ValueError if `folder` holds other files, or a profile of this rank.
        """
        from netfold.profile.recording import Recording

        return Recording(folder)


sys.modules[__name__].__class__ = _Callable
