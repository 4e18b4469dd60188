"""The cost of NETFOLD_SECURITY in an all_reduce, between ranks and through the switch; as root:

    .venv/bin/python lab/bench/security.py

Every rank has a group for each security, and the groups take turns: between hosts of a rack over TCP and through two
switches there, of which the switch without security is open; with shaped links, and with links that carry what the
machine can; then over TCP on this machine's loopback. Times are the slowest rank's; every element is checked.
"""

from __future__ import annotations

import secrets
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import driver
from driver import CheckedSum, Network, Place, Rank, cell, cpu_seconds, open_network, start_ranks, take_turns

from netfold.options import SECURITIES
from netfold_lab.bench.spread import paired_ratios, spread
from netfold_lab.rack.aggregator import Aggregator, start_aggregator
from netfold_lab.rack.names import SWITCH_ADDRESS, SWITCH_PORT

SIZE = 16 << 20
GOAL = 1.02
# Header and values of packets for MTUs of 1500 and 9000.
PACKETS = (48 + 1408, 48 + 8880)
ROOT = Path(__file__).parents[2]


def add(me: Rank, switches: dict[str, str], token_file: str) -> None:
    """A rank with a group for each security. An order is one all_reduce. switches: the address by security."""
    add_once = CheckedSum(me, SIZE)
    with ExitStack() as stack:
        groups = {}
        for security in SECURITIES:
            options: dict[str, Any] = {"transport": "tcp", "security": security, "probe": "off"}
            if switches:
                options["switch"] = switches[security]
                options["token_file"] = token_file if "#" in switches[security] else None
            groups[security] = stack.enter_context(me.communicator(security, **options))

        def all_reduce(security: str) -> dict[str, float]:
            cpu_s = 0.0

            def timed(tensor: Any) -> None:
                nonlocal cpu_s
                began = time.process_time()
                groups[security].all_reduce(tensor)
                cpu_s = time.process_time() - began

            seconds, wrong = add_once(timed)
            again = int(groups[security].group.events()[-1]["retransmissions"])
            return {"s": seconds, "cpu_s": cpu_s, "wrong": wrong, "again": again}

        me.serve(all_reduce)


def start_switches(network: Network, folder: Path) -> dict[str, Aggregator]:
    """An open switch and a switch with a token; by security."""
    token = secrets.token_hex(32)
    for name, text in (("token", token), ("tokens", f"bench {token}\n")):
        (folder / name).touch(0o600)
        (folder / name).write_text(text)
    assert network.rack is not None
    found = []
    for number, access in enumerate((["--open"], ["--token-file", f"{folder}/tokens"])):
        listen = f"{SWITCH_ADDRESS}:{SWITCH_PORT + number}"
        argv = [sys.executable, "-m", "netfold.cli", "switch", "--listen", listen, *access]
        found.append(start_aggregator(network.rack.popen_switch, argv, lambda line: None))
    return {security: found[security != SECURITIES[0]] for security in SECURITIES}


def measure(place: Place, shaped: bool, with_switch: bool, rounds: int) -> dict[str, list[dict[str, float]]]:
    """By security, one all_reduce a round: the slowest rank's time; CPU time, wrong elements and repeats of all."""
    with tempfile.TemporaryDirectory() as name, open_network(place) as network:
        if place.rate and not shaped:
            network.remove_shaping()
        switches = start_switches(network, Path(name)) if with_switch else {}
        addresses = {security: switch.address for security, switch in switches.items()}
        environment = {} if place.rate else {"NETFOLD_INTERFACE": "lo"}

        def all_reduce(security: str) -> dict[str, float]:
            pid = switches[security].process.pid if switches else None
            before_s = cpu_seconds(pid)
            answers = ranks.ask(security)
            row = {name: sum(answer[name] for answer in answers) for name in ("cpu_s", "wrong", "again")}
            row["cpu_s"] += cpu_seconds(pid) - before_s
            return {**row, "s": max(answer["s"] for answer in answers)}

        with start_ranks(network, add, addresses, f"{name}/token", environment=environment) as ranks:
            return take_turns(SECURITIES, rounds, all_reduce, warmups=2)


def mac_costs() -> list[list[str]]:
    """A row for each packet: bytes, nanoseconds to compute a MAC (median, lowest .. highest), nanoseconds a byte."""
    auth = ROOT / "core/native/auth"
    sources = [ROOT / "lab/bench/auth_cost.cpp", auth / "packet_authenticator.cpp", auth / "libcrypto.cpp"]
    rows = []
    for size, *ns in driver.run_cpp(sources, [auth / "include"], *PACKETS):
        middle, low, high = map(float, ns)
        rows.append([size, f"{middle:.0f} ({low:.0f} .. {high:.0f})", f"{middle / int(size):.3f}"])
    return rows


def security(rounds: int = 15, rate: str = "1gbit") -> str:
    """The cost of authentication and encryption."""
    rows = []
    for link, ranks, with_switch in (
        (rate, 2, False),
        (rate, 2, True),
        (rate, 4, True),
        ("", 4, True),
        (None, 2, False),
    ):
        place = Place(ranks, "" if link is None else link or rate)
        found = measure(place, bool(link), with_switch, rounds)
        where = f"{'loopback' if link is None else link or 'not shaped'}, {'switch' if with_switch else 'TCP'}"
        column = {name: {side: [row[name] for row in found[side]] for side in SECURITIES} for name in ("s", "cpu_s")}
        for side in SECURITIES:
            ratios = ["", "", ""]
            if side != SECURITIES[0]:
                of_s, of_cpu = (spread(paired_ratios(column[name][side], column[name]["none"])) for name in column)
                ratios = [f"{of_s.median:.3f}", f"{of_s.p25:.3f} .. {of_s.p75:.3f}", f"{of_cpu.median:.2f}"]
            cpu_ms = f"{spread(column['cpu_s'][side]).median * 1e3:.0f}"
            again, wrong = (f"{sum(row[name] for row in found[side]):.0f}" for name in ("again", "wrong"))
            times = cell(column["s"][side], ".1f", 1e3, " | ")
            rows.append([where, ranks, side, times, *ratios[:2], cpu_ms, ratios[2], again, wrong])
    head = (
        "link | ranks | NETFOLD_SECURITY | ms: median | 5% .. 95% | of none, paired: median | 25% .. 75% "
        "| CPU, ms: median | of none | sent again | wrong"
    )
    return f"""{SIZE >> 20} MB f32 all_reduce with each value of NETFOLD_SECURITY, in turns, on links of MTU 1500. The
goal at 1 Gbit/s: at most {GOAL} of the time of `none`. CPU is what the ranks and the switch together use of the cores
for one all_reduce.

{driver.table(head, rows)}

Through a switch with n workers a MAC is computed or checked 3n + 1 times for each chunk: by each worker for its
contribution and for the result, by the switch for each contribution and once for the result. Shaped links leave the
cores time for that. Where nothing is shaped the cores are the limit, and the whole cost shows. What one MAC takes,
which is also what checking one takes (medians of 31 runs of 4000, lowest .. highest):

{driver.table("packet without its MAC, bytes | ns | ns per byte", mac_costs())}"""


if __name__ == "__main__":
    driver.run(security)
