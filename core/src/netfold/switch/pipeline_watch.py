"""The daemon's hold on its pipeline: the lease is renewed, and a pipeline that was lost is taken again."""

from __future__ import annotations

import asyncio
import contextlib
import logging

from netfold.switch.bmv2 import BEAT_S, Bmv2, PipelineError
from netfold.switch.job_lifecycle import JobLifecycle
from netfold.switch.ledger import Ledger
from netfold.switch.log import event


class PipelineWatch:
    """Renew the lease on `pipeline` every BEAT_S.

    If the pipeline is lost, its jobs end with the reason, and their groups go by host algorithms: the content of the
    slots is gone or unknown. Then connect again, until that succeeds, and serve new jobs.
    """

    def __init__(self, pipeline: Bmv2, ledger: Ledger, jobs: JobLifecycle) -> None:
        self._pipeline, self._ledger, self._jobs = pipeline, ledger, jobs
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.ensure_future(self._run())

    async def stop(self) -> None:
        """End the lease, for the next owner."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        # A cancelled task leaves its thread, which is at most in one call.
        await asyncio.to_thread(self._pipeline.close)

    async def _run(self) -> None:
        # In a thread: a simple_switch that does not answer must not stop the daemon.
        while True:
            with contextlib.suppress(PipelineError):
                if not self._pipeline.lost:
                    await asyncio.to_thread(self._pipeline.beat)
            if self._pipeline.lost:
                await self._regain()
            await asyncio.sleep(BEAT_S)

    async def _regain(self) -> None:
        pipeline = self._pipeline
        address = pipeline.endpoint
        reason = f"the P4 pipeline is lost: {pipeline.lost}"
        event(logging.WARNING, "pipeline", f"{reason}; jobs are refused until it is there again", address=address)
        while pipeline.lost:
            for job in list(self._ledger.jobs.values()):
                await self._jobs.end(job, "pipeline", reason)
            with contextlib.suppress(PipelineError):
                await asyncio.to_thread(pipeline.reopen)
                break
            await asyncio.sleep(BEAT_S)
        event(
            logging.WARNING, "pipeline", f"the pipeline at {address} is there again, and serves jobs", address=address
        )
