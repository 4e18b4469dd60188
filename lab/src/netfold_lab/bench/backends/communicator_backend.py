"""The backend netfold.Communicator on NumPy arrays, without torch."""

import os
from collections.abc import Callable
from typing import Any

import numpy as np

import netfold
from netfold_lab.bench.backends import BackendName, Buffer, RefusedError, ping_pong, refusing, shared_empty
from netfold_lab.bench.collectives import ROOT, Collective, partner
from netfold_lab.bench.sizes import parse_dtype


class CommunicatorWorld:
    """The ranks connect through files in `folder`, which all ranks see, also those on the hosts of a rack."""

    def __init__(self, folder: str) -> None:
        self.rank = int(os.environ["RANK"])
        self.size = int(os.environ["WORLD_SIZE"])
        self.versions = {"numpy": str(np.__version__)}
        self._folder = folder
        self._open: list[netfold.Communicator] = []
        self._stores = 0

    def backend(self, name: BackendName) -> "CommunicatorBackend":
        self._stores += 1
        store = netfold.FileStore(os.path.join(self._folder, f"store{self._stores}"))
        with refusing(name):
            self._open.append(netfold.Communicator(store, self.rank, self.size, options=name.options()))
        return CommunicatorBackend(self._open[-1], shared=name.variant == "shared")

    def close(self) -> None:
        for communicator in self._open:
            communicator.close()


class CommunicatorBackend:
    in_place = True

    def __init__(self, communicator: netfold.Communicator, *, shared: bool = False) -> None:
        self.communicator = communicator
        self._shared = shared

    def empty(self, count: int, dtype: str) -> Buffer:
        if dtype == "bf16":
            raise RefusedError("NumPy has no bf16")
        array = shared_empty(count, dtype) if self._shared else np.empty(count, parse_dtype(dtype).torch_name)
        return Buffer(array, array)

    def bind(
        self, collective: Collective, redop: str, send: Buffer, receive: Buffer, *, asynchronous: bool = False
    ) -> Callable[[], Any]:
        group, out, ours = self.communicator, receive.native, send.native
        op = "product" if redop == "prod" else redop
        match collective.name:
            case "all_reduce":
                return lambda: group.all_reduce(out, op=op, asynchronous=asynchronous)
            case "reduce":
                return lambda: group.reduce(out, ROOT, op=op)
            case "broadcast":
                return lambda: group.broadcast(out, ROOT)
            case "all_gather":
                out_parts = np.split(out, group.size)
                return lambda: group.all_gather(ours, out_parts)
            case "gather":
                out_parts = np.split(out, group.size)
                return lambda: group.gather(ours, out_parts, ROOT)
            case "scatter":
                our_parts = np.split(ours, group.size)
                return lambda: group.scatter(our_parts, out, ROOT)
            case "reduce_scatter":
                our_parts = np.split(ours, group.size)
                return lambda: group.reduce_scatter(our_parts, out, op=op)
            case "all_to_all":
                our_parts, out_parts = np.split(ours, group.size), np.split(out, group.size)
                return lambda: group.all_to_all(our_parts, out_parts, asynchronous=asynchronous)
            case "ping_pong":
                return ping_pong(
                    partner(group.rank, group.size),
                    group.rank,
                    lambda other: group.send(ours, other),
                    lambda other: group.receive(out, other),
                )
            case "barrier":
                return group.barrier
            case _:
                raise RefusedError("send_recv is not measured through Communicator yet")

    def records(self) -> Any | None:
        return self.communicator.group.events()
