"""A delayed link duplicates and reorders packets at the given ratios, and none before. Needs root."""

from __future__ import annotations

import sys

import pytest
from load import seconds

from netfold_lab.rack import Rack, RackError
from netfold_lab.rack.command import why_unavailable

LACK = why_unavailable(loss=True, delay=True)
pytestmark = [pytest.mark.rack, pytest.mark.skipif(LACK is not None, reason=str(LACK))]

COUNT, GAP_S = 3000, 0.0003
RECEIVE = """
import socket, sys
link = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
link.setsockopt(socket.SOL_SOCKET, 33, 1 << 22)
link.bind((sys.argv[1], 7400))
print("ready", flush=True)
link.settimeout(60)
link.sendto(*link.recvfrom(100))
numbers = []
while not numbers or numbers[-1] != -1:
    numbers.append(int(link.recv(100)))
print(*numbers[:-1], flush=True)
"""
SEND = """
import socket, sys, time
to, count, gap = (sys.argv[1], 7400), int(sys.argv[2]), float(sys.argv[3])
link = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
# The kernel may reorder packets that wait for ARP's answer.
link.settimeout(60)
link.sendto(b"0", to)
link.recv(100)
for number in range(count):
    link.sendto(str(number).encode(), to)
    time.sleep(gap)
time.sleep(0.3)
link.sendto(b"-1", to)
"""


def arrivals(rack: Rack) -> list[int]:
    """Numbers of the datagrams from host 0 to host 1, in order of arrival."""
    receiver = rack.popen(1, [sys.executable, "-c", RECEIVE, rack.address(1)])
    assert receiver.stdout is not None
    assert receiver.stdout.readline() == "ready\n"
    sender = rack.popen(0, [sys.executable, "-c", SEND, rack.address(1), str(COUNT), str(GAP_S)])
    assert sender.wait(seconds(30)) == 0
    output, _ = receiver.communicate(timeout=seconds(30))
    return [int(word) for word in output.split()]


def late(numbers: list[int]) -> int:
    """The number of datagrams that arrived after one that was sent later."""
    highest, count = -1, 0
    for number in numbers:
        count += number < highest
        highest = max(highest, number)
    return count


# The kernel itself reorders some packets when a thread of the link moves to another core.
FEW = COUNT // 100


def test_a_disturbed_link_duplicates_and_reorders_until_the_ratios_are_zero() -> None:
    with Rack(2, "1gbit", delay="50us") as rack:
        before = arrivals(rack)
        assert sorted(before) == list(range(COUNT))
        assert late(before) <= FEW
        rack.disturb(0, duplicate_ratio=0.1, reorder_ratio=0.1, reorder_ns=5_000_000, seed=1)
        disturbed = arrivals(rack)
        assert set(disturbed) == set(range(COUNT))
        # Binomial, 3000 draws: a standard deviation of 16 beside 300.
        assert 200 <= len(disturbed) - COUNT <= 400
        assert late(disturbed) >= 150
        rack.disturb(0)
        after = arrivals(rack)
        assert sorted(after) == list(range(COUNT))
        assert late(after) <= FEW


def test_a_link_without_delay_and_an_invalid_ratio_are_refused() -> None:
    with Rack(1, "1gbit") as rack, pytest.raises(RackError, match="has no delay"):
        rack.disturb(0, duplicate_ratio=0.1)
    with Rack(1, "1gbit", delay="50us") as rack, pytest.raises(RackError, match="ratios are from 0 to 1"):
        rack.disturb(0, duplicate_ratio=1.5)
