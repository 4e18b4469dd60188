"""Collectives on any buffer, without torch.

A `Group` takes addresses and sizes. Its ranks share a mesh of authenticated connections, a choice table and, with
NETFOLD_SWITCH, membership of jobs on switches. A `Communicator` is a Group for arrays of any kind.

`startup` makes a group, over a `meeting` of its ranks, `reconfigure` the next one, `failure_report` its exceptions.
`membership`, `switch_tree` and `switch_watch` are about a switch; `recovery`, `recovery_machine` and `recovery_plan`
about its loss. `connection_manager` repairs connections and reports status. May import: bootstrap, tuning, profile's
records, switch_protocol and the native engine.

Always: a peer proved that it knows the job's secret before its bytes are used; all ranks hold the same table; a wait
has a deadline; an error names the rank.

Tests: `.venv/bin/pytest core/tests/communicator`
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
