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


class DelayLinks:
    """Those of one rack. Costs nothing where there are none."""

    def __init__(self) -> None:
        self._native: Any = None
        self._numbers: dict[End, int] = {}

    def add(self, one: End, other: End, delay_ns: int) -> None:
        """Make both interfaces, down, and hold for `delay_ns` what goes from one to the other. Raises RackError."""
        from netfold._native import delay_link

        if self._native is None:
            self._native = delay_link.DelayLinks()
        try:
            self._numbers[one] = self._native.add(*_place(one), *_place(other), delay_ns)
        except OSError as error:
            raise RackError(str(error)) from None

    def disturb(self, one: End, duplicate_ratio: float, reorder_ratio: float, reorder_ns: int, seed: int) -> None:
        """From now on duplicate and hold back frames, both ways, of the link that was added with this end first.

        Raises RackError where that link has no delay, or a ratio is none.
        """
        if one not in self._numbers:
            raise RackError(f"{one.device} in {one.namespace} has no delay: only such a link can reorder packets")
        try:
            self._native.set_faults(self._numbers[one], duplicate_ratio, reorder_ratio, reorder_ns, seed)
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
