"""The rules for the record of a run. Pure: a record becomes a list of problems."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from schedule import KIND_OF, Schedule

# Of a quiet machine, in seconds: a lost switch, or path, ends in fallback.
FALLBACK_S = 5.0
# A rank that is killed is named by the others.
NAMED_S = 5.0
# A step between two faults; and what a fault may leave to repeat.
STEP_S = 2.0
# Beyond what there was before the first fault: a group keeps connections to use without a switch, made once.
MORE_DESCRIPTORS = 24
MORE_BYTES = 64 << 20


@dataclass(frozen=True)
class Step:
    """began_s, ended_s: since the faults' zero. wrong: elements of its sums that were not what they must be."""

    number: int
    began_s: float
    ended_s: float
    wrong: int


@dataclass(frozen=True)
class Failure:
    """An error that a rank raised. said_s: since the faults' zero."""

    kind: str
    text: str
    said_s: float


@dataclass
class RankRecord:
    """ended: it came to the job's end in order."""

    steps: list[Step] = field(default_factory=list)
    failure: Failure | None = None
    ended: bool = False


@dataclass(frozen=True)
class Usage:
    """Of a process, before the first fault and after the last one."""

    name: str
    descriptors: tuple[int, int]
    bytes: tuple[int, int]


@dataclass
class Record:
    """ranks: by rank. slowdown: by which bounds on time grow. applied: (begin, end) of each fault as it was.

    killed_s: when the rank that dies was killed. ended_alone: processes that ended though nobody ended them. admitted:
    peers with a wrong token, or secret, that were let in. log_errors: lines of logs that no daemon or rank may print.
    fallbacks, returns: how often a group went on without a switch that it lost, and back to one.
    """

    ranks: list[RankRecord]
    slowdown: float
    applied: list[tuple[float, float]]
    usage: list[Usage] = field(default_factory=list)
    killed_s: float | None = None
    ended_alone: list[str] = field(default_factory=list)
    admitted: int = 0
    log_errors: list[str] = field(default_factory=list)
    fallbacks: int = 0
    returns: int = 0


def problems(schedule: Schedule, record: Record) -> list[str]:
    """Return every violation that a run shows; none for a correct run."""
    return [
        *_wrong_sums(record),
        *_hangs(schedule, record),
        *_lost_steps(schedule, record),
        *_unnamed(schedule, record),
        *_grown(record),
        *(f"died: {name} ended by itself" for name in record.ended_alone),
        *([f"admitted: {record.admitted} peers with a wrong token or secret"] if record.admitted else []),
        *(f"log: {line}" for line in record.log_errors),
    ]


def _wrong_sums(record: Record) -> list[str]:
    return [
        f"wrong sum: rank {rank}, step {step.number}: {step.wrong} elements"
        for rank, log in enumerate(record.ranks)
        for step in log.steps
        if step.wrong
    ]


def limit_s(schedule: Schedule, record: Record, step: Step) -> float:
    """The longest that this step may have taken: what faults beside it explain, and one fallback for each."""
    longest = STEP_S * record.slowdown
    for fault, (began_s, ended_s) in zip(schedule.faults, record.applied, strict=True):
        halts = KIND_OF[fault.kind].halts
        # TCP repeats a lost segment at growing distances, at most as long again as the path was cut.
        over_s = ended_s + (ended_s - began_s) if halts else ended_s + FALLBACK_S * record.slowdown
        if step.began_s < over_s and began_s < step.ended_s:
            longest += FALLBACK_S * record.slowdown + (2 * (ended_s - began_s) if halts else 0)
    return longest


def _hangs(schedule: Schedule, record: Record) -> list[str]:
    found = []
    for rank, log in enumerate(record.ranks):
        for step in log.steps:
            took_s, most_s = step.ended_s - step.began_s, limit_s(schedule, record, step)
            if took_s > most_s:
                found.append(f"hang: rank {rank}, step {step.number} took {took_s:.1f} s, at most {most_s:.1f} s")
        if not log.ended and log.failure is None and rank != schedule.dies:
            last = f"step {log.steps[-1].number}" if log.steps else "no step"
            found.append(f"hang: rank {rank} did not end; its last was {last}")
    return found


def _lost_steps(schedule: Schedule, record: Record) -> list[str]:
    found = []
    for rank, log in enumerate(record.ranks):
        numbers = [step.number for step in log.steps]
        if numbers != list(range(len(numbers))):
            found.append(f"lost step: rank {rank} took steps {_gaps(numbers)} out of order")
        failure = log.failure
        if failure is not None and (record.killed_s is None or failure.said_s < record.killed_s):
            found.append(f"lost step: rank {rank} failed at {failure.said_s:.1f} s: {failure.kind}: {failure.text}")
    counts = [len(log.steps) for log in record.ranks]
    if schedule.dies is None and len(set(counts)) > 1 and all(log.ended for log in record.ranks):
        found.append(f"lost step: the ranks took {counts} steps")
    return found


def _gaps(numbers: Sequence[int]) -> list[int]:
    return [number for place, number in enumerate(numbers) if place != number][:5]


def _unnamed(schedule: Schedule, record: Record) -> list[str]:
    if schedule.dies is None or record.killed_s is None:
        return []
    found = []
    most_s = NAMED_S * record.slowdown
    for rank, log in enumerate(record.ranks):
        if rank == schedule.dies:
            continue
        if log.failure is None:
            found.append(f"unnamed: rank {rank} raised nothing when rank {schedule.dies} died")
            continue
        waited_s = log.failure.said_s - record.killed_s
        if waited_s > most_s:
            found.append(f"unnamed: rank {rank} learned of it after {waited_s:.1f} s, at most {most_s:.1f} s")
        if f"rank {schedule.dies}" not in log.failure.text:
            found.append(f"unnamed: rank {rank} says {log.failure.text!r}, and not rank {schedule.dies}")
    return found


def _grown(record: Record) -> list[str]:
    found = []
    for usage in record.usage:
        (before, after), (bytes_before, bytes_after) = usage.descriptors, usage.bytes
        if after > before + MORE_DESCRIPTORS:
            found.append(f"grown: {usage.name} has {after} descriptors, {before} before")
        if bytes_after > bytes_before + MORE_BYTES:
            found.append(f"grown: {usage.name} holds {bytes_after >> 20} MB, {bytes_before >> 20} MB before")
    return found
