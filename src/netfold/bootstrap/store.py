"""Key-value stores in which ranks that do not know each other yet publish their addresses."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Protocol


class Store(Protocol):
    """A key-value store shared by the ranks; torch's stores fit by a small adapter in `netfold.torch`."""

    def set(self, key: str, value: bytes) -> None: ...

    def get(self, key: str, timeout_s: float) -> bytes:
        """Wait for the key. Raises TimeoutError."""
        ...

    def add(self, key: str, amount: int) -> int:
        """Add to a counter that starts at 0, atomically; returns the new value."""
        ...


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

    def release(self) -> None:
        release(self._store)


class FileStore:
    """A store in a folder that every rank can access. It serves one run of one group; its creator removes it."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._folder = Path(folder)
        self._folder.mkdir(parents=True, exist_ok=True)

    def set(self, key: str, value: bytes) -> None:
        path = self._path(key)
        draft = path.with_name(f"{path.name}.{os.getpid()}.draft")
        draft.write_bytes(value)
        draft.rename(path)  # readers see the whole value or none

    def get(self, key: str, timeout_s: float) -> bytes:
        deadline = time.monotonic() + timeout_s
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
