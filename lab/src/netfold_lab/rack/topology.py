"""The layout of a rack, and the commands that build it, in order. Pure."""

from dataclasses import dataclass

from netfold_lab.rack import names
from netfold_lab.rack.link import Link, loss_rules, shape_command, single_packets_command

# IPv6's minimum, and a veth's maximum.
MTU_MIN, MTU_MAX = 1280, 65535
# Frames that a TAP queues between the shaper and the thread that delays them, where the thread is late.
TAP_FRAMES = 4096


@dataclass(frozen=True)
class Layout:
    """Hosts in one rack, or in several racks of equal size; the first racks have one more where it does not divide.

    Raises ValueError for an impossible layout.
    """

    hosts: int
    link: Link  # of every host
    racks: int = 1
    uplink: Link | None = None  # of every rack to the core, where there are several racks
    aggregator: Link | None = None  # of the aggregator as a host at the core; None: it is in the switch's namespace
    mtu: int = 1500

    def __post_init__(self) -> None:
        if not 1 <= self.hosts <= names.HOSTS_MAX:
            raise ValueError(f"a rack has 1 to {names.HOSTS_MAX} hosts, not {self.hosts}")
        if not 1 <= self.racks <= min(names.RACKS_MAX, self.hosts):
            raise ValueError(
                f"{self.hosts} hosts stand in 1 to {min(names.RACKS_MAX, self.hosts)} racks, not {self.racks}"
            )
        if (self.uplink is None) != (self.racks == 1):
            raise ValueError("several racks need the rate of their uplinks, and one rack has no uplink")
        if not MTU_MIN <= self.mtu <= MTU_MAX:
            raise ValueError(f"an MTU is {MTU_MIN} to {MTU_MAX} bytes here, not {self.mtu}")

    @property
    def links(self) -> tuple[Link, ...]:
        return tuple(link for link in (self.link, self.uplink, self.aggregator) if link is not None)

    def rack_of(self, host: int) -> int:
        smaller, larger_racks = divmod(self.hosts, self.racks)
        in_larger = larger_racks * (smaller + 1)
        return host // (smaller + 1) if host < in_larger else larger_racks + (host - in_larger) // smaller

    def path(self, host: int, other: int | None) -> list[Link]:
        """Return the links between `host` and `other`, or the aggregator (None), in order."""
        here = self.rack_of(host)
        there = None if other is None else self.rack_of(other)
        up = [] if self.uplink is None or here == there else [self.uplink]
        if other is None:
            return [self.link, *up, *([] if self.aggregator is None else [self.aggregator])]
        return [self.link, *up, *up, self.link]


@dataclass(frozen=True)
class End:
    """One end of a link: an interface in a namespace."""

    namespace: str
    device: str


@dataclass(frozen=True)
class Step:
    """A command, or, where `ends` is given, a delayed link."""

    argv: list[str]
    stdin: str = ""
    ends: tuple[End, End] | None = None
    delay_ns: int = 0  # each way


def build_steps(rack_id: str, layout: Layout) -> list[Step]:
    """Return the steps: a bridge for every switch, and a link to a bridge for every host, uplink and aggregator."""
    core = names.switch_namespace(rack_id)
    aggregator = layout.aggregator
    steps = _bridge_steps(core, names.SWITCH_ADDRESS if aggregator is None else None, layout.mtu)
    switches = [core]
    if layout.uplink is not None:
        switches = [names.rack_namespace(rack_id, rack) for rack in range(layout.racks)]
        for rack, namespace in enumerate(switches):
            up, down = names.uplink_names(rack)
            steps += _bridge_steps(namespace, names.rack_address(rack), layout.mtu)
            steps += _link_steps(End(namespace, up), End(core, down), layout.uplink, layout.mtu)
            steps += [_to_bridge(namespace, up), _to_bridge(core, down)]
    for host in range(layout.hosts):
        namespace, switch = names.host_namespace(rack_id, host), switches[layout.rack_of(host)]
        steps += _host_steps(
            namespace, names.host_address(host), switch, names.port_name(host), layout.link, layout.mtu
        )
    if aggregator is not None:
        namespace = names.aggregator_namespace(rack_id)
        steps += _host_steps(namespace, names.SWITCH_ADDRESS, core, "aggregator", aggregator, layout.mtu)
    return steps


def _bridge_steps(namespace: str, address: str | None, mtu: int) -> list[Step]:
    inside = ["ip", "-netns", namespace, "link"]
    return [
        _step("ip", "netns", "add", namespace),
        _step(*inside, "add", names.BRIDGE, "mtu", str(mtu), "type", "bridge"),
        *([_step(*_address_add(namespace, address, names.BRIDGE))] if address is not None else []),
        _step(*inside, "set", "lo", "up"),
        _step(*inside, "set", names.BRIDGE, "up"),
    ]


def _host_steps(namespace: str, address: str, switch: str, port: str, link: Link, mtu: int) -> list[Step]:
    interface = names.HOST_INTERFACE
    return [
        _step("ip", "netns", "add", namespace),
        *_link_steps(End(namespace, interface), End(switch, port), link, mtu),
        _to_bridge(switch, port),
        _step(*_address_add(namespace, address, interface)),
        _step("ip", "-netns", namespace, "link", "set", "lo", "up"),
    ]


def _link_steps(one: End, other: End, link: Link, mtu: int) -> list[Step]:
    """Make a link between two existing namespaces, with both ends shaped and up."""
    # Create both ends inside their namespaces, so that no interface appears outside.
    if link.delay_ns == 0:
        first = _step(
            *("ip", "link", "add", one.device, "mtu", str(mtu), "netns", one.namespace, "type", "veth"),
            *("peer", "name", other.device, "mtu", str(mtu), "netns", other.namespace),
        )
    else:
        first = Step([], ends=(one, other), delay_ns=link.delay_ns)
    steps = [first]
    for end in (one, other):
        if link.delay_ns > 0:
            # A TAP's ring must hold more than the shaper, so that the shaper is the queue.
            options = ("mtu", str(mtu), "txqueuelen", str(TAP_FRAMES))
            steps.append(_step("ip", "-netns", end.namespace, "link", "set", end.device, *options))
        steps.append(Step(shape_command(end.namespace, end.device, link)))
        if link.loss_ratio > 0:
            steps.append(Step(single_packets_command(end.namespace, end.device)))
            steps.append(Step(["ip", "netns", "exec", end.namespace, "nft", "-f", "-"], loss_rules(end.device, link)))
        steps.append(_step("ip", "-netns", end.namespace, "link", "set", end.device, "up"))
    return steps


def _to_bridge(namespace: str, device: str) -> Step:
    return _step("ip", "-netns", namespace, "link", "set", device, "master", names.BRIDGE)


def _address_add(namespace: str, address: str, device: str) -> list[str]:
    return ["ip", "-netns", namespace, "address", "add", f"{address}/{names.SUBNET_BITS}", "dev", device]


def _step(*argv: str) -> Step:
    return Step(list(argv))
