"""Start a job's ranks on this machine, by torchrun or for an elastic job by itself, and leave none of them behind.

Each rank runs this process's own command, and finds by torchrun's variables that it is a rank. The agent restarts all
ranks when one is lost (`fault_tolerance.restarts`). A signal to this process reaches every rank, which has
`fault_tolerance.grace_s` to leave. A rank also leaves when this process is killed.

torchrun ends all ranks when one is lost. So the ranks of an elastic job are started here, and a lost rank is replaced.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import signal
import subprocess
import sys
import time
import uuid
from types import FrameType

import torch.distributed.run as torchrun
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from netfold.bootstrap.tcp_store import OUTLIVING, TcpStoreServer
from netfold.elastic.members import STORE_VARIABLE
from netfold.units import plural
from netfold_train.fault_tolerance.stop import POLICY_STATUS, STOPPED_STATUS, handling, unwind_on_signals
from netfold_train.rank import FAILED, FINAL, NOT_BEGUN, job_status, share_job
from netfold_train.recipe import Recipe
from netfold_train.recipe.errors import Source

# How often the ranks' processes are looked at.
_POLL_S = 0.05
# A lost rank is replaced after this time, unless all ranks are lost within it: a new rank alone would find nobody.
_ALL_LOST_S = 0.5


def launch(recipe: Recipe, source: Source, ranks: int) -> int:
    """Run `python -m netfold.cli` with this process's arguments, which name `recipe`, as `ranks` processes here.

    Returns the exit status, 128 + n after signal n. STOPPED_STATUS: the ranks were asked to stop, and have written a
    checkpoint or had not begun to train. POLICY_STATUS: a policy of the recipe ended the run. Ranks print their own
    errors; this process prints only which rank failed first, or was killed.
    """
    share_job(recipe, source)
    os.environ["OMP_NUM_THREADS"] = str(recipe.run.threads)
    if recipe.fault_tolerance.elastic:
        started = _Ranks(recipe, ranks)
        with handling(started.pass_on), contextlib.closing(started):
            return started.wait()
    # Longer than the grace time, which the ranks enforce themselves.
    os.environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = str(math.ceil(recipe.fault_tolerance.grace_s) + 5)
    arguments = [
        f"--nproc-per-node={ranks}",
        f"--max-restarts={recipe.fault_tolerance.restarts}",
        f"--rdzv-id={uuid.uuid4().hex}",
        "--rdzv-backend=c10d",
        # A free port. All ranks are on this machine, whose name need not resolve.
        "--rdzv-endpoint=127.0.0.1:0",
        "--local-addr=127.0.0.1",
        f"--log-dir={os.devnull}",
        *("-m", "netfold.cli", *sys.argv[1:]),
    ]
    try:
        # The agent would report errors that the ranks print themselves.
        logging.disable(logging.NOTSET if "LOGLEVEL" in os.environ else logging.ERROR)
        # Restores the handlers, which the agent does not.
        with unwind_on_signals():
            torchrun.run(torchrun.parse_args(arguments))  # type: ignore[no-untyped-call]
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        return _failed(recipe, f"rank {rank} failed first, it {_how(failure.exitcode)}")
    except SignalException as stopped:
        return _failed(recipe, stopped_by=int(stopped.sigval))
    finally:
        logging.disable(logging.NOTSET)
    return 0


class _Ranks:
    """The ranks of an elastic job. Each lost rank is replaced while restarts are left."""

    def __init__(self, recipe: Recipe, size: int) -> None:
        self._recipe, self._size = recipe, size
        self._left = recipe.fault_tolerance.restarts
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._signal = 0
        self._store: TcpStoreServer | None = None

    def close(self) -> None:
        """Kill the ranks that are left."""
        for process in self._processes.values():
            process.kill()
            process.wait()
        if self._store is not None:
            self._store.close()

    def wait(self) -> int:
        """Start the ranks, and wait until none is left; returns the job's exit status."""
        self._start_all()
        first, completes, kill_at = "", False, math.inf
        lost: dict[int, tuple[str, float]] = {}
        """By rank: how it ended, and when it is replaced."""
        while self._processes:
            time.sleep(_POLL_S)
            now_s = time.monotonic()
            for rank, process in list(self._processes.items()):
                if now_s > kill_at:
                    process.kill()
                status = process.poll()
                if status is not None:
                    del self._processes[rank]
                    completes |= status == 0
                    lost[rank] = _how(status), now_s + _ALL_LOST_S
            # If no rank can train, one rank finds it first. The other ranks find it, too, or wait for those that have.
            ends = bool(self._signal) or job_status() in FINAL
            if ends and math.isinf(kill_at):
                kill_at = now_s + self._recipe.fault_tolerance.grace_s + 5
            if ends or completes:
                lost.clear()
            for rank, (how, replaced_at) in list(lost.items()):
                first = first or f"rank {rank} failed first, it {how}"
                if now_s > replaced_at and self._left and self._processes:
                    del lost[rank]
                    self._replace(rank, how)
            if lost and self._left and not self._processes:
                self._left -= 1
                lost.clear()
                print("netfold train: no rank is left; all ranks start again", file=sys.stderr, flush=True)
                self._start_all()
        completes = completes and job_status() not in (POLICY_STATUS, STOPPED_STATUS)
        return 0 if completes else _failed(self._recipe, first, self._signal)

    def _start_all(self) -> None:
        if self._store is not None:
            self._store.close()
        self._store = TcpStoreServer("127.0.0.1", 0, OUTLIVING)
        for rank in range(self._size):
            self._start(rank)

    def _replace(self, rank: int, how: str) -> None:
        self._left -= 1
        print(
            f"netfold train: rank {rank} {how}; a new rank takes its place, {self._left} of "
            f"{self._recipe.fault_tolerance.restarts} restarts are left (fault_tolerance.restarts)",
            file=sys.stderr,
            flush=True,
        )
        self._start(rank)

    def _start(self, rank: int) -> None:
        assert self._store is not None
        environment = os.environ | {
            "RANK": str(rank),
            "WORLD_SIZE": str(self._size),
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(self._size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self._store.port),
            STORE_VARIABLE: f"127.0.0.1:{self._store.port}",
        }
        command = [sys.executable, "-m", "netfold.cli", *sys.argv[1:]]
        self._processes[rank] = subprocess.Popen(command, env=environment)

    def pass_on(self, number: int, _: FrameType | None) -> None:
        self._signal = number
        for process in self._processes.values():
            process.send_signal(number)


def _how(status: int) -> str:
    return f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"


def _failed(recipe: Recipe, why: str = "", stopped_by: int = 0) -> int:
    """The exit status of a job that has not completed. Prints why, unless a rank or a signal has said it."""
    status = job_status()
    if status in (POLICY_STATUS, STOPPED_STATUS):
        return status
    if stopped_by:
        return STOPPED_STATUS if stopped_by == signal.SIGTERM and status == NOT_BEGUN else 128 + stopped_by
    restarts = recipe.fault_tolerance.restarts
    after = f"after {plural(restarts, 'restart')} (fault_tolerance.restarts)" if restarts else "(no restarts)"
    hopeless = "no restart would help; see the sentence above"
    print(f"netfold train: {hopeless if status in FINAL else f'given up {after}: {why}'}", file=sys.stderr)
    return FAILED
