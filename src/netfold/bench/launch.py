"""Start a benchmark's workers, on loopback or in a rack, and bring their result home."""

import contextlib
import json
import os
import socket
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from netfold.bench.config import Config, Result
from netfold.rack import Rack
from netfold.rack.aggregator import aggregator_argv, start_aggregator
from netfold.rack.processes import DRAIN_S, Process, follow, spawn, stop, supervise, uninterrupted

# Of each process: enough for a traceback and what led to it.
KEPT_LINES = 60

Lines = deque[str]


class BenchError(RuntimeError):
    """The workers did not come to a result; the message holds what the first to fail said."""


def measure(config: Config) -> Result:
    """Run the workers to their end. Raises BenchError, or RackError where the rack or the switch cannot be."""
    with tempfile.TemporaryDirectory(prefix="netfold-bench-") as folder:
        config_path, result_path = Path(folder, "config.json"), Path(folder, "result.json")
        config_path.write_text(json.dumps(config.to_json()))
        argv = [sys.executable, "-m", "netfold.bench.worker", str(config_path), str(result_path)]
        switch_lines: Lines = deque(maxlen=KEPT_LINES)
        start = _in_rack if config.rack_rate is not None else _on_loopback
        with start(config, argv, switch_lines.append) as processes:
            _wait(processes, config.deadline_s, switch_lines)
        return Result.from_json(json.loads(result_path.read_text()))


@contextlib.contextmanager
def _in_rack(config: Config, argv: Sequence[str], on_switch_line: Callable[[str], None]) -> Iterator[list[Process]]:
    assert config.rack_rate is not None
    with Rack(config.workers, config.rack_rate, config.rack_loss) as rack:
        if "netfold" in config.backends:
            rack.start_switch(on_switch_line)
        yield [rack.popen(host, argv) for host in range(config.workers)]


@contextlib.contextmanager
def _on_loopback(config: Config, argv: Sequence[str], on_switch_line: Callable[[str], None]) -> Iterator[list[Process]]:
    processes: list[Process] = []
    environment = {
        **os.environ,
        "WORLD_SIZE": str(config.workers),
        "LOCAL_WORLD_SIZE": str(config.workers),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }

    def start(command: Sequence[str]) -> Process:
        processes.append(spawn(command, environment))
        return processes[-1]

    try:
        if "netfold" in config.backends and "NETFOLD_SWITCH" not in os.environ:
            aggregator = start_aggregator(start, aggregator_argv("127.0.0.1:0"), on_switch_line)
            environment["NETFOLD_SWITCH"] = aggregator.address
        workers = []
        for rank in range(config.workers):
            environment |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            workers.append(start(argv))
        yield workers
    finally:
        with uninterrupted():
            stop(processes)


def _wait(processes: Sequence[Process], deadline_s: int, switch_lines: Lines) -> None:
    outputs: list[Lines] = [deque(maxlen=KEPT_LINES) for _ in processes]
    readers = [follow(process, lines.append) for process, lines in zip(processes, outputs, strict=True)]
    outcome = supervise(processes, deadline_s)
    if outcome.exit_code == 0:
        return
    for reader in readers:
        reader.join(DRAIN_S)
    if outcome.first_failed is not None:
        rank = outcome.first_failed
        what = f"rank {rank} failed with exit code {outcome.exit_code}"
        said = [f"rank {rank}| {line}" for line in outputs[rank]]
    else:
        what = f"the workers had not ended after {deadline_s} s; fewer sizes (-e), rounds (-n) or more --timeout"
        said = [f"rank {rank}| {line}" for rank, lines in enumerate(outputs) for line in lines]
    said += [f"switch| {line}" for line in switch_lines]
    raise BenchError("\n".join([what, *said]))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
