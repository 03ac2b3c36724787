"""Every mistake that only the data or a checkpoint shows: one message, an exit code, nothing left behind."""

from __future__ import annotations

from pathlib import Path

import pytest
from forked import gtrain
from helpers import ok

QUICK = ["trainer.max_epochs=1", "data.num_nodes=60", "data.num_edges=400", "data.num_classes=3"]


def refused(*arguments: str, cwd: Path) -> str:
    """Run a command that must fail as a user's mistake does; returns what it said."""
    done = gtrain(*arguments, cwd=cwd)
    said = done.stdout + done.stderr
    assert done.returncode not in (0, None), said
    assert "Traceback" not in said
    assert done.stderr.count("gtrain: ") == 1 and "HINT: " in done.stderr, said
    stores = cwd / "data" / "stores"
    kept = [p for p in stores.iterdir() if p.suffix != ".lock"] if stores.exists() else []  # of a rank that was killed
    assert not [p for p in kept if not (p / "manifest.json").exists()]
    return done.stderr


@pytest.fixture
def edges(tmp_path: Path) -> Path:
    """A ring of 12 nodes with features and labels."""
    (tmp_path / "edges.tsv").write_text("".join(f"{i}\t{(i + 1) % 12}\n" for i in range(12)))
    (tmp_path / "x.csv").write_text("".join(f"{i},{i % 3}\n" for i in range(12)))
    (tmp_path / "y.txt").write_text("".join(f"{i % 2}\n" for i in range(12)))
    return tmp_path


def edge_list(**more: str) -> list[str]:
    keys = {"path": "edges.tsv", "features": "x.csv", "labels": "y.txt"} | more
    return ["data=edges", "trainer.max_epochs=1", *(f"data.{key}={value}" for key, value in keys.items())]


def test_a_runs_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for setting in (["hydra.run.dir=file"], ["--multirun", "seed=1,2", "hydra.sweep.dir=file"]):
        assert "the run folder cannot be created: [Errno 17] File exists:" in refused(*setting, *QUICK, cwd=tmp_path)


@pytest.mark.parametrize(
    "setting", [["strategy.export=file/tables"], ["strategy.durability=disk", "strategy.folder=file"]]
)
def test_a_folder_of_servers_that_cannot_be_made(setting: list[str], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    said = refused("strategy=ps", "data=planted_sparse", "model=sparse", "trainer.max_epochs=1", *setting, cwd=tmp_path)
    assert f"{setting[-1].partition('=')[0]}: the folder" in said and "cannot be created: " in said


def test_the_edge_list_itself_is_fine(edges: Path) -> None:
    ok(gtrain(*edge_list(), cwd=edges))


def test_a_network_that_replaces_an_option_is_called_by_its_import_path(edges: Path) -> None:
    weighted = "".join(f"{i}\t{(i + 1) % 12}\t{2 - i}\n" for i in range(12))
    (edges / "weighted.tsv").write_text(weighted)
    network = ["strategy=single", "model.hidden_channels=4", "model._target_=torch_geometric.nn."]
    done = ok(gtrain(*edge_list(path="weighted.tsv"), *network[:2], network[2] + "GraphSAGE", cwd=edges))
    assert "model._target_=torch_geometric.nn.GraphSAGE does not read edge_weight" in done.stdout + done.stderr
    said = refused(*edge_list(path="weighted.tsv"), *network[:2], network[2] + "GCN", cwd=edges)
    assert (
        "weighted.tsv, line 4: the weight is -1, and model._target_=torch_geometric.nn.GCN takes weights of 0" in said
    )


def test_features_with_the_wrong_number_of_rows(edges: Path) -> None:
    (edges / "x.csv").write_text("1,2\n" * 15)
    said = refused(*edge_list(), cwd=edges)
    assert "x.csv" in said and "15" in said and "12" in said


def test_an_edge_that_names_a_node_that_does_not_exist(edges: Path) -> None:
    with (edges / "edges.tsv").open("a") as file:
        file.write("3\t99\n")
    said = refused(*edge_list(), cwd=edges)
    assert "99" in said and "13" in said and "edges.tsv" in said  # the node, the line, the file


@pytest.mark.parametrize("label", ["-1", "77", "1.5", "nan"])
def test_a_label_out_of_range(edges: Path, label: str) -> None:
    (edges / "y.txt").write_text("0\n1\n" * 5 + f"1\n{label}\n")
    said = refused(*edge_list(), cwd=edges)
    assert "y.txt" in said or "label" in said


def test_nan_in_features_is_named_with_its_row(edges: Path) -> None:
    rows = [f"{i},1" for i in range(12)]
    rows[7] = "nan,1"
    (edges / "x.csv").write_text("\n".join(rows) + "\n")
    said = refused(*edge_list(), cwd=edges)
    assert "NaN" in said or "nan" in said
    assert "row 7" in said


@pytest.mark.parametrize("key", ["path", "features", "labels"])
def test_a_missing_file_names_the_setting(edges: Path, key: str) -> None:
    said = refused(*edge_list(**{key: "nowhere.tsv"}), cwd=edges)
    assert f"data.{key}=nowhere.tsv" in said


def test_a_missing_data_folder(tmp_path: Path) -> None:
    said = refused("data=planetoid", "data.name=Cora", "data.root=nowhere", cwd=tmp_path)
    assert "nowhere" in said and "ind.cora" in said
    assert not (tmp_path / "nowhere").exists()


def test_more_ranks_than_nodes(tmp_path: Path) -> None:
    said = refused("data.num_nodes=3", "data.num_edges=4", "data.num_classes=2", "trainer.num_nodes=4", cwd=tmp_path)
    assert "4" in said and "3 nodes" in said


def test_a_strategy_that_does_not_serve_the_model_names_those_that_do(tmp_path: Path) -> None:
    said = refused("strategy=sar", "model=mlp", *QUICK, cwd=tmp_path)
    assert "nothing to aggregate" in said and "Strategies that do: " in said and "single" in said


@pytest.mark.parametrize("group", ["model", "data"])
def test_a_class_that_does_not_exist(group: str, tmp_path: Path) -> None:
    said = refused(f"{group}._target_=nowhere.Thing", *QUICK, cwd=tmp_path)
    assert f"{group}._target_=nowhere.Thing was set" in said and "module" in said and "'nowhere'" in said


@pytest.mark.parametrize(
    ("setting", "parts"),
    [
        ("trainer.precision=16-mixed", ["trainer.precision=16-mixed was set", "bf16-mixed and bf16-true"]),
        ("trainer.accumulate_grad_batches=2", ["accumulate_grad_batches=2 was set", "nothing to accumulate"]),
        ("trainer.limit_train_batches=0.5", ["limit_train_batches=0.5 was set", "fraction"]),
        ("data.batch_size=16", ["data.batch_size=16 was set", "whole graph"]),
        ("data.num_parts=3", ["3 parts", "2 ranks"]),
    ],
)
def test_what_sar_cannot_honour_is_refused(tmp_path: Path, setting: str, parts: list[str]) -> None:
    said = refused(setting, *QUICK, cwd=tmp_path)
    for part in parts:
        assert part in said


def test_a_damaged_store_is_named_and_not_loaded(tmp_path: Path) -> None:
    ok(gtrain(*QUICK, cwd=tmp_path))
    (store,) = (tmp_path / "data" / "stores").iterdir()
    damaged = store / "part-1" / "nodes" / "node" / "x.npy"
    content = bytearray(damaged.read_bytes())
    content[-1] ^= 1
    damaged.write_bytes(content)
    said = refused(*QUICK, cwd=tmp_path)
    assert str(damaged.relative_to(store)) in said or "x.npy" in said


def test_a_checkpoint_of_another_model(tmp_path: Path) -> None:
    ok(gtrain(*QUICK, "hydra.run.dir=first", cwd=tmp_path))
    path = "ckpt_path=first/checkpoints/last.ckpt"
    named = refused(*QUICK, "ckpt_path=first", cwd=tmp_path)
    assert "first was set, which is the folder of a run" in named and "/first/checkpoints/last.ckpt" in named
    assert "holds another model" in refused(*QUICK, "model=sage", path, cwd=tmp_path)
    assert "[64] there, [32] here" in refused(*QUICK, "model.hidden_channels=32", path, cwd=tmp_path)


def test_no_run_to_go_on_from(tmp_path: Path) -> None:
    assert "no run under" in refused(*QUICK, "ckpt_path=last", cwd=tmp_path)
    assert "no such checkpoint" in refused(*QUICK, "ckpt_path=nowhere.ckpt", cwd=tmp_path)


def test_a_training_loss_that_is_no_number_ends_the_run(tmp_path: Path) -> None:
    """The first batch's loss is a number, those after it are not: they count, and no checkpoint is written."""
    data = ["data=planted_kg", "data.num_entities=30", "data.num_positions=10", "data.num_triples=250", "model=kg"]
    rates = ["model.sparse_optimizer.lr=1e30", "data.batch_size=50", "trainer.max_epochs=1", "hydra.run.dir=run"]
    said = refused("strategy=single", *data, *rates, cwd=tmp_path)
    assert "the training loss of epoch 0 is nan" in said and "model.sparse_optimizer.lr" in said
    assert not list((tmp_path / "run" / "checkpoints").glob("*.ckpt"))


@pytest.mark.parametrize(
    "setting",
    [
        ["strategy=sar", "model=mlp"],
        ["strategy=ps", "model.hidden_channels=8"],
        ["strategy=single", "trainer.num_nodes=1", "model.optimizer._target_=torch.optim.Adm"],
        ["strategy=sar", "+model.bogus=1"],
        ["strategy=sar", "ckpt_path=nowhere.ckpt"],
    ],
)
def test_what_needs_no_data_is_refused_before_a_store_is_made_and_a_rank_started(
    setting: list[str], tmp_path: Path
) -> None:
    refused(*setting, *QUICK, "hydra.run.dir=run", cwd=tmp_path)
    assert not (tmp_path / "data").exists(), "data were read, and cut"
    assert not (tmp_path / "run" / "logs").exists(), "ranks were started"
