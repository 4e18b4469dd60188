"""A rack as a context: it stands inside the `with` and is gone after it."""

import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType

from netfold.rack import names, remains
from netfold.rack.aggregator import aggregator_argv, start_aggregator
from netfold.rack.command import RackError, missing, run
from netfold.rack.link import parse_link
from netfold.rack.processes import Process, spawn, stop, uninterrupted
from netfold.rack.topology import build_steps


class Rack:
    """`hosts` hosts, each on a link of `rate` ("1gbit") that loses `loss` ("0.1%") of its packets each way.

    A packet from host to host crosses two links, and so meets the loss twice; to the switch it crosses one.
    Cost: about 20 ms a host to build. Raises ValueError (not understood), RackError (cannot be had here).
    """

    def __init__(self, hosts: int, rate: str, loss: str = "0%") -> None:
        if not 1 <= hosts <= names.HOSTS_MAX:
            raise ValueError(f"a rack has 1 to {names.HOSTS_MAX} hosts, not {hosts}")
        self.hosts = hosts
        self.link = parse_link(rate, loss)
        self.rack_id = secrets.token_hex(4)
        self.switch_address: str | None = None
        self._processes: list[Process] = []
        self._claim: int | None = None

    def __enter__(self) -> "Rack":
        lack = missing(loss=self.link.loss_ratio > 0)
        if lack is not None:
            raise RackError(lack)
        try:
            self._claim = remains.claim(self.rack_id)
            for step in build_steps(self.rack_id, self.hosts, self.link):
                run(step.argv, step.stdin)
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
        worker = names.worker_environment(host, self.hosts, self.switch_address)
        worker["TMPDIR"] = str(remains.HOST_FOLDER)
        alone = ["sh", "-c", 'mount -t tmpfs netfold "$TMPDIR" && exec "$@"', "sh", *argv]
        return self._spawn(names.host_namespace(self.rack_id, host), alone, {**worker, **(environment or {})})

    def popen_switch(self, argv: Sequence[str], environment: Mapping[str, str] | None = None) -> Process:
        """Start `argv` where the switch is."""
        return self._spawn(names.switch_namespace(self.rack_id), argv, environment or {})

    def start_switch(self, on_line: Callable[[str], None], argv: Sequence[str] | None = None) -> Process:
        """Start the aggregator, or `argv` in its place; workers started from now on learn its address."""
        listen = f"{names.SWITCH_ADDRESS}:{names.SWITCH_PORT}"
        aggregator = start_aggregator(self.popen_switch, argv or aggregator_argv(listen), on_line)
        self.switch_address = aggregator.address
        return aggregator.process

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
                remains.remove(self.rack_id)
                os.close(self._claim)
                self._claim = None
