"""Exhaustive search of small scopes over the production machines: what native/dev/model_check does, with names and
words.

  scopes    the named scopes: those that CI searches, and those of `make model-check`
  recovery  the search over recovery from a lost switch: production's decisions, communicator/recovery_machine.py and
            native/collective's Failover
  gap_detector  the search over gap detection alone: native/protocol's GapDetector
  switch_watch  the search over when a switch is held to be lost: communicator/switch_watch.py
  parent_sender  the search over what a leaf sends to its parent: native/protocol's ParentSender

The machines, the network and time, what is asked of every state, and why that is enough: native/dev/model_check's
header, search.hpp. May import netfold._native.model_check and sim's diagrams; recovery also
communicator.recovery_machine, and switch_watch communicator.switch_watch. Always: a report says whether its scope was
exhausted; a broken promise comes with the shortest trace, and the command that shows it again.

Tests: `.venv/bin/pytest tests/model_check`    All scopes: `make model-check`
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from netfold._native import model_check as native
from netfold._native import protocol
from netfold.sim import SWITCH, diagram
from netfold.sim.network import address_of

__all__ = ["HELLO_WORKERS", "Scope", "draw", "replay", "search", "search_validation", "sentence"]

# Workers of the search over hellos: one that claims another's place is among them, and one that is left alone.
HELLO_WORKERS = 3


@dataclass(frozen=True)
class Scope:
    """What is searched. Each field is an option of `python -m netfold.model_check`.

    leaves: workers below each, as "1,1"; none: all of them at one switch. operations: chunks of each, as "2,2". last:
    the same of the last worker, if it calls something else. foreign_packets: 1 where another job's packets are on the
    wire.
    window: W; the switch has 2W slots. restarts: of group or switch, in total. network: monotone, merged or exact.
    numbers: packets have numbers so far apart, 0 for none; timeouts, where they have: of each worker's timer, and how
    often each leaf is asked for a sum once more. max_states: stop there; 0 for as many as can be counted.
    """

    workers: int = 2
    leaves: str = ""
    window: int = 1
    operations: str = "2"
    last: str = ""
    foreign_packets: int = 0
    restarts: int = 0
    network: str = "monotone"
    numbers: int = 0
    timeouts: int = 0
    max_states: int = 0

    def command(self) -> str:
        """What searches this scope."""
        options = [
            f"--{field.name.replace('_', '-')} {getattr(self, field.name)}"
            for field in fields(self)
            if getattr(self, field.name) != field.default
        ]
        return " ".join(["python -m netfold.model_check", *options])

    def _arguments(self) -> dict[str, Any]:
        arguments: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}
        for name in ("operations", "last"):
            arguments[name] = [int(chunks) for chunks in arguments[name].split(",") if chunks]
        arguments["foreign_packets"] = bool(self.foreign_packets)
        arguments["leaves"] = self.below
        return arguments

    @property
    def below(self) -> list[int]:
        """By leaf, how many workers."""
        return [int(workers) for workers in self.leaves.split(",")] if self.leaves else []


def search(scope: Scope) -> Any:
    """Search `scope`; the report's fields are those of native/dev/model_check's Report. ValueError for one without
    sense.
    """
    return native.search(**scope._arguments())


def search_validation(workers: int = HELLO_WORKERS) -> Any:
    """Search which hellos make an address a worker's (native/dev/model_check, validation_search.hpp); a report as of
    `search`.
    """
    return native.search_validation(workers)


def replay(scope: Scope, steps: Sequence[str]) -> list[Any]:
    """Do the steps of a trace once more; a record each. ValueError at one that cannot happen, saying which."""
    arguments = scope._arguments()
    del arguments["max_states"]
    return native.replay(**arguments, steps=list(steps))  # type: ignore[no-any-return]


def sentence(scope: Scope, report: Any) -> str:
    """A report in one line."""
    slots = protocol.job_slots(scope.window)
    below = f" below leaves {scope.leaves}" if scope.leaves else ""
    found = f"BROKEN: {report.broken}" if report.broken else "exhausted" if report.exhausted else "NOT exhausted"
    others = f" (the last worker {scope.last})" if scope.last else ""
    others += ", another job's packets" if scope.foreign_packets else ""
    others += f", numbers {scope.numbers} apart, {scope.timeouts} timers" if scope.numbers else ""
    return (
        f"{scope.workers} workers{below}, {slots} slots, chunks {scope.operations}{others}, {scope.restarts} restarts, "
        f"packets {scope.network}: {found}; {report.states:,} states ({report.machines:,} without the network), "
        f"{report.transitions:,} transitions, depth {report.depth}, {report.seconds:.2f} s"
    )


def draw(scope: Scope, records: Sequence[Any]) -> list[diagram.Line]:
    """Records as lines of a sequence diagram."""
    lines = []
    for number, record in enumerate(records, 1):
        to = _lane(record.to)
        became = "; ".join(part for part in (record.became, record.state) if part)
        if record.broken:
            became = f"BROKEN: {record.broken}"
        lines.append(
            diagram.Line(
                str(number),
                _lane(record.source) if record.source else to,
                to,
                record.what,
                became,
                arrives=record.became != "lost",
            )
        )
    return lines


def _lane(name: str) -> int:
    if name == "switch":
        return SWITCH
    kind, number = name.split()
    return address_of(int(number)) if kind == "leaf" else int(number)
