"""A step as a list of acts, buckets against torch's own, and the replay in virtual time."""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from load import slowdown

from netfold_lab.bench import replay as replay_module
from netfold_lab.bench.backends import Buffer
from netfold_lab.bench.collectives import Collective
from netfold_lab.bench.config import BenchEnvironment, Measured, Replay, Replayed
from netfold_lab.bench.program import (
    BUCKET_BYTES,
    FIRST_BUCKET_BYTES,
    Await,
    Compute,
    Start,
    build_program,
    cut_buckets,
    gradient_buckets,
)
from netfold_lab.bench.replay import StepTrial
from netfold_lab.bench.start_line import StartLine
from netfold_lab.bench.step import describe_network, make_step_rows
from netfold_lab.bench.step_table import render_steps
from netfold_plan.model.catalogue import MODELS, Exchange, Model, Speed, find_model
from netfold_plan.model.catalogue.layers import Layer, linear

MIB = 1 << 20


def model_of(*layers: Layer, batch: int = 1, samples_per_s: float = 1.0, exchange: Exchange | None = None) -> Model:
    return Model("ours", layers, Speed(samples_per_s, batch, "a test"), exchange)


def test_a_bucket_is_full_once_it_has_reached_its_size() -> None:
    item = 1 / 4
    counts = [int(mib * MIB * item) for mib in (0.5, 0.5, 1, 24, 0.5, 1, 30, 1)]
    buckets = cut_buckets(counts, FIRST_BUCKET_BYTES, BUCKET_BYTES)
    assert [[count * 4 / MIB for count in bucket] for bucket in buckets] == [[0.5, 0.5], [1, 24], [0.5, 1, 30], [1]]


@pytest.mark.torch
@pytest.mark.parametrize("bucket_bytes", [2 * MIB, BUCKET_BYTES])
@pytest.mark.parametrize("name", MODELS)
def test_buckets_equal_torchs(name: str, bucket_bytes: int) -> None:
    import torch
    import torch.distributed as dist

    counts = find_model(name).gradients
    # In the order in which they come: a model's last first.
    tensors = [torch.empty(count, device="meta") for count in reversed(counts)]
    indices, _ = dist._compute_bucket_assignment_by_size(tensors, [FIRST_BUCKET_BYTES, bucket_bytes])
    theirs = [[tensors[index].numel() for index in bucket] for bucket in indices]
    assert gradient_buckets(find_model(name), bucket_bytes) == theirs


@pytest.mark.torch
def test_buckets_equal_those_of_ddp_from_its_second_step_on(tmp_path: Path) -> None:
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    sizes = [300, 700, 900, 400, 1100, 200]
    layers = [linear(f"{index}", a, b) for index, (a, b) in enumerate(pairwise(sizes))]
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        inner = torch.nn.Sequential(*(torch.nn.Linear(a, b) for a, b in pairwise(sizes)))
        theirs = DistributedDataParallel(inner, bucket_cap_mb=2)
        for _ in range(3):
            theirs(torch.ones(1, sizes[0])).sum().backward()
        logged = theirs._get_ddp_logging_data()
    finally:
        dist.destroy_process_group()
    # With a cap of one's own torch cuts the first bucket by it too.
    ours = cut_buckets([c for layer in reversed(layers) for c in layer.counts[::-1]], 2 * MIB, 2 * MIB)
    assert len(ours) > 2
    assert logged["rebuilt_bucket_sizes"] == ", ".join(str(sum(bucket) * 4) for bucket in ours)


@pytest.mark.parametrize("name", MODELS)
def test_a_step_takes_the_published_computing_time_and_sends_every_gradient_once(name: str) -> None:
    model = find_model(name)
    program = build_program(model)
    assert program.compute_ns == pytest.approx(model.speed.batch / model.speed.samples_per_s * 1e9, abs=2)
    sums = [transfer.count for transfer in program.transfers if transfer.collective == "all_reduce"]
    assert sum(sums) == sum(model.gradients) and len(sums) == len(gradient_buckets(model))
    started = [act.transfer for act in program.acts if isinstance(act, Start)]
    awaited = [act.transfer for act in program.acts if isinstance(act, Await)]
    assert started == list(range(len(program.transfers))) == sorted(awaited)
    for transfer in started:
        assert program.acts.index(Start(transfer)) < program.acts.index(Await(transfer))


def test_backward_takes_twice_as_long_as_forward_and_a_bucket_starts_with_its_last_gradient() -> None:
    # 1, 2 and 3 units of work; f32 gradients of 1, 2 and 3 MiB.
    layers = [Layer(name, ((units * MIB // 4,),), units) for name, units in (("a", 1), ("b", 2), ("c", 3))]
    program = build_program(model_of(*layers, samples_per_s=1 / 18), bucket_bytes=4 * MIB)
    second = 10**9
    # Forward 6 s; backward c 6 s, b 4 s, a 2 s. Buckets: c alone has reached the first's size, then b and a.
    assert program.acts == (Compute(12 * second), Start(0), Compute(6 * second), Start(1), Await(0), Await(1))
    assert [transfer.count * 4 for transfer in program.transfers] == [3 * MIB, 3 * MIB]


def test_shrinking_divides_the_sent_bytes_and_changes_no_time() -> None:
    model = find_model("resnet50")
    whole, small = build_program(model), build_program(model, shrink=50)
    assert small.acts == whole.acts
    for a, b in zip(whole.transfers, small.transfers, strict=True):
        assert b.count == round(a.count / 50)


def test_a_faster_accelerator_takes_less_time_for_the_same_transfers() -> None:
    model = find_model("vgg16")
    whole, fast = build_program(model), build_program(model, compute_scale=4)
    assert fast.compute_ns == pytest.approx(whole.compute_ns / 4, abs=2)
    assert fast.transfers == whole.transfers


def test_a_frozen_layer_has_no_backward_pass_and_no_gradient() -> None:
    layers = [Layer("frozen", ((5,),), 1, frozen=True), Layer("learns", ((7,),), 1)]
    program = build_program(model_of(*layers, samples_per_s=1 / 4))
    assert program.acts == (Compute(4 * 10**9), Start(0), Await(0))
    assert [transfer.count for transfer in program.transfers] == [7]


def test_looked_up_rows_arrive_before_their_layer_and_their_gradients_leave_after_it() -> None:
    layers = [Layer("bottom", ((1,),), 1), Layer("top", ((1,),), 1)]
    program = build_program(model_of(*layers, batch=3, samples_per_s=3 / 6, exchange=Exchange(10, before="top")))
    second = 10**9
    assert program.acts == (
        *(Start(0), Compute(second), Await(0), Compute(3 * second)),
        *(Start(1), Compute(2 * second), Start(2), Await(1), Await(2)),
    )
    assert [(t.collective, t.count) for t in program.transfers] == [
        *(("all_to_all", 30), ("all_to_all", 30), ("all_reduce", 2)),
    ]


class Clock:
    """Virtual time in the place of the module `time`; a sleep ends `late_ns` after its moment."""

    def __init__(self, late_ns: int = 0) -> None:
        self.now_ns = 1000
        self.late_ns = late_ns

    def monotonic_ns(self) -> int:
        return self.now_ns

    def sleep(self, seconds: float) -> None:
        self.now_ns += round(seconds * 1e9) + self.late_ns


class Link:
    """A backend of one rank: transfers pass one after the other, each in `transfer_ns`.

    `spoil`: changes the buffers after each sum.
    """

    in_place = True

    def __init__(self, clock: Clock, transfer_ns: int, spoil: Callable[[list[Buffer]], None] | None = None) -> None:
        self._clock = clock
        self._transfer_ns = transfer_ns
        self._free_ns = 0
        self._spoil = spoil
        self.buffers: list[Buffer] = []

    def empty(self, count: int, dtype: str) -> Buffer:
        values = np.empty(count, np.float32)
        self.buffers.append(Buffer(values, values))
        return self.buffers[-1]

    def bind(
        self, collective: Collective, redop: str, send: Buffer, receive: Buffer, *, asynchronous: bool = False
    ) -> Callable[[], Any]:
        assert asynchronous and redop == "sum"

        def begin() -> Any:
            self._free_ns = done_ns = max(self._free_ns, self._clock.now_ns) + self._transfer_ns

            def wait() -> None:
                receive.values[:] = send.values
                if self._spoil is not None:
                    self._spoil(self.buffers)
                self._clock.now_ns = max(self._clock.now_ns, done_ns)

            return SimpleNamespace(wait=wait)

        return begin

    def records(self) -> Any | None:
        return None


def trial_of(
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    model: Model,
    transfer_ns: int,
    late_ns: int = 0,
    spoil: Callable[[list[Buffer]], None] | None = None,
    **options: Any,
) -> StepTrial:
    clock = Clock(late_ns)
    monkeypatch.setattr(replay_module, "time", clock)
    line = folder / "line"
    backend = Link(clock, transfer_ns, spoil)
    return StepTrial(backend, StartLine(line, 0, 1), 0, 1, build_program(model, shrink=1000, **options))


def test_with_an_instant_network_a_step_takes_its_computing_time(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("resnet50", "mask-rcnn", "dlrm"):
        trial = trial_of(monkeypatch, tmp_path, find_model(name), transfer_ns=0)
        compute_ns = build_program(find_model(name)).compute_ns
        assert trial.burst(3) == [compute_ns]
        assert trial.alone() == compute_ns
        assert set(trial.late_ns) == {0}


def test_transfers_that_fit_behind_computing_are_hidden_except_the_last_bucket(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model = find_model("resnet50")
    compute_ns = build_program(model).compute_ns
    millisecond = 10**6
    trial = trial_of(monkeypatch, tmp_path, model, transfer_ns=millisecond)
    assert trial.burst(0) == [compute_ns + millisecond]
    # With a network slower than all computing, the step lasts from the first transfer to the last.
    program = build_program(model)
    second = 10**9
    first_start_ns = 0
    for act in program.acts:
        if isinstance(act, Start):
            break
        assert isinstance(act, Compute)
        first_start_ns += act.duration_ns
    trial = trial_of(monkeypatch, tmp_path, model, transfer_ns=second)
    assert trial.burst(0) == [first_start_ns + second * len(program.transfers)]
    assert trial.alone() == compute_ns


def test_a_transfer_that_the_forward_pass_needs_delays_the_accelerator(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    layers = [Layer("bottom", ((1,),), 1), Layer("top", ((1,),), 1)]
    model = model_of(*layers, samples_per_s=1 / 6, exchange=Exchange(2000, before="top"))
    second = 10**9
    # 4 s until what was looked up is there, 3 s at the top, 2 s at the bottom; its gradient takes 4 s, the sums 4 more.
    assert trial_of(monkeypatch, tmp_path, model, transfer_ns=4 * second).burst(0) == [(4 + 3 + 4 + 4) * second]


def test_a_host_that_wakes_late_starts_transfers_late_and_does_not_delay_the_accelerator(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model = find_model("resnet50")
    compute_ns = build_program(model).compute_ns
    late_ns = 70_000
    trial = trial_of(monkeypatch, tmp_path, model, transfer_ns=0, late_ns=late_ns)
    assert trial.burst(0) == [compute_ns + late_ns]
    assert trial.late_ns == [late_ns] * len(gradient_buckets(model))


def test_every_element_of_a_replay_is_checked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model = find_model("resnet50")
    trial = trial_of(monkeypatch, tmp_path, model, transfer_ns=0)
    trial.burst(7)
    assert trial.wrong_elements(7) == 0
    # In the values of another round, every element is wrong.
    elements = sum(transfer.count for transfer in build_program(model, shrink=1000).transfers)
    assert trial.wrong_elements(8) == elements


def test_a_single_wrong_element_and_swapped_buckets_are_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def spoil_one(buffers: list[Buffer]) -> None:
        buffers[1].values[3] = -1

    trial = trial_of(monkeypatch, tmp_path, find_model("resnet50"), 0, spoil=spoil_one)
    trial.burst(0)
    assert trial.wrong_elements(0) == 1

    def copy_first_into_second(buffers: list[Buffer]) -> None:
        count = min(len(buffers[0].values), len(buffers[1].values))
        buffers[1].values[:count] = buffers[0].values[:count]

    trial = trial_of(monkeypatch, tmp_path, find_model("resnet50"), 0, spoil=copy_first_into_second)
    trial.burst(0)
    assert trial.wrong_elements(0) > 1000


def test_a_waiting_timer_uses_no_core() -> None:
    import time

    started_ns, cpu_ns = time.monotonic_ns(), time.process_time_ns()
    moments = [started_ns + step * 10_000_000 for step in range(1, 11)]
    late_ns = [replay_module._sleep_until(moment) for moment in moments]
    assert min(late_ns) >= 0 and time.monotonic_ns() >= moments[-1]
    # On an idle machine about 60 us; here another process may have the core.
    assert sorted(late_ns)[2] < 5_000_000 * slowdown()
    assert time.process_time_ns() - cpu_ns < 50_000_000


def replayed(times_ns: list[int], wrong: int = 0) -> Replayed:
    return Replayed(Measured(times_ns, wrong), alone_ns=292_000_000, late_ns=[50_000, 70_000])


def test_a_row_has_exposed_time_efficiency_and_images_per_second() -> None:
    replay = Replay(["resnet50"], ["netfold", "gloo"], rounds=3)
    compute_ns = build_program(find_model("resnet50")).compute_ns
    backends = [replayed([compute_ns + 10**7] * 3), replayed([2 * compute_ns] * 3, wrong=4)]
    ours, theirs = make_step_rows(BenchEnvironment(4), replay, "resnet50", backends)
    assert ours.exposed_ns is not None and ours.exposed_ns.median == 10**7
    assert ours.efficiency is not None and ours.efficiency.median == pytest.approx(compute_ns / (compute_ns + 10**7))
    assert theirs.efficiency is not None and theirs.efficiency.median == pytest.approx(0.5)
    assert theirs.samples_per_s == pytest.approx(4 * 219 / 2)
    assert ours.ratio is not None and ours.ratio.peer == "gloo" and ours.ratio.spread.median > 1.9
    assert theirs.ratio is not None and theirs.ratio.peer == "netfold" and theirs.wrong == 4
    assert (ours.gradient_bytes, ours.buckets, ours.batch) == (25_557_032 * 4, 5, 64)


def test_the_refusal_of_a_backend_is_below_the_table() -> None:
    replay = Replay(["resnet50"], ["netfold", "mpi:mpich"])
    refusal = Replayed(Measured([], None, refused="an MPI does not do that"), None, [])
    rows = make_step_rows(BenchEnvironment(2), replay, "resnet50", [replayed([3 * 10**8]), refusal])
    assert rows[1].step_ns is None and rows[1].ratio is None and rows[0].ratio is None
    assert render_steps(rows).splitlines()[-1] == "# resnet50, mpi:mpich: an MPI does not do that"


@pytest.mark.parametrize(
    ("place", "options", "sentence"),
    [
        (BenchEnvironment(2), {}, "2 ranks on this machine, tensors as they are"),
        (BenchEnvironment(2), {"shrink": 8}, "2 ranks on this machine, tensors 1/8 of their size"),
        (BenchEnvironment(4, rack_rate="1gbit"), {}, "4 hosts, links of 1gbit, tensors as they are"),
        (
            BenchEnvironment(4, rack_rate="200mbit"),
            {"shrink": 50},
            "stands for 4 hosts with links of 10gbit: tensors 1/50 of their size, rack links of 200mbit",
        ),
        (
            BenchEnvironment(4, rack_rate="200mbit"),
            {"shrink": 10, "compute_scale": 0.2},
            "stands for 4 hosts with links of 2gbit: tensors 1/10 of their size, rack links of 200mbit; accelerators "
            "0.2 times as fast as published, for which published ones would have links of 10gbit",
        ),
    ],
)
def test_a_run_names_the_emulated_network(place: BenchEnvironment, options: dict[str, Any], sentence: str) -> None:
    assert describe_network(place, Replay(["vgg16"], ["gloo"], **options)) == sentence


@pytest.mark.parametrize(
    "wrong",
    [{"models": []}, {"backends": []}, {"models": ["lenet"]}, {"rounds": 0}, {"shrink": 0}, {"compute_scale": 0.0}],
)
def test_an_impossible_replay_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        Replay(**{"models": ["resnet50"], "backends": ["gloo"], **wrong})
