"""Features of `probe.py` that may fail over netfold, by torch's version, with the reason."""

from __future__ import annotations

from typing import NamedTuple


class Explanation(NamedTuple):
    reason: str
    before: tuple[int, int] = (99, 0)  # holds for older versions of torch than this
    since: tuple[int, int] = (0, 0)


# Under torch < 2.14 a backend in Python is a whole ProcessGroup: calls pass by torch's dispatcher and its C++.
_NO_DISPATCHER = "before torch 2.14 calls on a Python group pass by torch's dispatcher"
_NO_RECORDER = "before torch 2.15 the flight recorder takes entries from torch's own backends alone"
EXPLAINED: dict[str, Explanation] = {
    "abort_hooks": Explanation("gloo has none either; failures are told by the Work"),
    "backend_by_device": Explanation(
        "torch keeps one backend of a type in a group, and its fake one has the type of all that are not torch's own; "
        "backend_by_device_beside_gloo works",
        since=(2, 14),
    ),
    "boxed_operators": Explanation(_NO_DISPATCHER, (2, 14)),
    "comm_debug_mode": Explanation(_NO_DISPATCHER, (2, 14)),
    "flight_recorder": Explanation(_NO_RECORDER, (2, 15)),
    "flight_recorder_analyser": Explanation(_NO_RECORDER, (2, 15)),
    "flight_recorder_states": Explanation(_NO_RECORDER, (2, 15)),
    "monitored_barrier": Explanation(
        "torch before 2.14 compares the name with gloo; netfold.torch.monitored_barrier does it", (2, 14)
    ),
    "profiler_asynchronous_events": Explanation("only a Work of C++ makes them"),
    "profiler_events_of_operators": Explanation(_NO_DISPATCHER, (2, 14)),
    "set_timeout": Explanation("torch before 2.14 knows gloo and NCCL alone; group.set_timeout does it", (2, 14)),
}


def explained(feature: str, version: str) -> str | None:
    """The reason why `feature` may fail under torch `version`, None where it may not."""
    found = EXPLAINED.get(feature)
    major, minor = (int(part) for part in version.split(".")[:2])
    return found.reason if found is not None and found.since <= (major, minor) < found.before else None
