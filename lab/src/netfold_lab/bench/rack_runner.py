"""Runs one all_reduce at a time in a rack: the caller chooses the configuration of each turn.

`runner.py` plays whole trials. This runner is for measurements that change something between two calls: a link's loss,
the hosts that take part, the length of a packet.
"""

import contextlib
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

from netfold_lab.bench.backends import BackendName
from netfold_lab.bench.config import BenchEnvironment
from netfold_lab.bench.ranks import BenchError
from netfold_lab.bench.runner import Runner, refusal_of, start_runner
from netfold_lab.rack import Rack
from netfold_lab.rack.command import run
from netfold_lab.rack.link import Link, loss_rules
from netfold_lab.rack.names import HOST_INTERFACE, SUBNET, SUBNET_BITS, host_namespace


@dataclass(frozen=True)
class Configuration:
    """One configuration of an all_reduce."""

    label: str  # unique in a run
    workers: int  # the first so many hosts take part
    options: Mapping[str, str] | None = None  # netfold.Options; "switch": "nearest", or none; None: gloo, or the MPI
    payload_bytes: int | None = None  # of values in a packet to the switch, a multiple of 8, 512 to 8880; None: probed
    mpi: str = ""  # the MPI that the runner was started with; "": none

    def backend(self) -> BackendName:
        if self.mpi:
            return BackendName(self.label, self.mpi, self.mpi, ranks=self.workers)
        if self.options is None:
            return BackendName(self.label, "torch", "gloo", ranks=self.workers)
        # The variable NETFOLD_SWITCH holds the nearest switch's address in each rank.
        settings = {"switch": "", **self.options}
        if settings["switch"] == "nearest":
            del settings["switch"]
        return BackendName(
            self.label,
            "torch",
            "netfold",
            settings=settings,
            ranks=self.workers,
            payload_bytes=self.payload_bytes,
        )


@dataclass(frozen=True)
class Timing:
    """The calls of one turn."""

    took_s: list[float]  # of each call, the slowest rank's
    wrong: int  # elements, over all ranks and calls
    again: int  # packets that all ranks retransmitted
    sent_bytes: int | None  # by rank 0 in the last call, from netfold's record; None: gloo, MPI
    error: float | None  # rms of errors over that of the exact sum, the greatest rank's; None: whole numbers

    @property
    def median_s(self) -> float:
        return statistics.median(self.took_s)


class RackRunner:
    """A rank on every host of a rack, and one more of the MPI, if there is one."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner

    def open(self, configurations: Sequence[Configuration]) -> None:
        """Make a group for each. Every host takes part in this, also one that is not in the group."""
        for configuration in configurations:
            name = configuration.backend()
            if refusal := refusal_of(self.runner.tell(name.world, "open", **asdict(name))):
                raise BenchError(f"{configuration.label}: {refusal}")

    def turn(
        self, configuration: Configuration, size_bytes: int, number: int, *, calls: int = 1, values: str = "whole"
    ) -> Timing:
        """Make `calls` calls one after the other, of `size_bytes` of f32 each.

        number: chooses the values; 0 to 1000.
        values: `whole` numbers whose sum f32 holds exactly, checked one by one; or `normal`, whose sum's error is
        measured, and an element is wrong whose error is a quarter of the greatest sum.
        """
        world, label = configuration.backend().world, configuration.label
        what = {"size_bytes": size_bytes, "number": number, "calls": calls, "values": values}
        answers = self.runner.tell(world, "turn", configuration.workers, label=label, **what)
        errors = [answer["error"] for answer in answers if answer["error"] is not None]
        return Timing(
            took_s=[max(took) for took in zip(*(answer["took_s"] for answer in answers), strict=True)],
            wrong=sum(answer["wrong"] for answer in answers),
            again=sum(answer["again"] for answer in answers),
            sent_bytes=answers[0]["sent_bytes"],
            error=max(errors) if errors else None,
        )


@contextlib.contextmanager
def start_rack_runner(rack: Rack, deadline_s: float, mpi: str = "") -> Iterator[RackRunner]:
    """Start a rank on every host of `rack`, which stands; the caller has started its aggregators.

    mpi: one of mpi_peers', whose ranks stand beside torch's; "": none. The ranks end with the block. Raises BenchError
    where one fails, or at the deadline; PeerMissingError where the MPI is not installed.
    """
    place = BenchEnvironment(rack.hosts, deadline_s=deadline_s)
    with start_runner(place, ["torch", mpi] if mpi else ["torch"], rack) as runner:
        yield RackRunner(runner)


def set_loss(rack: Rack, loss_ratio: float) -> None:
    """Set the loss of every host's link, both ways.

    The rack must have been lossy from the start: such a link cuts packets first, so a loss takes a single one.
    """
    link = Link(rack.link.rate_bits, loss_ratio)
    for end in rack.link_ends():
        rules = f"delete table netdev loss_{end.device}\n{loss_rules(end.device, link)}"
        run(["ip", "netns", "exec", end.namespace, "nft", "-f", "-"], rules)


def set_congestion_control(rack: Rack, name: str) -> None:
    """Set the congestion control of TCP connections between hosts that are made from now on.

    The route carries it: a namespace's own default can only be one that the machine allows to every user.
    """
    for host in range(rack.hosts):
        replace = ["ip", "-netns", host_namespace(rack.rack_id, host), "route", "replace"]
        direct = [f"{SUBNET}.0/{SUBNET_BITS}", "dev", HOST_INTERFACE, "scope", "link", "src", rack.address(host)]
        run([*replace, *direct, "proto", "kernel", "congctl", name])
