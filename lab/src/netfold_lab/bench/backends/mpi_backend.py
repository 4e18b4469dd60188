"""The backend MPI, through mpi4py, on NumPy arrays. The variable MPI4PY_LIBMPI names the MPI (see mpi_peers.py)."""

from collections.abc import Callable
from typing import Any, cast

import mpi4py
import numpy as np
from mpi4py import MPI

from netfold_lab.bench.backends import BackendName, Buffer, RefusedError, ping_pong
from netfold_lab.bench.collectives import ROOT, Collective, partner
from netfold_lab.bench.sizes import parse_dtype

_OPS = {"sum": MPI.SUM, "prod": MPI.PROD, "min": MPI.MIN, "max": MPI.MAX}


class MpiWorld:
    def __init__(self, name: str) -> None:
        self.rank: int = MPI.COMM_WORLD.Get_rank()
        self.size: int = MPI.COMM_WORLD.Get_size()
        # The first line, without the builder's name that Open MPI adds.
        version = MPI.Get_library_version().splitlines()[0].partition(",")[0].strip("\x00")
        self.versions = {"mpi4py": mpi4py.__version__, name: " ".join(version.split())}

    def backend(self, name: BackendName) -> "MpiBackend":
        takes_part = self.rank < (name.ranks or self.size)
        comm = MPI.COMM_WORLD.Split(0 if takes_part else MPI.UNDEFINED, self.rank)
        return MpiBackend(cast(MPI.Intracomm, comm), in_place=name.variant != "out")

    def close(self) -> None:
        MPI.Finalize()


class MpiBackend:
    def __init__(self, comm: MPI.Intracomm, *, in_place: bool) -> None:
        self.comm = comm
        self.in_place = in_place

    def empty(self, count: int, dtype: str) -> Buffer:
        if dtype in ("bf16", "f16"):
            raise RefusedError(f"MPI adds no {dtype}")
        array = np.empty(count, parse_dtype(dtype).torch_name)
        return Buffer(array, array)

    def bind(
        self, collective: Collective, redop: str, send: Buffer, receive: Buffer, *, asynchronous: bool = False
    ) -> Callable[[], Any]:
        comm, out, ours = self.comm, receive.native, send.native
        alone = send is receive
        if asynchronous:
            raise RefusedError(
                "an MPI moves on only in its own calls, and a training step makes none while the accelerator computes"
            )
        if collective.reduces and redop not in _OPS:
            raise RefusedError(f"MPI has no {redop}")
        op = _OPS.get(redop, MPI.SUM)
        match collective.name:
            case "all_reduce":
                source = MPI.IN_PLACE if alone else ours
                return lambda: comm.Allreduce(source, out, op)
            case "reduce":
                if comm.rank != ROOT:
                    return lambda: comm.Reduce(ours, None, op, ROOT)
                source = MPI.IN_PLACE if alone else ours
                return lambda: comm.Reduce(source, out, op, ROOT)
            case "broadcast":
                return lambda: comm.Bcast(out, ROOT)
            case "all_gather":
                return lambda: comm.Allgather(ours, out)
            case "gather":
                return lambda: comm.Gather(ours, out if comm.rank == ROOT else None, ROOT)
            case "scatter":
                return lambda: comm.Scatter(ours if comm.rank == ROOT else None, out, ROOT)
            case "reduce_scatter":
                return lambda: comm.Reduce_scatter_block(ours, out, op)
            case "all_to_all":
                return lambda: comm.Alltoall(ours, out)
            case "send_recv":
                after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
                return lambda: comm.Sendrecv(ours, after, 0, out, before, 0)
            case "ping_pong":
                return ping_pong(
                    partner(comm.rank, comm.size),
                    comm.rank,
                    lambda other: comm.Send(ours, other),
                    lambda other: comm.Recv(out, other),
                )
            case _:
                return comm.Barrier

    def records(self) -> Any | None:
        return None
