"""A link between hosts as netfold measured it, by `netfold doctor check` or `netfold bench` with --output json."""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path
from typing import Any

from netfold.tuning.fit import fit_link
from netfold.tuning.topology import Link


def measured_link(path: Path) -> Link:
    """Read the link of one host and direction from a measurement.

    The doctor measures pairs of hosts: the link has the median latency, and the median rate of the slower directions.
    For a benchmark of all_reduce, the link is fitted to a ring of its ranks, one per host, with its first backend.
    Raises ValueError, in one sentence, for any other file.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise ValueError(f"{path}: is not JSON; write it with --output json") from None
    try:
        link = _read(path, found)
    except (KeyError, TypeError, IndexError, AttributeError, ArithmeticError):
        raise ValueError(f"{path}: is cut off, or of another version of netfold; measure again") from None
    if not (0 <= link.latency_s < math.inf and 0 < link.bytes_per_s < math.inf):
        raise ValueError(f"{path}: makes a link of {link.text()}, which there is not; measure again")
    return link


def _read(path: Path, found: Any) -> Link:
    if "links" in found:
        return _of_doctor(path, found["links"])
    if "rows" in found:
        return _of_bench(path, found)
    raise ValueError(f"{path}: is neither of `netfold doctor check --output json` nor of `netfold bench`")


def _of_doctor(path: Path, links: list[dict[str, Any]]) -> Link:
    if not links:
        raise ValueError(f"{path}: has no link; run `netfold doctor check` on several hosts, under a launcher")
    return Link(
        statistics.median(float(link["latency_s"]) for link in links),
        statistics.median(
            min(float(link["forward_bytes_per_s"]), float(link["reverse_bytes_per_s"])) for link in links
        ),
    )


def _of_bench(path: Path, found: dict[str, Any]) -> Link:
    ranks, rows = int(found["place"]["workers"]), found["rows"]
    rows = [row for row in rows if row["backend"] == rows[0]["backend"] and row["time_ns"] is not None]
    if ranks < 2 or any(row["collective"] != "all_reduce" for row in rows):
        raise ValueError(f"{path}: is not of `netfold bench all-reduce` over two ranks or more")
    # A ring: 2(P-1) steps, each of a P-th of the tensor (Patarasuk and Yuan 2009).
    steps = 2 * (ranks - 1)
    samples = [
        (round(row["size_bytes"] / ranks), row["time_ns"]["median"] / 1e9 / steps)
        for row in rows
        if row["algorithm"] in (None, "ring")
    ]
    if len({size for size, _ in samples}) < 2:
        raise ValueError(
            f"{path}: has fewer than two sizes that went in a ring; a latency and a rate need two (-b, -e, and "
            "NETFOLD_ALGORITHM=ring)"
        )
    return fit_link(samples)
