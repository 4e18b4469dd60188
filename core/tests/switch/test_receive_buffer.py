"""A window that the kernel's receive buffer cuts: switch, job and preflight report the number and the setting."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import typer.testing
from ranks import RunningSwitch, run_threads, running_switch, values

from netfold import Communicator, FileStore, Options
from netfold.cli import app
from netfold.switch_protocol.control_client import query_quota
from netfold.switch_protocol.data_path import ReceiveBuffer

DEBIANS_RMEM_MAX = 212_992
RMEM_MAX = Path("/proc/sys/net/core/rmem_max")


def test_64_workers_have_the_smallest_window_in_debians_buffer() -> None:
    granted_bytes = 2 * DEBIANS_RMEM_MAX  # the kernel reports twice the requested size
    debians = ReceiveBuffer(granted_bytes, 1 << 20)
    assert debians.held_bytes(64) == DEBIANS_RMEM_MAX // 64 == 3328
    assert debians.window_shortfall(64) == (
        "the kernel holds 212992 bytes of a job's packets (net.core.rmem_max), so each of 64 workers has a window of 8 "
        "packets of 1408 bytes and not 720: set sysctl net.core.rmem_max to 67108864 on the switch's host, or give the "
        "switch CAP_NET_ADMIN"
    )
    assert "a window of 73 packets of 1408 bytes and not 720" in debians.window_shortfall(2)
    assert "a window of 8 packets of 8880 bytes and not 117" in debians.window_shortfall(64, 8880)


def test_the_recommended_setting_restores_the_whole_window() -> None:
    for workers in (1, 2, 64, 256):
        cut = ReceiveBuffer(2 * DEBIANS_RMEM_MAX, 1 << 20).window_shortfall(workers)
        (bound,) = re.findall(r"rmem_max to (\d+)", cut)
        assert ReceiveBuffer(2 * int(bound), 1 << 20).window_shortfall(workers) == ""
        assert ReceiveBuffer(2 * int(bound) * 9 // 10, 1 << 20).window_shortfall(workers) != ""


def test_an_unknown_buffer_cuts_no_window() -> None:
    assert ReceiveBuffer(0, 1 << 20).window_shortfall(256) == ""
    assert ReceiveBuffer(0, 1 << 20).held_bytes(256) == 1 << 20


@pytest.fixture
def cut_switch() -> Iterator[tuple[RunningSwitch, int]]:
    """A switch whose windows for two workers take twice what the kernel grants; and that window."""
    if not RMEM_MAX.exists():
        pytest.skip("this host hides net.core.rmem_max")
    rmem_max = int(RMEM_MAX.read_text())
    if rmem_max > 1 << 26:
        pytest.skip(f"net.core.rmem_max is {rmem_max} here: more than a job of two ranks asks for")
    drop = []
    if os.geteuid() == 0:
        if shutil.which("setpriv") is None:
            pytest.skip("root has CAP_NET_ADMIN, and setpriv, which takes it away, is not here (Debian: util-linux)")
        drop = ["setpriv", "--bounding-set=-net_admin", "--inh-caps=-net_admin", "--"]
    window_bytes = rmem_max
    with running_switch("--window", str(window_bytes), prefix=drop) as switch:
        yield switch, window_bytes


def test_a_cut_window_is_reported_at_the_start_to_the_job_and_to_preflight(
    cut_switch: tuple[RunningSwitch, int], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    switch, window_bytes = cut_switch
    expected = ReceiveBuffer(2 * int(RMEM_MAX.read_text()), window_bytes)
    # At the start: the most workers with whole windows, and the window of the largest job.
    (line,) = switch.wait_for(r"level=info event=buffer .*")
    assert "windows are whole for jobs of up to 1 workers" in line
    assert expected.window_shortfall(256) in line

    def add(rank: int, size: int, folder: str) -> float:
        options = Options(switch=switch.endpoint, window_bytes=window_bytes)
        with Communicator(FileStore(folder), rank, size, options=options, timeout_s=20, join_timeout_s=20) as group:
            buffer = np.arange(1000, dtype=np.float32) + rank
            group.all_reduce(buffer)
            return float(buffer[-1])

    assert values(run_threads(add, 2, timeout_s=60)) == [1999.0] * 2
    # The job: one warning at the switch and one at its first rank, with the window that it got.
    ((window, payload),) = switch.wait_for(r"window=(\d+) payload_bytes=(\d+)")
    shortfall = expected.window_shortfall(2, int(payload))
    assert f"a window of {window} packets of {payload} bytes" in shortfall
    (line,) = switch.wait_for(r"level=warning event=buffer .*")
    assert shortfall in line and f"window={window}" in line
    assert [each.getMessage() for each in caplog.records if "rmem_max" in each.getMessage()] == [
        f"the switch at {switch.endpoint}: {shortfall}"
    ]
    # Preflight.
    room = query_quota(switch.endpoint, token_file=None, rank=0, timeout_s=10)
    assert room.buffer == expected
    monkeypatch.setenv("NETFOLD_SWITCH", switch.endpoint)
    output = typer.testing.CliRunner().invoke(app, ["explain", "all-reduce", "--ranks", "2"]).output
    assert expected.window_shortfall(2) in output


def test_a_whole_window_is_not_reported_as_cut(caplog: pytest.LogCaptureFixture) -> None:
    with running_switch("--window", "16K", "--max-workers", "2") as switch:

        def join(rank: int, size: int, folder: str) -> None:
            with Communicator(FileStore(folder), rank, size, options=Options(switch=switch.endpoint), timeout_s=20):
                pass

        values(run_threads(join, 2, timeout_s=60))
        switch.wait_for(r"event=started")
        (line,) = re.findall(r"event=buffer .*", switch.log())
    assert "holds the windows of 2 workers a job, 16384 bytes each" in line
    assert not [each for each in caplog.records if "rmem_max" in each.getMessage()]
