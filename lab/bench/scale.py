"""The cost of many ranks: start-up, a new group, memory and descriptors a rank, all_reduce, and the job's end:

    .venv/bin/python lab/bench/scale.py                                              # or `make scale`, as root
    .venv/bin/python lab/bench/scale.py --ranks 32,64,128                            # beside gloo
    .venv/bin/python lab/bench/scale.py --ranks 8,16 --hosts 1 --gloo-up-to 0        # netfold on one host: without root

--per-host ranks share an emulated host, whose links are not shaped; --hosts gives the number of hosts instead. Beside
gloo one host is emulated, too: torch's store asks the machine's name server for the name of each address that connects,
one after the other, and an emulated host has no name server to wait for. A
process on each host imports what its ranks need, and forks them. All ranks wait; then each phase begins with an order
that all get at once, and ends with the last rank. Gloo takes turns with netfold at every P up to --gloo-up-to,
--launches times; a larger P is started once. A P that does not come up within --deadline seconds a phase, or for which
memory does not suffice, is a row that says so.
"""

from __future__ import annotations

import gc
import importlib.util
import os
import re
import resource
import selectors
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

import driver
import numpy as np
from driver import Network, Place, Rank, open_network, start_ranks

from netfold import Communicator
from netfold.bootstrap.tcp_store import TcpStore
from netfold_lab.bench.ranks import BenchError
from netfold_lab.bench.spread import interleave, paired_ratios
from netfold_lab.rack import RackError
from netfold_train.runs.machine import spoken

SMALL, LARGE = 4, 1 << 20
LARGE_CALLS = 3
# Whole numbers: their sum over 4096 ranks is exact in f32.
PATTERN = (np.arange(LARGE // 4) % 4093).astype(np.float32)
# The rate of a rack's links until their shaping is removed.
RATE = "10gbit"
# torch warns of every host whose address has no name.
ENVIRONMENT = {"TORCH_CPP_LOG_LEVEL": "ERROR"}
# A phase fails before the machine runs out of memory, which would end processes of others.
LEAST_FREE_BYTES = 512 << 20
# A rank's own error at the deadline says more than a missing answer.
GRACE_S = 10.0
POLL_S = 0.2
PHASES = 10
MB = 1e6
TIMES = (
    "ranks | hosts | side | start-up s: last rank | of it the store | a rank: median, most | "
    "CPU s a rank: median, most | new group s | its CPU s a rank | first all_reduce ms | the new group's | 4 B ms | "
    "1 MB ms | end s | launches"
)
HELD = (
    "ranks | hosts | side | private MB: forked | with its group | after | PSS MB after | shared MB after | "
    "the machine's MB | descriptors: forked | with its group | after | threads"
)

Found = dict[str, Any]


class Member(Protocol):
    """A rank's end of two groups of all ranks."""

    def start(self) -> float:
        """Make the first group. Returns the moment when this rank was connected to the store."""
        ...

    def new_group(self) -> None: ...

    def all_reduce(self, group: int, array: np.ndarray[Any, Any]) -> None: ...

    def why(self, size_bytes: int) -> str:
        """The algorithm of an all_reduce and the reason for it; empty where the backend does not tell."""
        ...

    def close(self) -> None: ...


class Netfold:
    def __init__(self, rank: int, size: int, job: str, deadline_s: float) -> None:
        self._host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        self._connect = partial(TcpStore, self._host, port, job, serve=rank == 0, timeout_s=deadline_s)
        self._place = (rank, size)
        self._deadline_s = deadline_s
        self._groups: list[Communicator] = []

    def start(self) -> float:
        self._store = self._connect()
        connected = time.monotonic()
        self._groups.append(
            Communicator(
                self._store,
                *self._place,
                timeout_s=self._deadline_s,
                join_timeout_s=self._deadline_s,
                store_host=self._host,
            )
        )
        return connected

    def new_group(self) -> None:
        group = self._groups[0].split(0)
        assert group is not None
        self._groups.append(group)

    def all_reduce(self, group: int, array: np.ndarray[Any, Any]) -> None:
        self._groups[group].all_reduce(array)

    def why(self, size_bytes: int) -> str:
        return self._groups[0].group.why("all_reduce", size_bytes)

    def close(self) -> None:
        for group in self._groups:
            group.close()


class Gloo:
    def __init__(self, rank: int, size: int, job: str, deadline_s: float) -> None:
        import torch
        import torch.distributed as dist

        self._dist, self._tensor_of = dist, torch.from_numpy
        self._timeout = timedelta(seconds=deadline_s)
        self._rank, self._size = rank, size
        self._groups: list[Any] = []

    def start(self) -> float:
        store = self._dist.TCPStore(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            self._size,
            self._rank == 0,
            self._timeout,
            wait_for_workers=False,
        )
        connected = time.monotonic()
        self._dist.init_process_group(
            "gloo", store=store, timeout=self._timeout, rank=self._rank, world_size=self._size
        )
        self._groups.append(self._dist.group.WORLD)
        return connected

    def new_group(self) -> None:
        self._groups.append(self._dist.new_group(timeout=self._timeout))

    def all_reduce(self, group: int, array: np.ndarray[Any, Any]) -> None:
        self._dist.all_reduce(self._tensor_of(array), group=self._groups[group])

    def why(self, size_bytes: int) -> str:
        return ""

    def close(self) -> None:
        self._dist.destroy_process_group()


SIDES: dict[str, Callable[[int, int, str, float], Member]] = {"netfold": Netfold, "gloo": Gloo}


def resources() -> dict[str, int]:
    """Bytes of memory, and numbers of descriptors and threads, of this process."""
    lines = [line.split() for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]]
    kilobytes = {name.rstrip(":"): int(number) for name, number, *_ in lines}
    return {
        "private": (kilobytes["Private_Clean"] + kilobytes["Private_Dirty"]) << 10,
        "shared": (kilobytes["Shared_Clean"] + kilobytes["Shared_Dirty"]) << 10,
        "pss": kilobytes["Pss"] << 10,
        "descriptors": len(os.listdir("/proc/self/fd")) - 1,  # without that of the list itself
        "threads": len(os.listdir("/proc/self/task")),
    }


def all_reduces(member: Member, rank: int, size: int, group: int, size_bytes: int, calls: int) -> list[float]:
    """Seconds of each call. Values differ in every element and call, and all are checked outside of the time."""
    pattern = PATTERN[: size_bytes // 4]
    array, seconds = np.empty_like(pattern), []
    for call in range(calls):
        np.add(pattern, (rank + call) % 4, out=array)
        began = time.perf_counter()
        member.all_reduce(group, array)
        seconds.append(time.perf_counter() - began)
        due = pattern * size + sum((each + call) % 4 for each in range(size))
        wrong = np.count_nonzero(array != due)
        assert not wrong, f"an all_reduce of {size_bytes} bytes has {wrong} wrong elements"
    return seconds


def be_forked(side: str, rank: int, size: int, job: str, deadline_s: float, orders: Connection) -> None:
    """A rank: obey orders until the end. Answers are the end's moment, CPU seconds, and a value, or an error."""
    member = SIDES[side](rank, size, job, deadline_s)
    obey: dict[str, Callable[..., Any]] = {
        "resources": resources,
        "start": member.start,
        "new_group": member.new_group,
        "all_reduce": partial(all_reduces, member, rank, size),
        "why": member.why,
    }
    while True:
        name, *arguments = orders.recv()
        try:
            if name == "end":
                return member.close()
            cpu = time.process_time()
            value = obey[name](*arguments)
            orders.send((True, time.monotonic(), time.process_time() - cpu, value))
        except Exception as error:
            orders.send((False, time.monotonic(), f"rank {rank}: {first_sentence(error)}"))


def first_sentence(error: BaseException) -> str:
    # Without the place of the call, which is a path of this machine.
    text = re.sub(r", called at [^,]+", "", str(error).strip().partition("\n")[0]).partition(". ")[0]
    named = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return named if len(named) <= 200 else f"{named[:200]} ..."


class Forked:
    """The ranks of one host, each a process forked from this one."""

    def __init__(
        self, run: Callable[[int, Connection], None], ranks: Iterable[int], stop: Path, limit_s: float
    ) -> None:
        """run: of each rank. stop: a file by which the hosts of a job tell each other that the job has failed."""
        self._stop, self._limit_s = stop, limit_s
        self._selector = selectors.DefaultSelector()
        self._ranks: dict[int, tuple[int, Connection]] = {}  # by rank, its process and its orders
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        # For the orders of the ranks. The ranks get the former limit.
        resource.setrlimit(resource.RLIMIT_NOFILE, (limits[1], limits[1]))
        # A rank's garbage collector would write to each object that it shares with the host, and so copy them all.
        gc.collect()
        gc.freeze()
        for rank in ranks:
            own, of_rank = Pipe()
            pid = os.fork()
            if pid == 0:
                self._be_rank(partial(run, rank), of_rank, limits)
            of_rank.close()
            self._ranks[rank] = pid, own
            self._selector.register(own, selectors.EVENT_READ, rank)

    def _be_rank(self, run: Callable[[Connection], None], orders: Connection, limits: tuple[int, int]) -> None:
        """Never returns: what this process has on its stack is the host's."""
        code = 1
        try:
            signal.alarm(int(self._limit_s))
            # The host's and other ranks' orders. Their objects stay referenced, so none closes a number twice.
            os.closerange(3, orders.fileno())
            os.closerange(orders.fileno() + 1, limits[1])
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
            run(orders)
            code = 0
        except EOFError:
            pass  # the host has ended
        finally:
            os._exit(code)

    def ask(self, deadline_s: float, name: str, *arguments: Any) -> Found:
        """Give all ranks an order; returns their answers, or a failure, after which no rank is left."""
        deadline = time.monotonic() + deadline_s + GRACE_S
        missing = dict(self._ranks)
        answers: dict[int, tuple[float, float, Any]] = {}
        try:
            for _, orders in self._ranks.values():
                orders.send((name, *arguments))
            while missing:
                for key, _ in self._selector.select(POLL_S):
                    rank = key.data
                    answers[rank] = self._receive(rank, ends=name == "end")
                    del missing[rank]
                if self._stop.exists():
                    raise BenchError("another host's rank failed")
                if free_bytes() < LEAST_FREE_BYTES:
                    raise BenchError(f"less than {LEAST_FREE_BYTES / MB:.0f} MB of the machine's memory were free")
                if time.monotonic() > deadline:
                    raise BenchError(f"{len(missing)} ranks had not answered after {deadline_s:g} s")
        except (BenchError, OSError) as error:
            # Another host's failure explains nothing.
            at, reason = time.monotonic() + (1e9 if self._stop.exists() else 0), str(error)
            self._stop.touch()
            self.end()
            return {"failed": (at, reason)}
        return {"answers": answers}

    def _receive(self, rank: int, *, ends: bool) -> tuple[float, float, Any]:
        pid, orders = self._ranks[rank]
        try:
            well, *answer = orders.recv()
        except (EOFError, ConnectionResetError):
            self._selector.unregister(orders)
            del self._ranks[rank]
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            if ends and code == 0:
                return time.monotonic(), 0.0, None
            how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
            raise BenchError(f"rank {rank} ended {how}") from None
        if not well:
            raise BenchError(answer[1])
        return answer[0], answer[1], answer[2]

    def end(self) -> None:
        """Kill the ranks that are left, and wait for their ends."""
        for pid, _ in self._ranks.values():
            os.kill(pid, signal.SIGKILL)
        for pid, orders in self._ranks.values():
            os.waitpid(pid, 0)
            self._selector.unregister(orders)
            orders.close()
        self._ranks.clear()


def serve(me: Rank, side: str, size: int, deadline_s: float) -> None:
    """A host: fork the host's ranks, and pass orders to them."""
    if side == "gloo":
        import torch
        import torch.distributed

        torch.set_num_threads(1)
    ranks = range(me.rank * size // me.size, (me.rank + 1) * size // me.size)

    def run(rank: int, orders: Connection) -> None:
        be_forked(side, rank, size, me.folder.name, deadline_s, orders)

    forked = Forked(run, ranks, me.folder / "stop", PHASES * (deadline_s + GRACE_S))
    try:
        me.serve(partial(forked.ask, deadline_s))
    finally:
        forked.end()


def free_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    raise OSError("/proc/meminfo does not say how much memory is available")


def launch(network: Network, side: str, size: int, calls: int, deadline_s: float) -> Found:
    """Start `size` ranks once, and measure every phase."""
    limit_s = PHASES * (deadline_s + GRACE_S)
    with start_ranks(network, serve, side, size, deadline_s, deadline_s=limit_s, environment=ENVIRONMENT) as hosts:

        def ask(*order: Any) -> Found:
            began = time.monotonic()
            by_host = hosts.ask(*order)
            failures = [of["failed"] for of in by_host if "failed" in of]
            if failures:
                raise BenchError(f"{order[0]}: {min(failures)[1]}")
            by_rank = dict(sorted(pair for of in by_host for pair in of["answers"].items()))
            ends, cpu, values = zip(*by_rank.values(), strict=True)
            took = [end - began for end in ends]
            return {"began": began, "took": took, "s": max(took), "cpu": cpu, "values": values}

        def call_s(*order: int) -> float:
            return statistics.median(driver.slowest(ask("all_reduce", *order)["values"]))

        held = {"forked": ask("resources")["values"]}
        free = free_bytes()
        start = ask("start")
        taken = (free - free_bytes()) / size
        held["started"] = ask("resources")["values"]
        found = {
            "start_s": start["s"],
            "store_s": max(start["values"]) - start["began"],
            "after_store_s": start["s"] + start["began"] - max(start["values"]),
            "start_of_ranks_s": median_and_most(start["took"]),
            "start_cpu_s": median_and_most(start["cpu"]),
            "why": {size_bytes: ask("why", size_bytes)["values"][0] for size_bytes in (SMALL, LARGE)},
            "first_s": call_s(0, SMALL, 1),
            "small_s": call_s(0, SMALL, calls),
            "large_s": call_s(0, LARGE, LARGE_CALLS),
        }
        held["after"] = ask("resources")["values"]
        again = ask("new_group")
        found["new_group_s"] = again["s"]
        found["new_group_cpu_s"] = median_and_most(again["cpu"])
        found["new_first_s"] = call_s(1, SMALL, 1)
        found["end_s"] = ask("end")["s"]
    of_rank = {
        what: {when: median_and_most([of[what] for of in values]) for when, values in held.items()}
        for what in held["forked"][0]
    }
    return {**found, "machine_bytes_a_rank": taken, "of_rank": of_rank}


def median_and_most(values: Sequence[float]) -> list[float]:
    return [statistics.median(values), max(values)]


def measure(place: Place, sides: Sequence[str], size: int, launches: int, calls: int, deadline_s: float) -> Found:
    """By side, what each launch found, or why there is none; a side that failed once is not started again."""
    found: Found = {side: [] for side in sides}
    try:
        with open_network(place) as network:
            if network.rack is not None:
                network.remove_shaping()
            for _, side in interleave(sides, range(launches)):
                if any("failed" in of for of in found[side]):
                    continue
                try:
                    of_launch = launch(network, side, size, calls, deadline_s)
                except BenchError as error:
                    of_launch = {"failed": first_sentence(error).removeprefix("BenchError: ")}
                print(f"{size} ranks, {side}: {of_launch}", file=sys.stderr)
                found[side].append(of_launch)
    except RackError as error:
        for side in sides:
            found[side].append({"failed": first_sentence(error).removeprefix("RackError: ")})
    return found


def scale(
    ranks: str = "128,256,512,1024",
    per_host: int = 64,
    hosts: int = 0,
    gloo_up_to: int = 128,
    launches: int = 3,
    calls: int = 20,
    deadline: float = 300.0,
    data: Path | None = None,
) -> str:
    """Many ranks."""
    found: dict[int, Found] = {}
    for size in map(int, ranks.split(",")):
        load = os.getloadavg()[0]
        beside = size <= gloo_up_to and importlib.util.find_spec("torch") is not None
        number = hosts or -(-size // per_host)
        place = Place(number, rate=RATE if number > 1 or beside else "", hosts=number)
        sides = ("netfold", "gloo") if beside else ("netfold",)
        of_sides = measure(place, sides, size, launches if beside else 1, calls, deadline)
        found[size] = {"hosts": number, "machine": spoken(load), "sides": of_sides}
        driver.keep(data or driver.RESULTS / "scale.json", {str(size): found[size]})
    return page(found, calls)


def page(found: Mapping[int, Found], calls: int) -> str:
    times, held, ratios, failures, algorithms = [], [], [], [], []
    for size, of_size in found.items():
        well: dict[str, list[Found]] = {}
        for side, launches in of_size["sides"].items():
            place = [size, of_size["hosts"], side]
            reasons = [of["failed"].replace("|", "/") for of in launches if "failed" in of]
            well[side] = [of for of in launches if "failed" not in of]
            algorithms += [[size, *map(algorithm, of["why"].values())] for of in well[side] if side == "netfold"]
            if well[side]:
                times.append([*place, *time_cells(well[side])])
                held.append([*place, *held_cells(well[side])])
                failures += [f"{size} ranks, {side}, of {len(launches)} launches: {reason}" for reason in reasons]
            else:
                times.append([*place, f"failed: {reasons[0]}", *["-"] * (len(TIMES.split(" | ")) - 4)])
        if len(well) == 2 and all(well.values()):
            ratios.append([size, *(ratio_cell(well, name) for name in ("start_s", "after_store_s", "new_group_s"))])
    parts = [
        f"""Start-up: from the order that all waiting ranks get, until the last one has its group; a rank's own time
begins with the same order. The store: until the last rank is connected to rank 0's store, whose server starts with
the same order. A new group: of all ranks, while the first lives
(netfold: `split`; gloo: `new_group`). An all_reduce's time is the
slowest rank's: the first one in a group; the median of {calls} of {SMALL} B and of {LARGE_CALLS} of 1 MB of f32, every
element checked. The end: from the order to close until the last process has ended. Of several launches: their median,
5% .. 95%. Every host is emulated, so that torch's store has no name server to ask for the names of the addresses that
connect: on a machine whose name server did not answer some of them, 64 ranks waited 10 s for it.""",
        driver.table(
            TIMES,
            times,
        ),
    ]
    if algorithms:
        parts += [
            "The algorithm of netfold's all_reduce in each launch, which follows from the links measured at start:",
            driver.table("ranks | 4 B | 1 MB", algorithms),
        ]
    if failures:
        parts.append("Launches that failed:\n\n" + "\n".join(f"- {each}" for each in failures))
    if held:
        parts += [
            """Memory, descriptors and threads of a rank, the median of ranks and the most: when it has been forked,
with its group, and after the collectives. A rank is forked from a process that has imported netfold or torch: it shares
the memory of what was imported. The machine's memory: what became unavailable during start-up, by rank, the kernel's
socket buffers included.""",
            driver.table(
                HELD,
                held,
            ),
        ]
    if ratios:
        parts += [
            "netfold's seconds over gloo's, launch by launch; below 1 netfold is faster:",
            driver.table("ranks | start-up | start-up after the store | new group", ratios),
        ]
    return "\n\n".join(parts)


def algorithm(why: str) -> str:
    """Of what `Group.why` says: the name, and that of the algorithm between hosts."""
    name, _, rest = why.partition(" (")
    return f"{name}, {rest.partition(';')[0]}" if rest.partition(";")[0].endswith("between hosts") else name


def time_cells(launches: Sequence[Found]) -> list[object]:
    def of(name: str, form: str = ".2f", factor: float = 1.0) -> str:
        return several([each[name] for each in launches], form, factor)

    def of_ranks(name: str) -> str:
        return two([each[name] for each in launches], ".2f")

    times = [
        of("start_s"),
        of("store_s"),
        of_ranks("start_of_ranks_s"),
        of_ranks("start_cpu_s"),
        of("new_group_s"),
        of_ranks("new_group_cpu_s"),
    ]
    calls = [of(name, ".1f", 1e3) for name in ("first_s", "new_first_s", "small_s", "large_s")]
    return [*times, *calls, of("end_s"), len(launches)]


def held_cells(launches: Sequence[Found]) -> list[object]:
    def of(what: str, when: str, form: str = ".1f", factor: float = 1 / MB) -> str:
        return two([each["of_rank"][what][when] for each in launches], form, factor)

    moments = ("forked", "started", "after")
    memory = [*(of("private", when) for when in moments), of("pss", "after"), of("shared", "after")]
    machine = several([each["machine_bytes_a_rank"] for each in launches], ".1f", 1 / MB)
    counts = [of("descriptors", when, ".0f", 1.0) for when in moments]
    return [*memory, machine, *counts, of("threads", "after", ".0f", 1.0)]


def several(values: Sequence[float], form: str, factor: float) -> str:
    """The median of launches with its spread; of one launch, its value."""
    return driver.cell(values, form, factor) if len(values) > 1 else f"{values[0] * factor:{form}}"


def two(pairs: Sequence[Sequence[float]], form: str, factor: float = 1.0) -> str:
    """Medians of ranks and their maxima, by launch: the median and the most of launches."""
    medians, most = zip(*pairs, strict=True)
    return f"{statistics.median(medians) * factor:{form}}, {max(most) * factor:{form}}"


def ratio_cell(well: Mapping[str, Sequence[Found]], name: str) -> str:
    pairs = min(map(len, well.values()))
    netfold, gloo = ([each[name] for each in well[side][:pairs]] for side in ("netfold", "gloo"))
    return several(paired_ratios(netfold, gloo), ".2f", 1.0)


if __name__ == "__main__":
    driver.run(scale)
