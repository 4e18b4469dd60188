"""The order of a stage's work: complete, free of deadlocks, and equal to torch's own schedules."""

import pytest

from netfold_plan.events.schedule import BACKWARD, FORWARD, WEIGHTS, Turn, turn_order

SHAPES = [(1, 1, 1), (2, 1, 1), (4, 8, 1), (4, 2, 1), (8, 8, 1), (4, 8, 2), (4, 4, 3), (3, 9, 2), (4, 10, 2), (8, 2, 2)]
CASES = [
    (schedule, *shape)
    for schedule in ("gpipe", "1f1b", "interleaved", "zero-bubble")
    for shape in SHAPES
    if shape[2] == 1 or schedule in ("interleaved", "zero-bubble")
]


@pytest.mark.parametrize(("schedule", "stages", "microbatches", "virtual_stages"), CASES)
def test_every_stage_runs_each_microbatch_once(schedule, stages, microbatches, virtual_stages):
    kinds = (FORWARD, BACKWARD, WEIGHTS) if schedule == "zero-bubble" else (FORWARD, BACKWARD)
    wanted = {
        Turn(kind, virtual_stage, each)
        for kind in kinds
        for virtual_stage in range(virtual_stages)
        for each in range(microbatches)
    }
    for stage in range(stages):
        turns = turn_order(schedule, stage, stages, microbatches, virtual_stages)
        assert len(turns) == len(wanted) and set(turns) == wanted


@pytest.mark.parametrize(("schedule", "stages", "microbatches", "virtual_stages"), CASES)
def test_no_two_stages_wait_for_each_other(schedule, stages, microbatches, virtual_stages):
    left = {stage: list(turn_order(schedule, stage, stages, microbatches, virtual_stages)) for stage in range(stages)}
    done = set()

    def can(stage, turn):
        place = turn.virtual_stage * stages + stage
        if turn.kind == FORWARD:
            return place == 0 or (FORWARD, place - 1, turn.microbatch) in done
        before = {(FORWARD, place, turn.microbatch)} if turn.kind == BACKWARD else {(BACKWARD, place, turn.microbatch)}
        if turn.kind == BACKWARD and place < stages * virtual_stages - 1:
            before.add((BACKWARD, place + 1, turn.microbatch))
        return before <= done

    while any(left.values()):
        ready = [stage for stage in left if left[stage] and can(stage, left[stage][0])]
        assert ready, f"nobody can go on: {[turns[:1] for turns in left.values()]}"
        for stage in ready:
            turn = left[stage].pop(0)
            done.add((turn.kind, turn.virtual_stage * stages + stage, turn.microbatch))


@pytest.mark.torch
@pytest.mark.parametrize("split", [False, True], ids=["interleaved", "zero-bubble"])
@pytest.mark.parametrize(("stages", "microbatches", "virtual_stages"), SHAPES)
def test_orders_of_virtual_stages_equal_torchs(split, stages, microbatches, virtual_stages):
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    group = microbatches // max(1, microbatches // stages)
    names = {"FORWARD": FORWARD, "FULL_BACKWARD": BACKWARD, "BACKWARD_INPUT": BACKWARD, "BACKWARD_WEIGHT": WEIGHTS}
    for stage in range(stages):
        factor = 1 if split else 2
        ahead = schedules._get_warmup_ops(stage, virtual_stages, group, stages, microbatches, multiply_factor=factor)
        theirs = schedules._get_1f1b_rank_ops(
            virtual_stages,
            stages,
            ahead,
            microbatches * virtual_stages - ahead,
            ahead,
            stage,
            lambda step, stage=stage: (step // group) % virtual_stages * stages + stage,
            lambda step, stage=stage, ahead=ahead: (
                (virtual_stages - 1 - (step - ahead) // group % virtual_stages) * stages + stage
            ),
            stage if split else 0,
            split,
        )
        ours = turn_order("zero-bubble" if split else "interleaved", stage, stages, microbatches, virtual_stages)
        wanted = [
            Turn(names[action.computation_type.name], action.stage_index // stages, action.microbatch_index)
            for action in theirs
            if action is not None
        ]
        assert list(ours) == wanted


def test_the_first_stage_of_1f1b_holds_as_many_microbatches_as_there_are_stages():
    turns = turn_order("1f1b", 0, 4, 8)
    assert [turn.kind for turn in turns[:5]] == [FORWARD] * 4 + [BACKWARD]
    assert [turn.kind for turn in turn_order("1f1b", 3, 4, 8)[:4]] == [FORWARD, BACKWARD, FORWARD, BACKWARD]


def test_an_impossible_schedule_is_refused_in_a_sentence():
    with pytest.raises(ValueError, match="schedule 1f1b has one virtual stage per rank, not 2; use interleaved"):
        turn_order("1f1b", 0, 4, 8, 2)
    with pytest.raises(ValueError, match="11 microbatches cannot be divided into 2 rounds of 4 stages"):
        turn_order("interleaved", 0, 4, 11, 2)
    with pytest.raises(ValueError, match="schedule='pipedream' is not one of gpipe, 1f1b, interleaved, zero-bubble"):
        turn_order("pipedream", 0, 4, 8)
