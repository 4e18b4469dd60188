"""Collectives on any buffer, without torch: how a group of ranks comes together and what it can do.

A `Group` is ranks that share a mesh of authenticated connections, a choice table and, with NETFOLD_SWITCH, membership
of a job on a switch; it takes addresses and sizes. A `Communicator` is a Group for arrays of any kind. May import:
`netfold.switch_protocol.control_messages`, plan, profile's records, and the native engine.

Always: who talks to us proved that it knows the job's secret; all ranks hold the same table; a wait has a deadline; an
error names the rank.

Tests: `.venv/bin/pytest tests/communicator`
"""

from netfold.bootstrap.launchers import Placement, is_launched, placement
from netfold.bootstrap.store import FileStore, PrefixStore, Store
from netfold.bootstrap.tcp_store import TcpStore
from netfold.communicator.communicator import Communicator
from netfold.communicator.group import Group
from netfold.communicator.shared_arrays import empty
from netfold.communicator.work import Work
from netfold.errors import (
    CollectiveTimeout,
    GroupAborted,
    Mismatch,
    NetfoldError,
    PeerLost,
    RendezvousError,
    SwitchError,
    SwitchLost,
)
from netfold.options import Options

__all__ = [
    "CollectiveTimeout",
    "Communicator",
    "FileStore",
    "Group",
    "GroupAborted",
    "Mismatch",
    "NetfoldError",
    "Options",
    "PeerLost",
    "Placement",
    "PrefixStore",
    "RendezvousError",
    "Store",
    "SwitchError",
    "SwitchLost",
    "TcpStore",
    "Work",
    "empty",
    "is_launched",
    "placement",
]
