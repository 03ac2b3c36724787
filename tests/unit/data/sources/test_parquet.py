"""gtrain.data.sources.parquet: rows from Parquet files, and the hash of categories."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from gtrain.data.ingest import columns
from gtrain.data.readers import parquet as parquet_files
from gtrain.data.readers.parquet import _fnv1a, hash_strings
from gtrain.data.sources.parquet import ParquetData
from gtrain.errors import ConfigError, DataError

COLUMNS: dict[str, Any] = {
    "label": [0, 1, 1, 0],
    "price": [0.5, 0.0, -2.0, 1.0],
    "count": [1, 2, 3, 0],
    "ids": [[3, 0], [], [2, 2], [1]],
    "weights": [[0.5, 1.0], [], [1.0, 2.0], [4.0]],
    "city": ["Rome", "Oslo", "Rome", ""],
    "shop": [17, -4, 17, 9],
}


def write(path: Path, **changes: Any) -> str:
    pq.write_table(pa.table({name: value for name, value in {**COLUMNS, **changes}.items() if value is not None}), path)
    return str(path)


def plain_hash(salt: str, text: str) -> int:
    """The hash as its definition reads, a byte at a time."""
    value = 0xCBF29CE484222325
    for byte in salt.encode() + b"\0" + text.encode():
        value = ((value ^ byte) * 0x100000001B3) % 2**64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) % 2**64
    return value ^ (value >> 31)


def test_the_hash() -> None:
    strings = ["", "a", "b", "Rome", "é" * 40, "x" * 300, "a"]
    assert hash_strings(pa.array(strings), "city").tolist() == [plain_hash("city", text) for text in strings]
    assert hash_strings(pa.array(strings).slice(2, 3), "").tolist() == [plain_hash("", text) for text in strings[2:5]]
    assert plain_hash("city", "Rome") == 10079420496274692442  # stores of other releases must mean the same
    assert _fnv1a(b"a") == 0xAF63DC4C8601EC8C  # a test vector of its authors
    spread = np.bincount((hash_strings(pa.array([str(i) for i in range(64000)]), "n") % np.uint64(64)).astype(int))
    assert spread.min() > 800 and spread.max() < 1200


def test_columns_of_x(tmp_path: Path) -> None:
    module = ParquetData(
        path=write(tmp_path / "a.parquet"),
        dense=["price", "count"],
        ids="ids",
        values="weights",
        num_features=5,
        categorical=["city", "shop"],
        buckets=7,
    )
    data = module.read()
    wanted = np.zeros((4, 2 + 5 + 14))
    wanted[:, 0], wanted[:, 1] = COLUMNS["price"], COLUMNS["count"]
    for row in range(4):
        for column, value in zip(COLUMNS["ids"][row], COLUMNS["weights"][row], strict=True):
            wanted[row, 2 + column] += value
        wanted[row, 7 + plain_hash("city", COLUMNS["city"][row]) % 7] = 1
        wanted[row, 14 + plain_hash("shop", str(COLUMNS["shop"][row])) % 7] = 1
    assert data.x.layout == torch.sparse_csr and data.x.to_dense().tolist() == wanted.tolist()
    assert data.x.values().numel() == np.count_nonzero(wanted)
    assert data.y.tolist() == [0, 1, 1, 0] and data.edge_index.shape == (2, 0)


def test_files_and_masks(tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    write(tmp_path / "train" / "1.parquet")
    write(tmp_path / "train" / "2.parquet", count=[5, 6, 7, 8])
    write(tmp_path / "test.parquet", count=[9, 9, 9, 9])
    module = ParquetData(
        path="train", test_path="test.parquet", root=str(tmp_path), dense=["count"], val_fraction=0.25, seed=1
    )
    data = module.read()
    assert data.x.to_dense().flatten().tolist() == [1, 2, 3, 0, 5, 6, 7, 8, 9, 9, 9, 9]
    assert [int(data[f"{split}_mask"].sum()) for split in ("train", "val", "test")] == [6, 2, 4]
    assert data.test_mask.nonzero().flatten().tolist() == [8, 9, 10, 11]
    assert "train_mask" not in ParquetData(path="train", root=str(tmp_path), dense=["count"], split="random").read()


@pytest.mark.parametrize(
    ("label", "options", "y", "values"),
    [
        (["b", "a", "a", "c"], {}, [1, 0, 0, 2], ["a", "b", "c"]),
        ([True, False, True, True], {}, [1, 0, 1, 1], [0, 1]),
        ([-1.0, 1.0, 1.0, -1.0], {}, [0, 1, 1, 0], [-1, 1]),
        ([3, 0, 1, 1], {"num_classes": 4}, [3, 0, 1, 1], None),
        ([5, None, -1, 7], {"unlabelled": -1}, [0, -1, -1, 1], [5, 7]),
        ([1, 0, 2, 1], {"unlabelled": 0}, [0, -1, 1, 0], [1, 2]),
    ],
)
def test_labels(label: list[Any], options: dict[str, Any], y: list[int], values: Any, tmp_path: Path) -> None:
    module = ParquetData(path=write(tmp_path / "a", label=label), dense=["count"], **options)
    assert (module.read().y.tolist(), module.extra_facts()["label_values"]) == (y, values)


def test_rows_without_label_are_in_no_split(tmp_path: Path) -> None:
    """Also where the label that means none is what a class is numbered: 0 is none here, and 1 becomes class 0."""
    file = write(tmp_path / "a", label=[1, 0, 2, 1])
    options: dict[str, Any] = {"unlabelled": 0, "val_fraction": 0.0, "num_parts": 1, "store": str(tmp_path)}
    module = ParquetData(path=file, dense=["count"], **options)
    module.prepare_data()
    assert module.facts["num_classes"] == 2
    assert module.open_store().node("train_mask", 0).sum() == 3


def test_what_is_missing_counts_as_zero(tmp_path: Path) -> None:
    changes = {"price": [None, 1.0, float("nan"), 2.0], "city": ["a", None, "a", "a"], "ids": [[1], None, [0], []]}
    options: dict[str, Any] = {"dense": ["price"], "ids": "ids", "categorical": ["city"], "buckets": 1}
    x = ParquetData(path=write(tmp_path / "a", **changes), nulls="zero", **options).read().x
    assert x.to_dense().tolist() == [[0, 0, 1, 1], [1, 0, 0, 0], [0, 1, 0, 1], [2, 0, 0, 1]]


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        (
            {"count": None},
            {"dense": ["count"]},
            r"has no column 'count'; it has label, price, ids, weights, city, shop",
        ),
        ({"label": None}, {"dense": ["count"]}, r"has no column 'label'; it has price"),
        (
            {"price": [1, None, 2, None]},
            {"dense": ["price"]},
            r"'price' has no value .*row 1, and in 2 of the first 4 rows",
        ),
        (
            {"price": [1, float("nan"), 2, 3]},
            {"dense": ["price"]},
            r"'price' has no value .*row 1, and in 1 of the first 4",
        ),
        ({"price": [1, 2, float("inf"), 3]}, {"dense": ["price"]}, r"'price' has inf in row 2"),
        ({"price": [1, 2, 1e39, 3]}, {"dense": ["price"]}, r"'price' has 1e\+39 in row 2"),
        ({}, {"dense": ["city"]}, r"'city' holds string, and numbers were expected"),
        ({}, {"ids": "count"}, r"'count' holds int64, and lists were expected"),
        ({}, {"ids": "weights"}, r"'weights' holds .*, and lists of whole numbers were expected"),
        ({"ids": [[1], [2, -3], [], []]}, {"ids": "ids"}, r"'ids' has the negative id -3 in row 1"),
        (
            {"ids": pa.array([[1], [2**63 + 5], [], []], pa.list_(pa.uint64()))},
            {"ids": "ids"},
            r"'ids' has the id 9223372036854775813 in row 1",
        ),
        ({"ids": [[1], None, [], []]}, {"ids": "ids"}, r"'ids' has no value .* in row 1"),
        (
            {"weights": [[1, 1], [], [1], [1]]},
            {"ids": "ids", "values": "weights"},
            r"row 2 has 2 'ids' and 1 'weights'",
        ),
        (
            {"weights": [[1, 1], [], [1, float("nan")], [1]]},
            {"ids": "ids", "values": "weights"},
            r"'weights' has no value .* in row 2",
        ),
        ({}, {"ids": "ids", "num_features": 3}, r"'ids' has the id 3 in row 0 .*data\.num_features=3"),
        ({"city": ["a", None, "b", "c"]}, {"categorical": ["city"]}, r"'city' has no value .* in row 1"),
        ({}, {"categorical": ["price"]}, r"'price' holds double, and strings or whole numbers"),
        ({"label": [0, 1, None, 1]}, {"dense": ["count"]}, r"'label' has no label .* in row 2(.|\n)*unlabelled=-1"),
        ({"label": [0, 1, 0, float("nan")]}, {"dense": ["count"]}, r"'label' has no label .* in row 3"),
        ({"ids": [[2**62], [1], [], []]}, {"ids": "ids"}, r"columns of features exceed 64 bits"),
        ({"label": [0, 1, 0.5, 1]}, {"dense": ["count"]}, r"'label' holds double, and whole numbers or strings"),
        ({"label": [[0], [1], [1], [1]]}, {"dense": ["count"]}, r"'label' holds list"),
    ],
)
def test_what_is_wrong_is_named(changes: dict[str, Any], options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=message):
        ParquetData(path=write(tmp_path / "a", **changes), **options).read()


def test_categories_of_pandas_and_lists_of_one_size(tmp_path: Path) -> None:
    table = pa.table(
        {
            "label": pa.array(["b", "a", "b"]).dictionary_encode(),
            "ids": pa.array([[0, 2], [1, 2], [0, 1]], pa.list_(pa.int64(), 2)),
        }
    )
    pq.write_table(table, tmp_path / "a.parquet")
    data = ParquetData(path=str(tmp_path / "a.parquet"), ids="ids").read()
    assert data.y.tolist() == [1, 0, 1] and data.x.to_dense().tolist() == [[1, 0, 1], [0, 1, 1], [1, 1, 0]]


def test_rows_that_come_in_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files with row groups, another order of columns and other types of numbers are one table."""
    (tmp_path / "rows").mkdir()
    table = pa.table({**COLUMNS, "label": ["b", "a", "c", "b"]})
    pq.write_table(table, tmp_path / "rows" / "1.parquet", row_group_size=3)
    later = table.select(list(reversed(table.column_names))).set_column(0, "shop", pa.array([1, 2, 17, 4], pa.int8()))
    pq.write_table(later, tmp_path / "rows" / "2.parquet")
    options: dict[str, Any] = {"dense": ["price"], "ids": "ids", "values": "weights", "categorical": ["shop"]}
    options |= {"path": str(tmp_path / "rows"), "buckets": 5, "num_classes": 3}
    wanted = ParquetData(**options).read()
    monkeypatch.setattr(parquet_files, "BATCH_VALUES", 13)
    module = ParquetData(**options)
    found = module.read()
    assert found.y.tolist() == wanted.y.tolist() == [1, 0, 2, 1] * 2
    assert module.extra_facts()["label_values"] == ["a", "b", "c"]
    assert torch.equal(found.x.to_dense(), wanted.x.to_dense())
    shops = [17, -4, 17, 9, 1, 2, 17, 4]
    assert [row.nonzero().max() - 5 for row in found.x.to_dense()] == [plain_hash("shop", str(n)) % 5 for n in shops]
    with pytest.raises(DataError, match=r"'ids' has the id 3 in row 4 .*data\.num_features=3"):
        write(tmp_path / "rows" / "1.parquet", ids=[[], [1], [2], []], label=["b", "a", "c", "b"])
        ParquetData(**{**options, "values": None, "num_features": 3}).read()


def test_entries_are_kept_in_files_and_not_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of a file that is one row group."""
    rng = np.random.default_rng(0)
    ids = np.sort(rng.integers(0, 10**6, (4000, 60)), axis=1) + np.arange(60)
    weights = rng.random(ids.shape, np.float32)
    table = pa.table({"label": np.arange(4000) % 2, "ids": list(ids), "weights": list(weights)})
    pq.write_table(table, tmp_path / "a", use_dictionary=False, data_page_size=1 << 14)
    options: dict[str, Any] = {"path": str(tmp_path / "a"), "ids": "ids", "values": "weights"}
    options |= {"store": str(tmp_path / "stores"), "val_fraction": 0.0}
    ParquetData(**options).read()  # what is imported is none of the data
    for module, name in ((parquet_files, "_READ_BYTES"), (columns, "IN_MEMORY"), (columns, "CHUNK")):
        monkeypatch.setattr(module, name, 1 << 14)
    monkeypatch.setattr(parquet_files, "BATCH_VALUES", 1 << 13)
    arrow, before = pa.proxy_memory_pool(pa.system_memory_pool()), pa.default_memory_pool()
    pa.set_memory_pool(arrow)
    tracemalloc.start()
    try:
        data = ParquetData(**options).read()
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        pa.set_memory_pool(before)
    assert peak + (arrow.max_memory() or 0) < 12 * ids.size / 2  # bytes of the entries alone
    assert np.array_equal(data.x.col_indices().numpy(), ids.ravel())
    assert np.array_equal(data.x.values().numpy(), weights.ravel())
    assert not list((tmp_path / "stores").iterdir())


def test_files_that_do_not_fit_each_other(tmp_path: Path) -> None:
    path, test = write(tmp_path / "a"), write(tmp_path / "b", label=["x"] * 4)
    with pytest.raises(DataError, match=r"data\.path and data\.test_path have columns of different types: .*label"):
        ParquetData(path=path, test_path=test, dense=["count"]).read()
    with pytest.raises(ConfigError, match=r"data\.label=count is a feature too"):
        ParquetData(path=path, label="count", dense=["count"])


def test_wrong_files_and_options(tmp_path: Path) -> None:
    (tmp_path / "text.parquet").write_text("a,b\n1,2\n")
    (tmp_path / "empty").mkdir()
    path = write(tmp_path / "a")
    pq.write_table(pa.table({"label": pa.array([], pa.int64()), "count": pa.array([], pa.int64())}), tmp_path / "none")
    for options, kind, message in (
        ({"path": "gone.parquet"}, DataError, r"data\.path=gone\.parquet: no such file"),
        ({"path": "text.parquet"}, DataError, r"text\.parquet is not a Parquet file"),
        ({"path": "empty"}, DataError, r"data\.path=empty: the folder has no \*\.parquet"),
        ({"path": "none"}, DataError, r"data\.path=none has no rows"),
        ({"path": path, "dense": None}, ConfigError, r"no column of features is named; .* has label, price"),
        ({"path": path, "nulls": "drop"}, ConfigError, r"data\.nulls=drop(.|\n)*error(.|\n)*zero"),
        ({"path": path, "buckets": 0}, ConfigError, r"data\.buckets=0"),
        ({"path": path, "values": "weights"}, ConfigError, r"data\.values=weights, and data\.ids is not set"),
    ):
        with pytest.raises(kind, match=message):
            ParquetData(**{"root": str(tmp_path), "dense": ["count"], **options}).read()
