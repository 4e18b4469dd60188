"""Key-value stores in which ranks that do not know each other yet publish their addresses."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from netfold.options import timeout_seconds


class Store(Protocol):
    """A key-value store shared by the ranks; torch's stores fit by a small adapter in `netfold.torch`.

    One that takes many keys with a request also has `get_first(keys, timeout_s)` and `set_all(values)`, as the
    functions of these names below, for up to MAX_KEYS keys.
    """

    def set(self, key: str, value: bytes) -> None: ...

    def get(self, key: str, timeout_s: float) -> bytes:
        """Wait for the key. Raises TimeoutError."""
        ...

    def add(self, key: str, amount: int) -> int:
        """Add to a counter that starts at 0, atomically; returns the new value."""
        ...


MAX_KEYS = 128
"""Of one request."""
MAX_REQUEST_BYTES = 1 << 15
"""Of the keys and values of one request, where it has several."""


def get_first(store: Store, keys: Sequence[str], timeout_s: float) -> list[bytes]:
    """The values of the first keys, as many as are set and one request holds. Waits for the first key: TimeoutError."""
    many = getattr(store, "get_first", None)
    found: list[bytes] = many(keys[:MAX_KEYS], timeout_s) if many is not None else [store.get(keys[0], timeout_s)]
    return found


def set_all(store: Store, values: Iterable[tuple[str, bytes]]) -> None:
    """Set keys, many with one request where the store can."""
    many = getattr(store, "set_all", None)
    waiting: dict[str, bytes] = {}
    size_bytes = 0
    for key, value in values:
        if many is None:
            store.set(key, value)
            continue
        if len(waiting) == MAX_KEYS or (waiting and size_bytes + len(key) + len(value) > MAX_REQUEST_BYTES):
            many(waiting)
            waiting, size_bytes = {}, 0
        waiting[key] = value
        size_bytes += len(key) + len(value)
    if many is not None and waiting:
        many(waiting)


def release(store: Store) -> None:
    """Close a store's connections that no request uses; the next request makes one again. Nothing for other stores."""
    getattr(store, "release", lambda: None)()


class PrefixStore:
    """The keys of another store that begin with a prefix."""

    def __init__(self, store: Store, prefix: str) -> None:
        self._store = store
        self._prefix = prefix

    def set(self, key: str, value: bytes) -> None:
        self._store.set(self._prefix + key, value)

    def get(self, key: str, timeout_s: float) -> bytes:
        return self._store.get(self._prefix + key, timeout_s)

    def add(self, key: str, amount: int) -> int:
        return self._store.add(self._prefix + key, amount)

    def get_first(self, keys: Sequence[str], timeout_s: float) -> list[bytes]:
        return get_first(self._store, [self._prefix + key for key in keys], timeout_s)

    def set_all(self, values: Mapping[str, bytes]) -> None:
        set_all(self._store, ((self._prefix + key, value) for key, value in values.items()))

    def release(self) -> None:
        release(self._store)


class FileStore:
    """A store in a folder that every rank can access. It serves one run of one group; its creator removes it.

    It holds the job's secret, so only this user can read its files, and a folder that it makes.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._folder = Path(folder)
        self._folder.parent.mkdir(parents=True, exist_ok=True)
        self._folder.mkdir(mode=0o700, exist_ok=True)

    def set(self, key: str, value: bytes) -> None:
        path = self._path(key)
        draft = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}.draft")
        with open(draft, "wb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
            file.write(value)
        draft.rename(path)  # readers see the whole value or none

    def get(self, key: str, timeout_s: float) -> bytes:
        deadline = time.monotonic() + timeout_seconds(timeout_s)
        while True:
            try:
                return self._path(key).read_bytes()
            except FileNotFoundError:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{key} was not set within {timeout_s:.1f} s") from None
                time.sleep(0.005)

    def add(self, key: str, amount: int) -> int:
        # One empty file an increment: creating exclusively is atomic on every file system.
        total = 0
        for _ in range(amount):
            while True:
                total += 1
                try:
                    self._path(f"{key}.{total}").touch(exist_ok=False)
                    break
                except FileExistsError:
                    continue
        return total

    def _path(self, key: str) -> Path:
        return self._folder / key.replace("/", "~")
