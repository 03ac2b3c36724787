"""Small relational databases in RelBench's form, whose labels and answers are decided by the past or by the future."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

DAY = 86400
DAYS = {"train": 3, "val": 6, "test": 8}
"""The days after which each split asks."""


def write(file: Path, columns: dict[str, Any], key: str | None, time: str | None, foreign: dict[str, str]) -> None:
    metadata = {"pkey_col": key, "time_col": time, "fkey_col_to_pkey_table": foreign}
    table = pa.table(columns).replace_schema_metadata({name: json.dumps(value) for name, value in metadata.items()})
    file.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, file)


def purchases(folder: Path, decided_by: str, users: int = 300, seed: int = 0) -> Path:
    """Write users with a purchase on each of ten days, and ask on three days whether one of them is large.

    The label is whether the amount of the purchase on the day before (``past``) or after (``future``) is above its
    median; amounts are independent.
    """
    amounts = _database(folder, users, seed)
    for split, day in DAYS.items():
        found = amounts[:, day if decided_by == "past" else day + 1]
        _ask(folder / f"tasks/large/{split}.parquet", day, "large", (found > 0).astype(np.int64))
    return folder


def amounts(folder: Path, users: int = 300, seed: int = 0) -> Path:
    """Write the same, and ask for three times the amount of the purchase on the day before, plus 100."""
    found = _database(folder, users, seed)
    for split, day in DAYS.items():
        _ask(folder / f"tasks/amount/{split}.parquet", day, "amount", 100 + 3 * found[:, day])
    return folder


def _database(folder: Path, users: int, seed: int) -> Any:
    """Write users and purchases; return the amounts, float64 ``[users, 10]``."""
    rng = np.random.default_rng(seed)
    days = np.arange(10)
    amounts = rng.normal(size=(users, len(days)))
    write(
        folder / "db/users.parquet",
        {"user": np.arange(users), "city": ["Rome", "Oslo"] * (users // 2)},
        "user",
        None,
        {},
    )
    columns = {
        "user": pa.array(np.repeat(np.arange(users), len(days))),
        "amount": amounts.reshape(-1),
        "at": pa.array(np.tile(days * 2 * DAY, users), pa.timestamp("s")),
    }
    write(folder / "db/purchases.parquet", columns, None, "at", {"user": "users"})
    return amounts


def _ask(file: Path, day: int, label: str, values: Any) -> None:
    """Write a task's rows, one for each user: the time after the purchase of the day, and the label."""
    rows = {
        "asked": pa.array(np.full(len(values), (day * 2 + 1) * DAY), pa.timestamp("s")),
        "user": np.arange(len(values)),
        label: values,
    }
    write(file, rows, None, "asked", {"user": "users"})


def recommendations(folder: Path, decided_by: str, users: int = 200, items: int = 48, seed: int = 0) -> Path:
    """Write reviews of items, and ask on three days which items each user buys: two of the four that are reviewed best.

    These are the best of the day before the question (``past``), other ones for each question, or those of reviews that
    are written after all questions (``future``), the same for all. Every tenth user buys nothing: an empty list.
    """
    rng = np.random.default_rng(seed)
    write(
        folder / "db/users.parquet",
        {"user": np.arange(users), "city": ["Rome", "Oslo"] * (users // 2)},
        "user",
        None,
        {},
    )
    write(folder / "db/items.parquet", {"item": np.arange(items)}, "item", None, {})
    days = np.array([1, 4, 7] if decided_by == "past" else [20])
    stars = rng.normal(size=(len(days), items))
    reviews = {
        "user": rng.integers(users, size=stars.size),
        "item": np.tile(np.arange(items), len(days)),
        "stars": stars.reshape(-1),
        "at": pa.array(np.repeat(days * DAY, items), pa.timestamp("s")),
    }
    write(folder / "db/reviews.parquet", reviews, None, "at", {"user": "users", "item": "items"})
    for number, split in enumerate(("train", "val", "test")):
        best = np.argsort(stars[number % len(days)])[-4:]
        answers = [rng.choice(best, 2, replace=False).tolist() if user % 10 else [] for user in range(users)]
        day = pa.array(np.full(users, (2 + 3 * number) * DAY), pa.timestamp("s"))
        rows = {"asked": day, "user": np.arange(users), "item": answers}
        write(folder / f"tasks/next/{split}.parquet", rows, None, "asked", {"user": "users", "item": "items"})
    return folder
