"""Exhaustive search of small scopes over the production machines: the interface to core/native/dev/model_check.

A tool of development: it needs netfold._native_dev, which a checkout builds and no wheel has.

  scopes         the named scopes: those that CI searches, and those of `make model-check`
  breadth_first  the harness of the searches in Python:
  recovery       recovery from a lost switch, by communicator/recovery_machine.py and core/native/collective's
                 Failover; recovery_rank: its model of one rank
  gap_detector   gap detection alone: core/native/protocol's GapDetector
  switch_watch   when a switch counts as lost: communicator/switch_watch.py
  parent_sender  what a leaf sends to its parent: core/native/protocol's ParentSender
  agreement      who goes on after a lost member: elastic/agreement.py
  generations    an elastic job's generations, one after the other: elastic's standing.py, service.py and agreement.py;
                 generation_process: its model of one process

core/native/dev/model_check's header search.hpp describes the machines, the network and time, what is checked in every
state, and why that is enough. May import netfold._native_dev, netfold.extras and sim's diagrams; recovery also
communicator.recovery_machine, switch_watch communicator.switch_watch, agreement and generations netfold.elastic.
Invariants: a report says whether its scope was exhausted; a broken promise comes with the shortest trace and the
command that replays it.

Tests: `.venv/bin/pytest lab/tests/model_check`    All scopes: `make model-check`
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from netfold._native import protocol
from netfold.extras import native_dev
from netfold_plan.sim import diagram
from netfold_plan.sim.network import SWITCH, address_of

__all__ = ["HELLO_WORKERS", "Scope", "draw", "replay", "search", "search_validation", "sentence"]

# Workers of the search over hellos: enough for one that claims another's address, and one that takes no part.
HELLO_WORKERS = 3


@dataclass(frozen=True)
class Scope:
    """The scope of a search. Each field is an option of `python -m netfold_lab.model_check`."""

    workers: int = 2
    leaves: str = ""  # workers below each leaf, as "1,1"; "": all workers at one switch
    window: int = 1  # W; the switch has 2W slots
    operations: str = "2"  # chunks of each operation, as "2,2"
    last: str = ""  # the operations of the last worker, where they differ
    foreign_packets: int = 0  # 1: another job's packets are in the network
    restarts: int = 0  # of group or switch, in total
    network: str = "monotone"  # monotone, merged or exact
    numbers: int = 0  # distance between packet numbers; 0: packets have no numbers
    timeouts: int = 0  # with numbers: timeouts of each worker, and repeated requests for a sum to each leaf
    pipelines: str = ""  # switches by the hardware profile, as "root,1": the switch, or root, and leaf 1
    chunk_bits: int = 0  # pipelines are Tofino's, and compare so many bits of a chunk; 0: bmv2's
    outlives: int = 0  # 1: a pipeline goes on after a restart of the switch, beside the new one
    rogue: int = 0  # 1: the last worker breaks the rule of the window
    max_states: int = 0  # stop at this many; 0: no bound but that of the counter

    def command(self) -> str:
        """Return the command that searches this scope."""
        options = [
            f"--{field.name.replace('_', '-')} {getattr(self, field.name)}"
            for field in fields(self)
            if getattr(self, field.name) != field.default
        ]
        return " ".join(["python -m netfold_lab.model_check", *options])

    def _arguments(self) -> dict[str, Any]:
        arguments: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}
        for name in ("operations", "last"):
            arguments[name] = [int(chunks) for chunks in arguments[name].split(",") if chunks]
        arguments["foreign_packets"] = bool(self.foreign_packets)
        arguments["leaves"] = self.below
        arguments["pipelines"] = self.pipeline_bits
        arguments |= {"outlives": bool(self.outlives), "rogue": bool(self.rogue)}
        return arguments

    @property
    def below(self) -> list[int]:
        """The number of workers below each leaf."""
        return [int(workers) for workers in self.leaves.split(",")] if self.leaves else []

    @property
    def pipeline_bits(self) -> int:
        """The switches by the hardware profile: bit 0 the switch, or root, and bit 1 + f leaf f."""
        names = self.pipelines.split(",") if self.pipelines else []
        return sum(1 << (0 if name == "root" else 1 + int(name)) for name in names)


def search(scope: Scope) -> Any:
    """Search `scope`; return core/native/dev/model_check's Report. Raises ValueError for an impossible scope."""
    return _native().search(**scope._arguments())


def search_validation(workers: int = HELLO_WORKERS) -> Any:
    """Search which hellos validate a worker's address (core/native/dev/model_check, search.hpp).

    Returns a report as `search` does.
    """
    return _native().search_validation(workers)


def replay(scope: Scope, steps: Sequence[str]) -> list[Any]:
    """Do the steps of a trace again; return a record for each. Raises ValueError that names an impossible step."""
    arguments = scope._arguments()
    del arguments["max_states"]
    return _native().replay(**arguments, steps=list(steps))  # type: ignore[no-any-return]


def sentence(scope: Scope, report: Any) -> str:
    """Return a report in one line."""
    slots = protocol.job_slots(scope.window)
    below = f" below leaves {scope.leaves}" if scope.leaves else ""
    found = f"BROKEN: {report.broken}" if report.broken else "exhausted" if report.exhausted else "NOT exhausted"
    others = f" (the last worker {scope.last})" if scope.last else ""
    others += ", another job's packets" if scope.foreign_packets else ""
    others += f", {'Tofino' if scope.chunk_bits else 'P4'} pipelines {scope.pipelines}" if scope.pipelines else ""
    others += f" with chunks of {scope.chunk_bits} bits" if scope.chunk_bits else ""
    others += " that outlive their control plane" if scope.outlives else ""
    others += ", the last worker breaks the window's rule" if scope.rogue else ""
    others += f", numbers {scope.numbers} apart, {scope.timeouts} timers" if scope.numbers else ""
    return (
        f"{scope.workers} workers{below}, {slots} slots, chunks {scope.operations}{others}, {scope.restarts} restarts, "
        f"packets {scope.network}: {found}; {report.states:,} states ({report.machines:,} without the network), "
        f"{report.transitions:,} transitions, depth {report.depth}, {report.seconds:.2f} s"
    )


def draw(scope: Scope, records: Sequence[Any]) -> list[diagram.Line]:
    """Return records as lines of a sequence diagram."""
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


def _native() -> Any:
    return native_dev("model_check").model_check


def _lane(name: str) -> int:
    if name == "switch":
        return SWITCH
    kind, number = name.split()
    return address_of(int(number)) if kind == "leaf" else int(number)
