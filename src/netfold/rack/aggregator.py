"""Start netfold's aggregator as a process and wait until it listens."""

import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from netfold.rack.command import RackError
from netfold.rack.processes import DRAIN_S, Process, follow, stop

READY_TIMEOUT_S = 20.0
_POLL_S = 0.02
_READY = re.compile(r"netfold switch listening on (?P<address>\S+)")


@dataclass(frozen=True)
class Aggregator:
    """address: host:port, what workers take as NETFOLD_SWITCH."""

    process: Process
    address: str


def aggregator_argv(listen: str) -> list[str]:
    # --open: the wire is a namespace of our own or loopback, where nobody else speaks.
    return [sys.executable, "-m", "netfold.cli", "switch", "--listen", listen, "--open"]


def start_aggregator(
    spawn: Callable[[Sequence[str]], Process],
    argv: Sequence[str],
    on_line: Callable[[str], None],
    timeout_s: float = READY_TIMEOUT_S,
) -> Aggregator:
    """Spawn `argv` and return once it says where it listens; its lines go to `on_line` as long as it lives.

    Raises RackError, with what it said, where it ends or stays silent; it is stopped then.
    """
    lines: list[str] = []
    listening: list[str] = []

    def hear(line: str) -> None:
        on_line(line)
        if not listening:
            lines.append(line)
            if match := _READY.search(line):
                listening.append(match["address"])

    process = spawn(argv)
    try:
        reader = follow(process, hear)
        deadline = time.monotonic() + timeout_s
        while not listening and process.poll() is None and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        if listening:
            return Aggregator(process, listening[0])
        state = "ended" if process.poll() is not None else f"was silent for {timeout_s:g} s"
    except BaseException:
        stop([process])
        raise
    stop([process])
    reader.join(DRAIN_S)
    said = "\n".join(lines) or "(nothing)"
    raise RackError(f"the aggregator `{' '.join(argv)}` {state} before it listened; it said: {said}")
