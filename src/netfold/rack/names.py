"""What things in a rack are called: namespaces, interfaces, addresses, a worker's environment. Pure."""

import re

PREFIX = "nf-"
BRIDGE = "br0"
# A namespace has its own names, so every host can call its one link what a user expects.
HOST_INTERFACE = "eth0"
SUBNET = "10.77.0"
SUBNET_BITS = 24
SWITCH_ADDRESS = f"{SUBNET}.254"
SWITCH_PORT = 7171
MASTER_PORT = 29500
# .1 to .253: what the /24 leaves beside the switch's .254.
HOSTS_MAX = 253

_NAMESPACE = re.compile(rf"^{PREFIX}(?P<rack_id>[0-9a-f]+)-(switch|h\d+)$")


def switch_namespace(rack_id: str) -> str:
    return f"{PREFIX}{rack_id}-switch"


def host_namespace(rack_id: str, host: int) -> str:
    return f"{PREFIX}{rack_id}-h{host}"


def rack_id_of(namespace: str) -> str | None:
    """The id of the rack that `namespace` belongs to, or None where the name is not one of ours."""
    match = _NAMESPACE.match(namespace)
    return match["rack_id"] if match else None


def port_name(host: int) -> str:
    """The switch's end of the link to `host`."""
    return f"h{host}"


def host_address(host: int) -> str:
    if not 0 <= host < HOSTS_MAX:
        raise ValueError(f"host {host} has no address: {SUBNET}.0/{SUBNET_BITS} holds 0 to {HOSTS_MAX - 1}")
    return f"{SUBNET}.{host + 1}"


def worker_environment(host: int, hosts: int, switch: str | None) -> dict[str, str]:
    """What a launcher such as torchrun would set for the one worker of `host`, and where the switch is."""
    environment = {
        "RANK": str(host),
        "LOCAL_RANK": "0",
        "WORLD_SIZE": str(hosts),
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": host_address(0),
        "MASTER_PORT": str(MASTER_PORT),
        "GLOO_SOCKET_IFNAME": HOST_INTERFACE,
        # All hosts share this machine's cores.
        "OMP_NUM_THREADS": "1",
    }
    if switch is not None:
        environment["NETFOLD_SWITCH"] = switch
    return environment
