"""Run one command on every host of a rack; stream the output with the host's name in front of each line."""

import threading
from collections.abc import Callable, Sequence

from netfold_lab.rack.processes import DRAIN_S, follow, supervise
from netfold_lab.rack.rack import Rack


def run_on_every_host(
    rack: Rack, argv: Sequence[str], write: Callable[[str], None], *, switch: bool, leaves: bool = False
) -> int:
    """Run `argv` on every host; return the first exit code that is not 0.

    switch: start an aggregator first.
    leaves: also start one below it in each rack.
    """
    lock = threading.Lock()

    def writer(source: str) -> Callable[[str], None]:
        def write_line(line: str) -> None:
            with lock:
                write(f"{source}| {line}")

        return write_line

    aggregators = [rack.start_switch(writer("switch"))] if switch else []
    if leaves:
        aggregators += rack.start_leaves(writer("leaf"))
    processes = [rack.popen(host, argv) for host in range(rack.hosts)]
    readers = [follow(process, writer(f"h{host}")) for host, process in enumerate(processes)]
    outcome = supervise(processes)
    for reader in readers:
        reader.join(DRAIN_S)
    if outcome.first_failed is not None:
        write(f"rack: host h{outcome.first_failed} failed first, with exit code {outcome.exit_code}")
    for aggregator in aggregators:
        if aggregator.poll() is not None:
            write(f"rack: an aggregator ended before its workers, with exit code {aggregator.returncode}")
    return outcome.exit_code
