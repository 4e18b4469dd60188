"""Hostile packets and connections: run by itself in a network namespace, with the standard library and msgpack alone.

hostile.py icmp KIND VICTIM SECONDS PAIR...      PAIR: udp|tcp:PORT:PEER:PORT, of the packet that is quoted
hostile.py garbage udp|tcp SECONDS SEED ADDRESS:PORT...
hostile.py copies DEVICE SECONDS SEED forge|strange      on the bridge, towards the host behind DEVICE
hostile.py token SECONDS SEED CONTROL|LISTENER:ADDRESS:PORT...     prints how many let it in
"""

from __future__ import annotations

import contextlib
import random
import socket
import ssl
import struct
import sys
import time

ICMP = {
    "fragmentation needed": (3, 4, 552),
    "net unreachable": (3, 0, 0),
    "host unreachable": (3, 1, 0),
    "protocol unreachable": (3, 2, 0),
    "port unreachable": (3, 3, 0),
    "prohibited": (3, 13, 0),
    "source quench": (4, 0, 0),
    "redirect": (5, 1, 0x0A4D00FD),
    "time exceeded": (11, 0, 0),
    "parameter problem": (12, 0, 0),
}
PROTOCOL = {"udp": 17, "tcp": 6}
UDP_A_SECOND, TCP_A_SECOND, COPIES_A_SECOND = 2000, 40, 1000
# An unused address of the rack's subnet.
NOBODY = socket.inet_aton("10.77.0.250")


def checksum(data: bytes) -> int:
    data += bytes(len(data) % 2)
    total = sum(struct.unpack(f"!{len(data) // 2}H", data))
    total = (total >> 16) + (total & 0xFFFF)
    return ~(total + (total >> 16)) & 0xFFFF


def icmp_message(kind: str, quoted: bytes) -> bytes:
    number, code, rest = ICMP[kind]
    body = struct.pack("!BBHI", number, code, 0, rest) + quoted
    return body[:2] + struct.pack("!H", checksum(body)) + body[4:]


def quoted_packet(pair: str, victim: str) -> bytes:
    """The header of a packet that the victim might have sent."""
    protocol, mine, peer, theirs = pair.split(":")
    addresses = socket.inet_aton(victim) + socket.inet_aton(peer)
    header = struct.pack("!BBHHHBBH", 0x45, 0, 1472, 1, 0x4000, 64, PROTOCOL[protocol], 0) + addresses
    return header + struct.pack("!HHHH", int(mine), int(theirs), 1452, 0)


def icmp(kind: str, victim: str, seconds: str, *pairs: str) -> None:
    raw = socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP)
    until = time.monotonic() + float(seconds)
    while time.monotonic() < until:
        for pair in pairs:
            raw.sendto(icmp_message(kind, quoted_packet(pair, victim)), (victim, 0))
        time.sleep(0.1)


def garbage(protocol: str, seconds: str, seed: str, *targets: str) -> None:
    draw = random.Random(int(seed))
    ends = [(address, int(port)) for address, port in (target.split(":") for target in targets)]
    until = time.monotonic() + float(seconds)
    datagrams = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    while time.monotonic() < until:
        end = draw.choice(ends)
        data = draw.randbytes(draw.choice((0, 1, 7, 40, 64, 200, 1400)))
        with contextlib.suppress(OSError):
            if protocol == "udp":
                datagrams.sendto(data, end)
                time.sleep(1 / UDP_A_SECOND)
            else:
                with socket.create_connection(end, timeout=0.2) as stream:
                    stream.sendall(draw.choice((data, b"\xff\xff\xff\xff" + data, struct.pack("!I", 100) + data)))
                time.sleep(1 / TCP_A_SECOND)


def mutated(draw: random.Random, frame: bytes, *, forge: bool) -> bytes:
    """A copy of a UDP packet over IPv4: as it was, truncated, or with flipped bits; checksums are right.

    forge: it comes from the address of the packet's sender. Else from an address that nobody has.
    """
    ip = bytearray(frame[14:])
    head = (ip[0] & 15) * 4
    payload = ip[head + 8 : struct.unpack_from("!H", ip, 2)[0]]
    choice = draw.randrange(3)
    if choice == 1:
        payload = payload[: draw.randrange(len(payload) + 1)]
    elif choice == 2 and payload:
        for _ in range(draw.randint(1, 4)):
            payload[draw.randrange(len(payload))] ^= 1 << draw.randrange(8)
    ip = ip[: head + 8] + payload
    struct.pack_into("!H", ip, 2, len(ip))
    if not forge:
        ip[12:16] = NOBODY
    struct.pack_into("!H", ip, 10, 0)
    struct.pack_into("!H", ip, 10, checksum(bytes(ip[:head])))
    struct.pack_into("!HH", ip, head + 4, len(payload) + 8, 0)  # a UDP checksum of 0: none
    return frame[:14] + bytes(ip)


def copies(device: str, seconds: str, seed: str, how: str) -> None:
    draw = random.Random(int(seed))
    port = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
    port.bind((device, 3))
    port.settimeout(0.1)
    until = time.monotonic() + float(seconds)
    while time.monotonic() < until:
        with contextlib.suppress(OSError):
            frame, about = port.recvfrom(65600)
            # Towards the host, one packet, UDP over IPv4.
            if about[2] != socket.PACKET_OUTGOING or len(frame) > 1514 or frame[12:14] != b"\x08\x00":
                continue
            if frame[23] == 17:
                port.send(mutated(draw, frame, forge=how == "forge"))
                time.sleep(1 / COPIES_A_SECOND)


def let_in_by_switch(end: tuple[str, int], draw: random.Random) -> bool:
    import msgpack

    from netfold.switch_protocol.control_messages import VERSION

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    said = {"type": "join", "version": VERSION, "job": draw.randbytes(8).hex(), "name": "", "rank": 0, "ranks": [0]}
    said |= {"port": 9, "credential": draw.randbytes(32), "timeout_s": 1.0}
    body = msgpack.packb(said)
    with socket.create_connection(end, timeout=1) as plain, context.wrap_socket(plain) as stream:
        stream.sendall(struct.pack(">I", len(body)) + body)
        return b"admitted" in stream.recv(4096)


def let_in_by_rank(end: tuple[str, int], draw: random.Random) -> bool:
    hello = b"netfold4" + struct.pack(">B16sIIIBB32s", 1, draw.randbytes(16), 1, 0, 3, 0, 0, draw.randbytes(32))
    with socket.create_connection(end, timeout=1) as stream:
        stream.sendall(hello + draw.randbytes(32))
        said = b""
        with contextlib.suppress(OSError):
            while part := stream.recv(100):
                said += part
        # "+" alone begins the proof; behind the proof of 64 bytes per second one lets in.
        return len(said) > 65


def token(seconds: str, seed: str, *targets: str) -> None:
    draw = random.Random(int(seed))
    let_in = 0
    until = time.monotonic() + float(seconds)
    while time.monotonic() < until:
        kind, address, port = draw.choice(targets).split(":")
        with contextlib.suppress(OSError):
            let_in += (let_in_by_switch if kind == "control" else let_in_by_rank)((address, int(port)), draw)
        time.sleep(0.05)
    print(f"let in {let_in}", flush=True)


if __name__ == "__main__":
    {"icmp": icmp, "garbage": garbage, "copies": copies, "token": token}[sys.argv[1]](*sys.argv[2:])
