"""The log when a job's groups are made: one line at info, and each rank's facts at debug."""

from __future__ import annotations

import logging

from ranks import run_ranks, values

from netfold import FileStore
from netfold.communicator import Group

SIZE = 3


def make_groups(rank: int, size: int, folder: str) -> list[tuple[str, str]]:
    lines: list[tuple[str, str]] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append((record.levelname, record.getMessage()))  # type: ignore[method-assign]
    logging.getLogger("netfold").addHandler(handler)
    logging.getLogger("netfold").setLevel("DEBUG")
    # The world twice, and a group whose rank 0 is not the job's.
    for name, members in (("world", [0, 1, 2]), ("again", [0, 1, 2]), ("others", [1, 2])):
        if rank in members:
            store = FileStore(f"{folder}/{name}")
            Group(store, members.index(rank), len(members), join_timeout_s=20, job_ranks=members).close()
    return lines


def test_a_job_logs_one_line_at_info_and_each_ranks_facts_at_debug() -> None:
    logged = values(run_ranks(make_groups, SIZE))
    ((rank, level, text),) = [
        (rank, *line) for rank, lines in enumerate(logged) for line in lines if line[0] != "DEBUG"
    ]
    assert (rank, level) == (0, "INFO")
    assert "rank 0 of 3 listens on" in text and "all_reduce: shared_memory" in text
    for rank, lines in enumerate(logged):
        assert sum("listens on" in text for _, text in lines) == (3 if rank else 2), "every group of every rank"
        assert any("copy" in text or "copies" in text for _, text in lines)
