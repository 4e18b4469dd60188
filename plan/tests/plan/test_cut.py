"""Cuts of unequal layers into stages, and the time of such a pipeline: compared with every possible cut."""

import itertools
import random
from dataclasses import dataclass

import pytest
from even_model import cluster

from netfold_plan.events import IDEAL, simulate
from netfold_plan.job import Job, Split
from netfold_plan.model import Layer, Layered, Pass, ShardSpec
from netfold_plan.step import predict
from netfold_plan.step.cut import cut


def largest(costs: tuple[float, ...], bounds: tuple[int, ...]) -> float:
    return max(sum(costs[first:last]) for first, last in itertools.pairwise(bounds))


def test_no_other_cut_has_a_smaller_largest_part() -> None:
    chance = random.Random(7)
    for _ in range(300):
        count = chance.randint(1, 9)
        costs = tuple(chance.choice([0.0, 1.0, 2.0, 5.0, chance.random() * 10]) for _ in range(count))
        runs = chance.randint(1, count)
        every = [(0, *inner, count) for inner in itertools.combinations(range(1, count), runs - 1)]
        bounds = cut(costs, runs)
        assert len(bounds) == runs + 1 and all(first < last for first, last in itertools.pairwise(bounds))
        best = min(largest(costs, each) for each in every)
        assert largest(costs, bounds) == pytest.approx(best), (costs, runs)


def test_of_several_best_cuts_the_one_nearest_even_shares_is_chosen() -> None:
    # The first layer is the largest part, wherever the other layers are cut.
    assert cut((10.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0), 3) == (0, 1, 4, 7)
    assert cut((1.0,) * 8, 4) == (0, 2, 4, 6, 8)


def test_more_parts_than_layers_are_refused() -> None:
    with pytest.raises(ValueError, match="3 pipeline stages are more than the 2 layers"):
        cut((1.0, 1.0), 3)


@dataclass(frozen=True)
class Uneven:
    """Layers that take so many seconds forward, and twice that backward; of 100, 200, ... parameters, which keep 10,
    20, ... bytes and hand on 1e6, 2e6, ..."""

    forward_s: tuple[float, ...]
    name: str = "uneven"
    parameters: float = 1.0
    flops: float = 1.0

    def layers(self, share: ShardSpec) -> tuple[Layer, ...]:
        return tuple(
            Layer(
                f"layer {index}",
                Pass(measured_s=seconds),
                Pass(measured_s=2 * seconds),
                Pass(),
                parameters=100.0 * (index + 1),
                kept_bytes=10.0 * (index + 1),
                input_bytes=1e6 * index,
            )
            for index, seconds in enumerate(self.forward_s)
        )


def test_the_slowest_stage_of_a_chain_has_whole_layers() -> None:
    # 3, 1, 1, 1: two stages come out even, three cannot be even: the first layer alone is half of all.
    for stages, slowest in ((1, 18), (2, 9), (3, 9), (4, 9)):
        job = Job(8, 1, Split(pipeline=stages), schedule="gpipe", optimizer="sgd")
        found = predict(Uneven((3.0, 1.0, 1.0, 1.0)), cluster(), job)
        assert found.compute_s == pytest.approx(8 * slowest)
        # All stages but the slowest fill and drain.
        assert found.bubble_s == pytest.approx(18 - slowest)
        assert simulate(Uneven((3.0, 1.0, 1.0, 1.0)), cluster(), job, IDEAL).prediction.step_s == pytest.approx(
            found.step_s, rel=0.001
        )


def test_a_stage_of_a_chain_has_the_memory_and_messages_of_its_own_layers() -> None:
    job = Job(8, 1, Split(pipeline=2))
    first, last = predict(Uneven((3.0, 1.0, 1.0, 1.0)), cluster(), job).stages
    assert (first.parameters, last.parameters) == (100, 200 + 300 + 400)
    assert (first.kept_bytes, last.kept_bytes) == (10, 20 + 30 + 40)
    # What the second layer receives goes from one to the other, and its gradient comes back.
    assert (first.sent_bytes, last.sent_bytes) == (1e6, 0)
    assert first.send_s == last.alone_s[1] > 0 == last.send_s == first.alone_s[1]


def test_virtual_stages_of_an_interleaved_chain_are_consecutive_layers() -> None:
    # Four runs of 1, 2, 3, 4 seconds: the first rank has the first and the third.
    job = Job(8, 1, Split(pipeline=2, interleave=2), schedule="interleaved")
    first, last = predict(Uneven((1.0, 2.0, 3.0, 4.0)), cluster(), job).stages
    assert (first.forward_s, last.forward_s) == (1 + 3, 2 + 4)
    assert (first.sent_bytes, last.sent_bytes) == (3e6, 2e6)


def test_a_pipeline_of_a_catalogue_model_is_as_slow_as_its_slowest_stage() -> None:
    model = Layered("resnet50")
    for stages in (2, 4, 8):
        found = predict(model, cluster(), Job(32, 4, Split(pipeline=stages)))
        times = [stage.total_s for stage in found.stages]
        assert max(times) > min(times) and found.compute_s == pytest.approx(8 * max(times))
        assert sum(stage.parameters for stage in found.stages) == pytest.approx(model.parameters)
