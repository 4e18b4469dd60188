"""Derive findings from facts: pure functions, which tests call with made-up facts."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

from netfold.diagnostics.preflight.facts import Facts
from netfold.diagnostics.preflight.gather import PreflightFacts
from netfold.diagnostics.preflight.links import PairLink
from netfold.diagnostics.preflight.wording import by_host, listed, rate_of, size
from netfold.options import unknown_variables
from netfold.switch_protocol.data_path import ReceiveBuffer
from netfold.switch_protocol.open_files import files_needed

# Shared memory of each rank: slots and doorbells, and DDP's buckets, which may move there.
_SHM_A_RANK = 64 << 20
_DISK_LEAST = 1 << 30
_MEMORY_A_RANK = 1 << 30
# A link is slow below this part of the median rate.
_SLOW = 0.6
# A link is slow below this part of its interfaces' speed, up to a limit that one TCP stream can reach.
_OF_SPEED, _MOST_MBIT = 0.5, 10_000
# An Ethernet interface at this speed or less has probably fallen back, because of a bad cable or port.
_FALLEN_MBIT = 100
# A link is far if its latency exceeds this multiple of the median, and the median by this many seconds.
_LATE, _LATE_LEAST_S = 4.0, 200e-6
_CLOCK_S = 1.0
_SWITCH_LEAST_BYTES = 1 << 20


# One direction of a link: bytes per second, sender, receiver.
_Direction: TypeAlias = "tuple[float, int, int]"


class Level(Enum):
    FAIL = "fails"
    WARN = "warns"
    NOTE = "notes"


@dataclass(frozen=True)
class Finding:
    """One result of the check."""

    level: Level
    """FAIL: the job will not run. WARN: it will run, but worse. NOTE: information; nothing is wrong."""
    where: str
    what: str
    remedy: str


def apply_rules(gathered: PreflightFacts) -> list[Finding]:
    """Apply all rules. Failures come first, then warnings; empty if nothing is wrong."""
    rules = (
        _versions, _environment, _interfaces, _speeds, _memory, _shared, _limits, _cores, _fabrics, _switches,
        _capacities, _links, _clocks,
    )  # fmt: skip
    findings = [finding for rule in rules for finding in rule(gathered)]
    return sorted(findings, key=lambda finding: finding.level is not Level.FAIL)


def _versions(gathered: PreflightFacts) -> Iterator[Finding]:
    for name in gathered.facts[0].versions:
        versions = {facts.rank: facts.versions.get(name, "absent") for facts in gathered.facts}
        # Two versions of netfold have different protocols; differences of other packages may be harmless.
        level = Level.FAIL if name in ("netfold", "torch") else Level.WARN
        yield from _alike(versions, f"{name} is not the same", "install the same version everywhere", level)
    kernels = {facts.rank: facts.kernel for facts in gathered.facts}
    yield from _alike(kernels, "kernels differ", "expect hosts of different speed")
    congestion = {facts.rank: facts.congestion for facts in gathered.facts}
    remedy = "set net.ipv4.tcp_congestion_control alike: flows of different kinds do not share a link fairly"
    yield from _alike(congestion, "TCP's congestion control is not the same", remedy)


# Variables that may differ between hosts.
_OF_THE_HOST = ("NETFOLD_INTERFACE", "NETFOLD_SWITCH", "NETFOLD_LOG", "NETFOLD_PORTS", "NETFOLD_PROFILE")


def _environment(gathered: PreflightFacts) -> Iterator[Finding]:
    for name, near in unknown_variables({name: "" for facts in gathered.facts for name in facts.environment}).items():
        remedy = f"did you mean {near}?" if near else "unset it; docs/reference/environment.md lists all variables"
        yield Finding(Level.WARN, "all ranks", f"{name} is set, and netfold knows no such setting", remedy)
    for name in sorted({name for facts in gathered.facts for name in facts.environment} - {*_OF_THE_HOST}):
        values = {facts.rank: facts.environment.get(name, "unset") for facts in gathered.facts}
        yield from _alike(values, f"{name} is not the same", "set it alike on every host")


def _interfaces(gathered: PreflightFacts) -> Iterator[Finding]:
    for facts in gathered.facts:
        if facts.interface_error:
            remedy = "set NETFOLD_INTERFACE to an interface of this host, by name or address"
            yield Finding(Level.FAIL, _who(facts), facts.interface_error, remedy)
    mtus = {facts.rank: str(facts.mtu) for facts, _ in by_host(gathered.facts)}
    remedy = "set one MTU on all interfaces of this network: packets that do not fit are lost without an error"
    yield from _alike(mtus, "the MTU of the first interface is not the same", remedy, where="all hosts")


def _speeds(gathered: PreflightFacts) -> Iterator[Finding]:
    hosts = [facts for facts, _ in by_host(gathered.facts) if facts.speed_mbit > 0]
    fastest = max((facts.speed_mbit for facts in hosts), default=0)
    for facts in hosts:
        if facts.speed_mbit <= _FALLEN_MBIT:
            others = f"; others at {fastest} Mbit/s" if fastest > facts.speed_mbit else ""
            what = f"{facts.interfaces[0]}: it runs at {facts.speed_mbit} Mbit/s{others}"
            yield Finding(Level.WARN, _who(facts), what, "check its cable and port, and what both ends negotiate")


def _memory(gathered: PreflightFacts) -> Iterator[Finding]:
    for facts, ranks in by_host(gathered.facts):
        if facts.memory_free_bytes < _MEMORY_A_RANK * len(ranks):
            what = f"{size(facts.memory_free_bytes)} of memory are free for {len(ranks)} ranks"
            yield Finding(Level.WARN, facts.host, what, "end other processes there, or start fewer ranks")
        if facts.disk_free_bytes < _DISK_LEAST:
            what = f"{size(facts.disk_free_bytes)} are free in {facts.disk}"
            yield Finding(
                Level.WARN, facts.host, what, "free disk space: a checkpoint that does not fit is not written"
            )


def _shared(gathered: PreflightFacts) -> Iterator[Finding]:
    for facts, ranks in by_host(gathered.facts):
        if len(ranks) < 2:
            continue
        needed = _SHM_A_RANK * len(ranks)
        if facts.shm_free_bytes < needed:
            free = "there is no /dev/shm" if facts.shm_free_bytes < 0 else f"{size(facts.shm_free_bytes)} are free"
            remedy = f"give it {size(needed)} (in a container: --shm-size), or ranks of this host communicate by TCP"
            yield Finding(Level.WARN, facts.host, f"/dev/shm: {free} for {len(ranks)} ranks", remedy)
        if len({gathered.nodes[rank] for rank in ranks}) > 1:
            what = f"ranks {listed(ranks)} are on one machine and do not share memory"
            remedy = "let them have one IPC and network namespace (containers: --ipc=host), or add ,memory to"
            remedy += " NETFOLD_TRANSPORT if it is set"
            yield Finding(Level.WARN, facts.host, what, remedy)


def _limits(gathered: PreflightFacts) -> Iterator[Finding]:
    needed = files_needed(len(gathered.facts))
    for facts in gathered.facts:
        if 0 <= facts.open_files_limit < needed:
            what = f"{facts.open_files_limit} files may be open; {len(gathered.facts)} ranks take about {needed}"
            yield Finding(Level.FAIL, _who(facts), what, f"ulimit -n {max(4096, needed)}")


def _cores(gathered: PreflightFacts) -> Iterator[Finding]:
    for facts, ranks in by_host(gathered.facts):
        if len(ranks) > facts.cores:
            what = f"{len(ranks)} ranks on {facts.cores} cores"
            yield Finding(Level.WARN, facts.host, what, "they wait for each other's cores: start fewer a host")


def _fabrics(gathered: PreflightFacts) -> Iterator[Finding]:
    remedy = "name one that netfold doctor fabric lists, or unset NETFOLD_TRANSPORT"
    yield from _errors({facts.rank: facts.fabric_error for facts in gathered.facts}, remedy)


def _switches(gathered: PreflightFacts) -> Iterator[Finding]:
    for endpoint in sorted({quota.endpoint for facts in gathered.facts for quota in facts.switches}):
        quotas = {
            facts.rank: quota for facts in gathered.facts for quota in facts.switches if quota.endpoint == endpoint
        }
        for remedy in sorted({quota.remedy for quota in quotas.values()}):
            errors = {rank: quota.error for rank, quota in quotas.items() if quota.remedy == remedy}
            yield from _errors(errors, remedy or "see the log of the switch")
        remedy = "let UDP pass both ways between these hosts and the switch, or unset NETFOLD_SWITCH to use host"
        remedy += " algorithms"
        yield from _errors({rank: quota.udp_error for rank, quota in quotas.items()}, remedy)
        known = [quota for quota in quotas.values() if not quota.error]
        if not known:
            continue
        quota, workers = known[0], len({gathered.nodes[rank] for rank in quotas})
        if quota.jobs < 1 or quota.workers < workers or quota.memory_bytes < _SWITCH_LEAST_BYTES:
            what = (
                f"the switch at {endpoint} is full: room for {max(0, quota.jobs)} jobs, {max(0, quota.workers)} "
                f"workers and {size(quota.memory_bytes)}"
            )
            remedy = "wait for a job to end (netfold switch status), or start it with more (--max-jobs, --memory)"
            yield Finding(Level.FAIL, f"switch {endpoint}", what, remedy)
        shortfall = ReceiveBuffer(quota.buffer_bytes, quota.window_bytes).window_shortfall(workers)
        what, _, remedy = shortfall.partition(": ")
        if what:
            yield Finding(Level.WARN, f"switch {endpoint}", what, remedy)
        named = max([sum(each.endpoint == endpoint for each in facts.switches) for facts in gathered.facts])
        if named < quota.threads:
            what = f"has {quota.threads} threads, and a group of this job uses {named}"
            times = "twice" if quota.threads == 2 else f"{quota.threads} times"
            remedy = f"name it {times} in NETFOLD_SWITCH, where its core and not its link is the limit"
            yield Finding(Level.NOTE, f"switch {endpoint}", what, remedy)


def _capacities(gathered: PreflightFacts) -> Iterator[Finding]:
    for each in gathered.capacities:
        if each.error:
            what = f"its capacity could not be measured: {each.error}"
            yield Finding(Level.WARN, f"switch {each.endpoint}", what, "see its log, and that of rank 0")


def _links(gathered: PreflightFacts) -> Iterator[Finding]:
    """Find links that are slower than the others, or than their interfaces."""
    # Skip links over the loopback: their rate depends on the machine's cores.
    links = [link for link in gathered.links if gathered.facts[link.one].boot != gathered.facts[link.other].boot]
    directions = [
        direction
        for link in links
        for direction in (
            (link.forward_bytes_per_s, link.one, link.other),
            (link.reverse_bytes_per_s, link.other, link.one),
        )
    ]
    # Too few links have no meaningful median.
    usual = statistics.median(rate for rate, *_ in directions) if len(links) > 2 else 0.0
    slow = [direction for direction in directions if direction[0] < _SLOW * usual]
    if usual:
        yield from _slower_than_others(gathered, links, slow, usual)
        yield from _farther_than_others(gathered, links)
    yield from _slower_than_interfaces(gathered, [direction for direction in directions if direction not in slow])


def _slower_than_interfaces(gathered: PreflightFacts, directions: Sequence[_Direction]) -> Iterator[Finding]:
    speed = [facts.speed_mbit for facts in gathered.facts]
    # The slower end bounds a link. The bound is 0 if the speed of an end is unknown.
    bounds = [
        (rate, sender, receiver, min(speed[sender], speed[receiver], _MOST_MBIT) * 1e6 / 8)
        for rate, sender, receiver in directions
    ]
    slow = [each for each in bounds if each[0] < _OF_SPEED * each[3]]
    remedy = "check cables, ports and what both ends negotiate, and other traffic on the path between them"
    if len(slow) > 2 and len(slow) == len(directions):
        usual = rate_of(statistics.median(rate for rate, *_ in slow))
        what = (
            f"{len(slow)} of {len(directions)} ways run at half of their interfaces' speed or less, usually at {usual}"
        )
        yield Finding(Level.WARN, "all hosts", what, remedy)
        return
    for rate, sender, receiver, bound in slow:
        what = f"{rate_of(rate)}; the interfaces at its ends run at {rate_of(bound)}"
        if bound < min(speed[sender], speed[receiver]) * 1e6 / 8:
            what = f"{rate_of(rate)}; the interfaces at its ends run at {rate_of(bound)} and more"
        where = f"{_who(gathered.facts[sender])} -> {_who(gathered.facts[receiver])}"
        yield Finding(Level.WARN, where, what, remedy)


def _slower_than_others(
    gathered: PreflightFacts, links: Sequence[PairLink], slow: Sequence[_Direction], usual: float
) -> Iterator[Finding]:
    slow_ranks = _ranks_with_slow_links_only([(sender, receiver) for _, sender, receiver in slow], links)
    for rank in slow_ranks:
        own = sorted(rate for rate, *pair in slow if rank in pair)
        verbs = {"sends" if pair[0] == rank else "receives" for _, *pair in slow if rank in pair}
        rates = f"{rate_of(statistics.median(own))}; others at {rate_of(usual)}"
        what = f"{' and '.join(sorted(verbs, reverse=True))} at {rates}"
        yield Finding(Level.WARN, _who(gathered.facts[rank]), what, "check its cable, port and other traffic")
    for rate, sender, receiver in slow:
        if sender not in slow_ranks and receiver not in slow_ranks:
            what = f"{rate_of(rate)}; others have {rate_of(usual)}"
            where = f"{_who(gathered.facts[sender])} -> {_who(gathered.facts[receiver])}"
            yield Finding(Level.WARN, where, what, "check the path between these two")


def _farther_than_others(gathered: PreflightFacts, links: Sequence[PairLink]) -> Iterator[Finding]:
    latency = statistics.median(link.latency_s for link in links)
    for link in links:
        if link.latency_s > max(_LATE * latency, latency + _LATE_LEAST_S):
            where = f"{_who(gathered.facts[link.one])} - {_who(gathered.facts[link.other])}"
            what = f"{link.latency_s * 1e6:.0f} us one way; others have {latency * 1e6:.0f}"
            yield Finding(Level.WARN, where, what, "is there another switch or a detour between them?")


def _ranks_with_slow_links_only(slow: Sequence[tuple[int, int]], links: Sequence[PairLink]) -> list[int]:
    """Ranks whose links are all slow, in one direction or both: the cause is the rank, not each of its links."""
    all_ranks = sorted({rank for link in links for rank in (link.one, link.other)})
    slow_ranks = []
    for rank in all_ranks:
        peers = {link.other if link.one == rank else link.one for link in links if rank in (link.one, link.other)}
        if len(peers) > 1 and all((rank, peer) in slow or (peer, rank) in slow for peer in peers):
            slow_ranks.append(rank)
    # If this holds for all ranks, it names no cause.
    return slow_ranks if len(slow_ranks) < len(all_ranks) else []


def _clocks(gathered: PreflightFacts) -> Iterator[Finding]:
    for link in gathered.links:
        # Compare with the first host only, so that one wrong clock is one finding.
        if link.one == gathered.links[0].one and abs(link.clock_s) > _CLOCK_S + link.latency_s:
            what = f"its clock is {link.clock_s:+.1f} s from that of {_who(gathered.facts[link.one])}"
            remedy = "set it (chrony, systemd-timesyncd): logs and certificates depend on it, profiles do not"
            yield Finding(Level.WARN, _who(gathered.facts[link.other]), what, remedy)


def _alike(
    values: Mapping[int, str], what: str, remedy: str, level: Level = Level.WARN, *, where: str = "all ranks"
) -> Iterator[Finding]:
    """Find values that differ between ranks: "1.0 on rank 0, 2; 1.1 on rank 1"."""
    by_value = _ranks_by_value(values)
    if len(by_value) > 1:
        differences = "; ".join(f"{value} on rank {listed(ranks)}" for value, ranks in by_value.items())
        yield Finding(level, where, f"{what}: {differences}", remedy)


def _errors(errors: Mapping[int, str], remedy: str) -> Iterator[Finding]:
    """Each error once, with its ranks. An empty text is no error."""
    for error, ranks in sorted(_ranks_by_value(errors).items()):
        if error:
            yield Finding(Level.FAIL, f"rank {listed(ranks)}", error, remedy)


def _ranks_by_value(values: Mapping[int, str]) -> dict[str, list[int]]:
    """values: by rank."""
    by_value: dict[str, list[int]] = {}
    for rank, value in values.items():
        by_value.setdefault(value, []).append(rank)
    return by_value


def _who(facts: Facts) -> str:
    return f"rank {facts.rank} ({facts.host})"
