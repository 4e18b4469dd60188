"""A switch for i32 sums in the kernel (XDP), beside the switch in user space:

    .venv/bin/python lab/bench/xdp.py      # as root, two cores; needs clang, bpftool, libbpf-dev, ethtool

Each worker has a network namespace and a native veth to the switch's. This process is all workers: it keeps WINDOW
packets of each in flight, as single packets on the links, and has core 1 with the kernel's threads of the workers'
ends. The switch and the kernel's threads of its ends (threaded NAPI) have core 0. Their run times are a switch's cost,
softirqs included. A launch makes the switch anew; the switches take turns.

"Frames": a further pair of veths turns packets into XDP frames on core 1, so that they reach the switch as a NIC would
bring them: without a copy for XDP, but with a UDP checksum that the user-space switch's kernel has to check.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import select
import shutil
import signal
import socket
import statistics
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import driver
import numpy as np
from driver import cell, take_turns

from netfold._native import dataplane, protocol
from netfold_lab.bench.spread import paired_ratios, spread
from netfold_lab.rack.command import run

HERE = Path(__file__).parent
VALUES = protocol.ETHERNET_PAYLOAD_BYTES // 4
PACKET = protocol.HEADER_BYTES + 4 * VALUES
TRAIN = 44  # packets of one message to the kernel
WINDOW, SLOTS = 4 * TRAIN, 512  # a veth queues 256 packets, and drops those beyond
CHECKED = 8  # every eighth message of results
DATA_PORT, WORKER_PORT = 7777, 7000
UDP_SEGMENT, UDP_GRO, SO_SNDBUFFORCE, SO_RCVBUFFORCE = 103, 104, 32, 33  # of the kernel; Python has no names
PRIORITY = -19  # of all that is measured, before the machine's other work
GOAL = 1.5  # times user space


# A sample of core 0 belongs to the first of these that any frame of its stack matches.
PLACES = (
    ("a copy of the packet, so that XDP may write", r"skb_pp_cow_data"),
    ("a copy of a result for each worker", r"xdpf_clone|bpf_clone_redirect"),
    ("sending results", r"sendmmsg|bq_xmit_all|dev_map_enqueue"),
    ("checking UDP checksums", r"csum_partial"),
    ("receiving from the socket", r"recvmmsg|epoll"),
    ("adding, and the switch's other own code", r"bpf_prog|bpf_spin|netfold|_native"),
    ("GRO, UDP, IP", r"gro|netif_receive"),
    ("the links' ends", r"veth|page_frag|napi"),
)
ELSEWHERE = "elsewhere"


@dataclass(frozen=True)
class Switch:
    """cuts: its links cut super-packets, as cards do. program: of bench/xdp.bpf.c; none: in user space."""

    name: str
    cuts: bool = False
    program: str = ""


USER = Switch("user space, results cut by the link", cuts=True)
SWITCHES = (
    USER,
    Switch("user space, results cut by the kernel"),
    Switch("XDP, the kernel copies each result", program="broadcast"),
    Switch("XDP, results joined by GRO and cloned in tc", cuts=True, program="join"),
)


PROGRAMS = [switch for switch in SWITCHES if switch.program]


def enter(namespace: str) -> None:
    """Move this thread into a network namespace; sockets stay where they were made."""
    with open(f"/run/netns/{namespace}") as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), 0) != 0:
            raise OSError(ctypes.get_errno(), f"setns {namespace}")


class Net:
    """The namespaces nfxs (switch), nfxm (between, for frames) and nfxw0.. (workers), and their links."""

    def __init__(self, workers: int, folder: Path) -> None:
        self.threads: list[int] = []  # the last launched switch's, the kernel's of its ends included
        self.workers, self.object, self.pins = workers, folder / "xdp.o", folder / "pins"
        self.spaces = ["nfxs", "nfxm", *(f"nfxw{w}" for w in range(workers))]
        sizes = [f"-D{name}={value}" for name, value in (("WORKERS", workers), ("SLOTS", SLOTS), ("VALUES", VALUES))]
        include = f"-I/usr/include/{os.uname().machine}-linux-gnu"
        options = ["-O2", "-g", "-target", "bpf", "-mcpu=v3", include, *sizes]
        run(["clang", *options, "-c", str(HERE / "xdp.bpf.c"), "-o", str(self.object)])

    def build(self, frames: bool) -> None:
        self.pins.mkdir()
        run(["mount", "-t", "bpf", "bpf", str(self.pins)])
        for space in self.spaces:
            run(["ip", "netns", "add", space])
        for w in range(self.workers):
            switch, worker = ("nfxs", f"nfxs{w}", f"02:00:00:00:01:{w:02x}"), (f"nfxw{w}", f"nfxw{w}", MAC.format(w))
            if frames:
                veth(switch, ("nfxm", f"nfxn{w}", f"02:00:00:00:03:{w:02x}"))
                veth(("nfxm", f"nfxm{w}", f"02:00:00:00:04:{w:02x}"), worker)
                ethtool(*worker[:2], tx="off")  # a frame cannot say that its checksum is still to come
                ethtool("nfxm", f"nfxm{w}", tx_udp_segmentation="on")
            else:
                veth(switch, worker)
            for (space, end, _), (_, _, mac), host in ((switch, worker, 1), (worker, switch, 2)):
                run(["ip", "-n", space, "address", "add", f"10.9.{w}.{host}/24", "dev", end])
                other = f"10.9.{w}.{3 - host}"
                run(["ip", "-n", space, "neigh", "replace", other, "lladdr", mac, "nud", "permanent", "dev", end])
        if frames:
            self.load("between")
            for w in range(self.workers):
                near, far = index("nfxm", f"nfxm{w}"), index("nfxm", f"nfxn{w}")
                self.store("between/onward", near, far, space="nfxm")
                self.store("between/backward", far, near)
                self.attach("between/forward", "nfxm", f"nfxm{w}")
                self.attach("between/back", "nfxm", f"nfxn{w}", tc=True)

    def load(self, name: str) -> None:
        """Load the programs with maps of their own, pinned in the folder `name`."""
        at = str(self.pins / name)
        run(["bpftool", "prog", "loadall", str(self.object), at, "pinmaps", at])

    def store(self, pinned: str, key: int, value: int, space: str = "nfxs") -> None:
        """Store in a map; interfaces are those of `space`."""
        enter(space)
        numbers = (hex_bytes(key), hex_bytes(value))
        run(["bpftool", "map", "update", "pinned", str(self.pins / pinned), "key", *numbers[0], "value", *numbers[1]])

    def attach(self, pinned: str, space: str, end: str, tc: bool = False) -> None:
        at = str(self.pins / pinned)
        if tc:
            run(["tc", "-n", space, "qdisc", "replace", "dev", end, "clsact"])
            run(["tc", "-n", space, "filter", "add", "dev", end, "ingress", "bpf", "da", "object-pinned", at])
        else:
            run(["ip", "-n", space, "link", "set", end, "xdpdrv", "pinned", at])


@contextlib.contextmanager
def open_net(workers: int, frames: bool) -> Iterator[Net]:
    with tempfile.TemporaryDirectory(prefix="netfold-bench-") as folder:
        net = Net(workers, Path(folder))
        try:
            net.build(frames)
            yield net
        finally:
            for space in net.spaces:
                subprocess.run(["ip", "netns", "del", space], check=False)
            subprocess.run(["umount", str(net.pins)], check=False)


MAC = "02:00:00:00:02:{:02x}"


def veth(one: tuple[str, str, str], other: tuple[str, str, str]) -> None:
    """Make a link between two ends (namespace, interface, MAC): GRO, a thread for NAPI, no segmentation offload."""
    queues = ["numtxqueues", "1", "numrxqueues", "1"]
    peer = ["netns", other[0], "name", other[1], "address", other[2], *queues]
    run(["ip", "-n", one[0], "link", "add", one[1], "address", one[2], *queues, "type", "veth", "peer", *peer])
    for space, end, _ in (one, other):
        run(["ip", "-n", space, "link", "set", end, "up", "promisc", "on"])
        ethtool(space, end, gro="on", tso="off", tx_udp_segmentation="off")
        run(["ip", "netns", "exec", space, "sh", "-c", f"echo 1 > /sys/class/net/{end}/threaded"])


def ethtool(space: str, end: str, **features: str) -> None:
    named = (word for name, value in features.items() for word in (name.replace("_", "-"), value))
    run(["ip", "netns", "exec", space, "ethtool", "-K", end, *named])


def index(space: str, end: str) -> int:
    enter(space)
    return socket.if_nametoindex(end)


def hex_bytes(number: int) -> list[str]:
    return ["hex", *(f"{byte:02x}" for byte in number.to_bytes(4, "little"))]


def threads(*prefixes: str) -> list[int]:
    """The kernel's NAPI threads of interfaces."""
    found = []
    for path in Path("/proc").glob("[0-9]*/comm"):
        with contextlib.suppress(OSError):  # the process has ended
            if path.read_text().startswith(tuple(f"napi/{prefix}" for prefix in prefixes)):
                found.append(int(path.parent.name))
    return found


def ran_s(pids: list[int]) -> float:
    return sum(int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) for pid in pids) / 1e9


class Workers:
    """All workers of a job. Values differ by worker, element and place in a train; SLOTS is no multiple of TRAIN."""

    def __init__(self, count: int) -> None:
        self.sockets, self.packets = [], []
        values = np.arange(TRAIN * VALUES, dtype=np.uint32).reshape(TRAIN, VALUES) * np.uint32(2654435761)
        self.due = values * np.uint32(count) + np.uint32(1000003 * count * (count - 1) // 2)
        self.have, self.got = [0] * count, np.zeros((count, SLOTS), bool)
        self.wrong, self.checked = 0, 0
        for w in range(count):
            enter(f"nfxw{w}")
            made = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            made.setsockopt(socket.SOL_UDP, UDP_GRO, 1)
            for option in (SO_SNDBUFFORCE, SO_RCVBUFFORCE):
                made.setsockopt(socket.SOL_SOCKET, option, 16 << 20)
            made.bind(("0.0.0.0", WORKER_PORT))
            group = socket.inet_aton("239.9.9.9") + socket.inet_aton(f"10.9.{w}.2")
            made.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, group)
            self.sockets.append(made)
            packets = np.empty((TRAIN, PACKET), np.uint8)
            packets[:, : protocol.HEADER_BYTES] = np.frombuffer(header(w, VALUES).pack(), np.uint8)
            packets[:, protocol.HEADER_BYTES :] = (values + np.uint32(1000003 * w)).view(np.uint8)
            self.packets.append(packets)

    def hello(self, port: int) -> None:
        for w, made in enumerate(self.sockets):
            packet = header(w, 0)
            packet.flags, packet.packet_number = protocol.FLAGS["hello"], w + 1
            made.sendto(packet.pack() + bytes(4 * VALUES), (f"10.9.{w}.1", port))
            made.recv(PACKET)

    def send(self, w: int, chunk: int, packets: int, port: int) -> None:
        """Send the contributions to `packets` chunks, a train at most, the first of which is `chunk`."""
        first = chunk % TRAIN
        some = self.packets[w][first : first + packets]
        chunks = np.arange(chunk, chunk + packets, dtype=">u8")
        some[:, 16:24] = chunks.view(np.uint8).reshape(-1, 8)
        some[:, 24:32] = (chunks + 1).astype(">u8").view(np.uint8).reshape(-1, 8)
        cut = [(socket.SOL_UDP, UDP_SEGMENT, PACKET.to_bytes(2, "little"))] if packets > 1 else []
        self.sockets[w].sendmsg([some.tobytes()], cut, 0, (f"10.9.{w}.1", port))

    def receive(self, w: int, check: bool) -> int:
        """Receive results of worker `w`, in any order; returns how many."""
        try:
            received = self.sockets[w].recv(1 << 16, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0
        packets = np.frombuffer(received, np.uint8).reshape(-1, PACKET)
        chunks = packets[:, 16:24].copy().view(">u8")[:, 0].astype(int)
        have, got = self.have[w], self.got[w]
        if chunks.min() < have or chunks.max() >= have + WINDOW or got[chunks % SLOTS].any() or packets[0, 3] != 1:
            raise SystemExit(f"worker {w} has results up to chunk {have}, and received {chunks}")
        got[chunks % SLOTS] = True
        window = np.arange(have, have + SLOTS) % SLOTS
        run_length = int(got[window].argmin())
        got[window[:run_length]] = False
        self.have[w] += run_length
        if check:
            sums = packets[:, protocol.HEADER_BYTES :].copy().view(np.uint32)
            self.checked += len(packets)
            self.wrong += int((sums != self.due[chunks % TRAIN]).any(1).sum())
        return len(packets)

    def stream(self, trains: int, port: int) -> None:
        """Send `trains` of each worker, with at most WINDOW packets in flight."""
        sent, last = self.have.copy(), self.have[0] + trains * TRAIN
        poll, messages = select.poll(), 0
        for made in self.sockets:
            poll.register(made, select.POLLIN)
        while min(self.have) < last:
            moved = 0
            for w in range(len(sent)):
                if sent[w] < last and sent[w] + TRAIN - self.have[w] <= WINDOW:
                    self.send(w, sent[w], TRAIN, port)
                    sent[w] += TRAIN
                    moved += 1
                received = self.receive(w, messages % CHECKED == 0)
                messages += received > 0
                moved += received
            if not moved and not poll.poll(2000):
                raise SystemExit(f"packets were lost: sent {sent}, results {self.have}")

    def round_trips(self, rounds: int, port: int) -> list[float]:
        """Seconds from the first worker's packet to the last worker's result, one chunk in flight."""
        seconds = []
        for _ in range(rounds):
            chunk, began = self.have[0], time.perf_counter()
            for w in range(len(self.sockets)):
                self.send(w, chunk, 1, port)
            for w in range(len(self.sockets)):
                while not self.receive(w, check=False):
                    select.select([self.sockets[w]], [], [], 2)
            seconds.append(time.perf_counter() - began)
        return seconds


def header(worker: int, count: int) -> protocol.Header:
    made = protocol.Header()
    fields = {"job": 1, "epoch": 1, "incarnation": 1, "operation": 1, "elements": VALUES, "worker": worker}
    for name, value in {**fields, "count": count, "wire": 6}.items():
        setattr(made, name, value)
    return made


@contextlib.contextmanager
def in_user_space(workers: Workers) -> Iterator[tuple[int, list[int]]]:
    """The data plane of netfold's switch, in this process: its port and thread."""
    count = len(workers.sockets)
    before = set(os.listdir("/proc/self/task"))
    plane = dataplane.DataPlane(core=0)
    (thread,) = set(os.listdir("/proc/self/task")) - before
    enter("nfxs")
    port = plane.open(1, 1, "0.0.0.0", [w + 1 for w in range(count)], [], 16 << 20)
    for w in range(count):
        plane.set_worker_address(1, w, f"10.9.{w}.2", WORKER_PORT, f"10.9.{w}.1")
    workers.hello(port)
    job = {"job": 1, "epoch": 1, "incarnation": 1, "workers": count, "window": WINDOW}
    plane.begin(**job, payload_bytes=4 * VALUES, keys=None)
    try:
        yield port, [int(thread)]
    finally:
        plane.close(1)


@contextlib.contextmanager
def in_kernel(net: Net, switch: Switch) -> Iterator[tuple[int, list[int]]]:
    net.load("switch")
    for w in range(net.workers):
        end = index("nfxs", f"nfxs{w}")
        net.store("switch/ports", w, end)
        net.store("switch/indices", w, end)
        net.attach(f"switch/{switch.program}", "nfxs", f"nfxs{w}")
        if switch.cuts:
            net.attach("switch/copies", "nfxs", f"nfxs{w}", tc=True)
    try:
        yield DATA_PORT, []
    finally:
        for w in range(net.workers):
            run(["ip", "-n", "nfxs", "link", "set", f"nfxs{w}", "xdpdrv", "off"])
            if switch.cuts:
                run(["tc", "-n", "nfxs", "qdisc", "del", "dev", f"nfxs{w}", "clsact"])
        shutil.rmtree(net.pins / "switch")


@contextlib.contextmanager
def real_time(pids: list[int]) -> Iterator[None]:
    """A thread that wakes up does not wait for the machine's other work. `launch` takes it back from the kernel's."""
    for pid in pids:
        os.sched_setscheduler(pid, os.SCHED_FIFO, os.sched_param(1))
    yield
    os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


def launch(net: Net, switch: Switch, trains: int, rounds: int) -> dict[str, float]:
    for w in range(net.workers):
        offload = "on" if switch.cuts else "off"
        ethtool("nfxs", f"nfxs{w}", tx_udp_segmentation=offload, rx_udp_gro_forwarding=offload)
    workers = Workers(net.workers)
    made = in_kernel(net, switch) if switch.program else in_user_space(workers)
    with made as (port, own):
        ends = threads("nfxs")
        net.threads = ends + own
        far = threads("nfxw", "nfxm", "nfxn")
        for pid in [*ends, *far]:
            os.sched_setaffinity(pid, {0 if pid in ends else 1})
            os.sched_setscheduler(pid, os.SCHED_OTHER, os.sched_param(0))  # of an earlier launch
            os.setpriority(os.PRIO_PROCESS, pid, PRIORITY)
        workers.stream(8, port)
        before = ran_s(ends + own), ran_s(own)
        workers.stream(trains, port)
        cost, own_s = ran_s(ends + own) - before[0], ran_s(own) - before[1]
        with real_time([*ends, *own, *far, 0]):
            seconds = workers.round_trips(rounds, port)
    for each in workers.sockets:
        each.close()
    contributions = trains * TRAIN * net.workers
    return {
        "us": cost / contributions * 1e6,
        "own_us": own_s / contributions * 1e6,
        "gbit": contributions * VALUES * 32 / cost / 1e9,
        "round_trip_us": statistics.median(seconds or [0.0]) * 1e6,
        "wrong": workers.wrong,
        "checked": workers.checked,
    }


def samples(net: Net, switch: Switch, trains: int) -> Counter[str]:
    """One more launch under perf: core 0's samples of the switch's threads, by place."""
    with tempfile.NamedTemporaryFile() as data:
        argv = ["perf", "record", "-q", "-e", "cpu-clock", "-F", "1999", "-C", "0", "-g", "-o", data.name]
        perf = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        launch(net, switch, trains, 0)
        perf.send_signal(signal.SIGINT)
        perf.wait(60)
        stacks = run(["perf", "script", "-i", data.name, "-F", "tid,ip,sym,dso"]).split("\n\n")
    of_switch = [stack for stack in stacks if stack.split()[:1] in ([str(thread)] for thread in net.threads)]
    return Counter(next((name for name, of in PLACES if re.search(of, stack)), ELSEWHERE) for stack in of_switch)


def xdp(launches: int = 5, contributions: int = 150_000, rounds: int = 300, workers: str = "2,4,8") -> str:
    """The switch for i32 sums in the kernel (XDP)"""
    missing = [name for name in ("clang", "bpftool", "ethtool", "tc", "perf") if shutil.which(name) is None]
    if missing or os.geteuid() != 0 or not Path("/usr/include/bpf/bpf_helpers.h").exists():
        raise SystemExit(f"lab/bench/xdp.py needs root, libbpf-dev, clang, bpftool, ethtool, tc, perf; missing: {missing}")
    os.sched_setaffinity(0, {1})
    os.setpriority(os.PRIO_PROCESS, 0, PRIORITY)
    rows, ratios, shares = [], [], {}
    with open("/proc/self/ns/net") as here:
        for frames, count in ((frames, int(count)) for frames in (False, True) for count in workers.split(",")):
            trains = contributions // count // TRAIN
            brought = "frames" if frames else "packets"
            with open_net(count, frames) as net:
                found = take_turns(SWITCHES, launches, lambda switch: launch(net, switch, trains, rounds))  # noqa: B023
                for switch in (USER, *PROGRAMS) if count == int(workers.split(",")[-1]) else ():
                    shares[f"{brought}: {switch.name}"] = samples(net, switch, trains)
                ctypes.CDLL(None).setns(here.fileno(), 0)
            for switch, taken in found.items():
                column = {key: [row[key] for row in taken] for key in taken[0]}
                times = paired_ratios(column["gbit"], [row["gbit"] for row in found[USER]])
                if switch.program and not frames:
                    ratios.append(spread(times).median)
                shown = [cell(column["gbit"]), cell(times), f"{spread(column['us']).median:.2f}"]
                shown += [f"{spread(column['own_us']).median:.2f}", cell(column["round_trip_us"], ".0f")]
                wrong = f"{sum(column['wrong']):.0f} of {sum(column['checked']):.0f}"
                rows.append([brought, count, switch.name, *shown, wrong])
    head = "links bring | workers | switch | Gbit/s per CPU-second | times the first | CPU time of a contribution, us "
    head += "| of it the switch's thread | 8 B, us | wrong results"
    places = [
        [place, *(f"{of[place] / max(1, of.total()):.0%}" for of in shares.values())]
        for place in [*(name for name, _ in PLACES), ELSEWHERE]
    ]
    verdict = "met" if min(ratios) >= GOAL else "missed"
    return f"""Contributions of {VALUES} values each, MTU 1500, {WINDOW} packets of each worker in flight; {launches}
launches of each switch, in turns. Neither switch checks a MAC. Medians, with 5% .. 95%; `times the first` is paired by
round. The CPU time is that of the switch's thread and of the kernel's threads of its links. `8 B`: from the first
worker's packet to the last worker's result, with the time of the process that is all workers. Of every {CHECKED}
messages of results one is compared with the sum, value by value. `frames`: links bring XDP frames, as a NIC's driver
does; XDP then needs no copy, but user space checks UDP checksums that a NIC would check.

{driver.table(head, rows)}

Goal: XDP {GOAL} times user space where links bring packets. Found: {min(ratios):.2f} to {max(ratios):.2f}; {verdict}.

The switch's time on core 0 with {count} workers (perf's samples):

{driver.table(" | ".join(["", *shares]), places)}"""


if __name__ == "__main__":
    driver.run(xdp)
