"""The parent's side of one job: this switch is a worker of its parent, from the job's assembly to its end."""

from __future__ import annotations

import asyncio
import time

from netfold.switch.job import Departure, Job, record_left
from netfold.switch.job_lifecycle import JobLifecycle
from netfold.switch.parent import Link, ParentError
from netfold.switch_protocol import control_messages


class TreeSession:
    """The control connection of `job` to the parent, over `link`.

    listens: host and port of this switch.
    """

    def __init__(self, job: Job, link: Link, jobs: JobLifecycle, listens: tuple[str, int]) -> None:
        self._job, self._link, self._jobs, self._listens = job, link, jobs, listens

    async def run(self) -> None:
        """Join the parent and handle its messages; end the job when the parent ends it or its connection is lost."""
        job, link = self._job, self._link
        reason, gone = "it closed the connection", link.parent.endpoint
        try:
            await self._join()
            while (message := await link.read())["type"] != "refused":
                await self._handle(message)
            reason, gone = str(message.get("reason")), str(message.get("switch") or gone)
        except ParentError as error:
            await self._jobs.end(job, "parent", str(error))
            return
        except asyncio.IncompleteReadError:
            pass
        except (OSError, ValueError, KeyError, TypeError) as error:
            reason = str(error)
        if job.started:
            link.parent.last_error = f"the parent switch at {link.parent.endpoint} ended a job: {reason}"
            await self._jobs.end(job, "parent", reason, gone)
        else:
            await self._jobs.end(job, "parent", str(link.parent.error(f"refused: {reason}")))

    async def _join(self) -> None:
        job, incarnation = self._job, self._jobs.incarnation
        timeout_s = max(0.1, job.created + job.deadline - time.monotonic())
        join = {
            "job": job.name,
            "name": job.label,
            "rank": job.position.contributors[0].rank,
            "tree": job.tree[1:],
            "switch": incarnation,
            "window_bytes": job.window_bytes,
            "timeout_s": timeout_s,
            "encrypt": job.encrypts,
        }
        await self._link.join(join, self._listens, job.provider, timeout_s)
        job.plane.connect_parent(job.id, self._link.port)
        await self._jobs.begin_when_ready(job)

    async def _handle(self, message: control_messages.Message) -> None:
        job, link, kind = self._job, self._link, message["type"]
        if kind == "start":
            payload_bytes, window = int(message["payload_bytes"]), int(message["window"])
            hardware = message.get("profile") == control_messages.HARDWARE
            if (
                job.started
                or link.ready is None
                or not 0 < payload_bytes <= link.ready[0]
                or not 0 < window <= link.ready[1]
                or (job.hardware and (payload_bytes != link.ready[0] or not hardware))
            ):
                raise control_messages.ProtocolError(f"start with window {window} x {payload_bytes} bytes")
            job.hardware = hardware
            await self._jobs.begin(job, payload_bytes, window, int(message["epoch"]))
        elif kind == "left":
            elsewhere = job.position.workers - sum(each.workers for each in job.position.contributors)
            self._jobs.announce_left(job, Departure.of(record_left(link.left, message, elsewhere), message, None))
        elif kind == "stragglers":
            self._jobs.handle_stragglers(job, None, message)
        else:
            raise control_messages.ProtocolError(f"unknown message {kind!r}")
