"""The search over recovery: its scopes hold, each mutant fails, and faults that it found stay fixed."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import recovery_mutants
from recovery_mutants import BACK, MUTANTS, machines

from netfold._native import protocol
from netfold_lab.model_check.recovery import STUCK, replay_recovery, search_recovery, sentence
from netfold_lab.model_check.recovery_rank import Channel, RecoveryScope
from netfold_lab.model_check.scopes import RECOVERY_QUICK

pytestmark = pytest.mark.native


@pytest.mark.parametrize("name", RECOVERY_QUICK)
def test_every_invariant_holds_in_scope(name: str) -> None:
    scope = RECOVERY_QUICK[name]
    report = search_recovery(scope)
    print(sentence(scope, report))
    assert (report.broken, report.exhausted) == ("", True)
    # Where ranks may join again, on some paths a switch has all of them again.
    assert (report.returned > 0) == (scope.attempts > 0)


@pytest.mark.parametrize("name", MUTANTS)
def test_recovery_without_a_check_is_caught(name: str, tmp_path: Path) -> None:
    mutant = MUTANTS[name]
    report = recovery_mutants.search(mutant, tmp_path)
    assert report.broken.startswith(mutant.breaks)
    print(f"{name}: {report.broken}\n  {'; '.join(report.trace)}")
    if report.broken != STUCK:
        assert replay_recovery(mutant.scope, report.trace, machines(mutant, tmp_path)) == report.broken


@pytest.mark.parametrize(
    "scope", sorted({mutant.scope for mutant in MUTANTS.values()} - set(RECOVERY_QUICK.values()), key=str), ids=str
)
def test_production_passes_the_scopes_that_mutants_fail(scope: RecoveryScope) -> None:
    report = search_recovery(scope)
    assert (report.broken, report.exhausted) == ("", True)


def test_a_membership_that_was_lost_before_the_leader_joined_is_not_promised() -> None:
    # Rank 1 joins, loses the switch at once and reports it; then the leader's own join completes.
    steps = """lose 0 1; hear 1 0 Freeze(1); hear 1 0 Recover(1,0,0,0,[],True); waited 0 again 0; tree 0;
        hear 1 0 Rejoin(1); joined 1 2; lose 1 2; hear 0 1 Rejoined(1,2); hear 0 1 Lost(2); joined 0 2; call 0;
        hear 1 0 Freeze(2)"""
    trace = [step.strip() for step in steps.split(";")]
    assert replay_recovery(BACK, trace) == ""
    with pytest.raises(ValueError, match="step 14, step 0 2, cannot happen then"):
        replay_recovery(BACK, [*trace, "step 0 2"])
    assert replay_recovery(BACK, [*trace, "step 0 0"]) == ""  # the leader announces no membership


def test_an_answer_to_an_abandoned_attempt_is_not_counted() -> None:
    # The leader fetches a result while attempt 1 times out; its join of attempt 1 completes during attempt 2.
    scope = RecoveryScope(losses=1, attempts=2, refusals=1, operations="1,1")
    steps = """call 0; lose 0 1; call 1; result 1 1 0; hear 1 0 Freeze(1); hear 1 0 Recover(1,0,1,1,[],True);
        waited 0 again 0; tree 0; hear 1 0 Rejoin(1); waited 0 join 1; waited 0 again 1; tree 0;
        fetched 0 [[0,[0,0]]]; joined 1 2; hear 0 1 Rejoined(1,2); joined 0 2; hear 1 0 Rejoin(2); call 0; joined 0 3"""
    trace = [step.strip() for step in steps.split(";")]
    assert replay_recovery(scope, [*trace, "step 0 0"]) == ""


def test_a_pipeline_answers_after_its_control_plane_ended() -> None:
    # Rank 0 has lost the switch and stopped. Its contribution is on the way: the chunk becomes complete, and its result
    # reaches rank 1, which keeps it for rank 0.
    steps = ["call 0", "call 1", "lose 0 1", "result 1 1 0", "hear 1 0 Freeze(1)"]
    kept = ["fetched 0 [[0,[0,0]]]", "hear 1 0 Recover(1,0,2,1,[],True)"]
    scope = RecoveryScope(operations="2")
    assert replay_recovery(scope, [*steps, *kept]) == ""
    for stopped in ("result 0 1 0", "result 1 1 1"):
        with pytest.raises(ValueError, match=f"{stopped}, cannot happen then"):
            replay_recovery(scope, [*steps, stopped])


def test_a_duplicate_message_is_no_second_task() -> None:
    # Before the search, each copy of a Rejoin waited in a queue without a bound.
    scope = RecoveryScope(operations="1", attempts=1)
    steps = ["lose 0 1", "hear 1 0 Freeze(1)", "hear 1 0 Recover(1,0,0,0,[],True)", "waited 0 again 0", "tree 0"]
    assert replay_recovery(scope, [*steps, *["hear 1 0 Rejoin(1)"] * 3, "joined 0 2", "joined 1 2"]) == ""
    with pytest.raises(ValueError, match="joined 1 2, cannot happen then"):
        replay_recovery(scope, [*steps, *["hear 1 0 Rejoin(1)"] * 3, "joined 0 2", "joined 1 2", "joined 1 2"])


def test_a_stopped_search_is_not_exhausted() -> None:
    scope = RecoveryScope(ranks=3, max_states=50)
    report = search_recovery(scope)
    assert not report.exhausted
    assert "NOT exhausted" in sentence(scope, report)


def test_a_mutant_of_code_that_has_changed_is_refused(tmp_path: Path) -> None:
    mutant = recovery_mutants.Mutant(BACK, "", (("failover.cpp", "a text that is not there", ""),))
    with pytest.raises(LookupError, match=r"failover\.cpp has 0 times"):
        machines(mutant, tmp_path)


@pytest.mark.parametrize("seed", range(20))
def test_the_model_of_a_membership_agrees_with_the_protocols_machines(seed: int) -> None:
    """Apply the same events to both, and compare the chunks that a worker sent and the results that it accepts."""
    draw = random.Random(seed)
    workers, window, lines = draw.choice([2, 3]), draw.choice([1, 2, 3]), [2, 1, 3, 2]
    shape = {"job": 7, "epoch": 3, "incarnation": 5, "workers": workers, "window": window, "payload_bytes": 8}
    switch = protocol.SwitchJob(**shape)
    machines = [protocol.Worker(worker=worker, **shape) for worker in range(workers)]
    channels = [Channel() for _ in machines]
    started = [0] * workers
    packets: list[tuple[int, bytes]] = []  # chunk, contribution
    results: dict[int, bytes] = {}
    for _ in range(5_000):
        worker = draw.randrange(workers)
        machine, channel = machines[worker], channels[worker]
        kind = draw.choice(["start", "contribution", "result", "result"])
        if kind == "start" and started[worker] < len(lines):
            operation = started[worker]
            started[worker] += 1
            machine.start(operation, 2 * lines[operation])
            channel.line += tuple((operation, place) for place in range(lines[operation]))
        elif kind == "contribution" and packets:
            chunk, packet = draw.choice(packets)
            outcome, _, slot, *_ = switch.handle_packet(packet)
            # A chunk is complete exactly when all workers have contributed.
            if outcome == "completed":
                assert all(each.contributed >> chunk & 1 for each in channels)
                results[chunk] = bytes(switch.frame(slot))
        elif kind == "result" and results:
            chunk = draw.choice(list(results))
            is_new = not channel.answered >> chunk & 1
            assert (machine.handle_packet(results[chunk], 0)[0] == "received") == is_new
            channel.answered |= 1 << chunk
        sent = channel.contributed
        while (send := machine.poll_send(0)) is not None:
            packets.append((send.header.chunk, send.header.pack() + bytes(8)))
            sent |= 1 << send.header.chunk
        channel.contribute(window)
        assert channel.contributed == sent
        assert channel.base == machine.oldest_outstanding
        if all(each.idle for each in machines) and started == [len(lines)] * workers:
            break
    assert [channel.answered for channel in channels] == [(1 << sum(lines)) - 1] * workers
