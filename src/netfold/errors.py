"""What can go wrong with the others. Misuse is ValueError or TypeError instead."""

from __future__ import annotations


class NetfoldError(RuntimeError):
    """A peer or the network failed. `rank` is the rank at fault where it is known, else None."""

    def __init__(self, text: str, *, rank: int | None = None) -> None:
        super().__init__(text)
        self.rank = rank


class RendezvousError(NetfoldError):
    """The group could not come together."""


class SwitchError(NetfoldError):
    """The switch refused, or cannot be reached."""


class PeerLost(NetfoldError):  # noqa: N818 - the field's word, like ConnectionReset
    """A rank died or left while it was needed."""


class SwitchLost(NetfoldError):  # noqa: N818
    """The aggregator went away."""


class Mismatch(NetfoldError):  # noqa: N818
    """Ranks called different operations, sizes, dtypes or reductions at the same place."""


class CollectiveTimeout(NetfoldError, TimeoutError):  # noqa: N818
    """An operation passed its deadline."""


class WaitTimeout(NetfoldError, TimeoutError):  # noqa: N818
    """A wait for an operation ended. The operation itself goes on until its own deadline."""


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
