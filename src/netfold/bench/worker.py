"""One rank of a benchmark: `python -m netfold.bench.worker CONFIG.json RESULT.json`.

The default group is gloo's and only keeps the ranks in step and gathers their times; every backend under
test has a group of its own beside it, so that each meets the same conditions.
"""

import itertools
import json
import signal
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from netfold.bench.config import Config, Measured, Result, SizeResult, calls_a_round
from netfold.bench.pattern import contribution, expected_sum, modulus
from netfold.bench.sizes import parse_dtype
from netfold.rack.names import HOST_INTERFACE

# Wire bytes are counted in rounds of their own, outside the timed ones: reading counters takes longer than
# a small message, and the last acknowledgements need a moment to arrive. A veth counts a GSO packet's headers
# once, so the true bytes are up to 5% more, for TCP and UDP alike; with loss asked for they are exact, because
# packets are then cut before the veth.
WIRE_ROUNDS = 3
WIRE_SETTLE_S = 0.05


def main(config_path: str, result_path: str) -> None:
    config = Config(**json.loads(Path(config_path).read_text()))
    # The launcher stops us at the deadline; should it be gone, the kernel does.
    signal.alarm(config.deadline_s)
    dist.init_process_group("gloo")
    groups = [dist.new_group(backend=backend) for backend in config.backends]
    sizes = [measure_size(config, groups, size_bytes) for size_bytes in config.sizes]
    if dist.get_rank() == 0:
        control = Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip()
        result = Result(torch.__version__, control, sizes)
        Path(result_path).write_text(json.dumps(result.to_json()))
    dist.barrier()
    dist.destroy_process_group()


def measure_size(config: Config, groups: list[Any], size_bytes: int) -> SizeResult:
    """All rounds of one size; every rank gets the whole result."""
    trial = Trial(config, size_bytes)
    breakdown = config.breakdown and trial.calls > 1
    times_ns: list[list[int]] = [[] for _ in groups]
    call_ns: list[list[int]] = [[] for _ in groups]
    parts_ns: list[list[list[int]]] = [[] for _ in groups]
    wrong = [0 for _ in groups]
    # On loopback the counters are every rank's at once.
    interface = HOST_INTERFACE if config.rack_rate else None
    for round_index in range(config.warmups + config.rounds):
        # Each backend is first as often as any other: the first one meets colder caches.
        for turn in range(len(groups)):
            index = (round_index + turn) % len(groups)
            durations_ns = trial.run(groups[index], round_index)
            wrong[index] += trial.wrong_elements(round_index)
            if round_index < config.warmups:
                continue
            times_ns[index].append(sum(durations_ns) // len(durations_ns))
            if breakdown:
                call_ns[index] += durations_ns
                if config.backends[index] == "netfold":
                    parts_ns[index] += split_calls(groups[index], durations_ns, size_bytes)
    measured = []
    for index, group in enumerate(groups):
        wire = trial.wire_bytes(group, interface) if interface else None
        ranks = gather((times_ns[index], wrong[index], wire, call_ns[index], parts_ns[index]))
        measured.append(
            Measured(
                times_ns=[max(round_ns) for round_ns in zip(*(rank[0] for rank in ranks), strict=True)],
                wrong=sum(rank[1] for rank in ranks),
                wire_bytes=[rank[2] for rank in ranks] if interface else None,
                call_ns=[call for rank in ranks for call in rank[3]] or None,
                parts_ns=[call for rank in ranks for call in rank[4]] or None,
            )
        )
    return SizeResult(size_bytes, trial.count, measured)


class Trial:
    """The buffers of one size. A round fills them, calls all_reduce once for each, and checks them."""

    def __init__(self, config: Config, size_bytes: int) -> None:
        dtype = parse_dtype(config.dtype)
        self.dtype = getattr(torch, dtype.torch_name)
        self.count = size_bytes // dtype.item_bytes
        self.calls = calls_a_round(size_bytes)
        self.period = modulus(dtype.exact_below, config.workers)
        self.workers = config.workers
        self.buffers = [torch.empty(self.count, dtype=self.dtype) for _ in range(self.calls)]

    def run(self, group: Any, round_index: int) -> list[int]:
        """Nanoseconds of each call, one after the other, from a common start."""
        self.fill(round_index)
        dist.barrier()
        stamps = [time.perf_counter_ns()]
        for buffer in self.buffers:
            dist.all_reduce(buffer, group=group)
            stamps.append(time.perf_counter_ns())
        return [after - before for before, after in itertools.pairwise(stamps)]

    def fill(self, round_index: int) -> None:
        row = torch.from_numpy(contribution(dist.get_rank(), round_index, self.period)).to(self.dtype)
        for buffer in self.buffers:
            body, tail = self.periods(buffer)
            body.copy_(row)
            tail.copy_(row[: len(tail)])

    def wrong_elements(self, round_index: int) -> int:
        row = torch.from_numpy(expected_sum(self.workers, round_index, self.period)).to(self.dtype)
        wrong = 0
        for buffer in self.buffers:
            body, tail = self.periods(buffer)
            wrong += int((body != row).sum()) + int((tail != row[: len(tail)]).sum())
        return wrong

    def periods(self, buffer: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The buffer as whole rows of one period, and what is left of it."""
        whole = self.count - self.count % self.period
        return buffer[:whole].view(-1, self.period), buffer[whole:]

    def wire_bytes(self, group: Any, interface: str) -> list[int]:
        """[sent, received] by one call on this rank, as the interface counts: medians of a few rounds."""
        rounds = []
        for round_index in range(WIRE_ROUNDS):
            self.fill(round_index)
            dist.barrier()
            time.sleep(WIRE_SETTLE_S)
            before = interface_bytes(interface)
            # Nobody starts before everyone has read.
            time.sleep(WIRE_SETTLE_S)
            for buffer in self.buffers:
                dist.all_reduce(buffer, group=group)
            time.sleep(WIRE_SETTLE_S)
            after = interface_bytes(interface)
            rounds.append([(b - a) // self.calls for a, b in zip(before, after, strict=True)])
        return [int(statistics.median(column)) for column in zip(*rounds, strict=True)]


def interface_bytes(interface: str) -> list[int]:
    folder = Path("/sys/class/net") / interface / "statistics"
    return [int((folder / name).read_text()) for name in ("tx_bytes", "rx_bytes")]


def split_calls(group: Any, durations_ns: list[int], size_bytes: int) -> list[list[int]]:
    """[Python, queue, wire] nanoseconds of the group's latest calls, from the backend's own event records."""
    import netfold.torch

    records = netfold.torch.events(group)[-len(durations_ns) :]
    if len(records) != len(durations_ns) or any(int(record["bytes"]) != size_bytes for record in records):
        raise RuntimeError(
            f"the last {len(durations_ns)} calls had {size_bytes} bytes each, but netfold's latest event records "
            f"say {[int(record['bytes']) for record in records]}"
        )
    parts = []
    for duration_ns, record in zip(durations_ns, records, strict=True):
        queue_ns = int(record["started_ns"]) - int(record["queued_ns"])
        wire_ns = int(record["finished_ns"]) - int(record["started_ns"])
        parts.append([duration_ns - queue_ns - wire_ns, queue_ns, wire_ns])
    return parts


def gather(value: Any) -> list[Any]:
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, value)
    return gathered


if __name__ == "__main__":
    main(*sys.argv[1:])
