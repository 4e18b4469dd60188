"""Find the ranks that delay a job, by comparing what all of its ranks are doing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from netfold.diagnostics.status_segment import Rank, Transfer

_STATES = {"T": "stopped", "t": "being debugged", "Z": "dead", "X": "dead", "D": "waiting for a disk"}


@dataclass(frozen=True)
class Verdict:
    """The diagnosis of one group."""

    job: str
    size: int
    lines: tuple[tuple[int, str], ...]  # rank, what it is doing
    findings: tuple[str, ...]
    at_fault: tuple[int, ...]  # ranks that delay the others, as far as this machine shows


def diagnose(ranks: Sequence[Rank], now_ns: int) -> list[Verdict]:
    """Make a verdict for each group. now_ns: CLOCK_MONOTONIC."""
    jobs = sorted({rank.job for rank in ranks})
    return [_verdict([rank for rank in ranks if rank.job == job], now_ns) for job in jobs]


def _verdict(ranks: list[Rank], now_ns: int) -> Verdict:
    size = ranks[0].size
    lines = tuple((rank.rank, doing(rank, now_ns)) for rank in ranks)
    findings, at_fault = [], []
    front = max(rank.sequence for rank in ranks)
    if front > 0:
        leaders = [rank for rank in ranks if rank.sequence == front]
        waited_s = (now_ns - min(rank.queued_ns for rank in leaders)) / 1e9
        for rank in ranks:
            if rank.sequence == front or rank.failure:
                continue
            at_fault.append(rank.rank)
            if rank.sequence:
                findings.append(
                    f"rank {rank.rank} is still in {rank.operation} #{rank.sequence}, while others have been in "
                    f"#{front} for {waited_s:.1f} s"
                )
            elif rank.done_sequence < front:
                findings.append(
                    f"rank {rank.rank} has not called {leaders[0].operation} #{front}, for which others have been "
                    f"waiting for {waited_s:.1f} s: it last finished #{rank.done_sequence}"
                )
            else:
                at_fault.pop()  # this rank has finished the operation that others are still in
        kinds = {(rank.operation, rank.bytes, rank.dtype, rank.reduce, rank.algorithm) for rank in leaders}
        if len(kinds) > 1:
            findings.append(
                f"at #{front} ranks called different things: "
                + "; ".join(f"rank {rank.rank} {_call(rank)}" for rank in leaders)
            )
    outside = {rank.rank for rank in ranks if not rank.sequence and rank.transfer is None and not rank.failure}
    for rank in ranks:
        if rank.transfer is not None and not rank.sequence:
            findings.append(f"rank {rank.rank} waits in {_transfer(rank.transfer, now_ns)}")
            if rank.transfer.peer in outside:
                at_fault.append(rank.transfer.peer)
                findings.append(f"rank {rank.transfer.peer} is in no operation meanwhile")
        if rank.process_state in _STATES:
            at_fault.append(rank.rank)
            findings.append(f"rank {rank.rank} (process {rank.pid}) is {_STATES[rank.process_state]}")
        if rank.failure:
            findings.append(f"rank {rank.rank} has failed: {rank.failure}")
    absent = sorted(set(range(size)) - {rank.rank for rank in ranks})
    if absent:
        findings.append(
            f"rank {', '.join(map(str, absent))} of {size}: no process of this machine; look on the other hosts, or it "
            "has died"
        )
        awaited = {peer for rank in ranks for peer in rank.awaited}
        at_fault += [rank for rank in absent if rank in awaited]
    if not findings:
        findings.append("nothing keeps it" if front == 0 else f"all ranks are in #{front}")
    return Verdict(ranks[0].job, size, lines, tuple(findings), tuple(sorted(set(at_fault))))


def _call(rank: Rank) -> str:
    return f"{rank.operation} of {rank.bytes} bytes {rank.dtype} ({rank.reduce}) by {rank.algorithm}"


def _transfer(transfer: Transfer, now_ns: int) -> str:
    peer = "any rank" if transfer.peer < 0 else f"rank {transfer.peer}"
    return (
        f"a {transfer.kind} of {transfer.bytes} bytes {'to' if transfer.kind == 'send' else 'from'} {peer} with tag "
        f"{transfer.tag}{_at(transfer.site)} for {(now_ns - transfer.since_ns) / 1e9:.1f} s"
    )


def _at(site: str) -> str:
    return f" (called at {site})" if site else ""


def doing(rank: Rank, now_ns: int) -> str:
    """Describe what a rank is doing; the text has no subject."""
    return _operation(rank, now_ns) + ("; its switch is lost" if rank.without_switch else "")


def _operation(rank: Rank, now_ns: int) -> str:
    if rank.sequence == 0:
        if rank.transfer is not None:
            return f"in {_transfer(rank.transfer, now_ns)}"
        if rank.done_sequence == 0:
            return f"no operation yet; joined {(now_ns - rank.joined_ns) / 1e9:.1f} s ago"
        ago_s = (now_ns - rank.done_ns) / 1e9
        return f"outside; finished {rank.done_operation} #{rank.done_sequence}{_at(rank.done_site)} {ago_s:.1f} s ago"
    text = f"in {_call(rank)} #{rank.sequence}{_at(rank.site)} for {(now_ns - rank.queued_ns) / 1e9:.1f} s"
    if rank.awaited:
        text += f"; waits for rank {', '.join(map(str, rank.awaited))}"
    if rank.transfer is not None:
        text += f"; also in {_transfer(rank.transfer, now_ns)}"
    if rank.waiting > 1:
        text += f"; {rank.waiting - 1} more queued"
    return text
