"""The order in which a pipeline stage processes its microbatches, by schedule. Pure.

gpipe: all forward passes, then all backward passes (Huang et al. 2019).
1f1b: one of each in turn, after as many forward passes as there are stages ahead (PipeDream-flush; Narayanan et al.
2021, section 2.2).
interleaved: a rank has several virtual stages and cycles through them in groups of microbatches (section 2.2 again).
zero-bubble: gradients of weights are postponed, and fill idle time (Qi et al. 2024, ZB-H1; with several virtual stages
as torch.distributed.pipelining does).
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from netfold_plan.job import SCHEDULES

FORWARD, BACKWARD, WEIGHTS = "forward", "backward", "weights"


class Turn(NamedTuple):
    """One pass of a stage. kind: FORWARD, BACKWARD or WEIGHTS. virtual_stage: from 0, of those of the rank."""

    kind: str
    virtual_stage: int
    microbatch: int

    def text(self) -> str:
        """As a timeline names it: `forward 3`, with the virtual stage beyond the first."""
        return f"{self.kind} {self.microbatch}" + (
            f", virtual stage {self.virtual_stage}" if self.virtual_stage else ""
        )


@lru_cache(maxsize=1024)
def turn_order(schedule: str, stage: int, stages: int, microbatches: int, virtual_stages: int = 1) -> tuple[Turn, ...]:
    """The passes of one stage in order. Raises ValueError, in one sentence, where the schedule cannot do that."""
    if schedule in ("gpipe", "1f1b") and virtual_stages > 1:
        raise ValueError(
            f"the schedule {schedule} has one virtual stage per rank, not {virtual_stages}; use interleaved"
        )
    if schedule == "gpipe":
        return tuple(Turn(kind, 0, each) for kind in (FORWARD, BACKWARD) for each in range(microbatches))
    if schedule == "1f1b":
        return _in_turn(min(microbatches, stages - 1 - stage), microbatches, microbatches, 1, None)
    if schedule in ("interleaved", "zero-bubble"):
        rounds = max(1, microbatches // stages)
        if microbatches % rounds:
            raise ValueError(
                f"{microbatches} microbatches cannot be divided into {rounds} rounds of {stages} stages; the schedule "
                f"{schedule} needs a multiple of {stages}"
            )
        group = microbatches // rounds
        splits = schedule == "zero-bubble"
        hops = (1 if splits else 2) * (stages - 1 - stage)
        ahead = min(microbatches * virtual_stages, (virtual_stages - 1) * group + hops)
        return _in_turn(ahead, microbatches, group, virtual_stages, stage if splits else None)
    raise ValueError(f"schedule={schedule!r} is not one of {', '.join(SCHEDULES)}")


def _in_turn(ahead: int, microbatches: int, group: int, virtual_stages: int, held_back: int | None) -> tuple[Turn, ...]:
    """`ahead` forward passes, then one of each, then the remaining backward passes.

    held_back: after how many backward passes the first gradients of weights are computed; None: together with the
    backward pass.
    """
    total = microbatches * virtual_stages
    forward = [_place(at, group, virtual_stages) for at in range(total)]
    backward = [(virtual_stages - 1 - virtual_stage, microbatch) for virtual_stage, microbatch in forward]
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


def _place(at: int, group: int, virtual_stages: int) -> tuple[int, int]:
    """Virtual stage and microbatch of the at-th forward pass: a group of microbatches per virtual stage in turn."""
    around, inside = divmod(at, group * virtual_stages)
    return inside // group, around * group + inside % group
