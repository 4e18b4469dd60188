"""Clusters: presets load, quantities have units, and invalid clusters are refused in a sentence."""

from dataclasses import astuple
from pathlib import Path

import pytest

from netfold.quantity import parse_quantity
from netfold_plan.cluster import load_cluster, preset_names


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_loads_and_names_its_sources(name: str) -> None:
    cluster = load_cluster(name)
    assert cluster.sources and cluster.devices >= cluster.node >= 1
    assert all(tier.bytes_per_s > 0 and tier.latency_s > 0 for tier in cluster.tiers)


def test_a_cluster_file_may_have_bursts_and_shared_cores(tmp_path: Path) -> None:
    file = tmp_path / "rack.toml"
    text = """
        device = "p100"
        [shared]
        cores = 2
        operation = "100 us"
        message = "5 us"
        rate = "1 GB/s"
        switch_rate = "2 GB/s"
        [[tier]]
        name = "Ethernet"
        devices = 8
        latency = "50 us"
        rate = "200 Mbit/s"
        burst = "128 KiB"
    """
    file.write_text(text)
    cluster = load_cluster(str(file))
    assert cluster.shared is not None and cluster.tiers[0].burst_bytes == 131072
    assert astuple(cluster.shared) == pytest.approx((2, 100e-6, 5e-6, 1e-9, 0.5e-9))
    file.write_text(text.replace("cores = 2", ""))
    load_cluster.cache_clear()
    with pytest.raises(ValueError, match="shared: has no cores"):
        load_cluster(str(file))


def test_clusters_of_the_talks_and_of_the_issue_name_their_machines() -> None:
    wanted = {"dgx-a100", "dgx-1", "p3dn-efa", "p3dn-tcp", "edsr-v100", "switchml-10g", "switchml-100g", "sharp-hdr"}
    assert wanted <= set(preset_names())


def test_an_unknown_name_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ValueError, match="did you mean dgx-a100"):
        load_cluster("dgx-a10")


@pytest.mark.parametrize(
    ("text", "kind", "value"),
    [
        ("100 Gbit/s", "rate", 12.5e9),
        ("25 GB/s", "rate", 25e9),
        ("80 GiB", "bytes", 80 * 2**30),
        ("1.5 us", "time", 1.5e-6),
        ("312 TFLOP/s", "flops", 312e12),
        ("0.4kW", "power", 400.0),
    ],
)
def test_a_quantity_is_read_with_its_unit(text: str, kind: str, value: float) -> None:
    assert parse_quantity(text, kind, "here") == pytest.approx(value)


@pytest.mark.parametrize(
    ("value", "kind", "said"),
    [
        (100, "rate", "has no unit"),
        ("100", "rate", "has no unit"),
        ("80 GiB", "rate", "is a quantity of bytes, where one of rate is needed"),
        ("100 Gbps", "rate", "has an unknown unit"),
        ("fast", "rate", "is not a quantity"),
    ],
)
def test_a_missing_or_wrong_unit_is_refused_in_a_sentence(value: object, kind: str, said: str) -> None:
    with pytest.raises(ValueError, match=f"here: .*{said}"):
        parse_quantity(value, kind, "here")


_SOUND = """
device = "a100-80"
[[tier]]
name = "inside"
devices = 8
latency = "1 us"
rate = "300 GB/s"
[[tier]]
name = "outside"
devices = 64
latency = "10 us"
rate = "25 GB/s"
oversubscription = 2
"""


_TABLE = """
[device]
flops = { f32 = "19.5 TFLOP/s" }
memory = "80 GiB"
memory_rate = "2039 GB/s"
reserved = "2 GiB"
"""


def test_reserved_memory_is_not_usable_for_tensors(tmp_path: Path) -> None:
    (tmp_path / "ours.toml").write_text(_SOUND.replace('device = "a100-80"', _TABLE))
    device = load_cluster(str(tmp_path / "ours.toml")).device
    assert device.usable_bytes == device.memory_bytes - 2 * 2**30 == 78 * 2**30


def test_a_users_file_is_a_cluster(tmp_path: Path) -> None:
    (tmp_path / "ours.toml").write_text(_SOUND)
    cluster = load_cluster(str(tmp_path / "ours.toml"))
    assert (cluster.name, cluster.devices, cluster.node) == ("ours", 64, 8)
    assert cluster.tiers[1].busy_bytes_per_s == pytest.approx(12.5e9)
    assert cluster.tiers[1].under_load == 1.0
    (tmp_path / "loaded.toml").write_text(_SOUND + "under_load = 0.8\n")
    assert load_cluster(str(tmp_path / "loaded.toml")).tiers[1].busy_bytes_per_s == pytest.approx(10e9)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("devices = 64", "devices = 12", "from the inside out"),
        ("devices = 64", "devices = 0", "devices = 0; it must be a whole number"),
        ('rate = "25 GB/s"', 'rate = "0 GB/s"', "rate is 0"),
        ('rate = "25 GB/s"', "", "has no rate"),
        ("oversubscription = 2", "oversubscription = 0.5", "oversubscription = 0.5; it must be a number not below 1"),
        ("oversubscription = 2", "oversubscribed = 2", "did you mean oversubscription"),
        ("oversubscription = 2", "under_load = 1.2", "under_load = 1.2; it must be a number from 0 to 1"),
        ('device = "a100-80"', 'device = "a100-81"', "did you mean a100-80"),
        ('device = "a100-80"', "device =", "is not TOML"),
        ('device = "a100-80"', _TABLE.replace("2 GiB", "80 GiB"), "reserved = 80 GiB leaves nothing of a memory of 80"),
    ],
)
def test_an_impossible_cluster_is_refused_in_a_sentence(tmp_path: Path, old: str, new: str, said: str) -> None:
    path = tmp_path / f"bad{abs(hash(new))}.toml"
    path.write_text(_SOUND.replace(old, new))
    with pytest.raises(ValueError, match=said):
        load_cluster(str(path))
