"""`env://` under mpirun and srun: where torch finds RANK and the rest unset, their own variables say as much.

torch raises then. What it does where its variables are there, torchrun's above all, stays its own: so this changes no
script that ran before. Rank 0 serves torch's store on whichever port is free; the others hear of it over the store that
a `Communicator` meets by (bootstrap/launchers.py), which is there for the job alone.
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

_Meeting = Iterator[tuple[Store, int, int]]
_TORCHS = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

# init_process_group may be called again after destroy_process_group: every rank counts alike.
_meetings = itertools.count(1)
# Where it was last.
_host: str | None = None


def env_rendezvous(torchs: Callable[..., _Meeting], url: str, **options: Any) -> _Meeting:
    """torch's own handler of env://, or ours where its variables are not all there and a launcher's are."""
    complete = all(os.environ.get(name) for name in _TORCHS)
    if complete or "rank" in parse_qs(urlparse(url).query) or not is_launched():
        yield from torchs(url, **options)
        return
    global _host
    place = placement()
    _host = place.host
    timeout = options.get("timeout", default_pg_timeout)
    seconds = timeout.total_seconds()
    board = process_store(place.host, place.port, place.job, rank=place.rank, timeout_s=seconds)
    key = f"torch's store {next(_meetings)}"
    if place.rank == 0:
        store = TCPStore(place.host, 0, place.size, is_master=True, timeout=timeout, wait_for_workers=False)
        board.set(key, str(store.port).encode())
    else:
        port = int(board.get(key, seconds))
        store = TCPStore(place.host, port, place.size, is_master=False, timeout=timeout, wait_for_workers=False)
    yield store, place.rank, place.size
    raise RuntimeError("ranks that mpirun or srun started cannot meet a second time by env://")


def store_host() -> str | None:
    """The host of the rendezvous; None where nobody says."""
    return os.environ.get("MASTER_ADDR") or _host
