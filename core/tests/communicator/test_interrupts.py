"""A signal's Python handler runs while a rank waits. What the handler raises ends the wait, and fails the group."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from load import seconds
from ranks import run_ranks, running_switch, values

from netfold import Communicator, FileStore, Options

# Operations do not time out while a test waits for them.
TIMEOUT_S = 120.0
SOON_S = 2.0

Wait = Callable[[Communicator], Any]
WAITS: dict[str, Wait] = {
    "all_reduce of few bytes": lambda group: group.all_reduce(np.ones(4, np.float32)),
    "all_reduce of many bytes": lambda group: group.all_reduce(np.ones(1_000_000, np.float32)),
    "all_reduce beside the short way": lambda group: group.all_reduce(np.ones(4), out=np.ones(4)),
    "barrier": lambda group: group.barrier(),
    "receive": lambda group: group.receive(np.ones(4), 1),
    "Work.wait": lambda group: group.all_reduce(np.ones(4), asynchronous=True).wait(),
    "Work.wait of a receive": lambda group: group.receive(np.ones(4), 1, asynchronous=True).wait(),
    "Work.wait behind another": lambda group: [group.barrier(asynchronous=True) for _ in range(3)][-1].wait(),
}


def join(rank: int, size: int, folder: str, **options: Any) -> Communicator:
    Path(folder).mkdir(exist_ok=True)
    return Communicator(FileStore(folder), rank, size, options=Options(**options), timeout_s=TIMEOUT_S)


def signal_soon(by_another_thread: bool = False) -> threading.Thread:
    """Send SIGINT to this process after half a second.

    by_another_thread: another thread gets the signal, so that no system call of the main thread is interrupted.
    """

    def send() -> None:
        time.sleep(0.5)
        if by_another_thread:
            signal.pthread_kill(threading.get_ident(), signal.SIGINT)
        else:
            os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=send)
    thread.start()
    return thread


def until(path: Path) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not path.exists():
        assert time.monotonic() < deadline, path
        time.sleep(0.02)


def _interrupted(rank: int, size: int, folder: str, options: dict[str, str]) -> None:
    """Rank 0 is interrupted in each of the waits; rank 1 makes no call until then.

    Rank 1's first calls may still succeed with data that rank 0 sent before. Later ones raise rank 0's reason.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number, (name, wait) in enumerate(WAITS.items()):
        over, noticed = Path(folder, f"over-{number}"), Path(folder, f"noticed-{number}")
        with join(rank, size, f"{folder}/{number}", **options) as group:
            group.barrier()
            if rank == 1:
                until(over)
                with pytest.raises(Exception, match=r"rank 0: .* was interrupted by a signal"):
                    for _ in range(5):
                        WAITS["barrier" if "receive" in name else name](group)
                noticed.touch()
                continue
            sender = signal_soon(by_another_thread=number % 2 == 1)
            began = time.monotonic()
            with pytest.raises(KeyboardInterrupt):
                wait(group)
            took = time.monotonic() - began
            over.touch()
            sender.join()
            assert took < 0.5 + seconds(SOON_S), f"{name}: {took}"
            with pytest.raises(Exception, match=r"this group failed before: rank 0: .* was interrupted by a signal"):
                group.barrier()
            until(noticed)  # rank 1 may ask for the reason


@pytest.mark.native
@pytest.mark.parametrize("through", ["memory", "tcp", "switch"])
def test_ctrl_c_ends_every_wait_and_the_other_rank_gets_the_reason(through: str) -> None:
    if through == "switch":
        with running_switch() as switch:
            return _check_interrupted({"switch": switch.endpoint})
    _check_interrupted({"transport": "tcp"} if through == "tcp" else {})


def _check_interrupted(options: dict[str, str]) -> None:
    values(run_ranks(_interrupted, 2, options, timeout_s=90))


def _handled(rank: int, size: int, folder: str, transport: str) -> list[float]:
    """Rank 0's handler sends a message over the waiting group, and returns. Rank 1 calls only then."""
    noticed: list[int] = []
    with join(rank, size, folder, transport=transport) as group:

        def handle(number: int, _: Any) -> None:
            noticed.append(number)
            group.send(np.full(3, 7.0), 1)

        value = np.arange(100_000) + rank
        if rank == 0:
            signal.signal(signal.SIGINT, handle)
            sender = signal_soon()
            group.all_reduce(value)
            sender.join()
            assert noticed == [signal.SIGINT]
        else:
            message = np.zeros(3)
            group.receive(message, 0)
            assert list(message) == [7.0] * 3
            group.all_reduce(value)
        assert (value == 2 * np.arange(100_000) + 1).all()
        return list(value[:3])


@pytest.mark.native
@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_a_handler_that_returns_may_use_the_group_and_lets_the_wait_go_on(transport: str) -> None:
    assert values(run_ranks(_handled, 2, transport)) == [[1.0, 3.0, 5.0]] * 2


def _closed_by_handler(rank: int, size: int, folder: str) -> str:
    over = Path(folder, "over")
    with join(rank, size, folder) as group:
        group.barrier()
        if rank == 1:
            until(over)
            return ""
        signal.signal(signal.SIGINT, lambda *_: group.close())
        sender = signal_soon()
        try:
            group.all_reduce(np.ones(100_000))
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        finally:
            sender.join()
            over.touch()
    return "nothing was raised"


@pytest.mark.native
def test_a_handler_may_close_the_waiting_group() -> None:
    said = values(run_ranks(_closed_by_handler, 2))[0]
    assert said.startswith("GroupAborted: ") and "rank 0 closed the group" in said, said


BY_COMMUNICATOR = """
import sys
import numpy as np
from netfold import Communicator, FileStore, Options

rank, folder, transport = int(sys.argv[1]), sys.argv[2], sys.argv[3]
group = Communicator(FileStore(folder), rank, 2, options=Options(transport=transport), timeout_s=120)
group.barrier()
if rank == 0:
    print("waits", flush=True)
    group.all_reduce(np.ones(1000))
else:
    sys.stdin.readline()
    for _ in range(5):
        group.all_reduce(np.ones(1000))
"""

BY_TORCH = """
import sys
import torch
import torch.distributed as dist

rank, folder = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("netfold", init_method=f"file://{folder}/store", rank=rank, world_size=2)
dist.barrier()
value = torch.ones(1000)
CALLS = {
    "all_reduce": lambda: dist.all_reduce(value),
    "Work.wait": lambda: dist.all_reduce(value, async_op=True).wait(),
    "recv": lambda: dist.recv(value, 1) if rank == 0 else dist.barrier(),
    "barrier": dist.barrier,
}
if rank == 0:
    print("waits", flush=True)
    CALLS[sys.argv[4]]()
else:
    sys.stdin.readline()
    for _ in range(5):
        CALLS[sys.argv[4]]()
"""


@pytest.mark.parametrize(
    ("script", "transport", "call"),
    [
        pytest.param(BY_COMMUNICATOR, "auto", "all_reduce", id="communicator-memory"),
        pytest.param(BY_COMMUNICATOR, "tcp", "all_reduce", id="communicator-tcp"),
        pytest.param(BY_TORCH, "auto", "all_reduce", id="torch-memory"),
        pytest.param(BY_TORCH, "tcp", "all_reduce", id="torch-tcp"),
        pytest.param(BY_TORCH, "auto", "Work.wait", id="torch-work"),
        pytest.param(BY_TORCH, "tcp", "recv", id="torch-recv"),
        pytest.param(BY_TORCH, "auto", "barrier", id="torch-barrier"),
    ],
)
def test_a_process_ends_by_itself_after_ctrl_c(script: str, transport: str, call: str, tmp_path: Path) -> None:
    """Rank 1's first calls may succeed with data that rank 0 sent before."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", script, str(rank), str(tmp_path), transport, call],
            env=os.environ | {"NETFOLD_TRANSPORT": transport},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    first, second = processes
    try:
        assert first.stdout is not None and first.stdout.readline() == "waits\n"
        time.sleep(0.5)
        first.send_signal(signal.SIGINT)
        began = time.monotonic()
        _, errors = first.communicate(timeout=seconds(20))
        took = time.monotonic() - began
        assert took < seconds(5), took
        assert first.returncode in (-signal.SIGINT, 1), errors  # 1: the exception went through torch's C++
        assert errors.rstrip().endswith("KeyboardInterrupt"), errors
        _, errors = second.communicate("\n", timeout=seconds(20))
        assert "PeerLost" in errors, errors
    finally:
        for process in processes:
            process.kill()
            process.communicate()
