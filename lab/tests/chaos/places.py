"""Fork a process into a network namespace, with a mount namespace of its host's own.

Ranks and switches are forked off one process that has torch and netfold imported, so a run starts within seconds. The
processes of one host share one mount namespace: one /dev/shm of SHM_BYTES, one folder for temporary files.
"""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

from netfold_lab.rack.cleanup import HOST_FOLDER
from netfold_lab.rack.delay_links import NAMESPACES

SHM_BYTES = 64 << 20
_CLONE_NEWNS, _CLONE_NEWNET = 0x00020000, 0x40000000
_MS_REC, _MS_PRIVATE = 0x4000, 1 << 18
_FORKS = multiprocessing.get_context("forkserver")
_PRELOAD = ("torch.nn.parallel", "netfold.torch.operations", "netfold.cli.switch", "cryptography.x509", "asyncio")
_CLOCK = Path(__file__).with_name("clock.c")


def warm_up(folder: Path) -> None:
    """Start the process that others are forked off, with the clock that a run can move, and wait for its imports."""
    library = folder / "clock.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", str(_CLOCK), "-o", str(library), "-ldl"], check=True, timeout=60)
    before = os.environ.get("LD_PRELOAD")
    os.environ["LD_PRELOAD"] = str(library)
    try:
        forkserver._forkserver._stop()  # one that another test has started has no such clock
        _FORKS.set_forkserver_preload([*_PRELOAD])
        first = _FORKS.Process(target=int)
        first.start()
        first.join()
    finally:
        if before is None:
            del os.environ["LD_PRELOAD"]
        else:
            os.environ["LD_PRELOAD"] = before


class Place:
    """A namespace of the network, and the first process there, whose mount namespace the others share."""

    def __init__(self, namespace: str, folder: Path, name: str) -> None:
        self.namespace, self.name = namespace, name
        self._folder = folder
        self._first: Any = None

    def fork(self, name: str, function: Callable[..., None], *args: object, env: dict[str, str]) -> Process:
        """`function(*args)` in a process here; its output is appended to the file `name`."""
        joins = self._first.pid if self._first is not None and self._first.poll() is None else None
        process = Process(self, self._folder, name, joins, function, args, env)
        if joins is None:
            self._first = process
        return process


class Process:
    """A forked process: its log, and the file that its clock's offset is in."""

    def __init__(
        self,
        place: Place,
        folder: Path,
        name: str,
        joins: int | None,
        function: Callable[..., None],
        args: tuple[object, ...],
        env: dict[str, str],
    ) -> None:
        self.name, self.place = name, place
        self.log_path, self.clock_path = folder / f"{name}.log", folder / f"{name}.clock"
        self.clock_path.write_bytes(bytes(8))
        self.ended_on_purpose = False
        inside, ready = _FORKS.Pipe(duplex=False)
        about = (ready, place.namespace, joins, str(self.log_path), str(self.clock_path), env, function, args)
        self._process = _FORKS.Process(target=_enter, args=about, daemon=True)
        self._process.start()
        ready.close()
        try:
            inside.recv()
        except EOFError:
            raise RuntimeError(f"{name} did not start: {self.log()}") from None
        finally:
            inside.close()
        self.pid = self._process.pid or 0

    def log(self) -> str:
        return self.log_path.read_text(errors="replace") if self.log_path.exists() else ""

    def poll(self) -> int | None:
        return self._process.exitcode

    def signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def set_clock(self, offset_s: int) -> None:
        with open(self.clock_path, "r+b") as file:
            file.write(offset_s.to_bytes(8, sys.byteorder, signed=True))

    def join(self, timeout_s: float) -> None:
        self._process.join(timeout_s)

    def usage(self) -> tuple[int, int]:
        """Descriptors, and bytes of its own and of shared memory."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        kilobytes = [int(line.split()[1]) for line in status.splitlines() if line.startswith(("RssAnon:", "RssShmem:"))]
        return len(os.listdir(f"/proc/{self.pid}/fd")), sum(kilobytes) << 10


def _enter(
    ready: Any,
    namespace: str,
    joins: int | None,
    log: str,
    clock: str,
    env: dict[str, str],
    function: Callable[..., None],
    args: tuple[object, ...],
) -> None:
    gc.freeze()
    with open(log, "a") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    os.environ.clear()
    os.environ.update(env, TMPDIR=str(HOST_FOLDER))
    os.environ.pop("LD_PRELOAD", None)
    libc = ctypes.CDLL(None, use_errno=True)
    _must(libc.netfold_chaos_clock(clock.encode()), "map the clock")
    _set_namespace(libc, f"{NAMESPACES}/{namespace}", _CLONE_NEWNET)
    if joins is not None:
        _set_namespace(libc, f"/proc/{joins}/ns/mnt", _CLONE_NEWNS)
    else:
        _must(libc.unshare(_CLONE_NEWNS), "unshare")
        _must(libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None), "make mounts private")
        for path in (b"/dev/shm", str(HOST_FOLDER).encode()):
            _must(libc.mount(b"chaos", path, b"tmpfs", 0, f"size={SHM_BYTES}".encode()), f"mount {path!r}")
        _must(libc.mount(b"chaos", b"/sys", b"sysfs", 0, None), "mount /sys")
    ready.send(True)
    ready.close()
    function(*args)


def _set_namespace(libc: ctypes.CDLL, path: str, kind: int) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    _must(libc.setns(descriptor, kind), f"enter {path}")
    os.close(descriptor)


def _must(result: int, what: str) -> None:
    if result != 0:
        raise OSError(ctypes.get_errno(), f"cannot {what}: {os.strerror(ctypes.get_errno())}")
