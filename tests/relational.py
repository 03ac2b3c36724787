"""A small relational database in RelBench's form, whose labels are decided by the past or by the future."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

DAY = 86400


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
    for split, day in (("train", 3), ("val", 6), ("test", 8)):
        found = amounts[:, day if decided_by == "past" else day + 1]
        rows = {
            "asked": pa.array(np.full(users, (day * 2 + 1) * DAY), pa.timestamp("s")),
            "user": np.arange(users),
            "large": (found > 0).astype(np.int64),
        }
        write(folder / f"tasks/large/{split}.parquet", rows, None, "asked", {"user": "users"})
    return folder
