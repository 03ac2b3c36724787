"""gtrain.data.sources.kg: knowledge graphs from triples, and the line that is wrong."""

from __future__ import annotations

import gzip
import logging
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from gtrain.data.sources.kg import KGData
from gtrain.errors import ConfigError, DataError

Real = Callable[[str], Path]
TRAIN = "anna\tknows\tbob\nbob\tknows\tcarl\nanna\tlikes\tcarl\nanna\tknows\tbob\n"


def write(
    folder: Path, *, train: str = TRAIN, valid: str = "carl\tknows\tanna\n", test: str = "bob\tlikes\tanna\n"
) -> str:
    folder.mkdir(exist_ok=True)
    for name, text in (("train", train), ("valid", valid), ("test", test)):
        (folder / f"{name}.txt").write_bytes(text.encode())
    return str(folder)


def named(module: KGData, index: list[list[int]], types: list[int]) -> list[tuple[str, str, str]]:
    """Triples of numbers as triples of names."""
    entities, relations = (module.names()[kind].to_pylist() for kind in ("node", "relation"))
    return [(entities[h], relations[r], entities[t]) for h, r, t in zip(index[0], types, index[1], strict=True)]


def test_numbers_follow_the_order_of_first_mention(tmp_path: Path) -> None:
    module = KGData(path=write(tmp_path))
    data = module.read()
    assert module.names()["node"].to_pylist() == ["anna", "bob", "carl"]
    assert module.names()["relation"].to_pylist() == ["knows", "likes"]
    assert data.edge_index.tolist() == [[0, 1, 0, 0], [1, 2, 2, 1]]
    assert data.edge_type.tolist() == [0, 0, 1, 0]  # the duplicate stays
    assert (data.val_edge_index.tolist(), data.val_edge_type.tolist()) == ([[2], [0]], [0])
    assert (data.test_edge_index.tolist(), data.test_edge_type.tolist()) == ([[1], [0]], [1])
    assert (data.num_nodes, module.extra_facts()) == (3, {"num_relations": 2})


def test_forms_of_the_files(tmp_path: Path) -> None:
    plain = KGData(path=write(tmp_path / "plain")).read()
    write(tmp_path / "crlf", train="\n" + TRAIN.replace("\n", "\r\n") + "\r\n")
    (tmp_path / "packed" / "raw").mkdir(parents=True)
    for split, name in (("train", "train.tsv.gz"), ("valid", "dev.txt.gz"), ("test", "test.gz")):
        text = (tmp_path / "plain" / f"{split}.txt").read_bytes()
        (tmp_path / "packed" / "raw" / name).write_bytes(gzip.compress(text))
    with tarfile.open(tmp_path / "all.tar.gz", "w:gz") as archive:
        archive.add(tmp_path / "plain", "some/folder")
    for path in ("crlf", "packed", "all.tar.gz"):
        data = KGData(path=path, root=str(tmp_path)).read()
        assert {key: value.tolist() for key, value in data if key != "num_nodes"} == {
            key: value.tolist() for key, value in plain if key != "num_nodes"
        }, path


def test_names_are_any_text(tmp_path: Path) -> None:
    module = KGData(path=write(tmp_path, train='"a b"\tr#1\tÅ,x\n', valid='Å,x\tr#1\t"a b"\n', test="Å,x\tr#1\tÅ,x\n"))
    assert named(module, module.read().edge_index.tolist(), [0]) == [('"a b"', "r#1", "Å,x")]


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"train": "a\tr\tb\n\na\tr\n"}, r"train\.txt, line 3: 2 columns, and 3 were expected: 'a\\tr'"),
        ({"valid": "anna\tknows\tbob\tx\n"}, r"valid\.txt, line 1: 4 columns"),
        ({"train": "a r b\n"}, r"train\.txt, line 1: 1 columns.*(.|\n)*separated by tabs"),
        ({"train": "a\tr\tb\na\t\tb\n"}, r"train\.txt, line 2: the relation is empty"),
        ({"test": "\n\n"}, r"test\.txt is empty"),
        (
            {"valid": "anna\tknows\tbob\n\nanna\tknows\tdora\n"},
            r"valid\.txt, line 3: the entity 'dora' .* 1 of 2 triples",
        ),
        ({"test": "anna\thates\tbob\n"}, r"test\.txt, line 1: the relation 'hates' does not occur in train"),
    ],
)
def test_the_malformed_line_is_named(files: dict[str, str], message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=message):
        KGData(path=write(tmp_path, **files)).read()


def test_text_that_is_no_utf8(tmp_path: Path) -> None:
    path = write(tmp_path)
    (tmp_path / "train.txt").write_bytes(b"a\tr\tb\na\tr\t\xff\n")
    with pytest.raises(DataError, match=r"train\.txt, line 2: the text is not UTF-8"):
        KGData(path=path).read()


def test_unknown_names_can_be_dropped_or_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write(tmp_path, valid="anna\tknows\tdora\ncarl\tknows\tanna\n", test="emil\thates\tanna\n")
    with caplog.at_level(logging.WARNING, "gtrain"):
        dropped = KGData(path=path, unknown="drop").read()
    assert [record.getMessage().split(": ")[1] for record in caplog.records] == [
        "dropped 1 of 2 triples, whose names do not occur in train",
        "dropped 1 of 1 triples, whose names do not occur in train",
    ]
    assert (dropped.num_nodes, dropped.val_edge_index.tolist(), dropped.test_edge_index.size(1)) == (3, [[2], [0]], 0)
    module = KGData(path=path, unknown="keep")
    kept = module.read()
    assert (kept.num_nodes, module.extra_facts()["num_relations"]) == (5, 3)
    assert named(module, kept.test_edge_index.tolist(), kept.test_edge_type.tolist()) == [("emil", "hates", "anna")]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("gone", r"data\.path=gone: no such folder, nor (.|\n)*train\.txt"),
        ("/gone", r"data\.path=/gone: no such folder\nHINT: (.|\n)*train\.txt"),
        ("umsl", r"no such folder(.|\n)*there are umls"),
        ("empty", r"the folder has no train\.txt; it has x\.csv"),
        ("empty/x.csv", r"is a file, but not a \.tar\.gz"),
        ("half", r"has no test\.txt; it has train\.txt, valid\.txt(.|\n)*split=random"),
        ("broken.tar.gz", "cannot be unpacked"),
        ("hollow.tar.gz", r"has no train\.txt; it has none"),
    ],
)
def test_wrong_folders(path: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "x.csv").touch()
    (tmp_path / "broken.tar.gz").write_text("no archive")
    with tarfile.open(tmp_path / "hollow.tar.gz", "w:gz"):
        pass
    write(tmp_path / "umls")
    write(tmp_path / "half")
    (tmp_path / "half" / "test.txt").unlink()
    with pytest.raises(DataError, match=message):
        KGData(path=path, root=str(tmp_path)).read()


def test_edge_sets_train_instead_of_train(tmp_path: Path) -> None:
    path = write(tmp_path / "kg", valid="anna\tlikes\tdora\n", test="bob\tknows\tanna\n")
    (tmp_path / "kg" / "a.tsv").write_text("anna\tknows\tbob\n")
    (tmp_path / "kg" / "b.tsv").write_text("bob\tlikes\tanna\n\nbob\tknows\tcarl\n")
    (tmp_path / "c.txt").write_text("carl\tknows\tdora\n")
    sets = ["a.tsv", ["b.tsv", str(tmp_path / "c.txt")]]
    module = KGData(path=path, edge_sets=sets)
    data = module.read()
    triples = named(module, data.edge_index.tolist(), data.edge_type.tolist())
    assert triples == [
        ("anna", "knows", "bob"), ("bob", "likes", "anna"), ("bob", "knows", "carl"), ("carl", "knows", "dora")
    ]  # fmt: skip
    assert data.edge_set.tolist() == [0, 1, 1, 1] and module.extra_facts()["edge_sets"] == 2
    assert data.val_edge_index.tolist() == [[0], [3]] and "val_edge_set" not in data
    (tmp_path / "kg" / "train.txt").unlink()  # it is not read
    assert KGData(path=path, edge_sets=sets).identity() == module.identity()
    one = KGData(path=path, edge_sets=sets[:1])
    assert one.identity() != module.identity()
    with pytest.raises(DataError, match=r"valid\.txt, line 1: the relation 'likes'"):
        one.read()
    alone = KGData(path=path, edge_sets=[sets], split="random")
    assert "edge_set" not in alone.read() and "edge_sets" not in alone.extra_facts()


def test_edge_sets_that_are_not_there(tmp_path: Path) -> None:
    path = write(tmp_path)
    with pytest.raises(ConfigError, match=r"data\.edge_sets is an empty list"):
        KGData(path=path, edge_sets=[])
    with pytest.raises(DataError, match=r"data\.edge_sets=a\.txt: no such file(.|\n)*there are"):
        KGData(path=path, edge_sets=["a.txt"]).read()
    (tmp_path / "valid.txt").unlink()
    with pytest.raises(DataError, match=r"has no valid\.txt"):
        KGData(path=path, edge_sets=["test.txt"]).read()


def test_options(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.unknown=skip(.|\n)*error(.|\n)*drop(.|\n)*keep"):
        KGData(path="x", unknown="skip")
    (write(tmp_path), (tmp_path / "test.txt").unlink(), (tmp_path / "valid.txt").unlink())
    assert KGData(path=str(tmp_path), split="random").read().edge_index.size(1) == 4
    ids = [KGData(path=str(tmp_path), split="random", unknown=unknown).identity() for unknown in ("error", "drop")]
    assert ids[0] != ids[1] and ids[0]["files"][0][0] == "train.txt"


def test_umls(real_data: Real) -> None:
    module = KGData(path=str(real_data("kg/umls")))
    data = module.read()
    assert (data.num_nodes, module.extra_facts()["num_relations"]) == (135, 46)
    sizes = [data[f"{prefix}edge_index"].size(1) for prefix in ("", "val_", "test_")]
    assert sizes == [5216, 652, 661]
    text = (real_data("kg/umls") / "raw" / "test.txt").read_text().splitlines()
    assert named(module, data.test_edge_index.tolist(), data.test_edge_type.tolist()) == [
        tuple(line.split("\t")) for line in text
    ]


def test_fb15k_237(real_data: Real) -> None:
    path = str(real_data("kg/FB15k-237.tar.gz"))
    with pytest.raises(DataError, match=r"FB15k-237\.tar\.gz:valid\.txt, line 211: the entity '/m/0gslw'"):
        KGData(path=path).read()
    module = KGData(path=path, unknown="keep")
    data = module.read()
    assert (data.num_nodes, module.extra_facts()["num_relations"]) == (14541, 237)
    assert [data[f"{p}edge_index"].size(1) for p in ("", "val_", "test_")] == [272115, 17535, 20466]
