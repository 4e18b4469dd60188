"""The switches above each worker, and the tree that a job makes of them.

Every worker asks its switch for its way to the root; the first of them gathers what they heard, cuts it where all ways
have met, and tells all. What a switch said is remembered: when it cannot be reached any more, its workers join the next
one on their way instead.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from netfold.errors import SwitchError
from netfold.switch_protocol import control_messages

# For a message that is on its way when the deadline comes.
_GRACE_S = 2.0

# By a switch's address, those above it, the next one first: as last heard in this process.
_remembered: dict[str, tuple[str, ...]] = {}


class PathToRoot(NamedTuple):
    """A worker's switches, its own first: their ids, and what each is called as NETFOLD_SWITCH.

    error: why the last one did not say what is above it, or "".
    """

    ids: tuple[int, ...]
    endpoints: tuple[str, ...]
    error: str

    @classmethod
    def parse(cls, answer: control_messages.Message, endpoint: str) -> PathToRoot:
        """From the answer of the switch at `endpoint`; KeyError, TypeError, ValueError for what is none."""
        ids = tuple(int(switch) for switch, _ in answer["switches"])
        endpoints = (endpoint, *(str(address) for _, address in answer["switches"][1:]))
        if not ids:
            raise ValueError("it named no switch, not even itself")
        _remembered[endpoint] = endpoints[1:]
        return cls(ids, endpoints, str(answer["error"]))


def known_parents(endpoint: str) -> tuple[str, ...]:
    """Switches that are known to be above the one at `endpoint`, the next one first."""
    return _remembered.get(endpoint, ())


def common_tree(ways: Sequence[PathToRoot], ranks: Sequence[int]) -> list[list[int]]:
    """By worker, the ids from its own switch to the lowest that all are below; SwitchError where there is none."""
    common = set(ways[0].ids).intersection(*(way.ids for way in ways))
    for switch in ways[0].ids:
        if switch in common:
            return [list(way.ids[: way.ids.index(switch) + 1]) for way in ways]
    said: dict[str, str] = {}
    for way, rank in zip(ways, ranks, strict=True):
        said.setdefault(" below ".join(way.endpoints) + (f" ({way.error})" if way.error else ""), f"rank {rank}'s is")
    raise SwitchError(
        "the switches of this group's ranks have no common parent: "
        + "; ".join(f"{whose} {what}" for what, whose in said.items())
        + ". Start the lower ones with --parent, or give all ranks the same NETFOLD_SWITCH"
    )


def agree_on_tree(
    way: PathToRoot | SwitchError,
    rank: int,
    workers: Sequence[int],
    streams: Mapping[int, socket.socket],
    deadline: float,
) -> list[list[int]]:
    """The tree of all `workers`, on each of them; `way`: what this one heard, or why nothing.

    streams: connections to the other workers. Raises SwitchError on all where one failed: on that one its own.
    """
    first, *others = workers
    within_s = max(0.0, deadline - time.monotonic())
    if rank != first:
        word: control_messages.Message = {"type": "path_to_root"}
        if isinstance(way, SwitchError):
            word["refused"] = str(way)
        else:
            word |= {"ids": list(way.ids), "endpoints": list(way.endpoints), "error": way.error}
        with contextlib.suppress(OSError):  # its silence is noticed below, or by whoever comes next
            control_messages.send(streams[first], word)
        if isinstance(way, SwitchError):
            raise way
        return _paths_of(_hear(streams[first], first, rank, deadline + _GRACE_S, within_s), rank)
    paths: list[list[int]] = []
    failure: SwitchError | None = way if isinstance(way, SwitchError) else None
    ways = [] if isinstance(way, SwitchError) else [way]
    for peer in others:
        try:
            word = _hear(streams[peer], peer, rank, deadline, within_s)
            if "refused" in word:
                raise SwitchError(f"rank {rank}: {word['refused']}")
            ways.append(PathToRoot(tuple(word["ids"]), tuple(word["endpoints"]), word["error"]))
        except SwitchError as error:
            failure = failure or error
    try:
        if failure is None:
            paths = common_tree(ways, workers)
    except SwitchError as error:
        failure = SwitchError(f"rank {rank}: {error}")
    answer: control_messages.Message = {"paths": paths} if failure is None else {"refused": str(failure)}
    for peer in others:
        with contextlib.suppress(OSError):  # one that is gone is missed when the others join
            control_messages.send(streams[peer], {"type": "tree", **answer})
    if failure is not None:
        raise failure
    return paths


def _paths_of(word: control_messages.Message, rank: int) -> list[list[int]]:
    if "refused" in word:
        raise SwitchError(f"rank {rank}: {word['refused']}")
    paths: list[list[int]] = word["paths"]
    return paths


def _hear(stream: socket.socket, peer: int, rank: int, deadline: float, within_s: float) -> control_messages.Message:
    stream.settimeout(max(0.01, deadline - time.monotonic()))
    try:
        return control_messages.receive(stream)
    except TimeoutError:
        raise SwitchError(
            f"rank {rank}: rank {peer} did not join within {within_s:.0f} s: it has not said what is above it"
        ) from None
    except (EOFError, OSError, control_messages.ProtocolError) as error:
        raise SwitchError(
            f"rank {rank}: rank {peer} did not say which switches it is below ({error}); see its own output"
        ) from None
