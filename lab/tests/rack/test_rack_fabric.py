"""Two links on each host under a fabric: both carry data, and a cut link is not used. Needs root and libfabric."""

from __future__ import annotations

import pytest
from fabrics import need_libfabric
from test_rack_interfaces import gain_of_a_second_link, hosts, last_json, outputs

from netfold_lab.rack.command import why_unavailable

LACK = why_unavailable(loss=False)
pytestmark = [pytest.mark.rack, pytest.mark.skipif(LACK is not None, reason=str(LACK))]

need_libfabric()


def test_a_message_striped_over_two_links_takes_half_as_long() -> None:
    assert gain_of_a_second_link(transport="fabric:tcp") > 1.9


UNTIL_CUT = """
    for turn in range(40):
        array = np.arange(300_007, dtype=np.int64) * (rank + 1) + turn
        group.all_reduce(array)
        np.testing.assert_array_equal(array, np.arange(300_007, dtype=np.int64) * 3 + 2 * turn)
        if turn == 5:
            print("under way", flush=True)
    print(json.dumps(["all right"]), flush=True)
"""


def test_a_link_that_is_cut_is_not_used_and_no_sum_is_wrong() -> None:
    with hosts(2) as there:
        master, _ = there.cable(0, 1, "200mbit")
        there.cable(0, 1, "200mbit")
        ranks = there.start(UNTIL_CUT, master, interface="c0,c1", transport="fabric:tcp", algorithm="ring")
        assert ranks[0].stdout is not None
        output = ""
        while "under way" not in output:
            line = ranks[0].stdout.readline()
            assert line, output
            output += line
        there.ip(0, "link", "set", "c1", "down")
        for text in outputs(ranks, timeout_s=90):
            assert last_json(text) == ["all right"], text
