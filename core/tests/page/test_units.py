"""Numbers as text."""

import pytest

from netfold import units

MB = 1 << 20


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0 s"), (3e-9, "3 ns"), (999.6e-6, "1 ms"), (0.0123, "12.3 ms"), (99.96e-3, "100 ms"), (-2e-6, "−2 us"),
     (1.5, "1.5 s"), (119.7, "120 s"), (125.2, "2 min 5 s"), (12_000, "3 h 20 min"), (2.5 * 86400, "2.5 days")],
)  # fmt: skip
def test_seconds_have_three_digits_and_the_largest_unit_that_fits(value: float, text: str) -> None:
    assert units.seconds(value) == text


def test_sizes_are_powers_of_2_and_rates_are_powers_of_10() -> None:
    sizes = (0, 4, 1 << 10, 1536, 25.6 * MB, 128 * MB, 3 << 30)
    assert [units.size(value) for value in sizes] == ["0 B", "4 B", "1 KB", "1.5 KB", "25.6 MB", "128 MB", "3 GB"]
    assert [units.rate(value) for value in (12.0, 1.25e9, 800e6)] == ["12 B/s", "1.25 GB/s", "800 MB/s"]
    ranges = ((0, 128 << 10), (128 << 10, 16 * MB), (64 * MB, None))
    assert [units.size_range(*ends) for ends in ranges] == ["up to 128 KB", "128 KB to 16 MB", "above 64 MB"]


def test_ratios_counts_and_factors_have_their_formats() -> None:
    assert [units.ratio(value) for value in (0, 1e-6, 0.0013, 0.042, 0.38, 1)] == [
        "0 %", "< 0.01 %", "0.13 %", "4.2 %", "38 %", "100 %",
    ]  # fmt: skip
    assert [units.times(value) for value in (1.483, 0.0131)] == ["1.48x", "0.013x"]
    assert [units.count(value) for value in (1200, 12.5)] == ["1,200", "12.5"]
    assert [units.big(value) for value in (1.75e11, 1_370_000, 12_000)] == ["175 billion", "1.37 million", "12,000"]
    numbers = (0, 0.0312, 28.4, 1e-5, 12_000)
    assert [units.digits(value) for value in numbers] == ["0", "0.0312", "28.4", "1e-5", "12,000"]
    assert [units.plural(value, "rank") for value in (1, 4096)] == ["1 rank", "4,096 ranks"]
    assert units.counts({"tree": 8, "ring": 1200}) == "ring 1,200, tree 8" and units.counts({}) == "–"


def test_columns_of_a_table_are_aligned() -> None:
    assert units.aligned([["name", "n", ""], ["a", "10", "x"]], left=(0, -1)) == ["name   n", "a     10  x"]
