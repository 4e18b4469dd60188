"""Sizes, test data, spreads, rows and tables, without a worker process."""

import json
from collections import deque
from pathlib import Path

import numpy as np
import pytest

from netfold.quantity import format_size, parse_size
from netfold_lab.bench.backends import parse_backend, unique_labels
from netfold_lab.bench.collectives import COLLECTIVES, REDOPS, expected, parse_redops
from netfold_lab.bench.config import BenchEnvironment, Measured, SizeResult, Trials, calls_a_round
from netfold_lab.bench.ranks import Ranks
from netfold_lab.bench.report import describe_run, make_rows, total_wrong
from netfold_lab.bench.runner import Runner
from netfold_lab.bench.sizes import DTYPES, parse_dtypes, sweep
from netfold_lab.bench.spread import interleave, paired_ratios, spread
from netfold_lab.bench.table import render_table
from netfold_lab.bench.test_data import MessageData, byte_bound, contribution, encode, fill, mismatches, modulus
from netfold_lab.bench.trial import make_message_data


@pytest.mark.parametrize(("text", "size_bytes"), [("4", 4), ("64K", 65536), ("16M", 1 << 24), ("1G", 1 << 30)])
def test_size_suffixes_are_powers_of_two_and_sizes_survive_a_round_trip_through_text(
    text: str, size_bytes: int
) -> None:
    assert parse_size(text) == size_bytes
    assert format_size(size_bytes) == text


@pytest.mark.parametrize("text", ["", "M", "4m", "1.5M", "-4", "4MB"])
def test_a_malformed_size_is_refused_with_examples(text: str) -> None:
    with pytest.raises(ValueError, match="64K"):
        parse_size(text)


def test_a_sweep_multiplies_sizes_up_to_its_end() -> None:
    assert sweep(4, 64, 4) == [4, 16, 64]
    assert sweep(4, 63, 4) == [4, 16]
    assert sweep(8, 8, 2) == [8]


@pytest.mark.parametrize(("begin", "end", "factor"), [(0, 8, 2), (8, 4, 2), (4, 8, 1)])
def test_an_endless_or_empty_sweep_is_refused(begin: int, end: int, factor: int) -> None:
    with pytest.raises(ValueError):
        sweep(begin, end, factor)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("workers", [1, 2, 8, 36])
def test_the_largest_sum_is_exact_in_its_dtype(dtype: str, workers: int) -> None:
    pattern = MessageData.of("sum", workers, DTYPES[dtype].exact_below)
    assert workers * (pattern.p - 1) < DTYPES[dtype].exact_below
    for round_index in (0, 1, 1000):
        assert pattern.reduced(round_index).max() <= workers * (pattern.p - 1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("workers", [1, 2, 4, 5])
@pytest.mark.parametrize("redop", REDOPS)
def test_every_reduction_and_every_part_of_it_is_exact_in_its_dtype(redop: str, workers: int, dtype: str) -> None:
    pattern = MessageData.of(redop, workers, DTYPES[dtype].exact_below)
    reduce = {"min": np.minimum, "max": np.maximum, "prod": np.multiply}.get(redop, np.add)
    for round_index in (0, 3):
        sent = [pattern.sent(rank, round_index) for rank in range(workers)]
        # In every order of ranks that a ring or a chain may begin with, and so every part that is ever held.
        for first in range(workers):
            held = sent[first]
            for step in range(1, workers):
                held = reduce(held, sent[(first + step) % workers])
                assert np.abs(held).max() < DTYPES[dtype].exact_below
            whole = held // workers if redop == "avg" else held
            assert np.array_equal(whole, pattern.reduced(round_index))
            assert redop != "avg" or not np.any(held % workers)
        assert pattern.largest >= max(np.abs(each).max() for each in sent) or redop == "prod"


@pytest.mark.parametrize("redop", ["sum", "avg", "prod"])
def test_an_omitted_or_duplicated_rank_changes_a_third_of_the_elements(redop: str) -> None:
    pattern = MessageData.of(redop, 4, DTYPES["f32"].exact_below)
    sent = np.stack([pattern.sent(rank, 2) for rank in range(4)])
    reduce = np.multiply if redop == "prod" else np.add
    right = reduce.reduce(sent)
    for rank in range(4):
        without = reduce.reduce(np.delete(sent, rank, axis=0))
        twice = reduce(right, sent[rank])
        assert np.mean(without != right) > 1 / 3
        # Of a product, the rank's own elements: its signs are their own inverse.
        assert np.mean(twice != right) > (0.2 if redop == "prod" else 1 / 3)


def test_test_values_are_multiples_of_a_shared_power_of_two() -> None:
    for ranks in (2, 5, 1 << 10):
        pattern = MessageData.of("sum", ranks, DTYPES["f32"].exact_below)
        e, h = int(pattern.largest).bit_length(), (ranks - 1).bit_length()
        assert e + h <= 30


def test_elements_beyond_the_error_bound_and_nans_count_as_wrong() -> None:
    assert byte_bound(4, 31) == pytest.approx(4, rel=0.01)
    period = np.array([1.0, 5.0, 9.0], np.float32)
    buffer = np.zeros(8, np.float32)
    fill(buffer, period)
    buffer[:4] += [0.5, -0.5, 0.6, 0]
    buffer[7] = np.nan
    assert mismatches(buffer, period, tolerance=0.5) == 2
    assert mismatches(buffer, period) == 4


def test_only_a_sum_of_f32_by_i8_has_an_error_bound_above_0() -> None:
    _, tolerance = make_message_data("sum", "i8", "f32", 4)
    assert tolerance > 0
    assert [make_message_data("sum", wire, "f32", 4)[1] for wire in ("", "f32", "bf16", "f16", "i32")] == [0] * 5
    assert make_message_data("max", "i8", "f32", 4)[1] == 0
    assert make_message_data("avg", "i8", "f32", 4)[1] == pytest.approx(tolerance, rel=0.1), (
        "of numbers P times as large"
    )


def test_lists_of_dtypes_and_reductions_are_read_and_unknown_ones_are_named() -> None:
    assert parse_dtypes("all") == list(DTYPES) and parse_dtypes("f16,i64") == ["f16", "i64"]
    assert parse_redops("all") == list(REDOPS) and parse_redops("max") == ["max"]
    with pytest.raises(ValueError, match="'f8' is not known; there are f32"):
        parse_dtypes("f32,f8")
    with pytest.raises(ValueError, match="'median' is not known; there are sum, prod"):
        parse_redops("median")


def test_a_dtype_too_narrow_for_the_check_is_refused() -> None:
    with pytest.raises(ValueError, match="wider"):
        modulus(DTYPES["bf16"].exact_below, 64)


@pytest.mark.parametrize("p", [7, 31, 65521])
def test_elements_differ_within_a_period_and_between_ranks_and_rounds(p: int) -> None:
    assert len(set(contribution(3, 5, p).tolist())) == p
    assert not np.any(contribution(3, 5, p) == contribution(4, 5, p))
    assert not np.any(contribution(3, 5, p) == contribution(3, 6, p))


@pytest.mark.parametrize("shift", [1, 32, 352, 1024, 4096, 65536])
def test_a_message_shifted_by_a_packet_or_a_page_differs_in_every_element(shift: int) -> None:
    p = modulus(DTYPES["f32"].exact_below, 4)
    row = contribution(0, 0, p)
    assert not np.any(row == np.roll(row, shift))


def test_percentiles_equal_numpys() -> None:
    values = [5.0, 1.0, 4.0, 2.0, 8.0, 9.0, 1.5]
    of = spread(values)
    assert [of.p5, of.p25, of.median, of.p75, of.p95] == pytest.approx(np.percentile(values, [5, 25, 50, 75, 95]))
    assert of.n == 7


def test_the_spread_of_one_value_has_that_value_at_both_ends() -> None:
    assert (spread([3.0]).p5, spread([3.0]).median, spread([3.0]).p95) == (3.0, 3.0, 3.0)


def test_ratios_are_paired_by_round_so_that_a_slow_round_cancels() -> None:
    ours, peer = [100, 200, 100], [150, 300, 150]
    of = spread(paired_ratios(peer, ours))
    assert (of.p5, of.median, of.p95) == (1.5, 1.5, 1.5)


def test_each_round_runs_every_case_and_each_case_is_first_equally_often() -> None:
    turns = list(interleave("ABC", range(-1, 5)))
    assert [number for number, _ in turns] == [number for number in range(-1, 5) for _ in "ABC"]
    rounds = ["".join(case for at, case in turns if at == number) for number in range(-1, 5)]
    assert {"".join(sorted(one)) for one in rounds} == {"ABC"}
    assert sorted(one[0] for one in rounds) == list("AABBCC")


@pytest.mark.parametrize("dtype", [name for name in DTYPES if name != "bf16"])
@pytest.mark.parametrize(("count", "start"), [(5, 0), (23, 3), (700, 13)])
def test_a_filled_buffer_matches_its_expected_values_and_no_shifted_values(dtype: str, count: int, start: int) -> None:
    period = encode(contribution(2, 5, 7), dtype)
    buffer = np.zeros(count, period.dtype)
    fill(buffer, period, start)
    assert [int(value) for value in buffer] == [int(period[(start + i) % 7]) for i in range(count)]
    assert mismatches(buffer, period, start) == 0
    assert mismatches(buffer, period, start + 1) == count
    buffer[count // 2] += 1
    assert mismatches(buffer, period, start) == 1


@pytest.mark.torch
def test_bf16_bits_equal_torchs_conversion() -> None:
    import torch

    numbers = contribution(3, 1, 31)
    bits = torch.from_numpy(numbers).to(torch.bfloat16).view(torch.uint16).numpy()
    assert np.array_equal(encode(numbers, "bf16"), bits)


@pytest.mark.parametrize(
    "name", [name for name in COLLECTIVES if name not in ("barrier", "reduce", "gather", "ping_pong")]
)
def test_the_expected_segments_cover_the_whole_receive_buffer(name: str) -> None:
    collective = COLLECTIVES[name]
    count = collective.whole_count(1000, 4, ranks=3)
    for rank in range(3):
        pieces = expected(collective, rank, 3, count)
        assert sum(piece.count for piece in pieces) == collective.receive_count(count, 3)


def test_bus_bandwidth_factors_equal_nccl_tests() -> None:
    factors = {name: one.bus_factor(4) for name, one in COLLECTIVES.items()}
    assert factors == {
        "all_reduce": 1.5,
        "all_gather": 0.75,
        "reduce_scatter": 0.75,
        "all_to_all": 0.75,
        "broadcast": 1,
        "reduce": 1,
        "gather": 0.75,
        "scatter": 0.75,
        "send_recv": 1,
        "ping_pong": 1,
        "barrier": 1,
    }


def test_sizes_of_split_collectives_are_rounded_down_to_whole_parts() -> None:
    assert COLLECTIVES["all_gather"].whole_count(4096, 4, ranks=3) == 1023
    assert COLLECTIVES["all_gather"].send_count(1023, ranks=3) == 341
    assert COLLECTIVES["all_reduce"].whole_count(4096, 4, ranks=3) == 1024


def test_a_backend_named_twice_has_two_labels() -> None:
    assert unique_labels(["gloo", "netfold", "gloo"]) == ["gloo", "netfold", "gloo#2"]


def test_torch_backends_share_processes_and_two_mpis_do_not() -> None:
    backends = ["gloo", "netfold:shared", "communicator:shared", "mpi:intel", "mpi:intel:out", "mpi:mpich"]
    names = [parse_backend(backend) for backend in backends]
    assert [name.world for name in names] == ["torch", "torch", "communicator", "intel", "intel", "mpich"]
    assert [name.variant for name in names] == ["", "shared", "shared", "", "out", ""]


@pytest.mark.parametrize("text", ["", "mpi", "mpi:lam", "mpi:intel:shared", "gloo:shared", "netfold:out", "a:b:c"])
def test_a_malformed_backend_name_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not understood"):
        parse_backend(text)


def test_algorithm_wire_format_and_shared_may_follow_netfold_in_any_order() -> None:
    for text in ("netfold:shared:ring:bf16", "netfold:bf16:ring:shared", "netfold:ring:shared:bf16"):
        name = parse_backend(text)
        assert (name.kind, name.variant, name.algorithm, name.wire) == ("netfold", "shared", "ring", "bf16")
    options = parse_backend("communicator:in_network").options()
    assert options is not None and (options.algorithm, options.wire_dtype) == ("in_network", None)
    assert parse_backend("netfold:shared").options() is None


def test_an_unknown_part_of_a_backend_name_is_refused_with_the_known_parts() -> None:
    with pytest.raises(ValueError, match=r"'star' is none of shared; the algorithms .*halving_doubling.* i32, i8"):
        parse_backend("netfold:star")
    with pytest.raises(ValueError, match=r"it says both ring and tree"):
        parse_backend("netfold:ring:tree")


def test_smaller_messages_have_more_calls_a_round() -> None:
    calls = [calls_a_round(size_bytes) for size_bytes in (4, 64 << 10, 1 << 20, 64 << 20)]
    assert calls == sorted(calls, reverse=True)
    assert calls[-1] == 1


@pytest.mark.parametrize(
    ("changed", "complaint"),
    [
        ({"backends": []}, "no backend"),
        ({"backends": ["mpi:lam"]}, "mpi:openmpi"),
        ({"collective": "all_sum"}, "all-reduce"),
        ({"rounds": 0}, "rounds"),
        ({"sizes": [2]}, "no element of f32"),
        ({"dtype": "f8"}, "f32, f64"),
    ],
)
def test_a_run_without_a_measurement_is_refused(changed: dict[str, object], complaint: str) -> None:
    asked: dict[str, object] = {"collective": "all_reduce", "backends": ["gloo"], "sizes": [4], **changed}
    with pytest.raises(ValueError, match=complaint):
        Trials(**asked)  # type: ignore[arg-type]


def test_an_environment_without_workers_is_refused() -> None:
    with pytest.raises(ValueError, match="workers"):
        BenchEnvironment(workers=0)


PLACE = BenchEnvironment(workers=4, rack_rate="1gbit")
TRIALS = Trials("all_reduce", ["netfold", "gloo"], sizes=[1 << 20], rounds=3, breakdown=True)
RESULT = [
    SizeResult(
        1 << 20,
        1 << 18,
        [
            Measured([10**6, 2 * 10**6, 10**6], 0, [[600, 400], [500, 500]], [9000, 9200], [[30, 1, 60], [40, 1, 70]]),
            Measured([2 * 10**6, 3 * 10**6, 2 * 10**6], 5, [[900, 900], [900, 900]], [8000, 8200]),
        ],
    )
]


def test_rows_hold_the_columns_of_nccl_tests() -> None:
    ours, peer = make_rows(PLACE, TRIALS, RESULT)
    assert (ours.backend, ours.size_bytes, ours.count, ours.dtype, ours.redop) == (
        "netfold",
        1 << 20,
        1 << 18,
        "f32",
        "sum",
    )
    # 2^20 bytes in a millisecond; busbw is 2 (4 - 1) / 4 of it.
    assert ours.algbw == pytest.approx((1 << 20) * 1000)
    assert ours.busbw == pytest.approx((1 << 20) * 1500)
    assert ours.wire_bytes == 1000
    assert (ours.wrong, peer.wrong, total_wrong([ours, peer])) == (0, 5, 5)


def test_each_row_has_its_ratio_to_the_first_other_backend() -> None:
    ours, peer = make_rows(PLACE, TRIALS, RESULT)
    assert ours.ratio is not None and peer.ratio is not None
    assert (ours.ratio.peer, ours.ratio.rounds, ours.ratio.spread.median) == ("gloo", [2, 1.5, 2], 2)
    assert (peer.ratio.peer, peer.ratio.spread.median) == ("netfold", 0.5)


def test_only_backends_with_event_records_have_a_breakdown() -> None:
    ours, peer = make_rows(PLACE, TRIALS, RESULT)
    assert ours.breakdown is not None and peer.breakdown is not None
    assert (ours.breakdown.python_ns, ours.breakdown.queue_ns, ours.breakdown.wire_ns) == (35, 1, 65)
    assert (peer.breakdown.call_ns, peer.breakdown.python_ns) == (8100, None)


def test_the_table_of_a_single_backend_has_no_ratio() -> None:
    trials = Trials("all_reduce", ["gloo"], sizes=[1 << 20], rounds=3)
    result = [SizeResult(1 << 20, 1 << 18, [Measured([10**6], 0)])]
    (row,) = make_rows(PLACE, trials, result)
    assert row.ratio is None
    assert render_table([row]).splitlines()[1].split()[-4:] == ["-", "-", "-", "-"]


def test_the_refusal_of_a_backend_is_below_the_table_and_its_ratio_is_absent() -> None:
    refusal = Measured([], None, refused="there is no such thing yet")
    result = [SizeResult(1 << 20, 1 << 18, [refusal, Measured([10**6], 0)])]
    rows = make_rows(PLACE, Trials("send_recv", ["netfold", "gloo"], [1 << 20]), result)
    assert [row.time_ns is None for row in rows] == [True, False]
    assert rows[1].ratio is None
    assert render_table(rows).splitlines()[-1].endswith("netfold: there is no such thing yet")


def test_a_table_has_one_line_for_each_row_below_the_header() -> None:
    lines = render_table(make_rows(PLACE, TRIALS, RESULT)).splitlines()
    assert lines[0].split()[:6] == ["size(B)", "count", "type", "redop", "backend", "algorithm"]
    assert len({len(line) for line in lines[:3]}) == 1
    assert "Python" in lines[3]


def test_the_json_of_a_run_describes_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["/somewhere/bin/netfold", "bench", "suite"])
    ranks = Ranks("torch", tmp_path, PLACE.deadline_s, deque(), print)
    ranks.ready = [{"versions": {"torch": "2.13.0"}, "congestion_control": "bbr"}]
    described = Runner(PLACE, {"torch": ranks}, 0.0).describe()
    told = json.loads(json.dumps(describe_run(described, TRIALS, make_rows(PLACE, TRIALS, RESULT))))
    assert told["command"] == ["netfold", "bench", "suite"]
    assert told["place"]["rack_rate"] == "1gbit"
    assert told["machine"]["tcp_congestion_control"] == "bbr"
    assert {"cpu", "cores", "kernel", "load"} <= told["machine"].keys()
    assert {"netfold", "commit", "python", "torch"} <= told["versions"].keys()
    assert told["launches"] == 1 and told["config"]["rounds"] == 3
    assert told["rows"][0]["times_ns"] == [10**6, 2 * 10**6, 10**6]


@pytest.mark.torch
@pytest.mark.parametrize("dtype", DTYPES)
def test_shared_tensors_are_views_of_arrays_from_netfold_empty(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from netfold_lab.bench.backends.torch_backend import TorchBackend

    made: list[np.ndarray] = []

    def empty(count: int, kind: np.dtype) -> np.ndarray:
        made.append(np.zeros(count, kind))
        return made[-1]

    monkeypatch.setattr("netfold.empty", empty, raising=False)
    buffer = TorchBackend(None, parse_backend("netfold:shared")).empty(5, dtype)
    assert buffer.native.dtype == getattr(torch, DTYPES[dtype].torch_name)
    assert buffer.native.data_ptr() == buffer.values.ctypes.data == made[0].ctypes.data
    assert (len(buffer.native), buffer.values.nbytes) == (5, 5 * DTYPES[dtype].item_bytes)
