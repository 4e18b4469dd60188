"""A profile as input of the planner: a run with a known link and known times gives both back."""

from __future__ import annotations

import json
from dataclasses import replace
from html import unescape
from pathlib import Path

import pytest
from traces import MB, OPERATIONS, PROFILER, Op, Trace, make_run, make_trace, write_run
from typer.testing import CliRunner

from netfold.cli import app
from netfold.tuning.cost import predict as formula
from netfold.tuning.topology import DEFAULT_LINKS, Link, Topology
from netfold_plan.cluster import Cluster
from netfold_plan.job import Job, Split
from netfold_plan.request.profile import read_profile
from netfold_plan.step import predict

RANKS, STEPS = 4, 12
LINKS = replace(DEFAULT_LINKS, network=Link(100e-6, 100e6))
# Of a step: 100 ms of computing, in which buckets are ready; then the update.
READY_MS, SIZES, COMPUTED_MS, UPDATE_MS = (60.0, 80.0, 100.0), (MB, 4 * MB, 2 * MB), 100.0, 10.0


def ring_ms(size: float, links: object = LINKS) -> float:
    return 1e3 * formula("all_reduce", "ring", size, Topology.apart(RANKS), links)  # type: ignore[arg-type]


def waited_ms() -> float:
    ended = 0.0
    for ready, size in zip(READY_MS, SIZES, strict=True):
        ended = max(ended, ready) + ring_ms(size)
    return ended - COMPUTED_MS


STEP_MS = COMPUTED_MS + waited_ms() + UPDATE_MS


def trained(rank: int, *, steps: int = STEPS, slow_ms: float = 0.0, **more: object) -> Trace:
    """One rank's; its computing takes slow_ms longer, while the others wait for its buckets."""
    operations, lines, spans = [], [(0.0, 0.0)], []
    busy, began = 0.0, 1.0
    for _ in range(steps):
        ended = began
        for ready, size in zip(READY_MS, SIZES, strict=True):
            started = max(ended, began + ready + slow_ms)
            ended = started + ring_ms(size)
            operations.append(Op(started, ended, size, queued_ms=began + ready + slow_ms))
        lines += [(began, busy), (began + COMPUTED_MS + slow_ms, busy + COMPUTED_MS + slow_ms)]
        busy += COMPUTED_MS + slow_ms
        lines += [(ended, busy), (ended + UPDATE_MS, busy + UPDATE_MS)]
        busy += UPDATE_MS
        spans.append((began, ended + UPDATE_MS))
        began = ended + UPDATE_MS
    return make_trace(rank, RANKS, operations, steps_ms=spans, progress_ms=lines, **more)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(make_run(*map(trained, range(RANKS))), tmp_path_factory.mktemp("profile") / "RUN")


def test_a_replayed_step_reproduces_bucket_times_computing_and_the_update(folder: Path) -> None:
    model = read_profile(folder).model
    assert model.ready_s == pytest.approx([each / 1e3 for each in READY_MS], rel=1e-3)
    assert model.bucket_bytes == SIZES and model.parameters == sum(SIZES) / 4
    assert model.computed_s == pytest.approx(COMPUTED_MS / 1e3, rel=1e-3)
    assert model.update_s == pytest.approx(UPDATE_MS / 1e3, rel=1e-3)
    assert model.exposed_s == pytest.approx(waited_ms() / 1e3, rel=1e-3)


def test_the_prediction_for_the_measured_network_equals_the_measurement(folder: Path) -> None:
    seen = read_profile(folder)
    assert isinstance(seen.network, Cluster)
    assert seen.network.tiers[0].bytes_per_s == pytest.approx(100e6, rel=0.01)
    found = predict(seen.model, seen.network, Job(RANKS, split=Split(data=RANKS), precision="f32", overlap=True))
    assert found.step_s == pytest.approx(STEP_MS / 1e3, rel=0.01)
    assert found.exposed_s["data"] == pytest.approx(waited_ms() / 1e3, rel=0.02)
    assert found.optimizer_s == pytest.approx(UPDATE_MS / 1e3, rel=1e-3)


def test_with_ten_times_the_network_only_the_last_bucket_is_exposed(folder: Path) -> None:
    seen = read_profile(folder)
    assert isinstance(seen.network, Cluster)
    tier = replace(seen.network.tiers[0], bytes_per_s=1e9)
    fast = replace(seen.network, tiers=(tier,))
    found = predict(seen.model, fast, Job(RANKS, split=Split(data=RANKS), precision="f32", overlap=True))
    links = replace(LINKS, network=Link(tier.latency_s, 1e9))
    assert found.exposed_s["data"] == pytest.approx(ring_ms(SIZES[-1], links) / 1e3, rel=0.1)


def test_computing_time_is_that_of_the_slowest_rank_of_each_step(tmp_path: Path) -> None:
    ranks = [trained(0), trained(1), trained(2), trained(3, slow_ms=7.0)]
    model = read_profile(write_run(make_run(*ranks), tmp_path / "RUN")).model
    assert model.computed_s == pytest.approx((COMPUTED_MS + 7) / 1e3, rel=1e-3)


def test_a_bf16_wire_halves_the_sent_bytes(tmp_path: Path) -> None:
    traces = []
    for rank in range(RANKS):
        trace = trained(rank)
        trace.operations["wire"] = 3
        traces.append(trace)
    model = read_profile(write_run(make_run(*traces), tmp_path / "RUN")).model
    assert model.bucket_bytes == tuple(size / 2 for size in SIZES) and model.parameters == sum(SIZES) / 4


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"steps": 0}, "recorded no step of training; call netfold.profile.step"),
        ({"steps": 3}, "2 of its steps follow an equal step, and a median needs at least 5"),
    ],
)
def test_a_profile_without_training_is_refused_with_a_reason(more: dict[str, int], reason: str, tmp_path: Path) -> None:
    folder = write_run(make_run(*(trained(rank, **more) for rank in range(RANKS))), tmp_path / "RUN")
    with pytest.raises(ValueError, match=reason) as error:
        read_profile(folder)
    assert str(folder) in str(error.value)


def test_a_profile_of_sharded_weights_is_refused_and_none_of_its_gathers_is_dropped(tmp_path: Path) -> None:
    """A small all_reduce, of a norm, stands beside gathers of all weights in each step."""
    traces = []
    for rank in range(RANKS):
        trace = trained(rank)
        trace.operations["operation"][1::3] = OPERATIONS.index("all_gather")
        trace.operations["operation"][2::3] = OPERATIONS.index("reduce_scatter")
        trace.operations["bytes"][::3] = 4
        traces.append(trace)
    with pytest.raises(ValueError, match=r"its weights are sharded \(FSDP, ZeRO\), and only data-parallel training"):
        read_profile(write_run(make_run(*traces), tmp_path / "RUN"))


def test_missing_ranks_are_reported(tmp_path: Path) -> None:
    folder = write_run(make_run(trained(0), trained(1)), tmp_path / "RUN")
    with pytest.raises(ValueError, match="2 of 4 ranks left records"):
        read_profile(folder)


def test_an_unknown_network_must_be_given_and_the_reason_is_printed(tmp_path: Path) -> None:
    traces = [trained(rank, source=PROFILER) for rank in range(RANKS)]
    folder = str(write_run(make_run(*traces), tmp_path / "RUN"))
    code, said = plan("--profile", folder)
    assert code == 2 and "does not show its network: the backend does not say which algorithm ran" in said
    code, said = plan("--profile", folder, "--cluster", "ethernet-1g", "--ranks", "8")
    assert code == 0 and "8 x the profile's device of ethernet-1g" in said


def plan(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["plan", *arguments])
    return result.exit_code, " ".join(result.output.split())


def test_the_verb_shows_measured_values_beside_predictions(folder: Path) -> None:
    code, said = plan("--profile", str(folder))
    assert code == 0, said
    assert f"{RANKS} ranks took" in said and "predicted for as many on" in said
    assert "on the same device, with as many samples per rank" in said
    # Neither value is known, so neither is invented.
    assert "memory of the rank" not in said and "utilisation" not in said


def test_for_more_workers_on_another_network_only_weak_scaling_is_drawn(folder: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    asked = ("--profile", str(folder), "--cluster", "ethernet-10g", "--ranks", "64", "--batch", "2048")
    code, said = plan(*asked, "--curve", "4..64", "--compare", "cluster=ethernet-1g", "-o", str(page))
    assert code == 0, said
    assert "weak scaling" in said and "strong scaling" not in said and "with 32 samples per rank" in said
    assert "Computing was measured; all else is predicted." in " ".join(unescape(page.read_text()).split())
    code, said = plan(*asked, "--events", "--output", "json")
    answer = json.loads(said)
    assert answer["best"]["mfu"] is None and answer["best"]["memory"] is None
    assert answer["simulated"]["step_s"] == pytest.approx(answer["best"]["step_s"], rel=1e-6)


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        (("--ranks", "64", "--batch", "100"), "a batch of 100 does not come out even over 64 devices"),
        (("--tensor", "2"), "use tensor 1, recompute none"),
        (("--pipeline", "2"), "ranks that hold the whole model; use pipeline 1"),
        (("--precision", "bf16"), "was computed in f32; it does not tell how long bf16 takes"),
        (("--model", "resnet50"), "another one is named; leave one out"),
        (("--batch", "16", "--micro-batch", "2"), "was measured with one pass of 4 samples"),
    ],
)
def test_an_unanswerable_request_is_refused_in_one_sentence(more: tuple[str, ...], reason: str, folder: Path) -> None:
    code, said = plan("--profile", str(folder), *more)
    assert code == 2 and reason in said, said
