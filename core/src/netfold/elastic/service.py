"""Replies to other processes of the job, on threads of the listener: no reply waits for the training thread."""

from __future__ import annotations

from netfold.bootstrap import handle
from netfold.elastic import messages
from netfold.elastic.agreement import Decide
from netfold.elastic.joining import Joining
from netfold.elastic.standing import Standing
from netfold.switch_protocol.control_messages import Message


class Service:
    """Handles the requests of messages.py."""

    def __init__(self, standing: Standing, joining: Joining) -> None:
        self._standing, self._joining = standing, joining

    def handle(self, request: Message) -> Message:
        kind = request["type"]
        if kind == messages.TYPE:
            return self._handle_agreement(request)
        standing = self._standing
        with standing.changed:
            is_member = standing.negotiation is not None and not standing.closed
            if kind == "alive":
                waits = not is_member and not standing.closed
                return {"type": "alive"} if waits else {"type": "unknown", "text": "it does not wait to join"}
            if kind == "taken":
                self._joining.hint = str(request["handle"])
                standing.changed.notify_all()
                return {"type": "alive"}
            if not is_member:
                return {"type": "unknown", "text": "it is no member"}
            if kind == "join":
                return self._handle_join(str(request["handle"]), int(request["after"]))
            generation = standing.generation
            if request["generation"] != generation:
                return {"type": "unknown", "text": "that generation has ended"}
            handles = messages.page(standing.handles, int(request["start"]))
            return {"type": "members", "generation": generation, "handles": handles}

    def _handle_join(self, newcomer: str, after: int) -> Message:
        standing, own = self._standing, self._standing.communicator.endpoint.handle
        generation, size = standing.generation, standing.size
        if newcomer in standing.handles and generation > after and generation - 1 in standing.past:
            decision, former = standing.past[generation - 1]
            packed = messages.pack(Decide(decision))
            return {"type": "welcome", "generation": generation, "size": size, "decision": packed, "former": former}
        try:
            handle.check_members(own, [own.text, newcomer])
        except ValueError as error:
            return {"type": "refused", "text": f"the job cannot take this process: {error}"}
        standing.note(newcomer)
        return {"type": "waiting", "generation": generation, "size": size}

    def _handle_agreement(self, request: Message) -> Message:
        message, generation, group = messages.unpack(request["message"]), request["generation"], None
        loss = None if request["lost"] is None else (int(request["lost"][0]), str(request["lost"][1]))
        standing = self._standing
        with standing.changed:
            if generation in standing.past:
                return {"type": messages.TYPE, "message": messages.pack(Decide(standing.past[generation][0]))}
            if generation < standing.generation:
                return {"type": "over"}
            negotiation = standing.negotiation
            if generation > standing.generation or negotiation is None or standing.closed:
                return {"type": "behind"}
            if not standing.has_reported and not isinstance(message, Decide):
                if standing.is_passing(int(request["done"])):
                    return {"type": "later"}
                standing.report(loss, standing.join_timeout_s)
                if standing.formed and loss is not None:
                    group = standing.communicator.group
            reply = negotiation.agreement.handle(int(request["sender"]), message)
            standing.changed.notify_all()
        if group is not None and loss is not None:
            group.lose(*loss)  # the training thread may wait for the lost member
        return {"type": messages.TYPE, "message": messages.pack(reply)}
