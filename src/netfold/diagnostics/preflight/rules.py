"""Findings from facts: a pure function, so that each can be tried with facts that are made up."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

from netfold.diagnostics.preflight.facts import Facts
from netfold.diagnostics.preflight.gather import PreflightFacts
from netfold.diagnostics.preflight.links import PairLink
from netfold.diagnostics.preflight.wording import by_host, listed, rate_of, size
from netfold.switch_protocol.data_path import ReceiveBuffer

# Shared memory that a host's ranks take: slots and bells, and DDP's buckets, which may move there.
_SHM_A_RANK = 64 << 20
_DISK_LEAST = 1 << 30
_MEMORY_A_RANK = 1 << 30
# A rank's own files, beside a handful a connection to each other rank.
_FILES, _FILES_A_RANK = 256, 6
_SLOW = 0.6
# Of an interface's own speed: what a link should have at least; one stream of TCP does not fill faster interfaces.
_OF_SPEED, _MOST_MBIT = 0.5, 10_000
# Ethernet that has fallen back, by a bad cable or port: nothing slower than a gigabit was sold for long.
_FALLEN_MBIT = 100
_LATE, _LATE_LEAST_S = 4.0, 200e-6
_CLOCK_S = 1.0
_SWITCH_LEAST_BYTES = 1 << 20


# Of the way from one rank to another: bytes a second, sender, receiver.
_Way: TypeAlias = "tuple[float, int, int]"


class Level(Enum):
    FAIL = "fails"
    WARN = "warns"
    NOTE = "notes"


@dataclass(frozen=True)
class Finding:
    """Something that is not as it should be."""

    level: Level
    """FAIL: the job will not run. WARN: it will, worse. NOTE: nothing is wrong, and this is worth knowing."""
    where: str
    what: str
    remedy: str


def apply_rules(gathered: PreflightFacts) -> list[Finding]:
    """What fails first, then what warns; empty where all is well."""
    found = [
        finding
        for rule in (
            _versions,
            _environment,
            _interfaces,
            _speeds,
            _memory,
            _shared,
            _limits,
            _cores,
            _fabrics,
            _switches,
            _capacities,
        )
        for finding in rule(gathered)
    ]
    found += [*_links(gathered), *_clocks(gathered)]
    return sorted(found, key=lambda finding: finding.level is not Level.FAIL)


def _versions(gathered: PreflightFacts) -> Iterator[Finding]:
    for name in gathered.facts[0].versions:
        told = _differ(gathered.facts, [facts.versions.get(name, "absent") for facts in gathered.facts])
        if told:
            # Another netfold speaks another protocol; other packages may or may not matter.
            level = Level.FAIL if name in ("netfold", "torch") else Level.WARN
            yield Finding(level, "all ranks", f"{name} is not the same: {told}", "install the same version everywhere")
    kernels = _differ(gathered.facts, [facts.kernel for facts in gathered.facts])
    if kernels:
        yield Finding(Level.WARN, "all ranks", f"kernels differ: {kernels}", "expect hosts of different speed")
    told = _differ(gathered.facts, [facts.congestion for facts in gathered.facts])
    if told:
        remedy = "set net.ipv4.tcp_congestion_control alike: flows of different kinds do not share a link fairly"
        yield Finding(Level.WARN, "all ranks", f"TCP's congestion control is not the same: {told}", remedy)


# What may differ, since it says which host, or whose way up, this is.
_OF_THE_HOST = ("NETFOLD_INTERFACE", "NETFOLD_SWITCH", "NETFOLD_LOG", "NETFOLD_PORTS", "NETFOLD_PROFILE")


def _environment(gathered: PreflightFacts) -> Iterator[Finding]:
    for name in sorted({name for facts in gathered.facts for name in facts.environment} - {*_OF_THE_HOST}):
        told = _differ(gathered.facts, [facts.environment.get(name, "unset") for facts in gathered.facts])
        if told:
            yield Finding(Level.WARN, "all ranks", f"{name} is not the same: {told}", "set it alike on every host")


def _interfaces(gathered: PreflightFacts) -> Iterator[Finding]:
    for facts in gathered.facts:
        if facts.interface_error:
            see = "see docs/reference/environment.md, NETFOLD_INTERFACE"
            yield Finding(Level.FAIL, _who(facts), facts.interface_error, see)
    hosts = _hosts(gathered.facts)
    if len(hosts) > 1:
        told = _differ(hosts, [str(facts.mtu) for facts in hosts])
        if told:
            remedy = "set one MTU on all interfaces of this network: packets that do not fit are lost without a word"
            yield Finding(Level.WARN, "all hosts", f"the MTU of the first interface is not the same: {told}", remedy)


def _speeds(gathered: PreflightFacts) -> Iterator[Finding]:
    hosts = [facts for facts in _hosts(gathered.facts) if facts.speed_mbit > 0]
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
            yield Finding(Level.WARN, facts.host, what, "end what else runs there, or start fewer ranks")
        if facts.disk_free_bytes < _DISK_LEAST:
            what = f"{size(facts.disk_free_bytes)} are free in {facts.disk}"
            yield Finding(Level.WARN, facts.host, what, "make room: a checkpoint that does not fit is not written")


def _shared(gathered: PreflightFacts) -> Iterator[Finding]:
    for facts, ranks in by_host(gathered.facts):
        if len(ranks) < 2:
            continue
        needed = _SHM_A_RANK * len(ranks)
        if facts.shm_free_bytes < needed:
            there = "there is no /dev/shm" if facts.shm_free_bytes < 0 else f"{size(facts.shm_free_bytes)} are free"
            remedy = f"give it {size(needed)} (in a container: --shm-size), or ranks of this host talk by TCP"
            yield Finding(Level.WARN, facts.host, f"/dev/shm: {there} for {len(ranks)} ranks", remedy)
        if len({gathered.nodes[rank] for rank in ranks}) > 1:
            what = f"ranks {listed(ranks)} are on one machine and do not share memory"
            remedy = "let them have one IPC and network namespace (containers: --ipc=host), or add ,memory to"
            remedy += " NETFOLD_TRANSPORT if it is set"
            yield Finding(Level.WARN, facts.host, what, remedy)


def _limits(gathered: PreflightFacts) -> Iterator[Finding]:
    needed = _FILES + _FILES_A_RANK * len(gathered.facts)
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
    for error in sorted({facts.fabric_error for facts in gathered.facts if facts.fabric_error}):
        ranks = [facts.rank for facts in gathered.facts if facts.fabric_error == error]
        remedy = "name one that netfold doctor fabric lists, or unset NETFOLD_TRANSPORT"
        yield Finding(Level.FAIL, f"rank {listed(ranks)}", error, remedy)


def _switches(gathered: PreflightFacts) -> Iterator[Finding]:
    for endpoint in sorted({room.endpoint for facts in gathered.facts for room in facts.switches}):
        rooms = {facts.rank: room for facts in gathered.facts for room in facts.switches if room.endpoint == endpoint}
        for error in sorted({room.error for room in rooms.values() if room.error}):
            ranks = [rank for rank, room in rooms.items() if room.error == error]
            remedy = "start it, or unset NETFOLD_SWITCH to use host algorithms"
            yield Finding(Level.FAIL, f"rank {listed(ranks)}", error, remedy)
        for error in sorted({room.udp_error for room in rooms.values() if room.udp_error}):
            ranks = [rank for rank, room in rooms.items() if room.udp_error == error]
            remedy = "let UDP pass both ways between these hosts and the switch, or unset NETFOLD_SWITCH to use host"
            yield Finding(Level.FAIL, f"rank {listed(ranks)}", error, f"{remedy} algorithms")
        answered = [room for room in rooms.values() if not room.error]
        if not answered:
            continue
        room, workers = answered[0], len({gathered.nodes[rank] for rank in rooms})
        if room.jobs < 1 or room.workers < workers or room.memory_bytes < _SWITCH_LEAST_BYTES:
            what = (
                f"the switch at {endpoint} is full: room for {max(0, room.jobs)} jobs, {max(0, room.workers)} workers "
                f"and {size(room.memory_bytes)}"
            )
            remedy = "wait for a job to end (netfold switch status), or start it with more (--max-jobs, --memory)"
            yield Finding(Level.FAIL, f"switch {endpoint}", what, remedy)
        what, _, remedy = ReceiveBuffer(room.buffer_bytes, room.window_bytes).window_shortfall(workers).partition(": ")
        if what:
            yield Finding(Level.WARN, f"switch {endpoint}", what, remedy)
        named = max([sum(each.endpoint == endpoint for each in facts.switches) for facts in gathered.facts])
        if named < room.threads:
            what = f"has {room.threads} threads, and a group of this job uses {named}"
            times = "twice" if room.threads == 2 else f"{room.threads} times"
            remedy = f"name it {times} in NETFOLD_SWITCH, where its core and not its link is the limit"
            yield Finding(Level.NOTE, f"switch {endpoint}", what, remedy)


def _capacities(gathered: PreflightFacts) -> Iterator[Finding]:
    for each in gathered.capacities:
        if each.error:
            what = f"what it takes could not be measured: {each.error}"
            yield Finding(Level.WARN, f"switch {each.endpoint}", what, "see its log, and that of rank 0")


def _links(gathered: PreflightFacts) -> Iterator[Finding]:
    """A pair that is far from the others, or from what its interfaces carry."""
    boot = {facts.rank: facts.boot for facts in gathered.facts}
    # What ranks of one machine reach over its loopback depends on its cores.
    links = [link for link in gathered.links if boot[link.one] != boot[link.other]]
    ways = [
        way
        for link in links
        for way in (
            (link.forward_bytes_per_s, link.one, link.other),
            (link.reverse_bytes_per_s, link.other, link.one),
        )
    ]
    # With one pair there is nothing to compare it with.
    usual = statistics.median(rate for rate, *_ in ways) if len(links) > 2 else 0.0
    slow = [way for way in ways if way[0] < _SLOW * usual]
    if usual:
        yield from _slower_than_others(gathered, links, slow, usual)
        yield from _farther_than_others(gathered, links)
    yield from _slower_than_interfaces(gathered, [way for way in ways if way not in slow])


def _slower_than_interfaces(gathered: PreflightFacts, ways: Sequence[_Way]) -> Iterator[Finding]:
    speed = {facts.rank: facts.speed_mbit for facts in gathered.facts}
    host = {facts.rank: facts.host for facts in gathered.facts}
    # Both ends' speed where both say one; a link's slower end bounds it.
    bounds = [
        (rate, sender, receiver, min(speed[sender], speed[receiver], _MOST_MBIT) * 1e6 / 8)
        for rate, sender, receiver in ways
    ]
    slow = [way for way in bounds if way[0] < _OF_SPEED * way[3]]
    remedy = "check cables, ports and what both ends negotiate, and what else uses the way between them"
    if len(slow) > 2 and len(slow) == len(ways):
        usual = rate_of(statistics.median(rate for rate, *_ in slow))
        what = f"{len(slow)} of {len(ways)} ways run at half of their interfaces' speed or less, usually at {usual}"
        yield Finding(Level.WARN, "all hosts", what, remedy)
        return
    for rate, sender, receiver, bound in slow:
        what = f"{rate_of(rate)}; the interfaces at its ends run at {rate_of(bound)}"
        if bound < min(speed[sender], speed[receiver]) * 1e6 / 8:
            what = f"{rate_of(rate)}; the interfaces at its ends run at {rate_of(bound)} and more"
        where = f"rank {sender} ({host[sender]}) -> rank {receiver} ({host[receiver]})"
        yield Finding(Level.WARN, where, what, remedy)


def _slower_than_others(
    gathered: PreflightFacts, links: Sequence[PairLink], slow: Sequence[_Way], usual: float
) -> Iterator[Finding]:
    host = {facts.rank: facts.host for facts in gathered.facts}
    blamed = _in_common([(sender, receiver) for _, sender, receiver in slow], links)
    for rank in blamed:
        mine = sorted(rate for rate, *pair in slow if rank in pair)
        ways = {"sends" if pair[0] == rank else "receives" for _, *pair in slow if rank in pair}
        rates = f"{rate_of(statistics.median(mine))}; others at {rate_of(usual)}"
        what = f"{' and '.join(sorted(ways, reverse=True))} at {rates}"
        yield Finding(Level.WARN, f"rank {rank} ({host[rank]})", what, "check its cable, port and what else it sends")
    for rate, sender, receiver in slow:
        if sender not in blamed and receiver not in blamed:
            what = f"{rate_of(rate)}; others have {rate_of(usual)}"
            where = f"rank {sender} ({host[sender]}) -> rank {receiver} ({host[receiver]})"
            yield Finding(Level.WARN, where, what, "check the way between these two")


def _farther_than_others(gathered: PreflightFacts, links: Sequence[PairLink]) -> Iterator[Finding]:
    host = {facts.rank: facts.host for facts in gathered.facts}
    latency = statistics.median(link.latency_s for link in links)
    for link in links:
        if link.latency_s > max(_LATE * latency, latency + _LATE_LEAST_S):
            where = f"rank {link.one} ({host[link.one]}) - rank {link.other} ({host[link.other]})"
            what = f"{link.latency_s * 1e6:.0f} us one way; others have {latency * 1e6:.0f}"
            yield Finding(Level.WARN, where, what, "is there another switch or a detour between them?")


def _in_common(slow: Sequence[tuple[int, int]], links: Sequence[PairLink]) -> list[int]:
    """Ranks all of whose links are slow, one way or both: it is the rank, and not each of its links."""
    found = []
    for rank in sorted({rank for link in links for rank in (link.one, link.other)}):
        peers = {link.other if link.one == rank else link.one for link in links if rank in (link.one, link.other)}
        if len(peers) > 1 and all((rank, peer) in slow or (peer, rank) in slow for peer in peers):
            found.append(rank)
    # Where all are blamed, no one is.
    return found if len(found) < len({rank for link in links for rank in (link.one, link.other)}) else []


def _clocks(gathered: PreflightFacts) -> Iterator[Finding]:
    host = {facts.rank: facts.host for facts in gathered.facts}
    for link in gathered.links:
        # Against the first host alone: one wrong clock is one finding.
        if link.one == gathered.links[0].one and abs(link.clock_s) > _CLOCK_S + link.latency_s:
            what = f"its clock is {link.clock_s:+.1f} s from that of rank {link.one} ({host[link.one]})"
            remedy = "set it (chrony, systemd-timesyncd): logs and certificates go by it, profiles do not"
            yield Finding(Level.WARN, f"rank {link.other} ({host[link.other]})", what, remedy)


def _differ(facts: Sequence[Facts], values: Sequence[str]) -> str:
    """ "1.0 on rank 0, 2; 1.1 on rank 1", empty where all are alike."""
    by_value: dict[str, list[int]] = {}
    for each, value in zip(facts, values, strict=True):
        by_value.setdefault(value, []).append(each.rank)
    if len(by_value) < 2:
        return ""
    return "; ".join(f"{told} on rank {listed(ranks)}" for told, ranks in by_value.items())


def _hosts(facts: Sequence[Facts]) -> list[Facts]:
    return [each for each, _ in by_host(facts)]


def _who(facts: Facts) -> str:
    return f"rank {facts.rank} ({facts.host})"
