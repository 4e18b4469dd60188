"""Machines with one check missing, each made from the production source, and the search that must catch it.

A mutant replaces texts that occur exactly once in a source of core/native/protocol, or in the search's machine of a
Tofino. The changed source is compiled and linked with the search; production has no switch to turn a check off. Where a
text is not found, the code has changed: find the check's new place, and change the mutant.

    PYTHONPATH=tests .venv/bin/python lab/tests/model_check/mutants.py [NAME...]      the shortest trace of each
"""

from __future__ import annotations

import functools
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import load
from changed import change

from netfold_lab.model_check import Scope, draw
from netfold_plan.sim import diagram

ROOT = Path(__file__).parents[3]
PROTOCOL = ROOT / "core" / "native" / "protocol"
MODEL_CHECK = ROOT / "core" / "native" / "dev" / "model_check"
MAIN = Path(__file__).with_name("main.cpp")
# -O1: the largest scope is searched in 19 s, and by -O0 in 51; compiling takes as long.
COMPILE = ["c++", "-std=c++20", "-O1", "-ffp-contract=off"]
# Seconds of a quiet machine, far above what they take: they end what hangs.
COMPILE_S = SEARCH_S = 300.0
INCLUDES = [
    f"-I{ROOT / 'core' / 'native' / folder / 'include'}" for folder in ("dev/model_check", "protocol", "kernels")
]

WRONG = "a worker is given a wrong sum of chunk"
TWICE = "a worker is given chunk"
CHANGES = "the result of chunk"
DISAGREED = "a worker is given a sum of chunk 0, on which workers disagree"
SAME_CALL = "a mismatch names a worker with the reader's own call"
NOT_RESENT = "a worker does not send again what a NACK names"
NOT_MISSING = "a worker sends a chunk again that is not missing"
STUCK = "from here, with all packets lost, no sequence of retransmissions leads to the end"

SWITCH, WORKER, PARENT_SENDER, GAP_DETECTOR = "switch_job.cpp", "worker.cpp", "parent_sender.cpp", "gap_detector.cpp"
SWITCH_HEADER = "include/netfold/protocol/switch_job.hpp"
TOFINO = "tofino_job.cpp"
ADDRESS_VALIDATION = "include/netfold/protocol/address_validation.hpp"
# The source to compile where a header changes.
BUILT_FROM = {
    SWITCH_HEADER: PROTOCOL / SWITCH,
    ADDRESS_VALIDATION: MODEL_CHECK / "validation_search.cpp",
}


@dataclass(frozen=True)
class Mutant:
    """The changes, the scope that reveals them, and the beginning of the promise that breaks."""

    scope: Scope
    breaks: str
    edits: tuple[tuple[str, str, str], ...]  # source, text, replacement


STALE = "if (header.chunk < slot.chunk) return drop(Drop::stale);"
OPENS = "if (header.chunk > slot.chunk) {"
WINDOW = "if (header.chunk != slot.chunk + slot_count() || !slot.complete) return drop(Drop::window);"
EPOCH = "if (header.epoch != config_.epoch) return {};"
INCARNATION = "if (header.incarnation != config_.incarnation) return {};"

# The smallest scope of a Tofino's pipeline, in which it has a slot for every other chunk.
TOFINO_PAIR = Scope(operations="3", pipelines="root", chunk_bits=3)

TOFINO_KEPT = "handled.outcome = config_.parent && !had_result ? Outcome::resend_sum : Outcome::resend_result;"

MISMATCH_DROPPED = "return drop(Drop::malformed);\n  }\n  // A result"

MUTANTS = {
    "switch-chunk": Mutant(Scope(operations="3"), WRONG, ((SWITCH, STALE, ""),)),
    # As SwitchML: a bit for two rounds of the slots in place of the chunk number (VeriNC, ICNP'26).
    "switch-version-bit": Mutant(
        Scope(operations="6"),
        "the result of chunk",
        (
            (SWITCH, STALE, "const bool same = header.chunk / slot_count() % 2 == slot.chunk / slot_count() % 2;"),
            (SWITCH, OPENS, "if (!same) {"),
            (SWITCH, WINDOW, "if (!slot.complete) return drop(Drop::window);"),
        ),
    ),
    "switch-epoch": Mutant(Scope(operations="2", restarts=1), WRONG, ((SWITCH, EPOCH.format("Drop::epoch"), ""),)),
    "switch-incarnation": Mutant(
        Scope(operations="2", restarts=1), WRONG, ((SWITCH, INCARNATION.format("Drop::incarnation"), ""),)
    ),
    "switch-bitmap": Mutant(Scope(operations="2"), WRONG, ((SWITCH, "if (word & bit) {", "if (false) {"),)),
    "switch-kept-result": Mutant(
        Scope(operations="2"),
        STUCK,
        ((SWITCH, "handled.outcome = Outcome::resend_result;\n    return handled;", "return drop(Drop::duplicate);"),),
    ),
    # A pool of W slots: the next chunk overwrites a result that a worker may still need.
    "switch-half-the-slots": Mutant(
        Scope(operations="3"), STUCK, ((SWITCH_HEADER, "std::bit_ceil(2 * window)", "std::bit_ceil(window)"),)
    ),
    "switch-count": Mutant(
        Scope(operations="1"),
        WRONG,
        (
            (
                SWITCH,
                "if (slot.contributed_count < config_.workers) {",
                "if (slot.contributed_count + 1 < config_.workers) {",
            ),
        ),
    ),
    "worker-epoch": Mutant(
        Scope(operations="2", restarts=1), WRONG, ((WORKER, EPOCH.format("drop(Drop::epoch)"), ""),)
    ),
    "worker-incarnation": Mutant(
        Scope(operations="2", restarts=1), WRONG, ((WORKER, INCARNATION.format("drop(Drop::incarnation)"), ""),)
    ),
    "worker-chunk": Mutant(
        Scope(operations="3"), TWICE, ((WORKER, "if (header.chunk < base_) return drop(Drop::stale);", ""),)
    ),
    "worker-duplicate": Mutant(
        Scope(window=2, operations="3"),
        TWICE,
        ((WORKER, "if (entry.state == State::received) return drop(Drop::duplicate);", ""),),
    ),
    "worker-timer": Mutant(
        Scope(operations="2"), STUCK, ((WORKER, "mark_lost(flight_.head, true);\n    ++backoff_;", "++backoff_;"),)
    ),
    "switch-agreement": Mutant(
        Scope(operations="1,1", last="2"),
        DISAGREED,
        ((SWITCH, "if (slot.contributed_count > 0 && call != slot.descriptor) {", "if (false) {"),),
    ),
    # Compares everything but the size; the worker cannot detect this, since it does not compare sizes.
    "switch-agreed-elements": Mutant(
        Scope(operations="1,1", last="2"),
        DISAGREED,
        (
            (
                SWITCH,
                "const CallDescriptor call = CallDescriptor::of(header);",
                "CallDescriptor call = CallDescriptor::of(header);\n  if (slot.contributed_count > 0) "
                "call.elements = slot.descriptor.elements;",
            ),
        ),
    ),
    "switch-silent-mismatch": Mutant(
        Scope(operations="1,1", last="2"),
        STUCK,
        (
            (
                SWITCH,
                "call != slot.descriptor) {\n    handled.outcome = Outcome::mismatch;",
                "call != slot.descriptor) {\n    return drop(Drop::malformed);",
            ),
        ),
    ),
    "switch-job": Mutant(
        Scope(operations="2", foreign_packets=1),
        WRONG,
        ((SWITCH, "if (header.job != config_.job) return Drop::foreign;", ""),),
    ),
    "worker-job": Mutant(
        Scope(operations="2", foreign_packets=1),
        WRONG,
        ((WORKER, "if (header.job != config_.job) return drop(Drop::foreign);", ""),),
    ),
    "worker-mismatch": Mutant(
        Scope(operations="1,1", last="2"),
        STUCK,
        ((WORKER, "received.outcome = Outcome::mismatch;", ""),),
    ),
    "worker-own-mismatch": Mutant(
        Scope(workers=3, operations="1,1", last="2"),
        SAME_CALL,
        ((WORKER, "if (CallDescriptor::of(header) == descriptor_at(header.chunk)) return drop(Drop::stale);", ""),),
    ),
    # A leaf does not send its sum again: a loss between the leaf and the root is never repaired.
    "leaf-resent-sum": Mutant(
        Scope(leaves="1,1", operations="1"),
        STUCK,
        ((SWITCH, "if (!summed(slot)) return drop(Drop::duplicate);", "return drop(Drop::duplicate);"),),
    ),
    # A leaf accepts the root's result of another chunk of the slot.
    "leaf-chunk": Mutant(
        Scope(leaves="1,1", operations="3"),
        WRONG,
        (
            (SWITCH, "if (slot.chunk > header.chunk) return drop(Drop::stale);", ""),
            (SWITCH, "if (header.chunk != slot.chunk || !summed(slot)) return", "if (!summed(slot)) return"),
        ),
    ),
    # A leaf sends its sum when the first of its workers contributed.
    "leaf-sum": Mutant(
        Scope(leaves="2", operations="1"),
        WRONG,
        (
            (
                SWITCH,
                "if (slot.contributed_count < config_.workers) {",
                "if (slot.contributed_count < config_.workers && !config_.parent) {",
            ),
        ),
    ),
    # A leaf accepts packets of another generation, or job, of its parent.
    "leaf-job": Mutant(
        Scope(leaves="1,1", operations="2", foreign_packets=1),
        WRONG,
        ((SWITCH, "if (header.job != config_.parent->job) return Drop::foreign;", ""),),
    ),
    "leaf-epoch": Mutant(
        Scope(leaves="1,1", operations="1", restarts=1),
        WRONG,
        ((SWITCH, "if (header.epoch != config_.parent->epoch) return Drop::epoch;", ""),),
    ),
    "leaf-incarnation": Mutant(
        Scope(leaves="1,1", operations="1", restarts=1),
        WRONG,
        ((SWITCH, "if (header.incarnation != config_.parent->incarnation) return Drop::incarnation;", ""),),
    ),
    # A leaf that restarted has another epoch than its parent.
    "leaf-names-its-own-epoch": Mutant(
        Scope(leaves="1,1", operations="1", restarts=1),
        STUCK,
        ((SWITCH, ".epoch = config_.parent->epoch,", ".epoch = config_.epoch,"),),
    ),
    "leaf-mismatch": Mutant(
        Scope(leaves="1,1", operations="1,1", last="2"),
        STUCK,
        ((SWITCH, "handled.outcome = Outcome::mismatch;\n    return handled;\n  }\n  // A result", MISMATCH_DROPPED),),
    ),
    # Packet numbers, and losses found by them.
    "nack-is-ignored": Mutant(
        Scope(workers=1, window=2, operations="2", numbers=8),
        NOT_RESENT,
        ((WORKER, "mark_lost(at, false);\n      received.outcome", "received.outcome"),),
    ),
    "nack-misses-its-last": Mutant(
        Scope(workers=1, window=2, operations="2", numbers=8),
        NOT_RESENT,
        (
            (
                WORKER,
                "if (send_number - header.chunk >= header.elements) break;",
                "if (send_number - header.chunk + 1 >= header.elements) break;",
            ),
        ),
    ),
    "nack-names-what-was-sent-later": Mutant(
        Scope(workers=1, window=2, operations="2", numbers=8),
        NOT_MISSING,
        ((WORKER, "if (send_number - header.chunk >= header.elements) break;", ""),),
    ),
    "retransmission-has-its-old-number": Mutant(
        Scope(workers=1, window=2, operations="2", numbers=8, timeouts=1),
        "a worker reuses a packet number",
        (
            (
                WORKER,
                "entry.send_number = ++packet_number_;",
                "entry.send_number = again ? packet_number_ : ++packet_number_;",
            ),
        ),
    ),
    "passed-over-too-early": Mutant(
        Scope(workers=1, window=3, operations="3", numbers=4),
        NOT_MISSING,
        (
            (
                WORKER,
                "if (earlier.send_number + kReorderThreshold > highest_received_send_) break;",
                "if (earlier.send_number > highest_received_send_) break;",
            ),
        ),
    ),
    "passed-over-though-none-was-skipped": Mutant(
        Scope(workers=2, window=2, operations="3", numbers=8),
        NOT_MISSING,
        (
            (
                WORKER,
                "result_skipped_ = result_skipped_ || header.packet_number != newest_result_ + 1;",
                "result_skipped_ = true;",
            ),
        ),
    ),
    "named-too-early": Mutant(
        Scope(workers=1, window=3, operations="3", numbers=4),
        "a NACK names a packet that does not count as missing",
        ((GAP_DETECTOR, "if (age + ahead < kReorderThreshold ||", "if (age + ahead + 4 < kReorderThreshold ||"),),
    ),
    "nack-of-a-former-generation": Mutant(
        Scope(workers=1, window=2, operations="2", numbers=8, restarts=1),
        NOT_MISSING,
        (
            (
                WORKER,
                EPOCH.format("drop(Drop::epoch)"),
                "if (header.epoch != config_.epoch && !(header.flags & kNack)) return drop(Drop::epoch);",
            ),
        ),
    ),
    "leaf-nack-is-ignored": Mutant(
        Scope(workers=1, leaves="1", window=2, operations="2", numbers=8),
        "a leaf does not send again what a NACK names",
        ((PARENT_SENDER, "      make_due(at);\n      ++again;", "      ++again;"),),
    ),
    "leaf-resends-no-sum-on-request": Mutant(
        Scope(workers=1, leaves="1", window=2, operations="1", numbers=8, timeouts=1),
        "a leaf does not send a sum that a worker asks for",
        ((PARENT_SENDER, "    make_due(slot);\n    return;", "    return;"),),
    ),
    # The hardware profile: a pipeline that outlives its control plane, and pipelines in trees.
    "pipeline-outlived-incarnation": Mutant(
        Scope(operations="2", restarts=1, pipelines="root", outlives=1),
        WRONG,
        ((WORKER, INCARNATION.format("drop(Drop::incarnation)"), ""),),
    ),
    "pipeline-leaf-resent-sum": Mutant(
        Scope(workers=1, leaves="1", window=2, operations="1", numbers=8, pipelines="0"),
        STUCK,
        ((SWITCH, "if (!summed(slot)) return drop(Drop::duplicate);", "return drop(Drop::duplicate);"),),
    ),
    "pipeline-root-kept-result": Mutant(
        Scope(leaves="1,1", operations="1", numbers=8, pipelines="root"),
        STUCK,
        ((SWITCH, "handled.outcome = Outcome::resend_result;\n    return handled;", "return drop(Drop::duplicate);"),),
    ),
    # A Tofino's pipeline.
    "tofino-bitmap-not-cleared": Mutant(
        TOFINO_PAIR, WRONG, ((TOFINO, "had = opens ? 0 : slot.workers;", "had = slot.workers;"),)
    ),
    "tofino-bitmap": Mutant(TOFINO_PAIR, WRONG, ((TOFINO, "if ((had & member) != 0) {", "if (false) {"),)),
    "tofino-stale": Mutant(TOFINO_PAIR, WRONG, ((TOFINO, "if (chunk < before) {", "if (false) {"),)),
    # The low bit of a round of the slots in place of the chunk number, as SwitchML.
    "tofino-version-bit": Mutant(
        Scope(operations="6", pipelines="root", chunk_bits=4),
        WRONG,
        (
            (TOFINO, "if (chunk < before) {", "if (false) {"),
            (
                TOFINO,
                "const bool present = chunk == before;",
                "const bool present = ((chunk ^ before) & config_.slots()) == 0;",
            ),
        ),
    ),
    # The difference of two chunks in place of their order: it overflows where a worker sends a chunk of half of the
    # numbers or above, and the slot opens but stays where it is.
    "tofino-difference": Mutant(
        Scope(workers=3, operations="3", network="merged", pipelines="root", chunk_bits=3, rogue=1),
        CHANGES,
        ((TOFINO, "if (chunk < before) {", "if (compared(static_cast<std::uint64_t>(chunk - before)) < 0) {"),),
    ),
    "tofino-adds-a-copy-to-a-kept-result": Mutant(
        TOFINO_PAIR, CHANGES, ((TOFINO, "if (!reads) sum = opens", "sum = opens"),)
    ),
    "tofino-no-kept-result": Mutant(
        TOFINO_PAIR,
        STUCK,
        ((TOFINO, TOFINO_KEPT, "handled.drop = Drop::duplicate;"),),
    ),
    "tofino-half-the-slots": Mutant(
        TOFINO_PAIR, STUCK, ((TOFINO, "& (config_.slots() - 1);", "& (config_.slots() / 2 - 1);"),)
    ),
    "tofino-opens-with-the-sum-so-far": Mutant(
        TOFINO_PAIR, WRONG, ((TOFINO, "sum = opens || from_parent ?", "sum = from_parent ?"),)
    ),
    "tofino-job": Mutant(
        Scope(operations="2", foreign_packets=1, pipelines="root", chunk_bits=3),
        WRONG,
        ((TOFINO, "if (header.job != config_.job) return Drop::foreign;", ""),),
    ),
    "tofino-epoch": Mutant(
        Scope(operations="2", restarts=1, pipelines="root", chunk_bits=3),
        WRONG,
        ((TOFINO, EPOCH.format("Drop::epoch"), ""),),
    ),
    "tofino-incarnation": Mutant(
        Scope(operations="2", restarts=1, pipelines="root", chunk_bits=3),
        WRONG,
        ((TOFINO, INCARNATION.format("Drop::incarnation"), ""),),
    ),
    "tofino-agreement": Mutant(
        Scope(operations="1,1", last="2", pipelines="root", chunk_bits=3),
        DISAGREED,
        ((TOFINO, "const bool differs = slot.call != call;", "const bool differs = false;"),),
    ),
    "tofino-silent-mismatch": Mutant(
        Scope(operations="1,1", last="2", pipelines="root", chunk_bits=3),
        STUCK,
        (
            (
                TOFINO,
                "  } else if (differs) {\n    handled.outcome = Outcome::mismatch;",
                "  } else if (differs) {\n    handled.drop = Drop::malformed;",
            ),
        ),
    ),
    # Workers get a Tofino leaf's own sum before the parent's result has come, or that of the slot's next chunk.
    "tofino-leaf-result": Mutant(
        Scope(leaves="1,1", operations="1", pipelines="0", chunk_bits=3),
        WRONG,
        ((TOFINO, "config_.parent && !had_result ? Outcome::resend_sum : Outcome", "Outcome"),),
    ),
    "tofino-leaf-complete": Mutant(
        Scope(leaves="1,1", operations="3", pipelines="0", chunk_bits=3),
        WRONG,
        ((TOFINO, "if (opens) slot.has_result = false;", ""),),
    ),
    "tofino-leaf-resent-sum": Mutant(
        Scope(leaves="1,1", operations="1", pipelines="0", chunk_bits=3),
        STUCK,
        (
            (
                TOFINO,
                TOFINO_KEPT,
                "if (had_result || !config_.parent) handled.outcome = Outcome::resend_result;"
                "else handled.drop = Drop::duplicate;",
            ),
        ),
    ),
    "tofino-leaf-epoch": Mutant(
        Scope(leaves="1,1", operations="1", restarts=1, pipelines="0", chunk_bits=3),
        WRONG,
        ((TOFINO, "if (header.epoch != config_.parent->epoch) return Drop::epoch;", ""),),
    ),
    # The worker exceeds its window, and the switch does not check it.
    "worker-window": Mutant(
        Scope(operations="4"),
        TWICE,
        (
            (
                WORKER,
                "} else if (lost_.head == kNone && next_ < end_ && next_ < base_ + config_.window && has_room()) {",
                "} else if (next_ < end_) {",
            ),
            (SWITCH, WINDOW, ""),
        ),
    ),
}


FOREIGN_HELLO = "if (hello.job != job || hello.incarnation != incarnation) return Drop::foreign;"
NOT_ITS_OWN = "a hello is accepted that is not its worker's own"

# Of search_validation: the text in ADDRESS_VALIDATION, its replacement, and the promise that breaks.
HELLOS = {
    "hello-nonce": ("if (hello.packet_number != nonce) return Drop::worker;", "", NOT_ITS_OWN),
    "hello-job": (FOREIGN_HELLO, "if (hello.incarnation != incarnation) return Drop::foreign;", NOT_ITS_OWN),
    "hello-incarnation": (FOREIGN_HELLO, "if (hello.job != job) return Drop::foreign;", NOT_ITS_OWN),
    "hello-source": ("if (!expected || !(*expected == source)) return Drop::source;", "", NOT_ITS_OWN),
    "hello-first": (
        "address = source;\n",
        "if (address) address = source;\n",
        "a worker's own hello gives it no address",
    ),
}


def search_validation(name: str, folder: Path) -> str:
    """Return the promise that the mutant of ADDRESS_VALIDATION breaks, or nothing."""
    text, instead, breaks = HELLOS[name]
    program = make(Mutant(Scope(), breaks, ((ADDRESS_VALIDATION, text, instead),)), folder)
    return load.run([program, "hellos"], SEARCH_S, check=True).stdout


def make(mutant: Mutant, folder: Path) -> Path:
    """Compile the mutant into `folder`; return the program."""
    texts: dict[str, str] = {}
    for source, text, instead in mutant.edits:
        folder_of = MODEL_CHECK if source == TOFINO else PROTOCOL
        before = texts.get(source) or (folder_of / source).read_text()
        texts[source] = change(before, text, instead, source)
    compiled = []
    for source, text in texts.items():
        (folder / source).parent.mkdir(parents=True, exist_ok=True)
        (folder / source).write_text(text)
        compiled.append(str(BUILT_FROM.get(source, folder / source)))
    libraries = [_library(name) for name in ("model_check", "protocol", "kernels")]
    program = folder / "model_check"
    # The linker takes the changed machines first, and not those of the libraries. Mutants without a changed header
    # share one object of main.cpp.
    main = str(MAIN) if any(source in BUILT_FROM for source in texts) else _main_object()
    command = [
        *COMPILE,
        f"-I{folder / 'include'}",
        *INCLUDES,
        f"-I{MODEL_CHECK}",
        main,
        *compiled,
        *libraries,
        "-o",
        str(program),
    ]
    load.run(command, COMPILE_S, check=True)
    return program


@functools.cache
def _main_object() -> str:
    made = Path(_object_folder.name) / "main.o"
    load.run([*COMPILE, *INCLUDES, "-c", MAIN, "-o", made], COMPILE_S, check=True)
    return str(made)


_object_folder = tempfile.TemporaryDirectory(prefix="netfold-mutants-")


def _library(component: str) -> str:
    found = sorted(ROOT.glob(f"core/build/*/native/libnetfold_{component}.a"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise FileNotFoundError(f"core/build/*/native has no libnetfold_{component}.a; `make build` makes it")
    return str(found[-1])


def search(mutant: Mutant, folder: Path) -> tuple[str, list[SimpleNamespace]]:
    """Return the promise that the mutant breaks, or nothing; and the records of the shortest trace."""
    scope = mutant.scope
    arguments: list[object] = [scope.workers, scope.leaves or "-", scope.window, scope.restarts, scope.foreign_packets]
    arguments += [int(scope.network == "merged"), scope.numbers, scope.timeouts]
    arguments += [scope.pipeline_bits, scope.chunk_bits, scope.outlives, scope.rogue]
    arguments += scope.operations.split(",")
    if scope.last:
        arguments += [0, *scope.last.split(",")]
    command = [str(make(mutant, folder)), *map(str, arguments)]
    out = load.run(command, SEARCH_S, check=True).stdout
    broken, records = "", []
    for kind, *fields in (line.split("\t") for line in out.splitlines()):
        if kind == "report":
            broken = fields[2]
        else:
            names = ("step", "source", "to", "what", "became", "state", "broken")
            records.append(SimpleNamespace(**dict(zip(names, fields, strict=True))))
    return broken, records


def show(name: str, broken: str, records: list[SimpleNamespace]) -> str:
    mutant = MUTANTS[name]
    drawn = diagram.text(draw(mutant.scope, records), mutant.scope.workers, len(mutant.scope.below))
    return f"{name}, {mutant.scope.operations} chunks, caught in {len(records)} steps: {broken}\n{drawn}\n"


def main(names: Iterable[str]) -> int:
    missed = 0
    for name in list(names) or [*MUTANTS, *HELLOS]:
        if name in HELLOS:
            with tempfile.TemporaryDirectory() as folder:
                broken = search_validation(name, Path(folder))
            print(f"{name}, caught: {broken}" if broken else f"{name}: NOT caught", flush=True)
            missed += not broken
            continue
        with tempfile.TemporaryDirectory() as folder:
            broken, records = search(MUTANTS[name], Path(folder))
        print(show(name, broken, records) if broken else f"{name}: NOT caught", flush=True)
        missed += not broken
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
