"""netfold doctor check between hosts: a host that sends more slowly than the other hosts is named. Needs root."""

from __future__ import annotations

import json
import sys

import load
import pytest

from netfold_lab.rack.command import why_unavailable

LACK = why_unavailable(loss=False)
pytestmark = [pytest.mark.rack, pytest.mark.skipif(LACK is not None, reason=str(LACK))]

# Host 2 sends at a tenth of the other hosts' rate.
HOST = """
[ "$RANK" != 2 ] || tc qdisc replace dev eth0 root tbf rate 20mbit burst 64kb latency 100ms
exec "$PYTHON" -m netfold.cli doctor check --output json
"""


def test_a_host_that_sends_slowly_is_named() -> None:
    command = [sys.executable, "-m", "netfold.cli", "rack", "run", "--hosts", "4", "--rate", "200mbit", "--"]
    run = load.run([*command, "env", f"PYTHON={sys.executable}", "sh", "-c", HOST], 120)
    assert run.returncode == 0, run.stdout + run.stderr
    line = next(line for line in run.stdout.splitlines() if '"findings"' in line)
    report = json.loads(line[line.index("{") :])
    assert len(report["links"]) == 6
    slow = [each for each in report["findings"] if each["level"] == "warns" and "Mbit/s" in each["what"]]
    (finding,) = slow
    assert finding["where"].startswith("rank 2 ") and finding["what"].startswith("sends at")
    rates = [link["forward_bytes_per_s"] * 8e-6 for link in report["links"] if link["one"] != 2]
    # The link's 200 Mbit/s; a little more, by the burst of the token bucket.
    assert all(150 < rate < 260 for rate in rates)
    (capacity,) = report["capacities"]
    assert not capacity["error"] and 1e6 < capacity["bytes_per_s"] < 4e6, "as much as the slow host sends"
    (note,) = [each["what"] for each in report["findings"] if each["level"] == "notes"]
    assert "of a ring's time" in note


# Host 1's UDP is dropped, as by a firewall; its TCP passes.
CUT = """
[ "$RANK" != 1 ] || nft -f - <<END
table inet cut {
  chain out {
    type filter hook output priority 0;
    meta l4proto udp drop;
  }
}
END
exec "$PYTHON" -m netfold.cli doctor check --output json
"""


@pytest.mark.skipif(why_unavailable(loss=True) is not None, reason=str(why_unavailable(loss=True)))
def test_a_host_whose_udp_does_not_reach_the_switch_is_named() -> None:
    command = [sys.executable, "-m", "netfold.cli", "rack", "run", "--hosts", "2", "--rate", "200mbit", "--"]
    run = load.run([*command, "env", f"PYTHON={sys.executable}", "sh", "-c", CUT], 120)
    assert run.returncode == 1, run.stdout + run.stderr
    line = next(line for line in run.stdout.splitlines() if '"findings"' in line)
    (finding,) = [each for each in json.loads(line[line.index("{") :])["findings"] if each["level"] == "fails"]
    assert finding["where"] == "rank 1"
    assert "is reached by TCP, but no UDP packet came back from its port" in finding["what"]
