"""Clusters from measured links, and invalid files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from netfold.tuning.measured_link import measured_link
from netfold_plan.cluster import cluster_of, devices, load_cluster

DEVICE = {"flops": {"f32": "1 TFLOP/s"}, "memory": "8 GiB", "memory_rate": "20 GB/s"}
INSIDE = {"name": "memory", "devices": 4, "latency": "1 us", "rate": "10 GB/s"}


def doctor(*links: tuple[float, float, float]) -> dict[str, Any]:
    names = ("latency_s", "forward_bytes_per_s", "reverse_bytes_per_s")
    return {"facts": [], "links": [dict(zip(names, link, strict=True)) for link in links]}


def bench(ranks: int, latency_s: float, bytes_per_s: float, algorithm: str | None = "ring") -> dict[str, Any]:
    def time_ns(size: int) -> float:
        return 1e9 * 2 * (ranks - 1) * (latency_s + size / ranks / bytes_per_s)

    sizes = [4096 << (2 * power) for power in range(8)]
    rows = [
        {"backend": side, "collective": "all_reduce", "size_bytes": size, "algorithm": algorithm}
        | {"time_ns": {"median": factor * time_ns(size)}}
        for size in sizes
        for side, factor in (("netfold", 1), ("gloo", 3))
    ]
    return {"place": {"workers": ranks}, "rows": rows}


def written(found: object, folder: Path) -> Path:
    file = folder / "measured.json"
    file.write_text(found if isinstance(found, str) else json.dumps(found))
    return file


def test_links_of_the_doctor_give_a_median_per_host_shared_by_its_devices(tmp_path: Path) -> None:
    file = written(doctor((40e-6, 1e9, 2e9), (60e-6, 1.2e9, 1.1e9), (50e-6, 3e9, 3e9)), tmp_path)
    tier = {"name": "network", "devices": 16, "measured": str(file)}
    found = cluster_of({"device": DEVICE, "tier": [INSIDE, tier]}, "mine").tiers[1]
    assert found.latency_s == pytest.approx(50e-6) and found.bytes_per_s == pytest.approx(1.1e9 / 4)


@pytest.mark.parametrize("ranks", [2, 8])
def test_the_link_fitted_to_ring_times_equals_the_link_that_made_them(ranks: int, tmp_path: Path) -> None:
    link = measured_link(written(bench(ranks, 30e-6, 1e9), tmp_path))
    assert link.latency_s == pytest.approx(30e-6, rel=0.01) and link.bytes_per_s == pytest.approx(1e9, rel=0.01)


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        ("{", "is not JSON"),
        ({}, "is neither"),
        ({"links": []}, "has no link"),
        ({"links": [{"latency_s": 1}]}, "is cut off"),
        ([1], "is neither"),
        (bench(4, 1e-5, 1e9, "tree"), "fewer than two sizes that went in a ring"),
        (bench(1, 1e-5, 1e9), "over two ranks or more"),
        ({"place": {}, "rows": [{}]}, "is cut off, or of another version"),
        ({"facts": [], "links": 3}, "is cut off, or of another version"),
        (doctor((50e-6, 0.0, 0.0)), "makes a link of 50 us, 0 MB/s, which there is not"),
    ],
)
def test_a_file_without_link_measurements_is_refused_in_a_sentence(found: object, reason: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError) as error:
        measured_link(written(found, tmp_path))
    assert reason in str(error.value) and str(tmp_path) in str(error.value)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"tier": "fast"}, r"tier must be a list of tables"),
        ({"tier": []}, "has no tier"),
        ({"device": 3}, "device must be a name, or a table"),
        ({"device": DEVICE | {"flops": "1 TFLOP/s"}}, "flops must be a table by precision"),
        ({"device": DEVICE | {"flops": {"fp16": "1 TFLOP/s"}}}, r"'fp16' is not known; did you mean f16\?"),
        ({"sources": 5}, "sources must be a list"),
        ({"device": DEVICE | {"multiprocessors": "many"}}, "multiprocessors = 'many'; it must be a whole number"),
        ({"tier": [INSIDE | {"devices": True}]}, "devices = True; it must be a whole number"),
        ({"price_an_hour": "2 EUR"}, "price_an_hour = '2 EUR'; it must be a number"),
        ({"tier": [INSIDE | {"in_network": "yes"}]}, "it must be true or false"),
        ({"tier": [INSIDE | {"oversubscription": "2:1"}]}, "it must be a number"),
        ({"tier": [INSIDE | {"measured": "x.json"}]}, "leave one of them out"),
        ({"tier": [INSIDE | {"rate": "10 ms"}]}, "is a quantity of time"),
    ],
)
def test_an_impossible_cluster_is_refused_in_a_sentence(change: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        cluster_of({"device": DEVICE, "tier": [INSIDE]} | change, "mine")


def test_a_measured_link_is_a_cluster_by_its_file_and_a_device(tmp_path: Path) -> None:
    file = written(doctor((50e-6, 1e9, 1e9)), tmp_path)
    found = load_cluster(f"measured={file},device=v100-16,hosts=16")
    assert (found.device.name, found.devices, found.node) == ("v100-16", 16, 16)
    assert found.tiers[0].latency_s == pytest.approx(50e-6) and found.tiers[0].bytes_per_s == pytest.approx(1e9)
    assert found.sources == (f"measured: {file}",)
    # The device of a profile needs no name, and stays.
    ran_on = devices()["p100"]
    assert load_cluster(f"measured={file}", ran_on).device is ran_on


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ("measured=", "names no file; write measured=links.json"),
        ("measured={file}", r"names no device; write measured=.*,device=a100-80 \(p100, "),
        ("measured={file},device=a100-8", "there is no device 'a100-8'; did you mean a100-80"),
        ("measured={file},device=p100,host=4", r"'host' is not known; did you mean hosts\?"),
        ("measured={file},device=p100,hosts=4 GB", "hosts = '4 GB'; it must be a whole number"),
        ("measured={file},p100", "'p100' must be one key with a value"),
        ("measured=nowhere.json,device=p100", "nowhere.json: cannot be read"),
        ("measured=100 Gbit/s,device=p100", "100 Gbit/s: cannot be read"),
        ("mesured=links.json", "there is no cluster 'mesured=links.json'"),
    ],
)
def test_an_invalid_measured_cluster_is_refused_in_a_sentence(said: str, reason: str, tmp_path: Path) -> None:
    file = written(doctor((50e-6, 1e9, 1e9)), tmp_path)
    with pytest.raises(ValueError, match=reason):
        load_cluster(said.format(file=file))


def test_a_missing_file_is_refused_in_a_sentence() -> None:
    with pytest.raises(ValueError, match="cannot be read"):
        load_cluster("nowhere/mine.toml")
