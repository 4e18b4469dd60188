"""Names in a rack: namespaces, interfaces, addresses, a worker's environment. Pure."""

import re

PREFIX = "nf-"
BRIDGE = "br0"
# Interface names are local to a namespace, so every host can use the usual name.
HOST_INTERFACE = "eth0"
SUBNET = "10.77.0"
SUBNET_BITS = 24
SWITCH_ADDRESS = f"{SUBNET}.254"
SWITCH_PORT = 7171
MASTER_PORT = 29500
# Racks below one core. Each has its own switch, with an address below the core's .254.
RACKS_MAX = 8
# .1 to .245: the addresses of the /24 that the switches do not use.
HOSTS_MAX = 253 - RACKS_MAX

_NAMESPACE = re.compile(rf"^{PREFIX}(?P<rack_id>[0-9a-f]+)-(switch|rack\d+|aggregator|h\d+)$")


def switch_namespace(rack_id: str) -> str:
    """Return the namespace of the central switch: the only rack's, or the core between several racks."""
    return f"{PREFIX}{rack_id}-switch"


def rack_namespace(rack_id: str, rack: int) -> str:
    """Return the namespace of a rack's own switch, where there are several racks."""
    return f"{PREFIX}{rack_id}-rack{rack}"


def aggregator_namespace(rack_id: str) -> str:
    """Return the namespace of the aggregator, where it is a host behind its own link."""
    return f"{PREFIX}{rack_id}-aggregator"


def host_namespace(rack_id: str, host: int) -> str:
    return f"{PREFIX}{rack_id}-h{host}"


def rack_id_of(namespace: str) -> str | None:
    """Return the id of the rack that `namespace` belongs to; None where it belongs to none."""
    match = _NAMESPACE.match(namespace)
    return match["rack_id"] if match else None


def port_name(host: int) -> str:
    """Return the name of the switch's end of the link to `host`."""
    return f"h{host}"


def uplink_names(rack: int) -> tuple[str, str]:
    """Return the names of both ends of a rack's uplink: the rack's, and the core's."""
    return "uplink", f"rack{rack}"


def rack_address(rack: int) -> str:
    """Return the address of a rack's own switch, where there are several racks."""
    return f"{SUBNET}.{253 - rack}"


def host_address(host: int) -> str:
    if not 0 <= host < HOSTS_MAX:
        raise ValueError(f"host {host} has no address: {SUBNET}.0/{SUBNET_BITS} holds 0 to {HOSTS_MAX - 1}")
    return f"{SUBNET}.{host + 1}"


def worker_environment(host: int, hosts: int, switch: str | None) -> dict[str, str]:
    """Return the variables that a launcher such as torchrun sets for the one worker of `host`, and NETFOLD_SWITCH."""
    environment = {
        "RANK": str(host),
        "LOCAL_RANK": "0",
        "WORLD_SIZE": str(hosts),
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": host_address(0),
        "MASTER_PORT": str(MASTER_PORT),
        "GLOO_SOCKET_IFNAME": HOST_INTERFACE,
        # All hosts share the cores of this machine.
        "OMP_NUM_THREADS": "1",
    }
    if switch is not None:
        environment["NETFOLD_SWITCH"] = switch
    return environment
