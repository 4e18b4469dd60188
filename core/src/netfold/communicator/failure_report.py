"""Turn a failed operation into an exception that names the rank at fault and what the other ranks do."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from netfold._native import engine
from netfold.communicator import connection_manager
from netfold.communicator.connection_manager import GroupMonitor
from netfold.communicator.recovery import Recovery
from netfold.errors import NetfoldError, error_of
from netfold.profile import records_of
from netfold.switch_protocol.control_messages import Message

_IN_NETWORK = [engine.ALGORITHMS[name] for name in ("in_network", "split", "hierarchical")]
_TRANSFERS = (engine.KINDS["send"], engine.KINDS["receive"])


class FailureReport:
    """Of one group. Thread-safe."""

    def __init__(self, monitor: GroupMonitor, recoveries: Sequence[Recovery]) -> None:
        self._monitor = monitor
        self._recoveries = recoveries
        self._lock = threading.RLock()  # a signal handler may use the group
        self._status: dict[int, Message] | None = None  # what other ranks replied at the first timeout

    def error(self, operation: Any) -> NetfoldError:
        """The exception for a failed operation, with the missing ranks where the switch knows them."""
        kind, rank, text = operation.failure
        name = engine.FAILURES[kind]
        if name == "timeout":
            rank, text = self._explain_timeout(records_of(operation.record())[0], rank, text)
        if self._monitor.native.failure is not None:
            # Ranks that wait at a switch for this rank learn the reason now, and not when this rank closes the group.
            for recovery in self._recoveries:
                recovery.leave(text, rank)
        return error_of(name, rank, text)

    def _explain_timeout(self, record: Any, rank: int, text: str) -> tuple[int, str]:
        """The rank at fault, and the whole text. rank: the one that was waited for, -1 where that is not known."""
        if rank < 0 and self._recoveries and record["algorithm"] in _IN_NETWORK:
            for recovery in self._recoveries:
                missing, description = recovery.stragglers()
                rank = missing[0] if missing and rank < 0 else rank
                text += f"; {description}"
            text += ". Did every rank make this call?"
        else:
            text += "."
        sequence = None if record["operation"] in _TRANSFERS else int(record["sequence"])
        rank, activity = self._describe_others(rank, sequence)
        return rank, text + activity

    def _describe_others(self, rank: int, sequence: int | None) -> tuple[int, str]:
        """The rank at fault, and what that rank does. Costs up to a second.

        rank: the one that this rank waits for, -1 where that is not known. In collective `sequence` that rank may
        itself wait for another. Where every rank has made the call, the text describes all ranks, `rank` first.
        """
        with self._lock:
            if self._status is None:
                group = self._monitor.registered_group
                others = [each for each in range(group.size) if each != group.rank]
                self._status = self._monitor.query_status(sorted(others, key=lambda each: each != rank))
        if not self._status:
            return rank, ""
        ranks = [] if sequence is None else connection_manager.overdue_ranks(self._status, sequence)
        if ranks and rank not in ranks:
            rank = ranks[0]
        ranks = sorted(ranks or self._status, key=lambda each: (each != rank, each))
        return rank, f" Just now {connection_manager.describe_status({each: self._status[each] for each in ranks})}"
