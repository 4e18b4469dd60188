"""The process's MPI as a fabric, for NETFOLD_TRANSPORT=mpi: what is done once, by mpi4py.

mpi4py makes a communicator of our own and ends MPI; if nobody has begun it, we do, for any thread. What the data path
needs to know of this MPI mpi4py lends (native/transport/mpi); from then on no Python is in the way. Everything that
ranks must know of each other before goes over the connections of the handshake.

One communicator serves all groups among its ranks. Making one blocks until all of them do, and no MPI has a way to give
up: so a thread of its own waits for it, and we for the thread, as long as there is time.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import socket
import sys
import threading
import time
import zlib
from collections.abc import Sequence
from typing import Any

from netfold._native import mpi
from netfold.errors import RendezvousError
from netfold.switch_protocol import control_messages

# By ranks of MPI's world, in order. Never closed before the process ends.
_Members = tuple[int, ...]
_ports: dict[_Members, Any] = {}
# Groups may be made by several threads, in another order on every rank: each set of ranks is waited for apart.
_making: dict[_Members, threading.Lock] = {}
_lock = threading.Lock()


def port_of(rank: int, sockets: Sequence[socket.socket | None], deadline: float) -> Any:
    """This process's port for the group that `sockets` lead to, one to each rank, proved.

    Raises RendezvousError: no MPI here, a thread level that is too low, ranks of another MPI, or not in time.
    """
    peers = {peer: stream for peer, stream in enumerate(sockets) if stream is not None}
    for stream in peers.values():
        stream.settimeout(max(0.001, deadline - time.monotonic()))
    try:
        with _lock:
            api = _begun(deadline)
    except RuntimeError as error:
        for stream in peers.values():
            with contextlib.suppress(OSError):  # who has left need not hear it
                control_messages.send(stream, {"type": "mpi", "error": str(error)})
        raise RendezvousError(f"rank {rank} cannot go over MPI (NETFOLD_TRANSPORT): {error}", rank=rank) from None
    world = api.COMM_WORLD
    version = _version(api)
    with _lock:
        known = set(_ports)
    mine = {"type": "mpi", "error": "", "rank": world.rank, "size": world.size, "version": version}
    mine["known"] = sorted(known)
    places = {rank: world.rank}
    peer = rank
    try:
        for peer, stream in peers.items():  # noqa: B007
            control_messages.send(stream, mine)
        for peer, stream in peers.items():
            theirs = control_messages.receive(stream)
            if theirs["error"]:
                raise RendezvousError(
                    f"rank {peer} cannot go over MPI (NETFOLD_TRANSPORT): {theirs['error']}", rank=peer
                )
            if (theirs["version"], theirs["size"]) != (version, world.size):
                raise RendezvousError(
                    f"rank {rank} has {version} with {world.size} processes, rank {peer} {theirs['version']} with "
                    f"{theirs['size']}: all ranks need one mpirun and its MPI (MPI4PY_LIBMPI)",
                    rank=peer,
                )
            places[peer] = theirs["rank"]
            known &= {tuple(ranks) for ranks in theirs["known"]}
    except (OSError, EOFError) as error:
        raise RendezvousError(
            f"rank {rank}: rank {peer} left while the ranks told each other of their MPI ({error}); see its own output",
            rank=peer,
        ) from None
    members = tuple(sorted(places.values()))
    if len(set(members)) < len(places):
        raise RendezvousError(
            f"rank {rank}: the {len(places)} ranks of this group are {len(set(members))} in MPI's world of "
            f"{world.size}: they need one mpirun, and mpi4py its MPI (here {version}; MPI4PY_LIBMPI)",
            rank=rank,
        )
    # What all have already: the same choice on every rank.
    serving = [ranks for ranks in known if set(members) <= set(ranks)]
    if serving:
        return _ports[min(serving, key=lambda ranks: (len(ranks), ranks))]
    with _lock:
        making = _making.setdefault(members, threading.Lock())
    with making:
        if members not in _ports:
            port = _open(api, rank, members, deadline)
            with _lock:
                _ports[members] = port
        return _ports[members]


def _begun(deadline: float) -> Any:
    """mpi4py's MPI, begun, for any thread. RuntimeError says why not."""
    try:
        import mpi4py

        # Importing begins MPI, which waits for all ranks, and mpi4py holds the interpreter's lock meanwhile: the others
        # may be waiting for our store. So we begin it ourselves, unless the program has, or will.
        begins = "mpi4py.MPI" not in sys.modules and mpi4py.rc.initialize
        if begins:
            mpi4py.rc.initialize, mpi4py.rc.finalize = False, True
        try:
            from mpi4py import MPI
        finally:
            if begins:
                mpi4py.rc.initialize = True
    except (ImportError, RuntimeError) as error:
        said = " ".join(str(error).split())
        raise RuntimeError(f"it takes mpi4py, and an MPI beside it (pip install 'netfold[mpi]'): {said}") from None
    if begins and not MPI.Is_initialized():
        _begin(MPI, deadline)
    if not MPI.Is_initialized() or MPI.Is_finalized():
        raise RuntimeError("its MPI was ended, or mpi4py told not to begin it (mpi4py.rc.initialize)")
    level = MPI.Query_thread()
    if level != MPI.THREAD_MULTIPLE:
        names = {MPI.THREAD_SINGLE: "SINGLE", MPI.THREAD_FUNNELED: "FUNNELED", MPI.THREAD_SERIALIZED: "SERIALIZED"}
        raise RuntimeError(
            f"its MPI was begun with MPI_THREAD_{names[level]}, and netfold calls it beside the program: begin it with "
            "MPI_THREAD_MULTIPLE (mpi4py.rc.thread_level)"
        )
    return MPI


def _begin(api: Any, deadline: float) -> None:
    """MPI_Init_thread without the interpreter's lock, and with a deadline; the rest as mpi4py has it."""
    init = ctypes.CDLL(api.__file__).MPI_Init_thread
    thread = threading.Thread(
        target=init,
        args=(None, None, api.THREAD_MULTIPLE, ctypes.byref(ctypes.c_int())),
        name="netfold begins MPI",
        daemon=True,
    )
    thread.start()
    thread.join(max(0.001, deadline - time.monotonic()))
    if thread.is_alive():
        raise RuntimeError("it did not begin in time; did all ranks that mpirun started come to make a group?")
    if api.Is_initialized():
        for comm in (api.COMM_WORLD, api.COMM_SELF):
            comm.Set_errhandler(api.ERRORS_RETURN)


def _open(api: Any, rank: int, members: tuple[int, ...], deadline: float) -> Any:
    comm = _communicator(api, rank, members, deadline)
    comm.Set_errhandler(api.ERRORS_RETURN)
    return mpi.open_stream_mux(
        module=api.__file__,
        version=_version(api),
        handle_bytes=api._sizeof(api.Comm),
        status_bytes=api._sizeof(api.Status),
        tag_at=_place_of(api, "tag"),
        error_at=_place_of(api, "error"),
        comm=api._handleof(comm),
        byte=api._handleof(api.BYTE),
        any_source=api.ANY_SOURCE,
        any_tag=api.ANY_TAG,
        error_in_status=api.ERR_IN_STATUS,
        max_error_text=api.MAX_ERROR_STRING,
        max_tag=min(comm.Get_attr(api.TAG_UB), 2**31 - 1),
        rank=comm.rank,
    )


def _communicator(api: Any, rank: int, members: tuple[int, ...], deadline: float) -> Any:
    """Of these ranks of the world, in this order."""
    made: list[Any] = []

    def make() -> None:
        try:
            group = api.COMM_WORLD.Get_group().Incl(members)
            # Its members alone call. The tag, below the least that an MPI may allow, keeps apart who meets at once.
            made.append(api.COMM_WORLD.Create_group(group, zlib.crc32(repr(members).encode()) % 32768))
        except api.Exception as error:
            made.append(error)

    thread = threading.Thread(target=make, name="netfold meets over MPI", daemon=True)
    thread.start()
    thread.join(max(0.001, deadline - time.monotonic()))
    if not made:
        raise RendezvousError(
            f"rank {rank}: MPI did not bring the ranks {', '.join(map(str, members))} of its world together in time; "
            "are they of one mpirun, and does its fabric reach their hosts?",
            rank=rank,
        )
    if isinstance(made[0], api.Exception):
        raise RendezvousError(f"rank {rank}: MPI did not bring the ranks together: {made[0]}", rank=rank)
    return made[0]


def _place_of(api: Any, field: str) -> int:
    """Where a status has this field: ABIs differ, so it is tried."""
    status = api.Status()
    size, value = api._sizeof(status), 0x5A17
    setattr(status, field, value)
    held = ctypes.string_at(api._addressof(status), size)
    places = [at for at in range(0, size - 3, 4) if int.from_bytes(held[at : at + 4], "little") == value]
    assert len(places) == 1, held
    return places[0]


def _version(api: Any) -> str:
    """Its first line; Open MPI's goes on with who built it."""
    return " ".join(api.Get_library_version().splitlines()[0].partition(",")[0].strip("\x00").split())


# mpi4py ends MPI when Python has ended. What registers its own end later than this module, groups above all, ends
# before it.
atexit.register(mpi.leave)
