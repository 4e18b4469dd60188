"""A simple_switch that runs core/native/p4/netfold.p4 between raw sockets, in a network namespace of its own."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import socket
import struct
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from load import Deadline, seconds

from netfold._native import protocol
from netfold.switch.bmv2 import Bmv2, Host, PipelineError
from netfold_lab.rack.command import run, why_unavailable
from netfold_lab.rack.processes import spawn, stop

ROOT = Path(__file__).parents[3]
PROGRAMS = ("p4c-bm2-ss", "simple_switch")
SWITCH_IP, DATA_PORT = "10.9.0.100", 7172
SWITCH_MAC = bytes.fromhex("02000000ff00")
THRIFT_PORT = 9090
INCARNATION = 0xFEED5EED
_CLONE_NEWNET = 0x40000000
_PROBE_TYPE = 0x88B5  # for experiments within one network
_LIBC = ctypes.CDLL(None, use_errno=True)


def why_no_pipeline() -> str | None:
    absent = [program for program in PROGRAMS if shutil.which(program) is None]
    if absent:
        return f"{' and '.join(absent)}, of p4lang/p4c and p4lang/behavioral-model, are not on the PATH"
    return why_unavailable(loss=False)


_LACK = why_no_pipeline()
# The marks of a module whose tests run a pipeline.
NEEDS_PIPELINE = [pytest.mark.rack, pytest.mark.skipif(_LACK is not None, reason=f"no P4 pipeline can be run: {_LACK}")]


def compile_program(folder: Path, values: int, slots: int, jobs: int = 16) -> Path:
    """Compile core/native/p4/netfold.p4 for simple_switch, with `values` in a packet."""
    out = folder / f"netfold-{values}-{slots}-{jobs}.json"
    defines = [f"-DNETFOLD_VALUES={values}", f"-DNETFOLD_SLOTS={slots}", f"-DNETFOLD_JOBS={jobs}"]
    source = ROOT / "core" / "native" / "p4" / "netfold.p4"
    argv = ["p4c-bm2-ss", "--Werror", *defines, "-o", str(out), str(source)]
    made = subprocess.run(argv, capture_output=True, text=True, timeout=seconds(300))
    assert made.returncode == 0, made.stderr
    return out


@contextlib.contextmanager
def inside(namespace: str) -> Iterator[None]:
    """Give this thread the namespace's network; sockets and processes that it makes keep it."""
    with open("/proc/thread-self/ns/net") as own, open(f"/run/netns/{namespace}") as other:
        _setns(other.fileno())
        try:
            yield
        finally:
            _setns(own.fileno())


def _setns(descriptor: int) -> None:
    if _LIBC.setns(descriptor, _CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "setns")


def mac_of(host: int) -> bytes:
    return bytes.fromhex("020000000000")[:-1] + bytes([host + 1])


def ip_of(host: int) -> str:
    return f"10.9.0.{host + 1}"


def port_of(host: int) -> int:
    return 9000 + host


def udp_frame(
    payload: bytes,
    host: int,
    *,
    port: int | None = None,
    to: tuple[bytes, str, int] = (SWITCH_MAC, SWITCH_IP, DATA_PORT),
    fragment: int = 0,
) -> bytes:
    """A frame with a UDP packet from `host`."""
    mac, ip, to_port = to
    # A checksum of the values: nobody looks at it, and it must not stay in an answer.
    udp = struct.pack(">HHHH", port_of(host) if port is None else port, to_port, 8 + len(payload), 0xBEEF)
    addresses = socket.inet_aton(ip_of(host)) + socket.inet_aton(ip)
    head = struct.pack(">BBHHHBBH", 0x45, 0, 28 + len(payload), 0, fragment, 64, 17, 0) + addresses
    head = head[:10] + struct.pack(">H", _checksum(head)) + head[12:]
    return mac + mac_of(host) + struct.pack(">H", 0x0800) + head + udp + payload


def _checksum(head: bytes) -> int:
    total = sum(struct.unpack(f">{len(head) // 2}H", head))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF


class Answer:
    """A frame as a worker's socket would receive it, checked as the host's kernel would."""

    def __init__(self, frame: bytes) -> None:
        assert frame[12:14] == b"\x08\x00", frame.hex()
        ip, udp = frame[14:34], frame[34:42]
        assert _checksum(ip) == 0, "IPv4 checksum"
        assert struct.unpack(">H", ip[2:4])[0] == len(frame) - 14
        self.to_mac, self.from_mac = frame[:6], frame[6:12]
        self.from_ip, self.to_ip = socket.inet_ntoa(ip[12:16]), socket.inet_ntoa(ip[16:20])
        self.from_port, self.to_port, length, checksum = struct.unpack(">HHHH", udp)
        assert (length, checksum) == (len(frame) - 34, 0)
        self.packet = frame[42:]
        self.header = protocol.Header.parse(self.packet)


class Rig:
    """Hosts with raw sockets on the ports of a simple_switch, of which the last has the control plane's address."""

    def __init__(self, namespace: str, pipeline: Bmv2, sockets: list[socket.socket]) -> None:
        self.namespace, self.pipeline, self.sockets = namespace, pipeline, sockets
        self._probes = 0

    @property
    def control_host(self) -> int:
        return len(self.sockets) - 1

    def send(self, host: int, frame: bytes) -> dict[int, list[bytes]]:
        """Send a frame by the port of `host`; return all frames that came out of the switch for it, by host.

        A probe to each host goes behind the frame, by the same port, and so comes out behind what the frame caused.
        """
        self._probes += 1
        # Padded, as Ethernet asks.
        body = struct.pack(">HI", _PROBE_TYPE, self._probes).ljust(48, b"\0")
        # Of no host: a frame of a host that is sent to this host itself would be odd.
        probes = [self._mac_at(to) + bytes.fromhex("02000000fe00") + body for to in range(len(self.sockets))]
        self.sockets[host].send(frame)
        for probe in probes:
            self.sockets[host].send(probe)
        return {to: self._until(to, probe) for to, probe in enumerate(probes)}

    def _mac_at(self, host: int) -> bytes:
        return SWITCH_MAC if host == self.control_host else mac_of(host)

    def _until(self, host: int, probe: bytes) -> list[bytes]:
        frames = []
        deadline = Deadline(20)
        while True:
            assert deadline.left(), f"simple_switch forwarded no probe to host {host}"
            try:
                frame, address = self.sockets[host].recvfrom(1 << 16)
            except TimeoutError:
                continue
            if address[2] == socket.PACKET_OUTGOING:
                continue
            if frame == probe:
                return frames
            frames.append(frame)


@contextlib.contextmanager
def rig(program: Path, hosts: int, tag: str) -> Iterator[Rig]:
    """Start a simple_switch with `program` and a port for each of `hosts` and the control plane's host."""
    namespace = f"nfp4{tag}{os.getpid() % 10000}"
    sockets: list[socket.socket] = []
    with contextlib.ExitStack() as stack:
        run(["ip", "netns", "add", namespace])
        stack.callback(run, ["ip", "netns", "del", namespace])
        run(["ip", "-n", namespace, "link", "set", "lo", "up"])
        for port in range(hosts + 1):
            names = f"p{port}", f"h{port}"
            run(["ip", "-n", namespace, "link", "add", names[0], "type", "veth", "peer", "name", names[1]])
            for name in names:
                # No address of its own: the kernel then sends nothing by this interface.
                run(["ip", "-n", namespace, "link", "set", name, "addrgenmode", "none", "mtu", "9000", "up"])
        ports = [word for port in range(hosts + 1) for word in ("-i", f"{port}@p{port}")]
        argv = ["simple_switch", *ports, "--thrift-port", str(THRIFT_PORT), str(program)]
        with inside(namespace):
            process = spawn(argv, os.environ)
            stack.callback(stop, [process])
            for port in range(hosts + 1):
                each = stack.enter_context(socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(0x0003)))
                each.bind((f"h{port}", 0x0003))
                each.settimeout(0.5)
                sockets.append(each)
        places = {ip_of(host): Host(mac_of(host), host) for host in range(hosts)}
        pipeline = connect(namespace, {**places, SWITCH_IP: Host(SWITCH_MAC, hosts)})
        stack.callback(pipeline.close)
        yield Rig(namespace, pipeline, sockets)


def connect(namespace: str, places: Mapping[str, Host], incarnation: int = INCARNATION) -> Bmv2:
    """Connect to a simple_switch that may still be starting."""
    deadline = Deadline(20)
    while True:
        try:
            with inside(namespace):
                return Bmv2("127.0.0.1", THRIFT_PORT, places, incarnation=incarnation)
        except PipelineError:
            if not deadline.left():
                raise
            time.sleep(0.05)
