"""The quota of each tenant: by weight, within its bounds, whatever other tenants do."""

from __future__ import annotations

import re
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from load import seconds
from ranks import RunningSwitch, run_threads, running_switch, values

from netfold import Communicator, FileStore, Options
from netfold._native import protocol
from netfold.switch.quota import Limits, fitting_window, quota_of
from netfold.switch.tokens import Tenant

TOKENS = {name: name[0] * 40 for name in ("small", "large", "bound")}


def test_quotas_follow_weights_and_never_exceed_the_whole() -> None:
    tenants = [Tenant("a", weight=1), Tenant("b", weight=2), Tenant("c", weight=4, memory_bytes=100, slots=32)]
    limits = Limits(jobs=9, memory_bytes=1000, connections=70)
    parts = [quota_of(tenant, tenants, limits) for tenant in tenants]
    assert [part.memory_bytes for part in parts] == [142, 285, 100]
    assert [part.jobs for part in parts] == [1, 2, 5]
    assert [part.connections for part in parts] == [10, 20, 40]
    assert [part.slots for part in parts] == [None, None, 32]
    assert sum(part.jobs for part in parts) <= limits.jobs


def test_the_only_tenant_has_the_whole_switch() -> None:
    only = Tenant("a", weight=7)
    part = quota_of(only, [only], Limits())
    assert (part.jobs, part.connections, part.memory_bytes) == (64, 4096, 1 << 30)


def test_an_empty_quota_is_refused_at_the_start() -> None:
    tenants = [Tenant("a"), Tenant("b", weight=100)]
    with pytest.raises(ValueError, match=r"a's quota, 1 of 101, is 0 jobs, .* raise its weight, --max-jobs"):
        quota_of(tenants[0], tenants, Limits(jobs=64))


@pytest.mark.parametrize("workers", [1, 2, 256])
@pytest.mark.parametrize("payload", [1152, 1408, 8896])
def test_a_window_fills_the_free_memory_and_no_more(workers: int, payload: int) -> None:
    def granted(window: int) -> int:
        return int(protocol.job_memory_bytes(workers, window, payload))

    ample = fitting_window(workers, payload, 1 << 20, 1 << 40, None)
    assert ample == (1 << 20) // (payload + protocol.HEADER_BYTES)
    assert fitting_window(workers, payload, 1 << 20, granted(ample), None) == ample
    # Slots are powers of two: where one more would double the memory, the window is half the slots.
    for left in (granted(8), granted(8) + 1, granted(23) - 1, granted(ample) - 1):
        window = fitting_window(workers, payload, 1 << 20, left, None)
        assert granted(window) <= left < granted(window + 1)
    assert fitting_window(workers, payload, 1 << 20, granted(8) - 1, None) == 0
    assert fitting_window(workers, payload, 1 << 20, 1 << 40, 20) == 8
    assert fitting_window(workers, payload, 1 << 20, 1 << 40, 15) == 0
    assert fitting_window(workers, payload, 1, 1 << 40, None) == 8, "less than that is mostly waiting"


def lines(folder: Path) -> str:
    path = folder / "tokens"
    path.write_text(f"small {TOKENS['small']}\nlarge {TOKENS['large']} weight=3\nbound {TOKENS['bound']} slots=64\n")
    path.chmod(0o600)
    for name, token in TOKENS.items():
        (folder / name).write_text(token)
        (folder / name).chmod(0o600)
    return str(path)


def options(switch: RunningSwitch, folder: Path, tenant: str) -> Options:
    return Options(switch=switch.endpoint, token_file=str(folder / tenant), job_name=tenant)


def add(rank: int, size: int, store: str, options: Options) -> float:
    with Communicator(FileStore(store), rank, size, options=options, timeout_s=20, join_timeout_s=10) as group:
        buffer = np.ones(300_000, np.float32) * (rank + 1)
        group.all_reduce(buffer)
        return float(buffer[-1])


def started(switch: RunningSwitch, tenant: str) -> list[tuple[int, int]]:
    """Window and memory of a tenant's started jobs."""
    found = re.findall(rf"event=started .*tenant={tenant} .*window=(\d+) .*memory_bytes=(\d+)", switch.log())
    return [(int(window), int(memory)) for window, memory in found]


def test_jobs_take_slots_from_their_tenants_quota_and_release_them(tmp_path: Path) -> None:
    tokens = lines(tmp_path)
    with running_switch("--token-file", tokens, "--memory", "20M") as switch:
        for tenant in TOKENS:
            for _ in range(2):
                assert values(run_threads(add, 2, options(switch, tmp_path, tenant))) == [3.0, 3.0]
        part = (20 << 20) // 5
        (small, memory), again = started(switch, "small")
        assert part / 2 < memory <= part
        assert again == (small, memory), "the first gave all of it back"
        assert started(switch, "large")[0][0] > 1.4 * small, "as large as its window, within 12 MiB"
        assert started(switch, "bound") == [(32, started(switch, "bound")[0][1])] * 2


def test_only_a_tenant_without_free_quota_is_refused(tmp_path: Path) -> None:
    tokens = lines(tmp_path)
    release, holding = threading.Event(), threading.Barrier(3)

    def hold(rank: int, size: int, store: str, chosen: Options) -> float:
        with Communicator(FileStore(store), rank, size, options=chosen, timeout_s=20) as group:
            holding.wait(seconds(20))
            release.wait(seconds(20))
            buffer = np.ones(1000, np.float32)
            group.all_reduce(buffer)
            return float(buffer[0])

    with running_switch("--token-file", tokens, "--memory", "20M") as switch:
        held: list[Any] = []
        thread = threading.Thread(target=lambda: held.extend(run_threads(hold, 2, options(switch, tmp_path, "bound"))))
        thread.start()
        try:
            holding.wait(seconds(20))
            for outcome in run_threads(add, 2, options(switch, tmp_path, "bound")):
                assert outcome.error == "SwitchError"
                assert re.search(
                    r"refused: this switch is full: the job needs 0\.\d MiB and 16 slots at least, \d\.\d of 4\.0 MiB "
                    r"and 0 of 64 slots are free \(--memory\); that is the quota of bound",
                    outcome.text,
                ), outcome.text
            assert values(run_threads(add, 2, options(switch, tmp_path, "large"))) == [3.0, 3.0]
        finally:
            release.set()
            thread.join(seconds(20))
        assert values(held) == [2.0, 2.0]
        assert values(run_threads(add, 2, options(switch, tmp_path, "bound"))) == [3.0, 3.0]


def test_each_tenants_jobs_are_counted_separately(tmp_path: Path) -> None:
    tokens = lines(tmp_path)
    inside = threading.Barrier(2)

    def two_jobs(rank: int, size: int, store: str, chosen: Options) -> list[str]:
        with Communicator(FileStore(f"{store}/1"), rank, size, options=chosen, timeout_s=20):
            inside.wait(seconds(20))
            errors = []
            for turn in ("2", "3"):
                try:
                    Communicator(FileStore(f"{store}/{turn}"), rank, size, options=chosen, join_timeout_s=5).close()
                    errors.append("")
                except Exception as error:
                    errors.append(str(error))
            inside.wait(seconds(20))
            return errors

    # Five jobs in all: one each for `small` and `bound`, three for `large`.
    with running_switch("--token-file", tokens, "--max-jobs", "5") as switch:
        for errors in values(run_threads(two_jobs, 2, options(switch, tmp_path, "small"))):
            assert all("it serves 1 jobs (--max-jobs); that is the quota of small" in text for text in errors)
        inside.reset()
        assert values(run_threads(two_jobs, 2, options(switch, tmp_path, "large"))) == [["", ""]] * 2
