"""The operator's view of a switch: metrics, health, status, log, draining, and the files in deploy/."""

from __future__ import annotations

import contextlib
import fcntl
import http.client
import json
import logging
import os
import re
import select
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer.main
from load import seconds, settles
from prometheus_client.parser import text_string_to_metric_families
from ranks import RunningSwitch, run_command, run_threads, running_switch, values

from netfold import Communicator, FileStore, Options
from netfold.bootstrap import capacity
from netfold.cli import app
from netfold.switch import metrics
from netfold.switch.log import LogfmtFormatter, QueuedHandler, RateLimit, event
from netfold.switch_protocol import control_messages

ROOT = Path(__file__).parents[3]
WATCHED = ("--metrics", "127.0.0.1:0")


def pages(switch: RunningSwitch) -> str:
    (address,) = switch.wait_for(r"event=metrics address=(\S+)")
    return str(address)


def get(address: str, target: str, method: str = "GET") -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(address, timeout=seconds(5))
    try:
        connection.request(method, target)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def samples(address: str) -> dict[tuple[str, ...], float]:
    """Every sample by name and the values of its labels, without a job's id and tenant."""
    code, text = get(address, "/metrics")
    assert code == 200
    found: dict[tuple[str, ...], float] = {}
    for family in text_string_to_metric_families(text.decode()):
        for sample in family.samples:
            labels = [value for name, value in sorted(sample.labels.items()) if name not in ("id", "tenant")]
            found[(sample.name, *labels)] = sample.value
    return found


class Held:
    """Two ranks that reduce 1000 f32 `turns` times, rank 1 late each time, and stay until released."""

    def __init__(self, switch: RunningSwitch, turns: int = 20, late_s: float = 0.02) -> None:
        self.switch, self.turns, self.late_s = switch, turns, late_s
        self.done, self.release = threading.Barrier(3), threading.Event()
        self.outcomes: list[Any] = []
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Held:
        self._thread.start()
        self.done.wait(seconds(60))
        return self

    def __exit__(self, *_: object) -> None:
        self.release.set()
        self._thread.join(seconds(60))

    def _run(self) -> None:
        self.outcomes = run_threads(self._rank, 2)

    def _rank(self, rank: int, size: int, folder: str) -> float:
        options = Options(switch=self.switch.endpoint, job_name="vision/a")
        with Communicator(FileStore(folder), rank, size, options=options, timeout_s=seconds(120)) as group:
            buffer = np.zeros(1000, np.float32)
            for _ in range(self.turns):
                time.sleep(self.late_s if rank == 1 else 0)
                buffer = np.ones(1000, np.float32)
                group.all_reduce(buffer)
            self.done.wait(seconds(60))
            self.release.wait(seconds(60))
            group.all_reduce(buffer)
            return float(buffer[-1])


def test_metrics_count_a_jobs_bytes_packets_and_stragglers() -> None:
    with running_switch(*WATCHED) as switch:
        address = pages(switch)
        with Held(switch) as job:
            series = samples(address)
            status = json.loads(get(address, "/status")[1])
            name = "vision/a"
            assert series["netfold_switch_authenticated",] == 0
            assert series["netfold_switch_jobs",] == 1
            assert series["netfold_switch_workers",] == 2
            assert series["netfold_switch_job_workers", name] == 2
            assert series["netfold_switch_job_goodput_bytes_total", name] == 20 * 4000
            contributions = series["netfold_switch_job_packets_total", "contribution", name]
            assert contributions % 2 == 0 and contributions >= 40
            assert series["netfold_switch_job_packets_total", "result", name] >= contributions
            assert series["netfold_switch_job_packets_total", "hello", name] >= 2
            assert series["netfold_switch_job_drops_total", name, "foreign"] == 0
            assert series["netfold_switch_job_slots_collecting", name] == 0
            granted = series["netfold_switch_memory_granted_bytes",]
            assert granted == series["netfold_switch_job_memory_granted_bytes", name] > 0
            assert granted + series["netfold_switch_memory_free_bytes",] == 1 << 30
            assert series["netfold_switch_job_slots", name] == status["jobs"][0]["counters"]["slots"] > 0
            lag = [series["netfold_switch_job_arrival_lag_seconds_sum", name, str(rank)] for rank in range(2)]
            assert series["netfold_switch_job_arrival_lag_seconds_count", name, "1"] == contributions / 2
            assert lag[1] > 20 * 0.01 > 4 * lag[0], lag
            assert series["netfold_switch_job_last_arrivals_total", name, "1"] > contributions / 4
            assert series["netfold_switch_job_retransmissions_total", name] == status["jobs"][0]["retransmissions"]
        assert values(job.outcomes) == [4.0, 4.0]
        switch.wait_for("event=closed")
        after = samples(address)
        assert not [name for name in after if name[0].startswith("netfold_switch_job_")], "a job's series end with it"
        assert after["netfold_switch_goodput_bytes_total",] == 21 * 4000
        assert after["netfold_switch_jobs_started_total",] == 1
        assert after["netfold_switch_memory_granted_bytes",] == 0


def test_a_slot_that_waits_for_a_rank_counts_as_collecting() -> None:
    with running_switch(*WATCHED) as switch:
        address = pages(switch)

        def rank(rank: int, size: int, folder: str) -> float:
            with Communicator(FileStore(folder), rank, size, options=Options(switch=switch.endpoint)) as group:
                buffer = np.ones(1000, np.float32)
                if rank == 1:
                    deadline = time.monotonic() + seconds(10)
                    while not samples(address).get(("netfold_switch_job_slots_collecting", "")):
                        assert time.monotonic() < deadline
                        time.sleep(0.01)
                group.all_reduce(buffer)
                return float(buffer[0])

        assert values(run_threads(rank, 2)) == [2.0, 2.0]


def test_a_jobs_capacity_is_the_one_its_lowest_rank_reports_and_an_invalid_rate_changes_nothing() -> None:
    join = {
        "type": "join",
        "version": control_messages.VERSION,
        "job": "j",
        "name": "said",
        "port": 9,
        "window_bytes": 1 << 20,
    }
    join |= {"ranks": [3, 5], "timeout_s": 60.0}
    with running_switch(*WATCHED) as switch, contextlib.ExitStack() as streams:
        address = pages(switch)

        def shown() -> Any:
            return json.loads(get(address, "/status")[1])["jobs"][0]["capacity_bytes_per_s"]

        def say(rank: int, bytes_per_s: object) -> socket.socket:
            stream = streams.enter_context(socket.create_connection(switch.address, seconds(5)))
            for message in ({**join, "rank": rank}, {"type": "alive", "serial": 1, "bytes_per_s": bytes_per_s}):
                control_messages.send(stream, message)
            assert control_messages.receive(stream)["type"] == "admitted"
            return stream

        lowest = say(3, 25e6)
        assert control_messages.receive(lowest)["type"] == "alive"
        assert shown() == 25e6
        assert samples(address)["netfold_switch_job_capacity_bytes_per_second", "said"] == 25e6
        columns = status_command(address, "--once").stdout.splitlines()
        (line,) = [line for line in columns if " said " in line]
        assert line.split()[7] == "200" and "at most" in columns[1]
        # Twice the rate, then an invalid one, which ends the membership, and with it the job.
        control_messages.send(lowest, {"type": "alive", "serial": 2, "bytes_per_s": 50_000_000})
        assert control_messages.receive(lowest)["type"] == "alive"
        assert shown() == 50e6
        control_messages.send(lowest, {"type": "alive", "serial": 3, "bytes_per_s": -1})
        switch.wait_for("event=protocol_error .*alive with bytes_per_s '-1'")
        switch.wait_for("event=ended job=j")
        say(5, 1e6)
        switch.wait_for("event=protocol_error .*bytes_per_s from rank 5; only the job's lowest rank reports it")


def test_a_group_reports_its_measured_rate_to_its_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capacity, "_cache", {})
    options = {"algorithm": "auto", "transport": "tcp", "job_name": "measures"}
    with running_switch(*WATCHED) as switch:
        address = pages(switch)

        def rank(rank: int, size: int, folder: str) -> tuple[float, float]:
            own = Options(switch=switch.endpoint, **options)
            with Communicator(FileStore(folder), rank, size, options=own) as group:
                reported, deadline = None, time.monotonic() + seconds(10)
                while rank == 0 and reported is None:
                    assert time.monotonic() < deadline
                    time.sleep(0.05)
                    reported = json.loads(get(address, "/status")[1])["jobs"][0]["capacity_bytes_per_s"]
                group.barrier()
                return reported or 0.0, group.group.links.switches[0]

        (reported, measured), *_ = values(run_threads(rank, 3))
    # Over one link the rate of the switch is at most that of the link.
    assert 0 < reported <= measured * 1.001


def test_names_follow_prometheus_guide() -> None:
    with running_switch(*WATCHED) as switch, Held(switch, turns=1):
        text = get(pages(switch), "/metrics")[1].decode()
    assert text.endswith("\n")
    for family in text_string_to_metric_families(text):
        assert family.documentation.endswith("."), family.name
        assert re.fullmatch(r"netfold_switch_[a-z_]+", family.name)
        if family.type == "counter":
            assert {sample.name for sample in family.samples} <= {family.name + "_total"}


def test_refusals_are_counted_by_reason() -> None:
    def refused(rank: int, size: int, folder: str, endpoint: str) -> None:
        Communicator(FileStore(folder), rank, size, options=Options(switch=endpoint), join_timeout_s=5).close()

    with running_switch(*WATCHED, "--max-workers", "1") as switch:
        for outcome in run_threads(refused, 2, switch.endpoint):
            assert outcome.error == "SwitchError"
        assert samples(pages(switch))["netfold_switch_refusals_total", "bound"] == 2
        switch.wait_for("event=refused peer=.* reason=bound", count=2)


def test_http_has_three_pages_and_no_other() -> None:
    with running_switch(*WATCHED) as switch:
        address = pages(switch)
        assert get(address, "/healthz") == (200, b"serving\n")
        assert get(address, "/healthz", "HEAD") == (200, b"")
        assert get(address, "/metrics?name=x")[0] == 200
        assert get(address, "/")[0] == 404
        assert get(address, "/metrics", "POST")[0] == 405
        host, _, port = address.rpartition(":")
        for words in (b"\r\n\r\n", b"GET\r\n\r\n", b"\x00" * 20_000, b"GET /metrics HTTP/1.1\r\n" + b"a: b\r\n" * 9000):
            with socket.create_connection((host, int(port)), 5) as stream:
                stream.settimeout(seconds(5))
                try:
                    stream.sendall(words)
                    stream.shutdown(socket.SHUT_WR)
                    answer = b"".join(iter(lambda stream=stream: stream.recv(4096), b""))
                except ConnectionError:
                    answer = b""
                assert answer[:12] in (b"", b"HTTP/1.1 405"), answer
        assert get(address, "/healthz")[0] == 200


def test_silent_http_clients_are_disconnected_and_keep_no_client_out_for_long() -> None:
    with running_switch(*WATCHED) as switch:
        address = pages(switch)
        host, _, port = address.rpartition(":")
        silent = [socket.create_connection((host, int(port)), 5) for _ in range(40)]
        try:
            deadline = time.monotonic() + seconds(8)
            while True:
                try:
                    assert get(address, "/healthz") == (200, b"serving\n")
                    break
                except (ConnectionError, http.client.HTTPException):
                    assert time.monotonic() < deadline
                    time.sleep(0.1)
        finally:
            for stream in silent:
                stream.close()


def status_command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return run_command("switch", "status", *arguments)


def test_status_shows_jobs_and_the_latest_rank() -> None:
    with running_switch(*WATCHED) as switch, Held(switch):
        address = pages(switch)
        shown = status_command(address, "--once")
        status = json.loads(status_command(address, "--output", "json").stdout)
    assert shown.returncode == 0, shown.stderr
    assert re.search(r"serving for \d+ s: 1 of 64 jobs, .* packets not authenticated", shown.stdout)
    (line,) = [line for line in shown.stdout.splitlines() if "vision/a" in line]
    assert re.search(r"[0-9a-f]{8} +vision/a +2 .* 1: \d+\.\d ms, \d+ x last", line), line
    assert status["jobs"][0]["name"] == "vision/a"


def test_status_updates_on_a_terminal_until_it_is_interrupted() -> None:
    ours, theirs = os.openpty()
    with running_switch(*WATCHED) as switch, Held(switch), open(ours, "rb", buffering=0) as terminal:
        # A background job of a shell, as this test may be, inherits that SIGINT is ignored.
        watching = subprocess.Popen(
            [sys.executable, "-m", "netfold.cli", "switch", "status", pages(switch), "--interval", "100ms"],
            stdout=theirs,
            stderr=subprocess.PIPE,
            env={**os.environ, "TERM": "xterm", "COLUMNS": "120"},
            preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
        )
        os.close(theirs)
        try:
            shown = b""
            while shown.count(b"vision/a") < 3:
                assert select.select([terminal], [], [], seconds(20))[0], shown
                shown += terminal.read(4096)
            watching.send_signal(signal.SIGINT)
            _, errors = watching.communicate(timeout=seconds(20))
        finally:
            watching.kill()
            watching.wait()
    assert (watching.returncode, errors) == (0, b"")


@pytest.mark.parametrize(
    ("endpoint", "code", "words"),
    [
        ("nonsense", 2, "ENDPOINT is 'nonsense'; expected host:port"),
        ("127.0.0.1:1", 1, "with `--metrics 127.0.0.1:1`?"),
    ],
)
def test_status_of_a_missing_switch_is_an_error(endpoint: str, code: int, words: str) -> None:
    ended = status_command(endpoint, "--once")
    assert ended.returncode == code
    assert words in ended.stderr


def test_status_of_the_wrong_port_is_an_error() -> None:
    with running_switch() as switch:
        ended = status_command(switch.endpoint, "--output", "json")
    assert ended.returncode == 1
    assert "nothing to read at" in ended.stderr


def test_a_metrics_address_in_use_is_reported() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        ended = run_command("switch", "--listen", "127.0.0.1:0", "--metrics", address)
    assert ended.returncode == 1
    assert f"cannot listen on {address}" in ended.stderr


@pytest.mark.parametrize("signals", [[signal.SIGTERM], [signal.SIGHUP, signal.SIGHUP]], ids=["sigterm", "terminal"])
def test_after_a_signal_running_jobs_end_and_no_new_job_starts(signals: list[signal.Signals]) -> None:
    with running_switch(*WATCHED, "--drain", "20s") as switch:
        address = pages(switch)
        with Held(switch, turns=1) as job:
            for number in signals:
                switch.process.send_signal(number)
                switch.wait_for("event=drain jobs=1")
            assert get(address, "/healthz") == (200, b"draining\n")

            def late(rank: int, size: int, folder: str) -> None:
                options = Options(switch=switch.endpoint)
                Communicator(FileStore(folder), rank, size, options=options, join_timeout_s=5).close()

            for outcome in run_threads(late, 2):
                assert outcome.error == "SwitchError"
                assert f"refused: the switch is shutting down: {signals[0].name}" in outcome.text
            assert switch.process.poll() is None
        assert values(job.outcomes) == [4.0, 4.0]
        assert switch.process.wait(seconds(5)) == 0
        switch.wait_for(f"event=stopped signal={signals[0].name}")


def test_after_sigterm_a_job_ends_at_the_deadline_or_at_a_second_signal(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for drain_s, signals in (("0.5", 1), ("60", 2)):
        with running_switch("--drain", f"{drain_s}s") as switch:
            with Held(switch, turns=1) as job:
                for count in range(signals):
                    switch.process.send_signal(signal.SIGTERM)
                    switch.wait_for("event=drain", count=1) if count == 0 else None
                assert switch.process.wait(seconds(5)) == 0
            # The job goes on without the switch, and logs why.
            assert values(job.outcomes) == [4.0, 4.0]
            (warning,) = [record.getMessage() for record in caplog.records if record.name == "netfold"]
            assert "the switch is shutting down: SIGTERM" in warning
        caplog.clear()


def test_a_log_event_is_one_line_whatever_its_values(capsys: pytest.CaptureFixture[str]) -> None:
    record: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = record.append  # type: ignore[method-assign]
    logging.getLogger("netfold.switch").addHandler(handler)
    try:
        event(logging.ERROR, "left", 'a "b"\nlevel=info \\ \x1b', rank=3, seconds=0.25, peer=None, name="ä b")
    finally:
        logging.getLogger("netfold.switch").removeHandler(handler)
    line = LogfmtFormatter().format(record[0])
    assert re.fullmatch(
        r"time=\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z level=error event=left rank=3 seconds=0\.25 "
        r'name="ä b" msg="a \\"b\\"\\nlevel=info \\\\ \\u001b"',
        line,
    ), line


def parses(arguments: list[str]) -> None:
    """Parse the command line as `netfold` does; click raises where an option is unknown or wrong."""
    command: Any = typer.main.get_command(app)
    name, *options = arguments
    command.commands[name].make_context(name, options)


def test_a_log_that_nobody_reads_delays_no_job() -> None:
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)
    command = [sys.executable, "-m", "netfold.cli", "switch", "--listen", "127.0.0.1:0", "--drain", "0s"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=writer, text=True)
    os.close(writer)
    try:
        assert process.stdout is not None
        host, port = control_messages.parse_endpoint(process.stdout.readline().split()[-1], what="switch")
        for number in range(100):  # each is some lines of 200 bytes
            with socket.create_connection((host, port), seconds(5)) as stream:
                join = {"type": "join", "version": control_messages.VERSION, "job": f"j{number}", "port": 9}
                control_messages.send(stream, {**join, "rank": 0, "ranks": [0, 1]})
                assert control_messages.receive(stream)["type"] == "admitted"
        process.send_signal(signal.SIGTERM)
        assert process.wait(seconds(10)) == 0
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()
        os.close(reader)


def test_lines_that_nobody_reads_are_dropped_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(QueuedHandler, "MOST_LINES", 4)
    reader, writer = os.pipe()
    handler = QueuedHandler(writer)
    handler.setFormatter(LogfmtFormatter())

    def log(text: str) -> None:
        handler.handle(logging.makeLogRecord({"msg": text, "event": "joined", "fields": {}}))

    log("x" * (1 << 20))  # more than a pipe holds
    for number in range(10):
        log(f"line {number}")
    long = b""
    while not long.endswith(b"\n"):
        long += os.read(reader, 1 << 16)
    text = os.read(reader, 1 << 16).decode() if long.count(b"\n") == 1 else long.decode()
    assert settles(lambda: handler._lines.empty())
    log("last")
    handler.close()
    os.close(writer)
    text += os.fdopen(reader).read()
    # The thread may have taken the long line, or not yet, when the queue was full.
    dropped = int(re.findall(r'event=joined dropped=(\d) msg="?last', text)[0])
    assert dropped in (6, 7) and text.count("line ") == 10 - dropped


def test_unauthenticated_peers_do_not_fill_the_log() -> None:
    now = [0.0]
    sparingly = RateLimit(clock=lambda: now[0])

    def lines(event: str, count: int) -> list[logging.LogRecord]:
        records = [logging.makeLogRecord({"event": event, "fields": {"peer": str(each)}}) for each in range(count)]
        return [record for record in records if sparingly.filter(record)]

    assert len(lines("joined", 1000)) == 1000
    assert len(lines("unauthenticated", 1000)) == RateLimit.BURST
    assert lines("refused", 10) == []
    now[0] += 2.5
    first, second = lines("unauthenticated", 5)
    assert first.fields == {"peer": "0", "suppressed": 990}  # type: ignore[attr-defined]
    assert second.fields == {"peer": "1"}  # type: ignore[attr-defined]
    now[0] += 1000
    assert len(lines("unauthenticated", 1000)) == RateLimit.BURST


def test_the_command_of_the_systemd_unit_exists() -> None:
    unit = (ROOT / "deploy/netfold-switch.service").read_text()
    (start,) = re.findall(r"^ExecStart=(.*)$", unit, re.M)
    (options,) = re.findall(r'^Environment="NETFOLD_SWITCH_OPTIONS=(.*)"$', unit, re.M)
    binary, *arguments = shlex.split(start.replace("$NETFOLD_SWITCH_OPTIONS", options))
    assert binary.endswith("/bin/netfold")
    parses(arguments)
    stop_s = int(re.findall(r"^TimeoutStopSec=(\d+)$", unit, re.M)[0])
    assert stop_s > float(arguments[arguments.index("--drain") + 1].removesuffix("s")) + 10, (
        "the switch ends jobs, not systemd"
    )


@pytest.mark.skipif(
    shutil.which("systemd-analyze") is None,
    reason="the unit is checked by systemd-analyze, which is not here (Debian: systemd)",
)
def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    unit = (ROOT / "deploy/netfold-switch.service").read_text().replace("/opt/netfold/bin/netfold", "/bin/true")
    (tmp_path / "netfold-switch.service").write_text(unit)
    ended = subprocess.run(
        ["systemd-analyze", "verify", str(tmp_path / "netfold-switch.service")],
        capture_output=True,
        text=True,
        timeout=seconds(60),
    )
    assert ended.returncode == 0, ended.stderr
    assert "netfold-switch.service" not in ended.stderr, ended.stderr


def test_the_command_of_the_container_exists() -> None:
    text = (ROOT / "deploy/Containerfile").read_text()
    (entry,) = re.findall(r"^ENTRYPOINT (\[.*\])$", text, re.M)
    (command,) = re.findall(r"^CMD (\[.*\])$", text, re.M)
    parses([*json.loads(entry)[1:], *json.loads(command)])
    for sources in re.findall(r"^COPY (?!--from)(.*) \S+$", text, re.M):
        for source in sources.split():
            assert (ROOT / source).exists(), source


def test_prometheus_parser_reads_a_jobs_series_whatever_their_labels() -> None:
    label = 'a"b\\c\nd,e="f"}'
    counters = dict.fromkeys(("slots", "slots_collecting", "result_bytes", "sums_resent"), 3)
    counters |= dict.fromkeys(metrics.PACKET_KINDS.values(), 5)
    ranks = [{"rank": 4, "ranks_below": 3, "arrivals": 7, "lag_s": 1e-9, "last": 1 << 60}]
    job = {"id": "00c0ffee", "name": label, "tenant": label, "joined": 2, "memory_bytes": 9, "retransmissions": 1}
    job["capacity_bytes_per_s"] = 25e6
    text = metrics.jobs_text([{**job, "counters": {**counters, "drops": {"stale": 8}}, "ranks": ranks}]).decode()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert len(families) == 12 and all(family.documentation for family in families.values())
    found = {sample.name: sample for family in families.values() for sample in family.samples}
    assert {(sample.labels["id"], sample.labels["name"], sample.labels["tenant"]) for sample in found.values()} == {
        ("00c0ffee", label, label)
    }
    prefix = "netfold_switch_job_"
    assert found[f"{prefix}drops_total"].labels["reason"] == "stale" and found[f"{prefix}drops_total"].value == 8
    assert found[f"{prefix}last_arrivals_total"].labels["rank"] == "leaf of 4"
    assert found[f"{prefix}last_arrivals_total"].value == 1 << 60
    assert (found[f"{prefix}arrival_lag_seconds_sum"].value, found[f"{prefix}arrival_lag_seconds_count"].value) == (
        1e-9,
        7,
    )
