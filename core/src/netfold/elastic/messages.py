"""Messages of members as control messages: what agreement.py says, in maps of plain values.

Requests go to the endpoint of a member's handle, which only those can use who know the handle (bootstrap/endpoint.py).

    request  elastic   generation: that ends; sender: its rank there; done: the steps that it has done
                       lost: (rank, text) why the generation ends, or none at the boundary of two steps
                       message: of agreement.py
             join      handle: of a newcomer; after: the last generation that it was in, 0 for none
             members   generation; start: a page of its handles from this rank on
             taken     handle: of a member that knows of a generation with the asked newcomer in it
             alive     is the asked process a newcomer that waits?
    reply    elastic   message
             later     the member is about to pass the vote that the sender has passed: ask again
             behind    the member is not in that generation yet
             over      the generation ended so long ago that the member has forgotten how
             waiting   generation; size
             welcome   generation, size, decision (that began the generation), former: the size of the one before
             members   generation, handles
             alive
             unknown   text: why the asked process cannot answer
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from netfold.elastic.agreement import (
    Accept,
    Accepted,
    Ask,
    Decide,
    Decision,
    Prepare,
    Promise,
    Refused,
    Report,
    Undecided,
)
from netfold.switch_protocol.control_messages import ProtocolError

TYPE = "elastic"
# All types of requests.
REQUESTS = (TYPE, "join", "members", "taken", "alive")
# Handles in one message: control messages hold 64 KB.
MAX_HANDLES_BYTES = 40_000

_KINDS = {each.__name__: each for each in (Prepare, Promise, Accept, Accepted, Decide, Ask, Refused, Undecided)}
_PARTS = {"report": Report, "decision": Decision, "accepted": Decision}


def pack(message: Any) -> list[Any]:
    """A message of agreement.py as a list that `unpack` reads."""
    return [type(message).__name__, *_plain(tuple(message))]


def unpack(packed: Any) -> Any:
    """Raises ProtocolError for a list that `pack` does not make."""
    try:
        kind = cast(Any, _KINDS[packed[0]])
        values = dict(zip(kind._fields, packed[1:], strict=True))
        return kind(**{name: _value(name, value) for name, value in values.items()})
    except (TypeError, ValueError, LookupError) as error:
        raise ProtocolError(f"no message of an agreement: {error}") from None


def unpack_decision(packed: Any) -> Decision:
    decision = unpack(packed)
    if not isinstance(decision, Decide):
        raise ProtocolError("no decision")
    return decision.decision


def page(handles: Sequence[str], start: int) -> list[str]:
    """The handles from `start` on that fit one message, one at least."""
    found: list[str] = []
    for handle in handles[start:]:
        if found and sum(map(len, found)) + len(handle) > MAX_HANDLES_BYTES:
            break
        found.append(handle)
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(each) for each in value]
    return sorted(value) if isinstance(value, frozenset) else value


def _value(name: str, value: Any) -> Any:
    if name == "ended":
        return frozenset(map(int, value))
    if name in _PARTS and value is not None:
        return cast(Any, _PARTS[name])(*(tuple(each) if isinstance(each, list) else each for each in value))
    return tuple(value) if isinstance(value, list) else value
