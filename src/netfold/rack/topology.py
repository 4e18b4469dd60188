"""The commands that build a rack, in order. Pure: a list that a test, or a reader, can look at."""

from dataclasses import dataclass

from netfold.rack import names
from netfold.rack.link import Link, loss_rules, shape_command, single_packets_command


@dataclass(frozen=True)
class Step:
    argv: list[str]
    stdin: str = ""


def build_steps(rack_id: str, hosts: int, link: Link) -> list[Step]:
    """A bridge in the switch's namespace, and for every host a namespace and a link to the bridge."""
    switch = names.switch_namespace(rack_id)
    steps = [
        _step("ip", "netns", "add", switch),
        _step("ip", "-netns", switch, "link", "add", names.BRIDGE, "type", "bridge"),
        _step(*_address_add(switch, names.SWITCH_ADDRESS, names.BRIDGE)),
        _step("ip", "-netns", switch, "link", "set", "lo", "up"),
        _step("ip", "-netns", switch, "link", "set", names.BRIDGE, "up"),
    ]
    for host in range(hosts):
        steps += _host_steps(rack_id, host, link)
    return steps


def _host_steps(rack_id: str, host: int, link: Link) -> list[Step]:
    switch, namespace = names.switch_namespace(rack_id), names.host_namespace(rack_id, host)
    port, interface = names.port_name(host), names.HOST_INTERFACE
    ends = [(switch, port), (namespace, interface)]
    steps = [
        _step("ip", "netns", "add", namespace),
        # Both ends are born inside their namespaces: nothing of ours is ever seen outside.
        _step(
            *("ip", "link", "add", interface, "netns", namespace, "type", "veth"),
            *("peer", "name", port, "netns", switch),
        ),
        _step("ip", "-netns", switch, "link", "set", port, "master", names.BRIDGE),
        _step(*_address_add(namespace, names.host_address(host), interface)),
        _step("ip", "-netns", namespace, "link", "set", "lo", "up"),
    ]
    for end, device in ends:
        steps.append(Step(shape_command(end, device, link)))
        if link.loss_ratio > 0:
            steps.append(Step(single_packets_command(end, device)))
            steps.append(Step(["ip", "netns", "exec", end, "nft", "-f", "-"], loss_rules(device, link)))
        steps.append(_step("ip", "-netns", end, "link", "set", device, "up"))
    return steps


def _address_add(namespace: str, address: str, device: str) -> list[str]:
    return ["ip", "-netns", namespace, "address", "add", f"{address}/{names.SUBNET_BITS}", "dev", device]


def _step(*argv: str) -> Step:
    return Step(list(argv))
