"""A rack as a context: it stands inside the `with` and is gone after it."""

import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import TracebackType

from netfold.rack import cleanup, names
from netfold.rack.aggregator import aggregator_argv, start_aggregator
from netfold.rack.command import RackError, run, why_unavailable
from netfold.rack.delay_links import DelayLinks
from netfold.rack.link import parse_link, single_packets_command
from netfold.rack.processes import Process, spawn, stop, uninterrupted
from netfold.rack.reaper import Reaper
from netfold.rack.topology import End, Layout, build_steps


class Rack:
    """`hosts` hosts, each on a link of `rate` ("1gbit") that loses `loss` ("0.1%") of its packets each way, and holds
    each for `delay` ("50us").

    A packet from host to host crosses two links, and so meets loss and delay twice; to the switch it crosses one.
    racks: so many, of equal size, each with a switch of its own and an uplink of rate `uplink` to a core, which loses
    nothing. switch_rate: the aggregator is a host at the core, behind a link of this rate (None: in the switch's place,
    behind none). mtu: of every link. Cost: about 20 ms a host to build. Raises ValueError (not understood), RackError
    (cannot be had here).
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
        self.leaf_addresses: list[str] = []  # by rack, where there is a switch in each
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._tear_down()

    def popen(self, host: int, argv: Sequence[str], environment: Mapping[str, str] | None = None) -> Process:
        """Start `argv` on a host with a worker's environment, and `environment` on top.

        Its temporary folder is its own, so that it shares memory with what it starts itself and with no other host.
        """
        switch = self.leaf_addresses[self.layout.rack_of(host)] if self.leaf_addresses else self.switch_address
        worker = names.worker_environment(host, self.hosts, switch)
        worker["TMPDIR"] = str(cleanup.HOST_FOLDER)
        alone = ["sh", "-c", 'mount -t tmpfs netfold "$TMPDIR" && exec "$@"', "sh", *argv]
        return self._spawn(names.host_namespace(self.rack_id, host), alone, {**worker, **(environment or {})})

    def address(self, host: int | None) -> str:
        """Of a host, or of the aggregator's place (None)."""
        return names.SWITCH_ADDRESS if host is None else names.host_address(host)

    def disturb(
        self, host: int, *, duplicate_ratio: float = 0, reorder_ratio: float = 0, reorder_ns: int = 0, seed: int = 0
    ) -> None:
        """From now on the host's link duplicates so many of its packets, and holds so many back, by up to `reorder_ns`.

        Both ways. The link must have a delay. Packets are single ones from here on. Raises RackError.
        """
        namespace = names.host_namespace(self.rack_id, host)
        end, far = End(namespace, names.HOST_INTERFACE), self._switch_end(host)
        for each in (end, far):
            run(single_packets_command(each.namespace, each.device))
        self._delay_links.disturb(end, duplicate_ratio, reorder_ratio, reorder_ns, seed)

    def _switch_end(self, host: int) -> End:
        one_rack = self.layout.uplink is None
        rack = self.layout.rack_of(host)
        place = names.switch_namespace(self.rack_id) if one_rack else names.rack_namespace(self.rack_id, rack)
        return End(place, names.port_name(host))

    def popen_switch(self, argv: Sequence[str], environment: Mapping[str, str] | None = None) -> Process:
        """Start `argv` where the aggregator is."""
        place = names.switch_namespace if self.layout.aggregator is None else names.aggregator_namespace
        return self._spawn(place(self.rack_id), argv, environment or {})

    def start_switch(self, on_line: Callable[[str], None], argv: Sequence[str] | None = None) -> Process:
        """Start the aggregator, or `argv` in its place; workers started from now on learn its address."""
        listen = f"{names.SWITCH_ADDRESS}:{names.SWITCH_PORT}"
        aggregator = start_aggregator(self.popen_switch, argv or aggregator_argv(listen), on_line)
        self.switch_address = aggregator.address
        return aggregator.process

    def start_leaves(self, on_line: Callable[[str], None]) -> list[Process]:
        """Start an aggregator in every rack's switch, below the one that runs; a rack's workers learn its address.

        Raises RackError where there is one rack alone, or no aggregator above.
        """
        if self.layout.uplink is None or self.switch_address is None:
            raise RackError("leaves stand in several racks, below an aggregator that has been started")
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
        # A switch that the caller's own shell names cannot be reached from in here.
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
