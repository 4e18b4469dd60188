"""The search: its scopes hold, its three views of the network agree, and its traces can be replayed."""

import pytest

from netfold_lab.model_check import Scope, draw, replay, search, search_validation, sentence
from netfold_lab.model_check.__main__ import main
from netfold_lab.model_check.scopes import LARGE, QUICK
from netfold_plan.sim import diagram
from netfold_plan.sim.network import SWITCH

pytestmark = pytest.mark.native


@pytest.mark.parametrize("name", QUICK)
def test_every_invariant_holds_in_scope(name):
    report = search(QUICK[name])
    print(sentence(QUICK[name], report))
    assert report.broken == ""
    assert report.exhausted
    assert report.machines <= report.states <= report.transitions


@pytest.mark.parametrize(
    "scope",
    [
        {"operations": "3"},
        {"operations": "1,1"},
        {"operations": "1", "restarts": 1},
        {"operations": "1,1", "last": "2"},
    ],
    ids=str,
)
def test_the_views_of_the_network_reach_the_same_machines(scope):
    reports = [search(Scope(**scope, network=network)) for network in ("monotone", "merged", "exact")]
    assert all(report.exhausted and not report.broken for report in reports)
    assert len({report.machines for report in reports}) == 1
    assert len({report.packets for report in reports}) == 1
    monotone, merged, exact = (report.states for report in reports)
    assert merged <= monotone < exact


def test_the_smallest_scope_has_four_states():
    # One worker, one chunk. The machines: not called; chunk sent; at the switch; and received.
    report = search(Scope(workers=1, operations="1"))
    assert (report.states, report.machines, report.packets, report.depth) == (4, 4, 2, 3)


def test_a_stopped_search_is_not_exhausted():
    scope = Scope(workers=3, operations="4", max_states=100)
    report = search(scope)
    assert (report.states, report.exhausted, report.broken) == (100, False, "")
    assert "NOT exhausted" in sentence(scope, report)


@pytest.mark.parametrize(
    ("scope", "complaint"),
    [
        ({"workers": 0}, "1 to 4 workers"),
        ({"workers": 5}, "1 to 4 workers"),
        ({"operations": "33"}, "1 to 32 chunks"),
        ({"operations": "2,0"}, "none of them empty"),
        ({"restarts": 5}, "at most 4 restarts"),
        ({"window": 0}, "window"),
        ({"network": "lossy"}, r"monotone, merged or exact"),
        ({"timeouts": 1}, "timeouts are counted only"),
        ({"pipelines": "0"}, "no pipelines beside its switches"),
        ({"chunk_bits": 3}, "is for pipelines"),
        ({"pipelines": "root", "chunk_bits": 3, "window": 2}, "more chunk numbers of each sign than slots"),
        ({"outlives": 1}, "outlives one restart"),
        ({"rogue": 1, "operations": "1,1"}, "all call one operation"),
        ({"numbers": 8, "last": "1"}, "all of its workers call the same"),
    ],
)
def test_a_contradictory_scope_is_refused(scope, complaint):
    with pytest.raises(ValueError, match=complaint):
        search(Scope(**scope))


STALE = ["call 0", "1.1/0>0", "call 1", "1.1/1>0", "1.1/0<0", "restart group", "1.1/1<0", "rejoin 0", "call 0"]


def test_a_trace_is_replayed_step_by_step():
    records = replay(Scope(restarts=1), [*STALE, "1.1/1>1", "1.2/0>0"])
    assert [(record.to, record.became) for record in records] == [
        ("worker 0", "called"),
        ("switch", "stored"),
        ("worker 1", "called"),
        ("switch", "completed"),
        ("worker 0", "received"),
        ("switch", "generation 1.2"),
        ("worker 1", "received"),  # it does not know yet that its generation is over
        ("worker 0", "generation 1.2"),
        ("worker 0", "called"),
        ("switch", "dropped: epoch"),
        ("switch", "stored"),
    ]
    assert records[1].state == "chunk 0 misses 1"
    assert records[4].state == "generation 1.1, has 0, waits for 1"


def test_workers_that_disagree_end_and_a_worker_that_agrees_waits_for_the_differing_one():
    # Workers 0 and 1 call an operation of two chunks, worker 2 two of one.
    scope = Scope(workers=3, operations="2", last="1,1")
    steps = ["call 0", "call 1", "call 2", "1.1/2>0", "1.1/0>0"]
    # The mismatch that names worker 0 reaches worker 1, whose call is the same; then worker 1's own packet mismatches.
    steps += ["1.1/1<0", "1.1/1>0", "1.1/1<0=2", "hear 0", "1.1/2<0"]
    records = replay(scope, steps)
    assert [record.became for record in records[3:]] == [
        "stored",
        "mismatch",
        "dropped: stale",
        "mismatch",
        "ended: mismatch",
        "ended",
        "ended: mismatch",
    ]
    assert not any(record.broken for record in records)
    with pytest.raises(ValueError, match="step 2, hear 1, cannot happen then"):
        replay(scope, ["call 0", "hear 1"])


def test_only_a_workers_own_hello_validates_its_address():
    report = search_validation()
    assert (report.exhausted, report.broken) == (True, "")
    # Each of three addresses is validated or not.
    assert (report.states, report.depth) == (2**3, 3)
    with pytest.raises(ValueError, match="1 to 4 workers"):
        search_validation(0)


def test_a_leaf_that_restarts_has_another_generation_and_the_others_join_again():
    steps = ["call 0", "1.1/0>0", "call 1", "1.1/1>0", "1.1/^0>0", "restart leaf 0", "1.1/^1>0", "rejoin 0", "call 0"]
    scope = Scope(leaves="1,1", restarts=1)
    # The sum of the old leaf 1 reaches the new root; leaf 0's sum is the first of a generation that leaf 1 has not
    # joined.
    records = replay(scope, [*steps, "2.1/0>0", "1.2/^0>0", "rejoin leaf 1", "rejoin 1", "call 1", "1.2/1>0"])
    assert [record.became for record in records[4:]] == [
        "stored",
        "generation 1.2",
        "dropped: epoch",
        "generation 2.1",
        "called",
        "summed",
        "stored",
        "generation 1.2",
        "generation 1.2",
        "called",
        "summed",
    ]
    with pytest.raises(ValueError, match="step 7, rejoin 1, cannot happen then"):
        replay(scope, [*steps[:6], "rejoin 1"])


def test_a_packet_that_is_passed_over_is_named_and_sent_again():
    # Chunk 0's packet has number 8 and chunk 1's 16: after the second packet the first counts as lost.
    scope = Scope(workers=1, window=2, operations="2", numbers=8)
    records = replay(scope, ["call 0", "1.1/0>1", "1.1/0!1", "1.1/0>0=2"])
    assert [record.became for record in records] == ["called", "completed", "received a NACK", "completed"]


def test_packets_of_another_job_change_nothing():
    records = replay(Scope(foreign_packets=1), ["call 0", "x1.1/0>0", "x1.1/0<0"])
    assert [(record.what, record.became) for record in records[1:]] == [
        ("chunk 0 of another job", "dropped: foreign"),
        ("result 0 of another job", "dropped: foreign"),
    ]
    alone, beside = search(Scope(operations="3")), search(Scope(operations="3", foreign_packets=1))
    assert (alone.machines, alone.switches, alone.workers) == (beside.machines, beside.switches, beside.workers)


def test_production_drops_the_packet_that_a_version_bit_accepts():
    # The trace of the mutant "switch-version-bit": worker 1 sent chunk 0 twice, and one copy comes two rounds too late.
    rounds = "1.1/0>{0}; 1.1/1>{0}; 1.1/0<{0}; 1.1/1<{0}"
    steps = "; ".join(["call 0; call 1", *(rounds.format(chunk) for chunk in range(4)), "1.1/0>4; 1.1/1>0"]).split("; ")
    records = replay(Scope(operations="6"), steps)
    assert [record.became for record in records[-2:]] == ["stored", "dropped: stale"]
    with pytest.raises(ValueError, match=r"step 21, 1\.1/0<4"):
        replay(Scope(operations="6"), [*steps, "1.1/0<4"])


def test_a_tofino_takes_no_chunk_of_half_of_the_numbers_or_above():
    # Its bits are a negative number, so a generation ends before chunk 2^31. The scope "tofino" goes up to the last.
    broken = search(Scope(operations="5", pipelines="root", chunk_bits=3)).broken
    assert broken.startswith("from here, with all packets lost, no sequence of retransmissions leads to the end")
    rounds = "1.1/0>{0}; 1.1/1>{0}; 1.1/2>{0}; 1.1/0<{0}; 1.1/1<{0}"
    steps = "; ".join(["call 0; call 1", *map(rounds.format, range(3)), "1.1/2>4; 1.1/0>2"]).split("; ")
    scope = Scope(workers=3, operations="3", pipelines="root", chunk_bits=3, rogue=1)
    assert [record.became for record in replay(scope, steps)[-2:]] == ["dropped: stale", "answered again"]
    # If whole chunk numbers are compared, the slot is at chunk 4 from then on.
    whole = Scope(workers=3, operations="3", rogue=1)
    assert [record.became for record in replay(whole, steps)[-2:]] == ["stored", "dropped: stale"]


def test_a_step_that_cannot_happen_is_named():
    with pytest.raises(ValueError, match=r"step 2, 1\.1/1>0, cannot happen then"):
        replay(Scope(), ["call 0", "1.1/1>0"])


def test_a_delivered_packet_is_gone_unless_it_was_copied():
    exact = Scope(network="exact")
    with pytest.raises(ValueError, match="step 3"):
        replay(exact, ["call 0", "1.1/0>0", "1.1/0>0"])
    assert [
        record.became for record in replay(exact, ["call 0", "copy 1.1/0>0", "1.1/0>0", "timeout 0", "1.1/0>0"])
    ] == [
        "called",
        "stored",
        "dropped: duplicate",
        "sends again",
        "dropped: duplicate",
    ]
    assert replay(exact, ["call 0", "lose 1.1/0>0"])[1].became == "lost"


def test_a_trace_is_drawn(tmp_path, capsys):
    file = tmp_path / "trace.svg"
    assert main(["--restarts", "1", "--replay", "; ".join(STALE), "--svg", str(file)]) == 0
    drawn = capsys.readouterr().out.splitlines()
    assert drawn[0].split() == ["worker", "0", "worker", "1", "switch"]
    assert "|-- chunk 0 of 1.1 ------------------------>|" in drawn[2]
    assert drawn[2].endswith("stored; chunk 0 misses 1")
    assert file.read_text().count("<text") == 3 + 3 * len(STALE)


def test_a_packet_that_is_lost_does_not_arrive_in_the_drawing():
    scope = Scope(network="exact")
    line = draw(scope, replay(scope, ["call 0", "lose 1.1/0>0"]))[1]
    assert (line.source, line.to, line.arrives) == (0, SWITCH, False)
    assert "x|" in diagram.text([line], 2)


def test_the_command_that_a_scope_names_searches_it(capsys):
    scope = Scope(workers=2, operations="1,1", restarts=1, network="merged")
    assert scope.command() == "python -m netfold_lab.model_check --operations 1,1 --restarts 1 --network merged"
    assert main(scope.command().split()[3:]) == 0
    assert capsys.readouterr().out.startswith(
        "scope: 2 workers, 2 slots, chunks 1,1, 1 restarts, packets merged: exhaus"
    )


def test_a_search_that_was_not_exhausted_fails_the_command():
    assert main(["--workers", "3", "--max-states", "10"]) == 1


def test_the_largest_promised_scope_is_among_the_named_scopes():
    assert Scope(workers=3, window=1, operations="4", restarts=2, network="merged") in LARGE.values()
