"""The answer to `path`: which switches are between the asking peer and the root of the tree."""

from __future__ import annotations

import asyncio

from netfold.switch.job import RefusedError
from netfold.switch.parent import Parent, ParentError
from netfold.switch_protocol import control_messages
from netfold.switch_protocol.job_tree import MAX_DEPTH


class RootPath:
    """The path from this switch to the root.

    incarnation: this switch's id in paths.
    parent: the next switch; None where this switch is a root.
    """

    def __init__(self, incarnation: int, parent: Parent | None) -> None:
        self._incarnation = incarnation
        self._parent = parent
        self._request: asyncio.Future[control_messages.Message] | None = None  # to the parent, for workers

    async def answer(self, asking: object) -> control_messages.Message:
        """Answer a peer that reached this switch through the switches `asking`; for a worker there are none.

        Raises RefusedError where the parents form a cycle or the tree is too deep, ProtocolError for a malformed list.
        """
        if not isinstance(asking, list) or not all(isinstance(switch, int) for switch in asking):
            raise control_messages.ProtocolError("path without the switches that ask")
        if self._incarnation in asking:
            raise RefusedError(
                "loop", "the parents of these switches go in a circle, and this one is in it: look at each --parent"
            )
        if len(asking) >= MAX_DEPTH:
            raise RefusedError("bound", f"a tree has at most {MAX_DEPTH} levels of switches")
        reply: control_messages.Message = {"type": "path", "version": control_messages.VERSION}
        switches: list[list[object]] = [[self._incarnation, ""]]
        if self._parent is None:
            return {**reply, "switches": switches, "error": ""}
        try:
            above = await self._ask(self._parent, asking)
        except ParentError as error:
            if error.loop:
                raise RefusedError("loop", str(error)) from None
            return {**reply, "switches": switches, "error": str(error)}
        (parent, _), *rest = above["switches"]
        switches += [[parent, self._parent.full_endpoint], *rest]
        return {**reply, "switches": switches, "error": above["error"]}

    async def _ask(self, parent: Parent, asking: list[int]) -> control_messages.Message:
        if asking:
            return await parent.path([*asking, self._incarnation])
        # All workers of a job ask at once; they share one request.
        if self._request is None or self._request.done():
            self._request = asyncio.ensure_future(parent.path([self._incarnation]))
        return await asyncio.shield(self._request)

    def stop(self) -> None:
        if self._request is not None:
            self._request.cancel()
