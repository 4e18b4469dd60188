"""Hosts as network namespaces on one bridge, whose packets a test can drop. Needs root."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass

from netfold_lab.rack.command import run
from netfold_lab.rack.processes import Process, spawn


@dataclass
class Lan:
    """names[i] has the address 10.78.0.(i + 1)."""

    names: list[str]

    def address(self, host: int) -> str:
        return f"10.78.0.{host + 1}"

    def spawn(self, host: int, *argv: str, **environment: str) -> Process:
        return spawn(["ip", "netns", "exec", self.names[host], *argv], environment)

    def firewall(self, host: int, rules: str) -> None:
        run(["ip", "netns", "exec", self.names[host], "nft", "-f", "-"], stdin=rules)

    def drop(self, host: int, *rules: str) -> None:
        """Drop packets that arrive at the host ("in ...") or leave it ("out ...")."""
        for hook, name in (("input", "in "), ("output", "out ")):
            lines = "\n".join(f"{rule.removeprefix(name)} drop" for rule in rules if rule.startswith(name))
            if lines:
                chain = f"chain c {{ type filter hook {hook} priority 0; {lines}\n}}"
                self.firewall(host, f"table inet cut_{hook} {{ {chain}\n}}\n")

    def heal(self, host: int) -> None:
        self.firewall(host, "flush ruleset")

    def link(self, host: int, state: str) -> None:
        run(["ip", "-n", self.names[-1], "link", "set", f"p{host}", state])


@contextlib.contextmanager
def lan(hosts: int) -> Iterator[Lan]:
    tag = f"nfc{os.getpid() % 10000}"
    there = Lan([f"{tag}-{host}" for host in range(hosts)] + [f"{tag}-lan"])
    middle = there.names[-1]
    try:
        for name in there.names:
            run(["ip", "netns", "add", name])
            run(["ip", "-n", name, "link", "set", "lo", "up"])
        run(["ip", "-n", middle, "link", "add", "bridge0", "type", "bridge"])
        run(["ip", "-n", middle, "link", "set", "bridge0", "up"])
        for host, name in enumerate(there.names[:-1]):
            ends = (["netns", middle, "name", f"p{host}"], ["netns", name, "name", "eth0"])
            run(["ip", "link", "add", *ends[0], "type", "veth", "peer", *ends[1]])
            run(["ip", "-n", middle, "link", "set", f"p{host}", "master", "bridge0", "up"])
            run(["ip", "-n", name, "addr", "add", f"{there.address(host)}/24", "dev", "eth0"])
            run(["ip", "-n", name, "link", "set", "eth0", "up"])
        yield there
    finally:
        for name in there.names:
            with contextlib.suppress(Exception):
                run(["ip", "netns", "del", name])
