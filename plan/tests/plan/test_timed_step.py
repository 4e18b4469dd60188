"""A step from one host's profile, simulated on several hosts: its times can be computed by hand."""

import json
from dataclasses import asdict, replace

import pytest

from netfold_plan.cluster import Cluster, Device, Tier
from netfold_plan.cluster.cluster import Processors
from netfold_plan.events import Conditions, simulate, timeline
from netfold_plan.events.resources import SLICE_S, Cores, EventQueue
from netfold_plan.job import Job, Split
from netfold_plan.model import ReadyBucket, TimedLayer, TimedStep, read_timed_step
from netfold_plan.model.registry import find_model
from netfold_plan.step import FITTED, predict

# Nothing but the link's own rate and latency.
BARE = replace(FITTED, collective_s=0.0)
RATE, LATENCY_S = 1e6, 1e-4
# Forward passes of 10 and 20 ms, backward passes of 20 and 40 ms, and the host's time of each. Each of two buckets is
# sent after the backward pass of its layer.
MODEL = TimedStep(
    name="two layers",
    samples=4,
    timed=(
        TimedLayer("first", 1000, 0.010, 0.020, 0.001, 0.002),
        TimedLayer("second", 2000, 0.020, 0.040, 0.003, 0.004),
    ),
    ready=(ReadyBucket(8000, 1, 0.0005), ReadyBucket(4000, 2, 0.0005)),
    closing_host_s=0.002,
    vote_bytes=40,
    updating_host_s=0.005,
    beside_host_s=0.0,
)  # fmt: skip
ALONE_S = 0.034 + 0.066 + 0.001 + 0.002 + 0.005  # forward, backward, buckets' host, close, update


def rack(hosts: int, *, in_network: bool = False, burst: float = 0.0, shared: Processors | None = None) -> Cluster:
    device = Device("any", {"f32": 1e12}, 1e9, 1e10, copy_bytes_per_s=1e15)
    return Cluster(
        "rack",
        device,
        (Tier("Ethernet", hosts, LATENCY_S, RATE, in_network=in_network, burst_bytes=burst),),
        shared=shared,
    )


def step_s(at: Cluster, model: TimedStep = MODEL, **how: object) -> float:
    hosts = at.devices
    job = Job(4 * hosts, 4, Split(data=hosts), precision="f32", overlap=True, **how)  # type: ignore[arg-type]
    return simulate(model, at, job, Conditions(), BARE).prediction.step_s


def test_a_single_rank_takes_the_profiled_time() -> None:
    assert step_s(rack(1)) == pytest.approx(ALONE_S)


def test_a_bucket_that_ends_during_the_backward_pass_is_hidden() -> None:
    # The first: 8 ms of a ring of two, while the second layer back takes 22 ms. The step waits for the last bucket and
    # for the vote.
    last_s, vote_s = 2 * LATENCY_S + 4000 / RATE, 2 * LATENCY_S + 40 / RATE
    assert step_s(rack(2)) == pytest.approx(ALONE_S + last_s + vote_s, rel=1e-6)


def test_a_bucket_waits_for_the_one_before_it() -> None:
    late = replace(MODEL, ready=(ReadyBucket(80_000, 1, 0.0), ReadyBucket(4000, 2, 0.0)))
    # 80 ms from the end of the second layer's backward pass on, of which the first's takes 22.
    more_s = 0.08 + 2 * LATENCY_S - 0.022
    plain = replace(MODEL, ready=(ReadyBucket(0, 1, 0.0), ReadyBucket(4000, 2, 0.0)))
    assert step_s(rack(2), late) - step_s(rack(2), plain) == pytest.approx(more_s, rel=1e-6)


@pytest.mark.parametrize("hosts", [2, 4, 8])
def test_a_ring_sends_nearly_twice_and_the_switch_once(hosts: int) -> None:
    one = replace(MODEL, ready=(ReadyBucket(100_000, 2, 0.0),))
    ring, network = step_s(rack(hosts), one), step_s(rack(hosts, in_network=True), one, in_network=True)
    steps = 2 * (hosts - 1)
    # The bucket, and the vote of all ranks.
    more_s = 2 * (steps - 2) * LATENCY_S + (steps / hosts - 1) * (100_000 + 40) / RATE
    assert ring - network == pytest.approx(more_s, abs=1e-9)


def test_a_16_bit_wire_halves_the_buckets_and_not_the_vote() -> None:
    one = replace(MODEL, ready=(ReadyBucket(100_000, 2, 0.0),))
    whole, half = step_s(rack(4), one), step_s(rack(4), one, wire="bf16")
    assert whole - half == pytest.approx(1.5 * 50_000 / RATE)


def test_an_idle_link_passes_a_burst_at_once() -> None:
    one = replace(MODEL, ready=(ReadyBucket(100_000, 2, 0.0),))
    # The link recovers its burst before the vote.
    saved_s = (30_000 + 39) / RATE
    assert step_s(rack(2), one) - step_s(rack(2, burst=30_000), one) == pytest.approx(saved_s)


def test_hosts_that_share_cores_take_turns() -> None:
    own, two = step_s(rack(4)), step_s(rack(4, shared=Processors(2)))
    # All four hosts update at the same time, on two cores.
    assert two > own + MODEL.updating_host_s
    assert two < own + 4 * (ALONE_S - 0.089) / 2


def test_hosts_with_a_core_each_do_not_wait() -> None:
    assert step_s(rack(2, shared=Processors(2))) == pytest.approx(step_s(rack(2)))


def test_cores_that_share_memory_bandwidth_slow_each_other() -> None:
    slow = replace(MODEL, crowded=2.0)
    calm, crowded = (step_s(rack(2, shared=Processors(2)), model) for model in (MODEL, slow))
    assert crowded - calm >= 0.9 * MODEL.updating_host_s
    assert step_s(rack(2), slow) == pytest.approx(step_s(rack(2)))


def test_collectives_also_need_cores() -> None:
    one = replace(MODEL, ready=(ReadyBucket(100_000, 2, 0.0),))
    # A core is busy with a byte as long as the link with 4: eight hosts need four times what two cores have.
    busy = Processors(2, byte_s=1 / RATE)
    assert step_s(rack(8, shared=busy), one) > step_s(rack(8, shared=Processors(2)), one) + 0.2


def test_each_ring_step_needs_a_core_and_the_switch_path_needs_two() -> None:
    def more_s(hosts: int, **how: bool) -> float:
        at = [rack(hosts, shared=Processors(hosts, message_s=each), **how) for each in (0.0, 0.01)]
        return step_s(at[1], **how) - step_s(at[0], **how)

    # The last bucket and the vote; the first bucket is hidden.
    assert more_s(2) == pytest.approx(2 * 0.02, abs=0.005)
    assert more_s(4) == pytest.approx(2 * 0.06 + 0.03, abs=0.04)
    assert more_s(4, in_network=True) == pytest.approx(2 * 0.02, abs=0.005)


def test_a_switch_with_one_thread_handles_the_ranks_bytes_in_sequence() -> None:
    one = replace(MODEL, ready=(ReadyBucket(100_000, 2, 0.0),))
    plain, slow = Processors(8), Processors(8, switch_byte_s=0.5 / RATE)
    whole = [step_s(rack(8, in_network=True, shared=shared), one, in_network=True) for shared in (plain, slow)]
    # Eight ranks' bytes by half of the link's time each: four times as long as the link.
    assert whole[1] - whole[0] == pytest.approx(3 * 100_000 / RATE, rel=0.01)
    rings = [step_s(rack(8, shared=shared), one) for shared in (plain, slow)]
    assert rings[0] == rings[1]


def test_a_step_is_never_shorter_than_its_concurrent_host_work() -> None:
    much = replace(MODEL, beside_host_s=1.0)
    assert step_s(rack(2, shared=Processors(4)), much) >= 1.0


def test_a_timeline_shows_layers_buckets_and_the_vote() -> None:
    job = Job(8, 4, Split(data=2), precision="f32", overlap=True)
    slices = timeline(simulate(MODEL, rack(2), job, Conditions(), BARE), [0])
    assert [each.size_bytes for each in slices if each.kind == "data"] == [8000, 4000, 40]


def test_the_closed_form_uses_the_profiled_times() -> None:
    job = Job(8, 4, Split(data=2), precision="f32", overlap=True)
    said = predict(MODEL, rack(2), job, BARE)
    assert said.compute_s == pytest.approx(0.100)
    assert said.optimizer_s == pytest.approx(0.007)


def test_an_unmeasured_batch_share_is_refused() -> None:
    with pytest.raises(ValueError, match="was measured"):
        simulate(MODEL, rack(2), Job(16, 8, Split(data=2), precision="f32", overlap=True))


@pytest.mark.parametrize("how", [{"overlap": False}, {"overlap": True, "split": Split(data=2, zero=1)}])
def test_an_unprofiled_order_is_refused(how: dict[str, object]) -> None:
    job = Job(8, 4, **{"split": Split(data=2), "precision": "f32", **how})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="was profiled in data parallelism"):
        simulate(MODEL, rack(2), job)


def test_hosts_that_share_cores_cannot_be_folded_into_one() -> None:
    job = Job(8, 4, Split(data=2), precision="f32", overlap=True)
    with pytest.raises(ValueError, match="share cores"):
        simulate(MODEL, rack(2, shared=Processors(2)), job, folded=True)


def test_a_profile_survives_its_file(tmp_path) -> None:  # type: ignore[no-untyped-def]
    file = tmp_path / "step.json"
    file.write_text(json.dumps({"profile": asdict(MODEL)}))
    assert read_timed_step(file) == MODEL == find_model(str(file))
    file.write_text("{}")
    with pytest.raises(ValueError, match=r"step\.json: this is not a profile"):
        read_timed_step(file)
    with pytest.raises(ValueError, match="cannot be read"):
        find_model(str(tmp_path / "other.json"))


def test_a_core_is_shared_in_slices() -> None:
    events, done = EventQueue(), []
    cores = Cores(events, 1)
    cores.run(2.5 * SLICE_S, lambda: done.append((0, events.now_s)))
    cores.run(0.5 * SLICE_S, lambda: done.append((1, events.now_s)))
    events.run()
    assert done == [(1, pytest.approx(1.5 * SLICE_S)), (0, pytest.approx(3 * SLICE_S))]
