"""Rows that come after the training: their classes and columns are those of the model."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gtrain.data import module
from gtrain.data.module import GraphDataModule, training_of, without
from gtrain.data.sources.libsvm import LibsvmData
from gtrain.data.sources.parquet import ParquetData
from gtrain.data.sources.tables import TablesData
from gtrain.errors import DataError


def following(trained: GraphDataModule[Any], new: GraphDataModule[Any]) -> GraphDataModule[Any]:
    trained.prepare_data()
    new.follow(training_of(trained.open_store()))
    return new


def parquet(folder: Path, name: str, **columns: Any) -> ParquetData:
    pq.write_table(pa.table(columns), folder / name)
    features: dict[str, Any] = {"dense": ["price"], "ids": "words"}
    return ParquetData(path=str(folder / name), store=str(folder), split="random", **features)


ROWS = {"price": [1.0, 2.0, 3.0, 4.0], "words": [[0], [1, 7], [2], []], "label": ["spam", "ham", "ham", "spam"]}


def test_parquet_rows_without_labels(tmp_path: Path) -> None:
    trained = parquet(tmp_path, "train.parquet", **ROWS)
    new = following(trained, parquet(tmp_path, "new.parquet", price=[5.0], words=[[3]]))
    new.prepare_data()
    assert new.facts["num_features"] == trained.facts["num_features"] == 9
    assert new.facts["num_classes"] == 2 and new.facts["label_values"] == ["ham", "spam"]
    assert new.facts["split"] is None


def test_labels_of_new_parquet_rows_are_the_models(tmp_path: Path) -> None:
    trained = parquet(tmp_path, "train.parquet", **ROWS)
    some = {"price": [5.0, 6.0], "words": [[3], [4]]}
    new = following(trained, parquet(tmp_path, "new.parquet", **some, label=["spam", None]))
    assert new.read().y[0] == 1  # "spam" alone would be class 0
    new.prepare_data()
    assert new.facts["split"]["sizes"] == {"train": 0, "val": 0, "test": 1}
    other = following(trained, parquet(tmp_path, "other.parquet", **some, label=["spam", "eggs"]))
    with pytest.raises(DataError, match="the label 'eggs' is none of the 2 classes of the checkpoint: ham, spam"):
        other.read()
    wide = following(trained, parquet(tmp_path, "wide.parquet", price=[5.0], words=[[8]]))
    with pytest.raises(DataError, match="has the id 8 in row 0"):
        wide.read()


def test_libsvm_rows(tmp_path: Path) -> None:
    (tmp_path / "train").write_text("-1 0:1 9:1\n+1 3:2\n-1 4:1\n+1 0:1\n")
    (tmp_path / "new").write_text("+1 3:1\n0 5:1\n")
    settings: dict[str, Any] = {"store": str(tmp_path), "split": "random"}
    trained = LibsvmData(path=str(tmp_path / "train"), **settings)
    new = following(trained, LibsvmData(path=str(tmp_path / "new"), unlabelled=0, **settings))
    graph = new.read()
    assert graph.x.shape == (2, 10) and graph.x.to_dense()[0, 3] == 1  # ids count from 0, as in the training
    assert graph.y.tolist() == [1, -1]


def test_other_rows_of_equal_size_are_not_those_of_the_training(tmp_path: Path) -> None:
    """A copy has another time; an export of another day may have the name and the size of the first."""
    folders = {name: tmp_path / name for name in ("here", "copy", "other")}
    for name, folder in folders.items():
        folder.mkdir()
        first = 20 if name == "other" else 10
        (folder / "rows.csv").write_text("id,x,y\n" + "".join(f"{i},{first + i},{i % 2}\n" for i in range(8)))
        os.utime(folder / "rows.csv", ns=(1, 1 if name == "here" else 2))
    sources = {
        name: TablesData(nodes={"path": "rows.csv", "label": "y"}, root=str(folder), store=str(tmp_path / "stores"))
        for name, folder in folders.items()
    }
    sources["here"].prepare_data()
    training = training_of(sources["here"].open_store())
    for source in sources.values():
        source.follow(training)
    assert sources["here"].trained is None and sources["copy"].trained is None
    assert sources["other"].trained == training["facts"] and sources["other"].applied
    earlier = {name: value for name, value in training.items() if name != "checksums"}
    sources["other"].follow(earlier)
    assert sources["other"].trained is None, "a checkpoint without checksums"


def test_a_checkpoint_of_an_earlier_release_knows_its_tables(tmp_path: Path) -> None:
    """It did not record how the text of tables is read."""
    (tmp_path / "rows.csv").write_text("id;x;y\n" + "".join(f"{i};{10 + i};{i % 2}\n" for i in range(8)))
    table = {"path": "rows.csv", "label": "y", "separator": ";"}
    source = TablesData(nodes=table, root=str(tmp_path), store=str(tmp_path / "stores"))
    source.prepare_data()
    training = training_of(source.open_store())
    assert "reading" in json.dumps(training["graph"])
    source.follow({**training, "graph": without(training["graph"], "reading")})
    assert source.applied, "a checkpoint of this release"
    earlier = {name: value for name, value in training.items() if name != "checksums"}
    source.follow({**earlier, "graph": without(training["graph"], "reading")})
    assert source.trained is None and not source.applied


def test_a_checksum_of_a_large_file_is_of_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHECKED_BLOCK", 4)
    monkeypatch.setattr(module, "CHECKED_WHOLE", 12)
    content, path = b"0123456789abcdefghijklmnop", tmp_path / "file"
    read = b"".join(content[first : first + 4] for first in (0, 11, 22))
    for written, expected in ((content, read), (content[:11], content[:11]), (b"", b"")):
        path.write_bytes(written)
        assert module.checksum(path) == hashlib.sha256(expected).hexdigest()[:16]
