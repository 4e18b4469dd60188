"""Recording a job: the run has the job's operations, and the recording does not change the job."""

from __future__ import annotations

import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from load import seconds
from ranks import run_ranks, values

import netfold
from netfold import Communicator, FileStore
from netfold.profile import RECORD, recording
from netfold.profile.launch import LaunchError, namespace, new_folder
from netfold.profile.run import PROGRESS, GroupName, Trace, read_run
from netfold_plan.request.profile import read_profile

HERE = Path(__file__).parent
NETFOLD = [sys.executable, "-m", "netfold.cli"]
STEPS = 7


def run(
    *words: str | Path, env: dict[str, str] | None = None, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("NETFOLD_")}
    return subprocess.run(
        [str(word) for word in words],
        env={**clean, **(env or {})},
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=seconds(120),
    )


def script(folder: Path, text: str) -> Path:
    path = folder / "script.py"
    path.write_text(textwrap.dedent(text))
    return path


def torchrun(ranks: int, *words: str | Path) -> list[str | Path]:
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), *words]


def placed(rank: int, size: int, port: int) -> dict[str, str]:
    """The variables that torchrun sets for a rank."""
    return {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def _forked(rank: int, size: int, folder: str, port: int, words: list[str]) -> None:
    os.environ.update(placed(rank, size, port))
    sys.argv = words
    runpy.run_path(words[0], run_name="__main__")


def run_forked(ranks: int, *words: str | Path) -> None:
    """Run a script on ranks that are forked with torch imported. Not for tests of the interpreter's end."""
    values(run_ranks(_forked, ranks, free_port(), [str(word) for word in words], timeout_s=120))


def run_started(ranks: int, *words: str | Path) -> str:
    """Run a script on ranks with interpreters of their own; all must exit with 0. Returns what they print."""
    port, command = free_port(), [sys.executable, *map(str, words)]
    started = [
        subprocess.Popen(command, env={**os.environ, **placed(rank, ranks, port)}, stdout=subprocess.PIPE, text=True)
        for rank in range(ranks)
    ]
    try:
        printed = [process.communicate(timeout=seconds(120))[0] for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
    assert [process.returncode for process in started] == [0] * ranks
    return "".join(printed)


def operations(trace: Trace) -> list[tuple[str, str, int]]:
    name_of = trace.metadata.name_of
    ordered = np.sort(trace.operations, order=["group", "sequence"])
    return [
        (name_of("operation", each["operation"]), name_of("dtype", each["dtype"]), int(each["bytes"]))
        for each in ordered
    ]


def check_times(trace: Trace) -> None:
    found = trace.operations
    assert (found["queued_ns"] <= found["started_ns"]).all()
    assert (found["started_ns"] <= found["finished_ns"]).all()
    assert (trace.steps["began_ns"][1:] == trace.steps["ended_ns"][:-1]).all()
    assert (trace.steps["began_ns"] < trace.steps["ended_ns"]).all()
    # All are of one clock: the training thread was watched while the operations ran.
    assert trace.progress["at_ns"][-1] >= found["finished_ns"].max()


@pytest.mark.torch
@pytest.mark.jobs
@pytest.mark.parametrize(("backend", "ranks"), [("gloo", 2), ("netfold", 3)])
def test_a_ddp_job_is_recorded_without_a_line_of_code(backend: str, ranks: int, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    done = run(
        *NETFOLD, "profile", "run", "-o", folder, "--", *torchrun(ranks, HERE / "ddp_job.py", backend, str(STEPS))
    )
    assert done.returncode == 0, done.stderr
    assert f"{ranks} ranks in {folder}; `netfold profile report {folder}`" in done.stderr
    assert "USDT" not in done.stderr and done.stdout == "", "the profiler prints nothing"
    found = read_run(folder)
    assert found.description["command"][-3:] == [str(HERE / "ddp_job.py"), backend, str(STEPS)]
    assert [trace.metadata.rank for trace in found.traces] == list(range(ranks))
    for trace in found.traces:
        assert trace.metadata.size == ranks
        assert trace.metadata.source == {"gloo": "torch profiler", "netfold": "event records"}[backend]
        assert [(group.backend, group.ranks) for group in trace.metadata.groups.values()] == [
            (backend, [*range(ranks)])
        ]
        assert set(map(str, set(trace.operations["group"]))) == set(trace.metadata.groups)
        assert trace.metadata.lost == 0
        assert sorted(trace.operations["sequence"]) == list(range(1, len(trace.operations) + 1))
        seen = operations(trace)
        # The model's one bucket, and what the job does by hand, in its order.
        assert Counter(seen)["all_reduce", "f32", 4000] == STEPS
        assert seen[-4:] == [*(("all_reduce", "f64", 8 * n) for n in (7, 77, 777)), ("broadcast", "i32", 132)]
        assert len(trace.steps) == STEPS - 1
        check_times(trace)
    assert len({tuple(operations(trace)) for trace in found.traces}) == 1, "the ranks' records differ"
    assert len({group.name for trace in found.traces for group in trace.metadata.groups.values()}) == 1
    planned = read_profile(folder).model
    assert (planned.ranks, planned.parameters, planned.bucket_bytes) == (ranks, 1000, (4000,))
    assert 0 < planned.ready_s[0] <= planned.computed_s


@pytest.mark.torch
@pytest.mark.jobs
@pytest.mark.parametrize("backend", ["gloo", "netfold"])
def test_a_job_that_ends_its_group_after_a_moment_is_recorded_whole(backend: str, tmp_path: Path) -> None:
    job = script(
        tmp_path,
        """
        import sys, torch, torch.distributed as dist
        dist.init_process_group(sys.argv[1])
        for _ in range(3):
            dist.all_reduce(torch.ones(100))
            dist.all_to_all_single(torch.empty(200), torch.ones(200))
            dist.all_gather([torch.empty(50), torch.empty(50)], torch.ones(50))
        dist.destroy_process_group()
        """,
    )
    folder = tmp_path / "run"
    done = run(*NETFOLD, "profile", "run", "-o", folder, "--", *torchrun(2, job, backend))
    assert done.returncode == 0, done.stderr
    found = read_run(folder)
    assert [trace.metadata.rank for trace in found.traces] == [0, 1]
    for trace in found.traces:
        # Of what has a block a rank a record has the size of one.
        assert operations(trace) == 3 * [
            ("all_reduce", "f32", 400),
            ("all_to_all", "f32", 400),
            ("all_gather", "f32", 200),
        ]


def test_a_job_without_torch_is_recorded(tmp_path: Path) -> None:
    job = script(
        tmp_path,
        """
        import sys, numpy as np
        from netfold import Communicator, FileStore
        with Communicator(FileStore(sys.argv[1]), 0, 1) as group:
            group.split(0).all_reduce(np.ones(5, np.int64))
            group.all_reduce(np.ones(3, np.float32), op="max")
        assert "torch" not in sys.modules
        """,
    )
    folder = tmp_path / "run"
    done = run(*NETFOLD, "profile", "run", "-o", folder, "--", sys.executable, job, tmp_path / "store")
    assert done.returncode == 0, done.stderr
    (trace,) = read_run(folder).traces
    assert ("all_reduce", "f32", 12) in operations(trace) and ("all_reduce", "i64", 40) in operations(trace)
    assert trace.metadata.name_of("reduce", trace.operations["reduce"].max()) == "max"
    assert len(trace.metadata.groups) == 2
    assert "torch" not in trace.metadata.versions


def test_the_exit_code_is_the_commands_and_a_folder_is_made_for_it(tmp_path: Path) -> None:
    for number in (1, 2):
        done = run(*NETFOLD, "profile", "run", "--", sys.executable, "-c", "raise SystemExit(7)", cwd=tmp_path)
        assert done.returncode == 7
        assert "no process of the job was in a group" in done.stderr
        assert json.loads((tmp_path / f"netfold-profile-{number}" / "run.json").read_text())["command"][1] == "-c"
    killed = run(
        *NETFOLD, "profile", "run", "--", sys.executable, "-c", "import os; os.kill(os.getpid(), 9)", cwd=tmp_path
    )
    assert killed.returncode == 128 + signal.SIGKILL


def test_a_folder_with_something_in_it_is_refused_before_the_start(tmp_path: Path) -> None:
    (tmp_path / "other").write_text("")
    touch = ["-c", f"open({str(tmp_path / 'ran')!r}, 'w')"]
    done = run(*NETFOLD, "profile", "run", "-o", tmp_path, "--", sys.executable, *touch)
    assert done.returncode == 2 and "is not empty" in done.stderr
    assert not (tmp_path / "ran").exists()
    with pytest.raises(ValueError, match="holds other, which is not part of a profile"):
        netfold.profile(tmp_path).start()
    assert recording.current() is None


ACROSS_HOSTS = """
    import numpy as np
    from netfold import Communicator
    with Communicator.from_environment() as group:
        group.all_reduce(np.ones(9, np.float32))
"""


def test_launchers_of_several_hosts_record_into_one_folder(tmp_path: Path) -> None:
    """As on hosts with a shared folder: a launcher each, the second finds what the first has left."""
    folder, port = tmp_path / "run", free_port()
    words = [*NETFOLD, "profile", "run", "-o", folder, "--", sys.executable, script(tmp_path, ACROSS_HOSTS)]
    command = [str(word) for word in words]
    first = subprocess.Popen(command, env={**os.environ, **placed(0, 2, port)}, stderr=subprocess.PIPE, text=True)
    try:
        until_s = time.monotonic() + seconds(60)
        while not (folder / "run.json").exists() and first.poll() is None and time.monotonic() < until_s:
            time.sleep(0.01)
        second = run(*words, env=placed(1, 2, port))
        said = first.communicate(timeout=seconds(60))[1]
    finally:
        first.kill()
        first.wait()
    assert (first.returncode, second.returncode) == (0, 0), said + second.stderr
    assert [trace.metadata.rank for trace in read_run(folder).traces] == [0, 1]
    assert sorted(each.name for each in folder.iterdir()) == ["rank-0000", "rank-0001", "run.json"]
    with pytest.raises(LaunchError, match=r"holds an earlier profile, .*; name a new folder"):
        new_folder(folder)


def test_a_folder_can_be_shared_while_another_launcher_runs(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{}")
    (tmp_path / "rank-0000").mkdir()
    mark = tmp_path / "launch-other-7"
    of_this = {"host": "other", "namespace": "another machine's", "pid": 7, "job": {}}

    def refused(**changes: Any) -> str:
        mark.write_text(json.dumps(of_this | changes))
        try:
            new_folder(tmp_path)
        except LaunchError as error:
            return str(error)
        return ""

    assert refused() == ""
    assert "holds an earlier profile" in refused(namespace=namespace(), pid=own_dead_child()), "it was killed"
    assert refused(namespace=namespace(), pid=os.getpid()) == ""
    assert "SLURM_JOB_ID" in refused_in_job("4", lambda: refused(job={"SLURM_JOB_ID": "3"}))
    assert refused_in_job("3", lambda: refused(job={"SLURM_JOB_ID": "3"})) == ""
    mark.write_text("{")
    new_folder(tmp_path)  # it is being written
    os.utime(mark, (time.time() - 3600, time.time() - 3600))
    with pytest.raises(LaunchError, match="holds an earlier profile"):
        new_folder(tmp_path)
    (tmp_path / "notes").write_text("")
    os.utime(mark)
    with pytest.raises(LaunchError, match="is not empty: it holds notes"):
        new_folder(tmp_path)


def own_dead_child() -> int:
    child = subprocess.Popen(["true"])
    child.wait()
    return child.pid


def refused_in_job(number: str, refused: Callable[[], str]) -> str:
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("SLURM_JOB_ID", number)
        return refused()


def in_a_script(rank: int, size: int, folder: str, run_folder: str) -> Any:
    with Communicator(FileStore(folder), rank, size, timeout_s=20) as group:
        group.all_reduce(np.ones(9, np.float32))
        with netfold.profile(run_folder) as profile:
            with pytest.raises(RuntimeError, match="recorded already"):
                netfold.profile(run_folder).start()
            for count in (10, 20, 30):
                profile.step()
                group.all_reduce(np.ones(count, np.float32))
            netfold.profile.step()
        group.all_reduce(np.ones(40, np.float32))
        with pytest.raises(ValueError, match=f"holds a profile of rank {rank} already"):
            netfold.profile(run_folder).start()
    return [thread.name for thread in threading.enumerate() if thread.name == "netfold records"]


def test_a_marked_part_of_a_script_is_recorded(tmp_path: Path) -> None:
    assert values(run_ranks(in_a_script, 2, str(tmp_path / "run"))) == [[], []]
    traces = read_run(tmp_path / "run").traces
    assert [trace.metadata.size for trace in traces] == [2, 2]
    for trace in traces:
        assert [each[2] for each in operations(trace)] == [40, 80, 120], "neither what was before nor what came after"
        assert len(trace.steps) == 3
        check_times(trace)
    assert len({group.name for trace in traces for group in trace.metadata.groups.values()}) == 1


def test_the_package_can_be_called_and_imported_from() -> None:
    import netfold.profile.run

    assert netfold.profile.run.read_run is read_run
    assert callable(netfold.profile) and netfold.profile.RECORD is RECORD


@pytest.mark.torch
def test_a_type_checker_accepts_the_call(tmp_path: Path) -> None:
    text = """
    import netfold
    from netfold.profile.recording import Recording

    with netfold.profile("RUN") as recording:
        netfold.profile.step()
    wanted: Recording = recording
    wrong: int = recording
    """
    done = run(sys.executable, "-m", "mypy", "--strict", "--cache-dir", tmp_path / "cache", script(tmp_path, text))
    assert done.stdout.count("error:") == 1 and 'variable has type "int"' in done.stdout, done.stdout


def test_without_a_recording_nothing_is_loaded(tmp_path: Path) -> None:
    job = script(
        tmp_path,
        """
        import os, sys, threading, torch
        assert not [name for name in sys.modules if name.startswith(("netfold._native", "netfold.profile"))]
        from torch.optim import optimizer
        assert not optimizer._global_optimizer_post_hooks
        assert not torch._C._autograd._profiler_enabled()
        from netfold import Communicator, FileStore
        threads = set(os.listdir("/proc/self/task"))
        with Communicator(FileStore(sys.argv[1]), 0, 1) as group:
            names = [thread.name for thread in threading.enumerate()]
            assert "netfold records" not in names, names
            from netfold._native import engine
            engine.ComputeSampler(threading.main_thread().ident, os.getpid()).stop()  # no other sampler is running
        assert "netfold.profile.torch.source" not in sys.modules
        """,
    )
    done = run(sys.executable, job, tmp_path / "store")
    assert done.returncode == 0, done.stderr


def goes_on(rank: int, size: int, folder: str) -> Any:
    import contextlib
    import io

    said = io.StringIO()
    with contextlib.redirect_stderr(said), Communicator(FileStore(folder), rank, size, timeout_s=20) as group:
        for _ in range(3):
            group.all_reduce(np.ones(10, np.float32))
            time.sleep(recording.WRITE_S)
        total = group.all_reduce(np.full(10, rank + 1, np.float32))
    return said.getvalue(), total.tolist()


def test_a_full_disk_ends_the_recording_and_not_the_training(tmp_path: Path) -> None:
    (tmp_path / "run" / "rank-0000").mkdir(parents=True)
    (tmp_path / "run" / "rank-0000" / "operations").symlink_to("/dev/full")
    outcomes = values(run_ranks(goes_on, 2, env={"NETFOLD_PROFILE": str(tmp_path / "run")}))
    assert [total for _, total in outcomes] == [[3.0] * 10] * 2
    assert outcomes[0][0].count("netfold:") == 1
    assert "profiling ends here, training goes on: [Errno 28] No space left on device" in outcomes[0][0]
    assert outcomes[1][0] == ""
    (tmp_path / "run" / "rank-0000" / "operations").unlink()
    assert len(read_run(tmp_path / "run").traces[1].operations) >= 4


def test_a_folder_that_cannot_be_created_is_reported_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    outcomes = values(run_ranks(goes_on, 2, env={"NETFOLD_PROFILE": str(tmp_path / "file" / "run")}))
    for said, total in outcomes:
        assert said.count("netfold:") == 1 and "training goes on" in said
        assert total == [3.0] * 10


def is_killed(rank: int, size: int, folder: str, path: str) -> Any:
    group = Communicator(FileStore(folder), rank, size, timeout_s=20)
    for _ in range(7):
        group.all_reduce(np.ones(10, np.float32))
    if rank == 1:
        kept = Path(path) / "rank-0001"
        for name, size_bytes in (("operations", 7 * RECORD.itemsize), ("progress", 2 * PROGRESS.itemsize)):
            while not (kept / name).exists() or (kept / name).stat().st_size < size_bytes:
                time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    group.close()
    return True


def test_a_killed_rank_leaves_its_records(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run_ranks(is_killed, 2, str(folder), env={"NETFOLD_PROFILE": str(folder)}, dies=[1])
    killed = read_run(folder).traces[1]
    assert [each[2] for each in operations(killed)][:7] == [40] * 7
    assert killed.metadata.name_of("algorithm", killed.operations["algorithm"][0]) == "shared_memory"
    assert len(killed.progress) > 1


def again_and_in_a_child(rank: int, size: int, folder: str) -> Any:
    for number in range(2):
        with Communicator(FileStore(f"{folder}/{number}"), 0, 1) as group:
            group.all_reduce(np.ones(number + 1, np.float32))
    child = os.fork()
    if child == 0:
        code = 1
        try:
            assert recording.current() is None
            # As another rank of the job: each has a folder of its own.
            with Communicator(FileStore(f"{folder}/child-{rank}"), 0, 1) as group:
                group.all_reduce(np.ones(50, np.float32))
            current = recording.current()
            assert current is not None
            current.stop()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_new_groups_and_the_child_of_a_fork_are_recorded(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert values(run_ranks(again_and_in_a_child, 1, env={"NETFOLD_PROFILE": str(folder)})) == [0]
    (trace,) = read_run(folder).traces
    assert len(trace.metadata.groups) == 1, "the child, rank 0 of a group of its own, has replaced what its parent left"
    assert [each[2] for each in operations(trace)] == [200]


def overran(rank: int, size: int, folder: str) -> tuple[int, int]:
    raw = np.zeros(10, RECORD).tobytes()
    reads = iter([(5, raw), (105, raw), (115, raw)])  # 5 before the recording
    member = recording.Member(1 << 40, GroupName("a", "netfold"), 0, 1, lambda since: next(reads, (115, b"")))
    recording.joined(member)
    with netfold.profile(Path(folder, "run")):
        time.sleep(0.2)
    (trace,) = read_run(Path(folder, "run")).traces
    return len(trace.operations), trace.metadata.lost


def test_records_lost_by_a_full_ring_buffer_are_counted() -> None:
    # In a process of its own: in this one, groups that other tests left are recorded, too.
    assert values(run_ranks(overran, 1)) == [(20, 90)]


def in_mid_job(rank: int, size: int, folder: str) -> list[int]:
    counts = []
    with Communicator(FileStore(folder), rank, size) as group:
        for run, calls in (("first", 5), ("second", 7)):
            for _ in range(100):
                group.all_reduce(np.ones(10))
            with netfold.profile(Path(folder, run)):
                for _ in range(calls):
                    group.all_reduce(np.ones(10))
            counts += [
                len(each.operations) for each in read_run(Path(folder, run)).traces if each.metadata.rank == rank
            ]
    return counts


def test_earlier_operations_of_a_group_are_not_recorded() -> None:
    assert values(run_ranks(in_mid_job, 2)) == [[5, 7]] * 2


SEVERAL_GROUPS = """
    import sys, torch, torch.distributed as dist, netfold
    with netfold.profile(sys.argv[1]):
        dist.init_process_group("gloo")
        rank = dist.get_rank()
        low, high = dist.new_group([0, 1], group_desc="low"), dist.new_group([1, 2])
        for turn in range(1000):
            netfold.profile.step()
            work = dist.all_reduce(torch.ones(10), async_op=True)
            for group, ranks in ((low, (0, 1)), (high, (1, 2))):
                if rank in ranks:
                    dist.all_reduce(torch.ones(20), group=group)
            work.wait()
        if rank == 0:
            dist.send(torch.ones(5), 1)
        elif rank == 1:
            dist.recv(torch.ones(5), 0)
        dist.barrier()
"""


@pytest.mark.torch
def test_operations_of_several_gloo_groups_are_kept_apart(tmp_path: Path) -> None:
    run_forked(3, script(tmp_path, SEVERAL_GROUPS), tmp_path / "run")
    for trace in read_run(tmp_path / "run").traces:
        about, rank = trace.metadata, trace.metadata.rank
        assert about.lost == 0, "steps are when nothing is under way"
        expected = {"default_pg": [0, 1, 2], "low": [0, 1], "group 2": [1, 2]}
        mine = {name: ranks for name, ranks in expected.items() if rank in ranks}
        assert {group.name: group.ranks for group in about.groups.values() if group.ranks} == mine
        for number, group in about.groups.items():
            found = trace.operations[trace.operations["group"] == int(number)]
            calls = [(about.name_of("operation", each["operation"]), int(each["bytes"])) for each in found]
            if not group.ranks:
                assert calls == []
                continue
            elements = 40 if group.name == "default_pg" else 80
            counts = {("all_reduce", elements): 1000, **({("barrier", 0): 1} if elements == 40 else {})}
            assert Counter(calls) == counts
            assert sorted(found["sequence"]) == list(range(1, sum(counts.values()) + 1))
        assert len(trace.steps) == 999
        assert any("Messages between two ranks" in each for each in about.coverage_gaps) == (rank < 2)


USERS_PROFILER = """
    import sys, time, torch, torch.distributed as dist, netfold
    with netfold.profile(sys.argv[1]) as profile:
        dist.init_process_group("gloo")
        dist.all_reduce(torch.ones(1))
        with torch.profiler.profile() as theirs:
            for _ in range(3):
                dist.all_reduce(torch.ones(2))
                time.sleep(0.8)
                profile.step()
        assert sum(event.name == "gloo:all_reduce" for event in theirs.events()) == 3
        profile.step()
        dist.all_reduce(torch.ones(4))
"""


@pytest.mark.torch
def test_a_users_profiler_has_precedence_and_gaps_are_reported(tmp_path: Path) -> None:
    run_forked(2, script(tmp_path, USERS_PROFILER), tmp_path / "run")
    for trace in read_run(tmp_path / "run").traces:
        # The first is there if its window was read before the other profiler ended it.
        assert operations(trace)[-1] == ("all_reduce", "f32", 16)
        assert ("all_reduce", "f32", 8) not in operations(trace)
        assert trace.operations["sequence"].tolist()[-1] == 5, "numbers go on from the group's own"
        assert any("profiler of the job's own ran" in each for each in trace.metadata.coverage_gaps)


WITHOUT_STEPS = """
    import sys, time, torch, torch.distributed as dist, netfold
    from netfold.profile.torch import window as profiler_window
    profiler_window.MAX_OPERATIONS = 100
    with netfold.profile(sys.argv[1]) as profile:
        dist.init_process_group("gloo")
        for _ in range(200):
            dist.all_reduce(torch.ones(1))
            time.sleep(0.02)
"""


@pytest.mark.torch
def test_a_job_without_steps_is_read_at_the_end_up_to_a_bound(tmp_path: Path) -> None:
    run_forked(2, script(tmp_path, WITHOUT_STEPS), tmp_path / "run")
    for trace in read_run(tmp_path / "run").traces:
        assert 100 <= len(trace.operations) < 200
        assert len(trace.operations) + trace.metadata.lost == 200
        assert trace.operations["sequence"].tolist() == list(range(1, len(trace.operations) + 1))
        assert any("should call netfold.profile.step()" in each for each in trace.metadata.coverage_gaps)
        assert len(trace.steps) == 0


MARKS = """
    import sys, torch, torch.distributed as dist, netfold
    from torch.nn.parallel import DistributedDataParallel
    from netfold.profile.torch import window as profiler_window
    profiler_window.WINDOW_S = 0.0  # every step's hook reads, within the optimizer's own mark
    dist.init_process_group("gloo")
    layers = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
    model = DistributedDataParallel(layers, bucket_cap_mb=0.01)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    with netfold.profile(sys.argv[1]):
        for _ in range(200):
            with torch.profiler.record_function("mine"):
                model(torch.ones(1, 64)).sum().backward()
                optimizer.step()
"""


@pytest.mark.torch
def test_reading_within_marks_and_right_after_buckets_is_safe(tmp_path: Path) -> None:
    run_forked(2, script(tmp_path, MARKS), tmp_path / "run")
    for trace in read_run(tmp_path / "run").traces:
        assert trace.metadata.lost == 0
        numbers = sorted(trace.operations["sequence"])
        assert numbers == list(range(numbers[0], numbers[-1] + 1))
        assert len(trace.operations) > 400
        assert len(trace.steps) == 199


UNDER_WAY = """
    import os, sys, time, torch, torch.distributed as dist, netfold
    dist.init_process_group("gloo")
    rank, ones = dist.get_rank(), torch.ones(3)
    store = dist.distributed_c10d._get_default_store()
    with netfold.profile(sys.argv[1]):
        dist.all_reduce(torch.ones(2))
        if rank == 1:
            work = dist.all_reduce(ones, async_op=True)
    # Nothing is marked any more, and what was under way ends: where it writes to is still there.
    if rank == 1:
        store.set("ended", "")
        work.wait()
        # torch's gloo may abort where the interpreter's end is what releases it.
        del work
    else:
        store.wait(["ended"])
        dist.all_reduce(ones)
    assert ones.tolist() == [2.0] * 3
    with netfold.profile(sys.argv[1] + "-again"):
        dist.all_reduce(torch.ones(4))
    with torch.profiler.profile() as own:
        dist.all_reduce(torch.ones(5))
    assert any("all_reduce" in each.name for each in own.events())
    dist.destroy_process_group()
    # The same where its profiler's threads are what the interpreter's end releases.
    os._exit(0)
"""


@pytest.mark.torch
def test_operations_under_way_at_the_end_are_lost_and_keep_their_buffers(tmp_path: Path) -> None:
    run_started(2, script(tmp_path, UNDER_WAY), tmp_path / "run")
    for name in ("run", "run-again"):
        first, second = read_run(tmp_path / name).traces
        assert len(first.operations) == 1
        assert len(second.operations) == 0
        assert any("did not end within 1 s" in each for each in second.metadata.coverage_gaps)
        assert not any("did not end within 1 s" in each for each in first.metadata.coverage_gaps)
        assert not any("profiler of the job's own" in each for each in second.metadata.coverage_gaps)
    assert read_run(tmp_path / "run").traces[1].metadata.lost == 2


STOPPED = """
    import signal, sys, threading, time, torch, torch.distributed as dist, netfold
    from netfold.profile import recording
    dist.init_process_group("gloo")
    profile = netfold.profile(sys.argv[1]).start()
    dist.all_reduce(torch.ones(2))
    if sys.argv[2] == "by another thread":
        stopper = threading.Thread(target=profile.stop)
        stopper.start()
        stopper.join()
    else:
        # The handler raises during the wait for the writer.
        writes, writing = profile._write_or_fail, threading.Event()
        def slowly():
            writing.set()
            time.sleep(1)
            return writes()
        profile._write_or_fail = slowly
        writing.wait()
        def interrupt(*_):
            raise KeyboardInterrupt
        signal.signal(signal.SIGALRM, interrupt)
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        try:
            profile.stop()
        except KeyboardInterrupt:
            print("interrupted")
    assert torch.autograd._profiler_enabled(), "what is on this thread is still to be ended"
    if sys.argv[3] == "with steps":
        torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=1.0).step()
        assert torch.autograd._profiler_enabled() == (sys.argv[2] == "interrupted")
    dist.destroy_process_group()
"""


@pytest.mark.torch
@pytest.mark.jobs
@pytest.mark.parametrize(("stopped", "steps"), [("by another thread", "without"), ("interrupted", "with steps")])
def test_an_interrupted_stop_is_repeated_before_the_process_ends(stopped: str, steps: str, tmp_path: Path) -> None:
    """torch's profiler, left on, would crash the process in its destructors."""
    printed = run_started(2, script(tmp_path, STOPPED), tmp_path / "run", stopped, steps)
    assert printed.count("interrupted") == (2 if stopped == "interrupted" else 0)
    for trace in read_run(tmp_path / "run").traces:
        if stopped == "interrupted":
            assert operations(trace) == [("all_reduce", "f32", 8)]
