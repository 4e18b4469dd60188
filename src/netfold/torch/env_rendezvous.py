"""`env://` under mpirun and srun: if RANK and the rest are unset, use the launcher's own variables.

torch alone would raise then. If torch's variables are set (torchrun sets them), torch's handler runs unchanged, so no
working script changes. Rank 0 serves torch's store on a free port. The other ranks read the port from the store that a
`Communicator` bootstraps from (bootstrap/launchers.py), which belongs to this job alone.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import parse_qs, urlparse

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


def env_rendezvous(torch_handler: Callable[..., _Rendezvous], url: str, **options: Any) -> _Rendezvous:
    """Run torch's handler of env://, or netfold's if only a launcher's variables are complete."""
    complete = all(os.environ.get(name) for name in _TORCH_VARIABLES)
    if complete or "rank" in parse_qs(urlparse(url).query) or not is_launched():
        yield from torch_handler(url, **options)
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


def store_host() -> str | None:
    """The host of the rendezvous; None if unknown."""
    return os.environ.get("MASTER_ADDR") or _host
