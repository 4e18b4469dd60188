"""Each kind of fault: a function that begins it at a place of the arena and returns what undoes it."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from schedule import Fault

from netfold_lab.rack.command import run
from netfold_lab.rack.names import HOST_INTERFACE, port_name

if TYPE_CHECKING:
    from arena import Arena

Undo = Callable[[], None]
HOSTILE = Path(__file__).with_name("hostile.py")
MTU = 1500
# Of the period in which a slow rank is stopped for a part.
SLOW_PERIOD_S = 0.05
REORDER_NS = 5_000_000
CLOSED_PORT = 40_000


def begin(arena: Arena, fault: Fault) -> Undo:
    """Begin a fault; the function that undoes it."""
    return BEGIN[fault.kind](arena, fault)


def kill_switch(arena: Arena, fault: Fault) -> Undo:
    arena.end_switch(fault.place[1])
    return lambda: arena.start_switch(fault.place[1])


def stop_process(arena: Arena, fault: Fault) -> Undo:
    process = arena.process(fault.place)
    process.signal(signal.SIGSTOP)
    return lambda: process.signal(signal.SIGCONT)


def slow(arena: Arena, fault: Fault) -> Undo:
    """Stop a process for the part `amount` of each period."""
    process, over = arena.process(fault.place), threading.Event()

    def alternate() -> None:
        while not over.is_set():
            process.signal(signal.SIGSTOP)
            over.wait(SLOW_PERIOD_S * fault.amount)
            process.signal(signal.SIGCONT)
            over.wait(SLOW_PERIOD_S * (1 - fault.amount))

    thread = threading.Thread(target=alternate)
    thread.start()

    def undo() -> None:
        over.set()
        thread.join()
        process.signal(signal.SIGCONT)

    return undo


def cut(arena: Arena, fault: Fault) -> Undo:
    protocols, direction = fault.how.split(", ")
    match = f"meta l4proto {{ {protocols.replace(' and ', ', ')} }} drop"
    hooks = {"in": ("input",), "out": ("output",), "both ways": ("input", "output")}[direction]
    chains = "".join(f"chain {hook} {{ type filter hook {hook} priority 0; {match}; }}\n" for hook in hooks)
    return _firewall(arena, fault, f"inet chaos_cut {{\n{chains}}}")


def lose(arena: Arena, fault: Fault) -> Undo:
    """Drop that part of the packets that come in, and of those that go out."""
    draw = f"numgen random mod 1000000 < {round(fault.amount * 1e6)} drop"
    chains = "".join(
        f"chain {hook} {{ type filter hook {hook} priority 1; {draw}; }}\n" for hook in ("input", "output")
    )
    return _firewall(arena, fault, f"inet chaos_lose {{\n{chains}}}")


def _firewall(arena: Arena, fault: Fault, table: str) -> Undo:
    inside = ["ip", "netns", "exec", arena.namespace(fault.place), "nft"]
    run([*inside, "-f", "-"], f"table {table}\n")
    name = " ".join(table.split()[:2])
    return lambda: _quietly([*inside, "delete", "table", *name.split()])


def shrink_mtu(arena: Arena, fault: Fault) -> Undo:
    device = ["ip", "-n", arena.namespace(fault.place), "link", "set", HOST_INTERFACE, "mtu"]
    run([*device, str(round(fault.amount))])
    return lambda: _quietly([*device, str(MTU)])


def duplicate_and_reorder(arena: Arena, fault: Fault) -> Undo:
    host = arena.number(fault.place)
    arena.rack.disturb(
        host, duplicate_ratio=fault.amount, reorder_ratio=fault.amount, reorder_ns=REORDER_NS, seed=arena.schedule.seed
    )
    return lambda: arena.rack.disturb(host)


def forge_icmp(arena: Arena, fault: Fault) -> Undo:
    pairs = arena.flows(fault.place)
    return _hostile(arena, "icmp", fault.how, arena.address(fault.place), str(fault.for_s), *pairs)


def garbage(arena: Arena, fault: Fault) -> Undo:
    # A switch that was just killed, or whose job has left it, has no port for packets; they come all the same.
    ports = arena.ports(fault.place, fault.how) or [CLOSED_PORT]
    targets = [f"{arena.address(fault.place)}:{port}" for port in ports]
    return _hostile(arena, "garbage", fault.how, str(fault.for_s), _seed(arena, fault), *targets)


def copies(arena: Arena, fault: Fault) -> Undo:
    """Repeat packets, whole, truncated and with flipped bits; from their own sender's address where MACs tell them."""
    how = "forge" if arena.schedule.authenticated else "strange"
    device = port_name(arena.number(fault.place))
    argv = [sys.executable, str(HOSTILE), "copies", device, str(fault.for_s), _seed(arena, fault), how]
    process = arena.rack.popen_switch(argv)
    return lambda: arena.end_hostile(process)


def wrong_token(arena: Arena, fault: Fault) -> Undo:
    address = arena.address(fault.place)
    kind = "control" if fault.place[0] == "switch" else "listener"
    targets = [f"{kind}:{address}:{port}" for port in arena.ports(fault.place, "tcp") or [CLOSED_PORT]]
    return _hostile(arena, "token", str(fault.for_s), _seed(arena, fault), *targets)


def _hostile(arena: Arena, *words: str) -> Undo:
    process = arena.rack.popen(arena.hostile_host, [sys.executable, str(HOSTILE), *words])
    return lambda: arena.end_hostile(process)


def fill_shm(arena: Arena, fault: Fault) -> Undo:
    filler = Path(f"/proc/{arena.process(fault.place).pid}/root/dev/shm/chaos")
    with open(filler, "wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(1 << 16))

    def undo() -> None:
        with contextlib.suppress(OSError):
            filler.unlink()

    return undo


def few_descriptors(arena: Arena, fault: Fault) -> Undo:
    """Leave the process room for `amount` descriptors more than its highest."""
    process = arena.process(fault.place)
    with contextlib.suppress(OSError):
        _, hard = resource.prlimit(process.pid, resource.RLIMIT_NOFILE)
        highest = max(map(int, os.listdir(f"/proc/{process.pid}/fd")))
        before = resource.prlimit(
            process.pid, resource.RLIMIT_NOFILE, (min(hard, highest + 1 + round(fault.amount)), hard)
        )

        def undo() -> None:
            with contextlib.suppress(OSError):
                resource.prlimit(process.pid, resource.RLIMIT_NOFILE, before)

        return undo
    return lambda: None


def move_clock(arena: Arena, fault: Fault) -> Undo:
    process = arena.process(fault.place)
    process.set_clock(round(fault.amount))
    return lambda: process.set_clock(0)


def _seed(arena: Arena, fault: Fault) -> str:
    return str(random.Random(f"{arena.schedule.seed} {fault}").randrange(1 << 31))


def _quietly(argv: list[str]) -> None:
    with contextlib.suppress(RuntimeError):
        run(argv)


BEGIN: dict[str, Callable[[Arena, Fault], Undo]] = {
    "kill switch": kill_switch,
    "stop switch": stop_process,
    "cut switch": cut,
    "shrink MTU": shrink_mtu,
    "stop rank": stop_process,
    "slow rank": slow,
    "cut host": cut,
    "shrink host's MTU": shrink_mtu,
    "ICMP": forge_icmp,
    "duplicate and reorder": duplicate_and_reorder,
    "lose": lose,
    "garbage": garbage,
    "copies": copies,
    "wrong token": wrong_token,
    "full /dev/shm": fill_shm,
    "few descriptors": few_descriptors,
    "clock jumps": move_clock,
}
