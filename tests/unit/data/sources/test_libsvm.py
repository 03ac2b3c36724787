"""gtrain.data.sources.libsvm: sparse rows with labels, and the line that is wrong."""

from __future__ import annotations

import gzip
import random
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.datasets import load_svmlight_file

from gtrain.data.ingest import columns
from gtrain.data.sources import libsvm as libsvm_file
from gtrain.data.sources.libsvm import LibsvmData
from gtrain.errors import ConfigError, DataError

Real = Callable[[str], Path]


def read(folder: Path, text: str, test: str | None = None, **options: Any) -> Any:
    (folder / "train").write_bytes(text.encode())
    if test is not None:
        (folder / "test").write_bytes(test.encode())
    options = {"path": str(folder / "train"), "val_fraction": 0.0, **options}
    return LibsvmData(test_path=str(folder / "test") if test else None, **options).read()


def test_a9a_as_scikit_learn_reads_it(real_data: Real, tmp_path: Path) -> None:
    (tmp_path / "a9a.t.gz").write_bytes(gzip.compress(real_data("sparse/a9a.t").read_bytes()))
    module = LibsvmData(path=str(real_data("sparse/a9a")), test_path="a9a.t.gz", root=str(tmp_path))
    data = module.read()
    assert data.x.layout == torch.sparse_csr and data.x.shape == (48842, 123) and data.edge_index.shape == (2, 0)
    crow, columns, values = data.x.crow_indices(), data.x.col_indices(), data.x.values()
    start = 0
    for name, mask in (("a9a", ~data.test_mask), ("a9a.t", data.test_mask)):
        wanted, labels = load_svmlight_file(str(real_data(f"sparse/{name}")), n_features=123)
        rows = len(labels)
        assert int(mask.sum()) == rows and np.array_equal(data.y[mask].numpy(), labels > 0)
        ptr = crow[start : start + rows + 1]
        assert np.array_equal((ptr - ptr[0]).numpy(), wanted.indptr)
        assert np.array_equal(columns[ptr[0] : ptr[-1]].numpy(), wanted.indices)
        assert np.array_equal(values[ptr[0] : ptr[-1]].numpy(), wanted.data.astype(np.float32))
        start += rows
    assert [int(data[f"{split}_mask"].sum()) for split in ("train", "val")] == [32561 - 3256, 3256]
    assert not (data.train_mask & data.val_mask).any()


def test_numbers_are_read_exactly(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    numbers = np.concatenate([rng.normal(size=500), 10 ** rng.uniform(-40, 38, 500), [0, -0.0, 1e-60, 123456789012]])
    forms = [repr(float(number)) for number in numbers] + ["1e3", "+2", "-.5", "7.", "1E-2", "0.1234567890123456789012"]
    x = read(tmp_path, "1 " + " ".join(f"{i}:{form}" for i, form in enumerate(forms))).x
    assert x.values().tolist() == np.array([float(form) for form in forms], dtype=np.float32).tolist()


def test_arrow_parses_what_python_parses_line_by_line() -> None:
    draw = random.Random(4)
    lines = []
    for _ in range(400):
        labels = draw.choice(["", "1", "+1", "-1", "0,3", "2,0,7", "0.5"])
        features = [f"{n}:{draw.choice(['1', '-0.25', '1e-3', '7.', '.5'])}" for n in range(draw.randint(0, 4))]
        tokens = [labels, *features] if labels else features
        comment = draw.choice(["", "", " # 3:1"])
        lines.append(draw.choice(["", " "]) + draw.choice([" ", "  ", "\t"]).join(tokens) + comment)
    text = "\n".join(lines).encode()
    plain = libsvm_file._parse_lines(Path("e"), text, 0)
    for one, other in zip(libsvm_file._parse_block(text), plain, strict=True):
        assert np.array_equal(one, other) and one.dtype == other.dtype


@pytest.mark.parametrize("block", [7, 64, 1 << 20])
def test_blocks_comments_and_line_ends(block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libsvm_file, "BLOCK_BYTES", block)
    data = read(tmp_path, "# made by hand\n-1 3:1 1:.5 # c\n\n+1\t2:-1.5e-3 \r\n-1\n+1 4:1", "1 1:7\n")
    assert data.x.to_dense().tolist() == pytest.approx(
        np.array([[0.5, 0, 1, 0], [0, -0.0015, 0, 0], [0, 0, 0, 0], [0, 0, 0, 1], [7, 0, 0, 0]])
    )
    assert (data.y.tolist(), data.train_mask.tolist()) == ([0, 1, 0, 1, 1], [True] * 4 + [False])


@pytest.mark.parametrize(
    ("text", "options", "shape", "first"),
    [
        ("0 1:1\n1 4:1\n", {}, (2, 4), 0),
        ("0 0:1\n1 4:1\n", {}, (2, 5), 0),
        ("0 1:1\n1 4:1\n", {"index_base": "0"}, (2, 5), 1),
        ("0 1:1\n1 4:1\n", {"num_features": 9}, (2, 9), 0),
        ("0 1:1\n1 4:1\n", {"index_base": "1"}, (2, 4), 0),
    ],
)
def test_feature_ids(text: str, options: dict[str, Any], shape: tuple[int, int], first: int, tmp_path: Path) -> None:
    x = read(tmp_path, text, **options).x
    assert (tuple(x.shape), int(x.col_indices()[0])) == (shape, first)


@pytest.mark.parametrize(
    ("labels", "options", "y"),
    [
        (["-1", "+1"], {}, [0, 1]),
        (["0", "1", "2"], {}, [0, 1, 2]),
        (["2", "0", "3"], {}, [1, 0, 2]),
        (["3", "1", "2"], {}, [2, 0, 1]),
        (["0", "9"], {}, [0, 1]),
        (["0", "9"], {"num_classes": 10}, [0, 9]),
        (["-1", "3", "0", "3"], {"unlabelled": -1}, [-1, 1, 0, 1]),
        (["0", "2", "1"], {"unlabelled": 0}, [-1, 1, 0]),
        (["1,3", "0", ""], {}, [[0, 1, 0, 1], [1, 0, 0, 0], [0, 0, 0, 0]]),
        (["1", "0"], {"labels": "multi", "num_classes": 3}, [[0, 1, 0], [1, 0, 0]]),
    ],
)
def test_labels(labels: list[str], options: dict[str, Any], y: list[Any], tmp_path: Path) -> None:
    assert read(tmp_path, "".join(f"{label} 1:1\n" for label in labels), **options).y.tolist() == y


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("1 1:2\n\nx 1:2\n", {}, r"train, line 3: 'x' has no number"),
        ("1 1:2\n1 1:2 a:2\n", {}, r"line 2: 'a:2' has no feature id: '1 1:2 a:2'"),
        ("1 1:2 5\n", {}, r"line 1: '5' has no colon"),
        ("# c\n1 1:2 -3:2\n", {}, r"line 2: '-3:2' has a negative feature id"),
        ("1,2 1:1\n1,,3 1:0.5\n", {}, r"line 2: '1,,3' has no number"),
        (",3 1:0.5\n", {}, r"line 1: ',3' has no number"),
        ("1 1:1\n1, 2:3\n", {}, r"line 2: '1,' has no number"),
        ("1 1:2x\n", {}, r"line 1: '1:2x' has no number"),
        ("1 1:\n", {}, r"line 1: '1:' has no number"),
        ("1 1:nan\n", {}, r"line 1: '1:nan' is not finite"),
        ("1 1:-inf\n", {}, r"line 1: '1:-inf' is not finite"),
        ("1 1:1e39\n", {}, r"line 1: '1:1e39' is not finite as a 32-bit number"),
        ("nan 1:1\n", {}, r"line 1: 'nan' is not finite"),
        ("1 qid:3 1:1\n", {}, r"line 1: 'qid:3' groups rows for ranking"),
        ("1 2:1 2:2\n", {}, r"line 1: the feature 2 occurs twice"),
        ("1 2:1\n0.5 2:2\n", {}, r"line 2: the label 0.5 is not a whole number"),
        ("1 2:1\n0 0:2\n", {"index_base": "1"}, r"line 2: the feature id 0, and data\.index_base=1"),
        ("1 2:1\n0 5:2\n", {"num_features": 4}, r"line 2: the feature id 5, and data\.num_features=4 allows 1\.\.4"),
        ("1 2:1\n0,1 5:2\n", {"labels": "single"}, r"line 2: the row has 2 labels"),
        ("1 2:1\n0,4 5:2\n", {"num_classes": 4}, r"line 2: the label 4; .* 0\.\.3"),
        ("# only this\n", {}, r"train is empty"),
        ("1 1:1\n-1 1:1\n\n2:1\n", {}, r"line 4: the row has 0 labels, and others one"),
        ("1\n0\n", {}, r"no row has a feature"),
        ("1,2,3\n4,5,6\n", {}, r"no row has a feature"),
        ("0 1:1\n1:2\n", {"labels": "multi"}, r"no label is above 0"),
        ("1 1:1\n99999999999999999999 1:1\n", {}, r"line 2: the label 1e\+20 is too large"),
        ("0 1:1\n1 2147483648:1\n", {}, r"line 2: '2147483648:1' has a feature id above 2147483647"),
        ("1 1000000000000000000:1\n", {}, r"line 1: '1000000000000000000:1' has a feature id above 2147483647"),
        ("1 99999999999999999999999999:1\n", {}, r"line 1: '9+:1' has a feature id above 2147483647"),
        ("\ufeff# c\n\n1 1:1\n0,1 1:2\n", {"labels": "single"}, r"train, line 4: the row has 2 labels"),
        ("\ufeff\n# c\n1 1:1\n0.5 1:2\n", {}, r"train, line 4: the label 0\.5 is not a whole number"),
        ("\ufeff# c\n1 2:1\n0 5:2\n", {"num_features": 4}, r"train, line 3: the feature id 5"),
        ("\ufeff# c\n1 2:1 2:2\n", {}, r"train, line 2: the feature 2 occurs twice"),
        ("0,1 1:1\n7,9999999999 1:1\n", {}, r"line 2: the label 9999999999 makes a matrix of 2 rows"),
    ],
)
def test_the_malformed_line_is_named(text: str, options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=message):
        read(tmp_path, text, **options)


def test_the_training_labels_of_two_classes_are_counted(tmp_path: Path) -> None:
    (tmp_path / "train").write_text("-1 1:1\n" * 7 + "+1 2:1\n" * 3)
    (tmp_path / "test").write_text("+1 1:1\n" * 5)
    where = {"path": "train", "test_path": "test", "root": str(tmp_path), "store": str(tmp_path), "val_fraction": 0.0}
    module = LibsvmData(**where, num_parts=2)  # type: ignore[arg-type]
    module.prepare_data()
    assert module.facts["train_classes"] == [7, 3]


def test_more_features_than_a_table_has_rows() -> None:
    with pytest.raises(ConfigError, match=r"num_features=2147483648 was set; it must be .* at most 2147483647"):
        LibsvmData(path="train", num_features=1 << 31)


def test_a_byte_order_mark_is_left_out(tmp_path: Path) -> None:
    data = read(tmp_path, "\ufeff-1 1:2\r\n1 2:3\r\n")
    assert (data.y.tolist(), data.x.to_dense().tolist()) == ([0, 1], [[2, 0], [0, 3]])


def test_a_line_is_named_in_a_later_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libsvm_file, "BLOCK_BYTES", 16)
    with pytest.raises(DataError, match=r"line 9: '2:x' has no number where there should be one: '1 1:1 2:x 3:1'"):
        read(tmp_path, "1 1:1 2:1 3:1\n" * 8 + "1 1:1 2:x 3:1\n" * 2)


def test_entries_are_kept_in_files_and_not_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    ids = np.sort(rng.integers(1, 10**6, (2000, 60)), axis=1) + np.arange(60)
    text = "".join(f"{n % 2} " + " ".join(f"{i}:{i % 7}" for i in row) + "\n" for n, row in enumerate(ids))
    options: dict[str, Any] = {"path": str(tmp_path / "train"), "store": str(tmp_path / "stores"), "val_fraction": 0.0}
    read(tmp_path, text, **options)  # what is imported is none of the data
    for module, name in ((libsvm_file, "BLOCK_BYTES"), (columns, "IN_MEMORY"), (columns, "CHUNK")):
        monkeypatch.setattr(module, name, 1 << 14)
    tracemalloc.start()
    data = LibsvmData(**options).read()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 12 * ids.size / 3  # bytes of the entries alone
    assert np.array_equal(data.x.col_indices().numpy(), ids.ravel() - 1)
    assert np.array_equal(data.x.values().numpy(), ids.ravel() % 7)
    assert not list((tmp_path / "stores").iterdir())


def test_wrong_files_and_options(tmp_path: Path) -> None:
    (tmp_path / "a.gz").write_text("1 1:1\n")
    with pytest.raises(DataError, match=r"a\.gz cannot be read: Not a gzipped file"):
        LibsvmData(path="a.gz", root=str(tmp_path)).read()
    with pytest.raises(DataError, match=r"data\.test_path=b\.gz: no such file(.|\n)*a\.gz"):
        LibsvmData(path="a.gz", test_path="b.gz", root=str(tmp_path)).identity()
    for options, message in (
        ({"index_base": "2"}, r"data\.index_base=2"),
        ({"labels": "many"}, r"data\.labels=many"),
        ({"num_features": 0}, r"data\.num_features=0"),
    ):
        with pytest.raises(ConfigError, match=message):
            LibsvmData(path="x", **options)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"data\.val_fraction=1 of 1 rows leaves 0 to train on"):
        read(tmp_path, "1 1:1\n", val_fraction=1.0)
