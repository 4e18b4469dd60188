"""A libfabric that is absent, too old or another library, or that locks no memory: an error on every rank.

A library stands in for the real one by its soname: `odd_libfabric.c`, loaded before netfold asks for libfabric.so.1.
"""

from __future__ import annotations

import ctypes
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fabrics import real_library
from load import seconds
from ranks import run_ranks, values

from netfold import Communicator, FileStore, Options
from netfold._native import fabric

pytestmark = pytest.mark.native

SOURCE = Path(__file__).with_name("odd_libfabric.c")
LOCKABLE_KIB = 64
TRANSPORT = Path(__file__).parents[3] / "core" / "native" / "transport"
# Calls everything that libfabric.hpp declares.
CALLS_ALL = """\
#include <netfold/transport/fabric/libfabric.hpp>
#include <cstdio>
namespace fabric = netfold::transport::fabric;
template <class Call>
void told(Call call) {
  try {
    call();
  } catch (const fabric::Error& error) {
    std::puts(error.what());
  }
}
int main() {
  told([] { fabric::library_version(); });
  told([] { fabric::list_providers(); });
  told([] { fabric::open_endpoint("tcp", "127.0.0.1", 0); });
}
"""


@pytest.fixture
def headers() -> None:
    """Not at import, which ranks do too: asking for a version loads the real library."""
    try:
        fabric.version()
    except fabric.FabricError as error:
        if "headers" in str(error):
            pytest.skip(f"this build knows no libfabric, whichever library there is: {error}")


def compile_with(*words: str) -> None:
    """Built by the compiler that built netfold."""
    told = subprocess.run([os.environ.get("CXX", "c++"), *words], capture_output=True, text=True, timeout=seconds(60))
    assert told.returncode == 0, told.stderr


def stand_in(folder: Path, *words: str) -> Path:
    made = folder / "libfabric.so.1"
    compile_with("-x", "c", "-shared", "-fPIC", "-Wl,-soname,libfabric.so.1", *words, str(SOURCE), "-o", str(made))
    return made


def refused(rank: int, size: int, folder: str, library: str) -> Any:
    """Rank 1 alone has that library."""
    if rank == 1:
        ctypes.CDLL(library)
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (LOCKABLE_KIB << 10, 2 * LOCKABLE_KIB << 10))
    began = time.monotonic()
    options = Options(probe="off", transport="fabric:tcp", interface="127.0.0.1")
    try:
        Communicator(FileStore(folder), rank, size, options=options, join_timeout_s=20).close()
    except Exception as error:
        return time.monotonic() - began, f"{type(error).__name__} {getattr(error, 'rank', None)}: {error}"
    return 0, "nothing went wrong"


def has_a_large_sum(rank: int, size: int, folder: str, library: str) -> Any:
    if rank == 1:
        ctypes.CDLL(library)
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (LOCKABLE_KIB << 10, 2 * LOCKABLE_KIB << 10))
    options = Options(probe="off", transport="fabric:tcp", interface="127.0.0.1", algorithm="ring")
    began = 0.0
    try:
        with Communicator(FileStore(folder), rank, size, options=options, timeout_s=20, join_timeout_s=20) as group:
            group.all_reduce(np.ones(1000))
            began = time.monotonic()
            group.all_reduce(np.ones(4 << 20))
    except Exception as error:
        return time.monotonic() - began, f"{type(error).__name__} {getattr(error, 'rank', None)}: {error}"
    return 0, "nothing went wrong"


def hear(library: Path) -> str:
    """The error of both ranks, which is the same."""
    (first_s, first), (second_s, second) = values(run_ranks(refused, 2, str(library)))
    assert max(first_s, second_s) < seconds(5)
    assert first == second
    head = "RendezvousError 1: rank 1 cannot use the fabric 'tcp' (NETFOLD_TRANSPORT): "
    assert first.startswith(head), first
    return first.removeprefix(head)


@pytest.mark.usefixtures("headers")
def test_a_libfabric_that_is_too_old_says_which_it_is_and_which_is_needed(tmp_path: Path) -> None:
    assert hear(stand_in(tmp_path, "-DOLD")) == "libfabric 1.11 is too old; netfold needs 1.17 or newer"


@pytest.mark.usefixtures("headers")
def test_a_library_that_is_not_libfabric_is_refused_with_the_missing_symbol(tmp_path: Path) -> None:
    assert hear(stand_in(tmp_path)) == "libfabric.so.1 has no fi_version; it is not libfabric 1.17"


def test_a_registration_that_is_refused_names_the_limit_and_how_to_raise_it(tmp_path: Path) -> None:
    said = hear(stand_in(tmp_path, f'-DREAL="{real_library()}"'))
    assert said.startswith("provider tcp;ofi_rxm cannot register "), said
    limit = "this process may lock 64 KiB of memory (RLIMIT_MEMLOCK): raise it with `ulimit -l 128`, beyond that with "
    assert f" bytes of memory: Cannot allocate memory; {limit}" in said
    assert "limits.conf" in said and "LimitMEMLOCK" in said, said


def test_a_tensor_that_cannot_be_registered_ends_the_group_with_the_limit(tmp_path: Path) -> None:
    """During a job, and without a silent change of transport."""
    library = stand_in(tmp_path, f'-DREAL="{real_library()}"', "-DWRITES")
    (first_s, first), (second_s, second) = values(run_ranks(has_a_large_sum, 2, str(library)))
    assert max(first_s, second_s) < seconds(5)
    assert "rank 0 is not reached any more" in second and "; provider tcp;ofi_rxm cannot register " in second, second
    assert "may lock 64 KiB of memory (RLIMIT_MEMLOCK)" in second, second
    assert first.startswith("PeerLost 1: "), first


def test_a_build_without_libfabrics_headers_says_what_to_install(tmp_path: Path) -> None:
    main, made = tmp_path / "main.cpp", tmp_path / "main"
    main.write_text(CALLS_ALL)
    sources = [str(main), str(TRANSPORT / "fabric" / "libfabric_stub.cpp")]
    include = f"-I{TRANSPORT / 'include'}"
    compile_with("-std=c++20", "-O0", include, *sources, "-o", str(made))
    said = subprocess.run(
        [str(made)], capture_output=True, text=True, check=True, timeout=seconds(10)
    ).stdout.splitlines()
    sentence = "this netfold was built without libfabric's headers; install them (apt install libfabric-dev) and build "
    assert said == [sentence + "it again"] * 3


@pytest.mark.usefixtures("headers")
def test_a_libfabric_that_cannot_be_loaded_says_how_to_get_one(tmp_path: Path) -> None:
    (tmp_path / "libfabric.so.1").write_text("no library\n" * 100)
    environment = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path)}
    asked = [sys.executable, "-m", "netfold.cli", "doctor", "fabric"]
    told = subprocess.run(asked, env=environment, capture_output=True, text=True, timeout=seconds(60))
    assert told.returncode == 1, told.stderr
    assert told.stdout.startswith("no fabric: libfabric cannot be opened ("), told.stdout
    assert "install it (apt install libfabric1) or name its folder in LD_LIBRARY_PATH" in told.stdout
