"""``strategy=pbg`` on graphs with entity types, from the command line."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from forked import gtrain
from helpers import ok, show, summary

QUIET = ["logger=none", "trainer.enable_progress_bar=false", "data.batch_size=40", "model.dimension=8",
         "model.num_batch_negs=20", "model.num_uniform_negs=0", "model.init_scale=0.3", "model=kg"]  # fmt: skip
ENTITIES = "data.entities={user:{},tag:{num_partitions:1,dimension:8}}"
RELATIONS = (
    "data.relations=[{name:follows,lhs:user,rhs:user,operator:translation},{name:likes,lhs:user,rhs:tag,weight:2.0},"
    "{name:of,lhs:tag,rhs:user,all_negs:true}]"
)


def write_graph(folder: Path, each: int, names: tuple[str, ...]) -> tuple[list[str], Path]:
    """Triples of users in two parts and tags in none, ordered by bucket; the users' parts in a file."""
    rng, lines = np.random.default_rng(0), []
    users = [[f"u{n}" for n in range(12 * part, 12 * part + 12)] for part in (0, 1)]
    tags = [f"u{n}" for n in range(5)]  # they are called as users are
    for i in (0, 1):
        for j in (0, 1):
            for name in names:
                if (name == "likes" and j) or (name == "of" and i):
                    continue
                heads, tails = (tags if name == "of" else users[i]), (tags if name == "likes" else users[j])
                lines += [f"{rng.choice(heads)}\t{name}\t{rng.choice(tails)}" for _ in range(each)]
    kg = folder / "kg"
    kg.mkdir()
    for split, rows in (("train", lines), ("valid", lines[::5]), ("test", lines[::5])):
        (kg / f"{split}.txt").write_text("".join(row + "\n" for row in rows))
    heads = list(dict.fromkeys(line.split("\t")[0] for line in lines if "\tof\t" not in line))
    np.save(folder / "parts.npy", np.array([int(name[1:]) // 12 for name in heads] + [0] * 5))
    return ["data=kg", f"data.path={kg}", *QUIET], folder / "parts.npy"


@pytest.mark.slow
def test_cut_types_train_what_whole_ones_do(tmp_path: Path) -> None:
    """In a fixed order: users in two partitions and tags in one, against everything in one; and what is written."""
    graph, parts = write_graph(tmp_path, 80, ("likes",))
    likes = "data.relations=[{name:likes,lhs:user,rhs:tag,weight:2.0,operator:affine}]"
    common = [*graph, ENTITIES, likes, "strategy=pbg", "strategy.shuffle=false", "strategy.bucket_order=sequential",
              "model.bias=true", "model.global_emb=true", "trainer.precision=64-true",
              "trainer.max_epochs=2"]  # fmt: skip
    two = ["strategy.num_partitions=2", "data.partitioner=file", f"data.partition_path={parts}"]
    runs, tables = {}, {}
    for name, more in (("one", []), ("two", two)):
        ok(gtrain(*common, *more, f"hydra.run.dir={tmp_path / name}", cwd=tmp_path))
        runs[name] = summary(tmp_path / name)
        arguments = ["format=parquet", f"ckpt_path={tmp_path / name / 'checkpoints' / 'last.ckpt'}"]
        ok(gtrain("export", *common, *more, *arguments, f"output={tmp_path / name}.out", cwd=tmp_path))
        for kind in ("user", "tag"):
            table = pq.read_table(tmp_path / f"{name}.out" / f"{kind}.parquet")
            tables[name, kind] = dict(zip(table["id"].to_pylist(), table["values"].to_pylist(), strict=True))
    for one, other in zip(runs["one"]["history"], runs["two"]["history"], strict=True):
        for key in ("train/loss", "val/mrr"):
            assert one[key] == pytest.approx(other[key], rel=1e-9), key
    for kind, count in (("user", 24), ("tag", 5)):
        assert len(tables["one", kind]) == count
        for name, row in tables["one", kind].items():
            assert row == pytest.approx(tables["two", kind][name], rel=1e-6)
    assert tables["one", "tag"]["u1"] != pytest.approx(tables["one", "user"]["u1"], rel=1e-3)


@pytest.mark.slow
def test_single_and_pbg_learn_the_same_and_go_on(tmp_path: Path) -> None:
    """Planted types: two workers, partitions on disk, a checkpoint that another run begins with."""
    data = ["data=planted_kg", "data.num_types=3", "data.num_entities=240", "data.num_positions=16",
            "data.num_relations=5", "data.num_triples=1800", "model=kg", "model.dimension=32", "model.init_scale=0.1",
            "data.batch_size=200", "logger=none", "trainer.enable_progress_bar=false"]  # fmt: skip
    cut = ["strategy.num_partitions=3", "strategy.buffer_partitions=2", "data.entities={type_1:{num_partitions:1}}",
           "strategy.eval_fraction=0.02", "trainer.devices=2"]  # fmt: skip
    ok(gtrain(*data, "strategy=single", "trainer.max_epochs=15", f"hydra.run.dir={tmp_path / 's'}", cwd=tmp_path))
    first = [*data, "strategy=pbg", *cut, "trainer.max_epochs=15", f"hydra.run.dir={tmp_path / 'p'}"]
    ok(gtrain(*first, cwd=tmp_path))
    single, pbg = summary(tmp_path / "s")["metrics"], summary(tmp_path / "p")["metrics"]
    assert pbg["test/mrr"] == pytest.approx(single["test/mrr"], abs=0.15) and pbg["test/mrr"] > 0.5
    assert pbg["train/held_out_mrr"] > pbg["train/held_out_mrr_before"] - 0.2
    rates = ["model.sparse_optimizer.lr=0", "model.optimizer.lr=0", "trainer.max_epochs=1"]
    ok(gtrain(*data, "strategy=pbg", *rates, f"strategy.warm_start={tmp_path / 'p'}",
              f"hydra.run.dir={tmp_path / 'w'}", cwd=tmp_path))  # fmt: skip
    assert summary(tmp_path / "w")["metrics"]["test/mrr"] == pytest.approx(pbg["test/mrr"], abs=0.05)


@pytest.mark.slow
def test_several_machines_share_a_type_that_is_not_cut(tmp_path: Path) -> None:
    """Two machines of one worker: leases are of the partitions of two types; the third is on parameter servers."""
    data = ["data=planted_kg", "data.num_types=3", "data.num_entities=240", "data.num_positions=16",
            "data.num_relations=5", "data.num_triples=1800", "model=kg", "model.dimension=32", "model.init_scale=0.1",
            "model.global_emb=true", "data.batch_size=100", "data.entities={type_1:{num_partitions:1}}",
            "strategy.num_partitions=4", "logger=none", "trainer.enable_progress_bar=false"]  # fmt: skip
    several = [*data, "strategy=pbg", "trainer.num_nodes=2", "trainer.max_epochs=12", f"hydra.run.dir={tmp_path / 'm'}"]
    ok(gtrain(*several, cwd=tmp_path))
    found = summary(tmp_path / "m")
    assert found["metrics"]["test/mrr"] > 0.45
    assert all(epoch["train/edges"] == 1620 for epoch in found["history"])  # nine tenths train
    checkpoint = f"ckpt_path={tmp_path / 'm' / 'checkpoints' / 'last.ckpt'}"
    alone = [*data, "strategy=pbg", checkpoint, f"hydra.run.dir={tmp_path / 'alone'}"]
    ok(gtrain("test", *alone, cwd=tmp_path))
    again = summary(tmp_path / "alone")["metrics"]["test/mrr"]
    assert again == pytest.approx(found["metrics"]["test/mrr"], abs=0.05)  # its best was tested before, not its last


def test_pytorch_biggraphs_folders_with_types(tmp_path: Path) -> None:
    """Users in two partitions and items in one, read as they are; what is exported is such a folder again."""
    h5py = pytest.importorskip("h5py", reason="HDF5 folders need h5py: pip install 'gtrain[hdf5]'")
    rng, folder = np.random.default_rng(0), tmp_path / "pbg"
    folder.mkdir()
    for entity, sizes in {"user": [10, 8], "item": [6]}.items():
        for part, size in enumerate(sizes):
            (folder / f"entity_count_{entity}_{part}.txt").write_text(f"{size}\n")
            names = [f"{entity}{part}:{n}" for n in range(size)]
            (folder / f"entity_names_{entity}_{part}.json").write_text(json.dumps(names))
    for i, size in enumerate((10, 8)):
        with h5py.File(folder / f"edges_{i}_0.h5", "w") as file:
            file.attrs["format_version"] = 1
            for name, most in (("lhs", size), ("rel", 2), ("rhs", 6)):
                file.create_dataset(name, data=rng.integers(most, size=60))
    relations = "data.relations=[{name:buys,lhs:user,rhs:item,operator:diagonal},{name:sees,lhs:user,rhs:item}]"
    common = ["strategy=pbg", "data=biggraph", f"data.path={folder}", relations, "data.split=random",
              "strategy.num_partitions=2", *QUIET]  # fmt: skip
    ok(gtrain(*common, "trainer.max_epochs=2", f"hydra.run.dir={tmp_path / 'run'}", cwd=tmp_path))
    arguments = [f"ckpt_path={tmp_path / 'run' / 'checkpoints' / 'last.ckpt'}", "format=pbg_hdf5"]
    exported = ok(gtrain("export", *common, *arguments, f"output={tmp_path / 'out'}", cwd=tmp_path))
    assert "the folder has no relation parameters: PyTorch-BigGraph's dynamic relations" in exported.stderr
    written = sorted(file.name for file in (tmp_path / "out").iterdir())
    assert written[:2] == ["embeddings_item_0.v1.h5", "embeddings_user_0.v1.h5"] and len(written) == 6
    assert json.loads((tmp_path / "out" / "entity_names_user_0.json").read_text())[9:11] == ["user0:9", "user1:0"]
    with h5py.File(tmp_path / "out" / "embeddings_user_0.v1.h5") as file:
        assert file["embeddings"].shape == (18, 8)


@pytest.mark.slow
def test_featurized_entities(tmp_path: Path) -> None:
    """Items are bags of words, in which the words that users like are: what single learns, pbg does."""
    rng, kg = np.random.default_rng(0), tmp_path / "kg"
    kg.mkdir()
    items = {f"i{n}": [f"w{w}" for w in rng.choice(12, size=3, replace=False)] for n in range(60)}
    (tmp_path / "items.tsv").write_text("".join("\t".join([name, *words]) + "\n" for name, words in items.items()))
    liked = [f"u{u}\tlikes\t{name}" for u in range(12) for name, words in items.items() if f"w{u}" in words]
    order = [liked[place] for place in rng.permutation(len(liked))]
    splits = {"train": order[40:] + [f"u0\tsees\t{name}" for name in items], "valid": order[:20], "test": order[20:40]}
    for split, lines in splits.items():
        (kg / f"{split}.txt").write_text("".join(line + "\n" for line in lines))
    common = ["data=kg", f"data.path={kg}", "model=kg", "data.relations=[{lhs:user,rhs:item}]",
              f"data.entities={{user:{{}},item:{{featurized:{tmp_path / 'items.tsv'}}}}}", "model.dimension=16",
              "model.init_scale=0.1", "model.num_uniform_negs=30", "data.batch_size=50", "trainer.max_epochs=20",
              "logger=none", "trainer.enable_progress_bar=false"]  # fmt: skip
    found = {}
    for name, strategy in (("single", []), ("pbg", ["strategy.num_partitions=2", "trainer.devices=2"])):
        run = [f"strategy={name}", *strategy, f"hydra.run.dir={tmp_path / name}"]
        ok(gtrain(*common, *run, cwd=tmp_path))
        found[name] = summary(tmp_path / name)["metrics"]["test/hits@10"]
    assert found["single"] > 0.6 and found["pbg"] > 0.6, found
    arguments = ["strategy=pbg", "strategy.num_partitions=2", "format=tsv", f"output={tmp_path / 'out'}"]
    arguments += [f"ckpt_path={tmp_path / 'pbg' / 'checkpoints' / 'last.ckpt'}"]
    ok(gtrain("export", *common, *arguments, cwd=tmp_path))
    assert len((tmp_path / "out" / "item.tsv").read_text().splitlines()) == 60  # entities, not words
    (tmp_path / "items.tsv").write_text("i0\tw1\ni1\n")
    result = gtrain("partition", *common, "strategy=single", cwd=tmp_path)
    assert result.returncode != 0 and "items.tsv, line 2: 'i1' has no features" in " ".join(result.stderr.split())


def test_what_does_not_suit_types_is_said(tmp_path: Path) -> None:
    graph = [*write_graph(tmp_path, 5, ("follows", "likes", "of"))[0], RELATIONS]
    (tmp_path / "bad").mkdir()
    for split, line in (("train", "u1\tlikes\tu2"), ("valid", "u1\tlikes\tu2"), ("test", "u1\tlikes\tu2\tu3")):
        (tmp_path / "bad" / f"{split}.txt").write_text(f"u1\tlikes\tu2\n{line}\n")
    (tmp_path / "strange").mkdir()
    for split, line in (("train", "u1\tlikes\tu2"), ("valid", "u1\tlikes\tu1"), ("test", "u1\tlikes\tu2")):
        (tmp_path / "strange" / f"{split}.txt").write_text(f"u1\tlikes\tu2\n{line}\n")
    for overrides, message in (
        (["data.entities={user:{num_partitions:3},tag:{}}", "strategy.num_partitions=2"], "3 is neither 1 nor 2"),
        (["data.entities={user:{dimension:4},tag:{}}"], "joins user of dimension 4 and tag of dimension 8: 4 != 8"),
        ([f"data.path={tmp_path / 'bad'}"], "test.txt, line 2: 4 columns, and 3 were expected"),
        ([f"data.path={tmp_path / 'strange'}"], "valid.txt, line 2: the entity 'u1' does not occur in train"),
    ):
        result = gtrain("strategy=pbg", *graph, *overrides, "trainer.max_epochs=1", cwd=tmp_path)
        said = " ".join((result.stdout + result.stderr).split())
        assert result.returncode != 0 and "Traceback" not in said and message in said, show(result)
