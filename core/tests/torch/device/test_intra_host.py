"""Sums among the devices of a host, and between hosts: by peer memory, and by a stand-in for NCCL."""

from __future__ import annotations

import functools
import gc
import logging
import time
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from device_worlds import ORDERS, distinct, on_devices, reduce_options  # noqa: E402
from load import seconds  # noqa: E402
from ranks import values  # noqa: E402

from netfold.torch.device import intra_host, ipc  # noqa: E402

pytestmark = pytest.mark.torch

# (options, hosts of the ranks)
WORLDS = {
    "ipc, one host": ({}, (0, 0, 0)),
    "ipc, two hosts": ({}, (0, 1, 0, 1)),
    "nccl, one host": ({"intra_host": "nccl"}, (0, 0, 0)),
    "nccl, two hosts": ({"intra_host": "nccl"}, (0, 0, 1, 1)),
}
COUNT = 60_001


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short chunks: every tensor of these tests has several."""
    monkeypatch.setattr(ipc, "SLOT_BYTES", 64 << 10)
    monkeypatch.setattr(intra_host.NcclReducer, "chunk_bytes", 128 << 10)


def sums(group: Any, device_api: Any) -> None:
    size, rank = group.size(), group.rank()
    mine = distinct(rank, COUNT)
    total = sum(distinct(each, COUNT) for each in range(size))
    big, half = device_api.tensor(torch.full((COUNT,), -1.0)), device_api.tensor((mine % 50).to(torch.bfloat16))
    device_api.compute(lambda: big.copy_(mine))
    most = device_api.tensor(mine.to(torch.int32))
    mean = device_api.tensor(mine)
    works = [
        group.allreduce([big], reduce_options()),
        group.allreduce([half], reduce_options()),
        group.allreduce([most], reduce_options(dist.ReduceOp.MAX)),
        group.allreduce([mean], reduce_options(dist.ReduceOp.AVG)),
        group.allreduce([big[:100]], reduce_options()),  # staged: reads what the first left, and is read by the last
        group.allreduce([big], reduce_options(dist.ReduceOp.MAX)),
    ]
    for work in works:
        work.wait()
    due = total.clone()
    due[:100] *= size
    assert torch.equal(device_api.value(big), due)
    assert torch.equal(
        device_api.value(half), sum(distinct(each, COUNT) % 50 for each in range(size)).to(torch.bfloat16)
    )
    assert torch.equal(device_api.value(most), distinct(size - 1, COUNT, torch.int32))
    assert torch.equal(device_api.value(mean), total / size)
    assert "of a host" in group.devices.why(), group.devices.why()


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("world", WORLDS)
def test_sums_inside_and_between_hosts_are_correct(world: str, order: Any) -> None:
    options, hosts = WORLDS[world]
    values(on_devices(sums, len(hosts), order, hosts=hosts, **options))


def pools(device_api: Any) -> None:
    device_api.pool, device_api.has_gates = 1, False


@pytest.mark.parametrize("order", ["late", "early"])
@pytest.mark.parametrize("world", WORLDS)
def test_sums_are_correct_in_a_single_stream(world: str, order: Any) -> None:
    """torch's pool may give out one stream twice."""
    options, hosts = WORLDS[world]
    values(on_devices(sums, len(hosts), order, hosts=hosts, before=pools, **options))


@pytest.mark.parametrize("intra_host", ["auto", "nccl"])
def test_groups_inside_and_between_hosts_need_no_store(intra_host: str) -> None:
    values(on_devices(sums, 4, hosts=(0, 1, 0, 1), own_stores=True, intra_host=intra_host))


def every_dtype(group: Any, device_api: Any) -> str:
    size, rank = group.size(), group.rank()
    names = "float32 float64 float16 bfloat16 uint8 int8 int16 int32 int64"
    for dtype in (getattr(torch, name) for name in names.split()):
        tensor = device_api.tensor((distinct(rank, COUNT) % 11).to(dtype))
        group.allreduce([tensor], reduce_options()).wait()
        assert torch.equal(
            device_api.value(tensor), sum(distinct(each, COUNT) % 11 for each in range(size)).to(dtype)
        ), dtype
    return str(group.devices.why())


@pytest.mark.parametrize("world", WORLDS)
def test_dtypes_that_nccl_lacks_are_staged_and_the_reason_is_logged(world: str) -> None:
    """int16 ended the group."""
    options, hosts = WORLDS[world]
    for said in values(on_devices(every_dtype, len(hosts), "late", hosts=hosts, **options)):
        assert ("but for int16, for which NCCL has no datatype; else staged" in said) == ("nccl" in world), said


def leaves_while_a_third_reads(group: Any, device_api: Any) -> None:
    """Rank 2's device has yet to read the windows when ranks 0 and 1 are done and have closed their groups."""
    tensor = device_api.tensor(distinct(group.rank(), COUNT))
    group.allreduce([tensor], reduce_options()).wait()
    if group.rank() < 2:
        device_api.value(tensor)
        group.shutdown()
        gc.collect()
        device_api.host.closed.append(group.rank())
    else:
        give_up = time.monotonic() + seconds(30)
        while len(device_api.host.closed) < 2:
            assert time.monotonic() < give_up
            time.sleep(0.001)
        assert not any(each.users <= 0 and each.memory.eq(0xAA).all() for each in device_api.host.exported)
    assert torch.equal(device_api.value(tensor), sum(distinct(rank, COUNT) for rank in range(3)))
    group.shutdown()


def test_a_window_is_not_reused_while_a_third_rank_reads_it() -> None:
    """torch's counter of exported memory counts one user: with one export for two, it was free after the first."""
    values(on_devices(leaves_while_a_third_reads, 3, "late"))


def uses_windows(group: Any, device_api: Any) -> Any:
    reduce_and_say(group, device_api)
    group.shutdown()
    return device_api.host.exported


@pytest.mark.parametrize("refuses", [False, True])
def test_all_ranks_release_windows_when_a_group_ends_and_when_there_is_no_ipc(refuses: bool) -> None:
    found = values(on_devices(uses_windows, 3, before=refusing if refuses else None))
    gc.collect()
    assert len(found[0]) == 6 and [each.users for each in found[0]] == [0] * 6
    assert all(each.memory.eq(0xAA).all() for each in found[0]), "the owners have let go of them, too"


def hangs_at_the_end(group: Any, device_api: Any) -> None:
    group.allreduce([device_api.tensor(distinct(group.rank(), COUNT))], reduce_options()).wait()
    device_api.hangs = group.rank() == 0  # with copies from windows still to do
    group.shutdown()
    device_api.hangs = False


def test_a_hanging_device_keeps_the_memory_that_it_may_still_read(monkeypatch: pytest.MonkeyPatch) -> None:
    from netfold.torch.device import paths

    monkeypatch.setattr(paths, "SETTLE_S", 0.2)
    monkeypatch.setattr(paths, "AFTER_ABORT_S", 0.2)
    monkeypatch.setattr(ipc, "_never_released", [])
    values(on_devices(hangs_at_the_end, 2))
    assert len(ipc._never_released) == 2, "its own window and the other's"


def fixed(group: Any, device_api: Any) -> None:
    random = torch.Generator().manual_seed(group.rank())
    mine = torch.randn(COUNT, generator=random) * torch.logspace(-30, 20, COUNT)
    mine[[5, 1000, 30_000]] = torch.tensor([torch.inf, torch.nan, -torch.inf if group.rank() else torch.inf])
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
        on_cpu, on_device = mine.clone(), device_api.tensor(mine)
        group.allreduce([on_device], reduce_options(op)).wait()
        group.allreduce([on_cpu], reduce_options(op)).wait()
        found = device_api.value(on_device)
        same = (found.view(torch.int32) == on_cpu.view(torch.int32)) | (found.isnan() & on_cpu.isnan())
        assert same.all(), (op, same.logical_not().nonzero()[:5], found[~same][:5], on_cpu[~same][:5])


@pytest.mark.parametrize("world", [*WORLDS, "staged"])
def test_sums_by_i32_have_the_bits_of_sums_on_a_host(world: str) -> None:
    options, hosts = WORLDS.get(world, ({"intra_host": "off", "pinned_bytes": 240 << 10}, (0, 0, 0)))
    values(on_devices(fixed, len(hosts), "late", hosts=hosts, wire_dtype="i32", **options))


def reduce_and_say(group: Any, device_api: Any) -> str:
    tensor = device_api.tensor(distinct(group.rank(), COUNT))
    group.allreduce([tensor], reduce_options()).wait()
    assert torch.equal(device_api.value(tensor), sum(distinct(rank, COUNT) for rank in range(group.size())))
    return str(group.devices.why())


def refusing(device_api: Any) -> None:
    device_api.hidden = {1 - device_api.device.index}
    if device_api.device.index == 1:
        device_api.refuses = "CUDA error: peer access is not supported\nand more"


def test_if_a_rank_cannot_open_a_peers_memory_no_rank_does_and_the_log_says_why(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO, "netfold"):
        said = values(on_devices(reduce_and_say, 2, before=refusing))
    due = (
        "IPC disabled because rank 1 cannot open the memory of rank 0 on FAKE-0000, which it does not see "
        "(CUDA_VISIBLE_DEVICES): CUDA error: peer access is not supported; staged through"
    )
    assert all(due in each for each in said), said
    assert [due in record.getMessage() for record in caplog.records if record.levelno == logging.WARNING] == [True]


def blocks_at_the_first_call(group: Any, device_api: Any) -> None:
    tensor = device_api.tensor(distinct(group.rank(), COUNT))
    group.allreduce([tensor], reduce_options(timeout_s=10)).block_current_stream()
    assert torch.equal(device_api.value(tensor), sum(distinct(rank, COUNT) for rank in range(group.size())))


def test_windows_that_are_given_up_are_closed_while_the_users_stream_waits() -> None:
    """torch's end of a window waits for the thread's current stream: the one that waits for this call's result."""
    values(on_devices(blocks_at_the_first_call, 3, before=refusing))


def hiding(device_api: Any) -> None:
    device_api.hidden = {1 - device_api.device.index}


def test_devices_that_are_hidden_from_a_rank_are_reached() -> None:
    said = values(on_devices(reduce_and_say, 2, before=hiding))
    assert all("by IPC among the 2 ranks of a host" in each for each in said), said


def test_hosts_of_different_sizes_go_through_the_host() -> None:
    said = values(on_devices(reduce_and_say, 3, hosts=(0, 0, 1)))
    assert all("IPC disabled because hosts have different numbers of ranks, 1 to 2" in each for each in said), said


def test_ranks_that_share_no_memory_go_through_the_host() -> None:
    said = values(on_devices(reduce_and_say, 2, transport="tcp"))
    assert all("IPC disabled because no two ranks share a host's memory" in each for each in said), said


def same_device(device_api: Any) -> None:
    device_api.device = torch.device("cuda", 0)


def test_nccl_is_refused_where_two_ranks_have_one_device() -> None:
    for outcome in on_devices(reduce_and_say, 2, before=same_device, intra_host="nccl"):
        assert outcome.error == "ValueError"
        assert "NETFOLD_INTRA_HOST=nccl cannot be done: ranks 0 and 1 are both on FAKE-0000" in outcome.text


def i8_wire(group: Any, device_api: Any) -> Any:
    """Summed in floats inside the hosts: only the hosts' sums are rounded. One host rounds nothing."""
    size, hosts = group.size(), len(set(group.netfold.nodes))
    scale = torch.ones(COUNT)
    scale[COUNT // 128 * 128 :] = 1e-4  # the last block, which NCCL's buffers fill up
    mine = distinct(group.rank(), COUNT) * scale
    tensor = device_api.tensor(torch.zeros(COUNT))
    device_api.compute(lambda: tensor.copy_(mine))
    group.allreduce([tensor], reduce_options()).wait()
    found, due = device_api.value(tensor), sum(distinct(rank, COUNT) * scale for rank in range(size))
    greatest = max(float(distinct(rank, COUNT).max()) for rank in range(size)) * size / hosts
    most = 1e-6 if hosts == 1 else hosts / (127 // hosts)  # 1e-6: the order of a sum
    off = (found - due).abs() / scale / greatest
    assert float(off.max()) <= most, off.max()
    assert hosts == 1 or not torch.equal(found, due), "rounded"
    return found


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("world", WORLDS)
def test_sums_by_i8_are_rounded_between_hosts_only(world: str, order: Any) -> None:
    options, hosts = WORLDS[world]
    found = values(on_devices(i8_wire, len(hosts), order, hosts=hosts, wire_dtype="i8", **options))
    assert all(torch.equal(each, found[0]) for each in found)


def parts_of_every_rank(group: Any, device_api: Any, dtype_name: str) -> None:
    """all_gather, reduce_scatter and all_reduce of several chunks, none waited for before the last."""
    size, rank, dtype = group.size(), group.rank(), getattr(torch, dtype_name)

    def mine(of: int, more: int = 0) -> Any:
        return ((distinct(of, COUNT) + more) % 251).to(dtype)

    own = device_api.tensor(torch.zeros(COUNT, dtype=dtype))
    device_api.compute(lambda: own.copy_(mine(rank)))
    outs = [device_api.tensor(torch.full((COUNT,), 3, dtype=dtype)) for _ in range(size)]
    parts = [device_api.tensor(mine(rank, each)) for each in range(size)]
    summed, most = (device_api.tensor(torch.zeros(COUNT, dtype=dtype)) for _ in range(2))
    by_max = dist.ReduceScatterOptions()
    by_max.reduceOp = dist.ReduceOp.MAX
    again = [device_api.tensor(torch.zeros(COUNT, dtype=dtype)) for _ in range(size)]
    works = [
        group.allgather([outs], [own]),
        group.reduce_scatter([summed], [parts]),
        group.allreduce([own], reduce_options(dist.ReduceOp.MAX)),  # over what the first call reads
        group.allgather([again], [own]),
        group.reduce_scatter([most], [parts], by_max),
        group.broadcast([parts[0]], dist.BroadcastOptions()),  # staged, over what the call before reads
    ]
    for work in works:
        work.wait()
    for each in range(size):
        assert torch.equal(device_api.value(outs[each]), mine(each)), each
    stacked = torch.stack([mine(each, rank) for each in range(size)])
    greatest = torch.stack([mine(each) for each in range(size)]).amax(0)
    assert torch.equal(device_api.value(summed), stacked.sum(0).to(dtype))
    assert torch.equal(device_api.value(most), stacked.amax(0))
    for each in [own, *again]:
        assert torch.equal(device_api.value(each), greatest)
    assert torch.equal(device_api.value(parts[0]), mine(0, 0))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("world", ["ipc, one host", "ipc, two hosts"])
def test_parts_are_gathered_and_scattered_inside_and_between_hosts(world: str, order: Any) -> None:
    _, hosts = WORLDS[world]
    values(on_devices(functools.partial(parts_of_every_rank, dtype_name="float32"), len(hosts), order, hosts=hosts))


@pytest.mark.parametrize("dtype", ["int16", "uint8", "float64"])
def test_parts_of_other_dtypes_are_gathered_and_scattered(dtype: str) -> None:
    values(on_devices(functools.partial(parts_of_every_rank, dtype_name=dtype), 4, 1, hosts=(0, 0, 1, 1)))


def writes_over_a_result(group: Any, device_api: Any) -> None:
    """A staged call writes where an earlier call's copies from the windows are still to come."""
    tensor, other = device_api.tensor(distinct(group.rank(), COUNT)), device_api.tensor(torch.full((COUNT,), 7.0))
    root = dist.BroadcastOptions()
    root.rootRank = 1
    first = group.allreduce([tensor], reduce_options())
    second = group.broadcast([other if group.rank() == 1 else tensor], root)
    if group.rank() != 1:
        while not second.is_completed():
            assert second.exception() is None
    for work in (first, second):
        work.wait()
    found = device_api.value(tensor)
    assert group.rank() == 1 or found.eq(7).all(), "the earlier result came after the later one"


@pytest.mark.parametrize("order", ORDERS)
def test_a_staged_result_comes_after_an_earlier_result_from_the_windows(order: Any) -> None:
    """The stream that copies back did not wait for the stream that copies from the windows."""
    small = {"pinned_bytes": 120 << 10}
    values(on_devices(writes_over_a_result, 2, order, **small))


def means(group: Any, device_api: Any) -> None:
    size, rank = group.size(), group.rank()
    by_mean = dist.ReduceScatterOptions()
    by_mean.reduceOp = dist.ReduceOp.AVG
    whole = device_api.tensor(torch.cat([distinct(rank, COUNT) + 7 * each for each in range(size)]))
    own = device_api.tensor(torch.zeros(COUNT))
    group.reduce_scatter_single(own, whole, by_mean).wait()
    due = sum(distinct(each, COUNT) for each in range(size)) / size + 7 * rank
    assert torch.equal(device_api.value(own), due)
    gathered = device_api.tensor(torch.zeros(size * COUNT))
    group.all_gather_single(gathered, own).wait()
    assert torch.equal(device_api.value(gathered).view(size, COUNT)[rank], due)
    # Parts of different sizes are staged.
    outs = [device_api.tensor(torch.zeros(COUNT - each)) for each in range(size)]
    group.allgather([outs], [device_api.tensor(distinct(rank, COUNT - rank))]).wait()
    for each, out in enumerate(outs):
        assert torch.equal(device_api.value(out), distinct(each, COUNT - each))


def test_fsdps_collectives_run_inside_hosts() -> None:
    values(on_devices(means, 4, 2, hosts=(0, 0, 1, 1)))


def overlaps(group: Any, device_api: Any) -> list[str]:
    """The steps of this rank, in order: chunks that begin between hosts, and barriers inside."""
    tensor, steps = device_api.tensor(distinct(group.rank(), COUNT)), []
    group.allreduce([tensor], reduce_options()).wait()
    path = group.devices._paths.intra_host
    begin, gather, step = path.between.begin, path._sums.gather, path.between.step

    def noted(name: str, call: Any) -> Any:
        def run(*of: Any) -> Any:
            steps.append(name)
            return call(*of)

        return run

    path.between.begin, path.between.step = noted("begins", begin), noted("awaits", step)
    path._sums.gather = noted("gathers", gather)
    group.allreduce([tensor], reduce_options()).wait()
    device_api.value(tensor)
    return steps


def test_a_chunk_is_inside_the_hosts_while_the_chunk_before_is_between_them() -> None:
    for steps in values(on_devices(overlaps, 4, "late", hosts=(0, 0, 1, 1))):
        chunks = steps.count("begins")
        assert chunks == 4 and steps[:2] == ["begins", "begins"], steps
        assert steps.index("awaits") > 1 and [each for each in steps if each != "awaits"] == [
            "begins", *["begins", "gathers"] * (chunks - 1), "gathers",
        ], steps  # fmt: skip


def test_chunks_advance_two_at_a_time_in_one_order() -> None:
    done = []

    def chunk(number: int) -> Any:
        for step in range(2):
            done.append((number, step))
            yield
        done.append((number, 2))

    intra_host.advance_in_turn(chunk(number) for number in range(3))
    assert done == [(0, 0), (1, 0), (0, 1), (1, 1), (0, 2), (2, 0), (1, 2), (2, 1), (2, 2)]


def of_another_size(group: Any, device_api: Any) -> None:
    tensor = device_api.tensor(torch.ones(COUNT - 500 * (group.rank() % 2)))
    group.allreduce([tensor], reduce_options()).wait()
    device_api.value(tensor)


@pytest.mark.parametrize("hosts", [(0, 0, 0), (0, 0, 1, 1)])
def test_ranks_of_a_host_whose_calls_differ_get_an_error(hosts: tuple[int, ...]) -> None:
    """A former fault: they added up different elements, and told nobody."""
    for outcome in on_devices(of_another_size, len(hosts), hosts=hosts):
        assert outcome.error in ("Mismatch", "GroupAborted", "PeerLost"), outcome
        assert "all_reduce of 60001 f32" in outcome.text and "all_reduce of 59501 f32" in outcome.text, outcome


def breaks_in_the_middle(group: Any, device_api: Any, kind: str) -> None:
    tensors = [device_api.tensor(torch.ones(COUNT)) for _ in range(group.size())]
    group.allreduce([tensors[0]], reduce_options()).wait()
    if group.rank() == 2:
        copies, original = [0], device_api.copy

        def copy(*of: Any) -> None:
            copies[0] += 1
            if copies[0] > 8:
                device_api.broken = "an uncorrectable ECC error"
            original(*of)

        device_api.copy = copy
    work = (
        group.allgather([tensors], [tensors[0]])
        if kind == "all_gather"
        else group.reduce_scatter([tensors[0]], [tensors])
    )
    work.wait()


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter"])
def test_a_device_that_fails_between_two_chunks_ends_the_call_on_all_ranks(kind: str) -> None:
    outcomes = on_devices(
        functools.partial(breaks_in_the_middle, kind=kind), 4, "late", hosts=(0, 0, 1, 1), timeout_s=30.0
    )
    for outcome in outcomes:
        assert outcome.error and "uncorrectable ECC error" in outcome.text, outcome
