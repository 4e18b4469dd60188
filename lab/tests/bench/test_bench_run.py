"""Whole runs, on this machine and in racks: every backend and collective, and a worker that fails."""

import contextlib
import json
import os
import shlex
import sys
import time
from pathlib import Path

import psutil
import pytest
from load import run as run_command
from load import seconds
from typer.testing import CliRunner

from netfold_lab.bench.collectives import COLLECTIVES, REDOPS
from netfold_lab.bench.config import BenchEnvironment, Trials
from netfold_lab.bench.link_probe import probe_rack
from netfold_lab.bench.mpi_peers import PeerMissingError, have_peer, launch_mpi
from netfold_lab.bench.report import Row, make_rows, total_wrong
from netfold_lab.bench.runner import BenchError, measure, start_runner
from netfold_lab.bench.sizes import DTYPES
from netfold_lab.cli.bench import app
from netfold_lab.rack.command import why_unavailable

LACK = why_unavailable(loss=False)
pytestmark = [pytest.mark.torch, pytest.mark.jobs]


def workers_alive() -> list[str]:
    """Command lines of benchmark workers that run under this process."""
    found = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):  # it ended meanwhile
            found.append(" ".join(child.cmdline()))
    return [line for line in found if "netfold_lab.bench.rank" in line]


def run(place: BenchEnvironment, trials: Trials) -> list[Row]:
    (result,), _ = measure(place, trials)
    return make_rows(place, trials, result)


def test_gloo_against_gloo_is_correct_in_every_element_and_round() -> None:
    trials = Trials("all_reduce", ["gloo", "gloo"], sizes=[4, 1 << 20], rounds=4, warmups=1, breakdown=True)
    rows = run(BenchEnvironment(2, deadline_s=120), trials)
    assert [(row.backend, row.size_bytes) for row in rows] == [
        ("gloo", 4),
        ("gloo#2", 4),
        ("gloo", 1 << 20),
        ("gloo#2", 1 << 20),
    ]
    assert total_wrong(rows) == 0
    assert all(len(row.times_ns) == 4 and min(row.times_ns) > 0 for row in rows)
    assert [row.breakdown is not None for row in rows] == [True, True, False, False]
    assert not workers_alive()


def test_every_dtype_is_correct_in_every_element() -> None:
    place = BenchEnvironment(2, deadline_s=120)
    with start_runner(place, ["torch"]) as runner:
        for dtype in ("f64", "f16", "bf16", "i32", "i64"):
            trials = Trials("all_reduce", ["gloo"], sizes=[1 << 18], rounds=1, warmups=0, dtype=dtype)
            (row,) = make_rows(place, trials, runner.measure(trials))
            assert (row.wrong, row.refused) == (0, None), dtype


def test_every_reduction_of_every_dtype_is_correct_in_every_element() -> None:
    backends = ["netfold", "netfold:ring", "gloo", "communicator:halving_doubling"]
    with start_runner(BenchEnvironment(3, switch=False, deadline_s=120), ["torch", "communicator"]) as runner:
        for dtype in DTYPES:
            for redop in REDOPS:
                trials = Trials("all_reduce", backends, [70000 * 8], rounds=1, warmups=0, dtype=dtype, redop=redop)
                for row in make_rows(runner.place, trials, runner.measure(trials)):
                    # NumPy has no bf16, and gloo no average of integers.
                    lacks = (dtype == "bf16" and row.backend.startswith("communicator")) or (
                        redop == "avg" and dtype in ("i32", "i64") and row.backend == "gloo"
                    )
                    assert (row.refused is not None, row.wrong) == (lacks, None if lacks else 0), row
        for redop in ("prod", "max", "avg"):
            trials = Trials("reduce_scatter", backends[:2], [70000 * 4], rounds=1, warmups=0, redop=redop)
            for row in make_rows(runner.place, trials, runner.measure(trials)):
                assert (row.refused, row.wrong) == (None, 0), row


def test_a_backend_uses_the_algorithm_and_wire_format_of_its_name() -> None:
    backends = [f"netfold:in_network:{wire}" for wire in ("f32", "bf16", "f16", "i32", "i8")]
    backends += ["communicator:i32:halving_doubling", "netfold:tree", "netfold:shared:i8"]
    trials = Trials("all_reduce", backends, [70000 * 4], rounds=2, warmups=0)
    rows = run(BenchEnvironment(3, switch=True, deadline_s=120), trials)
    assert [row.refused for row in rows] == [None] * len(backends)
    assert [row.wrong for row in rows] == [0] * len(backends)
    assert [row.algorithm for row in rows[:7]] == ["in_network"] * 5 + ["halving_doubling", "tree"]
    assert [row.wire for row in rows] == ["f32", "bf16", "f16", "i32", "i8", "i32", "f32", "i8"]
    assert [row.tolerance > 0 for row in rows] == [row.wire == "i8" for row in rows]
    assert rows[1].wire_bytes is not None and rows[0].wire_bytes is not None
    assert rows[1].wire_bytes < 0.6 * rows[0].wire_bytes


def test_a_backend_with_an_impossible_algorithm_is_reported_and_the_run_continues() -> None:
    place = BenchEnvironment(2, switch=False, deadline_s=120)
    backends = ["gloo", "netfold:in_network", "communicator:in_network", "netfold:ring", "netfold:i32"]
    with start_runner(place, ["torch", "communicator"]) as runner:

        def refusals(trials: Trials) -> list[str | None]:
            return [row.refused for row in make_rows(place, trials, runner.measure(trials))]

        gloo, *by_switch, ring, i32 = refusals(Trials("all_reduce", backends, [4096], rounds=1, redop="max"))
        assert (gloo, ring) == (None, None)
        assert all(each is not None and "needs an aggregator" in each for each in by_switch)
        assert i32 is not None and "in f32, not by i32" in i32
        gloo, *_, ring, _ = refusals(Trials("gather", backends, [4096], rounds=1))
        assert gloo is None and ring is not None and "not by ring" in ring


def test_every_collective_is_correct_on_every_backend_without_a_launcher() -> None:
    place = BenchEnvironment(3, switch=False, deadline_s=120)
    backends = ["netfold", "gloo", "communicator"]
    with start_runner(place, ["torch", "communicator"]) as runner:
        for name in COLLECTIVES:
            # 3 ranks do not divide it, and it ends within a period of the pattern.
            trials = Trials(name, backends, sizes=[70000 * 4], rounds=1, warmups=0)
            for row in make_rows(place, trials, runner.measure(trials)):
                # A backend refuses what it lacks, and is right in everything else.
                assert row.refused is not None or row.wrong == 0, row
                assert row.refused is None or (name == "send_recv" and row.backend != "gloo"), row
        waiting = runner.measure_waiting("communicator", 4, 0.3)
    assert len(waiting) == 3 and all(rank["wall_s"] > 0.25 for rank in waiting)
    assert all(rank["cpu_s"] < 0.5 * rank["wall_s"] for rank in waiting[:-1])


@pytest.mark.parametrize("mpi", ["openmpi", "intel", "mpich"])
def test_every_collective_is_correct_on_an_mpi_in_place_and_out_of_place(mpi: str) -> None:
    if not have_peer(mpi):
        pytest.skip(f"mpi:{mpi} is not here (make bench-peers)")
    place = BenchEnvironment(3, deadline_s=60)
    with start_runner(place, [mpi]) as runner:
        for name in COLLECTIVES:
            trials = Trials(name, [f"mpi:{mpi}", f"mpi:{mpi}:out"], sizes=[70000 * 4], rounds=1, warmups=0)
            for row in make_rows(place, trials, runner.measure(trials)):
                assert (row.refused, row.wrong) == (None, 0), row
        for redop in ("prod", "min", "max"):
            trials = Trials("all_reduce", [f"mpi:{mpi}"], sizes=[70000 * 4], rounds=1, warmups=0, redop=redop)
            (row,) = make_rows(place, trials, runner.measure(trials))
            assert (row.refused, row.wrong) == (None, 0), row
    assert not workers_alive()


def test_the_error_for_a_missing_mpi_has_the_command_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("netfold_lab.__file__", str(tmp_path / "lab/src/netfold_lab/__init__.py"))
    with pytest.raises(PeerMissingError, match=r"mpi:mpich .*make bench-peers"):
        launch_mpi("mpich", 2, [])


def test_netfold_against_gloo_is_correct_and_small_calls_have_a_breakdown() -> None:
    trials = Trials("all_reduce", ["netfold", "gloo"], sizes=[4, 1 << 20], rounds=2, warmups=1, breakdown=True)
    small, _, large, _ = run(BenchEnvironment(2, switch=True, deadline_s=120), trials)
    assert (small.wrong, large.wrong) == (0, 0)
    assert small.breakdown is not None and small.breakdown.wire_ns is not None
    assert 0 < small.breakdown.wire_ns < small.breakdown.call_ns


def test_all_ranks_have_equal_parameters_after_timed_ddp_steps() -> None:
    with start_runner(BenchEnvironment(2, switch=False, deadline_s=60), ["torch"]) as runner:
        ours, peer = runner.measure_ddp(["netfold", "gloo"], rounds=2, steps=1, width=256)
    assert (len(ours.times_ns), len(peer.times_ns)) == (2, 2)
    assert (ours.wrong, peer.wrong) == (0, 0)


def test_the_error_for_a_failed_worker_has_its_output_and_all_processes_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text("import torch.distributed\ndel torch.distributed.new_group\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(BenchError, match=r"rank \d failed(.|\n)*no attribute 'new_group'"):
        measure(BenchEnvironment(2, deadline_s=60), Trials("all_reduce", ["gloo"], sizes=[4], rounds=1))
    assert not workers_alive()


def test_the_deadline_ends_a_run() -> None:
    started = time.monotonic()
    with pytest.raises(BenchError, match="had not ended after 1 s"):
        measure(BenchEnvironment(2, deadline_s=1), Trials("all_reduce", ["gloo", "gloo"], sizes=[4], rounds=10**6))
    assert time.monotonic() - started < seconds(20)
    assert not workers_alive()


def test_wrong_elements_are_counted_and_the_command_fails(tmp_path: Path) -> None:
    # torch's fake backend leaves every buffer as it is; this file registers it wherever Python starts.
    (tmp_path / "sitecustomize.py").write_text("import torch.testing._internal.distributed.fake_pg\n")
    words = shlex.split("bench all-reduce --backend fake -b 1M -e 1M -n 3 -w 0 --ranks 2 --output json")
    done = run_command(
        [Path(sys.executable).with_name("netfold"), *words], 60, env={**os.environ, "PYTHONPATH": str(tmp_path)}
    )
    assert done.returncode == 1, done.stderr
    # Alone, a contribution equals the sum only where the other rank's is 0: once a period.
    assert json.loads(done.stdout)["rows"][0]["wrong"] > 3 * 2 * (1 << 18) * 0.99


def test_the_command_takes_several_dtypes_and_reductions_and_skips_sizes_below_one_element() -> None:
    words = ["all-reduce", "--backend", "gloo", "--ranks", "2", "-b", "4", "-e", "8", "-f", "2", "-n", "1", "-w", "0"]
    done = CliRunner().invoke(app, [*words, "-d", "f32,f64", "--op", "prod,max", "--output", "json"])
    assert done.exit_code == 0, done.stderr
    told = json.loads(done.stdout)
    assert (told["config"]["dtype"], told["config"]["redop"]) == ("f32,f64", "prod,max")
    rows = [(row["dtype"], row["redop"], row["size_bytes"], row["wrong"]) for row in told["rows"]]
    assert rows == [
        *(("f32", redop, size, 0) for redop in ("prod", "max") for size in (4, 8)),
        *(("f64", redop, 8, 0) for redop in ("prod", "max")),
    ]


def test_an_invalid_command_line_is_an_error_of_one_sentence() -> None:
    done = CliRunner().invoke(app, ["all-reduce", "--backend", "gloo", "-b", "4MB"])
    assert done.exit_code == 2
    assert done.stderr.startswith("netfold bench all-reduce: size '4MB'")


def test_sections_of_the_suite_are_listed_and_an_unknown_one_is_refused() -> None:
    listed = CliRunner().invoke(app, ["suite", "--section", "list"])
    assert listed.exit_code == 0 and "waiting" in listed.stdout
    refused = CliRunner().invoke(app, ["suite", "--section", "speed"])
    assert refused.exit_code == 2 and "there are all-reduce" in refused.stderr


@pytest.mark.rack
@pytest.mark.skipif(LACK is not None, reason=str(LACK))
def test_a_racks_links_are_probed_for_round_trip_and_headers() -> None:
    wire = probe_rack("1gbit")
    assert (wire.rate_bits, wire.mss) == (10**9, 1448)
    assert 5e-6 < wire.round_trip_s < seconds(1)
    # One stream cannot pass more than the line, but for the token bucket's first burst.
    assert 0.5 < wire.stream_bits / wire.payload_bits < 1.02


@pytest.mark.rack
@pytest.mark.skipif(LACK is not None, reason=str(LACK))
def test_a_ring_of_gloo_in_a_rack_moves_the_bytes_of_the_formula() -> None:
    size_bytes, workers = 1 << 20, 3
    trials = Trials("all_reduce", ["gloo", "gloo"], [size_bytes], rounds=2, warmups=1)
    rows = run(BenchEnvironment(workers, rack_rate="1gbit", deadline_s=120), trials)
    # 2 (P - 1) / P of the message sent and as much received; above it headers, acknowledgements, repeats.
    ring_bytes = 2 * 2 * (workers - 1) / workers * size_bytes
    for row in rows:
        assert row.wrong == 0
        assert row.wire_bytes is not None
        assert ring_bytes < row.wire_bytes < 1.15 * ring_bytes


@pytest.mark.rack
@pytest.mark.skipif(LACK is not None, reason=str(LACK))
@pytest.mark.parametrize("mpi", ["openmpi", "intel", "mpich"])
def test_the_ranks_of_an_mpi_in_a_rack_share_no_memory(mpi: str) -> None:
    if not have_peer(mpi):
        pytest.skip(f"mpi:{mpi} is not here (make bench-peers)")
    size_bytes, workers = 1 << 20, 3
    trials = Trials("all_reduce", [f"mpi:{mpi}", "gloo"], [size_bytes], rounds=2, warmups=1)
    ours, _ = run(BenchEnvironment(workers, rack_rate="1gbit", deadline_s=120), trials)
    assert (ours.refused, ours.wrong) == (None, 0)
    # No all_reduce moves less than a ring does, sent and received: anything less went through memory.
    ring_bytes = 2 * 2 * (workers - 1) / workers * size_bytes
    assert ours.wire_bytes is not None and ring_bytes < ours.wire_bytes < 1.5 * ring_bytes
    assert not workers_alive()
