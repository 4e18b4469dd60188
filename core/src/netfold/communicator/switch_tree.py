"""The switches above each worker, and the tree that a job makes of them.

Every worker asks its switch for the path to the root. All ranks gather all paths and cut them at the lowest switch that
all of them contain. Of the tree, a worker tells its switch only what contributes to the switches of its own path
(switch_protocol/job_tree.py). A process remembers which switches are above
another: when a switch cannot be reached any more, its workers join the next one above it instead.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from netfold._native import protocol
from netfold.errors import SwitchError
from netfold.switch_protocol.control_client import SwitchAccess, UnreachableError, connected
from netfold.switch_protocol.control_messages import Message
from netfold.switch_protocol.job_tree import MAX_JOB_WORKERS, levels_by_worker

log = logging.getLogger("netfold")

# To connect to a switch, where there is another to try.
_CONNECT_S = 5.0

# By a switch's address, its ancestors, the parent first, as last reported to this process.
_known_parents: dict[str, tuple[str, ...]] = {}


class PathToRoot(NamedTuple):
    """A worker's switches, from its own to the root."""

    ids: tuple[int, ...]
    endpoints: tuple[str, ...]
    """Their addresses, as NETFOLD_SWITCH names them."""
    error: str
    """The reason why the last switch did not report what is above it, or ""."""

    @classmethod
    def parse(cls, reply: Message, endpoint: str) -> PathToRoot:
        """From the reply of the switch at `endpoint`. KeyError, TypeError, ValueError for a malformed one."""
        ids = tuple(int(switch) for switch, _ in reply["switches"])
        endpoints = (endpoint, *(str(address) for _, address in reply["switches"][1:]))
        if not ids:
            raise ValueError("it named no switch, not even itself")
        _known_parents[endpoint] = endpoints[1:]
        return cls(ids, endpoints, str(reply["error"]))


def query_path_to_root(access: SwitchAccess, timeout_s: float) -> PathToRoot:
    """Ask the rank's switch for its path; where it cannot be reached, ask the next known switch above it.

    SwitchError where none can be reached, or one of the path has no keys and the security is more than none.
    """
    deadline = time.monotonic() + timeout_s
    candidates = [access.endpoint, *_known_parents.get(access.endpoint, ())]
    failure: SwitchError | None = None
    for place, candidate in enumerate(candidates):
        left_s = max(0.1, deadline - time.monotonic())
        if place + 1 < len(candidates):
            left_s = min(left_s, _CONNECT_S)
        try:
            with connected(access, candidate, left_s) as client:
                client.send_first({"type": "path", "below": []})
                path = PathToRoot.parse(client.expect("path", time.monotonic() + left_s, is_first=True), candidate)
                client.close()
        except UnreachableError as error:
            failure = failure or error
            continue
        for each in path.endpoints:
            access.require_keys(each)
        if failure:
            log.warning("%s; joins the one above it, at %s", failure, client.endpoint)
        return path
    assert failure is not None  # there is a candidate, and none was reached
    raise failure


def common_tree(paths: Sequence[PathToRoot], ranks: Sequence[int]) -> list[list[int]]:
    """By worker, the ids from its own switch to the lowest one that all paths contain. SwitchError for no such switch.

    ranks: whose path each one is.
    """
    common = set(paths[0].ids).intersection(*(path.ids for path in paths))
    for switch in paths[0].ids:
        if switch in common:
            return [list(path.ids[: path.ids.index(switch) + 1]) for path in paths]
    first_ranks: dict[str, int] = {}  # by description of a path
    for path, rank in zip(paths, ranks, strict=True):
        description = " below ".join(path.endpoints) + (f" ({path.error})" if path.error else "")
        first_ranks.setdefault(description, rank)
    raise SwitchError(
        "the switches of this group's ranks have no common parent: "
        + "; ".join(f"rank {rank}'s is {description}" for description, rank in first_ranks.items())
        + ". Start the lower ones with --parent, or give all ranks the same NETFOLD_SWITCH"
    )


def path_message(access: SwitchAccess, timeout_s: float) -> Message:
    """A worker's path as a message for another worker; with `refused`, why there is none."""
    try:
        return {"type": "path_to_root", **query_path_to_root(access, timeout_s)._asdict()}
    except SwitchError as error:
        return {"type": "path_to_root", "refused": str(error)}


def check_size(workers: int) -> None:
    """Raise ValueError where a job has more workers than a tree of switches takes."""
    if workers > MAX_JOB_WORKERS:
        raise ValueError(
            f"switches add for at most {MAX_JOB_WORKERS} workers of a job, not {workers}: unset NETFOLD_SWITCH, or let "
            "ranks of a host share memory (algorithm hierarchical:in_network), so that one rank of a host joins"
        )


def trees_of(messages: Mapping[int, Message], workers: Sequence[int], rank: int) -> list[list[Any] | None]:
    """By worker, the `tree` of its join; None for all where all join one switch. From all workers' path messages.

    messages: by rank.
    rank: this one, which an error of another rank is told by.
    Raises SwitchError where a message has `refused`, where the paths form no tree, and for a switch to which too many
    workers and switches would contribute.
    """
    # This rank's own reason first.
    for worker in sorted(workers, key=lambda each: each != rank):
        if "refused" in messages[worker]:
            text = str(messages[worker]["refused"])
            raise SwitchError(text if worker == rank else f"rank {rank}: {text}")
    paths = [PathToRoot(*(messages[worker][name] for name in PathToRoot._fields)) for worker in workers]
    try:
        cut = common_tree(paths, workers)
        trees = levels_by_worker(cut, workers)
        _check_contributors(trees, paths)
    except SwitchError as error:
        raise SwitchError(f"rank {rank}: {error}") from None
    except ValueError as error:  # the ranks asked at different times
        raise SwitchError(f"rank {rank}: {error}: was a switch started again just now?") from None
    return [None] * len(trees) if all(len(path) == 1 for path in cut) else list(trees)


def _check_contributors(trees: Sequence[list[Any]], paths: Sequence[PathToRoot]) -> None:
    checked: set[int] = set()
    for tree, path in zip(trees, paths, strict=True):
        for place, (switch, contributors) in enumerate(tree):
            if switch not in checked and len(contributors) > protocol.MAX_WORKERS:
                what = "ranks" if all(len(each) == 2 for each in contributors) else "ranks and switches"
                raise SwitchError(
                    f"{len(contributors)} {what} join the switch at {path.endpoints[place].partition('#')[0]}, and one "
                    f"switch adds for at most {protocol.MAX_WORKERS}: start several switches below it (netfold switch "
                    "--parent), and let NETFOLD_SWITCH of each rank name the one of its rack"
                )
            checked.add(switch)
