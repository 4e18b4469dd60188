"""An emulated rack on one machine: a network namespace for each host and for the switch, and a shaped link to each.

    h0 [eth0 10.77.0.1]---h0+
    h1 [eth0 10.77.0.2]---h1+ br0 [switch 10.77.0.254]      every link: one rate and one loss, both ways
    h2 [eth0 10.77.0.3]---h2+

    or several racks, each with its own switch and an uplink to a core, where the aggregator is:

    h0---h0+ br0 [10.77.0.253] uplink---rack0+
    h1---h1+                                 + br0 [switch 10.77.0.254]
    h2---h2+ br0 [10.77.0.252] uplink---rack1+

May use the standard library and iproute2 (`ip`, `tc`); with loss also nftables (`nft`) and ethtool. No torch.

Invariants: nothing is created outside the rack's namespaces. When a rack ends, its processes and namespaces are
removed; after SIGKILL the reaper process removes them, and where that is killed too, `netfold rack down` does. Only
processes inside the rack's namespaces, or started by this rack, are signalled.

Tests (as root): `.venv/bin/pytest lab/tests/rack`
"""

from netfold_lab.rack.command import RackError
from netfold_lab.rack.rack import Rack

__all__ = ["Rack", "RackError"]
