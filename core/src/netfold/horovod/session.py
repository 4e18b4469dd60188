"""A job's group of ranks, and Horovod's operations on it."""

from __future__ import annotations

import hashlib
import pickle
import socket
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from netfold.communicator import Communicator, FileStore, Options, Work, is_launched, placement
from netfold.horovod.fusion import fused
from netfold.horovod.tree import Array, host, leaves, overwrite, rebuilt, restore

# Horovod's operators have netfold's names.
Average, Sum, Min, Max, Product = "avg", "sum", "min", "max", "product"


class Compression:
    """The dtypes in which float32 arrays travel (`Options.wire_dtype`). Sums and results are float32."""

    none: str | None = None
    fp16: str | None = "f16"
    bf16: str | None = "bf16"


class Handle:
    """An operation under way. `poll` and `synchronize` take it."""

    def __init__(self, work: Work, like: Any) -> None:
        self._work = work
        self._like = like

    @property
    def done(self) -> bool:
        """Whether it has ended. Never blocks."""
        return self._work.done

    def wait(self) -> Any:
        """Wait for the operation and return its result, or raise its error."""
        return restore(self._like, self._work.wait())


class Session:
    """Horovod's operations over a Communicator. The functions of `netfold.horovod` document them."""

    def __init__(
        self, communicator: Communicator, options: Options | None = None, *, local: tuple[int, int] | None = None
    ) -> None:
        """local: this rank's number on its host, and the host's number of ranks; by default, the ranks find both."""
        self.communicator = communicator
        self._options = options or Options()
        self._own: Communicator | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._compressed: dict[str, Communicator] = {}
        self.local = local if local is not None else _place_on_host(communicator)

    @classmethod
    def join(cls, options: Options | None = None) -> Session:
        """Make a session with its own Communicator."""
        if is_launched():
            here = placement()
            known = None if here.local_rank is None or here.local_size is None else (here.local_rank, here.local_size)
            communicator = Communicator.from_environment(options=options)
            made = cls(communicator, options, local=known)
        else:
            folder = tempfile.TemporaryDirectory()
            communicator = Communicator(FileStore(folder.name), 0, 1, options=options)
            made = cls(communicator, options, local=(0, 1))
            made._folder = folder
        made._own = communicator
        return made

    def close(self) -> None:
        """Leave the groups that this session made. Idempotent."""
        for communicator in self._compressed.values():
            communicator.close()
        if self._own is not None:
            self._own.close()
        if self._folder is not None:
            self._folder.cleanup()

    def allreduce(self, tensor: Any, *, op: str, compression: str | None) -> Any:
        """Run on this thread, which takes less time than `allreduce_async` and a wait."""
        own = np.array(host(tensor), order="C")
        return restore(tensor, self._by(compression).all_reduce(own, op=op))

    def allreduce_async(self, tensor: Any, *, op: str, compression: str | None) -> Handle:
        """Copy the tensor, and return at once."""
        own = np.array(host(tensor), order="C")
        return Handle(self._by(compression).all_reduce(own, op=op, asynchronous=True), tensor)

    def grouped_allreduce(self, tensors: Any, *, op: str, compression: str | None) -> Any:
        group = self._by(compression)
        found = leaves(tensors)
        reduced = fused([host(leaf) for leaf in found], lambda buffer: _work(group, "all_reduce", buffer, op=op))
        return rebuilt(tensors, [restore(leaf, array) for leaf, array in zip(found, reduced, strict=True)])

    def allgather(self, tensor: Any) -> Any:
        """Exchange the ranks' row counts, then the rows."""
        own = np.ascontiguousarray(np.atleast_1d(host(tensor)))
        rows = self.communicator.all_gather(np.array(len(own), np.int64))
        whole = np.empty((int(rows.sum()), *own.shape[1:]), own.dtype)
        self.communicator.all_gather(own, np.split(whole, np.cumsum(rows)[:-1]))
        return restore(tensor, whole)

    def broadcast(self, tensor: Any, root_rank: int) -> Any:
        own = np.array(host(tensor), order="C")
        return restore(tensor, self.communicator.broadcast(own, root_rank))

    def alltoall(self, tensor: Any, splits: Any) -> Any:
        """Exchange the row counts, then the rows."""
        group = self.communicator
        own = np.ascontiguousarray(host(tensor))
        if own.ndim == 0:
            raise ValueError("alltoall: a number has no rows to send")
        if splits is None:
            sends = np.full(group.size, len(own) // group.size, np.int64)
        else:
            sends = np.ascontiguousarray(splits, np.int64)
        if sends.shape != (group.size,) or sends.sum() != len(own) or (sends < 0).any():
            raise ValueError(
                f"alltoall: splits {sends.tolist()} must be {group.size} numbers whose sum is the tensor's {len(own)} "
                "rows"
            )
        receives = group.all_to_all(sends, np.empty_like(sends))
        into = np.empty((int(receives.sum()), *own.shape[1:]), own.dtype)
        group.all_to_all(own, into, send_rows=sends.tolist(), receive_rows=receives.tolist())
        return restore(tensor, into) if splits is None else (restore(tensor, into), receives)

    def broadcast_parameters(self, parameters: Any, root_rank: int) -> Any:
        found = leaves(parameters)
        roots = fused(
            [host(leaf) for leaf in found], lambda buffer: _work(self.communicator, "broadcast", buffer, root=root_rank)
        )
        return rebuilt(parameters, [overwrite(leaf, array) for leaf, array in zip(found, roots, strict=True)])

    def broadcast_object(self, value: Any, root_rank: int) -> Any:
        """Send the pickle's size, then the pickle."""
        pickled = pickle.dumps(value) if self.communicator.rank == root_rank else b""
        size = self.communicator.broadcast(np.array(len(pickled), np.int64), root_rank)
        buffer = np.frombuffer(bytearray(pickled or int(size)), np.uint8)
        self.communicator.broadcast(buffer, root_rank)
        return value if self.communicator.rank == root_rank else pickle.loads(buffer.data)

    def _by(self, compression: str | None) -> Communicator:
        """Return the group for a compression. All ranks make the group in the first call that uses it."""
        if compression is None:
            return self.communicator
        if compression not in self._compressed:
            made = self.communicator.split(
                0, self.communicator.rank, options=replace(self._options, wire_dtype=compression)
            )
            assert made is not None
            self._compressed[compression] = made
        return self._compressed[compression]


def _work(group: Communicator, method: str, buffer: Array, **options: Any) -> Work:
    work: Work = getattr(group, method)(buffer, asynchronous=True, **options)
    return work


def _place_on_host(communicator: Communicator) -> tuple[int, int]:
    """Return this rank's number on its host and the host's number of ranks, from the names of all ranks' hosts."""
    # Containers of one host share its boot id, and containers of different hosts may share a name. So compare both.
    boot = Path("/proc/sys/kernel/random/boot_id")
    name = socket.gethostname() + (boot.read_text() if boot.exists() else "")
    own = np.frombuffer(hashlib.sha256(name.encode()).digest(), np.uint8)
    same = (communicator.all_gather(own) == own).all(axis=1)
    return int(same[: communicator.rank].sum()), int(same.sum())
