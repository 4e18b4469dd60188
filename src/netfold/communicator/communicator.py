"""A group of ranks for people: how it is made, divided and left."""

from __future__ import annotations

import os
from collections.abc import Mapping
from types import TracebackType
from typing import Any

import numpy as np

from netfold.bootstrap import launchers
from netfold.bootstrap.store import PrefixStore, Store
from netfold.bootstrap.tcp_store import process_store
from netfold.communicator.arrays import array_view
from netfold.communicator.collectives import Collectives
from netfold.communicator.group import Group
from netfold.options import Options


class Registration:
    """Memory that stays registered; `close` ends that."""

    def __init__(self, owner: Any, lease: Any) -> None:
        self._owner, self._lease = owner, lease

    def close(self) -> None:
        # In this order: the memory may go with its owner.
        self._lease = None
        self._owner = None

    def __enter__(self) -> Registration:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class Communicator(Collectives):
    """A rank's end of a group, without torch. What it does with arrays: `Collectives`."""

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        *,
        options: Options | None = None,
        timeout_s: float = 1800.0,
        join_timeout_s: float = 60.0,
        store_host: str | None = None,
    ) -> None:
        """Meet the other ranks through `store`; see `Group`."""
        self._options = options
        self._join_timeout_s = join_timeout_s
        self._store_host = store_host
        self._splits = 0
        self.group = Group(
            store,
            rank,
            size,
            options=options,
            timeout_s=timeout_s,
            join_timeout_s=join_timeout_s,
            store_host=store_host,
        )

    @classmethod
    def from_environment(
        cls,
        environment: Mapping[str, str] = os.environ,
        *,
        options: Options | None = None,
        timeout_s: float = 1800.0,
        join_timeout_s: float = 60.0,
    ) -> Communicator:
        """The group of all ranks of this job, as torchrun, mpirun (Open MPI, MPICH, Intel MPI) or srun started them.

        Reads RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, or the launcher's own variables (`launchers`). Rank 0's
        process serves a small store (`TcpStore`) until it ends; there may be several such groups, one after the other.
        Raises ValueError where a variable is missing, RendezvousError.
        """
        place = launchers.placement(environment)
        made = cls(
            process_store(place.host, place.port, place.job, rank=place.rank, timeout_s=join_timeout_s),
            place.rank,
            place.size,
            options=options,
            timeout_s=timeout_s,
            join_timeout_s=join_timeout_s,
            store_host=place.host,
        )
        # Rank 0's process, and the store with it, may end as soon as everybody has come.
        made.barrier(timeout_s=join_timeout_s)
        return made

    def split(
        self, color: int | None, key: int = 0, *, options: Options | None = None, timeout_s: float | None = None
    ) -> Communicator | None:
        """A new group of the ranks that gave the same color, ordered by key, then by rank here.

        Every rank of this group calls. None as the color: no group for this rank, and None is returned. `options`
        default to this group's. Cost: an all_gather of 16 bytes, then as long as a group takes to come together.
        """
        absent = np.iinfo(np.int64).min
        mine = np.array([absent if color is None else color, key], np.int64)
        everyone = self.all_gather(mine)
        self._splits += 1
        if color is None:
            return None
        members = sorted((int(k), rank) for rank, (c, k) in enumerate(everyone) if c == color)
        return Communicator(
            PrefixStore(self.group.store, f"split/{self._splits}/{color}/"),
            members.index((key, self.rank)),
            len(members),
            options=options or self._options,
            timeout_s=self.group.timeout_s if timeout_s is None else timeout_s,
            join_timeout_s=self._join_timeout_s,
            store_host=self._store_host,
        )

    def register(self, array: Any) -> Registration:
        """Keep `array`'s memory registered with the fabric, so that collectives on it, or on parts of it, need not.

        Until `close`, or the end of a `with`: the array's memory is held on to as long, and must not be resized. Where
        there is no fabric it changes nothing. Registering it costs nothing yet; the first collective pays.
        """
        lent = array_view(array, writable=True)
        return Registration(lent.owner, self.group.lease(lent.region))

    def close(self) -> None:
        """Leave the group: waits for no other rank. Operations under way fail. Idempotent."""
        self.group.close()

    def __enter__(self) -> Communicator:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            self.group.abort(f"{type(error).__name__}: {error}")  # the others hear what it was
        self.close()
