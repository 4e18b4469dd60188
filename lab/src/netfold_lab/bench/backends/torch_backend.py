"""The backends of torch.distributed. They share processes, and each has a group of its own."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from netfold.switch_protocol import control_messages
from netfold_lab.bench.backends import BackendName, Buffer, RefusedError, ping_pong, refusing, shared_empty
from netfold_lab.bench.collectives import ROOT, Collective, partner
from netfold_lab.bench.sizes import parse_dtype

_OPS = {
    "sum": dist.ReduceOp.SUM,
    "prod": dist.ReduceOp.PRODUCT,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "avg": dist.ReduceOp.AVG,
}


class TorchWorld:
    """The default group is gloo's. It serves only to make the backends' groups."""

    def __init__(self) -> None:
        dist.init_process_group("gloo")
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        self.versions = {"torch": str(torch.__version__), "numpy": str(np.__version__)}

    def backend(self, name: BackendName) -> "TorchBackend":
        if name.kind not in dist.Backend.backend_list:
            raise RefusedError(f"torch has no backend {name.kind!r}; there are {', '.join(dist.Backend.backend_list)}")
        ranks = list(range(name.ranks)) if name.ranks else None
        with refusing(name), _payload(name.payload_bytes):
            group = dist.new_group(ranks, backend=name.kind, pg_options=name.options())
            if self.rank < name.ranks and name.is_netfold:
                dist.barrier(group=group)  # netfold joins the switch in a group's first operation
        return TorchBackend(group, name)

    def close(self) -> None:
        dist.destroy_process_group()


@contextlib.contextmanager
def _payload(payload_bytes: int | None) -> Iterator[None]:
    """Let a group that joins the switch meanwhile have packets of this payload; None: it tries all candidates.

    A job's packets are as long as the shortest that any of its ranks asks for.
    """
    candidates = control_messages.PAYLOAD_CANDIDATES
    if payload_bytes is not None:
        control_messages.PAYLOAD_CANDIDATES = (payload_bytes,)  # type: ignore[assignment]
    try:
        yield
    finally:
        control_messages.PAYLOAD_CANDIDATES = candidates


class TorchBackend:
    in_place = True

    def __init__(self, group: Any, name: BackendName) -> None:
        self.group = group
        self.name = name

    def empty(self, count: int, dtype: str) -> Buffer:
        kind = getattr(torch, parse_dtype(dtype).torch_name)
        if self.name.variant == "shared":
            tensor = torch.from_numpy(shared_empty(count, dtype)).view(kind)
        else:
            tensor = torch.empty(count, dtype=kind)
        # NumPy has no bf16 and sees its bits.
        bits = tensor.view(torch.uint16) if kind is torch.bfloat16 else tensor
        return Buffer(bits.numpy(), tensor)

    def bind(
        self, collective: Collective, redop: str, send: Buffer, receive: Buffer, *, asynchronous: bool = False
    ) -> Callable[[], Any]:
        group, out, ours = self.group, receive.native, send.native
        rank, size, op = dist.get_rank(group), dist.get_world_size(group), _OPS[redop]
        match collective.name:
            case "all_reduce":
                return lambda: dist.all_reduce(out, op, group=group, async_op=asynchronous)
            case "reduce":
                return lambda: dist.reduce(out, ROOT, op, group=group)
            case "broadcast":
                return lambda: dist.broadcast(out, ROOT, group=group)
            case "all_gather":
                return lambda: dist.all_gather_into_tensor(out, ours, group=group)
            case "gather":
                parts = list(torch.tensor_split(out, size)) if rank == ROOT else None
                return lambda: dist.gather(ours, parts, ROOT, group=group)
            case "scatter":
                parts = list(torch.tensor_split(ours, size)) if rank == ROOT else None
                return lambda: dist.scatter(out, parts, ROOT, group=group)
            case "reduce_scatter":
                return lambda: dist.reduce_scatter_tensor(out, ours, op, group=group)
            case "all_to_all":
                return lambda: dist.all_to_all_single(out, ours, group=group, async_op=asynchronous)
            case "send_recv":
                return self._exchange(out, ours, (rank + 1) % size, (rank - 1) % size)
            case "ping_pong":
                return ping_pong(
                    partner(rank, size),
                    rank,
                    lambda other: dist.send(ours, other, group=group),
                    lambda other: dist.recv(out, other, group=group),
                )
            case _:
                return lambda: dist.barrier(group=group)

    def _exchange(self, out: torch.Tensor, ours: torch.Tensor, to: int, source: int) -> Callable[[], object]:
        def exchange() -> None:
            for one in (dist.isend(ours, to, group=self.group), dist.irecv(out, source, group=self.group)):
                assert one is not None, "the group holds every rank"
                one.wait()

        return exchange

    def records(self) -> Any | None:
        if self.name.kind != "netfold":
            return None
        import netfold.torch

        return netfold.torch.events(self.group)
