"""Jobs that share one switch: the cost of one for another, and the delay of a busy switch's answers; no root needed:

.venv/bin/python lab/bench/busy_switch.py jobs                  # a job alone, and beside others that behave badly
.venv/bin/python lab/bench/busy_switch.py switch-questions      # about a minute
"""

from __future__ import annotations

import contextlib
import http.client
import os
import random
import re
import secrets
import socket
import statistics
import threading
import time
from collections.abc import Callable
from typing import Any

import driver
import numpy as np
from driver import CheckedSum, Network, Place, Rank, open_network, start_ranks

from netfold import Communicator, FileStore, Options
from netfold._native import protocol
from netfold.communicator.membership import Membership
from netfold.switch_protocol.control_client import SwitchAccess
from netfold_lab.bench.spread import paired_ratios, spread

COUNT = 1 << 20  # f32: 4 MB
CALLS, WARMUPS = 8, 3
# linux/udp.h; the standard library has no name for it.
UDP_SEGMENT = 103
PACKET_BYTES = protocol.ETHERNET_PAYLOAD_BYTES + protocol.HEADER_BYTES
SEGMENTS = 40
METRICS = "127.0.0.1:19171"
FLOODS = {
    "a flood to nobody": "nobody",
    "a flood at another job's port": "other",
    "a flood at its own port": "own",
}
NEIGHBOURS = {"another job that restarts all the time": True, "another job that adds all the time": False}
BUSY_COUNT = 1 << 16  # f32: 256 KB
JOBS_A_PROCESS = 8
QUESTION_ROUNDS = 40
PAUSE_S = 0.1
GOALS_MS = {"/metrics": 100.0, "/healthz": 100.0, "join": 1000.0}


def measured(me: Rank) -> None:
    """A rank of the job that is measured. An order: seconds of each of CALLS all_reduces."""
    add_once = CheckedSum(me, 4 * COUNT)
    with me.communicator("job") as group:

        def run() -> list[float]:
            seconds, wrong = zip(*(add_once(group.all_reduce) for _ in range(WARMUPS + CALLS)), strict=True)
            assert not any(wrong)
            return list(seconds[WARMUPS:])

        me.serve(run)


def neighbour(me: Rank, restarts: bool) -> None:
    """A rank of another job: it adds without pause, or leaves and joins again for every addition."""
    buffer = np.ones(1000 if restarts else COUNT, np.float32)

    def add() -> None:
        for generation in range(1 << 20):
            with me.communicator(f"{generation}") as group:
                ready.set()
                while True:
                    group.all_reduce(buffer, op="max")
                    assert buffer[-1] == 1
                    if restarts:
                        break

    ready = threading.Event()
    threading.Thread(target=add, daemon=True).start()
    ready.wait()
    me.serve(lambda: None)
    # The other rank may have ended in the middle of an operation.
    os._exit(0)


def idle(me: Rank) -> None:
    """A rank of a job that does nothing."""
    with me.communicator("idle") as group:
        group.barrier()
        me.serve(lambda: None)


def flood(me: Rank, port: int) -> None:
    """Packets that look like a job's, as fast as one core sends them, 40 a call."""

    def send() -> None:
        header = b"NF\x01\x00" + bytes(44)
        packets = (header + os.urandom(PACKET_BYTES - len(header))) * SEGMENTS
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stream:
            stream.setsockopt(socket.IPPROTO_UDP, UDP_SEGMENT, PACKET_BYTES)
            while True:
                with contextlib.suppress(BlockingIOError, ConnectionRefusedError):
                    stream.sendto(packets, ("127.0.0.1", port))

    threading.Thread(target=send, daemon=True).start()
    me.serve(lambda: None)


def jobs(rounds: int = 9, cases: str = ",".join(["alone", *FLOODS, *NEIGHBOURS])) -> str:
    """The cost of a job for another job on the same switch."""
    times: dict[str, list[float]] = {}
    with (
        open_network(Place(2, switch=True)) as network,
        start_ranks(network, measured) as job,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as nobody,
    ):
        nobody.bind(("127.0.0.1", 0))
        ports = {"nobody": nobody.getsockname()[1], "own": data_port(network, 0)}
        with start_ranks(network, idle):
            ports["other"] = data_port(network, 1)

            def beside(case: str) -> contextlib.AbstractContextManager[object]:
                if case in FLOODS:
                    return start_ranks(network, flood, ports[FLOODS[case]], hosts=[0])
                if case in NEIGHBOURS:
                    return start_ranks(network, neighbour, NEIGHBOURS[case])
                return contextlib.nullcontext()

            names = cases.split(",")
            for _ in range(rounds):
                for case in random.sample(names, len(names)):
                    with beside(case):
                        times.setdefault(case, []).append(statistics.median(driver.slowest(job.ask())))
    rows = []
    for case in names:
        ms = [1e3 * seconds for seconds in times[case]]
        over = f"{statistics.median(paired_ratios(times[case], times['alone'])):.2f}" if "alone" in times else ""
        rows.append([case, f"{statistics.median(ms):.1f}", f"{min(ms):.1f}..{max(ms):.1f}", over])
    return f"""A job of two ranks adds {COUNT >> 18} MB of f32 through a switch over loopback, alone and beside others;
cases in turns, in a new order each round. Times are medians of a round's {CALLS} additions, the slower rank's. On one
machine a neighbour takes cores as well as the switch. `a flood to nobody` sends the same packets to a port where nobody
reads, so the cost of a flood to the switch is its time over the time beside that flood. Every sum is checked.

{driver.table("beside | ms, median | lowest..highest | over alone, paired by round", rows)}"""


def data_port(network: Network, job: int) -> int:
    """The UDP port of a job, by the order in which the switch has started them."""
    for _ in range(100):
        ports = re.findall(r"event=started .* port=(\d+)", "\n".join(network.switch_lines.copy()))
        if len(ports) > job:
            return int(ports[job])
        time.sleep(0.1)
    raise RuntimeError(f"the switch's log names no port of job {job}")


def busy(me: Rank, jobs: int) -> None:
    """Jobs of two ranks each, whose ranks are threads of this process. An order: the operations so far, or the end."""
    operations, over, lock = [0], threading.Event(), threading.Lock()
    ready = threading.Barrier(2 * jobs + 1)

    def rank(job: int, place: int) -> None:
        whole = np.arange(BUSY_COUNT, dtype=np.float32) % 1000
        options = Options(algorithm="all_reduce=in_network")
        store = FileStore(me.folder / f"{me.rank}-{job}")
        with Communicator(store, place, 2, options=options, timeout_s=300) as group:
            ready.wait()
            while True:
                buffer = whole + place
                # The ranks end after the same operation: the last value of each says whether to go on.
                buffer[-1] = 0 if over.is_set() else 1
                group.all_reduce(buffer)
                assert (buffer[:-1] == 2 * whole[:-1] + 1).all()
                with lock:
                    operations[0] += 1
                if buffer[-1] < 2:
                    return

    threads = [threading.Thread(target=rank, args=(job, place)) for job in range(jobs) for place in range(2)]
    for thread in threads:
        thread.start()
    ready.wait(300)
    me.serve(lambda: operations[0])
    over.set()
    for thread in threads:
        thread.join()


def page(target: str) -> bytes:
    host, _, port = METRICS.rpartition(":")
    with contextlib.closing(http.client.HTTPConnection(host, int(port), timeout=60)) as connection:
        connection.request("GET", target)
        answer = connection.getresponse()
        assert answer.status == 200
        return answer.read()


def join(endpoint: str) -> None:
    access = SwitchAccess(endpoint, None, 0, (0,))
    member = Membership.join(access, job=secrets.token_hex(16), timeout_s=60)
    member.leave("the measurement is over")


def ask_beside(network: Network, jobs: int) -> dict[str, Any]:
    """Milliseconds of every question beside busy jobs, and the operations per second of all jobs."""
    questions: dict[str, Callable[[], object]] = {
        "/metrics": lambda: page("/metrics"),
        "/healthz": lambda: page("/healthz"),
        "join": lambda: join(network.switch_address),
    }
    times: dict[str, list[float]] = {name: [] for name in questions}
    with contextlib.ExitStack() as stack:
        parts = [min(JOBS_A_PROCESS, jobs - first) for first in range(0, jobs, JOBS_A_PROCESS)]
        processes = [stack.enter_context(start_ranks(network, busy, part, hosts=[0])) for part in parts]
        time.sleep(1)

        def operations() -> int:
            return sum(process.ask()[0] for process in processes)

        before, began = operations(), time.monotonic()
        for _ in range(QUESTION_ROUNDS):
            for name, ask in questions.items():
                asked = time.monotonic()
                ask()
                times[name].append((time.monotonic() - asked) * 1e3)
                time.sleep(PAUSE_S / len(questions))
        rate = (operations() - before) / 2 / (time.monotonic() - began)
    return {"operations": rate, **times}


def switch_questions(jobs: str = "0,8,64") -> str:
    """The time that a switch with busy jobs takes to answer."""
    options = ("--metrics", METRICS, "--max-jobs", "128", "--memory", "4G", "--log", "warning")
    rows = []
    with open_network(Place(switch=True, switch_options=options)) as network:
        for count in map(int, jobs.split(",")):
            found = ask_beside(network, count)
            cells = []
            for name in GOALS_MS:
                of = spread(found[name])
                cells.append(f"{of.median:.1f} ({of.p95:.1f}, {max(found[name]):.1f})")
            rows.append([count, f"{found['operations']:.0f}", *cells])
    goals = ", ".join(f"{name} {most_ms:.0f} ms" for name, most_ms in GOALS_MS.items())
    return f"""Each job is two ranks that add {BUSY_COUNT >> 8} KB of f32 without pause over loopback, threads of a few
processes. Beside them a process asks the switch for a page, or joins a job of one worker and leaves that job, in turns.
Milliseconds: median (95th percentile, longest) of {QUESTION_ROUNDS}. A join is timed from connecting to `start`: TCP,
the hello packets there and back, and what the switch grants. Every sum is checked. The goals with 64 jobs: {goals}.

{driver.table(" | ".join(["jobs | all_reduces a second, all jobs", *GOALS_MS]), rows)}"""


if __name__ == "__main__":
    driver.run(jobs, switch_questions)
