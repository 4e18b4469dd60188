"""One rank's end through all of its groups: leave one, and form the next over handles, without a store.

    handle       names this rank's end to others. It stays the same for all groups (bootstrap/handle.py)
    reconfigure  every member calls it with the same uuid and the same handles, and they are the next group
    shrink       the same, with the handles of those who are left, which each rank knows from the start

A uuid is used once. The group that was ends first: its operations under way fail, also if the next group does not
form. This rank is then in no group, and `reconfigure` may be called again with another uuid.
"""

from __future__ import annotations

import contextlib
import hashlib
import secrets
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, cast

from netfold.bootstrap import handle, regroup, rendezvous
from netfold.bootstrap.addresses import own_interfaces
from netfold.bootstrap.endpoint import Endpoint
from netfold.bootstrap.handle import in_order as in_order
from netfold.bootstrap.listener import acquire_listener
from netfold.bootstrap.regroup import Proposal
from netfold.bootstrap.shm_discovery import host_identity
from netfold.communicator.group import Group
from netfold.communicator.meeting import HandleMeeting
from netfold.errors import GroupAborted
from netfold.options import Options, timeout_seconds
from netfold.switch_protocol.control_messages import format_endpoint

# The listener, and what a handle says, stay the same for all groups.
_OF_THE_ENDPOINT = ("transport", "security", "secret_file", "interface", "ports")


class Generations:
    """The groups of one rank, one after the other. Owns the endpoint and the group of now, until `close`."""

    def __init__(self, group: Group | None, endpoint: Endpoint, options: Options | None, join_timeout_s: float) -> None:
        """group: None for a rank that is in no group yet. endpoint: one reference, which this object releases."""
        self.group = group
        self._handles: Callable[[], tuple[str, ...]] = tuple  # of the ranks of the last group that formed
        self.closed = False
        self.endpoint, self._options, self._join_timeout_s = endpoint, options, timeout_seconds(join_timeout_s)
        self._last_rank = 0
        self._last_switch: str | None = None
        # Re-entrant, for a signal handler that closes. A close takes the reference, so that no second one releases it.
        self._lock = threading.RLock()
        self._references = [endpoint]
        if group is not None:
            self._formed(group)

    @property
    def handles(self) -> tuple[str, ...]:
        """Of the ranks of the last group that formed. Made when first read: they take 25 us a rank."""
        return self._handles()

    @classmethod
    def of(cls, group: Group, join_timeout_s: float) -> Generations:
        """Begin with a group, which this object owns from here on."""
        return cls(group, group.endpoint.retain(), group.options, join_timeout_s)

    @classmethod
    def outside(cls, options: Options | None, join_timeout_s: float, store_host: str | None) -> Generations:
        """Begin in no group. store_host: a host that the first interface should reach.

        Raises ValueError for options that no group can have; RendezvousError where this process cannot listen.
        """
        resolved = (options or Options()).resolved()
        rendezvous.check_options(resolved, 1)
        interfaces = own_interfaces(resolved, store_host)
        listener = acquire_listener(
            0, interfaces.hosts, resolved.port_range(), time.monotonic() + timeout_seconds(join_timeout_s)
        )
        made = handle.make(
            secrets.token_bytes(32),
            secrets.token_bytes(32),
            [format_endpoint(host, listener.port) for host in interfaces.hosts],
            rails=interfaces.rails,
            fabric=resolved.fabric,
            host=host_identity() if resolved.shares_memory else "",
            security_level=str(resolved.security),
            secret_file=resolved.secret_file,
        )
        return cls(None, Endpoint(made, listener, interfaces), resolved, join_timeout_s)

    @property
    def handle(self) -> str:
        return self.endpoint.handle.text

    @property
    def options(self) -> Options:
        """Of the next group, unless it is given its own."""
        return (self._options or Options()).resolved()

    def reconfigure(
        self,
        uuid: int | str,
        handles: Collection[str],
        group_timeout_s: float,
        timeout_s: float | None = None,
        options: Options | None = None,
        job_ranks: Sequence[int] = (),
    ) -> Group:
        """Leave the group, and form the one of these handles. See `Communicator.reconfigure`.

        group_timeout_s: of the new group's operations.
        options: of the new group alone.
        job_ranks: as `Group`'s.
        """
        with self._lock:
            if self.closed:
                raise ValueError("this communicator was closed")
            deadline = time.monotonic() + timeout_seconds(timeout_s, self._join_timeout_s)
            options = self._options_with(options)
            ordered = in_order(handles)
            proposal = regroup.propose(self.endpoint.handle, str(uuid), ordered, options.secret_file)
            rendezvous.check_options(options, len(ordered))
            self.endpoint.check_unused(proposal.uuid)
            self._leave(f"it is reconfigured, as {uuid} of {len(ordered)} members")
            with self._attempt(proposal):
                group = Group(
                    HandleMeeting(proposal, self.endpoint, self._last_switch),
                    proposal.rank,
                    len(ordered),
                    options=options,
                    timeout_s=group_timeout_s,
                    join_timeout_s=max(0.001, deadline - time.monotonic()),
                    job_ranks=job_ranks,
                )
            self._formed(group)
            if not self._references:  # a signal handler of this thread has closed it
                group.close()
                raise ValueError("this communicator was closed")
            return group

    def _options_with(self, options: Options | None) -> Options:
        """Resolve the next group's options. ValueError where the endpoint would have to be another one."""
        own = self.options
        if options is None:
            return own
        options = options.resolved()
        for name in _OF_THE_ENDPOINT:
            if getattr(options, name) != getattr(own, name):
                raise ValueError(
                    f"{name}={getattr(options, name)!r} in a group of this communicator, whose handle was made with "
                    f"{name}={getattr(own, name)!r}: that takes a new communicator"
                )
        return options

    @contextlib.contextmanager
    def _attempt(self, proposal: Proposal) -> Iterator[None]:
        """Other members that ask learn how this ends."""
        try:
            yield
        except BaseException as error:
            self.endpoint.end(proposal.uuid, error)
            raise
        self.endpoint.end(proposal.uuid, None)

    def survivors(self, gone: Sequence[int]) -> tuple[str, list[str]]:
        """A uuid and the handles of the last group's ranks that are not gone. All ranks that agree on `gone` get these.

        ValueError for a rank that was not in the group, and where this rank is gone itself.
        """
        handles = self.handles
        unknown = [rank for rank in gone if not 0 <= rank < len(handles)]
        if unknown or not gone:
            raise ValueError(f"shrink: {unknown or 'no rank'} of a group of {len(handles)}; which ranks are gone?")
        if self._last_rank in gone:
            raise ValueError(f"shrink: rank {self._last_rank} is this rank, which is not gone")
        left = [each for rank, each in enumerate(handles) if rank not in gone]
        digest = hashlib.sha256("\n".join([self._name, *map(str, sorted(set(gone)))]).encode()).hexdigest()
        return f"shrink-{digest[:16]}", left

    def close(self) -> None:
        """Leave the group, and refuse later ones. Idempotent."""
        with self._lock:
            self.closed = True
        if self.group is not None:
            self.group.close()
        with contextlib.suppress(IndexError):
            self._references.pop().release()

    def refusal(self) -> Exception:
        """The error for a use without a group."""
        if self.closed:
            return ValueError("this group was closed")
        return GroupAborted("this communicator is in no group: `reconfigure` forms one")

    def _formed(self, group: Group) -> None:
        self.group, self._handles, self._last_rank, self._name = group, group.all_handles, group.rank, group.name
        self._last_switch = group.options.switch

    def _leave(self, reason: str) -> None:
        group, self.group = self.group, None
        if group is not None:
            group.close(reason, in_background=True)


class _NoGroup:
    """In the place of a group: every other use raises. So operations of a group need not ask whether there is one."""

    job_ranks: Sequence[int] = ()
    failure = None
    over_fabric = False
    shares_buckets = False
    collectives_submitted = 0

    def __init__(self, generations: Generations) -> None:
        self._generations = generations

    def __getattr__(self, name: str) -> Any:
        raise self._generations.refusal()

    def abort(self, reason: str) -> None: ...

    def lose(self, rank: int, reason: str) -> None: ...

    def close(self, reason: str | None = None) -> None: ...


def no_group(generations: Generations) -> Group:
    """For a rank that is in no group."""
    return cast(Group, _NoGroup(generations))


def outside_group(generations: Generations, rank: int, size: int, timeout_s: float) -> Group:
    """For a rank that was given a number before it is in a group, as torch does."""
    group: Any = _NoGroup(generations)
    group.rank, group.size, group.timeout_s = rank, size, timeout_s
    return cast(Group, group)
