"""torch's stores with the interface of netfold's, and many keys with a request."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

torch_stores = pytest.importorskip("torch._C._distributed_c10d")

from netfold.bootstrap.store import PrefixStore, get_first, set_all  # noqa: E402
from netfold.torch.store import TorchStore  # noqa: E402

pytestmark = pytest.mark.torch


def made(kind: str, folder: Path) -> Any:
    if kind == "tcp":
        return torch_stores.TCPStore("127.0.0.1", 0, 1, True, timedelta(seconds=5), False)
    return torch_stores.HashStore() if kind == "hash" else torch_stores.FileStore(str(folder / "store"), 1)


@pytest.mark.parametrize("kind", ["tcp", "hash", "file"])
def test_many_keys_are_set_and_read_as_far_as_they_are_set(kind: str, tmp_path: Path) -> None:
    store = PrefixStore(TorchStore(made(kind, tmp_path)), "of a group/")
    keys = [f"key {number}" for number in range(200)]
    set_all(store, ((key, key.encode()) for key in keys))
    found: list[bytes] = []
    while len(found) < len(keys):
        found += get_first(store, keys[len(found) :], 5)
    assert found == [key.encode() for key in keys]
    assert get_first(store, ["key 0", "a key that is not set"], 5) == [b"key 0"]
    with pytest.raises(TimeoutError):
        get_first(store, ["a key that is not set"], 0.1)


def test_other_users_cannot_read_the_secret_in_torchs_file_store(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        nested = torch_stores.PrefixStore("outer", torch_stores.PrefixStore("inner", made("file", tmp_path)))
        TorchStore(nested).set("secret", b"1")
        # Another rank's torch opens the file later.
        TorchStore(made("file", tmp_path)).set("key", b"2")
        assert (tmp_path / "store").stat().st_mode & 0o777 == 0o600
    finally:
        os.umask(before)
