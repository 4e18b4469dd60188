"""torch's stores with the interface of `netfold.communicator.Store`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import FileStore, PrefixStore, Store

from netfold.errors import PeerLost

# A shorter wait only asks whether a key is there.
_SHORT_S = 0.01


def store_lost(what: str, error: Exception) -> PeerLost:
    """The error for an operation that torch's store no longer answers; torch's own says no more than "Broken pipe".

    what: the rank and the operation.
    """
    by_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    server = "torchrun's agent on the first host" if by_agent else "rank 0 of the job"
    return PeerLost(
        f"{what}: torch's store no longer answers ({error}): {server}, which serves it, has ended; "
        "look at its log first",
        rank=None if by_agent else 0,
    )


class TorchStore:
    """A `netfold.communicator.Store` over a torch store."""

    def __init__(self, store: Store) -> None:
        self._store = store
        _keep_private(store)
        asked: Any = store  # as in `set_all`
        self._takes_many = bool(asked.has_extended_api())

    def set(self, key: str, value: bytes) -> None:
        self._store.set(key, value)  # type: ignore[arg-type]  # bytes are taken; the stub says str

    def get(self, key: str, timeout_s: float) -> bytes:
        # torch prints a warning for a wait that ends without the key.
        if timeout_s < _SHORT_S and not self._store.check([key]):
            raise TimeoutError(f"{key} is not set")
        try:
            self._store.wait([key], timedelta(seconds=max(0.001, timeout_s)))
        except RuntimeError as error:  # DistStoreError: not set in time, or the store is gone
            raise TimeoutError(f"{key} was not set within {timeout_s:.1f} s: {error}") from None
        return bytes(self._store.get(key))

    def add(self, key: str, amount: int) -> int:
        return int(self._store.add(key, amount))

    def get_first(self, keys: Sequence[str], timeout_s: float) -> list[bytes]:
        first, several = self.get(keys[0], timeout_s), list(keys)
        if len(several) == 1 or not self._takes_many or not self._store.check(several):
            return [first]
        return [bytes(each) for each in self._store.multi_get(several)]

    def set_all(self, values: Mapping[str, bytes]) -> None:
        if self._takes_many:
            many: Any = self._store  # the stub lacks the method
            many.multi_set(list(values), list(values.values()))
            return
        for key, value in values.items():
            self.set(key, value)


def _keep_private(store: Store) -> None:
    """Let only this user read the file of torch's FileStore, which torch opens to all: it will hold the job's secret.

    Raises PermissionError where the file is another user's.
    """
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    if isinstance(store, FileStore):
        file: Any = store  # the stub lacks the path
        os.close(os.open(file.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        os.chmod(file.path, 0o600)
