"""Advice against runs with a known link, known times and a known right answer."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from traces import KB, MB, PROFILER, Op, Trace, make_run, make_trace

from netfold.profile.analyse import analyse
from netfold.profile.findings import Advice
from netfold.profile.run import Run
from netfold.tuning.advice import advise
from netfold.tuning.cost import predict
from netfold.tuning.profile_link import Fitted, fit, observe_groups
from netfold.tuning.topology import DEFAULT_LINKS, Link, Links, Topology

# 100 us, 100 MB/s. Reductions run at the built-in 4 GB/s.
# A switch has a port per host.
LINKS = replace(DEFAULT_LINKS, network=Link(100e-6, 100e6), switches=(100e6,))
RANKS = 4


def ring_s(size: float) -> float:
    """2(P-1) latencies, 2n(P-1)/P sent, n(P-1)/P reduced."""
    return 6 * 100e-6 + 1.5 * size / 100e6 + 0.75 * size / 4e9


def run_of(sizes: list[int], *, algorithm: str = "ring", ranks: int = RANKS, links: Links = LINKS, **more) -> Run:
    """Operations one after the other, 1 ms apart, each as long as its formula says; rank 1 begins 5 ms late in each."""
    topology = more.pop("topology", Topology.apart(ranks))
    late_ms, hosts = more.pop("late_ms", 5.0), more.pop("hosts", None)
    traces = []
    for rank in range(ranks):
        at, ops = 0.0, []
        for size in sizes:
            took = 1e3 * predict("all_reduce", algorithm, size, topology, links, more.get("wire", "auto"))
            ops.append(
                Op(at + (late_ms if rank == 1 else 0), at + late_ms + took, size, algorithm=algorithm, **_of(more))
            )
            at += late_ms + took + 1
        traces.append(make_trace(rank, ranks, ops, host=None if hosts is None else hosts[rank]))
    return make_run(*traces)


def _of(more: dict) -> dict:
    return {name: value for name, value in more.items() if name != "wire" or value != "auto"}


def advice_of(run: Run) -> list[Advice]:
    return advise(run, analyse(run)).advice


def predictions(run: Run) -> list[str]:
    return [each.text for each in advice_of(run) if each.prediction]


SIZES = [MB] * 5 + [4 * MB] * 5 + [16 * MB] * 5


def test_the_link_is_fitted_to_the_operations_despite_late_ranks() -> None:
    (group,) = observe_groups(run_of(SIZES))
    assert group.pure_s[:1] == pytest.approx([ring_s(MB)], rel=1e-4)
    found = fit(group)
    assert isinstance(found, Fitted)
    assert found.links.network.latency_s == pytest.approx(100e-6, rel=0.02)
    assert found.links.network.bytes_per_s == pytest.approx(100e6, rel=1e-3)
    assert (found.operations, found.latency_assumed) == (15, False)
    assert found.off is not None and found.off < 1e-3
    assert found.text() == "with the link that 15 operations show: 100 us, 100 MB/s, at most 0% off"


@pytest.mark.parametrize("algorithm", ["halving_doubling", "tree", "direct", "in_network"])
def test_every_algorithm_between_hosts_shows_the_same_link(algorithm: str) -> None:
    found = fit(observe_groups(run_of(SIZES, algorithm=algorithm))[0])
    assert isinstance(found, Fitted)
    assert found.links.network.bytes_per_s == pytest.approx(100e6, rel=1e-3)


def test_operations_of_one_size_give_the_rate_if_latency_is_a_small_part() -> None:
    found = fit(observe_groups(run_of([16 * MB] * 5))[0])
    assert isinstance(found, Fitted) and found.latency_assumed and found.off is None
    # 60 us are assumed where 100 are: 6 * 40 us of 255 ms are 0.1% of the rate.
    assert found.links.network.bytes_per_s == pytest.approx(100e6, rel=2e-3)
    assert "60 us (assumed), 99.9 MB/s, too few sizes to check" in found.text()
    assert fit(observe_groups(run_of([4 * KB] * 5))[0]) == (
        "all operations have about one size, which is too small to separate the link's rate from its latency"
    )


def test_a_switch_is_predicted_by_the_formulas_on_that_link() -> None:
    """5 all_reduces of 16 MB (n = 16777216). Ring: 0.6 + 251.658 + 3.146 = 255.404 ms; through a switch 2 latencies and
    n at 100 MB/s: 0.2 + 167.772 = 167.972 ms; saved 87.432 ms each, 437 ms in all. A rank's time: three ranks wait 5 ms
    each time, 255.404 + 3.75 = 259.154 on average, 1296 ms in all; with the switch 859 ms: -34%. bf16: half of n:
    0.6 + 125.829 + 1.573 = 128.002; saved 127.402, 637 ms; left 659: -49%."""
    run = run_of([MB] * 5 + [16 * MB] * 5)
    findings = analyse(run, [8 * MB, 16 * MB])
    (switch, narrow) = [
        each.text
        for each in advise(run, findings).advice
        if each.prediction and each.text.startswith("all_reduce of 8 MB")
    ]
    assert switch.startswith(
        "all_reduce of 8 MB to 16 MB through a switch with a port per host (NETFOLD_SWITCH): 859 ms per rank in place "
        "of 1.3 s (-34%), by the cost model with the link that 10 operations show: 100 us, 100 MB/s, too few sizes to "
        "check"
    )
    assert "with bf16 on the wire" in narrow and "659 ms per rank in place of 1.3 s (-49%)" in narrow


def test_a_saving_is_limited_to_exposed_time() -> None:
    """Five rings of 16 MB, 255 ms each; the thread computes but for the last 100 ms before the end at 1310 ms. A switch
    saves 437 ms of them, of which 100 show."""
    run = run_of([16 * MB] * 5)
    end = run.traces[0].operations["finished_ns"].max() / 1e6 - 100_000
    lines = make_trace(0, RANKS, progress_ms=[(0, 0), (end - 100, end - 100), (end, end - 100)]).progress
    busy = make_run(*(Trace(trace.metadata, *_lists(trace)[:2], lines) for trace in run.traces))
    (switch,) = [text for text in predictions(busy) if "through a switch" in text]
    assert switch.endswith("; computing hides all but 100 ms of it now, so no more can be saved")
    assert not any("so no more can be saved" in text for text in predictions(run)), "the thread was not watched"


def test_a_setting_in_use_is_not_advised() -> None:
    texts = predictions(run_of(SIZES, algorithm="in_network", wire="bf16"))
    assert texts == []
    only_wire = predictions(run_of(SIZES, algorithm="in_network"))
    assert len(only_wire) >= 1 and all("bf16" in text for text in only_wire)
    tensors_of_f64 = run_of(SIZES, algorithm="in_network", dtype="f64", wire="f64")
    assert predictions(tensors_of_f64) == []


def declined(run: Run) -> str:
    assert predictions(run) == []
    (text,) = [text for text in advise(run, analyse(run)).coverage_gaps if "not predicted" in text]
    return text.split(": ", 1)[1]


def test_without_an_algorithm_there_is_a_reason_and_no_prediction() -> None:
    run = run_of(SIZES)
    blind = make_run(
        *(
            Trace(replace(trace.metadata, names={**trace.metadata.names, "algorithm": {}}), *_lists(trace))
            for trace in run.traces
        )
    )
    assert declined(blind) == "the backend does not say which algorithm ran"


def _lists(trace: Trace) -> tuple:
    return trace.operations, trace.steps, trace.progress


def test_times_that_do_not_follow_the_formula_give_no_prediction() -> None:
    """100 ms for every size; then 100, 500 and 550 for 1, 4 and 16 MB: a line through the outer two has 190 at 4 MB."""
    ops = [Op(200 * at, 200 * at + 100, size) for at, size in enumerate(SIZES)]
    flat = make_run(*(make_trace(rank, RANKS, ops) for rank in range(RANKS)))
    assert declined(flat) == "larger operations take no longer than small ones, so they do not show the link's rate"
    took = {MB: 100, 4 * MB: 500, 16 * MB: 550}
    wild = [Op(600 * at, 600 * at + took[size], size) for at, size in enumerate(SIZES)]
    assert "off the formulas (ring)" in declined(make_run(*(make_trace(rank, RANKS, wild) for rank in range(RANKS))))


def test_operations_over_shared_links_or_memory_show_no_link() -> None:
    ops = [Op(10 * at, 10 * at + 100, 16 * MB) for at in range(10)]
    assert "no operation ran alone" in declined(make_run(*(make_trace(rank, 2, ops) for rank in range(2))))
    memory = run_of(SIZES, algorithm="shared_memory", hosts=["a"] * RANKS, topology=Topology((0,) * RANKS))
    assert "(shared_memory)" in declined(memory)
    absent = make_run(*run_of(SIZES).traces[:2])
    assert "recorded by all ranks of a group" in declined(absent)


def test_ranks_of_one_host_that_go_over_the_network_are_taken_to_be_apart() -> None:
    found = fit(observe_groups(run_of(SIZES, hosts=["a"] * RANKS))[0])
    assert isinstance(found, Fitted) and found.links.network.bytes_per_s == pytest.approx(100e6, rel=1e-3)


def test_several_ranks_a_host_are_predicted_through_memory_and_the_switch() -> None:
    topology = Topology((0, 0, 1, 1))
    run = run_of(SIZES, hosts=["a", "a", "b", "b"], topology=topology)
    found = fit(observe_groups(run)[0])
    assert isinstance(found, Fitted) and found.links.network.bytes_per_s == pytest.approx(100e6, rel=1e-3)
    assert any("through a switch" in text for text in predictions(run))


def test_a_straggler_is_named_with_what_it_cost() -> None:
    """10 operations of 10 ms on one host; rank 2 begins each 4 ms after the others, which wait 40 ms for it in all.
    Communication: three ranks 100 ms, rank 2 60: 90 a rank; 40 of 90 are 44%."""
    ops = [Op(20 * at, 20 * at + 10) for at in range(10)]
    late = [replace(op, started_ms=op.started_ms + 4) for op in ops]
    run = make_run(*(make_trace(rank, 4, late if rank == 2 else ops, host="a") for rank in range(4)))
    said = advice_of(run)[0]
    assert said.text.startswith("rank 2 (a) was last in 100% of 10 operations; other ranks waited 40 ms for it")
    assert not said.prediction
    in_turn = [
        make_trace(rank, 4, [late[at] if at % 4 == rank else op for at, op in enumerate(ops[:8])], host="a")
        for rank in range(4)
    ]
    assert not any("was last" in each.text for each in advice_of(make_run(*in_turn))), (
        "each in its turn is no straggler"
    )


def small_messages(steps: int, **more) -> Run:
    """20 all_reduces of 64 KB per step."""
    run = run_of([64 * KB] * 20 * steps + [16 * MB] * 3, late_ms=0.0, **more)
    ends = run.traces[0].operations["finished_ns"][::20][1 : steps + 1] / 1e6 - 100_000
    begins = run.traces[0].operations["started_ns"][::20][:steps] / 1e6 - 100_000
    spans = [(float(a), float(b)) for a, b in zip(begins, ends, strict=True)]
    steps_of = make_trace(0, RANKS, [], steps_ms=spans).steps
    return make_run(*(Trace(trace.metadata, trace.operations, steps_of, trace.progress) for trace in run.traces))


def test_many_small_messages_are_compared_with_one_fused_message() -> None:
    """A ring of 64 KB: 0.6 + 0.983 + 0.012 = 1.595 ms, 20 of them 31.9 ms. One of 1.25 MB (n = 1310720): 0.6 + 19.661 +
    0.246 = 20.507 ms."""
    (text,) = [text for text in predictions(small_messages(10)) if "a step has" in text]
    assert text.startswith("a step has 20 all_reduce of up to 128 KB, of 64 KB on average")
    assert "messages would have 1.25 MB" in text
    assert "20.5 ms per step in place of 31.9 ms by ring" in text


def test_small_messages_without_a_link_are_advice_without_a_prediction() -> None:
    run = small_messages(10)
    blind = make_run(
        *(
            Trace(replace(trace.metadata, names={**trace.metadata.names, "algorithm": {}}), *_lists(trace))
            for trace in run.traces
        )
    )
    (said,) = [each for each in advice_of(blind) if "a step has" in each.text]
    assert not said.prediction and "messages would have 1.25 MB" in said.text


def one(*ops: Op, source: str = "event records") -> list[str]:
    return [each.text for each in advice_of(make_run(make_trace(0, 1, ops, source=source)))]


def test_advice_on_losses_and_registrations_has_their_numbers() -> None:
    """30 packets of 1500 bytes are 0.45% of 10 MB."""
    lost = one(Op(0, 10, wire_bytes=10_000_000, retransmissions=30))
    assert any("sent 30 packets per rank again, 0.45% of all" in text for text in lost)
    missed = one(Op(0, 10, registration=(60, 20)))
    assert any("unregistered 20 times a rank of 80" in text for text in missed)


def test_effects_below_the_thresholds_give_no_advice() -> None:
    """0.06% lost; 5 misses of 100."""
    assert one(Op(0, 10), Op(10, 20, wire_bytes=10_000_000, retransmissions=4, registration=(95, 5))) == []


def test_advice_is_something_to_do_and_observations_stay_in_the_tables() -> None:
    """10 ms in a queue beside 20 ms of work, and all of the time in one row: nothing to change follows from either."""
    assert one(Op(0, 10), Op(10, 20, queued_ms=0)) == []
    assert one(Op(0, 30, 32 * MB), source=PROFILER) == one() == []


def test_small_messages_of_a_busy_host_do_not_keep_the_link_from_being_found() -> None:
    """4 KB in 30 ms, fifty times a ring's time: no advice on small messages, and none against large ones."""
    run = run_of(SIZES)
    traces = []
    for trace in run.traces:
        at = trace.operations["finished_ns"].max() / 1e6 - 100_000
        ops = [Op(at + 40 * (1 + i), at + 40 * (1 + i) + 30, 4 * KB, sequence=100 + i) for i in range(5)]
        more = make_trace(trace.metadata.rank, RANKS, ops)
        traces.append(Trace(trace.metadata, np.concatenate([trace.operations, more.operations]), *_lists(trace)[1:]))
    (group,) = observe_groups(make_run(*traces))
    assert isinstance(fit(group), str)
    found = fit(group, 128 * KB)
    assert isinstance(found, Fitted) and found.links.network.bytes_per_s == pytest.approx(100e6, rel=1e-3)
    assert any("through a switch" in text for text in predictions(make_run(*traces)))
