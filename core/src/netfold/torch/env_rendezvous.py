"""`env://` under mpirun and srun: if RANK and the rest are unset, use the launcher's own variables.

torch alone would raise then. If torch's variables are set (torchrun sets them), torch's handler runs, so no working
script changes. Rank 0 serves torch's store on a free port. The other ranks read the port from the store that a
`Communicator` bootstraps from (bootstrap/launchers.py), which belongs to this job alone.

A process may destroy its world and make it again. torch's rank 0 then serves a new store at the same address. A rank
that is faster than rank 0 would connect to the former one, which rank 0 is about to close. So such a rank first waits
for the end of the former store (`_FormerStore`).
"""

from __future__ import annotations

import itertools
import os
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import parse_qs, urlparse

import torch.distributed as dist
from torch._C._distributed_c10d import Store, TCPStore
from torch.distributed.constants import default_pg_timeout

from netfold.bootstrap.launchers import is_launched, placement
from netfold.bootstrap.tcp_store import process_store

_Rendezvous = Iterator[tuple[Store, int, int]]
_TORCH_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

# init_process_group may be called again after destroy_process_group. All ranks count the same calls.
_rendezvous_number = itertools.count(1)
# The host of the last rendezvous.
_host: str | None = None
# How often a rank looks whether the former store has ended.
_LOOK_S = 0.005
# How often it asks the former store whether rank 0 goes on with it. Most stores end sooner.
_ASK_S = 0.25
# An address that accepted a connection a moment ago accepts the next within this time.
_CONNECT_S = 5.0


def env_rendezvous(torch_handler: Callable[..., _Rendezvous], url: str, **options: Any) -> _Rendezvous:
    """Run torch's handler of env://, or netfold's if only a launcher's variables are complete."""
    complete = all(os.environ.get(name) for name in _TORCH_VARIABLES)
    if complete or "rank" in parse_qs(urlparse(url).query) or not is_launched():
        yield from _at_one_address(torch_handler, url, options)
        return
    global _host
    place = placement()
    _host = place.host
    timeout = options.get("timeout", default_pg_timeout)
    seconds = timeout.total_seconds()
    bootstrap_store = process_store(place, seconds)
    key = f"torch's store {next(_rendezvous_number)}"
    if place.rank == 0:
        store = TCPStore(place.host, 0, place.size, is_master=True, timeout=timeout, wait_for_workers=False)
        bootstrap_store.set(key, str(store.port).encode())
    else:
        port = int(bootstrap_store.get(key, seconds))
        store = TCPStore(place.host, port, place.size, is_master=False, timeout=timeout, wait_for_workers=False)
    yield store, place.rank, place.size
    raise RuntimeError("ranks that mpirun or srun started cannot repeat one rendezvous by env://")


def _at_one_address(torch_handler: Callable[..., _Rendezvous], url: str, options: dict[str, Any]) -> _Rendezvous:
    """Run torch's handler, once rank 0 has left the former store."""
    global _former
    number = f"netfold/rendezvous/{next(_rendezvous_number)}"
    if _former is not None:
        _former.wait_for_end(number, options.get("timeout", default_pg_timeout).total_seconds())
        _former = None
    rendezvous = torch_handler(url, **options)
    store, rank, size = next(rendezvous)
    if rank == 0:
        store.set(number, "begun")
    # torchrun's agent serves one store to all rendezvous of the job, behind a prefix.
    elif isinstance(store, TCPStore) and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        _former = _FormerStore(store)
    yield store, rank, size
    yield from rendezvous


class _FormerStore:
    """The store of the last rendezvous, on a rank other than 0."""

    def __init__(self, store: TCPStore) -> None:
        self._store = store
        # A connection of its own: torch's store logs a trace for a connection that ends.
        self._connection = socket.create_connection((store.host, store.port), _CONNECT_S)
        self._connection.setblocking(False)

    def wait_for_end(self, number: str, timeout_s: float) -> None:
        """Wait until rank 0 has closed the store, or goes on with it in the rendezvous `number`.

        Rank 0 goes on with a store that something in its process still refers to. Returns after the timeout, too: what
        torch says about a rank 0 that does not come is better than what could be said here.
        """
        now = time.monotonic()
        deadline, ask = now + timeout_s, now + _ASK_S
        with self._connection:
            while not self._closed() and now < deadline:
                if now >= ask:
                    ask = now + _ASK_S
                    try:
                        if self._store.check([number]):
                            return
                    except dist.DistNetworkError:  # closed meanwhile
                        return
                time.sleep(_LOOK_S)
                now = time.monotonic()

    def _closed(self) -> bool:
        try:
            return not self._connection.recv(1)
        except BlockingIOError:
            return False
        except OSError:  # reset
            return True


_former: _FormerStore | None = None


def store_host() -> str | None:
    """The host of the rendezvous; None if unknown."""
    return os.environ.get("MASTER_ADDR") or _host
