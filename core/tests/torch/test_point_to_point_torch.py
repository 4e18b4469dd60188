"""torch's send and recv over netfold: as torch documents them, also where gloo does less.

Below torch: core/tests/communicator/test_point_to_point.py. A world of processes runs all cases; a test is a case.
"""

from __future__ import annotations

import gc
from typing import Any

import pytest
from worlds import BY_DISPATCHER, Case, check

pytestmark = [pytest.mark.torch, pytest.mark.xdist_group("torch_point_to_point")]  # the world is made once

MODES = ("auto",)
CASES: dict[str, Case] = {}


def case(function: Any) -> Any:
    CASES[function.__name__] = lambda dist, rank, size, folder: function(dist, rank, size)
    return function


def message(count: int, sender: int, tag: int = 0, dtype: Any = None) -> Any:
    import torch

    return ((torch.arange(count) * 7 + 1000 * sender + 13 * tag) % 251).to(dtype or torch.float32)


@case
def send_and_recv_round_the_ring(dist: Any, rank: int, size: int) -> None:
    import torch

    before, behind = (rank + 1) % size, (rank - 1) % size
    for count in (0, 1, 1000, 40_000, 700_000):
        into = torch.full((count,), -1.0)
        if rank % 2:
            assert dist.recv(into, behind) == behind
            assert dist.send(message(count, rank), before) is None
        else:
            dist.send(message(count, rank), before)
            assert dist.recv(into, behind) == behind
        assert torch.equal(into, message(count, behind))


@case
def every_dtype_travels(dist: Any, rank: int, size: int) -> None:
    import torch

    dtypes = (
        *(torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.int16, torch.int32, torch.int64),
        *(torch.uint8, torch.uint16, torch.bool, torch.complex64, torch.complex128, torch.float8_e4m3fn),
    )
    for dtype in dtypes:
        sent = message(100, 0, 0, torch.float32).to(dtype)
        if rank == 0:
            dist.send(sent, 1)
        elif rank == 1:
            into = torch.zeros(100).to(dtype)
            dist.recv(into, 0)
            assert torch.equal(into.to(torch.complex128), sent.to(torch.complex128)), dtype


@case
def what_has_no_memory_yet_is_waited_for_and_what_never_has_is_refused(dist: Any, rank: int, size: int) -> None:
    import torch
    from torch.distributed._functional_collectives import all_gather_tensor, all_reduce

    into = torch.zeros(3)
    sums = all_reduce(torch.full((3,), rank + 1.0), "sum", dist.group.WORLD)
    assert sums.data_ptr() == 0, "torch returns what it will be"
    sends = dist.isend(sums, (rank + 1) % size)
    dist.recv(into, (rank - 1) % size)
    sends.wait()
    assert into.eq(size * (size + 1) / 2).all()
    gathered = all_gather_tensor(torch.full((1,), float(rank)), 0, dist.group.WORLD)
    dist.all_reduce(gathered)
    assert torch.equal(gathered * 1, size * torch.arange(float(size)))
    freed = torch.ones(5)
    freed.untyped_storage().resize_(0)
    calls = [lambda: dist.send(freed, (rank + 1) % size), lambda: dist.all_reduce(freed)]
    for call in [*calls, lambda: dist.broadcast(freed, 0)]:
        try:
            call()
        except ValueError as error:
            assert "this Tensor of [5] has none" in str(error)
        else:
            raise AssertionError("nothing was raised")


@case
def tags_and_waits_may_come_in_any_order(dist: Any, rank: int, size: int) -> None:
    import torch

    if rank > 1:
        return
    counts = [10, 100_000, 0, 20, 200_000]
    sent = [message(count, rank, tag) for tag, count in enumerate(counts)]
    into = [torch.full((count,), -1.0) for count in counts]
    sends = [dist.isend(tensor, 1 - rank, tag=tag) for tag, tensor in enumerate(sent)]
    receives = [dist.irecv(into[tag], 1 - rank, tag=tag) for tag in reversed(range(len(counts)))]
    for work in [*receives[::2], *reversed(sends), *receives[1::2]]:
        assert work.wait()
        assert work.is_completed()
        assert work.is_success()
        assert work.wait(), "a second wait harms nothing"
    for tag, count in enumerate(counts):
        assert torch.equal(into[tag], message(count, 1 - rank, tag))


@case
def a_batch_may_mix_sends_and_receives(dist: Any, rank: int, size: int) -> None:
    import torch

    for count in (3, 300_000):
        peers = [peer for peer in range(size) if peer != rank]
        into = {peer: torch.full((count,), -1.0) for peer in peers}
        ops = [dist.P2POp(dist.irecv, into[peer], peer, tag=7) for peer in peers]
        ops += [dist.P2POp(dist.isend, message(count, rank, peer), peer, tag=7) for peer in peers]
        works = dist.batch_isend_irecv(ops)
        assert len(works) == len(ops)
        for work in works:
            work.wait()
        for peer in peers:
            assert torch.equal(into[peer], message(count, peer, rank))


@case
def recv_without_a_source_returns_the_sender(dist: Any, rank: int, size: int) -> None:
    import torch

    for count in (5, 300_000):
        if rank == 0:
            found = []
            for _ in range(size - 1):
                into = torch.full((count,), -1.0)
                source = dist.recv(into, tag=count)
                assert torch.equal(into, message(count, source))
                found.append(source)
            assert sorted(found) == list(range(1, size))
        else:
            dist.send(message(count, rank), 0, tag=count)
    dist.barrier()


@case
def a_sub_groups_ranks_are_translated(dist: Any, rank: int, size: int) -> None:
    import torch

    group = dist.new_group([1, 3], backend="netfold")
    if rank not in (1, 3):
        return
    other = 4 - rank
    into = torch.zeros(4)
    if rank == 3:
        dist.send(message(4, rank), 1, group=group)
        assert dist.recv(into, group=group) == 1, "a rank of the world, not of the group"
    else:
        assert dist.recv(into, group=group) == 3
        dist.send(message(4, rank), group_dst=1, group=group)
    assert torch.equal(into, message(4, other))
    work = dist.irecv(into, group=group) if rank == 1 else dist.isend(into, 1, group=group)
    work.wait()
    assert work._source_rank() == (1 if rank == 1 else 0), "a rank of the group"
    # The world's messages and the group's do not meet.
    first, second = torch.zeros(1), torch.zeros(1)
    if rank == 1:
        dist.send(torch.ones(1), 3)
        dist.send(torch.full((1,), 2.0), 3, group=group)
    else:
        dist.recv(second, 1, group=group)
        dist.recv(first, 1)
        assert (first.item(), second.item()) == (1.0, 2.0)
    dist.destroy_process_group(group)


@case
def tensors_that_are_not_contiguous_travel_by_value(dist: Any, rank: int, size: int) -> None:
    import torch

    if rank == 0:
        dist.send(message(12, 0).view(3, 4).t(), 1)
        dist.send(message(12, 0).view(3, 4)[:, 1], 1)
        dist.send(torch.tensor(3.5), 1)
    elif rank == 1:
        wide = torch.zeros(3, 4)
        dist.recv(wide.t(), 0)
        assert torch.equal(wide, message(12, 0).view(3, 4))
        column = torch.zeros(3, 5)
        work = dist.irecv(column[:, 2], 0)
        work.get_future().wait()
        assert torch.equal(column[:, 2], message(12, 0).view(3, 4)[:, 1])
        assert column.sum() == column[:, 2].sum()
        scalar = torch.tensor(0.0)
        dist.recv(scalar, 0)
        assert scalar.item() == 3.5


@case
def objects_travel(dist: Any, rank: int, size: int) -> None:
    objects = ["switch", {"slots": [1, 2]}, ("x" * 300_000, None)]
    for batched in (False, True):
        if rank == 0:
            for peer in range(1, size):
                dist.send_object_list([*objects, peer], dst=peer, use_batch=batched)
        else:
            into = [None] * 4
            assert dist.recv_object_list(into, src=0, use_batch=batched) == 0
            assert into == [*objects, rank]


@case
def a_future_holds_the_tensor(dist: Any, rank: int, size: int) -> None:
    import torch

    if rank > 1:
        return
    for count in (4, 300_000):
        into = torch.zeros(count)
        sent = message(count, rank)
        send, receive = dist.isend(sent, 1 - rank), dist.irecv(into, 1 - rank)
        seen = receive.get_future().then(lambda future: future.value()[0].sum().item())
        assert seen.wait() == message(count, 1 - rank).sum().item()
        send.get_future().wait()
        late = dist.irecv(into, 1 - rank) if rank else dist.isend(sent, 1)
        late.wait()
        assert late.get_future().done()
        late.get_future().wait()


@case
def works_may_be_dropped(dist: Any, rank: int, size: int) -> None:
    """Their tensors live until the message is through."""
    import torch

    count = 400_000
    if rank == 0:
        dist.barrier()
        into = torch.zeros(count)
        for tag in range(5):
            dist.recv(into, 1, tag=tag)
            assert torch.equal(into, message(count, 1, tag))
    else:
        if rank == 1:
            for tag in range(5):
                dist.isend(message(count, 1, tag), 0, tag=tag)
        gc.collect()
        kept = [torch.full((count,), -1.0) for _ in range(5)]  # would lie where those lay
        dist.barrier()
        assert kept[0][0] == -1
    dist.barrier()


@case
def self_sends_are_refused(dist: Any, rank: int, size: int) -> None:
    import torch

    tensor = torch.ones(1)
    dense = "Could not run 'c10d::" if BY_DISPATCHER else "dense CPU tensors"
    refused_here = [(lambda: dist.irecv(torch.empty(3, device="meta"), (rank + 1) % size), "dense CPU tensors")]
    for call, words in (
        (lambda: dist.send(tensor, rank), "destination rank should not be the same as the rank of the current"),
        (lambda: dist.isend(tensor, rank), f"rank {rank} is this rank itself; copy the tensor instead"),
        (lambda: dist.irecv(tensor, rank), f"rank {rank} is this rank itself; copy the tensor instead"),
        (lambda: dist.isend(tensor, (rank + 1) % size, tag=-1), "tag -1 is negative"),
        (lambda: dist.isend(torch.eye(3).to_sparse(), (rank + 1) % size), dense),
        # torch's dispatcher has operators of its own for meta tensors.
        *(() if BY_DISPATCHER else refused_here),
    ):
        with pytest.raises((ValueError, RuntimeError), match=words):
            call()
    dist.barrier()


@case
def functional_isend_and_irecv_reach_netfold(dist: Any, rank: int, size: int) -> None:
    import torch
    import torch.distributed._functional_collectives as functional

    if rank > 1 or not hasattr(functional, "isend_inplace"):  # torch 2.10 has none
        return
    if rank == 0:
        functional.wait_tensor(functional.isend_inplace(message(1000, 0), 1, 2))
        return
    received = functional.irecv_inplace(torch.zeros(1000), 0, 2)
    assert torch.equal(functional.wait_tensor(received), message(1000, 0))


@case
def collectives_and_messages_go_side_by_side(dist: Any, rank: int, size: int) -> None:
    import torch

    before, behind = (rank + 1) % size, (rank - 1) % size
    for count in (10, 200_000):
        sum_work = dist.all_reduce(total := torch.full((count,), rank + 1.0), async_op=True)
        into = torch.zeros(count)
        works = dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, message(count, rank), before), dist.P2POp(dist.irecv, into, behind)]
        )
        for work in works:
            work.wait()
        sum_work.wait()
        assert torch.equal(into, message(count, behind))
        assert total.eq(size * (size + 1) / 2).all()


@case
def a_mismatch_ends_the_group_on_both_sides(dist: Any, rank: int, size: int) -> None:
    """The last case: the group is no good after it."""
    import torch

    from netfold.communicator import Mismatch, PeerLost

    if rank == 0:
        dist.send(torch.ones(10), 1)
        with pytest.raises((Mismatch, PeerLost), match="rank 0 sent 40 bytes of f32 with tag 0, rank 1 receives 36"):
            dist.recv(torch.ones(1), 1)
    elif rank == 1:
        with pytest.raises(Mismatch, match="rank 0 sent 40 bytes of f32 with tag 0, rank 1 receives 36 bytes of f32"):
            dist.recv(torch.ones(9), 0)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("mode", MODES)
def test_each_case_passes_on_every_rank(mode: str, name: str) -> None:
    check(__name__, MODES, mode, name)
