"""Recovery with one check missing, each made from the production source, and the search that must catch it.

A mutant replaces a text that occurs exactly once in a source, as in mutants.py. Of
recovery_machine.py and recovery_plan.py the changed text is executed beside production; failover.cpp is compiled and
called by ctypes.

    PYTHONPATH=tests .venv/bin/python lab/tests/model_check/recovery_mutants.py [NAME...]   the shortest trace of each
"""

from __future__ import annotations

import ctypes
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from changed import change, execute, load

from netfold.communicator import recovery_machine, recovery_plan
from netfold_lab.model_check.recovery import STUCK, RecoveryReport, search_recovery
from netfold_lab.model_check.recovery_rank import Machines, RecoveryScope

ROOT = Path(__file__).parents[3]
COLLECTIVE = ROOT / "core" / "native" / "collective"
PROTOCOL = ROOT / "core" / "native" / "protocol"
FAILOVER, MACHINE, PLAN = "failover.cpp", "recovery_machine.py", "recovery_plan.py"

FAILS = "a rank fails while all live"
USED = "a result is taken for a contribution"
LEAVES = "a rank leaves the membership that operations go by"
MEETS = "a rank's ("
UNKNOWN = f"{FAILS}: the leader goes on by a membership of the switch that this rank has not joined"
OTHER = f"{FAILS}: this rank has other results than the plan of recovery says"

ONE = RecoveryScope(losses=1)
BACK = RecoveryScope(losses=2, attempts=1, operations="1")
TWICE = RecoveryScope(losses=1, attempts=2, refusals=1, operations="1")
ATTEMPTS = RecoveryScope(losses=1, attempts=2, refusals=1, operations="1,1")
DEATH = RecoveryScope(losses=1, deaths=1, operations="1")


@dataclass(frozen=True)
class Mutant:
    """The changed texts, the scope that shows the fault, and the beginning of the search's report."""

    scope: RecoveryScope
    breaks: str
    edits: tuple[tuple[str, str, str], ...]


MUTANTS = {
    # --- messages between ranks ---
    "plan-of-some": Mutant(
        RecoveryScope(ranks=3, operations="1"),
        FAILS,
        ((MACHINE, "if len(round_.states) < len(self.workers):", "if len(round_.states) < len(self.workers) - 1:"),),
    ),
    "plan-not-for-the-leader": Mutant(ONE, STUCK, ((MACHINE, "*self._handle_plan(parts[self.rank]),", ""),)),
    "loss-is-not-told": Mutant(
        ONE, STUCK, ((MACHINE, "return [GiveUp(generation), ReportLoss(generation)]", "return [GiveUp(generation)]"),)
    ),
    "a-dead-leader-is-waited-for": Mutant(
        DEATH, STUCK, ((MACHINE, ", *([ReportLoss(message.generation)] if is_new else [])", ""),)
    ),
    "lacking-results-are-not-fetched": Mutant(
        ONE, OTHER, ((MACHINE, "if self._fetched < len(task.fetches):", "if False:"),)
    ),
    "results-are-not-compared": Mutant(
        ONE,
        MEETS,
        (
            (MACHINE, "if self._fetched < len(task.fetches):", "if False:"),
            (
                MACHINE,
                "if self._freeze(task.generation).from_chunk(task.base) != task.held:",
                "if False:",
            ),
        ),
    ),
    "announcement-is-not-remembered": Mutant(
        BACK, UNKNOWN, ((MACHINE, "round_.promised = round_.states[self.rank].promised", "round_.promised = False"),)
    ),
    # A former fault: a membership that was lost before this rank had joined stood by, and could be promised.
    "lost-before-it-stands-by": Mutant(
        BACK,
        UNKNOWN,
        (
            (MACHINE, "if generation in self.lost:\n            # Another", "if False:\n            # Another"),
            (MACHINE, "if generation != 0 and generation not in self.lost and", "if generation != 0 and"),
        ),
    ),
    # A former fault: a late join of the leader itself set the attempt for which replies are counted.
    "attempts-are-mixed": Mutant(
        ATTEMPTS,
        UNKNOWN,
        (
            (
                MACHINE,
                "        older = sorted(self._members)\n",
                "        if self._joins is not None:\n            self._joins.number = task.attempt\n"
                "        older = sorted(self._members)\n",
            ),
        ),
    ),
    "promised-though-one-refused": Mutant(
        TWICE,
        UNKNOWN,
        (
            (MACHINE, "            (generation,) = generations\n", "            generation = max(generations)\n"),
            (MACHINE, " and len(generations) == 1:", ":"),
        ),
    ),
    "promised-without-all": Mutant(
        TWICE,
        UNKNOWN,
        (
            (
                MACHINE,
                "if len(attempt.joined) == len(self.workers) and len(generations) == 1:",
                "if len(generations) == 1:",
            ),
            (MACHINE, "attempt.unasked or len(attempt.joined) < len(self.workers)", "not attempt.joined"),
        ),
    ),
    "asked-twice-joins-twice": Mutant(
        RecoveryScope(losses=1, attempts=1, operations="1"),
        LEAVES,
        ((MACHINE, "if message.attempt <= self._attempt:", "if False:"),),
    ),
    # --- the plan ---
    "plan-begins-what-some-have-not": Mutant(
        RecoveryScope(operations="1,1"),
        MEETS,
        ((PLAN, "end = min(state.end", "end = max(state.end"),),
    ),
    # --- the path of operations ---
    "frozen-goes-on": Mutant(ONE, LEAVES, ((FAILOVER, "    current_.frozen = true;\n", ""),)),
    "begun-starts-anew": Mutant(
        ONE, USED, ((FAILOVER, "operation.first_chunk < end ? Mode::host : Mode::undecided", "Mode::undecided"),)
    ),
    "standing-is-not-frozen": Mutant(BACK, UNKNOWN, ((FAILOVER, "  standing_.frozen = true;\n", ""),)),
    "frozen-is-announced": Mutant(
        BACK,
        UNKNOWN,
        ((FAILOVER, "if (!stands(promised_) || standing_.frozen) return 0;", "if (!stands(promised_)) return 0;"),),
    ),
    "gone-is-forgotten": Mutant(BACK, UNKNOWN, ((FAILOVER, "  if (promised) lost_.push_back(generation);\n", ""),)),
    "steps-before-the-plan": Mutant(
        RecoveryScope(operations="1,1"), MEETS, ((FAILOVER, "  if (!down_) return std::nullopt;\n", ""),)
    ),
    "up-and-down": Mutant(BACK, FAILS, ((FAILOVER, "  down_ = false;\n", ""),)),
}


def machines(mutant: Mutant, folder: Path) -> Machines:
    """Production's machines with the mutant's texts changed."""
    texts: dict[str, str] = {}
    for source, text, instead in mutant.edits:
        file = COLLECTIVE / source if source == FAILOVER else ROOT / "core/src/netfold" / "communicator" / source
        texts[source] = change(texts.get(source) or file.read_text(), text, instead, source)
    # Messages and actions stay production's: the search knows them by their classes.
    source = texts.get(MACHINE) or Path(recovery_machine.__file__).read_text()
    changed = execute(recovery_machine, source, "class RecoveryMachine:")
    if PLAN in texts:
        changed["make_plan"] = execute(recovery_plan, texts[PLAN], "def make_plan(")["make_plan"]
    if FAILOVER not in texts:
        return Machines(recovery=changed["RecoveryMachine"])
    (folder / FAILOVER).write_text(texts[FAILOVER])
    sources = [folder / FAILOVER, Path(__file__).with_name("failover_abi.cpp")]
    library = load(folder / "failover.so", sources, [COLLECTIVE / "include", PROTOCOL / "include"], "-O1")
    return Machines(failover=_failover(library), recovery=changed["RecoveryMachine"])


def _failover(library: ctypes.CDLL) -> Any:
    """A class like netfold._native.failover.Failover, over a library of failover_abi.cpp."""
    for name in ("new", "copy"):
        getattr(library, f"failover_{name}").restype = ctypes.c_void_p
    for name in ("generation", "announce", "canonical"):
        getattr(library, f"failover_{name}").restype = ctypes.c_uint64
    library.failover_host_operation.restype = ctypes.c_int64

    class Failover:
        def __init__(self, generation: int, copied: Any = None) -> None:
            made = (
                library.failover_new(ctypes.c_uint64(generation)) if copied is None else library.failover_copy(copied)
            )
            self._self = ctypes.c_void_p(made)

        def __del__(self) -> None:
            library.failover_delete(self._self)

        def copy(self) -> Failover:
            return Failover(0, self._self)

        def _call(self, name: str, *arguments: int) -> int:
            return int(getattr(library, f"failover_{name}")(self._self, *map(ctypes.c_uint64, arguments)))

        @property
        def is_up(self) -> bool:
            return bool(self._call("is_up"))

        @property
        def generation(self) -> int:
            return self._call("generation")

        def freeze(self, generation: int) -> tuple[int, bool]:
            said = self._call("freeze", generation)
            return said & 3, bool(said & 4)

        def host_operation(self) -> int | None:
            number = self._call("host_operation")
            return None if number < 0 else number

        def canonical(self) -> bytes:
            out = ctypes.create_string_buffer(4096)
            size = library.failover_canonical(self._self, out, ctypes.c_uint64(len(out)))
            assert size <= len(out)
            return out.raw[:size]

        def __getattr__(self, name: str) -> Any:
            return lambda *arguments: self._call(name, *arguments)

    return Failover


def search(mutant: Mutant, folder: Path) -> RecoveryReport:
    return search_recovery(mutant.scope, machines(mutant, folder))


def main(names: Iterable[str]) -> int:
    missed = 0
    for name in list(names) or MUTANTS:
        with tempfile.TemporaryDirectory() as folder:
            report = search(MUTANTS[name], Path(folder))
        found = report.broken or ("" if report.exhausted else "not exhausted")
        print(f"{name}: {found or 'NOT caught'}, {len(report.trace)} steps, {report.states} states", flush=True)
        print(f"  {'; '.join(report.trace)}")
        missed += not found
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
