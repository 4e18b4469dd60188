"""Communication profiles: where a training job's time on the network goes.

`run` is what a profiled job leaves on disk, `record` one operation in it, `findings` what is said of it. `analyse`
leads from the one to the other: `columns` (names and sizes), `matching` (which records are one operation), `clocks`,
`lateness`, `exposed`, `summary`. `compare` sets two runs side by side; `table` and `data` are how both are shown. May
import NumPy and no room of ours; the record's layout is the native engine's (`native/engine/include/.../event.hpp`),
held by a test.

Always: reading a run changes nothing in it; a run can be read on another machine, without what made it.

Tests: `.venv/bin/pytest tests/profile`
"""

from netfold.profile.record import RECORD, Records, records_of

__all__ = ["RECORD", "Records", "records_of"]
