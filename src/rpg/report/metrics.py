"""The rows of metrics.jsonl as columns: 8 bytes a number, so that a run of a million steps fits."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

Row = dict[str, Any]
Column = NDArray[np.float64]
NAMES = 500  # columns at most: a run of ours has about 50


def finite(value: Any) -> float | None:
    """A number, or None for anything else: text, NaN, infinity."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


class Metrics(Sequence[Row]):
    """One row a step, in order; a step that was written twice has its later values. ``left_out``: rows without a step.

    In ``columns`` NaN is a name that the row does not have, and infinity one whose value is not a finite number.
    """

    def __init__(self, rows: Iterable[Row] = ()) -> None:
        places: dict[int, int] = {}
        columns: dict[str, array[float]] = {}
        self.left_out = 0
        for row in rows:
            step = finite(row.get("step"))
            if step is None:
                self.left_out += 1
                continue
            place = places.setdefault(int(step), len(places))
            for name, value in row.items():
                column = columns.get(name)
                if column is None:
                    if len(columns) == NAMES or name == "step":
                        continue
                    column = columns[name] = array("d")
                number = finite(value)
                number = math.inf if number is None else number
                if place == len(column):  # as of nearly all
                    column.append(number)
                else:
                    if place > len(column):
                        column.extend([math.nan] * (place + 1 - len(column)))
                    column[place] = number
        order = np.argsort(np.fromiter(places, np.int64, len(places)), kind="stable")
        self.steps: NDArray[np.int64] = np.fromiter(places, np.int64, len(places))[order]
        self.columns: dict[str, Column] = {}
        for name in list(columns):
            column = columns.pop(name)
            column.extend([math.nan] * (len(places) - len(column)))
            self.columns[name] = np.frombuffer(column, np.float64)[order]

    def column(self, name: str) -> Column:
        """Finite numbers, and NaN where there is none."""
        found = self.columns.get(name)
        return np.full(len(self), math.nan) if found is None else np.where(np.isfinite(found), found, math.nan)

    def total(self, name: str) -> float:
        return float(np.nansum(self.column(name)))

    @cached_property
    def seconds(self) -> Column:
        """That each step took: the sum of its parts where the whole was not written."""
        parts = [np.nan_to_num(self.column(name)) for name in self.columns if name.startswith("time/")]
        whole = self.column("time/step")
        return np.where(np.isnan(whole), np.sum(parts, axis=0) if parts else 0.0, whole)

    @cached_property
    def axes(self) -> dict[str, Column]:
        """Steps, and what was sampled and spent until each: tokens add up where no total was written."""
        totals, each = self.column("tokens_total"), np.nan_to_num(self.column("tokens"))
        tokens, before = np.empty(len(self)), 0.0
        for i, (total, sampled) in enumerate(zip(totals.tolist(), each.tolist(), strict=True)):
            before = before + sampled if math.isnan(total) else total
            tokens[i] = before
        return {"step": self.steps.astype(np.float64), "tokens": tokens, "time": np.cumsum(self.seconds)}

    def __len__(self) -> int:
        return len(self.steps)

    @overload
    def __getitem__(self, place: int) -> Row: ...

    @overload
    def __getitem__(self, place: slice) -> list[Row]: ...

    def __getitem__(self, place: int | slice) -> Row | list[Row]:
        if isinstance(place, slice):
            return [self[i] for i in range(*place.indices(len(self)))]
        row: Row = {"step": int(self.steps[place])}
        for name, column in self.columns.items():
            if not math.isnan(value := float(column[place])):
                row[name] = value if math.isfinite(value) else math.nan
        return row

    def __iter__(self) -> Iterator[Row]:
        return (self[i] for i in range(len(self)))
