"""Set up the process's MPI as a transport, for NETFOLD_TRANSPORT=mpi, through mpi4py.

mpi4py makes an own communicator, and finalizes MPI. If the program has not initialized MPI, this module does, for any
thread. The native data path (native/transport/mpi) takes handles and constants of this MPI from mpi4py, and then needs
no Python. Ranks first exchange what they must know of each other over the connections of the handshake.

One communicator serves all groups among its ranks. Creating one blocks until all its ranks do, and MPI has no timeout:
so a separate thread creates it, and the caller waits for that thread until the deadline.
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

# By ranks of MPI's world, in order. Ports are open until the process ends.
_Members = tuple[int, ...]
_ports: dict[_Members, Any] = {}
# Several threads may make groups, in another order on every rank, so each set of ranks has its own lock.
_making: dict[_Members, threading.Lock] = {}
_lock = threading.Lock()


def port_of(rank: int, sockets: Sequence[socket.socket | None], deadline: float) -> Any:
    """This process's port for a group. sockets: an authenticated connection to each other rank.

    Raises RendezvousError: no MPI here, a thread level that is too low, ranks of another MPI, or a passed deadline.
    """
    peers = {peer: stream for peer, stream in enumerate(sockets) if stream is not None}
    for stream in peers.values():
        stream.settimeout(max(0.001, deadline - time.monotonic()))
    try:
        with _lock:
            api = _initialized(deadline)
    except RuntimeError as error:
        for stream in peers.values():
            with contextlib.suppress(OSError):  # the rank has left
                control_messages.send(stream, {"type": "mpi", "error": str(error)})
        raise RendezvousError(f"rank {rank} cannot go over MPI (NETFOLD_TRANSPORT): {error}", rank=rank) from None
    world = api.COMM_WORLD
    version = _version(api)
    with _lock:
        known = set(_ports)
    own = {"type": "mpi", "error": "", "rank": world.rank, "size": world.size, "version": version}
    own["known"] = sorted(known)
    world_ranks = {rank: world.rank}
    peer = rank
    try:
        for peer, stream in peers.items():  # noqa: B007
            control_messages.send(stream, own)
        for peer, stream in peers.items():
            message = control_messages.receive(stream)
            if message["error"]:
                raise RendezvousError(
                    f"rank {peer} cannot go over MPI (NETFOLD_TRANSPORT): {message['error']}", rank=peer
                )
            if (message["version"], message["size"]) != (version, world.size):
                raise RendezvousError(
                    f"rank {rank} has {version} with {world.size} processes, rank {peer} {message['version']} with "
                    f"{message['size']}: all ranks need one mpirun and its MPI (MPI4PY_LIBMPI)",
                    rank=peer,
                )
            world_ranks[peer] = message["rank"]
            known &= {tuple(ranks) for ranks in message["known"]}
    except (OSError, EOFError) as error:
        raise RendezvousError(
            f"rank {rank}: rank {peer} left while the ranks told each other of their MPI ({error}); see its own output",
            rank=peer,
        ) from None
    members = tuple(sorted(world_ranks.values()))
    if len(set(members)) < len(world_ranks):
        raise RendezvousError(
            f"rank {rank}: the {len(world_ranks)} ranks of this group are {len(set(members))} in MPI's world of "
            f"{world.size}: they need one mpirun, and mpi4py its MPI (here {version}; MPI4PY_LIBMPI)",
            rank=rank,
        )
    # A communicator that all ranks have already: all choose the same one.
    serving = [ranks for ranks in known if set(members) <= set(ranks)]
    if serving:
        return _ports[min(serving, key=lambda ranks: (len(ranks), ranks))]
    with _lock:
        creating = _making.setdefault(members, threading.Lock())
    with creating:
        if members not in _ports:
            port = _open(api, rank, members, deadline)
            with _lock:
                _ports[members] = port
        return _ports[members]


def _initialized(deadline: float) -> Any:
    """mpi4py's MPI, initialized for any thread. RuntimeError says why not."""
    try:
        import mpi4py

        # Importing mpi4py.MPI initializes MPI, which waits for all ranks under the interpreter's lock, while other
        # ranks may wait for this process's store. So `_begin` initializes MPI, unless the program has, or will.
        begins = "mpi4py.MPI" not in sys.modules and mpi4py.rc.initialize
        if begins:
            mpi4py.rc.initialize, mpi4py.rc.finalize = False, True
        try:
            from mpi4py import MPI
        finally:
            if begins:
                mpi4py.rc.initialize = True
    except (ImportError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise RuntimeError(f"it takes mpi4py, and an MPI beside it (pip install 'netfold[mpi]'): {reason}") from None
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
    """MPI_Init_thread without the interpreter's lock and with a deadline; then the same settings as mpi4py's."""
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
        tag_at=_offset_of(api, "tag"),
        error_at=_offset_of(api, "error"),
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
    """Create a communicator of these ranks of the world, in this order."""
    results: list[Any] = []

    def create() -> None:
        try:
            group = api.COMM_WORLD.Get_group().Incl(members)
            # Only its members call. The tag separates concurrent calls, and is below every MPI's limit.
            results.append(api.COMM_WORLD.Create_group(group, zlib.crc32(repr(members).encode()) % 32768))
        except api.Exception as error:
            results.append(error)

    thread = threading.Thread(target=create, name="netfold meets over MPI", daemon=True)
    thread.start()
    thread.join(max(0.001, deadline - time.monotonic()))
    if not results:
        raise RendezvousError(
            f"rank {rank}: MPI did not bring the ranks {', '.join(map(str, members))} of its world together in time; "
            "are they of one mpirun, and does its fabric reach their hosts?",
            rank=rank,
        )
    if isinstance(results[0], api.Exception):
        raise RendezvousError(f"rank {rank}: MPI did not bring the ranks together: {results[0]}", rank=rank)
    return results[0]


def _offset_of(api: Any, field: str) -> int:
    """The offset of a field in MPI_Status, found by a write, since ABIs differ."""
    status = api.Status()
    size, value = api._sizeof(status), 0x5A17
    setattr(status, field, value)
    content = ctypes.string_at(api._addressof(status), size)
    offsets = [at for at in range(0, size - 3, 4) if int.from_bytes(content[at : at + 4], "little") == value]
    assert len(offsets) == 1, content
    return offsets[0]


def _version(api: Any) -> str:
    """The first line of the library's version, up to a comma, behind which Open MPI names the builder."""
    return " ".join(api.Get_library_version().splitlines()[0].partition(",")[0].strip("\x00").split())


# mpi4py finalizes MPI after Python's exit handlers. Exit handlers registered after this one, as those of groups, run
# before it.
atexit.register(mpi.leave)
