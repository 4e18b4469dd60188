"""The gain of one more aggregator, in numbers, in words and in JSON."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from netfold.cli import app
from netfold_plan.cluster import load_cluster
from netfold_plan.cluster.aggregator import MOST_CORES
from netfold_plan.cluster.networks import with_network
from netfold_plan.job import Job, Split
from netfold_plan.model.registry import find_model
from netfold_plan.search import Space, search
from netfold_plan.variants.hardware import MOST_PORTS, aggregator_gains


def test_offers_lie_between_the_present_link_and_one_port_for_each_worker() -> None:
    model, cluster = find_model("vgg16:measured=true"), load_cluster("ethernet-1g")
    found = search(
        model, cluster, 8, Job(512, 64, Split(8), precision="f32", optimizer="momentum", overlap=True), Space()
    )
    spare, box = aggregator_gains(model, cluster, found)
    now, best = found.best.prediction.step_s, found.best.job
    assert now > spare.step_s > box.step_s and spare.choice.job.in_network
    assert (spare.c, box.c, spare.cores) == (1, 8, 1) and 1 <= box.cores <= MOST_CORES
    # Gradients of which nothing is hidden scale as counted above: 1.6 for 1.75, less what computing hides.
    small = replace(best, overlap=False)
    bare = search(model, cluster, 8, small, Space(data=8, micro_batch=64, zero=0))
    gradients_s = bare.best.prediction.exposed_s["data"]
    one = aggregator_gains(model, cluster, bare)[0]
    assert one.choice.prediction.exposed_s["data"] / gradients_s == pytest.approx(1.6 / 1.75, rel=0.01)
    # Where there is one already, the next buys what a second one does.
    with_one = with_network(cluster, "aggregator")
    job = replace(small, in_network=True)
    again = search(model, with_one, 8, job, Space(data=8, micro_batch=64, zero=0))
    assert again.best.prediction.step_s == pytest.approx(one.step_s)
    two = with_network(cluster, "two-aggregators")
    both = search(model, two, 8, job, Space(data=8, micro_batch=64, zero=0))
    assert aggregator_gains(model, with_one, again)[0].step_s == pytest.approx(both.best.prediction.step_s)


def test_an_offered_box_has_at_most_the_ports_of_its_cards() -> None:
    model, cluster = find_model("vgg16:measured=true"), load_cluster("ethernet-1g")
    job = Job(64 * (MOST_PORTS + 1), 64, precision="f32", optimizer="momentum")
    for workers, count in ((MOST_PORTS, 2), (MOST_PORTS + 1, 1)):
        sized = replace(job, global_batch=64 * workers)
        found = search(model, cluster, workers, sized, Space(data=workers, micro_batch=64, zero=0))
        assert len(aggregator_gains(model, cluster, found)) == count


def test_nothing_is_offered_beside_a_reducing_switch_or_for_one_worker() -> None:
    model = find_model("vgg16:measured=true")
    job = Job(512, 64, Split(8), precision="f32", optimizer="momentum", in_network=True)
    tofino = load_cluster("switchml-10g")
    assert aggregator_gains(model, tofino, search(model, tofino, 8, job, Space())) == ()
    alone = load_cluster("ethernet-1g")
    assert aggregator_gains(model, alone, search(model, alone, 1, replace(job, in_network=False), Space())) == ()


ASKED = ("--model", "vgg16:measured=true", "--ranks", "8", "--batch", "512", "--precision", "f32", "--overlap")


def plan(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["plan", *ASKED, *arguments])
    return result.exit_code, result.output


def test_text_and_json_have_the_gain_of_one_more_aggregator() -> None:
    code, text = plan("--cluster", "ethernet-1g")
    assert code == 0 and "what one more aggregator would buy" in text
    assert "no aggregator: one spare host with a link like a worker's (c = 1, 1 core) would save" in text
    assert "a Linux box with a port per worker (c = 8, " in text
    code, text = plan("--cluster", "ethernet-1g", "--output", "json")
    found = json.loads(text)
    spare, box = found["aggregators"]
    assert spare["now_s"] == found["best"]["step_s"] and spare["saved"] == 1 - spare["step_s"] / spare["now_s"]
    assert box["c"] == 8 and box["saved"] > spare["saved"] > 0


def test_an_aggregator_on_a_workers_host_without_gain_is_reported(tmp_path: Path) -> None:
    slow, fast = tmp_path / "slow.toml", tmp_path / "fast.toml"
    tier = '[[tier]]\nname = "Ethernet"\ndevices = 8\nlatency = "60 us"\nrate = "1 Gbit/s"\n'
    for file, c in ((slow, 1), (fast, 2)):
        file.write_text(f'device = "p100"\n{tier}[[tier.aggregator]]\nlink = {c}\nworker = true\n')
    code, text = plan("--cluster", str(slow))
    assert code == 0 and "on a worker's own host aggregates nothing" in text
    assert "1 aggregator now; one spare host" in text
    assert "aggregates nothing" not in plan("--cluster", str(fast))[1]


DDP = ("--model", "bert-large", "--ranks", "8", "--batch", "256", "--tensor", "1", "--pipeline", "1", "--zero", "1")


@pytest.mark.parametrize(("network", "index", "cores"), [("aggregator", 0, "2 cores"), ("linux-box", 1, "11 cores")])
def test_a_compared_aggregator_is_the_offered_one_and_its_cores_are_named(network: str, index: int, cores: str) -> None:
    command = ["plan", *DDP, "--cluster", "ethernet-10g", "--compare", f"network={network}"]
    result = json.loads(CliRunner().invoke(app, [*command, "--output", "json"]).output)
    compared = result["comparisons"][f"network={network}"][1]["best"]["step_s"]
    assert compared == pytest.approx(result["aggregators"][index]["step_s"])
    text = CliRunner().invoke(app, command).output
    assert text.count(cores) == 2, text


def test_a_step_as_events_outside_of_the_range_says_so() -> None:
    command = ["plan", "--model", "bert-large", "--cluster", "ethernet-10g", "--ranks", "8", "--batch", "256"]
    text = CliRunner().invoke(app, [*command, "--events"]).output
    assert "outside of its range" in text
    text = CliRunner().invoke(app, [*command, "--events", "--tensor", "1", "--pipeline", "1", "--zero", "1"]).output
    assert "the same step, simulated as events" in text and "outside of its range" not in text


def test_efficiencies_of_different_meaning_have_different_names() -> None:
    command = ["plan", "--model", "bert-large", "--cluster", "ethernet-10g", "--ranks", "8", "--batch", "256"]
    lines = CliRunner().invoke(app, [*command, "--curve", "2..8"]).output.splitlines()
    assert [line for line in lines if line.startswith("data-parallel efficiency")]
    titles = [line for line in lines if "scaling: " in line]
    assert len(titles) == 2 and all("against the first row's" in line for line in titles)
    assert not [line for line in lines if line.startswith("scaling efficiency")]
