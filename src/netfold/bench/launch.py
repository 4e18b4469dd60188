"""Starts the ranks of every world, on this machine, in a rack or under an MPI, and ends them."""

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from netfold.bench.config import BenchEnvironment, Message
from netfold.bench.network import Network, Place, open_network
from netfold.bench.ranks import Ranks, start_ranks
from netfold.extras import need
from netfold.rack import Rack


class Worlds:
    """The ranks of all worlds of a run. One world has the turn; the other ranks sleep in a read meanwhile."""

    def __init__(self, ranks: Mapping[str, Ranks], load_before: float) -> None:
        self._ranks = ranks
        self.load_before = load_before
        ready: list[Message] = [each.ready[0] for each in ranks.values()]
        self.versions: dict[str, str] = {name: of for each in ready for name, of in each["versions"].items()}
        self.congestion_control: str = ready[0]["congestion_control"]

    def tell(self, world: str, command: str, first: int | None = None, /, **arguments: Any) -> list[Message]:
        """Send one command to a world's `first` ranks (None: all); return their answers in the order of ranks."""
        return self._ranks[world].ask(command, arguments, first=first)


@contextlib.contextmanager
def start_worlds(place: BenchEnvironment, worlds: Sequence[str], rack: Rack | None = None) -> Iterator[Worlds]:
    """Start the ranks of all worlds and wait until they have connected. No rank is left when the block is done.

    rack: one that stands, with its aggregators; None: `place` says which one to build, if any.
    Raises BenchError; ValueError (PeerMissingError, MissingExtraError) where a world cannot be had; RackError where the
    rack or the switch cannot be started.
    """
    if "torch" in worlds:
        need("a backend of torch", ["torch"], "torch")
    load = os.getloadavg()[0]
    rate = place.rack_rate or ""
    switch = True if rate and place.switch is None else place.switch
    where = Place(place.workers, rate, loss=place.rack_loss, delay=place.rack_delay, switch=switch)
    with contextlib.ExitStack() as stack:
        network = Network(where, rack) if rack is not None else stack.enter_context(open_network(where))
        ranks = {}
        for world in dict.fromkeys(worlds):
            argv = [sys.executable, "-m", "netfold.bench.rank", world]
            ranks[world] = stack.enter_context(start_ranks(network, world, argv, deadline_s=place.deadline_s))
        yield Worlds(ranks, load)
