"""The timeline of every rank: as simulated, and in the format of a profile's export."""

import json
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from even_model import EvenModel, cluster

from netfold.profile.record import RECORD
from netfold.profile.run import PROGRESS, STEP, GroupName, RankMetadata, Run, Trace
from netfold_plan.cluster import load_cluster
from netfold_plan.events import IDEAL, Conditions, simulate, timeline, write_timeline
from netfold_plan.job import Job, Split
from netfold_plan.model import Layered

MODEL = EvenModel(input_bytes=1e7, layer_parameters=1e8)
JOB = Job(32, 1, Split(data=2, tensor=2, pipeline=4), overlap=True)


def played(conditions=IDEAL, **how):
    return simulate(MODEL, cluster(latency_s=1e-5), JOB, conditions, **how)


def test_a_ranks_timeline_has_every_event_and_none_overlap():
    step = played()
    slices = timeline(step, range(16))
    for rank in range(16):
        work = [each for each in slices if each.rank == rank and each.is_work]
        kinds = [each.kind for each in work]
        assert kinds.count("forward") == kinds.count("backward") == 16 and kinds.count("optimizer") == 1
        assert all(before.end_s <= after.start_s for before, after in pairwise(work))
        assert work[-1].end_s <= step.prediction.step_s
    assert max(each.end_s for each in slices) == pytest.approx(step.prediction.step_s)


def test_computing_on_the_timeline_adds_up_to_the_prediction():
    step = played()
    lane = max(range(4), key=lambda lane: sum(step.built.step.seconds[lane]))
    mine = timeline(step, [step.built.mesh.ranks(lane)[0]])
    passes = sum(each.end_s - each.start_s for each in mine if each.kind in ("forward", "backward"))
    tensor = sum(each.end_s - each.start_s for each in mine if each.kind == "tensor")
    assert tensor == pytest.approx(step.prediction.exposed_s["tensor"])
    assert passes - tensor == pytest.approx(step.prediction.compute_s)


def test_messages_are_received_after_their_send_and_used_after_their_receipt():
    slices = timeline(played(Conditions(jitter=0.2)), [0, 4])
    sent = {each.name.removeprefix("send "): each for each in slices if each.rank == 0 and each.kind == "send"}
    come = {each.name.removeprefix("receive "): each for each in slices if each.rank == 4 and each.kind == "receive"}
    forward = {each.name: each for each in slices if each.rank == 4 and each.kind == "forward"}
    for microbatch in range(16):
        what = f"activations {microbatch}"
        assert (sent[what].start_s, sent[what].end_s) == (come[what].start_s, come[what].end_s)
        assert come[what].end_s <= forward[f"forward {microbatch}"].start_s


def test_a_step_simulated_for_one_replica_shows_every_rank():
    folded, whole = (timeline(played(folded=folded), [1, 7, 15]) for folded in (True, False))
    assert folded == whole


def test_an_absent_rank_is_refused_in_a_sentence():
    with pytest.raises(ValueError, match="there is no rank 16; ranks are 0 to 15"):
        timeline(played(), [16])


def slices_of(events):
    """By thread, in ns; no two of one thread may overlap."""
    spans = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            spans[event["tid"]].append((round(event["ts"] * 1000), round((event["ts"] + event["dur"]) * 1000)))
    for mine in spans.values():
        assert all(end <= begin for (_, end), (begin, _) in pairwise(sorted(mine)))
    return spans


def test_the_timeline_file_has_the_format_of_a_profile(tmp_path):
    file = tmp_path / "step.json"
    count = write_timeline(played(), [0, 1, 4, 6], file)
    trace = json.loads(file.read_text())
    events = trace["traceEvents"]
    assert trace["displayTimeUnit"] == "ms" and len(events) == count
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {rank + 1: f"rank {rank} on a predicted cluster" for rank in (0, 1, 4, 6)}
    threads = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert {"steps", "work", "operations"} <= set(threads.values())
    assert set(slices_of(events)) == set(threads)
    reduced = [event for event in events if event["name"] == "all_reduce" and event["args"]["group"] == "tensor"]
    joined = [event for event in reduced if event["pid"] in (1, 2)]
    assert joined and all("bind_id" in event for event in joined), "tensor ranks 0 and 1 met in every call"


def test_a_predicted_timeline_can_be_shown_over_a_measured_run(tmp_path):
    own = RankMetadata(
        0, 2, "host", 1, "event records", {"operation": {"0": "all_reduce"}}, {"1": GroupName("g", "netfold", [0, 1])}
    )
    operations = np.zeros(1, RECORD)
    operations["group"], operations["started_ns"], operations["finished_ns"] = 1, 5_000, 9_000
    steps = np.array([(1_000, 10_000), (10_000, 22_003)], STEP)
    traces = [Trace(replace(own, rank=rank), operations, steps, np.zeros(0, PROGRESS)) for rank in (0, 1)]
    file = tmp_path / "both.json"
    write_timeline(played(), [0, 1], file, beside=Run(tmp_path, {}, traces), step=1)
    events = json.loads(file.read_text())["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert list(names.values()) == [
        f"rank {rank} on {host}" for host in ("host", "a predicted cluster") for rank in (0, 1)
    ]
    assert len(names) == 4
    slices_of(events)
    begins = {
        (event["pid"], event["name"]): event["ts"] for event in events if event["ph"] == "X" and event["cat"] == "step"
    }
    assert begins[3, "step 0"] == begins[1, "step 1"] == 9.0
    calls = defaultdict(set)
    for event in events:
        if "bind_id" in event:
            calls[event["bind_id"]].add(event["pid"])
    assert {1, 2} in calls.values() and all(pids in ({1, 2}, {3, 4}) for pids in calls.values())


@pytest.mark.parametrize(
    "job",
    [
        Job(32, 1, Split(data=2, tensor=2, pipeline=4, zero=3)),
        Job(32, 1, Split(data=2, tensor=2, pipeline=4), schedule="zero-bubble"),
        Job(32, 1, Split(data=2, tensor=2, pipeline=4, interleave=2), schedule="interleaved", overlap=True),
    ],
)
def test_every_kind_of_step_has_a_timeline(tmp_path, job):
    file = tmp_path / "step.json"
    write_timeline(simulate(MODEL, cluster(), job), range(16), file)
    spans = slices_of(json.loads(file.read_text())["traceEvents"])
    assert len({tid // 4096 for tid in spans}) == 16


def test_exchanges_of_tables_begin_forward_passes_and_end_backward_passes():
    job = Job(64, 32, Split(data=2), precision="f32")
    step = simulate(Layered("dlrm"), load_cluster("dgx-a100"), job)
    slices = timeline(step, [1])
    exchanges = [each for each in slices if each.kind == "tables"]
    forward, backward = (next(each for each in slices if each.kind == kind) for kind in ("forward", "backward"))
    assert [each.start_s for each in exchanges][:1] == [forward.start_s]
    assert exchanges[1].end_s == pytest.approx(backward.end_s)
    assert sum(each.end_s - each.start_s for each in exchanges) == pytest.approx(step.prediction.exposed_s["tables"])
