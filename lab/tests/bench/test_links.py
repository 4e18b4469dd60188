"""`netfold bench links`: the bound for auto, when its goals are met, and a run in a real rack."""

import json

import pytest
from ranks import run_command

from netfold_lab.bench.links import PACKET, PAYLOAD, LinkResult, LinkSetup, table

# 1 byte of tensor takes 40 ns of the link.
LINK = 25e6 * PAYLOAD / PACKET


@pytest.mark.parametrize(
    ("hosts", "c", "of_ring"),
    [
        (8, 8, 4 / 7),  # n/b, where a ring takes 7/4 of it
        (8, 4, 1 / (1 + 3 / 8)),  # x/4 ranks' bytes each way: 2x = x + 7/4 (1-x) at x = 7/11
        (4, 1, 1 / (1 + 1 / 8)),
        (2, 1, 1.0),  # a ring of two moves no more than a switch
    ],
)
def test_the_bound_is_the_split_at_which_switch_and_ring_end_together(hosts: int, c: float, of_ring: float) -> None:
    place = LinkSetup("200mbit", hosts, c, 16 << 20)
    ring_s = (16 << 20) / LINK * 2 * (hosts - 1) / hosts
    assert place.bound_s == pytest.approx(ring_s * of_ring)


def test_a_slow_switch_is_not_measured_alone() -> None:
    assert LinkSetup("1gbit", 8, 1).backends == ("auto", "ring")
    assert LinkSetup("1gbit", 8, 2).backends == ("auto", "ring", "in_network")


@pytest.mark.parametrize(
    ("auto", "ring", "switch", "met"), [(1.0, 1.0, 4.0, True), (1.06, 1.0, 4.0, False), (1.0, 2.0, 0.9, False)]
)
def test_auto_meets_its_goals_near_the_better_algorithm_and_the_bound(
    auto: float, ring: float, switch: float, met: bool
) -> None:
    place = LinkSetup("200mbit", 2, 1, size=int(LINK))  # whose bound is a second
    taken = LinkResult({"auto": [auto] * 3, "ring": [ring] * 3, "in_network": [switch] * 3}, "split", 0.5)
    assert taken.met(place) is met
    assert table({place: taken})[-1].endswith("| yes |" if met else "| **no** |")
    slow = LinkResult({"auto": [1.2] * 3, "ring": [1.2] * 3}, "ring", 0.0)
    assert not slow.met(place), "over the bound by a fifth"


def test_an_invalid_rate_is_named() -> None:
    done = run_command("bench", "links", "--rate", "fast")
    assert done.returncode == 2
    assert "fast" in done.stdout + done.stderr


@pytest.mark.rack
def test_the_json_of_a_measured_rack_has_every_rate() -> None:
    asked = ("--hosts", "2", "-c", "1", "--size", "4M", "-n", "2", "--output", "json")
    done = run_command("bench", "links", *asked, timeout_s=120)
    assert done.returncode in (0, 1), done.stderr
    (row,) = json.loads(done.stdout)
    assert {backend: len(times) for backend, times in row["seconds"].items()} == {"auto": 2, "ring": 2, "in_network": 2}
    # A ring of two takes as long; what the links let through at once after a pause is part of so few bytes.
    assert 0.8 * row["bound_s"] < min(row["seconds"]["ring"])
