"""Tables and flights: only training rows determine how values are coded."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pandas
import pytest
import torch
from made import COLUMNS, ROWS, data, everything, table

from netfold_train import BadExampleError
from netfold_train.zoo.data import table as flights


@pytest.mark.parametrize("suffix", [".csv", ".csv.gz", ".parquet"])
def test_unknown_and_missing_categories_are_0(suffix: str, tmp_path: Path) -> None:
    seen = table(tmp_path / f"seen{suffix}", ROWS)
    new = pandas.DataFrame({"age": [20.0, 50.0], "shop": ["a", "never"], "size": [3, 2], "bought": [0, 1], "unread": 1})
    found = data("table", train=seen, held_out=table(tmp_path / f"new{suffix}", new), **COLUMNS)
    dense, categorical = everything(found.held_out).inputs
    assert categorical.tolist() == [[1, 2], [0, 0]]
    assert everything(found.train).inputs[1][:4].tolist() == [[2, 2], [1, 1], [2, 2], [0, 2]]
    # The training rows' mean and deviation: 10, 20, 30.
    assert dense.flatten().tolist() == pytest.approx([0.0, 30 / math.sqrt(200 / 3)])
    assert everything(found.train).inputs[0][:4, 0].tolist() == pytest.approx([-1.2247, 0, 0, 1.2247], abs=1e-4)
    assert found.metric.baseline == pytest.approx(math.log(2))


def test_the_baseline_of_a_table_is_the_rate_by_its_columns(tmp_path: Path) -> None:
    path = table(tmp_path / "rows.csv", ROWS)
    found = data("table", train=path, baseline=["shop"], **COLUMNS)
    # Half of the 18 training rows are bought: 9 of 9 of shop b, 0 of 4 without a shop. Held out: one of each.
    b, missing = (9 + 0.5) / (9 + 1), (0 + 0.5) / (4 + 1)
    assert len(found.train) == 18 and everything(found.held_out).inputs[1][:, 0].tolist() == [2, 0]
    assert found.metric.baseline == pytest.approx(-(math.log(b) + math.log(1 - missing)) / 2)
    assert found.metric.baseline_is == "the rate by shop"
    with pytest.raises(ValueError, match=r"data.baseline has 'age'"):
        data("table", train=path, baseline=["age"], **COLUMNS)


def test_tables_with_repeated_columns_other_types_or_too_few_rows_are_errors(tmp_path: Path) -> None:
    path = table(tmp_path / "rows.csv", ROWS)
    with pytest.raises(ValueError, match=r"column 'bought' is named twice"):
        data("table", train=path, dense=["age", "bought"], categorical=["shop"], target="bought")
    words = table(tmp_path / "words.csv", ROWS.assign(size="large"))
    with pytest.raises(BadExampleError, match=r"words.csv: column 'size' is .*; in .*rows.csv it is int64"):
        data("table", train=path, held_out=words, **COLUMNS)
    with pytest.raises(ValueError, match=r"a tenth of the 4 rows of .*few.csv is none"):
        data("table", train=table(tmp_path / "few.csv", ROWS[:4]), **COLUMNS)
    with pytest.raises(BadExampleError, match=r"empty.csv: no rows"):
        data("table", train=table(tmp_path / "empty.csv", ROWS[:0]), **COLUMNS)


def test_a_column_of_a_long_file_has_one_type(tmp_path: Path) -> None:
    # pandas reads a long file in blocks. The first has only numbers: 7 and "7" would be two categories.
    length = 300_000
    rows = pandas.DataFrame({"shop": ["7"] * length + ["b", "7"], "bought": [0, 1] * (length // 2 + 1)})
    found = data(
        "table", train=table(tmp_path / "long.csv", rows), held_out=table(tmp_path / "end.csv", rows[-4:]), dense=[],
        categorical=["shop"], target="bought",
    )  # fmt: skip
    assert everything(found.train).inputs[1].unique().tolist() == [1, 2]
    assert everything(found.held_out).inputs[1][:, 0].tolist() == [1, 1, 2, 1]


def flights_folder(folder: Path) -> Path:
    folder.mkdir()
    days = pandas.DataFrame([(1, day) for day in range(1, 31)] * 4, columns=["month", "day"])
    number = np.arange(len(days))
    hour = (number + number // 30) % 5 + 6
    table(
        folder / "flights.csv.zip",
        days.assign(
            carrier=np.where(number % 2, "AA", "UA"),
            origin="EWR",
            dest=np.where(number % 3, "IAH", "ORD"),
            hour=hour,
            distance=1000.0 + number,
            time_hour=[f"2013-01-{day:02}T{hour:02}:00:00Z" for day, hour in zip(days["day"], hour, strict=True)],
            arr_delay=np.where(number == 7, np.nan, np.where(number % 2, 16.0, 15.0)),
            dep_delay=number,
        ),
    )
    hours = [(f"2013-01-{day:02}T{hour:02}:00:00Z", day * 24.0 + hour) for day in range(1, 31) for hour in range(6, 10)]
    weather = pandas.DataFrame({"time_hour": [at for at, _ in hours], "temp": [value for _, value in hours]})
    table(folder / "weather.csv", weather.assign(origin="EWR", **dict.fromkeys(flights.WEATHER[1:], 1.0)))
    return folder


def test_flights_are_held_out_by_whole_days_and_the_weather_is_their_hours(tmp_path: Path) -> None:
    found = data("flights", root=str(flights_folder(tmp_path / "data")))
    # 30 days, 4 flights each; days 10, 20, 30 are held out; one flight was cancelled.
    assert (len(found.train), len(found.held_out)) == (27 * 4 - 1, 3 * 4)
    dense, categorical = everything(found.train).inputs
    assert dense.shape[1] == len(flights.DENSE) and categorical.shape[1] == len(flights.CATEGORICAL)
    carrier, hour = categorical[:, 0], categorical[:, 5]
    assert torch.equal(everything(found.train).target, (carrier == 1).float()), (
        "AA's delay of 16 minutes is late, UA's of 15 minutes is not"
    )
    # The fifth hour has no weather, so it has the mean, 0. Other temperatures rise with day and hour.
    temperature = dense[:, flights.DENSE.index("temp")]
    assert (temperature[hour == 5] == 0).all() and len(temperature[hour < 5].unique()) > 50
    assert float(temperature[:26].diff().mean()) > 0


def test_the_installed_flights_have_all_months_and_weekdays_in_both_parts() -> None:
    found = data("flights")
    assert len(found.train) + len(found.held_out) == 327_346
    assert 0.45 < found.metric.baseline < 0.56
    categorical = everything(found.held_out).inputs[1]
    # Few held-out categories are unknown.
    assert categorical[:, 3].unique().tolist() == list(range(1, 13)) and categorical[:, 4].unique().tolist() == [
        *range(1, 8)
    ]
    assert float((categorical == 0).double().mean()) < 0.001
