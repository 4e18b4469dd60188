"""Whole runs on loopback: gloo beside itself, and what happens when a worker or its switch fails."""

import json
import os
import subprocess
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from netfold.bench.config import Config
from netfold.bench.launch import BenchError, measure
from netfold.bench.report import make_rows, total_wrong
from netfold.cli.bench import app
from netfold.rack.command import missing

LACK = missing(loss=False)
pytestmark = pytest.mark.torch


def workers_alive() -> list[str]:
    """Command lines of benchmark workers that run under this process."""
    listed = subprocess.run(
        ["ps", "--ppid", str(os.getpid()), "-o", "args="], capture_output=True, text=True, check=False
    )
    return [line for line in listed.stdout.splitlines() if "netfold.bench.worker" in line]


def test_gloo_beside_itself_is_right_in_every_element_and_has_all_its_rounds() -> None:
    config = Config(
        ["gloo", "gloo"], workers=2, sizes=[4, 1 << 20], rounds=4, warmups=1, breakdown=True, deadline_s=120
    )
    rows = make_rows(config, measure(config))
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


@pytest.mark.parametrize("dtype", ["f64", "f16", "bf16", "i32", "i64"])
def test_every_dtype_is_right_in_every_element(dtype: str) -> None:
    config = Config(["gloo"], workers=2, sizes=[1 << 18], rounds=1, warmups=0, dtype=dtype, deadline_s=120)
    assert total_wrong(make_rows(config, measure(config))) == 0


def test_netfold_beside_gloo_is_right_and_its_small_calls_are_broken_down() -> None:
    config = Config(
        ["netfold", "gloo"], workers=2, sizes=[4, 1 << 20], rounds=2, warmups=1, breakdown=True, deadline_s=120
    )
    small, _, large, _ = make_rows(config, measure(config))
    assert (small.wrong, large.wrong) == (0, 0)
    assert small.breakdown is not None and small.breakdown.wire_ns is not None
    assert 0 < small.breakdown.wire_ns < small.breakdown.call_ns


def test_a_failing_worker_is_an_error_with_what_it_said_and_nothing_runs_on() -> None:
    config = Config(["gloo", "no-such-backend"], workers=2, sizes=[4], rounds=1, deadline_s=60)
    with pytest.raises(BenchError, match=r"rank \d failed(.|\n)*no-such-backend"):
        measure(config)
    assert not workers_alive()


def test_the_deadline_ends_a_run() -> None:
    config = Config(["gloo", "gloo"], workers=2, sizes=[4], rounds=10**6, deadline_s=1)
    started = time.monotonic()
    with pytest.raises(BenchError, match="had not ended after 1 s"):
        measure(config)
    assert time.monotonic() - started < 20
    assert not workers_alive()


def test_wrong_elements_are_counted_and_make_the_verb_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # torch's fake backend leaves every buffer as it is; this file registers it wherever Python starts.
    (tmp_path / "sitecustomize.py").write_text("import torch.testing._internal.distributed.fake_pg\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    arguments = [
        "all-reduce",
        "--backend",
        "fake",
        "-b",
        "1M",
        "-e",
        "1M",
        "-n",
        "3",
        "-w",
        "0",
        "--workers",
        "2",
        "--json",
    ]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 1, done.stderr
    # Alone, a contribution equals the sum only where the other rank's is 0: once a period.
    assert json.loads(done.stdout)["rows"][0]["wrong"] > 3 * 2 * (1 << 18) * 0.99


def test_a_command_line_that_cannot_be_measured_is_one_sentence() -> None:
    done = CliRunner().invoke(app, ["all-reduce", "--backend", "gloo", "-b", "4MB"])
    assert done.exit_code == 2
    assert done.stderr.startswith("netfold bench all-reduce: size '4MB'")


@pytest.mark.rack
@pytest.mark.skipif(LACK is not None, reason=str(LACK))
def test_in_a_rack_gloos_ring_moves_the_bytes_that_a_ring_moves() -> None:
    size_bytes, workers = 1 << 20, 3
    config = Config(["gloo", "gloo"], workers, [size_bytes], rounds=2, warmups=1, rack_rate="1gbit", deadline_s=120)
    rows = make_rows(config, measure(config))
    # 2 (P - 1) / P of the message sent and as much received; above it headers, acknowledgements, repeats.
    ring_bytes = 2 * 2 * (workers - 1) / workers * size_bytes
    for row in rows:
        assert row.wrong == 0
        assert row.wire_bytes is not None
        assert ring_bytes < row.wire_bytes < 1.15 * ring_bytes
