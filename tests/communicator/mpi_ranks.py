"""The ranks under mpirun of test_mpi.py: `python mpi_ranks.py CASE`. Prints JSON as its last line."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from netfold import Communicator, Options

TIMEOUT_S = 20.0


def join(**options: Any) -> Communicator:
    options = {"probe": "off", **options}
    return Communicator.from_environment(options=Options(**options), timeout_s=TIMEOUT_S, join_timeout_s=15)


def meet() -> Any:
    """Make a group from the launcher's variables alone, twice; returns its facts."""
    for _ in range(2):
        with join() as group:
            mine = np.arange(1000.0) * (group.rank + 1)
            group.all_reduce(mine)
            np.testing.assert_array_equal(mine, np.arange(1000.0) * (group.size * (group.size + 1) / 2))
            ranks = [int(each[0]) for each in group.all_gather(np.array([group.rank]))]
    return ranks


def algorithms() -> Any:
    import test_host_algorithms as host

    for text in host.SETS:
        chosen = dict(pair.split("=") for pair in text.split(","))
        with join(transport="mpi", algorithm=text) as group:
            for operation, algorithm in chosen.items():
                for count in (0, 1, 353, 30_011, 300_007):
                    getattr(host, f"check_{operation}")(group, algorithm, "sum", "float32", count)
            check_messages(group)
            assert len(set(group.group.nodes)) == group.size, "some ranks share memory"
    from netfold.bootstrap.mpi import _ports

    (port,) = _ports.values()
    return {"segments": port.counters["segments_sent"], "version": port.version}


def check_messages(group: Communicator) -> None:
    others = [peer for peer in range(group.size) if peer != group.rank]
    got = {peer: np.zeros(100_003, np.int64) for peer in others}
    works = [group.send(np.arange(100_003) + group.rank, peer, tag=7, asynchronous=True) for peer in others]
    for peer in others:
        group.receive(got[peer], peer, tag=7)
        np.testing.assert_array_equal(got[peer], np.arange(100_003) + peer)
    for work in works:
        work.wait()


def beside() -> Any:
    """netfold in one thread, on a group and a split of it; the program's MPI in another, with any source and tag."""
    import threading

    from mpi4py import MPI

    world = MPI.COMM_WORLD
    with join(transport="mpi") as group:
        part = group.split(group.rank % 2)
        assert part is not None
        from netfold.bootstrap.mpi import _ports

        assert len(_ports) == 1, "a part of a group goes over the group's communicator"

        def program() -> None:
            for turn in range(200):
                peer = world.rank ^ 1
                if peer < world.size:
                    assert world.sendrecv(turn, peer, source=MPI.ANY_SOURCE) == turn

        thread = threading.Thread(target=program)
        thread.start()
        for _ in range(50):
            for each in (group, part):
                mine = np.full(20_000, float(each.rank))
                each.all_reduce(mine)
                assert (mine == each.size * (each.size - 1) / 2).all()
        thread.join()
        part.close()
    return world.allreduce(1)


def goes_away() -> Any:
    """A message arrives while its sender computes; the last one, although its sender has closed the group."""
    with join(transport="mpi") as group:
        group.barrier()
        began = time.monotonic()
        if group.rank == 0:
            work = group.send(np.arange(200_000), 1, asynchronous=True)
            time.sleep(0.6)
            took = 0.0
        else:
            got = np.zeros(200_000, np.int64)
            group.receive(got, 0)
            took = time.monotonic() - began
            np.testing.assert_array_equal(got, np.arange(200_000))
        if group.rank == 0:
            work.wait()
            group.send(np.arange(100), 1, tag=1)
        elif group.rank == 1:
            time.sleep(0.3)
            got = np.zeros(100, np.int64)
            group.receive(got, 0, tag=1)
            np.testing.assert_array_equal(got, np.arange(100))
    return took


def dies() -> Any:
    """Rank 1 is killed during operations; returns the others' errors, and after how long."""
    with join(transport="mpi", reconnect_s=0) as group:
        mine = np.ones(1 << 20, np.float32)
        began = time.monotonic()
        try:
            group.all_reduce(mine)
            if group.rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            while True:
                group.all_reduce(mine)
        except Exception as error:
            said = {"error": str(error), "type": type(error).__name__, "took_s": time.monotonic() - began}
    # MPI_Finalize may wait for the dead rank, and mpirun end all ranks after one ends: the test ends them.
    file = Path(sys.argv[2], f"{group.rank}.json")
    file.with_suffix(".part").write_text(json.dumps(said))
    file.with_suffix(".part").rename(file)
    time.sleep(60)


def refusal() -> str:
    try:
        join(transport="mpi").close()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def too_low() -> Any:
    import mpi4py

    mpi4py.rc.thread_level = "serialized"
    from mpi4py import MPI

    assert MPI.Is_initialized()
    return refusal()


if __name__ == "__main__":
    told = json.dumps(globals()[sys.argv[1]]())
    sys.stdout.write(told + "\n")
