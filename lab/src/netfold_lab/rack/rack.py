"""A rack as a context manager: it exists inside the `with` block."""

import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from netfold_lab.rack import cleanup, names
from netfold_lab.rack.aggregator import aggregator_argv, start_aggregator
from netfold_lab.rack.command import RackError, run, why_unavailable
from netfold_lab.rack.delay_links import DelayLinks
from netfold_lab.rack.link import parse_link, single_packets_command
from netfold_lab.rack.processes import Process, spawn, stop, uninterrupted
from netfold_lab.rack.reaper import Reaper
from netfold_lab.rack.topology import End, Layout, build_steps


class Rack:
    """Hosts on shaped links to a switch. A packet between two hosts crosses two links; to the switch it crosses one.

    rate: of each host's link, as "1gbit".
    loss: of its packets each way, as "0.1%".
    delay: of its packets each way, as "50us".
    mtu: of every link.
    racks: of equal size, each with its own switch and an uplink to a core.
    uplink: the rate of the uplinks, which lose nothing.
    switch_rate: the aggregator is a host at the core, behind a link of this rate; None: in the switch, behind no link.

    Building takes about 20 ms for each host. Raises ValueError for invalid values, and RackError, from `with`, where
    this machine cannot build the rack.
    """

    def __init__(
        self,
        hosts: int,
        rate: str,
        loss: str = "0%",
        *,
        delay: str = "0us",
        mtu: int = 1500,
        racks: int = 1,
        uplink: str | None = None,
        switch_rate: str | None = None,
    ) -> None:
        self.layout = Layout(
            hosts=hosts,
            link=parse_link(rate, loss, delay),
            racks=racks,
            uplink=None if uplink is None else parse_link(uplink),
            aggregator=None if switch_rate is None else parse_link(switch_rate),
            mtu=mtu,
        )
        self.hosts = hosts
        self.link = self.layout.link
        self.rack_id = secrets.token_hex(4)
        self.switch_address: str | None = None
        self.leaf_addresses: list[str] = []  # by rack, where each has an aggregator
        self._processes: list[Process] = []
        self._delay_links = DelayLinks()
        self._claim: int | None = None
        self._reaper: Reaper | None = None

    def __enter__(self) -> "Rack":
        lack = why_unavailable(loss=self.link.loss_ratio > 0, delay=self.link.delay_ns > 0)
        if lack is not None:
            raise RackError(lack)
        try:
            self._claim = cleanup.claim(self.rack_id)
            self._reaper = Reaper(self.rack_id)
            for step in build_steps(self.rack_id, self.layout):
                if step.ends is None:
                    run(step.argv, step.stdin)
                else:
                    self._delay_links.add(*step.ends, step.delay_ns)
            self._delay_links.start()
        except BaseException:
            self._tear_down()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._tear_down()

    def popen(self, host: int, argv: Sequence[str], environment: Mapping[str, str] | None = None) -> Process:
        """Start `argv` on a host with a worker's environment, which `environment` overrides.

        It has its own temporary folder. It shares memory only with processes of its host, a network namespace.
        """
        switch = self.leaf_addresses[self.layout.rack_of(host)] if self.leaf_addresses else self.switch_address
        worker = names.worker_environment(host, self.hosts, switch)
        worker["TMPDIR"] = str(cleanup.HOST_FOLDER)
        isolated = ["sh", "-c", 'mount -t tmpfs netfold "$TMPDIR" && exec "$@"', "sh", *argv]
        return self._spawn(names.host_namespace(self.rack_id, host), isolated, {**worker, **(environment or {})})

    def address(self, host: int | None) -> str:
        """Return the address of a host, or of the aggregator (None)."""
        return names.SWITCH_ADDRESS if host is None else names.host_address(host)

    def disturb(
        self, host: int, *, duplicate_ratio: float = 0, reorder_ratio: float = 0, reorder_ns: int = 0, seed: int = 0
    ) -> None:
        """Start to duplicate and reorder packets on a host's link, both ways; aggregation of packets is then off.

        reorder_ns: the longest time that a packet is held back.
        Raises RackError where the link has no delay.
        """
        ends = self.link_ends()[2 * host : 2 * host + 2]
        for each in ends:
            run(single_packets_command(each.namespace, each.device))
        self._delay_links.disturb(ends[1], duplicate_ratio, reorder_ratio, reorder_ns, seed)

    def link_ends(self) -> list[End]:
        """Return both ends of every host's link, by host; the switch's end comes first."""
        ends = []
        for host in range(self.hosts):
            if self.layout.uplink is None:
                namespace = names.switch_namespace(self.rack_id)
            else:
                namespace = names.rack_namespace(self.rack_id, self.layout.rack_of(host))
            ends.append(End(namespace, names.port_name(host)))
            ends.append(End(names.host_namespace(self.rack_id, host), names.HOST_INTERFACE))
        return ends

    def popen_switch(self, argv: Sequence[str], environment: Mapping[str, str] | None = None) -> Process:
        """Start `argv` in the aggregator's namespace."""
        namespace = names.switch_namespace if self.layout.aggregator is None else names.aggregator_namespace
        return self._spawn(namespace(self.rack_id), argv, environment or {})

    def start_switch(self, on_line: Callable[[str], None], argv: Sequence[str] | None = None) -> Process:
        """Start the aggregator, or `argv` instead; workers that start later get its address."""
        listen = f"{names.SWITCH_ADDRESS}:{names.SWITCH_PORT}"
        aggregator = start_aggregator(self.popen_switch, argv or aggregator_argv(listen), on_line)
        self.switch_address = aggregator.address
        return aggregator.process

    def start_leaves(self, on_line: Callable[[str], None]) -> list[Process]:
        """Start an aggregator in every rack's switch, below the running one; workers that start later get its address.

        Raises RackError where there is only one rack, or no running aggregator.
        """
        if self.layout.uplink is None or self.switch_address is None:
            raise RackError("leaves need several racks, and an aggregator that has been started")
        processes = []
        for rack in range(self.layout.racks):
            namespace = names.rack_namespace(self.rack_id, rack)
            listen = f"{names.rack_address(rack)}:{names.SWITCH_PORT}"
            argv = [*aggregator_argv(listen), "--parent", self.switch_address]
            leaf = start_aggregator(partial(self._spawn, namespace, environment={}), argv, on_line)
            self.leaf_addresses.append(leaf.address)
            processes.append(leaf.process)
        return processes

    def _spawn(self, namespace: str, argv: Sequence[str], environment: Mapping[str, str]) -> Process:
        # Remove the caller's NETFOLD_SWITCH: that switch cannot be reached from inside the rack.
        outer = {name: value for name, value in os.environ.items() if name != "NETFOLD_SWITCH"}
        process = spawn(["ip", "netns", "exec", namespace, *argv], {**outer, **environment})
        self._processes.append(process)
        return process

    def _tear_down(self) -> None:
        with uninterrupted():
            stop(self._processes)
            if self._claim is not None:
                try:
                    self._delay_links.stop()
                    cleanup.remove(self.rack_id)
                finally:
                    os.close(self._claim)
                    self._claim = None
                    if self._reaper is not None:
                        self._reaper.release()
