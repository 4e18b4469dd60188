"""An emulated rack on one machine: a network namespace a host, one for the switch, a shaped link each.

    h0 [eth0 10.77.0.1]---h0+
    h1 [eth0 10.77.0.2]---h1+ br0 [switch 10.77.0.254]      every link: one rate both ways, loss both ways
    h2 [eth0 10.77.0.3]---h2+

    or several, each with a switch of its own, and an uplink to a core, where the aggregator is:

    h0---h0+ br0 [10.77.0.253] uplink---rack0+
    h1---h1+                                 + br0 [switch 10.77.0.254]
    h2---h2+ br0 [10.77.0.252] uplink---rack1+

May use: the standard library and iproute2 (`ip`, `tc`), and with loss nftables (`nft`) and ethtool. No torch.
Must always hold: nothing is created outside our own namespaces; when a rack ends, its processes and namespaces
are gone, after SIGKILL a moment later (`reaper`); where the reaper is killed too, `netfold rack down` does it; only
processes inside our namespaces, or started by this rack, are ever signalled.
One command that tests it (as root): pytest tests/rack
"""

from netfold.rack.command import RackError
from netfold.rack.rack import Rack

__all__ = ["Rack", "RackError"]
