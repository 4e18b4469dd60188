"""The parts of a rack, without building one: names, addresses, rates, the list of commands. No root."""

import pytest

from netfold_lab.rack import Rack, names
from netfold_lab.rack.check import evaluate, routes
from netfold_lab.rack.link import BURST_BYTES, Link, loss_rules, parse_link
from netfold_lab.rack.measure import Measurement
from netfold_lab.rack.topology import End, Layout, build_steps


@pytest.mark.parametrize(
    ("rate", "rate_bits"),
    [("1gbit", 10**9), ("200mbit", 2 * 10**8), ("2.5gbit", 25 * 10**8), ("64kbit", 64000), ("9bit", 9)],
)
def test_rates_are_read_as_tc_reads_them(rate: str, rate_bits: int) -> None:
    assert parse_link(rate, "0%").rate_bits == rate_bits


@pytest.mark.parametrize("rate", ["", "1", "1gb", "gbit", "-1gbit", "0gbit", "1 gbit"])
def test_a_rate_that_tc_would_not_understand_is_refused_with_an_example(rate: str) -> None:
    with pytest.raises(ValueError, match="1gbit"):
        parse_link(rate, "0%")


@pytest.mark.parametrize(("loss", "ratio"), [("0%", 0), ("0.1%", 0.001), ("25%", 0.25)])
def test_losses_are_percentages(loss: str, ratio: float) -> None:
    assert parse_link("1gbit", loss).loss_ratio == pytest.approx(ratio)


@pytest.mark.parametrize("loss", ["0.1", "100%", "-1%", "some", "0.00001%"])
def test_a_loss_that_cannot_be_made_is_refused(loss: str) -> None:
    with pytest.raises(ValueError, match="loss"):
        parse_link("1gbit", loss)


def test_a_burst_holds_the_largest_gso_packet() -> None:
    assert BURST_BYTES >= (64 << 10) + 1500


def test_the_queue_grows_with_the_rate() -> None:
    # 4 ms of 1 Gbit/s are 500000 bytes; of 10 Gbit/s ten times that.
    assert Link(10**9, 0).queue_bytes == (1 << 20) + 500_000
    assert Link(10**10, 0).queue_bytes == (1 << 20) + 5_000_000


def test_a_namespace_names_its_rack_and_a_foreign_namespace_names_none() -> None:
    assert names.rack_id_of(names.switch_namespace("0a1b")) == "0a1b"
    assert names.rack_id_of(names.host_namespace("0a1b", 12)) == "0a1b"
    assert names.rack_id_of(names.rack_namespace("0a1b", 3)) == "0a1b"
    assert names.rack_id_of(names.aggregator_namespace("0a1b")) == "0a1b"
    for foreign in ("", "nf-", "nf-0a1b", "nf-xyz-h1", "nf-0a1b-h", "my-nf-0a1b-h1", "nf-0a1b-h1-more"):
        assert names.rack_id_of(foreign) is None


def test_every_host_and_the_switch_have_different_addresses() -> None:
    addresses = {names.host_address(host) for host in range(names.HOSTS_MAX)}
    switches = {names.SWITCH_ADDRESS, *(names.rack_address(rack) for rack in range(names.RACKS_MAX))}
    assert len(addresses | switches) == names.HOSTS_MAX + names.RACKS_MAX + 1
    with pytest.raises(ValueError, match="no address"):
        names.host_address(names.HOSTS_MAX)


@pytest.mark.parametrize("hosts", [0, -1, names.HOSTS_MAX + 1])
def test_a_rack_without_hosts_or_with_too_many_is_refused(hosts: int) -> None:
    with pytest.raises(ValueError, match=f"1 to {names.HOSTS_MAX}"):
        Rack(hosts, "1gbit")


def test_a_worker_gets_its_rank_its_rendezvous_and_the_switch() -> None:
    environment = names.worker_environment(2, 4, "10.77.0.254:7171")
    assert (environment["RANK"], environment["WORLD_SIZE"], environment["LOCAL_RANK"]) == ("2", "4", "0")
    assert (environment["MASTER_ADDR"], environment["NETFOLD_SWITCH"]) == ("10.77.0.1", "10.77.0.254:7171")
    assert "NETFOLD_SWITCH" not in names.worker_environment(2, 4, None)


def test_every_link_is_shaped_at_both_ends_and_created_inside_the_racks_namespaces() -> None:
    steps = build_steps("0a1b", Layout(3, Link(10**9)))
    shaped = [step.argv[2] for step in steps if step.argv[0] == "tc"]
    assert sorted(shaped) == ["nf-0a1b-h0", "nf-0a1b-h1", "nf-0a1b-h2", *["nf-0a1b-switch"] * 3]
    for step in steps:
        assert any(word.startswith("nf-0a1b-") for word in step.argv), step


def test_losses_are_applied_to_single_packets_and_only_on_request() -> None:
    def words(loss_ratio: float) -> list[str]:
        return [" ".join(step.argv) for step in build_steps("0a1b", Layout(2, Link(10**9, loss_ratio)))]

    assert not any("nft" in line or "ethtool" in line for line in words(0))
    assert sum("nft" in line for line in words(0.01)) == 4
    assert sum("ethtool" in line and "tso off" in line for line in words(0.01)) == 4
    assert "random mod 1000000 < 1000 " in loss_rules("eth0", Link(10**9, 0.001))


def test_every_interface_has_its_own_table() -> None:
    # In a shared table every packet would pass the rules of all interfaces.
    tables = {loss_rules(f"h{host}", Link(10**9, 0.001)).split("{")[0] for host in range(4)}
    assert len(tables) == 4


@pytest.mark.parametrize(("delay", "delay_ns"), [("0us", 0), ("50us", 50_000), ("1.5ms", 1_500_000), ("2s", 2 * 10**9)])
def test_delays_are_read_as_tc_reads_them(delay: str, delay_ns: int) -> None:
    assert parse_link("1gbit", "0%", delay).delay_ns == delay_ns


@pytest.mark.parametrize("delay", ["", "50", "-1ms", "5 ms", "1m"])
def test_a_delay_that_tc_would_not_understand_is_refused_with_an_example(delay: str) -> None:
    with pytest.raises(ValueError, match="50us"):
        parse_link("1gbit", "0%", delay)


def test_a_delayed_link_is_a_tap_pair_and_any_other_link_a_veth_pair() -> None:
    steps = build_steps("0a1b", Layout(1, parse_link("1gbit", "0%", "8ms")))
    (cable,) = [step for step in steps if step.ends is not None]
    assert cable.ends == (End("nf-0a1b-h0", "eth0"), End("nf-0a1b-switch", "h0")) and cable.delay_ns == 8_000_000
    commands = [" ".join(step.argv) for step in steps]
    assert sum("tbf rate 1000000000bit" in line for line in commands) == 2
    assert not any("veth" in line for line in commands)
    assert all(step.ends is None for step in build_steps("0a1b", Layout(1, parse_link("1gbit"))))


def test_racks_have_equal_sizes_and_uplinks_between_them() -> None:
    link, uplink = Link(10**9), Link(10**8)
    layout = Layout(7, link, racks=3, uplink=uplink)
    assert [layout.rack_of(host) for host in range(7)] == [0, 0, 0, 1, 1, 2, 2]
    assert layout.path(0, 2) == [link, link]
    assert layout.path(0, 3) == [link, uplink, uplink, link]
    assert layout.path(0, None) == [link, uplink]
    assert Layout(2, link, aggregator=uplink).path(1, None) == [link, uplink]
    shaped = [step.argv[2] for step in build_steps("0a1b", layout) if step.argv[0] == "tc"]
    assert shaped.count("nf-0a1b-switch") == 3 and shaped.count("nf-0a1b-rack0") == 4


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"racks": 3, "uplink": "1gbit"}, "1 to 2 racks"),
        ({"racks": 2}, "uplinks"),
        ({"uplink": "1gbit"}, "one rack has no uplink"),
        ({"mtu": 576}, "1280"),
    ],
)
def test_an_impossible_rack_is_refused(wrong: dict[str, object], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        Rack(2, "1gbit", **wrong)  # type: ignore[arg-type]


GOOD = Measurement(round_trip_s=110e-6, mss=1448, stream_bits=0.9e9, sent=10_000, there=9_990, back=9_991)


@pytest.mark.parametrize(
    ("change", "bad"),
    [
        ({}, None),
        ({"stream_bits": 0.1e9}, "rate"),
        ({"stream_bits": 2e9}, "rate"),
        ({"round_trip_s": 20e-6}, "delay"),
        ({"round_trip_s": 0.02}, "delay"),
        ({"there": 10_000}, None),  # within four standard deviations: 10 +- 12.6
        ({"there": 9_900}, "loss"),
        ({"back": 9_900}, "loss"),
        ({"mss": 8948}, "MTU"),
    ],
)
def test_a_check_names_the_quantities_that_differ(change: dict[str, float], bad: str | None) -> None:
    found = evaluate("h0 to h1", [Link(10**9, 0.001, 50_000)], 1500, Measurement(**{**GOOD.__dict__, **change}))
    assert [finding.what.split(",")[0] for finding in found if not finding.passed] == ([] if bad is None else [bad])


def test_a_check_measures_one_path_of_each_kind() -> None:
    link = Link(10**9)
    assert [route[1:] for route in routes(Layout(1, link))] == [(0, None)]
    assert [route[1:] for route in routes(Layout(4, link, racks=2, uplink=link))] == [(0, None), (0, 1), (0, 3)]
    assert [route[1:] for route in routes(Layout(2, link, racks=2, uplink=link))] == [(0, None), (0, 1)]
