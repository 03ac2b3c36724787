"""gtrain.data.sources.temporal: events with times, and the line that is wrong."""

from __future__ import annotations

import gzip
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gtrain.data.sources.temporal import TemporalData
from gtrain.errors import ConfigError, DataError

Real = Callable[[str], Path]


def events(folder: Path, text: str, **options: Any) -> TemporalData:
    (folder / "events").write_bytes(text.encode())
    return TemporalData(path=str(folder / "events"), **options)


@pytest.mark.parametrize(
    "text",
    [
        "0 1 5\n1 2 6\n2 0 9\n",
        "# made\n0\t1\t5\n1\t2\t6\n\n2\t0\t9",
        "source,target,time\r\n0,1,5\r\n1, 2,6\r\n2,0,9\r\n",
        "0  1   5 \n 1 2 6\n% c\n2 0 9\n",
        "0;1;5.0\n1;2;6\n2;0;9\n",
    ],
)
def test_forms_of_the_file(text: str, tmp_path: Path) -> None:
    (tmp_path / "packed.gz").write_bytes(gzip.compress(text.encode()))
    for module in (events(tmp_path, text), TemporalData(path="packed.gz", root=str(tmp_path))):
        data = module.read()
        assert (data.edge_index.tolist(), data.edge_time.tolist()) == ([[0, 1, 2], [1, 2, 0]], [5, 6, 9])
        assert (data.num_nodes, module.names(), data.edge_attr) == (3, {}, None)


def test_ids_are_numbered_anew(tmp_path: Path) -> None:
    module = events(tmp_path, "10 7 1\n7 300 2\n")
    assert module.read().edge_index.tolist() == [[1, 0], [0, 2]]
    assert module.names()["node"].to_pylist() == ["7", "10", "300"]
    module = events(tmp_path, "bob,anna b,1\nanna b,7,2\n")
    assert module.read().edge_index.tolist() == [[0, 1], [1, 2]]
    assert module.names()["node"].to_pylist() == ["bob", "anna b", "7"]


def test_marks_within_names_and_values_separate_nothing(tmp_path: Path) -> None:
    module = events(tmp_path, "A, Z\tX\t3\nA,Z\tX; Y\t4\n")
    assert module.read().edge_index.tolist() == [[0, 1], [2, 3]]
    assert module.names()["node"].to_pylist() == ["A, Z", "A,Z", "X", "X; Y"]
    data = events(tmp_path, "1\t2\t3\t5,6,7\n0\t3\t6\t8,9,10\n").read()
    assert (data.edge_index.tolist(), data.edge_time.tolist()) == ([[1, 0], [2, 3]], [3, 6])
    assert events(tmp_path, "0,\t1,\t5\n1,\t0,\t6\n").read().edge_index.tolist() == [[0, 1], [1, 0]]


def test_events_out_of_order_are_sorted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "gtrain"):
        data = events(tmp_path, "0 1 5 0.5\n1 2 3 0.3\n2 0 5 0.6\n0 2 -4 0.4\n", features="3:").read()
    assert data.edge_time.tolist() == [-4, 3, 5, 5]
    assert data.edge_index.tolist() == [[0, 1, 0, 2], [2, 2, 1, 0]]
    assert data.edge_attr.flatten().tolist() == pytest.approx([0.4, 0.3, 0.5, 0.6])
    assert [record.getMessage().split(": ")[1] for record in caplog.records] == [
        "the events are not in the order of their times; sorting 4 events"
    ]


def test_wikipedia_as_jodie_publishes_it(tmp_path: Path) -> None:
    text = (
        "user_id,item_id,timestamp,state_label,comma_separated_list_of_features\n0,0,0.0,0,0.5,1\n1,0,36.0,1,-2,3e-1\n"
    )
    module = events(tmp_path, text, bipartite=True, features="4:")
    data = module.read()
    assert (data.edge_index.tolist(), data.edge_time.tolist()) == ([[0, 1], [2, 2]], [0, 36])
    assert np.allclose(data.edge_attr, [[0.5, 1], [-2, 0.3]])
    assert module.names()["node"].to_pylist() == ["source:0", "source:1", "target:0"]
    assert (data.num_nodes, module.task, module.split.kind) == (3, "link", "time")
    assert module.split.sizes(100) == (70, 15, 15)


def test_times(tmp_path: Path) -> None:
    big = 2**62 + 1  # no double holds it
    assert events(tmp_path, f"0 1 {big}\n").read().edge_time.tolist() == [big]
    assert events(tmp_path, "0 1 0.25\n1 0 1.5\n", time_scale=100.0).read().edge_time.tolist() == [25, 150]
    assert events(tmp_path, "0 1 4 8\n", time_column=3).read().edge_time.tolist() == [8]


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("0 1 2\n# c\n0 1\n", {}, r"events, line 3: 2 columns, and the lines before have 3: '0 1'"),
        ("0 1 2\n0 1 x\n", {}, r"line 2: the time 'x' in column 2 is not a number"),
        ("0 1 2 1\n0 1 2 y\n", {"features": "3:"}, r"line 2: the feature 'y' in column 3 is not a number"),
        ("0 1\n", {}, r"events: the lines have 2 columns; at least 3 are needed"),
        ("u v t\n0 1 2\n0 1 nan\n", {}, r"line 3: the time is not finite, as in 1 of 2 lines"),
        ("0 1 2 1\n0 1 3 inf\n", {"features": "3:"}, r"line 2: the feature is not finite"),
        ("0 1 2\n\n0 -1 3\n", {}, r"line 3: the id -1 is negative"),
        ("0,1,2\n0,,3\n", {}, r"line 2: the target is empty"),
        ("0 1 2\n0 1 2.5\n", {}, r"line 2: the time 2\.5 times data\.time_scale=1 is not a whole number(.|\n)*=1000"),
        ("0 1 2\n0 1 1e300\n", {}, r"line 2: the time 1e\+300 exceeds 64 bits"),
        ("0 1 2\n0 1 99999999999999999999\n", {}, r"line 2: the time .* exceeds 64 bits"),
        ("0 1 2\n0 1 4000000000000000000\n", {"time_scale": 1000}, r"line 2: the time 4000.* exceeds 64 bits"),
        ("# c\n", {}, r"events is empty"),
        ("u v t\n", {}, r"events has no line below the column names"),
    ],
)
def test_the_malformed_line_is_named(text: str, options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=message):
        events(tmp_path, text, **options).read()


def test_text_that_is_no_utf8(tmp_path: Path) -> None:
    (tmp_path / "latin").write_bytes("a b 1\nc é 2\n".encode("latin1"))
    with pytest.raises(DataError, match=r"latin, line 2: the text is not UTF-8"):
        TemporalData(path="latin", root=str(tmp_path)).read()


def test_options(tmp_path: Path) -> None:
    for options, message in (
        ({"features": "x"}, r"data\.features='x' is not a slice"),
        ({"features": "1:"}, r"data\.features takes the columns \[1, 2\]"),
        ({"features": "3:"}, r"data\.features takes the columns \[\], and .*events has the columns 0\.\.2"),
        ({"time_column": 3}, r"data\.time_column=3, and .*events has the columns 0\.\.2"),
        ({"time_scale": 0.0}, r"data\.time_scale=0\.0 was set; it must be a number above 0"),
    ):
        with pytest.raises(ConfigError, match=message):
            events(tmp_path, "0 1 2\n", **options).read()
    with pytest.raises(DataError, match=r"data\.path=gone: no such file"):
        TemporalData(path="gone", root=str(tmp_path)).identity()


def test_real_events(real_data: Real) -> None:
    for name, nodes, edges, last in (("CollegeMsg", 1899, 59835, 1098777142), ("ml_wikipedia", 9227, 157474, None)):
        module = TemporalData(path=f"{name}.txt", root=str(real_data("temporal")))
        data = module.read()
        assert (data.num_nodes, data.num_edges, len(module.names()["node"])) == (nodes, edges, nodes)
        wanted = np.loadtxt(real_data(f"temporal/{name}.txt"), dtype=np.int64)
        assert np.array_equal(data.edge_index.numpy() + 1, wanted[:, :2].T)
        assert np.array_equal(data.edge_time, wanted[:, 2]) and last in (None, int(data.edge_time[-1]))


def test_hexadecimal_ids_are_names(tmp_path: Path) -> None:
    module = events(tmp_path, "0x10 16 1\n16 0X1f 2\n")
    assert module.read().edge_index.tolist() == [[0, 1], [1, 2]]
    assert module.names()["node"].to_pylist() == ["0x10", "16", "0X1f"]


def test_ids_that_begin_with_zeros_are_names(tmp_path: Path) -> None:
    module = events(tmp_path, "007 7 1\n7 0 2\n")
    assert module.read().edge_index.tolist() == [[0, 1], [1, 2]]
    assert module.names()["node"].to_pylist() == ["007", "7", "0"]
