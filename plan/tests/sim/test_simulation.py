"""The simulator: the same seed gives the same run, every run ends, and a failure names its cause and its replay."""

import shlex
import subprocess
import sys

import pytest
from load import seconds

from netfold_plan.sim import values
from netfold_plan.sim.__main__ import main
from netfold_plan.sim.clock import Clock
from netfold_plan.sim.harness import Harness, Operation
from netfold_plan.sim.network import (
    DELIVERED,
    LATENCY_NS,
    LOST,
    REFUSED,
    Copy,
    Delivery,
    ListedDeliveries,
    Network,
    Packet,
    Ratios,
)
from netfold_plan.sim.scenario import Scenario
from netfold_plan.sim.simulation import Simulation, SimulationError

pytestmark = pytest.mark.native

JOB = {"workers": 2, "window": 2, "payload_bytes": 8, "operations": [Operation(0, 9, "i32")]}


def test_events_of_one_instant_come_in_the_order_they_were_added():
    clock = Clock()
    for when_ns, event in [(5, "c"), (3, "a"), (5, "d"), (4, "b")]:
        clock.at(when_ns, event)
    assert [(clock.next(), clock.now_ns) for _ in range(5)] == [("a", 3), ("b", 4), ("c", 5), ("d", 5), (None, 5)]
    clock.at(1, "late")
    assert (clock.next(), clock.now_ns) == ("late", 5)


def test_the_same_seed_gives_the_same_run():
    def trace(seed):
        records = []
        summary = Scenario(seed=seed).simulation(watch=lambda record: records.append(str(record))).run()
        return str(summary), records

    assert trace(5) == trace(5)
    assert trace(5) != trace(6)


def test_a_replay_command_names_the_whole_scenario():
    scenario = Scenario(seed=9, workers=3, loss=0.25, wire="bf16", extra_delay_us=7)
    assert (
        scenario.command()
        == "python -m netfold_plan.sim --seed 9 --workers 3 --wire bf16 --loss 0.25 --extra-delay-us 7"
    )


def test_the_replay_command_replays(capsys):
    scenario = Scenario(seed=9, workers=3, loss=0.25, wire="bf16", extra_delay_us=7)
    assert main(shlex.split(scenario.command())[3:]) == 0
    assert capsys.readouterr().out == f"seed 9: {scenario.simulation().run()}\n"


def test_the_simulator_runs_as_a_module():
    command = [sys.executable, "-m", "netfold_plan.sim", "--seed", "3", "--runs", "2", "--operations", "1"]
    out = subprocess.run(command, capture_output=True, text=True, check=True, timeout=seconds(60)).stdout
    assert [line.split(":")[0] for line in out.splitlines()] == ["seed 3", "seed 4"]


def test_the_drawing_of_a_run_shows_lost_packets(tmp_path, capsys):
    file = tmp_path / "run.svg"
    run = ["--seed", "5", "--workers", "2", "--operations", "1", "--max-elements", "20", "--loss", "0.4"]
    assert main([*run, "--diagram", "--svg", str(file)]) == 0
    names, *rows, summary = capsys.readouterr().out.splitlines()
    assert names.split() == ["worker", "0", "worker", "1", "switch"]
    lost = [row for row in rows if row.endswith("lost")]
    assert f"lost={len(lost)} " in summary
    assert lost and all("x" in row for row in lost)
    assert sum(row.endswith("completed") for row in rows) == 1
    assert file.read_text().count("crimson") == len(lost)
    assert main(run) == 0
    assert capsys.readouterr().out == f"{summary}\n", "drawing a run changes nothing"


def test_a_broken_promise_exits_with_1_and_the_replay_command(monkeypatch, capsys):
    # The harness now expects a sum that no switch returns.
    monkeypatch.setattr(values, "reference_reduce", lambda reduce, wire, contributions: contributions[0])
    assert main(["--seed", "4", "--workers", "2", "--wire", "i32", "--loss", "0"]) == 1
    complaint = capsys.readouterr().err
    assert "was given a wrong result of chunk" in complaint
    assert "replay: python -m netfold_plan.sim --seed 4 --workers 2 --wire i32 --loss 0.0" in complaint
    assert "switch -> worker" in complaint, "the last events are shown"


@pytest.mark.parametrize("arguments", [["--loss", "1"], ["--wire", "f8"], ["--operations", "0"], ["--delay", "-0.1"]])
def test_an_invalid_scenario_is_refused(arguments, capsys):
    with pytest.raises(SystemExit):
        main(arguments)
    assert arguments[0].lstrip("-") in capsys.readouterr().err.replace("wire format", "wire")


def test_a_ratio_of_1_is_refused():
    with pytest.raises(ValueError, match="loss is a ratio"):
        Ratios(loss=1)


@pytest.mark.parametrize(
    ("fate", "counts", "arrivals"),
    [
        (DELIVERED, {"sent": 1}, 1),
        (LOST, {"sent": 1, "lost": 1}, 0),
        (REFUSED, {"sent": 1, "refused": 1}, 0),
        (Delivery((Copy(), Copy(5))), {"sent": 1, "duplicated": 1, "delayed": 1}, 2),
        (Delivery((Copy(cut_to_bytes=7),)), {"sent": 1, "truncated": 1}, 1),
        (Delivery((Copy(cut_to_bytes=70),)), {"sent": 1}, 1),
        (Delivery((Copy(flipped_bit=3),)), {"sent": 1, "corrupted": 1}, 1),
        (
            Delivery((Copy(flipped_bit=48 * 8),)),
            {"sent": 1, "corrupted": 1},
            0,
        ),  # a bit of a value, which the checksum guards
    ],
    ids=str,
)
def test_a_packet_is_delivered_according_to_its_fate(fate, counts, arrivals):

    clock = Clock()
    network = Network(clock, lambda packet: fate)
    assert network.send(Packet(0, -1, bytes(56))) == (not fate.refused)
    assert network.counts == counts
    got = []
    while (packet := clock.next()) is not None:
        got.append(packet)
        assert clock.now_ns >= LATENCY_NS
        assert packet.must_drop == (packet.data != bytes(56))
    assert len(got) == arrivals


def test_a_run_that_cannot_end_fails_with_its_state():
    simulation = Simulation(**JOB, deliveries=lambda packet: LOST, max_events=50, replay="THE COMMAND")
    with pytest.raises(SimulationError) as failure:
        simulation.run()
    text = str(failure.value)
    for part in ("within 50 events", "replay: THE COMMAND", "worker 1: 1 operations called", "misses workers [0, 1]"):
        assert part in text


def test_an_operation_that_one_worker_never_calls_is_refused():
    calls_ns = [[0], []]
    with pytest.raises(ValueError, match="worker 1 calls 0 operations"):
        Simulation(**JOB, deliveries=ListedDeliveries([]), calls_ns=calls_ns)


def test_an_unmarked_packet_cannot_be_injected():
    with pytest.raises(ValueError, match="must_drop"):
        Simulation(**JOB, deliveries=ListedDeliveries([]), injected=[(0, Packet(0, -1, bytes(56)))])


def test_a_harness_runs_without_clock_or_network():
    harness = Harness(**JOB)
    packets = []
    for worker in range(2):
        harness.submit(worker)
    while not harness.finished:
        for worker in range(2):
            for offer in harness.offers(worker, 0):
                harness.sent(worker, offer)
                packets.append(offer.packet)
        arriving, packets = packets, []
        for packet in arriving:
            packets += harness.arrive(packet, 0).answers
    harness.check_finished(0)
