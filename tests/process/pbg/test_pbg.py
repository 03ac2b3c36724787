"""``strategy=pbg`` from the command line: what it trains, on one worker and several, in one partition and many."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from forked import Program, gtrain
from helpers import descendants, ok, show, summary, until

from gtrain_pbg.step.matmul_format import fastest_format

SMALL = ["data=planted_kg", "model=kg", "data.num_entities=120", "data.num_positions=24", "data.num_triples=2400",
         "data.num_relations=4", "model.dimension=16", "model.init_scale=0.1", "data.batch_size=200"]  # fmt: skip
QUIET = ["logger=none", "trainer.enable_progress_bar=false"]


def train(folder: Path, name: str, *overrides: str) -> dict[str, Any]:
    result = gtrain("strategy=pbg", *SMALL, *QUIET, *overrides, f"hydra.run.dir={folder / name}", cwd=folder)
    ok(result)
    return summary(folder / name)


def losses(run: dict[str, Any]) -> list[float]:
    return [epoch["train/loss"] for epoch in run["history"]]


def write_graph(folder: Path, partitions: int, each: int) -> list[str]:
    """Triples ordered by bucket, the same number in each; the part of each entity in a file."""
    rng = np.random.default_rng(0)
    lines, first = [], {}
    for i in range(partitions):
        for j in range(partitions):
            for _ in range(each):
                ends = int(rng.integers(10)) + 10 * i, int(rng.integers(10)) + 10 * j
                lines.append((f"e{ends[0]}", f"r{rng.integers(3)}", f"e{ends[1]}"))
    for column in (0, 2):  # heads, then tails, are numbered as they come
        for line in lines:
            first.setdefault(line[column], len(first))
    kg = folder / "kg"
    kg.mkdir()
    for split, rows in (("train", lines), ("valid", lines[:40]), ("test", lines[40:80])):
        (kg / f"{split}.txt").write_text("".join("\t".join(row) + "\n" for row in rows))
    np.save(folder / "parts.npy", np.array([int(name[1:]) // 10 for name in first]))
    return ["data=kg", f"data.path={kg}", "model=kg"]


@pytest.mark.slow
def test_four_partitions_train_what_one_does(tmp_path: Path) -> None:
    """In a fixed order of buckets, without drawn negatives, and with no batch across a border of buckets."""
    graph = write_graph(tmp_path, 4, 100)
    common = [*graph, "strategy=pbg", "data.batch_size=50", "model.num_batch_negs=25", "model.num_uniform_negs=0",
              "model.dimension=8", "model.init_scale=0.3", "model.bias=true", "strategy.shuffle=false",
              "strategy.bucket_order=sequential", "trainer.precision=64-true", "trainer.max_epochs=3",
              *QUIET]  # fmt: skip
    four = ["strategy.num_partitions=4", "data.partitioner=file", f"data.partition_path={tmp_path / 'parts.npy'}"]
    ok(gtrain(*common, f"hydra.run.dir={tmp_path / 'one'}", cwd=tmp_path))
    sweep = ["strategy.buffer_partitions=2,3", f"hydra.sweep.dir={tmp_path / 'four'}"]
    ok(gtrain("--multirun", *common, *four, *sweep, cwd=tmp_path))
    one = summary(tmp_path / "one")
    for job in ("0", "1"):
        run = summary(tmp_path / "four" / job)
        for mine, theirs in zip(run["history"], one["history"], strict=True):
            for key in ("train/loss", "val/mrr", "val/hits@10"):
                assert mine[key] == pytest.approx(theirs[key], rel=1e-9), (job, key)
        assert run["metrics"]["test/mrr"] == pytest.approx(one["metrics"]["test/mrr"], rel=1e-9)


@pytest.mark.slow
def test_workers_on_disk_learn_go_on_and_export(tmp_path: Path) -> None:
    """Two workers, four partitions of which three are in memory; then the run goes on in another folder."""
    several = ["trainer.devices=2", "strategy.num_partitions=4", "strategy.buffer_partitions=3",
               "strategy.num_edge_chunks=2", "strategy.bucket_order=beta", "data.batch_size=100"]  # fmt: skip
    first = train(tmp_path, "a", *several, "trainer.max_epochs=6", "strategy.eval_fraction=0.1")
    assert first["world_size"] == 2 and first["store"]["parts"] == 4
    assert losses(first)[-1] < 0.9 * losses(first)[0]
    held = [(epoch["train/held_out_mrr_before"], epoch["train/held_out_mrr"]) for epoch in first["history"]]
    assert held[-1][1] > 1.5 * held[0][0]  # what is learned holds for edges that were held back
    checkpoint = tmp_path / "a" / "checkpoints" / "last.ckpt"
    second = train(tmp_path, "b", *several, "trainer.max_epochs=8", f"ckpt_path={checkpoint}")
    assert [epoch["epoch"] for epoch in second["history"]] == [6, 7]
    assert losses(second)[0] < 0.8 * losses(first)[0]  # the two workers' order is never the same
    arguments = ["strategy=pbg", *SMALL, *QUIET, *several, f"ckpt_path={checkpoint}"]
    sweep = ["format=npy,parquet,tsv,pbg_hdf5", f"hydra.sweep.dir={tmp_path / 'out'}"]
    ok(gtrain("--multirun", "export", *arguments, *sweep, cwd=tmp_path))
    out = tmp_path / "out"
    found = {"npy": np.load(out / "0" / "embeddings.npy")}
    table = pq.read_table(out / "1" / "embeddings.parquet")
    found["parquet"] = np.array(table["values"].to_pylist(), dtype=np.float32)
    lines = [line.split("\t") for line in (out / "2" / "embeddings.tsv").read_text().splitlines()]
    found["tsv"] = np.array([line[1:] for line in lines], dtype=np.float32)
    h5py = pytest.importorskip("h5py", reason="gtrain[hdf5] is not installed")
    folder = out / "3" / "embeddings.pbg_hdf5"
    with h5py.File(folder / "embeddings_node_0.v1.h5") as file:
        found["pbg_hdf5"] = file["embeddings"][...]
    names = [f"entity_{entity}" for entity in range(120)]
    assert table["id"].to_pylist() == [line[0] for line in lines] == names
    assert json.loads((folder / "entity_names_node_0.json").read_text()) == names
    assert found["npy"].shape == (120, 16)
    for values in found.values():
        assert np.array_equal(values, found["npy"])


def test_a_run_that_goes_on_is_the_run_that_was_not_interrupted(tmp_path: Path) -> None:
    """One worker: losses of every epoch, to the last digit."""
    partitions = ["strategy.num_partitions=3", "strategy.buffer_partitions=2", "strategy.matmul=float32"]
    kept = "strategy.checkpoint_preservation_interval=2"
    whole = train(tmp_path, "whole", *partitions, "trainer.max_epochs=4", kept)
    checkpoint = tmp_path / "whole" / "checkpoints" / "epoch-00002.ckpt"
    rest = train(tmp_path, "rest", *partitions, "trainer.max_epochs=4", f"ckpt_path={checkpoint}")
    assert losses(rest) == losses(whole)[2:]
    assert rest["metrics"]["test/mrr"] == whole["metrics"]["test/mrr"]


def test_a_run_resumes_within_an_epoch(tmp_path: Path) -> None:
    """``every_n_train_steps``: the next epochs are those of a run that was not interrupted."""
    settings = ("strategy.num_partitions=3", "strategy.matmul=float32")
    saving = "_target_:lightning.pytorch.callbacks.ModelCheckpoint,every_n_train_steps:7,dirpath:often"
    often = f"+callbacks.often={{{saving}}}"
    whole = train(tmp_path, "whole", *settings, "trainer.max_epochs=3")
    train(tmp_path, "first", *settings, "trainer.max_epochs=2", often)
    (checkpoint,) = (tmp_path / "often").glob("*.ckpt")
    assert json.loads((checkpoint / "reached.json").read_text()) == {"epoch": 1, "chunk": 0, "step": 5}
    resumed = train(tmp_path, "second", *settings, "trainer.max_epochs=3", f"ckpt_path='{checkpoint}'")
    assert losses(resumed)[-1] == losses(whole)[-1]
    assert resumed["metrics"]["test/mrr"] == whole["metrics"]["test/mrr"]


@pytest.mark.slow
def test_a_run_goes_on_with_the_arithmetic_of_its_checkpoint(tmp_path: Path) -> None:
    """``strategy.matmul=auto``, on a CPU that may lack fast instructions for what the checkpoint was trained with."""
    kept = "strategy.checkpoint_preservation_interval=1"
    whole = train(tmp_path, "whole", "strategy.matmul=bfloat16", kept, "trainer.max_epochs=2")
    assert whole["resolved"] == {"strategy.matmul": "bfloat16"}
    checkpoint = tmp_path / "whole" / "checkpoints" / "epoch-00001.ckpt"
    assert json.loads((checkpoint / "pbg.json").read_text())["matmul"] == "bfloat16"
    rest = train(tmp_path, "rest", "trainer.max_epochs=2", f"ckpt_path={checkpoint}")
    assert rest["resolved"] == {"strategy.matmul": "bfloat16"}
    assert losses(rest) == losses(whole)[1:]
    said = (tmp_path / "rest" / "logs" / "rank-0.log").read_text()
    assert ("Not all CPUs of this run have fast instructions for it" in said) == (fastest_format() == "float32")
    other = train(tmp_path, "other", "trainer.max_epochs=2", "strategy.matmul=float32", f"ckpt_path={checkpoint}")
    assert other["resolved"] == {"strategy.matmul": "float32"}
    assert "the run continues with strategy.matmul=float32, as set" in (
        (tmp_path / "other" / "logs" / "rank-0.log").read_text()
    )
    assert losses(other) != losses(rest)


STEP = """
import hashlib, torch
from gtrain.model.kg.embedding import KGEmbedding
from gtrain_pbg.step.layout import EdgeBatch, PartitionRows
from gtrain_pbg.step.relations import UpdateRule, RelationWeights
from gtrain_pbg.step.training import TrainingStep
torch.manual_seed(0)
recipe = KGEmbedding(1000, 7, dimension=100, init_scale=0.3).recipe().groups[0]
table = 0.3 * torch.randn(1000, 100)
rows = PartitionRows(table, torch.zeros(1000, 1), torch.full((1000,), -1, dtype=torch.int32))
values = {n: p.detach().clone() for n, p in recipe.parameters.items()}
weights = {n: RelationWeights(p, torch.zeros(len(p), p[0].numel())) for n, p in values.items()}
step = TrainingStep(recipe, weights, torch.float32, "float32")
for _ in range(12):
    head, tail, *drawn = torch.randint(1000, (4, 500))
    edges = EdgeBatch(head, torch.randint(7, (500,)), tail, None, tuple(drawn))
    step(edges, rows, rows, UpdateRule("rowwise_adagrad", 0.1), UpdateRule("adagrad", 0.1))
print(hashlib.sha256(table.numpy().tobytes()).hexdigest())
"""


@pytest.mark.slow
def test_the_process_that_compiles_kernels_rounds_as_those_that_load_them(tmp_path: Path) -> None:
    """Otherwise a resumed run, which loads them, repeats the losses of a first run to 1e-9 only."""
    settings = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    done = [
        subprocess.run([sys.executable, "-c", STEP], env=settings, capture_output=True, text=True, check=True)
        for _ in ("compiles", "loads")
    ]
    assert any(tmp_path.rglob("*.nbc"))
    assert done[0].stdout == done[1].stdout


@pytest.mark.slow
def test_a_run_that_was_killed_within_an_epoch_goes_on_from_its_last_chunk(tmp_path: Path) -> None:
    settings = ["strategy.num_partitions=3", "strategy.buffer_partitions=2", "strategy.num_edge_chunks=4",
                "strategy.checkpoint_chunks=true", "strategy.checkpoint_preservation_interval=100",
                "strategy.matmul=float32"]  # fmt: skip
    arguments = ["strategy=pbg", *SMALL, *QUIET, *settings, "trainer.max_epochs=100000", "hydra.run.dir=killed"]
    job = Program("-m", "gtrain", *arguments, cwd=tmp_path)
    checkpoint = tmp_path / "killed" / "checkpoints" / "last.ckpt"

    def stands_within_an_epoch() -> bool:
        """Checkpoints come and go; where one within an epoch is there, the run stands still from now on."""
        ranks = descendants(job.pid)
        for rank in ranks:
            os.kill(rank, signal.SIGSTOP)
        found = (checkpoint / "reached.json").exists() and (checkpoint / "manifest.json").exists()
        for rank in [] if found else ranks:
            os.kill(rank, signal.SIGCONT)
        return found

    until(checkpoint.exists, tmp_path)
    until(stands_within_an_epoch, tmp_path)
    job.kill()
    reached = json.loads((checkpoint / "reached.json").read_text())
    epoch, epochs = reached["epoch"], f"trainer.max_epochs={reached['epoch'] + 2}"
    assert 1 <= reached["chunk"] <= 3
    whole = train(tmp_path, "whole", *settings, epochs)
    rest = train(tmp_path, "rest", *settings, epochs, f"ckpt_path={checkpoint}")
    assert [entry["epoch"] for entry in rest["history"]] == [epoch, epoch + 1]
    assert [entry["val/mrr"] for entry in rest["history"]] == [entry["val/mrr"] for entry in whole["history"][epoch:]]
    assert losses(rest)[1] == losses(whole)[epoch + 1]


@pytest.mark.parametrize("workers", [1, 2])
def test_limited_epochs_train_and_write_their_partitions_back(tmp_path: Path, workers: int) -> None:
    limit = ["trainer.limit_train_batches=1", "trainer.max_epochs=2", f"trainer.devices={workers}"]
    run = train(tmp_path, "run", *limit, "strategy.num_partitions=4", "strategy.buffer_partitions=2")
    assert len(losses(run)) == 2 and losses(run)[1] < losses(run)[0]


@pytest.mark.slow
def test_what_does_not_suit_is_said_in_a_sentence(tmp_path: Path) -> None:
    train(tmp_path, "four", "strategy.num_partitions=4", "trainer.max_epochs=1")
    checkpoint = tmp_path / "four" / "checkpoints" / "last.ckpt"
    there = {path: path.stat().st_mtime_ns for path in checkpoint.iterdir()}
    for overrides, message in (
        (["trainer.num_nodes=2", "strategy.num_partitions=3"], "2 * 2 = 4 > 3"),
        (["data.num_parts=3"], "strategy.num_partitions=1"),
        (["data.batch_size=210"], "210 = 4 * 50 + 10"),
        (["trainer.limit_train_batches=0.5"], "cannot train a fraction"),
        (
            ["trainer.num_nodes=2", "strategy.num_partitions=4", "trainer.limit_train_batches=1"],
            "not after a number of batches",
        ),
        (["model.dimension=15"], "15 / 2 = 7.5 complex numbers"),
        (["model.optimizer._target_=torch.optim.Adam"], "RowwiseAdagrad"),
        (["model.sparse_optimizer.lr=1e38"], "no numbers|is nan|is inf"),
        ([f"ckpt_path={checkpoint}"], "last.ckpt has 4 partitions of a table that has 1 here"),
        ([f"ckpt_path={checkpoint}", "strategy.num_partitions=4", "seed=7"], "rows would be assigned to other nodes"),
    ):
        result = gtrain("strategy=pbg", *SMALL, *QUIET, "trainer.max_epochs=3", *overrides, cwd=tmp_path)
        said = result.stdout + result.stderr
        assert result.returncode != 0 and "Traceback" not in said, show(result)
        assert any(part in said for part in message.split("|")), show(result)
    assert there == {path: path.stat().st_mtime_ns for path in checkpoint.iterdir()}


def write_rows(folder: Path, triples: list[str]) -> str:
    folder.mkdir()
    for split, rows in (("train", triples), ("valid", triples[:5]), ("test", triples[:5])):
        (folder / f"{split}.txt").write_text("".join(row + "\n" for row in rows))
    return f"data.path={folder}"


@pytest.mark.slow
def test_a_run_begins_with_what_another_learned(tmp_path: Path) -> None:
    """By name: the other order of the lines gives other ids, other partitions, and there are new names."""
    rng = np.random.default_rng(0)
    old = [f"e{a}\tr{r}\te{b}" for a, b, r in rng.integers([30, 30, 3], size=(300, 3)).tolist()]
    new = [f"new{n}\tr{n % 3}\te{n}" for n in range(5)] + ["e1\tnew relation\te2", *old[::-1]]
    common = ["strategy=pbg", "model=kg", "data=kg", "model.dimension=8", "data.batch_size=50", *QUIET]
    first = write_rows(tmp_path / "old", old)
    ok(gtrain(*common, first, "strategy.num_partitions=2", "trainer.max_epochs=3", f"hydra.run.dir={tmp_path / 'a'}",
              cwd=tmp_path))  # fmt: skip
    more = [*common, write_rows(tmp_path / "new", new), "strategy.num_partitions=4", "strategy.buffer_partitions=2"]
    rates = ["model.sparse_optimizer.lr=0", "model.optimizer.lr=0", "trainer.max_epochs=1"]
    start = [f"strategy.warm_start={tmp_path / 'a'}", f"hydra.run.dir={tmp_path / 'b'}"]
    ok(gtrain(*more, *rates, *start, cwd=tmp_path))
    found = []
    for name, source in (("a", [*common, first, "strategy.num_partitions=2"]), ("b", more)):
        arguments = [f"ckpt_path={tmp_path / name / 'checkpoints' / 'last.ckpt'}", "format=parquet"]
        ok(gtrain("export", *source, *arguments, f"output={tmp_path / name}.parquet", cwd=tmp_path))
        table = pq.read_table(tmp_path / f"{name}.parquet")
        found.append(dict(zip(table["id"].to_pylist(), table["values"].to_pylist(), strict=True)))
    before, after = found
    assert set(after) - set(before) == {f"new{n}" for n in range(5)}
    assert all(after[name] == before[name] for name in before)
    assert all(max(map(abs, after[f"new{n}"])) < 0.01 for n in range(5))  # model.init_scale
