"""Turn the windows of torch's profiler into netfold's event records.

A mark holds neither the operation's group, nor its sequence number, nor its time of submission. torch's flight recorder
holds all three. The k-th mark of a name and sizes belongs to the k-th entry of that name and sizes since the window
began. So all ranks count alike, even if one of them missed a mark.
"""

from __future__ import annotations

import collections
import json
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch.distributed as dist

from netfold.profile.record import RECORD
from netfold.profile.recording import UNKNOWN, Names
from netfold.profile.run import GroupName
from netfold.profile.torch.window import Event, Window, other_groups

_DTYPES = {
    "float": ("f32", 4),
    "double": ("f64", 8),
    "c10::Half": ("f16", 2),
    "c10::BFloat16": ("bf16", 2),
    "signed char": ("i8", 1),
    "unsigned char": ("u8", 1),
    "short int": ("i16", 2),
    "int": ("i32", 4),
    "long int": ("i64", 8),
    "bool": ("u8", 1),
    "c10::complex<float>": ("?", 8),
    "c10::complex<double>": ("?", 16),
}
# Marks' names to netfold's names of the same operations.
_OPERATIONS = {"alltoall": "all_to_all", "allreduce": "all_reduce"}
# Operations whose marks list one tensor a rank. A record holds the size of one of the tensors.
_LISTED = ("scatter", "gather", "all_gather", "reduce_scatter")
# Other groups' numbers start here, one for each backend of a group. netfold's groups have smaller numbers.
_FIRST_NUMBER = 1 << 32
_COLUMNS = ("group", "bytes", "queued_ns", "started_ns", "finished_ns", "sequence", "operation", "dtype")


class WindowRecords:
    """The groups of other backends in one recording, and the records of their operations."""

    def __init__(self) -> None:
        self.is_uncertain = False  # the flight recorder lacked an operation
        self.known: dict[str, GroupName] = {}  # by torch's name, destroyed groups included
        # By torch's name of a group (None: unknown) and the backend that served the operation.
        self._numbers: dict[tuple[str | None, str], int] = {}

    def update_groups(self) -> dict[str, GroupName]:
        for group, name, backends in other_groups():
            text = group.group_desc if group.group_desc not in ("", "undefined") else f"group {name}"
            self.known[name] = GroupName(text, backends, dist.get_process_group_ranks(group))
        return self.known

    def groups(self) -> Mapping[str, GroupName]:
        """The groups by number. A group of several backends appears once for each: not all report completion."""
        known = self.update_groups()
        for name, group in known.items():
            for backend in group.backend.split(" and "):
                self._number(name, backend)
        return {
            str(number): GroupName("one of several groups", backend)
            if name is None
            else replace(known[name], backend=backend)
            for (name, backend), number in self._numbers.items()
        }

    def records(self, window: Window, names: Names) -> tuple[Any, int]:
        """The window's records ([operations] of RECORD) by time of their end, and the number of missing operations."""
        events = sorted(window.events, key=lambda each: each.start_ns)
        known = list(self.update_groups())
        recorded = _FlightEntries(window)
        entries = [recorded.find(each) for each in events]
        # An operation without an entry can be counted if there is only one group.
        counted = dict(window.begun) if len(known) == 1 else None
        rows: list[tuple[int, ...]] = []
        for event, entry in zip(events, entries, strict=True):
            backend, _, operation = event.name.partition(":")
            operation = _OPERATIONS.get(operation, operation)
            began = window.monotonic(event.start_ns)
            group, sequence, queued = None, 0, began
            if entry is not None:
                group, sequence = entry.group, entry.sequence
                queued = min(began, window.monotonic(entry.created_ns))
                if counted is not None:
                    counted[group] = sequence
            else:
                self.is_uncertain = True
                if counted is not None:
                    group = known[0]
                    sequence = counted[group] = counted.get(group, 0) + 1
            number = self._number(group if group in known else None, backend)
            dtype, item_bytes = _DTYPES.get(event.dtypes[0] if event.dtypes else "", ("?", 0))
            sizes = [math.prod(shape) * item_bytes for shape in event.shapes]
            if operation in _LISTED:
                sizes = sizes[:1]
            elif operation == "all_to_all":  # a record holds the size of one block
                ranks = self.known[group].ranks if group in self.known else ()
                sizes = [sum(sizes) // max(1, len(ranks))]
            numbers = names.number("operation", operation), names.number("dtype", dtype)
            rows.append((number, sum(sizes), queued, began, began + event.duration_ns, sequence, *numbers))
        records = np.zeros(len(rows), RECORD)
        for name, column in zip(_COLUMNS, zip(*rows, strict=True), strict=False):
            records[name] = column
        for name in ("reduce", "algorithm", "wire"):
            records[name] = UNKNOWN
        records["slowest_rank"] = -1
        missing = recorded.left() if recorded.count >= window.submitted else max(0, window.submitted - len(events))
        return records[np.argsort(records["finished_ns"], kind="stable")], missing

    def _number(self, group: str | None, backend: str) -> int:
        return self._numbers.setdefault((group, backend), _FIRST_NUMBER + len(self._numbers))


class _Entry(NamedTuple):
    group: str
    sequence: int
    created_ns: int


class _FlightEntries:
    """The flight recorder's entries of a window. Each is returned once."""

    def __init__(self, window: Window) -> None:
        self._entries: dict[tuple[str, str], collections.deque[_Entry]] = {}
        entries = json.loads(window.dump).get("entries", ())
        self.count = len(entries)
        for entry in entries:
            created_ns = entry["time_created_ns"]
            if window.began[0] <= created_ns <= window.ended[0]:
                row = _Entry(entry["process_group"][0], entry["collective_seq_id"], created_ns)
                key = (entry["profiling_name"], repr(entry["input_sizes"]))
                self._entries.setdefault(key, collections.deque()).append(row)

    def find(self, event: Event) -> _Entry | None:
        """Return the entry of an event; call this for the events in order of time."""
        entries = self._entries.get((event.name, repr(event.shapes)))
        return entries.popleft() if entries else None

    def left(self) -> int:
        """The number of entries without a mark."""
        return sum(map(len, self._entries.values()))
