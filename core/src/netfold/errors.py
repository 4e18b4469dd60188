"""Errors of other ranks, switches and the network. A misuse of the API raises ValueError or TypeError instead."""

from __future__ import annotations


class NetfoldError(RuntimeError):
    """A peer or the network failed. rank: the rank at fault where that is known, else None."""

    def __init__(self, text: str, *, rank: int | None = None) -> None:
        super().__init__(text)
        self.rank = rank


class RendezvousError(NetfoldError):
    """The ranks could not form the group."""


class SwitchError(NetfoldError):
    """The switch refused, or cannot be reached. what: without its remedy. remedy: what to try; "" where unknown."""

    def __init__(self, what: str, *, remedy: str = "") -> None:
        super().__init__(f"{what}; {remedy}" if remedy else what)
        self.what = what
        self.remedy = remedy


class PeerLost(NetfoldError):  # noqa: N818 - named after the event, as ConnectionReset is
    """A rank died or left while it was needed."""


class SwitchLost(NetfoldError):  # noqa: N818
    """The switch is lost, and the group could not go on without it."""


class Mismatch(NetfoldError):  # noqa: N818
    """Ranks called different operations, sizes, dtypes or reductions at the same place in their sequence of calls."""


class CollectiveTimeout(NetfoldError, TimeoutError):  # noqa: N818
    """An operation passed its deadline."""


class WaitTimeout(NetfoldError, TimeoutError):  # noqa: N818
    """A wait for an operation timed out. The operation goes on until its own deadline."""


class GroupAborted(NetfoldError):  # noqa: N818
    """This rank closed or aborted the group."""


_BY_KIND: dict[str, type[NetfoldError]] = {
    "peer_lost": PeerLost,
    "switch_lost": SwitchLost,
    "mismatch": Mismatch,
    "timeout": CollectiveTimeout,
    "aborted": GroupAborted,
    "system": NetfoldError,
}


def error_of(kind: str, rank: int, text: str) -> NetfoldError:
    return _BY_KIND[kind](text, rank=rank if rank >= 0 else None)
