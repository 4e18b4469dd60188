"""The rack, switches and ranks of one schedule: `run` runs the schedule and returns its record."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import struct
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import faults
import job
from places import Place, Process
from schedule import Schedule
from verdict import Failure, RankRecord, Record, Step, Usage

from netfold_lab.rack import Rack, names
from netfold_lab.rack.processes import Process as Popen

CONTROL_PORT, MASTER_PORT = 7171, 29500
TOKEN = "c" * 40
PARENT_TOKEN = "p" * 40
RATE, DELAY = "1gbit", "50us"
# Of a quiet machine, in seconds.
START_S = 30.0
WARM_STEPS = 5
# After the last fault: the longest time until the group tries to return to its switches.
SETTLE_S = 5.0
END_S = 30.0
_POLL_S = 0.02
# The largest factor: the bounds on time stay finite on an overloaded machine.
SLOWDOWN_MOST = 4.0


class StartError(RuntimeError):
    """The job under test did not come up; nothing was tried."""


class HostileError(RuntimeError):
    """The sender of hostile packets failed itself, so its attack was not tried."""


def run(schedule: Schedule, folder: Path, *, run_rank: Callable[[str, str], None] = job.run_rank) -> Record:
    """Build the schedule's arena, inject its faults, and end the job. run_rank: the function of a rank.

    Raises StartError, with what the processes said.
    """
    with Arena(schedule, folder, run_rank) as arena:
        arena.start()
        return arena.play()


class Arena:
    """Hosts of the rack: those of the ranks, one a switch, and one of a hostile process."""

    def __init__(self, schedule: Schedule, folder: Path, run_rank: Callable[[str, str], None]) -> None:
        self.schedule, self._folder, self._run_rank = schedule, folder, run_rank
        shape = schedule.shape
        self._first_switch = shape.host_count
        self.hostile_host = shape.host_count + len(shape.parents)
        self.rack = Rack(self.hostile_host + 1, RATE, delay=DELAY)
        self._stack = contextlib.ExitStack()
        self._switches: list[Process] = []
        self._ranks: list[Process] = []
        self._places: dict[int, Place] = {}
        self._zero_s = 0.0
        self._let_in = 0
        self._ended_alone: list[str] = []

    def __enter__(self) -> Arena:
        self._stack.enter_context(self.rack)
        self._stack.callback(self._end_all)
        return self

    def __exit__(self, *about: object) -> None:
        self._stack.close()

    # Queries of faults.

    def number(self, place: tuple[str, int]) -> int:
        """The rack's host that a place is."""
        kind, index = place
        if kind == "switch":
            return self._first_switch + index
        return self.schedule.shape.hosts[index] if kind == "rank" else index

    def namespace(self, place: tuple[str, int]) -> str:
        return names.host_namespace(self.rack.rack_id, self.number(place))

    def address(self, place: tuple[str, int]) -> str:
        return self.rack.address(self.number(place))

    def process(self, place: tuple[str, int]) -> Process:
        """Of a switch or rank; of a host, its first rank."""
        kind, index = place
        if kind == "switch":
            return self._switches[index]
        return self._ranks[index if kind == "rank" else self.schedule.shape.hosts.index(index)]

    def ports(self, place: tuple[str, int], protocol: str) -> list[int]:
        """The address where it takes packets, or listens."""
        return sorted({mine for mine, _, _, listens in self._sockets(place, protocol) if listens or protocol == "udp"})

    def flows(self, place: tuple[str, int]) -> list[str]:
        """Packets that it might have sent, as hostile.py's PAIR: to every other place, over UDP and TCP."""
        kind = "host" if place[0] == "switch" else "switch"
        count = self._first_switch if kind == "host" else len(self._switches)
        pairs = [
            f"udp:{mine}:{self.address((kind, index))}:{theirs}"
            for index in range(count)
            for theirs in self.ports((kind, index), "udp")
            for mine in self.ports(place, "udp")
        ]
        for mine, peer, theirs, listens in self._sockets(place, "tcp"):
            if not listens:
                pairs.append(f"tcp:{mine}:{peer}:{theirs}")
        return pairs[:60]

    def _sockets(self, place: tuple[str, int], protocol: str) -> list[tuple[int, str, int, bool]]:
        found = []
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{self.process(place).pid}/net/{protocol}").read_text().splitlines()[1:]:
                words = line.split()
                (_, mine), (peer, theirs) = (word.split(":") for word in words[1:3])
                peer_address = ".".join(map(str, struct.pack("<I", int(peer, 16))))
                found.append((int(mine, 16), peer_address, int(theirs, 16), words[3] == "0A"))
        return found

    def start_switch(self, index: int) -> None:
        """Start a switch, again where one has ended; it listens soon."""
        shape, authenticated = self.schedule.shape, self.schedule.authenticated
        args = ["switch", "--listen", f"{self.address(('switch', index))}:{CONTROL_PORT}", "--drain", "0s"]
        if authenticated:
            tokens, state = self._folder / "tokens", self._folder / f"state{index}"
            state.mkdir(exist_ok=True)
            args += ["--token-file", str(tokens), "--state-dir", str(state)]
        else:
            args.append("--open")
        parent = shape.parents[index]
        if parent is not None:
            args += ["--parent", self._endpoint(parent)]
            args += ["--parent-token-file", str(self._folder / "parent-token")] if authenticated else []
        place = self._place(self._first_switch + index)
        switch = place.fork(f"switch{index}", _run_command, args, env=_environment())
        if index < len(self._switches):
            self._switches[index] = switch
        else:
            self._switches.append(switch)

    def end_switch(self, index: int) -> None:
        self._kill(self._switches[index])

    def end_hostile(self, process: Popen) -> None:
        """Take what a hostile process printed; it may still run."""
        process.terminate()
        said, _ = process.communicate()
        for line in said.splitlines():
            if line.startswith("let in "):
                self._let_in += int(line.split()[2])
            elif "Traceback" in line:
                raise HostileError(f"a hostile process failed: {said}")

    # The course of a run.

    def start(self) -> None:
        for name, token in (
            ("tokens", f"job {TOKEN}\nleaf {PARENT_TOKEN}"),
            ("token", TOKEN),
            ("parent-token", PARENT_TOKEN),
        ):
            path = self._folder / name
            path.write_text(f"{token}\n")
            path.chmod(0o600)
        for index in range(len(self.schedule.shape.parents)):
            self.start_switch(index)
            self._wait(lambda: "listening on" in self._switches[-1].log(), "a switch listens", self._switches)
        for rank in range(self.schedule.shape.ranks):
            self._start_rank(rank)
        self._wait(
            lambda: all(len(log.steps) > WARM_STEPS for log in self._read()), "every rank has taken steps", self._all()
        )

    def _start_rank(self, rank: int) -> None:
        shape = self.schedule.shape
        host = shape.hosts[rank]
        environment = _environment() | {
            "RANK": str(rank),
            "LOCAL_RANK": str(shape.hosts[:rank].count(host)),
            "WORLD_SIZE": str(shape.ranks),
            "LOCAL_WORLD_SIZE": str(shape.hosts.count(host)),
            "MASTER_ADDR": self.rack.address(0),
            "MASTER_PORT": str(MASTER_PORT),
            "NETFOLD_SWITCH": ",".join(self._endpoint(switch) for switch in shape.named[rank]),
            "NETFOLD_ALGORITHM": "all_reduce=in_network",
            "NETFOLD_REJOIN_S": "1",
        }
        if self.schedule.authenticated:
            environment["NETFOLD_TOKEN_FILE"] = str(self._folder / "token")
        place = self._place(host)
        self._ranks.append(
            place.fork(
                f"rank{rank}", self._run_rank, str(self._folder), str(self._folder / f"steps{rank}"), env=environment
            )
        )

    def _endpoint(self, switch: int) -> str:
        endpoint = f"{self.address(('switch', switch))}:{CONTROL_PORT}"
        if not self.schedule.authenticated:
            return endpoint
        said = self._switches[switch].log()
        return endpoint + "#" + said.split(f"listening on {endpoint}#", 1)[1].split()[0]

    def play(self) -> Record:
        schedule = self.schedule
        before = self._usage()
        slowdown = _slowdown()
        self._zero_s = time.monotonic()
        applied: list[list[float]] = [[0.0, 0.0] for _ in schedule.faults]
        undo: dict[int, Callable[[], None]] = {}
        events = [(fault.at_s, index, True) for index, fault in enumerate(schedule.faults)]
        events += [(fault.end_s, index, False) for index, fault in enumerate(schedule.faults)]
        for at_s, index, begins in sorted(events):
            self._sleep_until(at_s)
            if begins:
                applied[index][0] = self._now()
                undo[index] = faults.begin(self, schedule.faults[index])
            else:
                undo.pop(index)()
                applied[index][1] = self._now()
        self._sleep_until(schedule.seconds)
        slowdown = max(slowdown, _slowdown())
        self._sleep_until(schedule.seconds + SETTLE_S)
        after = self._usage()
        self._note_ended()
        killed_s = None
        if schedule.dies is not None:
            killed_s = self._now()
            self._kill(self._ranks[schedule.dies])
        (self._folder / "stop").touch()
        self._await_end(END_S * slowdown)
        slowdown = max(slowdown, _slowdown())
        return Record(
            ranks=self._read(),
            slowdown=slowdown,
            applied=[(began, ended) for began, ended in applied],
            usage=[Usage(name, (a[0], b[0]), (a[1], b[1])) for name, a, b in _pairs(before, after)],
            killed_s=killed_s,
            ended_alone=self._ended_alone,
            admitted=self._let_in if schedule.authenticated else 0,
            log_errors=self._log_errors(),
            fallbacks=self._said("No step is lost"),
            returns=self._said("has the group again, from"),
        )

    def _await_end(self, most_s: float) -> None:
        until = time.monotonic() + most_s
        for process in self._ranks:
            process.join(max(0.0, until - time.monotonic()))

    def _note_ended(self) -> None:
        for process in self._all():
            if process.poll() is not None and not process.ended_on_purpose:
                self._ended_alone.append(f"{process.name} (exit code {process.poll()})")

    def _now(self) -> float:
        return time.monotonic() - self._zero_s

    def _sleep_until(self, at_s: float) -> None:
        time.sleep(max(0.0, at_s - self._now()))

    def _usage(self) -> dict[tuple[str, int], tuple[int, int]]:
        found = {}
        for process in self._all():
            with contextlib.suppress(OSError, ProcessLookupError):
                found[process.name, process.pid] = process.usage()
        return found

    def _read(self) -> list[RankRecord]:
        return [read_record(self._folder / f"steps{rank}", self._zero_s) for rank in range(self.schedule.shape.ranks)]

    def _said(self, words: str) -> int:
        return sum(process.log().count(words) for process in self._ranks)

    def _log_errors(self) -> list[str]:
        found = []
        for name in [
            *(f"switch{i}" for i in range(len(self._switches))),
            *(f"rank{i}" for i in range(len(self._ranks))),
        ]:
            lines = (self._folder / f"{name}.log").read_text(errors="replace").splitlines()
            for number, line in enumerate(lines):
                # A rank prints a traceback of the error that ends it; a daemon must print none.
                if ("Traceback" in line and not _tells_why_it_ends(lines, number)) or "never retrieved" in line:
                    found.append(
                        f"{name}: {lines[number - 1][:100] if number else ''} | {_last_of(lines, number)[:300]}"
                    )
        return found

    def _wait(self, is_done: Callable[[], bool], what: str, processes: list[Process]) -> None:
        until = time.monotonic() + START_S * _slowdown()
        while not is_done():
            ended = [process for process in processes if process.poll() is not None]
            if ended or time.monotonic() > until:
                said = "\n".join(f"--- {process.name}\n{process.log()[-3000:]}" for process in ended or processes)
                raise StartError(f"the job did not start: not true that {what}\n{said}")
            time.sleep(_POLL_S)

    def _place(self, host: int) -> Place:
        if host not in self._places:
            self._places[host] = Place(names.host_namespace(self.rack.rack_id, host), self._folder, f"host{host}")
        return self._places[host]

    def _all(self) -> list[Process]:
        return [*self._switches, *self._ranks]

    def _kill(self, process: Process) -> None:
        process.ended_on_purpose = True
        process.signal(signal.SIGKILL)
        process.join(10)

    def _end_all(self) -> None:
        for process in self._all():
            process.signal(signal.SIGCONT)
            self._kill(process)


def read_record(path: Path, zero_s: float) -> RankRecord:
    """The lines that a rank wrote (job.py), with times since `zero_s`."""
    record = RankRecord()
    for line in path.read_text().splitlines() if path.exists() else []:
        kind, _, rest = line.partition(" ")
        if kind == "step":
            number, began, ended, wrong = rest.split()
            record.steps.append(Step(int(number), float(began) - zero_s, float(ended) - zero_s, int(wrong)))
        elif kind == "error":
            said, rest = rest.split(" ", 1)
            name, end = json.JSONDecoder().raw_decode(rest)
            record.failure = Failure(name, json.loads(rest[end:]), float(said) - zero_s)
        elif kind == "end":
            record.ended = True
    return record


def _pairs(
    before: dict[tuple[str, int], tuple[int, int]], after: dict[tuple[str, int], tuple[int, int]]
) -> Iterator[tuple[str, tuple[int, int], tuple[int, int]]]:
    for key, usage in after.items():
        if key in before:
            yield key[0], before[key], usage


def _tells_why_it_ends(lines: list[str], number: int) -> bool:
    return number > 0 and lines[number - 1].endswith("the rank ends")


def _last_of(lines: list[str], number: int) -> str:
    """The exception that a traceback which begins at `number` ends with."""
    for line in lines[number + 1 :]:
        if line and not line.startswith(" "):
            return line
    return ""


def _slowdown() -> float:
    return min(max(1.0, os.getloadavg()[0] / len(os.sched_getaffinity(0))), SLOWDOWN_MOST)


def _environment() -> dict[str, str]:
    ours = {name: value for name, value in os.environ.items() if not name.startswith("NETFOLD_")}
    return ours | {"OMP_NUM_THREADS": "1"}


def _run_command(args: list[str]) -> None:
    sys.argv = ["netfold", *args]
    from netfold.cli import main

    main()
