"""The public API of a group of ranks: make, split and close it."""

from __future__ import annotations

import os
from collections.abc import Mapping
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
    """Memory that stays registered with the fabric until `close`."""

    def __init__(self, owner: Any, lease: Any) -> None:
        self._owner, self._lease = owner, lease

    def close(self) -> None:
        # In this order: the memory may be freed with its owner.
        self._lease = None
        self._owner = None

    def __enter__(self) -> Registration:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Communicator(Collectives):
    """A rank's end of a group, without torch. Its operations on arrays: `Collectives`."""

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
        """Connect to the other ranks through `store`; see `Group`."""
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
        """Make the group of all ranks that torchrun, mpirun (Open MPI, MPICH, Intel MPI) or srun started.

        Reads RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, or the launcher's own variables (`launchers`). Rank 0's
        process serves a small store (`TcpStore`) until it ends. Several such groups can be made, one after the other.
        Raises ValueError where a variable is missing, RendezvousError.
        """
        place = launchers.placement(environment)
        communicator = cls(
            process_store(place.host, place.port, place.job, rank=place.rank, timeout_s=join_timeout_s),
            place.rank,
            place.size,
            options=options,
            timeout_s=timeout_s,
            join_timeout_s=join_timeout_s,
            store_host=place.host,
        )
        # Rank 0's process, and the store with it, may end once all ranks have connected.
        communicator.barrier(timeout_s=join_timeout_s)
        return communicator

    def split(
        self, color: int | None, key: int = 0, *, options: Options | None = None, timeout_s: float | None = None
    ) -> Communicator | None:
        """Make a new group of the ranks that gave the same color, ordered by key, then by rank here.

        Every rank of this group calls. A rank with the color None joins no new group, and gets None.
        options: default to this group's.
        Cost: an all_gather of 16 bytes, then the start-up of a group.
        """
        absent = np.iinfo(np.int64).min
        everyone = self.all_gather(np.array([absent if color is None else color, key], np.int64))
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

        The registration ends with its `close`, or with a `with` block. Until then it keeps the memory alive, and the
        array must not be resized. Without a fabric this does nothing. The first collective pays for the registration.
        """
        view = array_view(array, writable=True)
        return Registration(view.owner, self.group.lease(view.region))

    def close(self) -> None:
        """Leave the group without waiting for other ranks. Operations under way fail. Idempotent."""
        self.group.close()

    def __enter__(self) -> Communicator:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is not None:
            self.group.abort(f"{type(error).__name__}: {error}")  # other ranks get the reason
        self.close()
