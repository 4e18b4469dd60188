"""Start netfold's aggregator as a process and wait until it listens."""

import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from netfold_lab.rack.command import RackError
from netfold_lab.rack.processes import DRAIN_S, Process, follow, stop

READY_TIMEOUT_S = 20.0
_POLL_S = 0.02
_READY = re.compile(r"netfold switch listening on (?P<address>\S+)")


@dataclass(frozen=True)
class Aggregator:
    """A running aggregator.

    address: host:port, which workers take as NETFOLD_SWITCH.
    """

    process: Process
    address: str


def aggregator_argv(listen: str) -> list[str]:
    # --open: the network is the rack's namespace or loopback, which no other host reaches.
    return [sys.executable, "-m", "netfold.cli", "switch", "--listen", listen, "--open"]


def start_aggregator(
    spawn: Callable[[Sequence[str]], Process],
    argv: Sequence[str],
    on_line: Callable[[str], None],
    timeout_s: float = READY_TIMEOUT_S,
) -> Aggregator:
    """Spawn `argv` and return when it prints the address where it listens.

    on_line: gets every line of its output until it ends.
    Raises RackError, with its output, where it ends or prints no address within `timeout_s`; it is then stopped.
    """
    lines: list[str] = []
    addresses: list[str] = []

    def read_line(line: str) -> None:
        on_line(line)
        if not addresses:
            lines.append(line)
            if match := _READY.search(line):
                addresses.append(match["address"])

    process = spawn(argv)
    try:
        reader = follow(process, read_line)
        deadline = time.monotonic() + timeout_s
        while not addresses and process.poll() is None and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        if addresses:
            return Aggregator(process, addresses[0])
        state = "ended" if process.poll() is not None else f"was silent for {timeout_s:g} s"
    except BaseException:
        stop([process])
        raise
    stop([process])
    reader.join(DRAIN_S)
    output = "\n".join(lines) or "(nothing)"
    raise RackError(f"the aggregator `{' '.join(argv)}` {state} before it listened; it said: {output}")
