"""Communication profiles. So far: the event record, as NumPy reads it.

May import NumPy and no room of ours; the layout is the native engine's (`native/engine/include/.../event.hpp`), held by
a test.

Tests: `.venv/bin/pytest tests/profile`
"""

from netfold.profile.record import RECORD, Records, records_of

__all__ = ["RECORD", "Records", "records_of"]
