"""The accuracy bench: SwitchML's arithmetic against sums by hand, errors, tables, and a short run of everything."""

import itertools
import math
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from netfold_lab.bench.accuracy import report
from netfold_lab.bench.accuracy.formats import FIXED, FORMATS, HALF, fixed_point, half_in_switch, to_i32
from netfold_lab.bench.accuracy.run import measure_accuracy
from netfold_lab.bench.accuracy.settings import TASKS, Settings
from netfold_lab.bench.accuracy.tensors import KINDS, SPECIALS, error_of, part, special_part, specials_in
from netfold_lab.bench.ranks import BenchError
from netfold_lab.cli.bench import app

RANKS = 4


def summed(scheme, parts):
    total = np.zeros(len(parts[0]), np.int32)
    for each in parts:
        total += scheme.to_integers(each)  # wraps, as a switch's registers do
    return scheme.to_floats(total)


def parts_of(kind, count=1000):
    return [part(kind, rank, count) for rank in range(RANKS)]


def test_fixed_point_error_is_within_a_unit_and_the_largest_sum_does_not_overflow():
    parts = parts_of("normal")
    largest = float(max(np.abs(each).max() for each in parts))
    exact = np.sum(np.array(parts, np.float64), 0)
    unit = RANKS * largest / 2**31
    assert (np.abs(summed(fixed_point(largest, RANKS), parts) - exact) <= RANKS * unit + np.abs(exact) * 2.0**-24).all()
    same = [np.full(3, sign * largest, np.float32) for sign in (1, 1, 1, 1)]
    assert summed(fixed_point(largest, RANKS), same) == pytest.approx(4 * largest)
    assert summed(fixed_point(largest, RANKS), [-each for each in same]) == pytest.approx(-4 * largest)


def test_too_large_a_scaling_factor_overflows_and_too_small_a_factor_rounds_to_zero():
    same = [np.full(3, 1.0, np.float32)] * RANKS
    assert summed(fixed_point(1.0, RANKS, 1), same)[0] < 0
    assert summed(fixed_point(1.0, RANKS, 4), same)[0] == 0
    assert (summed(fixed_point(1.0, RANKS, -31), same) == 0).all()
    assert (summed(fixed_point(1.0, RANKS, -29), same) > 0).all()


def test_switch_f16_rounds_inputs_and_results_to_f16_and_the_largest_sum_does_not_overflow():
    parts = parts_of("normal")
    largest = float(max(np.abs(each).max() for each in parts))
    exact = np.sum(np.array(parts, np.float64), 0)
    magnitudes = np.sum(np.abs(np.array(parts, np.float64)), 0)
    # f16 rounds to 2^-11 of a value; its fixed point has units of 2^-13, of 65504 for the largest sum.
    bound = magnitudes * 2.0**-11 + np.abs(exact) * 2.0**-11 + RANKS**2 * largest / 65504 * 2.0**-13
    got = summed(half_in_switch(largest, RANKS), parts)
    assert (np.abs(got - exact) <= bound * 1.001).all()
    assert (np.abs(got - exact) > bound / 100).any(), "it is no f32"
    same = [np.full(1, largest, np.float32)] * RANKS
    assert np.isfinite(summed(half_in_switch(largest, RANKS), same)).all()
    assert summed(half_in_switch(largest, RANKS), same)[0] == pytest.approx(4 * largest, rel=1e-3)


def test_out_of_range_values_convert_to_the_least_integer_as_on_x86():
    given = np.array([0.5, 1.5, -2.5, 2**31 - 1, 2.0**31, -(2.0**31), -(2.0**40), np.inf, -np.inf, np.nan])
    least = -(2**31)
    assert to_i32(given).tolist() == [0, 2, -2, 2**31 - 1, least, least, least, least, least, least]


def test_an_error_is_measured_against_the_exact_sum():
    ones = [np.ones(4, np.float32)] * 2
    assert error_of(np.full(4, 2, np.float32), ones).greatest == 0
    off = error_of(np.array([2, 2, 1, 3], np.float32), ones)
    assert (off.greatest, off.rms, off.gone) == (0.5, math.sqrt(0.5) / 2, 0.5)
    lost = error_of(np.array([2, 2, np.nan, np.inf], np.float32), ones)
    assert (lost.greatest, lost.gone) == (math.inf, 0.5)


def test_the_report_covers_each_special_value_and_its_neighbours():
    with np.errstate(over="ignore", invalid="ignore"):
        found = specials_in(np.sum([special_part(rank) for rank in range(RANKS)], 0, dtype=np.float32))
    assert list(found.values()) == ["Inf", "-Inf", "NaN", "NaN", "Inf", "4", "4"]
    assert list(found)[: len(SPECIALS)] == list(SPECIALS)


def test_each_kind_of_tensor_has_the_values_of_its_name():
    wide = np.abs(part("12 decades, mixed", 0, 1 << 16))
    assert wide.max() / wide[wide > 0].min() > 1e11
    assert 0.2 < (np.abs(part("tiny", 0, 1000)) < np.finfo(np.float32).tiny).mean() < 0.8
    assert all(np.isfinite(part(kind, 3, 5000)).all() for kind in KINDS)
    assert not np.array_equal(part("normal", 0, 100), part("normal", 1, 100))


def trained(task, form, seed, loss, **more):
    return {
        "task": task,
        "format": form,
        "seed": seed,
        "power": 0,
        "agree": True,
        "loss": loss,
        "accuracy": 0.5,
        **more,
    }


def test_tables_list_every_format_and_mark_diverged_and_disagreeing_trainings():
    trainings = [
        trained(task, form, seed, seed + 1.0) for task, form, seed in itertools.product(TASKS, FORMATS, (0, 1))
    ]
    trainings[0]["loss"] = None
    (worse,) = (each for each in trainings if (each["task"], each["format"], each["seed"]) == ("text", "i8", 1))
    worse["loss"] += 0.25
    trainings[-1]["agree"] = False
    error = {"greatest": 1e-3, "rms": math.inf, "gone": 0.25}
    found = {
        "errors": {form: dict.fromkeys(KINDS, error) for form in FORMATS},
        "specials": {form: dict.fromkeys(SPECIALS, "NaN") for form in FORMATS},
        "trainings": trainings,
        "sweep": [trained("images", FIXED, 0, 2.0, power=power) for power in (-30, 0)],
        "parameters": {"images": 1, "text": 2},
        "seconds": 3.0,
    }
    text = report.render(Settings(), found, "a machine")
    assert "| f32 | 0.500 (0.500 .. 0.500) | 2.000; 1 of 2 diverged | 1.500 (1.000 .. 2.000) | +0.0000 (" in text
    assert "| +0.1250 (+0.0000 .. +0.2500) |" in text
    assert "1e-03; inf; 25.0%" in text
    assert "| 2^-30 | 0.500 | 2.000 |" in text
    assert f"**Ranks ended with different parameters**: text by {HALF}, seed 1." in text


@pytest.mark.jobs
@pytest.mark.torch
def test_a_short_run_measures_every_format_within_its_error_bound(tmp_path: Path):
    result = CliRunner().invoke(app, ["accuracy", str(tmp_path), "--quick", "--timeout", "150s"])
    assert result.exit_code == 0, result.output
    text = (tmp_path / "accuracy.md").read_text()
    assert "all ranks had the same bits in every parameter" in text
    assert all(text.count(f"\n| {form} |") == (1 if form == "i8, errors fed back" else 3) for form in FORMATS)


@pytest.mark.jobs
@pytest.mark.torch
def test_measured_errors_are_within_the_documented_bounds():
    quick = Settings.quick()
    found = measure_accuracy(Settings(elements=quick.elements, steps=2, seeds=(), factors=()), lambda line: None, 150)
    errors = found["errors"]
    for kind in KINDS:
        # Greatest errors over the greatest sum; a sum is at most P times the greatest part, and here about that.
        assert errors["f32"][kind]["greatest"] < 2.0**-21
        assert errors["i32"][kind]["greatest"] < 2.0**-22
        assert 2.0**-14 < errors["i8"][kind]["greatest"] < RANKS / 31
        assert errors["bf16"][kind]["greatest"] < 2.0**-6
    assert errors["f16"]["normal"]["greatest"] < 2.0**-9
    assert errors["f16"]["12 decades, mixed"]["greatest"] == math.inf
    # With one factor for all, values far below the greatest round to zero. Blocks with their own scales keep them.
    assert errors["SwitchML"]["12 decades, by layer"]["gone"] > 0.2 > errors["i8"]["12 decades, by layer"]["gone"]
    assert errors["SwitchML"]["one outlier"]["gone"] > 0.9 > 0.1 > errors["i8"]["one outlier"]["gone"]
    for form in ("f32", "i32", "i8"):
        arrived = found["specials"][form]
        assert [arrived[name] for name in SPECIALS] == ["Inf", "-Inf", "NaN", "NaN", "Inf"], form
        assert arrived["ones elsewhere"] == "4"


def test_a_run_past_its_deadline_raises_an_error():
    with pytest.raises(BenchError, match=r"had not ended after 0\.5 s"):
        measure_accuracy(Settings.quick(), lambda line: None, 0.5)
