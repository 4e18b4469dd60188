"""In which order a stage of a pipeline works off its microbatches, by schedule. Pure.

gpipe: all forward passes, then all backward passes (Huang et al. 2019). 1f1b: one of each in turn, after as many
forward passes as there are stages ahead (PipeDream-flush; Narayanan et al. 2021, section 2.2). interleaved: a stage
holds several pieces of the model and goes round them in groups of microbatches (section 2.2 again). zero-bubble: the
gradients of weights wait, and fill what would be idle (Qi et al. 2024, ZB-H1; with several pieces as
torch.distributed.pipelining has it).
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from netfold.plan.job import SCHEDULES

FORWARD, BACKWARD, WEIGHTS = "forward", "backward", "weights"


class Turn(NamedTuple):
    """What a stage does at one time: kind is FORWARD, BACKWARD or WEIGHTS; piece: of those that the stage holds."""

    kind: str
    virtual_stage: int
    microbatch: int

    def text(self) -> str:
        """As a timeline names it: `forward 3`, and which piece of the model beyond the first."""
        return f"{self.kind} {self.microbatch}" + (f", piece {self.virtual_stage}" if self.virtual_stage else "")


@lru_cache(maxsize=1024)
def turn_order(schedule: str, stage: int, stages: int, microbatches: int, pieces: int = 1) -> tuple[Turn, ...]:
    """Of one stage. Raises ValueError, in a sentence, for what the schedule cannot do."""
    if schedule == "gpipe":
        _only_one_piece(schedule, pieces)
        return tuple(Turn(kind, 0, each) for kind in (FORWARD, BACKWARD) for each in range(microbatches))
    if schedule == "1f1b":
        _only_one_piece(schedule, pieces)
        return _in_turn(min(microbatches, stages - 1 - stage), microbatches, microbatches, 1, None)
    if schedule in ("interleaved", "zero-bubble"):
        rounds = max(1, microbatches // stages)
        if microbatches % rounds:
            raise ValueError(
                f"{microbatches} microbatches do not come out even in {rounds} rounds of {stages} stages; the schedule "
                f"{schedule} wants a multiple of {stages}"
            )
        group = microbatches // rounds
        splits = schedule == "zero-bubble"
        hops = (1 if splits else 2) * (stages - 1 - stage)
        ahead = min(microbatches * pieces, (pieces - 1) * group + hops)
        return _in_turn(ahead, microbatches, group, pieces, stage if splits else None)
    raise ValueError(f"schedule={schedule!r} is not one of {', '.join(SCHEDULES)}")


def _only_one_piece(schedule: str, pieces: int) -> None:
    if pieces > 1:
        raise ValueError(f"the schedule {schedule} has one piece of the model a stage, not {pieces}; take interleaved")


def _in_turn(ahead: int, microbatches: int, group: int, pieces: int, held_back: int | None) -> tuple[Turn, ...]:
    """`ahead` forward passes, then one of each, then what backward passes are left.

    held_back: after how many backward passes the first gradients of weights are computed; None: never apart.
    """
    total = microbatches * pieces
    forward = [_place(at, group, pieces) for at in range(total)]
    backward = [(pieces - 1 - piece, microbatch) for piece, microbatch in forward]
    turns = [Turn(FORWARD, *each) for each in forward[:ahead]]
    weights = 0
    for at in range(total):
        if ahead + at < total:
            turns.append(Turn(FORWARD, *forward[ahead + at]))
        turns.append(Turn(BACKWARD, *backward[at]))
        if held_back is not None and at >= held_back:
            turns.append(Turn(WEIGHTS, *backward[weights]))
            weights += 1
    if held_back is not None:
        turns += [Turn(WEIGHTS, *each) for each in backward[weights:]]
    return tuple(turns)


def _place(at: int, group: int, pieces: int) -> tuple[int, int]:
    """Piece and microbatch of the at-th forward pass: a group of microbatches through each piece in turn."""
    around, inside = divmod(at, group * pieces)
    return inside // group, around * group + inside % group
