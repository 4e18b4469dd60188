"""NCCL's profiler: the plugin is called as NCCL calls it, and `netfold profile` reads what it wrote.

A process has one recording, so that each scenario is a process of its own.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
from load import seconds
from nccl.profiler_loader import VERSIONS
from sources import HELPERS
from typer.testing import CliRunner

from netfold.cli import app
from netfold.profile.analyse import analyse
from netfold.profile.compare import compare
from netfold.profile.nccl import OPERATION, SOURCE, TRANSFER
from netfold.profile.run import RunError, Trace, read_run

HEAD = """
import os, sys, threading, time
from pathlib import Path
from nccl.profiler_loader import *
profiler = Profiler(int(os.environ.get("VERSION", "6")))
def log(): return [text for level, text in profiler.log if level == 2]
"""


def ran(scenario: str, run: Path | None, *, rank: int | None = None, version: int = 6, **more: str) -> str:
    """The output of a process that runs the scenario, recorded into `run`."""
    env = {name: value for name, value in os.environ.items() if name not in ("NETFOLD_PROFILE", "RANK")}
    env |= {"PYTHONPATH": HELPERS, "VERSION": str(version), **more}
    env |= {} if run is None else {"NETFOLD_PROFILE": str(run)}
    env |= {} if rank is None else {"RANK": str(rank)}
    done = subprocess.run(
        [sys.executable, "-c", HEAD + textwrap.dedent(scenario)],
        env=env,
        capture_output=True,
        text=True,
        timeout=seconds(120),
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def only_trace(run: Path) -> Trace:
    (trace,) = read_run(run).traces
    return trace


ONE = "comm = profiler.comm(77, 0, 1); comm.collective(); comm.finalize()"


@pytest.mark.parametrize("version", VERSIONS)
def test_a_collective_is_read_with_all_that_nccl_said(version: int, tmp_path: Path) -> None:
    """Two ranks, each its own process. The times are those at which NCCL called."""
    scenario = """
        comm = profiler.comm(0xABC, int(os.environ["RANK"]), 2, "tensor parallel")
        before = time.perf_counter_ns()
        comm.collective(sequence=5, count=1000, channels=3, protocol="LL128")
        after = time.perf_counter_ns()
        comm.finalize()
        print(before, after)
    """
    spans = [list(map(int, ran(scenario, tmp_path / "run", rank=rank, version=version).split())) for rank in range(2)]
    run = read_run(tmp_path / "run")
    assert [trace.metadata.rank for trace in run.traces] == [0, 1]
    for trace, (before, after) in zip(run.traces, spans, strict=True):
        (record,) = trace.operations
        about = trace.metadata
        assert about.name_of("operation", record["operation"]) == "all_reduce"
        assert about.name_of("algorithm", record["algorithm"]) == "ring LL128"
        assert about.name_of("dtype", record["dtype"]) == "f32"
        assert record["bytes"] == 4000
        assert record["wire_bytes"] == 3 * 2 * 1000, "two steps of 1000 bytes on each of three channels"
        assert before <= record["queued_ns"] <= record["started_ns"] < record["finished_ns"] <= after
        group = about.groups[str(record["group"])]
        assert (group.name, group.backend, group.ranks, group.is_timed) == ("tensor parallel", "nccl", [0, 1], True)
        assert about.source == SOURCE
        assert about.coverage_gaps == []
        assert trace.nccl is not None
        (row,) = trace.nccl.rows
        assert (row["channels"], row["transfers"], row["received_bytes"]) == (3, 6, 6000)
        assert (row["gpu_began_ns"], row["gpu_ended_ns"]) == (1000, 2000)
        assert (row["called_ns"] > 0) == (row["launched_ns"] > 0) == (version >= 5), "4 has no events of calls"
        assert len(trace.nccl.transfers) == 6
        for transfer in trace.nccl.transfers:
            assert transfer["operation"] == row["id"]
            assert (transfer["bytes"], transfer["steps"], transfer["peer"]) == (2000, 2, 1)
            assert (transfer["net_bytes"], transfer["net_requests"]) == (2000, 2), "netfold's own events"
            assert 0 < transfer["network_ns"] <= transfer["ended_ns"] - transfer["began_ns"]
            assert 0 < transfer["net_ns"] <= transfer["ended_ns"] - transfer["began_ns"]
    found = analyse(run)
    (row,) = found.rows
    assert (row.operation, row.count, row.submitted_only, row.algorithms) == ("all_reduce", 1, False, {"ring LL128": 2})
    assert row.total_s is not None and row.total_s > 0 and row.busbw is not None and row.busbw > 0
    assert found.submissions == {}


def test_verbs_show_a_job_of_nccl(tmp_path: Path) -> None:
    for name in ("a", "b"):
        for rank in range(2):
            scenario = f"comm = profiler.comm(5, {rank}, 2)\nfor i in range(20): comm.collective(i)\ncomm.finalize()"
            ran(scenario, tmp_path / name, rank=rank)
    report = CliRunner().invoke(app, ["profile", "report", str(tmp_path / "a")])
    assert report.exit_code == 0, report.output
    assert "ring Simple" in report.stdout, report.stdout
    compared = compare(read_run(tmp_path / "a"), read_run(tmp_path / "b"))
    assert [(row.operation, row.submitted_only, row.counts) for row in compared.rows] == [
        ("all_reduce", False, (20, 20))
    ]
    trace = tmp_path / "trace.json"
    exported = CliRunner().invoke(app, ["profile", "export", "--perfetto", str(tmp_path / "a"), "-o", str(trace)])
    assert exported.exit_code == 0, exported.output
    events = json.loads(trace.read_text())["traceEvents"]
    sends = [event for event in events if event["name"] == "send to 1"]
    assert len(sends) == 2 * 20 * 2, "of two ranks, 20 operations and two channels"
    assert {event["args"]["operation"] for event in sends} == {"all_reduce"}


def test_it_is_off_unless_asked(tmp_path: Path) -> None:
    assert (
        ran(f"{ONE}\nprint(profiler.mask.value, comm.context.value, comm.submit(None), log())", None)
        == "0 None None []"
    )
    assert list(tmp_path.iterdir()) == []


def test_ends_out_of_order_and_nested_operations_of_several_communicators(tmp_path: Path) -> None:
    """Operations overlap, children begin before the submission ends, and end in another order than they began."""
    scenario = """
        world, tp = profiler.comm(1, 3, 4, "world"), profiler.comm(2, 1, 2, "tp")
        with world.call("AllReduce", 10) as one, tp.call("AllGather", 20) as two:
            pass
        first = world.submit(one, count=10, channels=1)
        early = world.proxy(first)  # before the submission has ended
        second = tp.submit(two, "AllGather", count=20, channels=2, algorithm="TREE", protocol="LL")
        kernels = [world.kernel(first), tp.kernel(second, 0), tp.kernel(second, 1)]
        tp.stop(second); world.stop(first)
        for kernel in reversed(kernels): tp.kernel_stop(kernel)
        between = time.perf_counter_ns()
        world.step(early, 0, 5000)
        world.stop(early)
        tp.finalize(); world.finalize()
        print(between)
    """
    between = int(ran(scenario, tmp_path / "run"))
    trace = only_trace(tmp_path / "run")
    assert trace.metadata.rank == 3, "its place in the first communicator, without a launcher"
    names = [trace.metadata.name_of("operation", each["operation"]) for each in trace.operations]
    groups = [trace.metadata.groups[str(each["group"])] for each in trace.operations]
    assert names == ["all_gather", "all_reduce"], "by their ends"
    assert [group.name for group in groups] == ["tp", "world"]
    assert [group.ranks for group in groups] == [[], []], "the other ranks left nothing"
    gather, reduce = trace.operations
    assert gather["finished_ns"] < between < reduce["finished_ns"], "the last transfer ended the all_reduce"
    assert (reduce["wire_bytes"], gather["wire_bytes"]) == (5000, 0)


def test_an_end_that_never_comes_is_no_time(tmp_path: Path) -> None:
    """One operation whose kernel did not stop, one that was only submitted, one of a copy engine, one that is whole."""
    scenario = """
        comm = profiler.comm(9, 0, 1)
        stuck = comm.submit(None, channels=2); comm.stop(stuck)
        comm.kernel_stop(comm.kernel(stuck, 0)); comm.kernel(stuck, 1)
        comm.stop(comm.submit(None, "Broadcast"))
        comm.stop(comm.start(CE_COLL, None, of="ceColl", func=b"AllGather", count=3, datatype=b"ncclInt8"))
        comm.stop(0x123456); comm.state(0x99, KERNEL_STOP, 1)  # handles of nobody
        comm.collective(1)
        comm.finalize()
    """
    ran(scenario, tmp_path / "run")
    trace = only_trace(tmp_path / "run")
    found = analyse(read_run(tmp_path / "run"))
    timed = {(row.operation, row.submitted_only): row.count for row in found.rows}
    assert timed == {
        ("all_reduce", False): 1,
        ("all_reduce", True): 1,
        ("broadcast", True): 1,
        ("all_gather", True): 1,
    }
    assert any("1 operations of NCCL" in gap and "had not ended" in gap for gap in trace.metadata.coverage_gaps)


def test_what_another_process_sends_for_belongs_to_no_operation_here(tmp_path: Path) -> None:
    scenario = """
        comm = profiler.comm(9, 0, 1)
        operation = comm.submit(None, channels=1); comm.stop(operation)
        foreign = comm.proxy(operation, pid=1); comm.step(foreign, 0, 64); comm.stop(foreign)
        comm.kernel_stop(comm.kernel(operation))
        comm.finalize()
    """
    ran(scenario, tmp_path / "run")
    trace = only_trace(tmp_path / "run")
    assert trace.nccl is not None
    assert trace.nccl.transfers["operation"].tolist() == [0]
    assert trace.operations["wire_bytes"].tolist() == [0]


def test_messages_and_events_of_other_networks(tmp_path: Path) -> None:
    scenario = """
        comm = profiler.comm(9, 0, 2)
        for function in (b"Send", b"Recv"):
            message = comm.start(P2P, None, of="p2p", func=function, count=100, datatype=b"ncclBfloat16", peer=1)
            comm.stop(message)
            proxy = comm.proxy(message, send=function == b"Send")
            step = comm.start(PROXY_STEP, proxy, of="proxyStep", step=0)
            assert comm.start(NET, step, of="netPlugin", id=1 << 16 | 1, data=1) is None  # of InfiniBand: not read
            comm.stop(step); comm.stop(proxy)
            comm.kernel_stop(comm.kernel(message))
        comm.finalize()
    """
    ran(scenario, tmp_path / "run")
    trace = only_trace(tmp_path / "run")
    names = [trace.metadata.name_of("operation", each) for each in trace.operations["operation"]]
    assert names == ["send", "receive"]
    assert trace.operations["bytes"].tolist() == [200, 200]
    assert trace.nccl is not None
    assert trace.nccl.rows["peer"].tolist() == [1, 1]
    assert trace.nccl.transfers["net_requests"].tolist() == [0, 0]


def test_32_threads_lose_nothing(tmp_path: Path) -> None:
    """Each submits, and another thread ends what it submitted."""
    scenario = """
        comms = [profiler.comm(100 + i, 0, 1, f"comm {i}") for i in range(32)]
        started = [threading.Semaphore(0) for _ in comms]
        all_done = threading.Barrier(64)  # so that each thread has a ring of its own
        handles = [[] for _ in comms]
        def submit(i):
            for number in range(40):
                with comms[i].call("AllReduce", 1000 + i) as api: pass
                operation = comms[i].submit(api, sequence=number, count=1000 + i, channels=1)
                handles[i].append(operation); comms[i].stop(operation); started[i].release()
            all_done.wait()
        def serve(i):
            for number in range(40):
                started[i].acquire(); operation = handles[i][number]
                kernel = comms[i].kernel(operation); proxy = comms[i].proxy(operation)
                comms[i].step(proxy, 0, 10 + i); comms[i].stop(proxy); comms[i].kernel_stop(kernel)
            all_done.wait()
        for task in (submit, serve):
            globals()[task.__name__ + "s"] = [threading.Thread(target=task, args=(i,)) for i in range(32)]
        for thread in submits + serves: thread.start()
        for thread in submits + serves: thread.join()
        for comm in comms: comm.finalize()
    """
    ran(scenario, tmp_path / "run")
    trace = only_trace(tmp_path / "run")
    assert trace.metadata.coverage_gaps == []
    assert len(trace.operations) == 32 * 40
    for i in range(32):
        number = next(int(n) for n, group in trace.metadata.groups.items() if group.name == f"comm {i}")
        mine = trace.operations[trace.operations["group"] == number]
        assert set(mine["bytes"].tolist()) == {4 * (1000 + i)}
        assert set(mine["wire_bytes"].tolist()) == {10 + i}
        assert len(set(mine["sequence"].tolist())) == 40


def test_events_that_come_too_fast_are_counted(tmp_path: Path) -> None:
    """More than a thread's ring takes, before its first write: the rest is dropped, and the recording says so."""
    scenario = """
        comm = profiler.comm(9, 0, 1)
        handles = [comm.submit(None, sequence=i, channels=0) for i in range(200_000)]
        print(sum(handle is None for handle in handles))
        for handle in handles: comm.stop(handle)
        comm.finalize()
    """
    refused = int(ran(scenario, tmp_path / "run"))
    trace = only_trace(tmp_path / "run")
    metadata = json.loads(next((tmp_path / "run").glob("nccl-*/metadata.json")).read_text())
    assert metadata["dropped_events"] >= refused
    assert len(trace.operations) + metadata["dropped_events"] >= 200_000, "nothing is missing without being counted"
    if metadata["dropped_events"]:
        assert any("dropped" in gap for gap in trace.metadata.coverage_gaps)


def test_a_process_without_an_end_leaves_what_it_wrote(tmp_path: Path) -> None:
    scenario = """
        comm = profiler.comm(9, 0, 1)
        comm.collective(1)
        path = next(Path(os.environ["NETFOLD_PROFILE"]).glob("nccl-*/operations"))
        while path.stat().st_size == 0: time.sleep(0.01)
        sys.stdout.flush(); os._exit(0)
    """
    ran(scenario, tmp_path / "run")
    trace = only_trace(tmp_path / "run")
    assert len(trace.operations) == 1
    assert any("has no end" in gap for gap in trace.metadata.coverage_gaps)


def test_the_last_records_are_written_without_finalize(tmp_path: Path) -> None:
    ran("comm = profiler.comm(9, 0, 1); comm.collective(1)", tmp_path / "run")
    trace = only_trace(tmp_path / "run")
    assert len(trace.operations) == 1
    assert trace.metadata.coverage_gaps == []


@pytest.mark.parametrize("cut", [1, 60, OPERATION.itemsize + 7])
def test_a_recording_cut_in_the_middle_keeps_its_whole_records(cut: int, tmp_path: Path) -> None:
    ran("comm = profiler.comm(9, 0, 1)\nfor i in range(5): comm.collective(i)\ncomm.finalize()", tmp_path / "run")
    (path,) = (tmp_path / "run").glob("nccl-*/operations")
    path.write_bytes(path.read_bytes()[:-cut])
    whole = 4 if cut < OPERATION.itemsize else 3
    assert len(only_trace(tmp_path / "run").operations) == whole
    shutil.rmtree(tmp_path / "run" / path.parent.name)
    with pytest.raises(RunError, match="holds no profile"):
        read_run(tmp_path / "run")


@pytest.mark.parametrize(
    ("text", "why"), [("{", "JSON|writes"), ('{"format": 2}', "format 2"), ('{"format": 1, "comms": [{}]}', "writes")]
)
def test_a_folder_that_is_no_recording_is_one_sentence(text: str, why: str, tmp_path: Path) -> None:
    folder = tmp_path / "run" / "nccl-host-1"
    folder.mkdir(parents=True)
    (folder / "metadata.json").write_text(text)
    with pytest.raises(RunError, match=why):
        read_run(tmp_path / "run")


def test_a_folder_that_cannot_be_made_is_one_line_and_no_events(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    out = ran(f"{ONE}\nprint(profiler.mask.value, len(log()), log()[0])", blocked / "run")
    assert out.startswith("0 1 the profile ends here, the job goes on: ")
    assert "Not a directory" in out
    assert out.endswith("; set NETFOLD_PROFILE to a folder that can be written")


def test_a_full_disk_ends_the_recording_and_not_the_job(tmp_path: Path) -> None:
    """A limit of the size of files stands for the disk: a write then fails in the same way."""
    scenario = """
        import resource, signal
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        comm = profiler.comm(9, 0, 1)
        comm.collective(0)
        path = next(Path(os.environ["NETFOLD_PROFILE"]).glob("nccl-*/operations"))
        while path.stat().st_size == 0: time.sleep(0.01)
        resource.setrlimit(resource.RLIMIT_FSIZE, (200, 200))
        number = 1
        while not log(): comm.collective(number); number += 1; time.sleep(0.01)
        assert profiler.mask.value == 0 and comm.submit(None) is None  # NCCL is told to stop
        comm.finalize()
        print(len(log()), log()[0])
    """
    out = ran(scenario, tmp_path / "run")
    assert out.startswith("1 the profile ends here, the job goes on: ")
    assert "File too large" in out
    trace = only_trace(tmp_path / "run")
    assert len(trace.operations) == 1
    assert any("has no end" in gap for gap in trace.metadata.coverage_gaps)


def test_a_forked_child_writes_nothing_and_waits_for_nothing(tmp_path: Path) -> None:
    """Its end would wait 2 s for a thread that it does not have."""
    scenario = """
        comm = profiler.comm(9, 0, 1)
        comm.collective(0)
        began = time.monotonic()
        if (child := os.fork()) == 0:
            comm.collective(1); comm.finalize(); sys.exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert time.monotonic() - began < 2, "the child waited"
        comm.finalize()
    """
    ran(scenario, tmp_path / "run")
    assert len(only_trace(tmp_path / "run").operations) == 1


def test_records_have_the_plugins_layout() -> None:
    """The static assertions of core/native/nccl/assembler.hpp hold the other side."""
    assert (OPERATION.itemsize, TRANSFER.itemsize) == (120, 96)
    assert all(np.dtype(kind).fields is not None for kind in (OPERATION, TRANSFER))
