"""Tests on a GPU, skipped where torch finds none. `make test-cuda` lists the tests that ran."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from ranks import run_ranks, values  # noqa: E402

pytestmark = pytest.mark.torch

SIZE = 2
# Longer than a copy takes, in cycles: a kernel that what comes after must wait for.
LONG = 50_000_000
ELEMENTS = 3_000_001


@pytest.fixture(autouse=True)
def gpus() -> int:
    """The number of devices. Asked here alone: a rank that did so at import could hide none from itself later."""
    if not torch.cuda.is_available():
        pytest.skip("no GPU: torch finds no CUDA device here")
    return int(torch.cuda.device_count())


@pytest.fixture
def two_gpus(gpus: int) -> None:
    if gpus < 2:
        pytest.skip(f"needs two GPUs, here are {gpus}")


def mine(rank: int, count: int = ELEMENTS) -> Any:
    return (torch.arange(count, dtype=torch.int64) % 4093 + 5000 * rank).float()


def total(count: int = ELEMENTS) -> Any:
    return sum(mine(rank, count) for rank in range(SIZE))


def world(rank: int, size: int, folder: str, name: str = "store", **options: Any) -> Any:
    """A group, on the rank's GPU: another one where there are two."""
    import netfold

    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    dist.init_process_group(
        "netfold",
        init_method=f"file://{folder}/{name}",
        rank=rank,
        world_size=size,
        pg_options=netfold.Options(**options),
    )
    return device


def late(values: Any, device: Any) -> Any:
    """A tensor that gets its values only after a long kernel."""
    tensor = torch.full_like(values, -1, device=device)
    source = values.to(device)
    torch.cuda._sleep(LONG)
    tensor.copy_(source)
    return tensor


def collectives(rank: int, size: int, folder: str, intra_host: str) -> str:
    """The host waits for the device only in the last line of each check."""
    import netfold.torch

    device = world(rank, size, folder, intra_host=intra_host)
    summed = late(mine(rank), device)
    work = dist.all_reduce(summed, async_op=True)
    work.wait()
    doubled = summed * 2
    assert torch.equal(doubled.cpu(), total() * 2)
    again = late(mine(rank), device)
    future = dist.all_reduce(again, async_op=True).get_future()
    future.wait()
    assert torch.equal((again + 1).cpu(), total() + 1)
    side = torch.cuda.Stream(device)
    with torch.cuda.stream(side):  # another stream than the default one
        aside = late(mine(rank), device)
        dist.all_reduce(aside, op=dist.ReduceOp.AVG)
        found = aside.clone()
    side.synchronize()
    assert torch.equal(found.cpu(), total() / size)
    cast = late(mine(rank), device)
    dist.broadcast(cast, 1)
    assert torch.equal(cast.cpu(), mine(1))
    outs = [torch.empty(ELEMENTS, device=device) for _ in range(size)]
    dist.all_gather(outs, late(mine(rank), device))
    assert all(torch.equal(outs[each].cpu(), mine(each)) for each in range(size))
    own = torch.empty(1000, device=device)
    dist.reduce_scatter_tensor(own, late(mine(rank, 1000 * size), device))
    assert torch.equal(own.cpu(), total(1000 * size)[1000 * rank : 1000 * (rank + 1)])
    swapped = torch.empty(2000, device=device)
    dist.all_to_all_single(swapped, late(mine(rank, 2000), device))
    assert torch.equal(swapped.cpu(), torch.cat([mine(each, 2000)[1000 * rank :][:1000] for each in range(size)]))
    strided = late(mine(rank, 1600).view(40, 40), device).t()
    dist.all_reduce(strided)
    assert torch.equal(strided.t().cpu(), total(1600).view(40, 40))
    on_cpu = torch.ones(3)
    dist.all_reduce(summed, async_op=True)
    dist.all_reduce(on_cpu)
    dist.barrier()
    assert on_cpu.eq(size).all()
    for dtype in (
        torch.float16,
        torch.bfloat16,
        torch.float64,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.uint8,
        torch.bool,
    ):
        tensor = torch.ones(100_000, device=device).to(dtype)
        dist.all_reduce(tensor)
        assert tensor.eq(1 if dtype is torch.bool else size).all(), dtype
    said = netfold.torch.device_paths()
    dist.destroy_process_group()
    return said


@pytest.mark.parametrize("intra_host", ["off", "auto"])
def test_collectives_are_ordered_with_the_callers_streams(intra_host: str) -> None:
    said = values(run_ranks(collectives, SIZE, intra_host, timeout_s=180))
    assert intra_host == "off" or all("by IPC among the 2 ranks" in each for each in said), said


def only_its_own(rank: int, size: int, folder: str) -> str:
    os.environ["CUDA_VISIBLE_DEVICES"] = str(rank)
    return collectives(rank, size, folder, "auto")


@pytest.mark.usefixtures("two_gpus")
def test_ranks_that_see_only_their_own_gpu_reach_each_others_memory() -> None:
    said = values(run_ranks(only_its_own, SIZE, timeout_s=180))
    assert all("by IPC among the 2 ranks" in each for each in said), said


def leaves_its_window(rank: int, size: int, folder: str) -> None:
    """Ranks leave at once, and fill what the allocator has left with other values, while others may still read."""
    for turn in range(10):
        device = world(rank, size, folder, f"store {turn}")
        tensor = mine(rank).to(device)
        dist.all_reduce(tensor)
        if rank == turn % size:
            torch.cuda.current_stream().synchronize()
        dist.destroy_process_group()
        others = [torch.full((4 << 20,), -7.0, device=device) for _ in range(8)]
        assert torch.equal(tensor.cpu(), sum(mine(each) for each in range(size))), turn
        del others
    torch.cuda.synchronize()
    torch.cuda.ipc_collect()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved(device) < 256 << 20, "windows of groups that have ended were given back"


def test_a_window_is_not_reused_while_another_rank_reads_it() -> None:
    """With three ranks a window has two readers, whatever the number of GPUs."""
    values(run_ranks(leaves_its_window, 3, timeout_s=180))


@pytest.mark.usefixtures("two_gpus")
def test_collectives_inside_a_host_use_nccl() -> None:
    said = values(run_ranks(collectives, SIZE, "nccl", timeout_s=180))
    assert all("by NCCL among the 2 ranks" in each for each in said), said


def leaves_early(rank: int, size: int, folder: str) -> None:
    """Ranks leave as soon as their own device is done, and their GPUs are not done at one time."""
    for turn in range(5):
        device = world(rank, size, folder, f"store {turn}", intra_host="nccl")
        tensor = late(mine(rank), device) if rank else mine(rank).to(device)
        dist.all_reduce(tensor)
        dist.destroy_process_group()
        assert torch.equal(tensor.cpu(), total()), turn


@pytest.mark.usefixtures("two_gpus")
def test_a_leaving_rank_ends_no_kernel_of_another_rank() -> None:
    values(run_ranks(leaves_early, SIZE, timeout_s=180))


def launches_alone(rank: int, size: int, folder: str) -> str:
    """Rank 1 makes no second call. The kernel of rank 0 is given up, and no process ends."""
    from netfold.torch.operations import operations_of

    device = world(rank, size, folder, intra_host="nccl")
    tensor, said = mine(rank).to(device), ""
    dist.all_reduce(tensor)
    found = operations_of(dist.group.WORLD)
    assert found is not None
    found.set_timeout(timedelta(seconds=3))
    if rank == 0:
        try:
            dist.all_reduce(tensor)
        except RuntimeError as error:
            said = str(error)
        torch.cuda.synchronize()  # the kernel is gone
    time.sleep(15)  # the watchdog of NCCL's group looks and does nothing
    dist.destroy_process_group()
    return said


@pytest.mark.usefixtures("two_gpus")
def test_an_nccl_kernel_that_waits_in_vain_is_aborted_and_no_process_ends() -> None:
    said = values(run_ranks(launches_alone, SIZE, timeout_s=120))
    assert "timed out: a kernel waits" in said[0], said


def fixed(rank: int, size: int, folder: str) -> None:
    for intra_host in ("auto", "off"):
        device = world(rank, size, folder, intra_host, wire_dtype="i32", intra_host=intra_host)
        generator = torch.Generator().manual_seed(rank)
        values = torch.randn(ELEMENTS, generator=generator) * torch.logspace(-30, 20, ELEMENTS)
        values[[5, 1000]] = torch.tensor([torch.inf, torch.nan])
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            on_cpu, on_device = values.clone(), values.to(device)
            dist.all_reduce(on_cpu, op=op)
            dist.all_reduce(on_device, op=op)
            found = on_device.cpu()
            same = (found.view(torch.int32) == on_cpu.view(torch.int32)) | (found.isnan() & on_cpu.isnan())
            assert same.all(), (intra_host, op, same.logical_not().nonzero()[:5])
        dist.destroy_process_group()


def test_sums_by_i32_have_the_bits_of_sums_on_the_host() -> None:
    values(run_ranks(fixed, SIZE, timeout_s=180))


def messages(rank: int, size: int, folder: str) -> None:
    device, other = world(rank, size, folder), 1 - rank
    came = torch.empty(ELEMENTS, device=device)
    send, receive = dist.isend(late(mine(rank), device), other), dist.irecv(came, other)
    receive.wait()
    assert torch.equal((came + 1).cpu(), mine(other) + 1)
    send.wait()
    came.zero_()
    for request in dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, late(mine(rank), device), other), dist.P2POp(dist.irecv, came, other)]
    ):
        request.wait()
    assert torch.equal(came.cpu(), mine(other))
    # A CPU tensor with the same tag does not overtake one that is still behind a long kernel.
    on_cpu = torch.empty(ELEMENTS)
    sends = [dist.isend(late(mine(rank), device), other, tag=3), dist.isend(mine(rank) + 1, other, tag=3)]
    for into, due in ((came, mine(other)), (on_cpu, mine(other) + 1)):
        dist.recv(into, other, tag=3)
        assert torch.equal(into.cpu(), due)
    for send in sends:
        send.wait()
    dist.destroy_process_group()


def test_messages_between_gpus_arrive() -> None:
    values(run_ranks(messages, SIZE, timeout_s=120))


def leaves_no_context(rank: int, size: int, folder: str) -> None:
    device, other = world(rank, size, folder, intra_host="off"), 1 - rank
    came = torch.empty(ELEMENTS, device=device)
    works = [
        dist.all_reduce(late(mine(rank), device), async_op=True),
        dist.isend(late(mine(rank), device), other),
        dist.irecv(came, other),
    ]
    for work in works:
        work.get_future().wait()
    for work in works:
        work.wait()
    torch.cuda.synchronize()
    dist.destroy_process_group()
    assert not torch._C._cuda_hasPrimaryContext(1 - device.index), f"rank {rank} of {device} made another context"


@pytest.mark.usefixtures("two_gpus")
def test_no_thread_leaves_a_context_on_another_gpu() -> None:
    values(run_ranks(leaves_no_context, SIZE, timeout_s=120))


def own_streams(rank: int, size: int, folder: str) -> None:
    from netfold.torch.operations import operations_of

    device = world(rank, size, folder, intra_host="off")
    tensor = mine(rank).to(device)
    dist.all_reduce(tensor)
    found = operations_of(dist.group.WORLD)
    assert found is not None and found.devices is not None and found.devices._paths is not None
    staged, done = found.devices._paths.staged, found.devices._paths.done
    ours = {stream.cuda_stream for stream in (staged.out, staged.back, done)}
    users = {torch.cuda.Stream(device, priority=priority).cuda_stream for priority in (0, -1) for _ in range(64)}
    assert len(ours) == 3 and ours.isdisjoint(users | {torch.cuda.default_stream(device).cuda_stream})
    dist.destroy_process_group()


def test_streams_are_not_from_torchs_pools() -> None:
    values(run_ranks(own_streams, SIZE, timeout_s=120))


def blocks_the_stream(rank: int, size: int, folder: str) -> None:
    device = world(rank, size, folder, intra_host="off")
    warm, tensor = mine(rank).to(device), mine(rank).to(device)
    doubled = torch.empty_like(tensor)
    dist.all_reduce(warm)
    torch.mul(warm, 2, out=doubled)  # the kernel is loaded, and no memory is needed behind the wait
    torch.cuda.synchronize()
    dist.barrier()
    if rank == 1:
        time.sleep(1.0)
    began = time.monotonic()
    work = dist.all_reduce(tensor, async_op=True)
    work.block_current_stream()
    torch.mul(tensor, 2, out=doubled)
    host_s = time.monotonic() - began
    torch.cuda.synchronize()
    assert torch.equal(doubled.cpu(), 2 * total())
    assert work.is_completed() and (rank == 1 or host_s < 0.5), f"the host waited for {host_s:.3f} s"
    dist.destroy_process_group()


def test_block_current_stream_does_not_block_the_host() -> None:
    values(run_ranks(blocks_the_stream, SIZE, timeout_s=120))


def captures_beside(rank: int, size: int, folder: str) -> None:
    """A capture in the default mode, while works that began before it go on."""
    device = world(rank, size, folder)
    tensors = [mine(rank).to(device) for _ in range(8)]
    graph, source = torch.cuda.CUDAGraph(), torch.ones(1000, device=device)
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    with torch.cuda.graph(graph):
        doubled = source * 2
        give_up = time.monotonic() + 30
        while not all(work.is_completed() for work in works):
            assert time.monotonic() < give_up
    for work in works:
        work.wait()
    graph.replay()
    assert doubled.eq(2).all() and all(torch.equal(tensor.cpu(), total()) for tensor in tensors)
    dist.destroy_process_group()


def test_works_under_way_end_no_capture() -> None:
    values(run_ranks(captures_beside, SIZE, timeout_s=120))


def train(rank: int, size: int, folder: str) -> None:
    """DDP over netfold and over gloo, from the same start, with the same batches."""
    device = world(rank, size, folder)
    groups = {"netfold": dist.group.WORLD, "gloo": dist.new_group(backend="gloo")}
    found = {}
    for name, group in groups.items():
        torch.manual_seed(7)
        model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(6))).to(device)
        ddp = torch.nn.parallel.DistributedDataParallel(model, process_group=group, bucket_cap_mb=1)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-3)
        for step in range(5):
            torch.manual_seed(100 * step + rank)
            optimizer.zero_grad()
            ddp(torch.randn(32, 512, device=device)).square().mean().backward()
            optimizer.step()
        found[name] = torch.cat([parameter.detach().reshape(-1).cpu() for parameter in model.parameters()])
    assert torch.allclose(found["netfold"], found["gloo"], rtol=1e-5, atol=1e-7)
    dist.destroy_process_group()


def test_ddp_trains_as_over_gloo() -> None:
    values(run_ranks(train, SIZE, timeout_s=180))


def train_in_half(rank: int, size: int, folder: str) -> None:
    """DDP's hooks that send f16, on the default stream and on another one, behind long kernels."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    device = world(rank, size, folder)
    for stream in (torch.cuda.current_stream(device), torch.cuda.Stream(device)):
        for hook in ("cpp", "python"):
            with torch.cuda.stream(stream):
                torch.manual_seed(7)
                model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(6))).to(device)
                ddp = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=1)
                if hook == "cpp":
                    ddp._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
                else:
                    ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
                batches = [torch.randn(32, 512, generator=torch.Generator().manual_seed(each)) for each in range(size)]
                for _ in range(3):
                    ddp.zero_grad()
                    torch.cuda._sleep(LONG)
                    ddp(batches[rank].to(device)).square().sum().backward()
                    found = [parameter.grad.clone() for parameter in model.parameters()]
                alone = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(6))).to(device)
                alone.load_state_dict(model.state_dict())
                (alone(torch.cat(batches).to(device)).square().sum() / size).backward()
            stream.synchronize()
            for got, parameter in zip(found, alone.parameters(), strict=True):
                assert torch.allclose(got, parameter.grad, rtol=0.01, atol=1e-4), (hook, stream)
    dist.destroy_process_group()


def test_ddp_hooks_in_half_precision() -> None:
    values(run_ranks(train_in_half, SIZE, timeout_s=180))


def reconfigured(rank: int, size: int, folder: str, intra_host: str) -> None:
    """The ranks change places, rank 1 leaves, and all meet again: each group sums tensors of both kinds."""
    import netfold

    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    store = dist.FileStore(f"{folder}/store", -1)
    dist.init_process_group(
        "netfold",
        store=store,
        rank=rank,
        world_size=size,
        pg_options=netfold.Options(intra_host=intra_host),
        enable_reconfigure=True,
    )
    store.set(f"handle {rank}", dist._get_reconfigure_handle())
    handles = [store.get(f"handle {peer}").decode() for peer in range(size)]
    for uuid, members in enumerate(([0, 1], [1, 0], [0], [0, 1])):
        if rank in members:
            chosen = [handles[each] for each in members]
            dist._reconfigure(uuid, chosen, timeout=timedelta(seconds=30)).wait()
            assert (dist.get_rank(), dist.get_world_size()) == (members.index(rank), len(members))
            tensor, on_host = mine(rank).to(device), torch.ones(3)
            dist.all_reduce(tensor)
            dist.all_reduce(on_host)
            assert torch.equal(tensor.cpu(), sum(mine(each) for each in members))
            assert on_host.tolist() == [len(members)] * 3
        store.set(f"turn {uuid} {rank}", "")
        for peer in range(size):
            store.get(f"turn {uuid} {peer}")
    dist.destroy_process_group()


@pytest.mark.parametrize("intra_host", ["auto", "off"])
def test_a_group_on_gpus_is_reconfigured(intra_host: str) -> None:
    if not hasattr(dist.distributed_c10d, "_reconfigure"):
        pytest.skip(f"torch {torch.__version__} has no reconfigure: 2.15 has")
    values(run_ranks(reconfigured, SIZE, intra_host, timeout_s=120))
