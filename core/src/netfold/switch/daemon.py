"""One switch: a listening socket, its jobs, and the native data plane that reduces for them."""

from __future__ import annotations

import asyncio
import logging
import secrets
import ssl
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from netfold._native import auth
from netfold._native.dataplane import DataPlane
from netfold._native.transport import granted_receive_buffer
from netfold.switch.acceptor import Acceptor
from netfold.switch.admission import Admission
from netfold.switch.bmv2 import Bmv2
from netfold.switch.certificate import server_context
from netfold.switch.control_session import ControlSessions
from netfold.switch.fabrics import Fabrics
from netfold.switch.http import MAX_READERS
from netfold.switch.job_lifecycle import JobLifecycle
from netfold.switch.ledger import DEFAULT_TENANT, Ledger
from netfold.switch.log import event
from netfold.switch.parent import Parent, ParentError
from netfold.switch.pipeline_watch import PipelineWatch
from netfold.switch.quota import Limits
from netfold.switch.root_path import RootPath
from netfold.switch.tokens import Tokens
from netfold.switch_protocol import control_messages
from netfold.switch_protocol.acceptor import MAX_UNAUTHENTICATED
from netfold.switch_protocol.data_path import ReceiveBuffer
from netfold.switch_protocol.open_files import allow_open_files

# The time from connecting to an admitted join.
AUTHENTICATION_TIMEOUT_S = 10.0
# Open files beside connections and ports: the log, the loop, the data planes, fabrics.
_FILES = 256
# A draining switch checks at this interval whether its jobs have ended.
_DRAIN_POLL_S = 0.1


class Switch:
    """Serve jobs from `start` to `stop`.

    tokens: the tenants that may join. Control connections then use TLS and data packets are authenticated.
        None: every peer may join, without TLS; only on a loopback address, or with `open_to_all`.
    state_dir: the folder that keeps the certificate; None for a certificate that lasts as long as the switch.
    parent: the switch that reduces further for jobs with workers beyond this switch.
    threads: the threads that handle packets; each job has one of them.
    cores: one core for each thread to run on; empty for any.
    busy_poll_s: how long a thread polls for packets after the last one before it sleeps.
    fabrics: libfabric providers over which packets may come, beside UDP.
    pipeline: a P4 pipeline that reduces in place of the threads, with the hardware profile of the protocol.

    Raises ValueError for options that contradict each other or are unavailable on this host, OSError where the
    certificate cannot be stored.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        limits: Limits | None = None,
        open_to_all: bool = False,
        tokens: Tokens | None = None,
        state_dir: Path | None = None,
        parent: Parent | None = None,
        threads: int = 1,
        cores: Sequence[int] = (),
        busy_poll_s: float = 0.0,
        fabrics: Sequence[str] = (),
        pipeline: Bmv2 | None = None,
    ) -> None:
        if pipeline is not None and (tokens is not None or fabrics or (parent is not None and parent.authenticated)):
            raise ValueError(
                "--dataplane bmv2 is a pipeline, which checks and writes no MAC and takes packets over UDP alone: "
                "leave out --token-file, --fabric and a --parent with a fingerprint, and pass --open for a network "
                "whose hosts are trusted"
            )
        if pipeline is not None and not pipeline.leads_to(host):
            raise ValueError(
                f"--dataplane bmv2 needs an address of --listen to which the pipeline forwards packets, and {host} is "
                "not in the file of --hosts"
            )
        if tokens is not None and open_to_all:
            raise ValueError("--open turns tokens and TLS off, and --token-file needs both: give one of the two")
        if tokens is None and state_dir is not None:
            raise ValueError("--state-dir keeps the certificate, which only a switch with --token-file has")
        if tokens is None and not open_to_all and not control_messages.is_loopback(host):
            raise ValueError(
                f"{host} is not a loopback address: anyone who reaches it could join. Name those who may with "
                "--token-file, pass --open if every host on that network is trusted, or listen on 127.0.0.1"
            )
        if tokens is not None and auth.unavailable_reason():
            raise ValueError(
                f"--token-file: packets cannot be authenticated here: {auth.unavailable_reason()}. Without it only "
                "--open works, for a network where every host is trusted"
            )
        context: ssl.SSLContext | None = None
        self.fingerprint: str | None = None
        credentials = None
        if tokens is not None:
            context, self.fingerprint = server_context(state_dir)
            credentials = tokens.credentials(self.fingerprint)
        # Whether data packets carry a MAC.
        self.authenticated = tokens is not None
        self._fabrics = Fabrics(fabrics, host)
        tenants = [DEFAULT_TENANT] if tokens is None else tokens.tenants
        if cores and len(cores) != threads:
            raise ValueError(f"{threads} threads on {len(cores)} cores: name one core for each")
        planes = [DataPlane(core=core, busy_poll_s=busy_poll_s) for core in cores or [-1] * threads]
        limits = limits or Limits()
        self._ledger = Ledger(limits, tenants, planes)
        # Sized for the largest job; the kernel grants a smaller job what it requests, or this much.
        granted = granted_receive_buffer(2 * limits.window_bytes * limits.workers)
        self.buffer = ReceiveBuffer(granted, limits.window_bytes)
        self.incarnation = secrets.randbits(32) if pipeline is None else pipeline.incarnation
        self._parent = parent
        admission = Admission(
            self._ledger,
            self.incarnation,
            credentials,
            parent,
            self._fabrics,
            tagged=self.authenticated,
            host=host,
            pipeline=pipeline,
        )
        self._pipeline = pipeline
        self._jobs = JobLifecycle(self._ledger, self.incarnation, pipeline, host)
        self._watch = None if pipeline is None else PipelineWatch(pipeline, self._ledger, self._jobs)
        self._root_path = RootPath(self.incarnation, parent)
        self._sessions = ControlSessions(
            admission, self._ledger, self._jobs, self._root_path, self.buffer, (host, port), pipeline
        )
        self._acceptor = Acceptor(
            host,
            port,
            context,
            self._sessions.serve,
            timeout_s=AUTHENTICATION_TIMEOUT_S,
            limit=control_messages.MAX_MESSAGE_BYTES,
            what="joined",
        )
        self._started_s = time.monotonic()

    async def start(self) -> str:
        """Bind and listen; return what workers take as NETFOLD_SWITCH. Raises OSError where the port is unavailable."""
        # A worker has a connection, and a job a data port and a connection to the parent. Of the peers that are not
        # admitted, each may have a port on which it tests UDP.
        limits = self._ledger.limits
        allow_open_files(_FILES + 2 * MAX_UNAUTHENTICATED + MAX_READERS + limits.jobs * (limits.workers + 2))
        self._sessions.listens = self._acceptor.start()
        endpoint = control_messages.format_endpoint(*self._sessions.listens)
        self._log_buffer()
        if self._pipeline is not None:
            what = (
                f"the pipeline at {self._pipeline.endpoint} reduces, with the hardware profile: "
                f"{self._pipeline.payload_bytes // 4} values a packet, {self._pipeline.slots} slots; packets carry no "
                "MAC, since a pipeline can check none, so every host on the network must be trusted"
            )
            event(logging.WARNING, "pipeline", what, address=self._pipeline.endpoint)
        if self._watch is not None:
            self._watch.start()
        if self.fingerprint is None:
            what = f"no tokens and no TLS: whoever reaches {endpoint} may join, and packets are not authenticated"
            loopback = control_messages.is_loopback(self._sessions.listens[0])
            event(logging.INFO if loopback else logging.WARNING, "open", what, address=endpoint)
            return endpoint
        return f"{endpoint}#{self.fingerprint}"

    def _log_buffer(self) -> None:
        """Log the socket buffer that the kernel grants, and the windows that it holds."""
        workers, window_bytes = self._ledger.limits.workers, self.buffer.window_bytes
        fields = {"granted_bytes": self.buffer.granted_bytes, "window_bytes": window_bytes}
        shortfall = self.buffer.window_shortfall(workers)
        if not shortfall:
            what = f"the kernel holds the windows of {workers} workers a job, {window_bytes} bytes each"
            event(logging.INFO, "buffer", what, **fields)
            return
        whole = max(each for each in range(workers) if each == 0 or not self.buffer.window_shortfall(each))
        event(logging.INFO, "buffer", f"windows are whole for jobs of up to {whole} workers; {shortfall}", **fields)

    async def check_parent(self) -> None:
        """Log whether the parent answers. Raises ValueError where the parent is below this switch."""
        if self._parent is None:
            return
        endpoint = self._parent.endpoint
        try:
            path = await self._parent.path([self.incarnation])
        except ParentError as error:
            if error.loop:
                raise ValueError(str(error)) from None
            what = f"{error}; until it is there jobs must end at this switch"
            event(logging.WARNING, "parent", what, parent=endpoint)
            return
        levels = 1 + len(path["switches"])
        what = f"below the switch at {endpoint}, {levels} levels in all"
        event(logging.INFO, "parent", what, parent=endpoint, levels=levels)

    async def drain(self, reason: str, within_s: float) -> None:
        """Take no new job, end jobs that have not started, and wait at most `within_s` for the running ones."""
        self._ledger.draining = reason
        for job in [job for job in self._ledger.jobs.values() if not job.started]:
            await self._jobs.end(job, "draining", f"the switch is shutting down: {reason}")
        event(logging.INFO, "drain", f"draining after {reason}", jobs=len(self._ledger.jobs), within_s=within_s)
        deadline = time.monotonic() + within_s
        while self._ledger.jobs and time.monotonic() < deadline:
            await asyncio.sleep(_DRAIN_POLL_S)

    async def stop(self, reason: str) -> None:
        """End every job, tell every worker, and close the port."""
        for job in list(self._ledger.jobs.values()):
            await self._jobs.end(job, "draining", f"the switch is shutting down: {reason}")
        await self._acceptor.stop()
        if self._watch is not None:
            await self._watch.stop()
        self._root_path.stop()
        await self._jobs.stop()

    async def status(self) -> dict[str, Any]:
        """Return everything that operators can see, as plain values; units are last in the names."""
        ledger = self._ledger
        # Each reading waits for one iteration of its data-plane thread, which must not block the daemon's loop.
        readings = await asyncio.gather(*(asyncio.to_thread(plane.read) for plane in ledger.planes))
        counters = {job: counted for _, jobs in readings for job, counted in jobs.items()}
        jobs = list(ledger.jobs.values())
        for job in jobs:
            if job.id in counters:
                counters[job.id] = job.with_pipeline(counters[job.id])
        parent = None
        if self._parent is not None:
            below = sum(job.link is not None for job in jobs)
            parent = {"endpoint": self._parent.endpoint, "jobs": below, "last_error": self._parent.last_error}
        return {
            "state": "draining" if ledger.draining else "serving",
            "uptime_s": time.monotonic() - self._started_s,
            "threads": len(ledger.planes),
            "cpu_s": sum(cpu_ns for cpu_ns, _ in readings) / 1e9,
            "incarnation": self.incarnation,
            "authenticated": self.authenticated,
            "fabrics": {each: sum(job.provider_below == each for job in jobs) for each in self._fabrics.providers},
            "connections": self._acceptor.connections,
            "unauthenticated_connections": self._acceptor.unauthenticated,
            "parent": parent,
            **ledger.status(counters),
        }
