"""Findings from synthetic facts: a healthy job has none, and each fault is named."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from netfold.diagnostics.preflight import PreflightFacts, advise, apply_rules
from netfold.diagnostics.preflight.capacity import Capacity
from netfold.diagnostics.preflight.facts import Facts, SwitchQuota
from netfold.diagnostics.preflight.links import PairLink, rounds
from netfold.diagnostics.preflight.rules import Level

GIGABIT = 1e9 / 8
WELL = Facts(
    rank=0,
    host="a",
    boot="0",
    cores=8,
    memory_free_bytes=16 << 30,
    shm_free_bytes=8 << 30,
    open_files_limit=1 << 20,
    disk="/data",
    disk_free_bytes=100 << 30,
    versions={"netfold": "0.1.0", "torch": "2.13.0"},
    kernel="6.1",
    environment={},
    congestion="bbr",
    interfaces=["eth0 (10.0.0.1), MTU 1500"],
    interface_error="",
    mtu=1500,
    switches=[],
)


def hosts(count: int, **changes: dict[int, Any]) -> PreflightFacts:
    """One rank per host; `changes`: field -> rank -> value. Links of a gigabit, 50 us."""
    facts = []
    for rank in range(count):
        own = {name: by[rank] for name, by in changes.items() if rank in by}
        facts.append(replace(WELL, rank=rank, host="abcdefgh"[rank], boot=str(rank), **own))
    links = [PairLink(i, j, 50e-6, GIGABIT, GIGABIT, 0.0) for i in range(count) for j in range(i + 1, count)]
    return PreflightFacts(facts, links, list(range(count)), [""] * count, link_bytes_per_s=GIGABIT)


def relinked(gathered: PreflightFacts, change: Any) -> PreflightFacts:
    return replace(gathered, links=[change(link) for link in gathered.links])


def test_a_healthy_job_has_no_finding() -> None:
    assert apply_rules(hosts(4)) == []
    assert apply_rules(PreflightFacts([WELL], [], [0], [""])) == []


def test_a_different_netfold_version_fails_and_a_different_kernel_warns() -> None:
    (finding,) = apply_rules(hosts(3, versions={1: {"netfold": "0.2.0", "torch": "2.13.0"}}))
    assert finding.level is Level.FAIL
    assert "0.1.0 on rank 0, 2; 0.2.0 on rank 1" in finding.what
    (finding,) = apply_rules(hosts(2, kernel={1: "5.10"}))
    assert finding.level is Level.WARN


def test_a_variable_that_differs_is_named_with_both_values() -> None:
    (finding,) = apply_rules(hosts(2, environment={1: {"NETFOLD_WIRE_DTYPE": "bf16"}}))
    assert "NETFOLD_WIRE_DTYPE" in finding.what and "unset on rank 0; bf16 on rank 1" in finding.what
    assert apply_rules(hosts(2, environment={1: {"NETFOLD_INTERFACE": "eth1"}})) == []


def test_a_rank_with_only_slow_links_is_named_once() -> None:
    def slower(link: PairLink) -> PairLink:
        return replace(link, forward_bytes_per_s=GIGABIT / 10) if link.one == 1 else link

    # Rank 1 sends slowly to 2 and 3; to 0 the link is written the other way round.
    def also_to_0(link: PairLink) -> PairLink:
        return replace(link, reverse_bytes_per_s=GIGABIT / 10) if (link.one, link.other) == (0, 1) else slower(link)

    (finding,) = apply_rules(relinked(hosts(4), also_to_0))
    assert finding.where == "rank 1 (b)"
    assert "sends at 100 Mbit/s; others at 1000 Mbit/s" in finding.what


def test_one_slow_direction_is_reported_alone() -> None:
    def slower(link: PairLink) -> PairLink:
        return replace(link, reverse_bytes_per_s=GIGABIT / 10) if (link.one, link.other) == (1, 3) else link

    (finding,) = apply_rules(relinked(hosts(4), slower))
    assert finding.where == "rank 3 (d) -> rank 1 (b)"


def test_a_link_between_two_hosts_is_compared_with_the_speed_of_their_interfaces() -> None:
    """There is no other link to compare it with. An interface's speed is 0 where it is not known."""

    def fallen(link: PairLink) -> PairLink:
        return replace(link, forward_bytes_per_s=GIGABIT / 10)

    assert apply_rules(relinked(hosts(2), fallen)) == []
    gigabit = dict.fromkeys(range(4), 1000)
    assert apply_rules(hosts(2, speed_mbit=gigabit)) == []
    (finding,) = apply_rules(relinked(hosts(2, speed_mbit=gigabit), fallen))
    assert finding.level is Level.WARN and finding.where == "rank 0 (a) -> rank 1 (b)"
    assert finding.what == "100 Mbit/s; the interfaces at its ends run at 1000 Mbit/s"
    # The slower end bounds a link, and no single stream fills what is faster than 10 Gbit/s.
    mixed = relinked(hosts(2, speed_mbit={0: 100_000, 1: 1000}), fallen)
    assert [each.what for each in apply_rules(mixed) if "->" in each.where] == [finding.what]
    fast = relinked(hosts(2, speed_mbit={0: 100_000, 1: 100_000}), lambda link: replace(link, reverse_bytes_per_s=1e9))
    assert [each.where for each in apply_rules(fast)] == ["rank 0 (a) -> rank 1 (b)"], "a gigabit of 10"


def test_links_that_are_all_slower_than_the_interfaces_are_reported_once() -> None:
    gigabit = dict.fromkeys(range(4), 1000)
    (finding,) = apply_rules(
        relinked(
            hosts(4, speed_mbit=gigabit),
            lambda link: replace(link, forward_bytes_per_s=GIGABIT / 10, reverse_bytes_per_s=GIGABIT / 10),
        )
    )
    assert finding.where == "all hosts"
    assert finding.what == "12 of 12 ways run at half of their interfaces' speed or less, usually at 100 Mbit/s"


def test_a_slow_pair_is_named_once_although_two_rules_find_it() -> None:
    gigabit = dict.fromkeys(range(4), 1000)

    def slower(link: PairLink) -> PairLink:
        return replace(link, reverse_bytes_per_s=GIGABIT / 10) if (link.one, link.other) == (1, 3) else link

    (finding,) = apply_rules(relinked(hosts(4, speed_mbit=gigabit), slower))
    assert finding.where == "rank 3 (d) -> rank 1 (b)" and finding.what == "100 Mbit/s; others have 1000 Mbit/s"


def test_an_interface_that_negotiated_100_mbit_is_named() -> None:
    found = apply_rules(hosts(2, speed_mbit={0: 1000, 1: 100}))
    assert [each.where for each in found] == ["rank 1 (b)"]
    assert found[0].what == "eth0 (10.0.0.1), MTU 1500: it runs at 100 Mbit/s; others at 1000 Mbit/s"
    alone = apply_rules(hosts(2, speed_mbit={0: 100, 1: 100}))
    assert [each.what for each in alone] == ["eth0 (10.0.0.1), MTU 1500: it runs at 100 Mbit/s"] * 2
    assert apply_rules(hosts(2, speed_mbit={0: 0, 1: 10_000})) == []


def test_blocked_udp_fails_with_a_remedy() -> None:
    cut = [SwitchQuota("10.0.0.9:7171", jobs=4, workers=8, memory_bytes=1 << 30, udp_error="no UDP packet came back")]
    (finding,) = apply_rules(hosts(2, switches={0: cut, 1: [replace(cut[0], udp_error="")]}))
    assert (finding.level, finding.where, finding.what) == (Level.FAIL, "rank 0", "no UDP packet came back")
    assert "UDP" in finding.remedy


def test_a_routing_detour_and_a_wrong_clock_are_reported() -> None:
    def far(link: PairLink) -> PairLink:
        return replace(link, latency_s=2e-3) if (link.one, link.other) == (0, 2) else link

    def off(link: PairLink) -> PairLink:
        return replace(link, clock_s=7.0) if link.other == 3 else link

    found = apply_rules(relinked(relinked(hosts(4), far), off))
    assert [finding.where for finding in found] == ["rank 0 (a) - rank 2 (c)", "rank 3 (d)"]
    assert "2000 us" in found[0].what and "+7.0 s" in found[1].what


def test_an_absent_or_full_switch_fails_with_the_switchs_text() -> None:
    gone = [SwitchQuota("10.0.0.9:7171", error="refused the connection")]
    (finding,) = apply_rules(hosts(2, switches={0: gone, 1: gone}))
    assert finding.level is Level.FAIL and finding.where == "rank 0, 1" and "refused" in finding.what
    full = [SwitchQuota("10.0.0.9:7171", jobs=0, workers=8, memory_bytes=1 << 30)]
    (finding,) = apply_rules(hosts(2, switches={0: full, 1: full}))
    assert finding.level is Level.FAIL and "room for 0 jobs" in finding.what
    small = [SwitchQuota("10.0.0.9:7171", jobs=1, workers=1, memory_bytes=1 << 30)]
    assert apply_rules(hosts(1, switches={0: small})) == []
    assert len(apply_rules(hosts(2, switches={0: small, 1: small}))) == 1


def test_a_window_cut_by_the_switchs_kernel_is_a_warning_with_its_size() -> None:
    room = SwitchQuota(
        "10.0.0.9:7171", jobs=4, workers=8, memory_bytes=1 << 30, buffer_bytes=425_984, window_bytes=1 << 20
    )
    (finding,) = apply_rules(hosts(2, switches={0: [room], 1: [room]}))
    assert (finding.level, finding.where) == (Level.WARN, "switch 10.0.0.9:7171")
    assert finding.what.endswith("each of 2 workers has a window of 73 packets of 1408 bytes and not 720")
    assert finding.remedy.startswith("set sysctl net.core.rmem_max to 2097152 on the switch's host")
    whole = replace(room, buffer_bytes=8 << 20)
    assert apply_rules(hosts(2, switches={0: [whole], 1: [whole]})) == []


def test_idle_threads_of_a_switch_are_a_note() -> None:
    room = SwitchQuota("10.0.0.9:7171", jobs=4, workers=8, memory_bytes=1 << 30, threads=2)
    (finding,) = apply_rules(hosts(2, switches={0: [room], 1: [room]}))
    assert (finding.level, finding.what) == (Level.NOTE, "has 2 threads, and a group of this job uses 1")
    assert "name it twice in NETFOLD_SWITCH" in finding.remedy
    assert apply_rules(hosts(2, switches={0: [room] * 2, 1: [room] * 2})) == []


def test_shortages_of_one_host_are_reported() -> None:
    def together(**changes: Any) -> list[str]:
        facts = [replace(WELL, rank=rank, **changes) for rank in range(4)]
        return [finding.what for finding in apply_rules(PreflightFacts(facts, [], [0] * 4, [""] * 4))]

    assert together() == []
    assert together(shm_free_bytes=64 << 20) == ["/dev/shm: 64 MiB are free for 4 ranks"]
    assert together(shm_free_bytes=-1) == ["/dev/shm: there is no /dev/shm for 4 ranks"]
    assert together(cores=2) == ["4 ranks on 2 cores"]
    assert together(memory_free_bytes=1 << 30) == ["1.0 GiB of memory are free for 4 ranks"]
    assert together(disk_free_bytes=1 << 20) == ["1 MiB are free in /data"]
    assert together(open_files_limit=64)[0].startswith("64 files may be open")
    assert together(interface_error="NETFOLD_INTERFACE=ib0: no such interface")[0].endswith("no such interface")
    apart = PreflightFacts([replace(WELL, rank=rank) for rank in range(2)], [], [0, 1], [""] * 2)
    assert "do not share memory" in apply_rules(apart)[0].what


def test_a_round_robin_tournament_measures_each_pair_once() -> None:
    for players in range(2, 12):
        met = [tuple(sorted(pair)) for partners in rounds(players) for pair in partners.items()]
        assert len(met) == 2 * len(set(met)) == players * (players - 1)  # each pair once, from both sides
        for partners in rounds(players):
            assert all(partners[other] == one for one, other in partners.items())
    assert len(rounds(100)) == 31


def noted(gathered: PreflightFacts) -> tuple[str, str]:
    (finding,) = advise(gathered)
    assert finding.level is Level.NOTE and apply_rules(gathered) == []
    return finding.what, finding.remedy


def test_without_a_switch_the_advice_has_the_formulas_gain_of_a_spare_host() -> None:
    what, remedy = noted(hosts(8))
    # n/b over 1/8 + (1 - 1/8) 8/14 of it each, where a ring takes 14/8.
    assert "(1000 Mbit/s)" in what and "91% of a ring's time, 20% through it" in what
    assert "NETFOLD_SWITCH" in remedy
    assert list(advise(hosts(2))) == [] and list(advise(replace(hosts(8), link_bytes_per_s=0.0))) == []


def test_the_advice_has_the_gain_of_the_switch_and_of_a_second_one() -> None:
    def measured(*of_link: float) -> PreflightFacts:
        return replace(hosts(8), capacities=[Capacity(f"s:{c}", GIGABIT * c / 8) for c in of_link])

    what, remedy = noted(measured(4))
    assert "c = 4 of a host's link" in what and "73% of a ring's time, 64% through the switch" in what
    assert remedy == "one more like it: 79% of the time now"
    what, remedy = noted(measured(1, 2))
    assert "c = 1, 2 of a host's link" in what and remedy == "one more like it: 87% of the time now"
    what, remedy = noted(measured(8))
    assert "57% of a ring's time, 100% through the switch" in what and remedy == "one more would buy nothing"


def test_an_unmeasured_switch_is_a_warning_without_a_gain() -> None:
    gathered = replace(hosts(4), capacities=[Capacity("s:1", 5.0), Capacity("s:2", error="it is gone")])
    (finding,) = apply_rules(gathered)
    assert finding.level is Level.WARN and finding.where == "switch s:2" and "it is gone" in finding.what
    assert list(advise(gathered)) == []


def test_a_setting_that_netfold_does_not_know_is_named_with_the_nearest_one() -> None:
    (finding,) = apply_rules(hosts(2, environment={rank: {"NETFOLD_SWICH": "a:1"} for rank in range(2)}))
    assert finding.level is Level.WARN and finding.what.startswith("NETFOLD_SWICH is set")
    assert finding.remedy == "did you mean NETFOLD_SWITCH?"
