"""Links with a delay: pairs of TAP interfaces, whose frames a native thread of this process holds for the delay.

Many kernels lack netem, and all have TAP. The kernel removes the interfaces when this process ends for any reason.
"""

from __future__ import annotations

from typing import Any

from netfold.extras import native_dev
from netfold_lab.rack.command import RackError
from netfold_lab.rack.topology import End

# The folder of `ip netns`.
NAMESPACES = "/run/netns"


class DelayLinks:
    """The delayed links of one rack. Without any there is no thread."""

    def __init__(self) -> None:
        self._native: Any = None
        self._numbers: dict[End, int] = {}

    def add(self, one: End, other: End, delay_ns: int) -> None:
        """Make both interfaces, down, and delay frames between them by `delay_ns`. Raises RackError."""
        if self._native is None:
            self._native = native_dev("a link with delay").delay_link.DelayLinks()
        try:
            self._numbers[one] = self._native.add(*_path(one), *_path(other), delay_ns)
        except OSError as error:
            raise RackError(str(error)) from None

    def disturb(self, one: End, duplicate_ratio: float, reorder_ratio: float, reorder_ns: int, seed: int) -> None:
        """Start to duplicate and hold back frames, both ways, of the link that was added with this end first.

        Raises RackError where that link has no delay, or a ratio is out of range.
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
        """Remove the interfaces, and drop the frames that are held."""
        if self._native is not None:
            self._native.stop()
            self._native = None


def _path(end: End) -> tuple[str, str]:
    return f"{NAMESPACES}/{end.namespace}", end.device
