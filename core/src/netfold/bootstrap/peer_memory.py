"""Whether the ranks of a node may read each other's memory: every pair tries, and all agree.

The kernel decides by users, capabilities, Yama and namespaces, so every rank reads a mark from every other's memory.
A rank names itself by its process id. Where the id is of another pid namespace, the mark is not there. All ranks of a
node use single-copy, or none does, since a sender must know how its memory is read.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from netfold._native import engine
from netfold.bootstrap.shm_discovery import Exchange, Node

_REASON_CHARACTERS = 500


def negotiate(
    node: Node | None, rank: int, candidates: Sequence[int], exchange: Exchange, *, enabled: bool
) -> tuple[Any, str]:
    """A reader of the other ranks' memory, None where some rank of the node may not read; and a sentence that says so.

    Every candidate takes part, also one that is alone (node: None): the exchange needs all. Raises RendezvousError if a
    rank is gone, or does not reply before the deadline.
    """
    if len(candidates) == 1:
        return None, ""
    memory, reason = None, f"rank {rank} has NETFOLD_SINGLE_COPY=off"
    if enabled and node is not None:
        memory, reason = _own(len(node.ranks))
    offer = None if memory is None else [os.getpid(), memory.address, memory.mark]
    offers = dict(zip(candidates, exchange.all_gather(offer), strict=True))
    if memory is not None and node is not None:
        for position, peer in enumerate(node.ranks):
            if peer == rank or offers[peer] is None:
                continue
            why = memory.probe(position, *offers[peer])
            if why:
                reason = f"rank {rank} cannot read the memory of rank {peer}: {why}"
                break
    reasons = dict(zip(candidates, exchange.all_gather(reason[:_REASON_CHARACTERS]), strict=True))
    if node is None:
        return None, ""
    refusals = [reasons[peer] for peer in node.ranks if reasons[peer]]
    if refusals:
        return None, f"two copies through slots, since {refusals[0]}"
    return memory, "one copy, each rank reads the others' memory"


def _own(size: int) -> tuple[Any, str]:
    try:
        return engine.PeerMemory(size), ""
    except OSError as error:
        return None, str(error)
