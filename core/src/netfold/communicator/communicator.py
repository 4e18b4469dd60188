"""The public API of a group of ranks: make, split and close it."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from netfold.bootstrap import launchers
from netfold.bootstrap.endpoint import Endpoint
from netfold.bootstrap.store import Store
from netfold.bootstrap.tcp_store import process_store
from netfold.communicator.arrays import array_view
from netfold.communicator.collectives import Collectives
from netfold.communicator.group import Group
from netfold.communicator.meeting import Meeting
from netfold.communicator.reconfigure import Generations, no_group
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
        store: Store | Meeting,
        rank: int,
        size: int,
        *,
        options: Options | None = None,
        timeout_s: float = 1800.0,
        join_timeout_s: float = 60.0,
        store_host: str | None = None,
    ) -> None:
        """Connect to the other ranks through `store`, or as ranks of a group (`split`); see `Group`."""
        group = Group(
            store,
            rank,
            size,
            options=options,
            timeout_s=timeout_s,
            join_timeout_s=join_timeout_s,
            store_host=store_host,
        )
        self._begin(Generations.of(group, join_timeout_s), timeout_s, join_timeout_s, store_host)

    def _begin(
        self,
        generations: Generations,
        timeout_s: float,
        join_timeout_s: float,
        store_host: str | None,
    ) -> None:
        self._generations = generations
        self._timeout_s = timeout_s
        self._join_timeout_s = join_timeout_s
        self._store_host = store_host
        self.group = generations.group or no_group(generations)

    @classmethod
    def outside(
        cls,
        *,
        options: Options | None = None,
        timeout_s: float = 1800.0,
        join_timeout_s: float = 60.0,
        store_host: str | None = None,
    ) -> Communicator:
        """Make a communicator that is in no group yet. Its `handle` lets others form a group with it: `reconfigure`.

        store_host: a host that the other members are reached by, for the first interface; see `Group`.
        """
        communicator = cls.__new__(cls)
        generations = Generations.outside(options, join_timeout_s, store_host)
        communicator._begin(generations, timeout_s, join_timeout_s, store_host)
        return communicator

    @classmethod
    def from_environment(
        cls,
        environment: Mapping[str, str] = os.environ,
        *,
        store: Store | None = None,
        options: Options | None = None,
        timeout_s: float = 1800.0,
        join_timeout_s: float = 60.0,
    ) -> Communicator:
        """Make the group of all ranks that torchrun, mpirun (Open MPI, MPICH, Intel MPI) or srun started.

        Reads RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, or the launcher's own variables (`launchers`). Several such
        groups can be made, one after the other.
        store: default: rank 0's process serves a small one (`TcpStore`) until it ends.
        Raises ValueError where a variable is missing, RendezvousError.
        """
        place = launchers.placement(environment)
        communicator = cls(
            process_store(place, join_timeout_s) if store is None else store,
            place.rank,
            place.size,
            options=options,
            timeout_s=timeout_s,
            join_timeout_s=join_timeout_s,
            store_host=place.host,
        )
        try:
            # Rank 0's process, and a store in it, may end once all ranks have connected.
            communicator.barrier(timeout_s=join_timeout_s)
        except BaseException:
            communicator.close()
            raise
        return communicator

    def split(
        self, color: int | None, key: int = 0, *, options: Options | None = None, timeout_s: float | None = None
    ) -> Communicator | None:
        """Make a new group of the ranks that gave the same color, ordered by key, then by rank here.

        Every rank of this group calls. A rank with the color None joins no new group, and gets None.
        options: default to this group's. With other ones the new group finds out anew which ranks share memory, and
        how fast its links are.
        Cost: an all_gather of 16 bytes, then a message up a tree of the members, and two down.
        The new group forms without this group's switch if the switch does not take the new group within a third of the
        join timeout. The new group then uses host algorithms, and its rank 0 logs why.
        Raises RendezvousError if a member fails, or this group does; SwitchError for another switch than this group's.
        """
        absent = np.iinfo(np.int64).min
        everyone = self.all_gather(np.array([absent if color is None else color, key], np.int64))
        if color is None:
            return None
        members = np.flatnonzero(everyone[:, 0] == color)
        ranks = members[np.argsort(everyone[members, 1], kind="stable")].tolist()
        meeting = self.group.meeting(ranks, store_host=self._store_host)
        return Communicator(
            meeting,
            meeting.rank,
            meeting.size,
            options=options or self.group.options,
            timeout_s=self.group.timeout_s if timeout_s is None else timeout_s,
            join_timeout_s=self._join_timeout_s,
            store_host=self._store_host,
        )

    @property
    def generations(self) -> Generations:
        """The groups of this rank, one after the other: what `netfold.torch` needs to use the group of now."""
        return self._generations

    @property
    def handle(self) -> str:
        """This rank's end, for `reconfigure` on any rank. Pass it on as a secret; it stays the same until `close`."""
        return self._generations.handle

    @property
    def endpoint(self) -> Endpoint:
        """This rank's end for requests of other members between and beside groups (bootstrap/endpoint.py)."""
        return self._generations.endpoint

    @property
    def handles(self) -> tuple[str, ...]:
        """The handles of the ranks of the group; of the last one, where this rank is in none now."""
        return self._generations.handles

    @property
    def options(self) -> Options:
        """Of the next group that is given none of its own."""
        return self._generations.options

    def reconfigure(
        self,
        uuid: int | str,
        handles: Collection[str],
        *,
        timeout_s: float | None = None,
        options: Options | None = None,
    ) -> None:
        """Leave the group, and form the one of these members, without a store. All of them call this.

        uuid: names the new group; it must be new on every member's communicator, and the same on all.
        handles: of all members, this rank's too. The rank is the place in a list; a set is sorted first.
        timeout_s: by then all members must have called; default: join_timeout_s.
        options: of this new group alone; default: this communicator's. Those of the listener and the handle stay:
        transport, security, secret_file, interface, ports.
        Operations under way fail, on the ranks of the former group that do not call, too: this rank has left it.
        If the group does not form, this rank is in no group; call again with another uuid.
        Cost: the start-up of a group.

        Raises ValueError, with the former group untouched, for handles that can form no group: a member named twice,
        this rank not named, another version, security or secret file; and for options that this group cannot have.
        RendezvousError for a uuid that was used before, for a member that died, gave up, forms another group or did not
        call; its `rank` is the new rank of that member. SwitchError, on every member, where the switch does not take
        the group within a third of the time, and no member was in a group with this switch. Else the group forms
        without the switch, uses host algorithms, and rank 0 logs why.
        """
        try:
            self._generations.reconfigure(uuid, handles, self._timeout_s, timeout_s, options)
        finally:
            self.group = self._generations.group or no_group(self._generations)
        self._options = self.group.options  # for `split`

    def shrink(self, gone: Sequence[int], *, uuid: int | str | None = None, timeout_s: float | None = None) -> None:
        """`reconfigure` with the ranks of the group that are not `gone`, in their order. Each of them calls this.

        gone: ranks of this group, or of the last one where this rank is in none now. The callers must agree on them.
        uuid: default: one that depends on the last group and on `gone`. A second try with the same ranks needs one.
        """
        made, left = self._generations.survivors(gone)
        self.reconfigure(made if uuid is None else uuid, left, timeout_s=timeout_s)

    def register(self, array: Any) -> Registration:
        """Keep `array`'s memory registered with the fabric, so that collectives on it, or on parts of it, need not.

        The registration ends with its `close`, or with a `with` block. Until then it keeps the memory alive, and the
        array must not be resized. Without a fabric this does nothing. The first collective pays for the registration.
        """
        view = array_view(array, writable=True)
        return Registration(view.owner, self.group.lease(view.region))

    def close(self) -> None:
        """Leave the group without waiting for other ranks. Operations under way fail. Idempotent."""
        self._generations.close()

    def __enter__(self) -> Communicator:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is not None and self._generations.group is not None:
            self.group.abort(f"{type(error).__name__}: {error}")  # other ranks get the reason
        self.close()
