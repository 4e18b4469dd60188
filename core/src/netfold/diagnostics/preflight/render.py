"""Print the report of the check as tables."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from netfold.diagnostics.preflight.gather import PreflightFacts
from netfold.diagnostics.preflight.rules import Finding, Level
from netfold.diagnostics.preflight.wording import by_host, listed, rate_of, size

_COLOURS = {Level.FAIL: "red", Level.WARN: "yellow", Level.NOTE: "green"}


def failed(findings: Sequence[Finding]) -> bool:
    return any(finding.level is Level.FAIL for finding in findings)


def print_report(console: Console, gathered: PreflightFacts, findings: Sequence[Finding]) -> None:
    """Print the hosts, their links, the switches, then the findings and remedies."""
    hosts = Table("host", "ranks", "cores", "memory free", "/dev/shm free", "disk free", "interfaces", box=None)
    for facts, ranks in by_host(gathered.facts):
        shm = "-" if facts.shm_free_bytes < 0 else size(facts.shm_free_bytes)
        free = (size(facts.memory_free_bytes), shm, size(facts.disk_free_bytes))
        names = "\n".join(facts.interfaces) or facts.interface_error
        hosts.add_row(facts.host, listed(ranks), str(facts.cores), *free, names)
    console.print(hosts)
    if gathered.links:
        links = Table("ranks", "one way", "there", "back", "clocks apart", box=None)
        for link in gathered.links:
            rates = (rate_of(link.forward_bytes_per_s), rate_of(link.reverse_bytes_per_s))
            apart = f"{link.clock_s * 1e3:+.2f} ms"
            links.add_row(f"{link.one} - {link.other}", f"{link.latency_s * 1e6:.0f} us", *rates, apart)
        console.print(links)
    elif len(gathered.facts) > 1:
        console.print("all ranks share memory: there are no links to measure", highlight=False)
    for fabric in sorted({facts.fabric for facts in gathered.facts if facts.fabric}):
        console.print(f"over {fabric}", highlight=False)
    for quota in gathered.facts[0].switches:
        if not quota.error:
            room = f"{quota.jobs} jobs, {quota.workers} workers, {size(quota.memory_bytes)}"
            udp = ", and UDP does not pass" if quota.udp_error else ""
            console.print(f"switch {quota.endpoint}: room for {room}{udp}", highlight=False)
    for each in gathered.capacities:
        if not each.error:
            rate = rate_of(each.bytes_per_s)
            console.print(f"switch {each.endpoint}: gives back {rate} while all hosts send", highlight=False)
    if all(finding.level is Level.NOTE for finding in findings):
        console.print("nothing is wrong", style="green")
    if not findings:
        return
    wrong = Table("", "where", "what", "what to do", box=None, show_lines=False)
    for finding in findings:
        level = Text(finding.level.value, _COLOURS[finding.level])
        wrong.add_row(level, finding.where, finding.what, finding.remedy)
    console.print(wrong)
