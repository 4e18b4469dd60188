"""Features of `probe.py`: how torch's own tools see a backend's operations."""

from __future__ import annotations

import contextlib
import io
import pickle
from typing import Any

from probe import AbsentError, World, feature, refused
from probe_collectives import everyone, mine, same

RECORDED = (("TORCH_FR_BUFFER_SIZE", "200"), ("TORCH_NCCL_TRACE_BUFFER_SIZE", "200"))


def calls(world: World) -> None:
    """Three all_reduces, one of them asynchronous, and a broadcast."""
    import torch.distributed as dist

    for async_op in (False, True, False):
        tensor = mine(world.rank)
        work = dist.all_reduce(tensor, async_op=async_op)
        if async_op:
            work.wait()
        same(tensor, everyone(world.size).sum(0))
    dist.broadcast(mine(world.rank), 0)


@feature()
def sequence_numbers(world: World) -> None:
    """The group's number grows with its collectives."""
    import torch
    import torch.distributed as dist

    group = dist.new_group()
    before = group._get_sequence_number_for_group()
    for _ in range(3):
        dist.all_reduce(torch.ones(4), group=group)
    assert group._get_sequence_number_for_group() == before + 3


def recorded(world: World) -> dict[str, Any]:
    """This rank's dump of torch's flight recorder, after `calls`."""
    import torch._C._distributed_c10d as native
    import torch.distributed as dist

    calls(world)
    dist.barrier()
    dump = getattr(native, "_dump_fr_trace", None)
    if dump is None:
        raise AbsentError("no dump of a flight recorder for the CPU")
    found: dict[str, Any] = {}
    # Newer torch keeps a recorder for each backend's name.
    for arguments in ({"backend": world.backend}, {}):
        with contextlib.suppress(TypeError):
            found = pickle.loads(dump(**arguments))
            if found.get("entries"):
                return found
    return found


@feature(environment=RECORDED)
def flight_recorder(world: World) -> None:
    """Every operation is in the dump, with its sizes and dtypes."""
    found = recorded(world)
    entries = found.get("entries") or []
    names = [entry["profiling_name"] for entry in entries]
    assert sum("all_reduce" in name or "allreduce" in name for name in names) == 3, names
    assert any("broadcast" in name for name in names), names
    assert all(name.startswith(f"{world.backend}:") for name in names), names
    first = next(entry for entry in entries if "reduce" in entry["profiling_name"])
    assert [list(sizes) for sizes in first["input_sizes"]] == [[6]], first["input_sizes"]
    assert list(first["input_dtypes"]) == ["Float"], first["input_dtypes"]


@feature(environment=RECORDED)
def flight_recorder_states(world: World) -> None:
    """An operation that is done is marked as completed."""
    entries = recorded(world).get("entries") or []
    states = [entry["state"] for entry in entries if "reduce" in entry["profiling_name"]]
    assert states == ["completed"] * 3, states


@feature(environment=RECORDED, imports=("torch.distributed.flight_recorder.fr_trace",))
def flight_recorder_analyser(world: World) -> None:
    """torch's own analyser reads both ranks' dumps and finds that they match."""
    import os

    import torch.distributed as dist

    try:
        from torch.distributed.flight_recorder import fr_trace
        from torch.distributed.flight_recorder.components.types import MatchState
    except ImportError as error:
        raise AbsentError(f"no analyser in the wheel: {error}") from None
    assert MatchState
    found = recorded(world)
    assert found.get("entries"), "the dump has no entries"
    os.makedirs(f"{world.folder}/dumps", exist_ok=True)
    with open(f"{world.folder}/dumps/rank_{world.rank}", "wb") as file:
        pickle.dump(found, file)
    dist.barrier()
    if world.rank == 0:
        with contextlib.redirect_stdout(io.StringIO()):
            fr_trace.main([f"{world.folder}/dumps", "-p", "rank_", "-o", f"{world.folder}/analysed"])
        with open(f"{world.folder}/analysed", "rb") as file:
            _, analysed = pickle.load(file)
        assert len(analysed.collectives) >= 4, analysed
    dist.barrier()


def profiled(world: World, **options: Any) -> list[Any]:
    import torch

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], **options) as profile:
        calls(world)
    return list(profile.events())


@feature(imports=("torch.profiler",))
def profiler_events_of_the_backend(world: World) -> None:
    """`gloo:all_reduce` and the like, with shapes."""
    events = profiled(world, record_shapes=True)
    ours = [event for event in events if event.name == f"{world.backend}:all_reduce"]
    assert len(ours) == 3, sorted({event.name for event in events})
    assert all([6] in [list(shape) for shape in event.input_shapes] for event in ours), ours[0].input_shapes


@feature(imports=("torch.profiler",))
def profiler_events_of_operators(world: World) -> None:
    """`c10d::allreduce_`, as of any backend behind torch's dispatcher."""
    names = [event.name for event in profiled(world)]
    assert names.count("c10d::allreduce_") == 3, sorted(set(names))
    assert names.count("c10d::broadcast_") == 1, sorted(set(names))


@feature(imports=("torch.profiler",))
def profiler_asynchronous_events(world: World) -> None:
    """The legacy profiler's events of collectives are asynchronous ones: from submission to completion."""
    import torch

    with torch.autograd.profiler.profile() as profile:
        calls(world)
    ours = [event for event in profile.function_events if event.name == f"{world.backend}:all_reduce"]
    assert len(ours) == 3 and all(event.is_async for event in ours), [(event.name, event.is_async) for event in ours]


@feature(imports=("torch.profiler",))
def profiler_communication_parameters(world: World) -> None:
    """`record_param_comms` in the exported trace: group, sizes and dtype of each collective."""
    import json

    import torch

    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU],
        execution_trace_observer=None,
        record_shapes=True,
    ) as profile:
        calls(world)
    path = f"{world.folder}/trace-{world.rank}.json"
    profile.export_chrome_trace(path)
    with open(path) as file:
        events = json.load(file)["traceEvents"]
    found = [event for event in events if event.get("name") == "record_param_comms"]
    assert found, "no such event"


@feature()
def comm_debug_mode(world: World) -> None:
    """torch's counter of collectives counts those of `torch.distributed`."""
    import torch
    import torch.distributed as dist
    from torch.distributed.tensor.debug import CommDebugMode

    with CommDebugMode() as mode:
        dist.all_reduce(torch.ones(4))
    assert mode.get_total_counts() == 1, mode.get_comm_counts()


@feature()
def hooks_before_and_after(world: World) -> None:
    """A group's own hooks see each operation before and after it is issued."""
    import torch.distributed as dist

    group = dist.group.WORLD
    if not hasattr(group, "register_pre_hook"):
        raise AbsentError("a group has no hooks")
    before: list[Any] = []
    after: list[Any] = []
    group.register_pre_hook(1, lambda seen: before.append((seen.name.name, seen.op_id, len(seen.input_tensors))))
    group.register_post_hook(2, lambda seen: after.append((seen.name.name, seen.op_id, seen.work is not None)))
    calls(world)
    group.unregister_pre_hook(1)
    group.unregister_post_hook(2)
    calls(world)
    assert [name for name, _, _ in before] == ["ALLREDUCE"] * 3 + ["BROADCAST"], before
    assert [each[:2] for each in before] == [each[:2] for each in after], (before, after)
    assert [count for _, _, count in before] == [1] * 4, before


@feature(grouped=False, environment=(("TORCH_DIST_NAN_CHECK", "1"),))
def nan_check(world: World) -> None:
    """`TORCH_DIST_NAN_CHECK=1`: a collective on a NaN raises on the rank that has it."""
    import torch
    import torch._C._distributed_c10d as native
    import torch.distributed as dist

    if not hasattr(native, "NanCheckHook"):
        raise AbsentError("no check of any backend's tensors for NaN")
    world.init()
    calls(world)
    with refused("nan"):
        dist.all_reduce(torch.tensor([1.0, float("nan")]))


@feature()
def abort_hooks(world: World) -> None:
    """A hook that runs before a group is aborted."""
    import torch.distributed as dist

    group = dist.new_group()
    if not hasattr(group, "register_abort_hook"):
        raise AbsentError("a group has no abort hooks")
    ran: list[int] = []
    group.register_abort_hook(1, lambda: ran.append(1))
    group.abort()
    assert ran, "the hook did not run"
