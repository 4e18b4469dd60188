"""Rows of a table for a recommender: numbers, categories, and whether something happened. From CSV or Parquet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from netfold.train.examples import BadExampleError, Batch, Data, Metric


def table(
    train: str,
    dense: Sequence[str],
    categorical: Sequence[str],
    target: str,
    held_out: str | None = None,
    baseline: Sequence[str] = (),
) -> Data:
    """Examples: dense [d] f32, categorical [t] int64, and the target, f32, 0 or 1; a column each.

    train, held_out: .csv (also .csv.gz, .csv.zip) or .parquet files; without the second, the last tenth of the first's
    rows is held out. Only the named columns are kept in memory: 4 bytes a number, 8 a category.
    dense: made mean 0 and deviation 1 by the training rows; missing ones are the mean. categorical: numbered from 1 as
    the sorted training values are; 0 is what training has not seen, and what is missing.
    The metric: log loss in nats; the baseline: the training rows' rate of the target, by the columns `baseline`.
    """
    columns = [*dense, *categorical, target]
    if twice := [name for name in columns if columns.count(name) > 1]:
        raise ValueError(f"data: column {twice[0]!r} is named twice among dense, categorical and target; once will do")
    rows = _checked(Path(train), read_table(Path(train), columns), dense, target)
    if held_out is not None:
        held = _checked(Path(held_out), read_table(Path(held_out), columns), dense, target)
        for name in categorical:
            kinds = [str(part[name].dtype) for part in (rows, held)]
            if len({pandas.api.types.is_numeric_dtype(part[name]) for part in (rows, held)}) > 1:
                raise BadExampleError(f"{held_out}: column {name!r} is {kinds[1]}; in {train} it is {kinds[0]}")
    elif len(rows) < 10:
        raise ValueError(f"data.held_out: a tenth of the {len(rows)} rows of {train} is none; name a file of its own")
    else:
        first = len(rows) - len(rows) // 10
        rows, held = rows[:first], rows[first:]
    return rows_data(rows, held, dense, categorical, target, baseline)


def rows_data(
    train: pandas.DataFrame,
    held: pandas.DataFrame,
    dense: Sequence[str],
    categorical: Sequence[str],
    target: str,
    baseline: Sequence[str],
) -> Data:
    """The two parts of a table that is in memory, its columns as they must be; otherwise as `table`."""
    if unknown := sorted(set(baseline) - set(categorical)):
        raise ValueError(f"data.baseline has {unknown[0]!r}; its columns are some of data.categorical")
    coding = Coding.of(train, dense, categorical)
    here, there = (Rows(coding.dense(part), coding.categorical(part), part[target]) for part in (train, held))
    by = [list(categorical).index(name) for name in baseline]
    said = f"the rate by {' and '.join(baseline)}" if baseline else "the rate over all"
    return Data(here, there, Metric("log loss", "nat", "lower", log_loss, _rates_loss(here, there, by), said))


def read_table(path: Path, columns: Sequence[str]) -> pandas.DataFrame:
    """These columns of a file. Raises BadExampleError."""
    try:
        if path.suffix == ".parquet":
            return pandas.read_parquet(path, columns=list(columns))
        # Not in pieces (low_memory): each would have its own idea of a column's type, and 7 and "7" be two categories.
        return pandas.read_csv(path, usecols=lambda name: name in columns, low_memory=False)[list(columns)]
    except KeyError as error:
        raise BadExampleError(f"{path}: {error.args[0]}; the columns asked for are {', '.join(columns)}") from error
    except Exception as error:  # pandas, pyarrow and zipfile raise some twenty kinds for garbage.
        raise BadExampleError(f"{path}: {type(error).__name__}: {error}") from error


def log_loss(logits: Tensor, target: Tensor) -> Tensor:
    """[n] nats, of logits [n]."""
    return functional.binary_cross_entropy_with_logits(logits.float(), target, reduction="none")


@dataclass(frozen=True)
class Coding:
    """How values become numbers, learnt from training rows alone."""

    means: pandas.Series
    deviations: pandas.Series
    """1 where a column is constant."""
    values: dict[str, pandas.Index]
    """A column's categories, sorted; number 1 is the first."""

    @classmethod
    def of(cls, rows: pandas.DataFrame, dense: Sequence[str], categorical: Sequence[str]) -> Coding:
        numbers = rows[list(dense)].astype("float64")
        deviations = numbers.std(ddof=0)
        values = {name: pandas.Index(sorted(rows[name].dropna().unique())) for name in categorical}
        return cls(numbers.mean(), deviations.where(deviations > 0, 1.0), values)

    def dense(self, rows: pandas.DataFrame) -> NDArray[np.float32]:
        numbers = (rows[list(self.means.index)].astype("float64") - self.means) / self.deviations
        found: NDArray[np.float32] = numbers.fillna(0.0).to_numpy(np.float32, copy=True)
        return found

    def categorical(self, rows: pandas.DataFrame) -> NDArray[np.int64]:
        columns = [values.get_indexer(rows[name]) + 1 for name, values in self.values.items()]
        return np.stack(columns, axis=1).astype(np.int64) if columns else np.zeros((len(rows), 0), np.int64)


class Rows:
    """Rows in memory: dense [n, d] f32, categorical [n, t] int64, target [n] f32."""

    def __init__(self, dense: NDArray[np.float32], categorical: NDArray[np.int64], target: pandas.Series) -> None:
        self.dense, self.categorical = torch.from_numpy(dense), torch.from_numpy(categorical)
        self.target = torch.from_numpy(target.to_numpy(np.float32, copy=True))

    def __len__(self) -> int:
        return len(self.target)

    def batch(self, indices: Sequence[int], seeds: Sequence[int]) -> Batch:
        chosen = torch.tensor(list(indices))
        return Batch((self.dense[chosen], self.categorical[chosen]), self.target[chosen])


def _checked(path: Path, rows: pandas.DataFrame, dense: Sequence[str], target: str) -> pandas.DataFrame:
    if rows.empty:
        raise BadExampleError(f"{path}: no rows")
    for name in dense:
        if not pandas.api.types.is_numeric_dtype(rows[name]):
            raise BadExampleError(f"{path}: column {name!r} is {rows[name].dtype}; columns of data.dense are numbers")
        if (endless := np.isinf(rows[name].to_numpy(np.float64, na_value=np.nan))).any():
            raise BadExampleError(f"{path}: column {name!r}, row {int(endless.argmax())}: a number without end")
    if (wrong := ~rows[target].isin((0, 1)).to_numpy(bool)).any():
        row = int(wrong.argmax())
        raise BadExampleError(f"{path}: column {target!r}, row {row}: {rows[target].iloc[row]}; a target is 0 or 1")
    return rows


def _rates_loss(train: Rows, held: Rows, columns: Sequence[int]) -> float:
    """Log loss of the training part's rate where these columns are as they are; a cell counts as if it had one more
    row, of the rate over all."""
    overall = float(train.target.double().mean())
    both = torch.cat([train.categorical, held.categorical])
    cell = torch.zeros(len(both), dtype=torch.long)
    # Column by column: torch.unique(dim=0) of some hundred thousand rows takes seconds.
    for column in columns:
        values = both[:, column]
        cell = torch.unique(cell * (int(values.max()) + 1) + values, return_inverse=True)[1]
    here, there = cell[: len(train)], cell[len(train) :]
    cells = int(cell.max()) + 1
    count = torch.bincount(here, minlength=cells)
    happened = torch.bincount(here, weights=train.target.double(), minlength=cells)
    rate = ((happened + overall) / (count + 1))[there].clamp(1e-6, 1 - 1e-6)
    return float(functional.binary_cross_entropy(rate, held.target.double()))
