"""Links that take time: pairs of TAP interfaces, whose frames a native thread of this process holds for the delay.

The kernel's own way, netem, is missing from many; this needs TAP alone, which all have. The interfaces are gone when
this process is, however it ends.
"""

from __future__ import annotations

from typing import Any

from netfold.rack.command import RackError
from netfold.rack.topology import End

# Where `ip netns` keeps them.
NAMESPACES = "/run/netns"


class Cables:
    """Those of one rack. Costs nothing where there are none."""

    def __init__(self) -> None:
        self._native: Any = None

    def add(self, one: End, other: End, delay_ns: int) -> None:
        """Make both interfaces, down, and hold for `delay_ns` what goes from one to the other. Raises RackError."""
        from netfold._native import cable

        if self._native is None:
            self._native = cable.Cables()
        try:
            self._native.add(*_place(one), *_place(other), delay_ns)
        except OSError as error:
            raise RackError(str(error)) from None

    def start(self) -> None:
        if self._native is not None:
            self._native.start()

    def stop(self) -> None:
        """Take them away again, with what is held."""
        if self._native is not None:
            self._native.stop()
            self._native = None


def _place(end: End) -> tuple[str, str]:
    return f"{NAMESPACES}/{end.namespace}", end.device
