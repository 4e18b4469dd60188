"""Ranks of a job: their answers, and each way in which a rank can fail."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from load import seconds

from netfold_lab.bench.network import Network, Place
from netfold_lab.bench.ranks import BenchError, Ranks, start_ranks

RANK = """
import os, sys, time
from netfold_lab.bench.ranks import connect

with connect(*sys.argv[1:]) as orders:
    rank = int(os.environ["RANK"])
    (way,) = orders.begin(rank)

    def answer(what, value=None):
        if what == "raise" and rank == 1:
            raise ValueError(f"no {value}")
        if what == "leave" and rank == 1:
            print("rank 1 leaves", flush=True)
            os._exit(3)
        if what == "sleep":
            time.sleep(value)
        return rank, what, value

    orders.serve(answer, ready=f"{way} {rank}")
    if way == "raise at the end" and rank == 1:
        raise ValueError("not closed")
"""


@contextmanager
def job(folder: Path, way: str = "plain", size: int = 2, deadline_s: float = 60) -> Iterator[Ranks]:
    script = folder / "rank.py"
    script.write_text(RANK)
    network, argv = Network(Place(size)), [sys.executable, str(script)]
    with start_ranks(network, "job", argv, [way], deadline_s=deadline_s) as ranks:
        yield ranks
    assert all(process.poll() == 0 for process in ranks.processes.values()) and not ranks.folder.exists()


def test_answers_are_in_the_order_of_ranks_and_an_order_may_be_for_the_first_ranks_only(tmp_path: Path) -> None:
    with job(tmp_path, size=3) as ranks:
        assert ranks.ready == ["plain 0", "plain 1", "plain 2"]
        assert ranks.ask("one", (1, b"2")) == [(rank, "one", (1, b"2")) for rank in range(3)]
        assert ranks.ask("two", first=2) == [(0, "two", None), (1, "two", None)]


def test_the_error_for_a_rank_that_raises_names_the_rank_and_has_its_traceback(tmp_path: Path) -> None:
    with (
        pytest.raises(BenchError, match=r"^job rank 1 failed: Traceback(.|\n)*ValueError: no sum"),
        job(tmp_path) as ranks,
    ):
        ranks.ask("raise", "sum")
    assert all(process.poll() is not None for process in ranks.processes.values())


def test_the_error_for_a_rank_that_ends_has_its_exit_code_and_output(tmp_path: Path) -> None:
    with (
        pytest.raises(BenchError, match=r"^job rank 1 ended with exit code 3\njob rank 1\| rank 1 leaves$"),
        job(tmp_path) as ranks,
    ):
        ranks.ask("leave")


def test_a_rank_that_fails_after_its_last_answer_is_an_error(tmp_path: Path) -> None:
    with (
        pytest.raises(BenchError, match=r"^job rank 1 ended with exit code 1(.|\n)*ValueError: not closed"),
        job(tmp_path, "raise at the end") as ranks,
    ):
        ranks.ask("one")


def test_after_the_deadline_the_ranks_are_ended(tmp_path: Path) -> None:
    began = time.monotonic()
    with pytest.raises(BenchError, match="had not ended after 3 s"), job(tmp_path, deadline_s=3) as ranks:
        ranks.ask("sleep", 1000)
    assert time.monotonic() - began < seconds(20)


def test_a_rank_without_a_benchmark_ends_soon_after_the_deadline(tmp_path: Path) -> None:
    script = tmp_path / "rank.py"
    script.write_text(RANK.replace("with connect", "import netfold_lab.bench.ranks as r; r._GRACE_S = 0\nwith connect"))
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(f"{tmp_path}/orders")
        server.listen()
        rank = subprocess.Popen([sys.executable, script, tmp_path, "1"], env={**os.environ, "RANK": "0"})
        assert rank.wait(seconds(30)) == -signal.SIGALRM


SCRIPT = """
import driver

def serve(me, fails):
    me.serve(lambda number: me.rank + number)
    if fails and me.rank == 0:
        raise ValueError("not closed")

def measure(number: int = 1, fails: bool = False) -> str:
    '''A page'''
    with driver.ranks_at(driver.Place(2), serve, fails) as ranks:
        return f"answers: {ranks.ask(number)}"

if __name__ == "__main__":
    driver.run(measure)
"""


def test_a_script_writes_a_page_with_command_machine_and_launches(tmp_path: Path) -> None:
    script, page = tmp_path / "script.py", tmp_path / "page.md"
    script.write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3] / "lab" / "bench")}
    command = [sys.executable, str(script), "--number", "5", "-o", str(page)]
    subprocess.run(command, env=environment, check=True)
    lines = page.read_text().splitlines()
    assert lines[0] == "# A page" and lines[-1] == "answers: [5, 6]"
    assert "--number 5" in lines[2] and "ranks were started 1 times" in lines[2] and "commit" in lines[2]
    page.unlink()
    failed = subprocess.run([*command, "--fails"], env=environment, capture_output=True, text=True)
    assert failed.returncode == 1 and not page.exists()
    assert "serve rank 0 ended with exit code 1" in failed.stderr and "ValueError: not closed" in failed.stderr
